"""What is random about a training example: a pure function of (entry, epoch, seed), distributed as in the baseline.

The baseline draws from Python's, numpy's and torch's global generators. Here each example has generators of its own, so
that an epoch can be repeated, or resumed at any example, with any number of workers. Statistical tests compare every
choice with the baseline's own functions: the chain or interface that a crop is drawn for (`WeightedPDBSampler`), the
kind of crop and its tokens (`Biomolecule.crop`), the alignment rows (`MSAModule`), the rigid motion of each copy of the
structure (`CentreRandomAugmentation`). What a reader would take for mistakes is repeated on purpose and says so.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from megafold.evopipe.layout import FIRST_ATOMISED, KINDS, LIGAND, Entry

WEIGHTS = {"contiguous": 0.2, "spatial": 0.4, "interface": 0.4}  # AF3 supplement 2.7
INTERFACE_DISTANCE = 15.0  # angstrom, between center atoms of two chains
MAX_PAIRS = 1 << 20  # of tokens whose distances are computed at once
CHAIN_WEIGHT, INTERFACE_WEIGHT = 0.5, 1.0  # AF3 supplement 2.5.1: beta
TYPE_WEIGHTS = {"protein": 3.0, "rna": 3.0, "dna": 3.0, "ligand": 1.0}  # alpha


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
    entry: Entry,
    crop_size: int,
    *,
    epoch: int,
    seed: int,
    weights: dict[str, float] | None = None,
    chains: tuple[int, int] | None = None,
    sampled: Mapping[tuple[int, int], float] | None = None,
) -> Choice:
    """Choose at most `crop_size` tokens.

    First the chain or the interface that the example is about, then the kind of crop: contiguous, spatial (around a
    token of the chosen chains) or, for an interface, spatial around a token of it. A structure that fits is kept whole.

    Args:
        entry: the uncropped structure.
        crop_size: tokens, at least 1.
        weights: of `contiguous`, `spatial`, `interface`; AF3's by default.
        chains: the chain (and -1) or the two chains of the example; None to choose them.
        sampled: weights to choose them with (`clusters.Clusters.of`); by default, or where there are none, those of a
            data set in which every chain and every interface is a cluster of its own.
    """
    tokens, rng = entry.arrays["tokens"], generator(entry.name, epoch, seed, "crop")
    weight, known = WEIGHTS if weights is None else weights, entry.shortcuts
    if chains is None:
        if sampled:
            items, share = list(sampled), np.array(list(sampled.values()))
        else:
            items, share = chain_weights(tokens) if known is None else _known_weights(known)
        chains = _choose_chains(items, share, rng, pairs_only=set(weight) == {"interface"})
    kind = _choose_kind(weight, pair=chains[1] >= 0, rng=rng)
    if len(tokens) <= crop_size:
        return Choice(np.ones(len(tokens), bool), "whole", chains)
    if kind == "contiguous":
        keep = contiguous(tokens["chain"], crop_size, rng)
    else:
        near = None
        if kind == "interface":
            near = interface_places(tokens, chains) if known is None else _known_places(known, chains)
        keep = _spatial_crop(tokens, crop_size, chains, near, rng)
    return Choice(keep, kind, _kept_chains(tokens["chain"][keep], chains, rng))


def _known_weights(known: dict[str, np.ndarray]) -> tuple[list[tuple[int, int]], np.ndarray]:
    return _weigh(known["chain_types"].tolist(), known["pairs"].tolist())


def _known_places(known: dict[str, np.ndarray], chains: tuple[int, int]) -> np.ndarray:
    pairs = known["pairs"].tolist()
    if list(chains) not in pairs:  # chains that do not touch have no interface
        return known["pair_places"][:0]
    place = pairs.index(list(chains))
    return known["pair_places"][slice(*known["pair_starts"][place : place + 2].tolist())]


def _spatial_crop(tokens, crop_size: int, chains, near: np.ndarray | None, rng: np.random.Generator) -> np.ndarray:
    """Around a token of the chains, or of their interface. bool [N].

    An unresolved residue is nowhere: it is no center, and is taken only when the crop has room for everything else. So
    the resolved tokens of these crops are those that the baseline takes, which knows no others.
    """
    placed, keep = _is_placed(tokens).nonzero()[0], np.zeros(len(tokens), bool)
    position, chain = tokens["crop_position"].astype(np.float64), tokens["chain"]
    if len(placed) < len(tokens):
        position, chain = position[placed], chain[placed]
    centers = near
    if near is None or not len(near):
        centers = ((chain == chains[0]) | (chain == chains[1])).nonzero()[0]
    keep[placed[_nearest(position, int(centers[rng.integers(len(centers))]), crop_size)]] = True
    if len(placed) < crop_size:
        keep[(~keep).nonzero()[0][: crop_size - len(placed)]] = True
    return keep


def interface_places(tokens: np.ndarray, chains: tuple[int, int]) -> np.ndarray:
    """The resolved tokens of two chains that are near the other one: places in the selection of their resolved tokens.

    The baseline takes those places for places in the structure, and so does `choose_crop`.
    """
    placed = tokens[_is_placed(tokens) & ((tokens["chain"] == chains[0]) | (tokens["chain"] == chains[1]))]
    return np.flatnonzero(_near_another_chain(placed["crop_position"].astype(np.float64), placed["chain"]))


def _is_placed(tokens: np.ndarray) -> np.ndarray:
    position = tokens["crop_position"]
    return np.isfinite(position[:, 0] + position[:, 1] + position[:, 2])


def touching_chains(tokens: np.ndarray) -> tuple[tuple[int, int], ...]:
    """The pairs of chains with center atoms within 15 angstrom; what an entry's `touching` holds."""
    tokens = tokens[_is_placed(tokens)]
    present = [int(chain) for chain in np.unique(tokens["chain"])]
    return tuple(pair for pair in combinations(present, 2) if _touch(tokens, *pair))


