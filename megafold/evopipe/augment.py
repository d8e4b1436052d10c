"""Which tokens and alignment rows of an entry one training example sees: a pure function of (entry, epoch, seed).

Crops follow AF3 supplement 2.7 (AlphaFold-Multimer algorithms 1 and 2): contiguous, spatial, or spatial around an
interface, with weights 0.2, 0.4, 0.4. The baseline draws them from Python's global generator; here each example has a
generator of its own, so an epoch can be repeated or resumed at any example, with any number of workers.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import numpy as np

from megafold.evopipe.layout import LIGAND, Entry

WEIGHTS = {"contiguous": 0.2, "spatial": 0.4, "interface": 0.4}
INTERFACE_DISTANCE = 15.0  # angstrom, between center atoms of two chains


@dataclass(frozen=True)
class Choice:
    """`keep`: bool [N]; `kind`: the crop's name; `chains`: indices of the chains it is drawn for (-1: none)."""

    keep: np.ndarray
    kind: str
    chains: tuple[int, int]


def generator(entry: str, epoch: int, seed: int, purpose: str) -> np.random.Generator:
    """The random numbers of one example; equal on every machine and in every process."""
    state = hashlib.sha256(f"{entry}|{epoch}|{seed}|{purpose}".encode()).digest()
    return np.random.Generator(np.random.Philox(key=int.from_bytes(state[:16], "little")))


def choose_crop(
    entry: Entry, crop_size: int, *, epoch: int, seed: int, weights: dict[str, float] | None = None
) -> Choice:
    """Choose at most `crop_size` tokens.

    A structure that fits is kept whole. A spatial crop is drawn around a token of a chosen chain, an interface crop
    around a token within 15 angstrom of another chain; where there is no second chain the weight of the interface
    crop goes to the spatial one.

    Args:
        entry: the uncropped structure.
        crop_size: tokens, at least 1.
        weights: of `contiguous`, `spatial`, `interface`; AF3's by default.
    """
    tokens, rng = entry.arrays["tokens"], generator(entry.name, epoch, seed, "crop")
    chain = tokens["chain"]
    present = np.unique(chain)
    polymers = np.unique(chain[tokens["kind"] < LIGAND])
    polymers = polymers if len(polymers) else present
    interface = _interface_tokens(tokens) if len(present) > 1 else np.zeros(0, int)
    weight = dict(WEIGHTS if weights is None else weights)
    if not len(interface):
        weight["spatial"] = weight.get("spatial", 0.0) + weight.pop("interface", 0.0)
    kinds = [kind for kind in WEIGHTS if weight.get(kind, 0.0) > 0]
    share = np.array([weight[kind] for kind in kinds])
    kind = kinds[int(rng.choice(len(kinds), p=share / share.sum()))]
    if kind == "interface":
        center = int(rng.choice(interface))
        partner = _nearest_other_chain(tokens, center)
        chains = (int(chain[center]), partner)
    else:
        one = int(rng.choice(polymers))
        center, chains = int(rng.choice(np.flatnonzero(chain == one))), (one, -1)
    if len(tokens) <= crop_size:
        return Choice(np.ones(len(tokens), bool), "whole", chains)
    keep = contiguous(chain, crop_size, rng) if kind == "contiguous" else spatial(tokens, center, crop_size)
    inside = np.unique(chain[keep])
    kept = tuple(one if one in inside else -1 for one in chains)
    return Choice(keep, kind, kept if any(one >= 0 for one in kept) else (int(inside[0]), -1))


def contiguous(chain: np.ndarray, crop_size: int, rng: np.random.Generator) -> np.ndarray:
    """AlphaFold-Multimer algorithm 1: a run of tokens of each chain, chains in random order. bool [N]."""
    keep, added = np.zeros(len(chain), bool), 0
    present = np.unique(chain)
    sizes = {one: int((chain == one).sum()) for one in present}
    remaining = len(chain)
    for one in rng.permutation(present):
        size = sizes[one]
        remaining -= size
        largest = min(crop_size - added, size)
        smallest = min(size, max(0, crop_size - added - remaining))
        length = int(rng.integers(smallest, largest + 1))
        start = int(rng.integers(0, size - length + 1))
        keep[np.flatnonzero(chain == one)[start : start + length]] = True
        added += length
    return keep


def spatial(tokens: np.ndarray, center: int, crop_size: int) -> np.ndarray:
    """AlphaFold-Multimer algorithm 2: the tokens nearest to a token; ties go to the earlier one. bool [N]."""
    position = tokens["crop_position"].astype(np.float64)
    distance = np.linalg.norm(position - position[center], axis=-1) + 1e-3 * np.arange(len(tokens))
    distance[center] = -1.0
    keep = np.zeros(len(tokens), bool)
    keep[np.argsort(distance, kind="stable")[:crop_size]] = True
    return keep


def _interface_tokens(tokens: np.ndarray) -> np.ndarray:
    """Tokens within 15 angstrom of a token of another chain; a grid search, because N^2 distances may not fit."""
    from scipy.spatial import cKDTree

    position, chain = tokens["crop_position"], tokens["chain"]
    found = np.zeros(len(tokens), bool)
    for one in np.unique(chain):
        mine = chain == one
        nearest, _ = cKDTree(position[~mine]).query(position[mine], distance_upper_bound=INTERFACE_DISTANCE)
        found[mine] = np.isfinite(nearest)
    return np.flatnonzero(found)


def _nearest_other_chain(tokens: np.ndarray, center: int) -> int:
    other = np.flatnonzero(tokens["chain"] != tokens["chain"][center])
    distance = np.linalg.norm(tokens["crop_position"][other] - tokens["crop_position"][center], axis=-1)
    return int(tokens["chain"][other[distance.argmin()]])


def choose_rows(entry: str, available: int, wanted: int, *, epoch: int, seed: int) -> np.ndarray:
    """Alignment rows of one example, ascending, int64 [min(available, wanted)]: the query and a random rest."""
    if available <= wanted:
        return np.arange(available)
    rng = generator(entry, epoch, seed, "msa")
    return np.r_[0, np.sort(rng.choice(np.arange(1, available), size=wanted - 1, replace=False))]
