"""RDKit molecules of atomised residues (ligands, ions, modified residues), made the way the baseline makes them.

The baseline also embeds a random conformer of each component (`EmbedMultipleConfs`, unseeded), only to take the bond
orders from it: the coordinates are discarded. Here the embedding is skipped. The bond orders are the same, the result
no longer depends on a random number generator, and the embeddings that never end cannot happen.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import NamedTuple

import numpy as np


class Atomised(NamedTuple):
    """Atom features [atoms, 3] (formal charge, implicit and explicit valence; int8) and bonds [bonds, 2] (int32)."""

    features: np.ndarray
    bonds: np.ndarray


def canonical(smiles: str):
    """The component's molecule, without a conformer. Raises whatever RDKit raises for a SMILES that it refuses."""
    from rdkit import Chem

    return Chem.RemoveHs(Chem.AddHs(Chem.MolFromSmiles(smiles)))


@contextmanager
def no_embedding():
    """Inside, the baseline's `mol_from_smile` makes no conformer."""
    from alphafold3_pytorch import inputs

    stock, inputs.mol_from_smile = inputs.mol_from_smile, canonical
    try:
        yield
    finally:
        inputs.mol_from_smile = stock


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
