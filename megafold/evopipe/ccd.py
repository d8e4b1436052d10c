"""SMILES of the components of the Chemical Component Dictionary (CCD), made when they are asked for.

The baseline reads a table of all SMILES from a file relative to the working directory, at import, and fails without
it. `install()` puts a lazy mapping there instead: biotite bundles the whole dictionary, and a user may name the
wwPDB's own `components.cif`. Molecules are built from the Kekule bond orders (the dictionary's aromatic flags do not
always kekulize in RDKit), hydrogens dropped.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from functools import lru_cache
from pathlib import Path

from megafold.errors import InputError

_ORDERS = {"SING": 1, "DOUB": 2, "TRIP": 3, "QUAD": 4}


def _smiles(atoms: list[tuple[str, int]], bonds: list[tuple[int, int, int]]) -> str | None:
    """SMILES of heavy atoms (element, charge) and bonds (i, j, Kekule order); None where RDKit refuses the elements."""
    from rdkit import Chem

    orders = {1: Chem.BondType.SINGLE, 2: Chem.BondType.DOUBLE, 3: Chem.BondType.TRIPLE, 4: Chem.BondType.QUADRUPLE}
    molecule, index = Chem.RWMol(), {}
    try:
        for i, (element, charge) in enumerate(atoms):
            if element.upper() in ("H", "D"):
                continue
            atom = Chem.Atom(element.capitalize())
            atom.SetFormalCharge(charge)
            index[i] = molecule.AddAtom(atom)
    except RuntimeError:  # an element symbol such as X, of an unknown atom
        return None
    for i, j, order in bonds:
        if i in index and j in index:
            molecule.AddBond(index[i], index[j], orders[order])
    return Chem.MolToSmiles(molecule)


@lru_cache(maxsize=4096)
def bundled_smiles(component: str) -> str | None:
    """SMILES of a component id such as `ATP` from biotite's dictionary; None for an unknown component."""
    import biotite.structure.info as info
    from biotite.structure import BondType

    order = {
        BondType.DOUBLE: 2,
        BondType.TRIPLE: 3,
        BondType.QUADRUPLE: 4,
        BondType.AROMATIC_DOUBLE: 2,
        BondType.AROMATIC_TRIPLE: 3,
    }
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # components without coordinates: only their atoms and bonds are wanted
            array = info.residue(component, allow_missing_coord=True)
    except KeyError:
        return None
    atoms = [(str(element), int(charge)) for element, charge in zip(array.element, array.charge)]
    return _smiles(atoms, [(int(i), int(j), order.get(BondType(kind), 1)) for i, j, kind in array.bonds.as_array()])


class ComponentSmiles(Mapping[str, str]):
    """Component id -> SMILES, computed on first use.

    Args:
        components: the wwPDB's `components.cif` (or a file with some components); None for biotite's bundled copy.

    Raises:
        InputError: the file is missing or is not a CIF file.
    """

    def __init__(self, components: Path | None = None) -> None:
        self._document, self._known = None, {}
        if components is not None:
            import gemmi

            try:
                self._document = gemmi.cif.read(str(components))
            except (OSError, RuntimeError, ValueError) as error:
                raise InputError(components, "components", f"not a readable CIF file ({error})") from error

    def _find(self, component: str) -> str | None:
        if component not in self._known:
            block = self._document.find_block(component) if self._document is not None else None
            self._known[component] = _block_smiles(block) if block is not None else bundled_smiles(component)
        return self._known[component]

    def __contains__(self, component: object) -> bool:
        return isinstance(component, str) and self._find(component) is not None

    def __getitem__(self, component: str) -> str:
        smiles = self._find(component)
        if smiles is None:
            raise KeyError(component)
        return smiles

    def __iter__(self) -> Iterator[str]:
        import biotite.structure.info as info

        return iter(info.all_residues())

    def __len__(self) -> int:
        return sum(1 for _ in self)


def _block_smiles(block) -> str | None:
    from gemmi import cif

    names, atoms, bonds = {}, [], []
    for name, element, charge in block.find("_chem_comp_atom.", ["atom_id", "type_symbol", "charge"]):
        names[cif.as_string(name)] = len(atoms)
        atoms.append((cif.as_string(element), int(cif.as_number(charge, 0))))
    for first, second, order in block.find("_chem_comp_bond.", ["atom_id_1", "atom_id_2", "value_order"]):
        bonds.append(
            (names[cif.as_string(first)], names[cif.as_string(second)], _ORDERS.get(cif.as_string(order).upper(), 1))
        )
    return _smiles(atoms, bonds)


def install(components: Path | None = None) -> None:
    """Set `alphafold3_pytorch.inputs.CCD_COMPONENTS_SMILES` (imports the package: some 15 seconds)."""
    from alphafold3_pytorch import inputs

    inputs.CCD_COMPONENTS_SMILES = ComponentSmiles(components)
