"""An assembly's mmCIF text -> the arrays of tokens, residues, atoms and bonds, through the baseline's own functions."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from megafold.errors import InputError
from megafold.evopipe import layout, molecules
from megafold.evopipe.report import EntryError, Log, listed
from megafold.evopipe.unresolved import complete

NAMELESS = (-(10**9), "")  # an unresolved residue: no bond of the file can be meant for it


class Structure(NamedTuple):
    """The baseline's `Biomolecule`, two facts of the file's header, each chain's full sequence, and its tokens' names.

    `sequences`: chain -> (one-letter sequence with the unresolved residues, which of them are resolved).
    `names`: per token (its residue's number in the file, the atom's name there; "" for a polymer residue).
    `ligand`: per token, is it written as a ligand (HETATM)? A free amino acid is one, of a polymer's component.
    """

    biomolecule: Any
    resolution: float | None
    released: str
    sequences: dict[str, tuple[str, list[bool]]]
    names: list[tuple[int, str]]
    ligand: np.ndarray


def parse(text: str, name: str, file: str, log: Log | None = None, *, unresolved: bool = True) -> Structure:
    """Parse one assembly with the baseline's parser.

    Args:
        text: mmCIF text.
        name: entry id.
        file: for messages.
        log: where unresolved residues, and atoms that the baseline has no place for, are told.
        unresolved: keep unresolved residues as tokens (`megafold.evopipe.unresolved`); the baseline drops them.

    Raises:
        InputError: the text is truncated, is no mmCIF file, or holds no chain with coordinates.
    """
    from alphafold3_pytorch.common.biomolecule import _from_mmcif_object
    from alphafold3_pytorch.data import mmcif_parsing
    from alphafold3_pytorch.utils.data_utils import extract_mmcif_metadata_field

    log = log or Log(file, name)
    result = mmcif_parsing.parse.__wrapped__(file_id=name, mmcif_string=text)  # its cache would keep 16 whole files
    if result.mmcif_object is None:
        reason = next(iter(result.errors.values()), "no chains found")
        raise EntryError(file, "atom_site", f"the mmCIF file cannot be parsed ({type(reason).__name__}: {reason})")
    try:
        biomolecule = _from_mmcif_object(result.mmcif_object)
    except (AssertionError, IndexError, KeyError, ValueError) as error:
        raise EntryError(file, "atom_site", f"no model can be read ({error})") from error
    if not len(biomolecule.chain_id):
        raise EntryError(file, "atom_site", "no residue with coordinates", code="no atoms")
    _tell_unplaced(result.mmcif_object.structure, biomolecule, log)
    names, ligand = _names(result.mmcif_object.structure, biomolecule)
    if unresolved:
        biomolecule, origin = complete(result.mmcif_object, biomolecule, log)
        names = [names[row] if row >= 0 else NAMELESS for row in origin]
        ligand = np.where(origin >= 0, ligand[origin], False)
    released = extract_mmcif_metadata_field(result.mmcif_object, "release_date")
    if released is None:
        raise InputError(file, "_pdbx_audit_revision_history.revision_date", "missing; the release date is needed")
    resolution = extract_mmcif_metadata_field(result.mmcif_object, "resolution")
    return Structure(biomolecule, resolution, released, _sequences(result.mmcif_object), names, ligand)


def _names(model, biomolecule) -> tuple[list[tuple[int, str]], np.ndarray]:
    """What the file calls each token of a `Biomolecule` made from `model` (the baseline keeps elements only), and
    whether it is written as a ligand."""
    numbers = {(chain.id, i): residue for chain in model for i, residue in enumerate(chain, 1)}
    names, ligand, atoms = [], [], iter(())
    last, standard = None, _standard_residues()
    for chain, index in zip(biomolecule.chain_id.tolist(), biomolecule.residue_index.tolist()):
        residue = numbers[chain, index]
        ligand.append(residue.id[0] != " ")
        if residue.resname in standard:
            names.append((residue.id[1], ""))
            continue
        if last != (chain, index):
            last, atoms = (chain, index), iter(residue)
        names.append((residue.id[1], next(atoms).name))
    return names, np.array(ligand)


def _standard_residues() -> dict[str, set[str]]:
    """Component -> atom names that the baseline has a place for, of the residues that it does not take apart."""
    from alphafold3_pytorch.common import amino_acid_constants, dna_constants, rna_constants

    polymers = (amino_acid_constants, rna_constants, dna_constants)
    return {
        name: constants.atom_types_set
        for constants in polymers
        for name, letter in constants.restype_3to1.items()
        if letter != "X"
    }


def _tell_unplaced(model, biomolecule, log: Log) -> None:
    """Atoms that the baseline has no place for: terminal OXT, OP3, and names that the dictionary does not have."""
    if sum(1 for _ in model.get_atoms()) == int(biomolecule.atom_mask.sum()):
        return
    known = _standard_residues()
    names = [
        atom.name
        for residue in model.get_residues()
        for atom in residue
        if atom.name not in known.get(residue.resname, {atom.name})
    ]
    log.note("atoms without a place", f"atoms that the baseline does not represent: {listed(names)}")


def _sequences(mmcif_object) -> dict[str, tuple[str, list[bool]]]:
    from alphafold3_pytorch.utils.data_utils import is_polymer

    sequences = {}
    for chain, letters in mmcif_object.chain_to_seqres.items():
        components, places = mmcif_object.all_chem_comp_details[chain], mmcif_object.seqres_to_structure[chain]
        polymer = [i for i, component in enumerate(components) if is_polymer(component.type)]
        sequences[chain] = ("".join(letters[i] for i in polymer), [not places[i].is_missing for i in polymer])
    return sequences


def arrays(structure: Structure, file: str, log: Log | None = None) -> tuple[dict[str, np.ndarray], dict[str, str]]:
    """Arrays of the uncropped structure (all but the alignment and the templates), and SMILES of its components.

    Raises:
        InputError: a residue that the baseline cannot represent (names the residue).
    """
    from alphafold3_pytorch import inputs

    biomolecule = structure.biomolecule
    table = {component.id: component for component in biomolecule.chem_comp_table}
    sequences, types = inputs.extract_chain_sequences_from_biomolecule_chemical_components(
        biomolecule, [table[component] for component in biomolecule.chemid]
    )
    try:
        with molecules.bounded(log):
            mols, kinds = inputs.extract_canonical_molecules_from_biomolecule_chains(
                _with_one_atom(biomolecule), sequences, types
            )
    except (AssertionError, ValueError, KeyError, IndexError) as error:
        action = "name a file with the component's definition in data.components, or remove the residue"
        problem = f"a residue cannot be represented ({error})"
        raise EntryError(file, "atom_site", problem, action, "unknown component") from error
    components, component = np.unique(biomolecule.chemid.astype("S8"), return_inverse=True)
    tokens, residues = _tokens(biomolecule, mols, kinds, component, file)
    for mol, first in zip(mols, residues["first_token"]):
        if not biomolecule.atom_mask[first].any():
            mol.SetProp("missing_atom_indices", ",".join(map(str, range(mol.GetNumAtoms()))))
    atoms, bonds = _atoms(mols, tokens, residues)
    links, link_tokens = _links(biomolecule, structure.names)
    _set_crop_positions(tokens, atoms)
    smiles = {
        id: inputs.CCD_COMPONENTS_SMILES[id]
        for id in {mol.GetProp("_Name") for mol, kind in zip(mols, kinds) if inputs.is_atomized_residue(kind)}
    }
    named = {"tokens": tokens, "residues": residues, "atoms": atoms, "bonds": bonds}
    return named | {"links": links, "link_tokens": link_tokens, "components": components}, smiles


def _with_one_atom(biomolecule):
    """The baseline fails on a residue without any atom: here such a residue gets one (CA or C1'), in the origin."""
    from alphafold3_pytorch.common.biomolecule import get_residue_constants

    mask = biomolecule.atom_mask.copy()
    for row in np.flatnonzero(~mask.any(axis=-1)):
        constants = get_residue_constants(res_chem_index=int(biomolecule.chemtype[row]))
        mask[row, constants.res_rep_atom_index] = 1
    return replace(biomolecule, atom_mask=mask)


def _tokens(biomolecule, mols, kinds, component, file) -> tuple[np.ndarray, np.ndarray]:
    from alphafold3_pytorch import inputs

    tables = {"protein": inputs.HUMAN_AMINO_ACIDS, "rna": inputs.RNA_NUCLEOTIDES, "dna": inputs.DNA_NUCLEOTIDES}
    pairs = np.stack([biomolecule.chain_index, biomolecule.residue_index], axis=-1)
    starts = np.flatnonzero(np.r_[True, (pairs[1:] != pairs[:-1]).any(axis=-1)])
    counts = np.diff(np.r_[starts, len(pairs)])
    if len(starts) != len(mols):
        raise InputError(file, "atom_site", f"{len(starts)} residues but {len(mols)} molecules")
    tokens, residues = np.zeros(len(pairs), layout.TOKEN), np.zeros(len(mols), layout.RESIDUE)
    tokens["residue"] = np.repeat(np.arange(len(mols)), counts)
    tokens["residue_index"], tokens["chain"] = biomolecule.residue_index, biomolecule.chain_index
    tokens["component"], tokens["molecule_id"] = component, biomolecule.restype
    first_atom = 0
    for r, (mol, kind, start, count) in enumerate(zip(mols, kinds, starts, counts)):
        atomised = inputs.is_atomized_residue(kind)
        n_atoms = mol.GetNumAtoms()
        if atomised and n_atoms != count:
            where = (
                f"{biomolecule.chemid[start]} {biomolecule.residue_index[start]} of chain {biomolecule.chain_id[start]}"
            )
            problem = f"{count} atoms in the file, {n_atoms} without hydrogens: remove hydrogens"
            raise EntryError(file, where, problem, "remove hydrogens from the file", "hydrogens")
        span = slice(start, start + count)
        tokens["kind"][span] = layout.KINDS.index(kind)
        letter = 0
        if atomised:
            constants = inputs.get_residue_constants(kind.replace("protein", "peptide").replace("mod_", ""))
            center = biomolecule.atom_mask[span].astype(bool).argmax(axis=-1)
            tokens["center"][span] = center
            tokens["element"][span] = [constants.element_types[i].replace("ATM", "*").encode() for i in center]
        else:
            symbol = mol.GetProp("_Name")
            entry, letter = tables[kind][symbol], ord(symbol)
            tokens["center"][span], tokens["distogram"][span] = (
                entry["token_center_atom_idx"],
                entry["distogram_atom_idx"],
            )
            tokens["frame"][span] = entry["three_atom_indices_for_frame"]
        residues[r] = (start, count, first_atom, n_atoms, component[start], layout.KINDS.index(kind), letter)
        first_atom += n_atoms
    rows, center = np.arange(len(tokens)), tokens["center"].astype(int)
    tokens["center_position"] = biomolecule.atom_positions[rows, center].astype(np.float32)
    tokens["center_resolved"] = biomolecule.atom_mask[rows, center].astype(bool)
    return tokens, residues


def _atoms(mols, tokens, residues) -> tuple[np.ndarray, np.ndarray]:
    atoms, bonds = np.zeros(int(residues["atoms"].sum()), layout.ATOM), []
    for mol, residue in zip(mols, residues):
        described, first = molecules.describe(mol), residue["first_token"]
        span = slice(residue["first_atom"], residue["first_atom"] + residue["atoms"])
        atoms["position"][span] = mol.GetConformer().GetPositions().astype(np.float32)
        atoms["features"][span] = described.features
        missing = [int(i) for i in mol.GetProp("missing_atom_indices").split(",") if i]
        atoms["missing"][span][missing] = True
        if residue["kind"] >= layout.FIRST_ATOMISED:
            atoms["token"][span] = np.arange(first, first + residue["tokens"])
            bonds.append(described.bonds + first)
        else:
            atoms["token"][span] = first
    pairs = np.concatenate([*bonds, np.zeros((0, 2), np.int32)])
    table = np.zeros(len(pairs), layout.BOND)
    table["first"], table["second"] = pairs.T
    return atoms, table


def _links(biomolecule, names: list[tuple[int, str]]) -> tuple[np.ndarray, np.ndarray]:
    """The `_struct_conn` bonds that the baseline would install, each with the tokens that its atoms may denote.

    The baseline looks a bond's author residue number up among its own, renumbered residues. That finds another residue
    (or none) where a chain's numbering does not start at 1; it also knows a ligand's atoms by their elements only. This
    is kept as it is, because the features must be equal; the right tokens are kept beside it.
    """
    from alphafold3_pytorch import inputs
    from alphafold3_pytorch.data.mmcif_parsing import _is_set

    polymer_names = {
        name
        for constants in (inputs.amino_acid_constants, inputs.rna_constants, inputs.dna_constants)
        for name in constants.restype_3to1
    }
    keys: dict[str, int] = {}
    rows, candidates, total = [], [], 0
    exact = {(chain, *name): i for i, (chain, name) in enumerate(zip(biomolecule.chain_id.tolist(), names))}
    for bond in biomolecule.bonds:
        polymer = bond.ptnr1_auth_comp_id in polymer_names, bond.ptnr2_auth_comp_id in polymer_names
        close = _is_set(bond.pdbx_dist_value) and float(bond.pdbx_dist_value) < 2.4
        if all(polymer) and not close:
            continue
        row = []
        for chain, number, atom, is_polymer in (
            (bond.ptnr1_auth_asym_id, bond.ptnr1_auth_seq_id, bond.ptnr1_label_atom_id, polymer[0]),
            (bond.ptnr2_auth_asym_id, bond.ptnr2_auth_seq_id, bond.ptnr2_label_atom_id, polymer[1]),
        ):
            found = np.zeros(0, np.int32)
            if number.lstrip("+-").isdigit():
                found = (biomolecule.chain_id == chain) & (biomolecule.residue_index == int(number))
                found = np.flatnonzero(found if is_polymer else found & (biomolecule.atom_name == atom))
            place = int(number) if number.lstrip("+-").isdigit() else NAMELESS[0]
            token = exact.get((chain, place, ""), exact.get((chain, place, atom), -1))
            row += [keys.setdefault(f"{chain}:{number}:{atom}", len(keys)), total, len(found), token]
            candidates.append(found)
            total += len(found)
        rows.append(tuple(row))
    return np.array(rows, layout.LINK), np.concatenate([np.zeros(0, "<i4"), *candidates]).astype("<i4")


def _set_crop_positions(tokens: np.ndarray, atoms: np.ndarray) -> None:
    """Where a token is, for spatial crops: its center atom, or the mean of what is resolved when that is missing.

    A residue without any atom is nowhere: infinity (which, unlike NaN, is equal to itself).
    """
    tokens["crop_position"] = tokens["center_position"]
    for token in np.flatnonzero(~tokens["center_resolved"]):
        mine = atoms[(atoms["token"] == token) & ~atoms["missing"]]
        tokens["crop_position"][token] = mine["position"].mean(axis=0) if len(mine) else np.inf