def chain_types(tokens: np.ndarray) -> list[tuple[int, int]]:
    """(chain, index into KINDS of what most of its polymer residues are; a ligand where it has none)."""
    found = []
    for chain in np.unique(tokens["chain"]):
        kinds = tokens["kind"][tokens["chain"] == chain]
        polymer = kinds[kinds < LIGAND]
        one = LIGAND if not len(polymer) else int(np.bincount(polymer % FIRST_ATOMISED).argmax())
        found.append((int(chain), one))
    return found


def chain_weights(
    tokens: np.ndarray, touching: tuple[tuple[int, int], ...] | None = None
) -> tuple[list[tuple[int, int]], np.ndarray]:
    """[(chain, -1) or (chain, chain)] and their weights, summing to 1: AF3 supplement 2.5.1 within one structure.

    An interface is a pair of chains with center atoms within 15 angstrom: one that a crop can be drawn around. Clusters
    are not known here: each chain and each interface counts as a cluster of its own.
    """
    return _weigh(chain_types(tokens), touching_chains(tokens) if touching is None else touching)


def _weigh(types, pairs) -> tuple[list[tuple[int, int]], np.ndarray]:
    alpha = {chain: TYPE_WEIGHTS[KINDS[kind]] for chain, kind in types}
    items = [*((chain, -1) for chain, _ in types), *((a, b) for a, b in pairs)]
    raw = [CHAIN_WEIGHT * alpha[a] if b < 0 else INTERFACE_WEIGHT * (alpha[a] + alpha[b]) for a, b in items]
    return items, np.array(raw) / sum(raw)


def _choose_chains(items, share: np.ndarray, rng: np.random.Generator, *, pairs_only: bool) -> tuple[int, int]:
    if pairs_only and any(b >= 0 for _, b in items):
        share = np.where([b >= 0 for _, b in items], share, 0)
    return items[_draw(share, rng)]


