"""Chains of an assembly that cannot both be there: AF3 supplement 2.5.4, filtering of bioassemblies.

A chain clashes when more than 30 % of its atoms are within 1.7 angstrom of an atom of another chain. Of two clashing
chains the one with the larger share of clashing atoms goes; of equal shares the one with fewer atoms; of equal sizes
the one whose id sorts last. A chain is what the wwPDB calls one (`label_asym_id`, and its copy): a ligand is a chain.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

DISTANCE = 1.7  # angstrom
SHARE = 0.3


def clashing(places: Mapping[str, np.ndarray]) -> list[tuple[str, str, float]]:
    """Chains to remove: (chain, the chain that it clashes with, share of its atoms in the clash), the worst first.

    Args:
        places: chain id -> coordinates [atoms, 3], angstrom.
    """
    from scipy.spatial import cKDTree

    ids = list(places)
    sizes = np.array([len(places[id]) for id in ids])
    owner = np.repeat(np.arange(len(ids)), sizes)
    if len(ids) < 2:
        return []
    close = cKDTree(np.concatenate([places[id] for id in ids])).query_pairs(DISTANCE, output_type="ndarray")
    close = close[owner[close[:, 0]] != owner[close[:, 1]]]
    ends = np.concatenate([close, close[:, ::-1]])
    # an atom counts once for each other chain, however many of that chain's atoms are near it
    touching = np.unique(np.stack([owner[ends[:, 0]], owner[ends[:, 1]], ends[:, 0]], axis=-1), axis=0)
    pairs, counts = np.unique(touching[:, :2], axis=0, return_counts=True)
    shares = {(int(a), int(b)): count / sizes[a] for (a, b), count in zip(pairs, counts)}

    def worst_first(pair: tuple[int, int]):
        a, b = pair
        return -max(shares[a, b], shares[b, a]), ids[a], ids[b]

    removed: dict[int, tuple[str, str, float]] = {}
    for a, b in sorted(
        ((a, b) for a, b in shares if a < b and max(shares[a, b], shares[b, a]) > SHARE), key=worst_first
    ):
        if a in removed or b in removed:
            continue
        loser = max((shares[a, b], -sizes[a], ids[a], a), (shares[b, a], -sizes[b], ids[b], b))[-1]
        winner = b if loser == a else a
        removed[loser] = ids[loser], ids[winner], float(shares[loser, winner])
    return list(removed.values())
