"""What choosing and featurising a crop looks up, computed once, when an entry is stored.

All of it is a function of the structure, and a crop gives the same result without it: it takes longer then, because
interfaces and the neighbours of ligand atoms have to be found again for each example.
"""

from __future__ import annotations

import numpy as np

from megafold.evopipe import augment, layout

NEIGHBOURS = 16  # kept of each atomised token: a crop drops some of them, and needs three
PAIRS = 1 << 22  # of tokens whose distances are in memory at once


def compute(tokens: np.ndarray) -> dict[str, np.ndarray]:
    """The arrays of `layout.SHORTCUTS` for a table of tokens (`layout.TOKEN`)."""
    pairs = augment.touching_chains(tokens)
    interfaces = [augment.interface_places(tokens, pair) for pair in pairs]
    frame_tokens = np.flatnonzero(tokens["kind"] >= layout.FIRST_ATOMISED)
    made = {
        "chain_types": np.array(augment.chain_types(tokens)).reshape(-1, 2),
        "pairs": np.array(pairs).reshape(-1, 2),
        "pair_starts": np.cumsum([0, *map(len, interfaces)]),
        "pair_places": np.concatenate([np.zeros(0, int), *interfaces]),
        "frame_tokens": frame_tokens,
        "frame_nearest": _nearest_of_chain(tokens, frame_tokens),
    }
    return {name: made[name].astype(dtype) for name, dtype in layout.SHORTCUTS.items()}


def _nearest_of_chain(tokens: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """Resolved tokens of the same chain, the nearest center atom first, without the token itself."""
    found = np.full((len(wanted), NEIGHBOURS), -1)
    chain, where = tokens["chain"], tokens["center_position"].astype(np.float64)
    for one in np.unique(chain[wanted]):
        others = np.flatnonzero((chain == one) & tokens["center_resolved"])
        mine = np.flatnonzero(chain[wanted] == one)
        step = max(1, PAIRS // max(1, len(others)))
        for rows in (mine[first : first + step] for first in range(0, len(mine), step)):
            squares = ((where[wanted[rows], None] - where[others]) ** 2).sum(axis=-1)
            squares[wanted[rows, None] == others] = np.inf
            order = np.argsort(squares, axis=-1, kind="stable")[:, :NEIGHBOURS]
            near = np.where(np.isfinite(np.take_along_axis(squares, order, axis=-1)), others[order], -1)
            found[rows, : near.shape[1]] = near
    return found