def _draw(share: np.ndarray, rng: np.random.Generator) -> int:
    """A place with the probabilities `share` (any sum), as `Generator.choice` draws it."""
    sums = share.cumsum()
    return min(int((sums / sums[-1]).searchsorted(rng.random(), side="right")), len(share) - 1)


def _choose_kind(weight: dict[str, float], *, pair: bool, rng: np.random.Generator) -> str:
    kinds = [kind for kind in WEIGHTS if weight.get(kind, 0.0) > 0 and (pair or kind != "interface")]
    if not kinds:
        return "spatial"
    return kinds[_draw(np.array([weight[kind] for kind in kinds]), rng)]


def _kept_chains(inside: np.ndarray, chains: tuple[int, int], rng: np.random.Generator) -> tuple[int, int]:
    """The chains of the example that are in the crop (`inside`: of each token); others, at random, when neither is."""
    kept = tuple(one if (inside == one).any() else -1 for one in chains)
    if max(kept) >= 0:
        return kept
    inside = np.unique(inside)
    if chains[1] >= 0 and len(inside) > 1:
        return tuple(sorted(int(one) for one in rng.choice(inside, 2, replace=False)))
    return int(rng.choice(inside)), -1


def contiguous(chain: np.ndarray, crop_size: int, rng: np.random.Generator) -> np.ndarray:
    """A run of tokens of each chain, chains in random order. bool [N].

    AlphaFold-Multimer algorithm 1 with the baseline's count of what remains: it takes each chain whole until the crop
    is full, and a run of the last one.
    """
    keep, left = np.zeros(len(chain), bool), crop_size
    for one in rng.permutation(np.unique(chain)):
        mine = np.flatnonzero(chain == one)
        length = min(len(mine), left)
        start = int(rng.integers(0, len(mine) - length + 1))
        keep[mine[start : start + length]] = True
        left -= length
    return keep


def spatial(tokens: np.ndarray, center: int, crop_size: int) -> np.ndarray:
    """AlphaFold-Multimer algorithm 2: the tokens nearest to a token; ties go to the earlier one. bool [N]."""
    keep = np.zeros(len(tokens), bool)
    keep[_nearest(tokens["crop_position"].astype(np.float64), center, crop_size)] = True
    return keep


def _nearest(position: np.ndarray, center: int, count: int) -> np.ndarray:
    """Indices of the `count` tokens of algorithm 2, the nearest first."""
    offset = position - position[center]
    distance = np.sqrt((offset * offset).sum(axis=-1)) + 1e-3 * np.arange(len(position))
    return distance.argsort(kind="stable")[:count]


def _near_another_chain(position: np.ndarray, chain: np.ndarray) -> np.ndarray:
    """Which tokens are within 15 angstrom of a token of another chain: bool [N] of positions float64 [N, 3].

    Of two chains only what lies in reach of the other one's box is compared, pair by pair. Trees do the rest, because
    N^2 distances may not fit.
    """
    found = np.zeros(len(chain), bool)
    present = np.unique(chain)
    if len(present) == 2:
        a, b = (np.flatnonzero(chain == one) for one in present)
        reach = INTERFACE_DISTANCE + 1e-6  # the box may take in more, but nothing less
        a, b = a[_in_box(position[a], position[b], reach)], b[_in_box(position[b], position[a], reach)]
        if len(a) * len(b) <= MAX_PAIRS:
            x, y, z = (position[a, axis][:, None] - position[b, axis] for axis in range(3))
            near = x * x + y * y + z * z < INTERFACE_DISTANCE**2
            found[a], found[b] = near.any(axis=1), near.any(axis=0)
            return found
    from scipy.spatial import cKDTree

    for one in present:
        mine = chain == one
        if not mine.all():
            nearest, _ = cKDTree(position[~mine]).query(position[mine], distance_upper_bound=INTERFACE_DISTANCE)
            found[mine] = np.isfinite(nearest)
    return found


