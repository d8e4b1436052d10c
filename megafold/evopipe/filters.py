"""Chains that AF3's data section leaves out of an assembly, besides clashing ones (supplement 2.5.4).

A protein chain of which consecutive residues are more than 10 angstrom apart (C alpha to C alpha) is broken. Of an
assembly of more than 20 chains the 20 nearest to a token of an interface stay; the token is random in AF3 and here, but
the same for an entry on every machine and in every build.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from megafold.evopipe.residues import Residue

LONGEST_STEP = 10.0  # angstrom
INTERFACE = 15.0  # angstrom, between center atoms of tokens of two chains
CENTERS = ("CA", "C1'", "C1*")  # of amino acids and of nucleotides


def broken(residues: Sequence[Residue]) -> str:
    """Where a protein chain is broken, in words; "" where it is not.

    Residues are consecutive by their places in the sequence and, where the author numbered them, by those numbers: a
    loop that is not resolved is no break.
    """
    previous: tuple[Residue, np.ndarray] | None = None
    for residue in residues:
        place = next((np.array(atom[2]) for atom in residue.atoms if atom[0] == "CA"), None)
        if place is None or not residue.polymer:
            previous = None
            continue
        if previous is not None and _follows(residue, previous[0]):
            step = float(np.linalg.norm(place - previous[1]))
            if step > LONGEST_STEP:
                return f"{step:.1f} angstrom between residues {previous[0].author_number} and {residue.author_number}"
        previous = residue, place
    return ""


def _follows(residue: Residue, previous: Residue) -> bool:
    pairs = [(previous.number, residue.number)]
    if not residue.insertion and not previous.insertion:
        pairs.append((previous.author_number, residue.author_number))
    numbers = [(int(a), int(b)) for a, b in pairs if _is_number(a) and _is_number(b)]
    return bool(numbers) and all(b == a + 1 for a, b in numbers)


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdigit()


def centers(residues: Sequence[Residue]) -> list[tuple[float, float, float]]:
    """Center atoms of the tokens: one of a residue of a polymer, every atom of anything else."""
    found = []
    for residue in residues:
        named = [atom[2] for atom in residue.atoms if atom[0] in CENTERS] if residue.polymer else []
        found += named[:1] or [atom[2] for atom in residue.atoms]
    return found


def nearest_chains(places: Mapping[str, np.ndarray], name: str, most: int) -> list[str]:
    """The `most` chains nearest to a token of an interface.

    Args:
        places: chain id -> center atoms, float64 [tokens, 3], angstrom.
        name: the entry's id, which decides the token.
        most: chains to keep.
    """
    from scipy.spatial import cKDTree

    ids = sorted(places)
    everything = np.concatenate([places[id] for id in ids])
    owner = np.repeat(np.arange(len(ids)), [len(places[id]) for id in ids])
    touching = np.zeros(len(owner), bool)
    for number in range(len(ids)):
        mine = owner == number
        distance, _ = cKDTree(everything[~mine]).query(everything[mine], distance_upper_bound=INTERFACE)
        touching[mine] = np.isfinite(distance)
    candidates = np.flatnonzero(touching if touching.any() else np.ones(len(owner), bool))
    rng = np.random.default_rng(int.from_bytes(hashlib.sha256(f"{name}|chains".encode()).digest()[:16], "little"))
    token = everything[candidates[int(rng.integers(len(candidates)))]]
    distance = np.linalg.norm(everything - token, axis=-1)
    nearest = [float(distance[owner == number].min(initial=np.inf)) for number in range(len(ids))]
    return sorted(sorted(ids, key=lambda id: (nearest[ids.index(id)], id))[:most])
