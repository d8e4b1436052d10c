"""RDKit molecules of atomised residues (ligands, ions, modified residues), made the way the baseline makes them.

The baseline also embeds a random conformer of each component (`EmbedMultipleConfs`, unseeded), only to take the bond
orders from it: the coordinates are discarded. Here nothing is embedded. The bond orders are the same, the result no
longer depends on a random number generator, and embeddings that never end cannot happen.

The other step that may not end is the search for bond orders that suit the coordinates (cardiolipin, CDL, takes longer
than anybody has waited). It is limited by a number of iterations rather than by a clock, so that the result does not
depend on the machine; where the limit is reached, the bonds found by distance get the orders of the component's
definition, and the entry says so. Every molecule that needs fewer iterations is the baseline's, bit for bit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import NamedTuple

import numpy as np

from megafold.evopipe.report import Log, listed

MAX_ITERATIONS = 20_000  # of the search for bond orders: at most some 5 s for the largest components
LIMIT_REACHED = "Max Iterations Exceeded"


class Atomised(NamedTuple):
    """Atom features [atoms, 3] (formal charge, implicit and explicit valence; int8) and bonds [bonds, 2] (int32)."""

    features: np.ndarray
    bonds: np.ndarray


def canonical(smiles: str):
    """The component's molecule, without a conformer. Raises whatever RDKit raises for a SMILES that it refuses."""
    from rdkit import Chem

    return Chem.RemoveHs(Chem.AddHs(Chem.MolFromSmiles(smiles)))


@contextmanager
def bounded(log: Log | None = None) -> Iterator[None]:
    """Inside, the baseline's functions embed no conformer and end their search for bond orders.

    Args:
        log: where components are told whose bond orders are not the baseline's, or not their definition's.
    """
    from alphafold3_pytorch import inputs
    from rdkit.Chem import AllChem, rdDetermineBonds

    unended: Counter[str] = Counter()
    unassigned: Counter[str] = Counter()

    def determine(molecule, **options) -> None:
        try:
            rdDetermineBonds.DetermineBonds(molecule, maxIterations=MAX_ITERATIONS, **options)
        except RuntimeError as error:
            unended[molecule.GetProp("_Name")] += LIMIT_REACHED in str(error)
            raise

    def assign(template, molecule):
        try:
            return AllChem.AssignBondOrdersFromTemplate(template, molecule)
        except Exception:  # the baseline keeps the perceived molecule when RDKit cannot match it, whatever the reason
            unassigned[molecule.GetProp("_Name")] += 1
            raise

    replaced = {
        "mol_from_smile": canonical,
        "rdDetermineBonds": SimpleNamespace(DetermineBonds=determine),
        "AllChem": SimpleNamespace(AssignBondOrdersFromTemplate=assign),
    }
    stock = {name: getattr(inputs, name) for name in replaced}
    for name, value in replaced.items():
        setattr(inputs, name, value)
    try:
        yield
    finally:
        for name, value in stock.items():
            setattr(inputs, name, value)
    if log is not None and +unended:
        reason = f"the search for bond orders was ended, those of the definition are used: {listed(unended.elements())}"
        log.changed("bond orders", reason)
    if log is not None and unassigned:
        reason = f"the definition does not fit the atoms, perceived bonds are used: {listed(unassigned.elements())}"
        log.note("bond orders of the coordinates", reason)


def describe(molecule) -> Atomised:
    """Features and bonds of an RDKit molecule."""
    features = [(a.GetFormalCharge(), a.GetImplicitValence(), a.GetExplicitValence()) for a in molecule.GetAtoms()]
    bonds = [(bond.GetBeginAtomIdx(), bond.GetEndAtomIdx()) for bond in molecule.GetBonds()]
    return Atomised(np.array(features, np.int8).reshape(-1, 3), np.array(bonds, np.int32).reshape(-1, 2))


def atomised(component: str, smiles: str | None, positions: np.ndarray, elements: list[str]) -> Atomised:
    """Perceive bonds from the positions [atoms, 3] (angstrom) and take the bond orders from the component's SMILES.

    A crop may keep a part of a ligand. The baseline then perceives the bonds of that part alone, so this is the one
    piece of chemistry that is left to the reader of a cached entry.
    """
    from alphafold3_pytorch import inputs
    from rdkit.Chem import AllChem

    with bounded():
        molecule = inputs.create_mol_from_atom_positions_and_types(
            name=component,
            atom_positions=positions.astype(np.float64),
            element_types=elements,
            missing_atom_indices=set(),
        )
    try:
        molecule = AllChem.AssignBondOrdersFromTemplate(canonical(smiles), molecule)
    except Exception:  # the baseline keeps the perceived molecule when RDKit cannot match it, whatever the reason
        return describe(molecule)
    return describe(molecule)