def _in_box(position: np.ndarray, others: np.ndarray, reach: float) -> np.ndarray:
    """Which positions are within `reach` of the box around the others, along each axis."""
    return ((position >= others.min(axis=0) - reach) & (position <= others.max(axis=0) + reach)).all(axis=-1)


def _touch(tokens: np.ndarray, first: int, second: int) -> bool:
    """Are some tokens of two chains within 15 angstrom?"""
    from scipy.spatial import cKDTree

    a, b = (tokens["crop_position"][tokens["chain"] == one].astype(np.float64) for one in (first, second))
    if (a.min(axis=0) > b.max(axis=0) + INTERFACE_DISTANCE).any():
        return False
    if (b.min(axis=0) > a.max(axis=0) + INTERFACE_DISTANCE).any():
        return False
    nearest, _ = cKDTree(a).query(b, distance_upper_bound=INTERFACE_DISTANCE)
    return bool(np.isfinite(nearest).any())


def choose_rows(entry: str, available: int, wanted: int, *, epoch: int, seed: int) -> np.ndarray:
    """Alignment rows of one example, ascending, int64 [min(available, wanted)].

    Any subset is as likely as any other, as in the baseline and in AF3: the query is not always among them (its
    residue types are token features anyway). The order of the rows does not matter to the model.
    """
    if available <= wanted:
        return np.arange(available)
    return np.sort(generator(entry, epoch, seed, "msa").choice(available, size=wanted, replace=False))


def rigid_motions(
    entry: str, copies: int, *, epoch: int, seed: int, scale: float = 1.0
) -> tuple[np.ndarray, np.ndarray]:
    """Rotations float32 [copies, 3, 3] and translations float32 [copies, 3] (angstrom) of AF3 algorithm 19.

    The rotations are the baseline's: three Euler angles, each uniform, which is not the uniform distribution of
    rotations.

    Args:
        entry: the entry's id.
        copies: of the structure in one training step.
        scale: standard deviation of each coordinate of the translation, angstrom.
    """
    rng = generator(entry, epoch, seed, "rigid motion")
    (a, b, c), zero = rng.uniform(0, 2 * np.pi, (3, copies)), np.zeros(copies)
    one = zero + 1
    about_z = [[np.cos(a), -np.sin(a), zero], [np.sin(a), np.cos(a), zero], [zero, zero, one]]
    about_y = [[np.cos(b), zero, np.sin(b)], [zero, one, zero], [-np.sin(b), zero, np.cos(b)]]
    about_x = [[one, zero, zero], [zero, np.cos(c), -np.sin(c)], [zero, np.sin(c), np.cos(c)]]
    z, y, x = (np.moveaxis(np.array(matrix), -1, 0) for matrix in (about_z, about_y, about_x))
    translations = rng.normal(0, scale, (copies, 3))
    return (z @ y @ x).astype(np.float32), translations.astype(np.float32)


@contextmanager
def seeded_augmentation(model, entry: str, *, epoch: int, seed: int) -> Iterator[None]:
    """Inside, the training augmentation of a stock `Alphafold3` is that of `rigid_motions`, not of torch's generator.

    Args:
        model: any `alphafold3_pytorch.Alphafold3`; its module `augmenter` is put back afterwards.
        entry: the entry's id, or of several entries of a batch joined.
    """
    import torch

    augmenter = model.augmenter

    def drawn(which: int):
        def draw(count: int):
            motion = rigid_motions(entry, count, epoch=epoch, seed=seed, scale=augmenter.trans_scale)[which]
            return torch.from_numpy(motion).to(augmenter.device)

        return draw

    augmenter._random_rotation_matrix, augmenter._random_translation_vector = drawn(0), drawn(1)
    try:
        yield
    finally:
        del augmenter._random_rotation_matrix, augmenter._random_translation_vector
