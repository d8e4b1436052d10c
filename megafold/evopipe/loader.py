"""Training batches from the cache: crop, choose alignment rows, and collate, in a compact form; see `expand`.

What one example is depends on (entry, epoch, seed) alone, not on the worker, the order, or the batch.
"""

from __future__ import annotations

import os
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from megafold.errors import InputError
from megafold.evopipe import augment, crop
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.clusters import Clusters, draw_entries
from megafold.evopipe.expand import ABSENT, GEOMETRY, NOTHING, expand
from megafold.evopipe.layout import Entry

CONFIDENCE_FIELDS = ("resolved_labels", "atom_indices_for_frame")
NOT_FOR_THE_MODEL = ("chains",)
# what fills a batch up where an example is shorter; else -1 for integers, False and 0, as in the baseline
PADDING = {
    "molecule_atom_lens": 0,
    "missing_atom_mask": True,
    "msa_classes": NOTHING,
    "template_classes": NOTHING,
    "template_state": 0,
    "deletion_codes": 0,
}
DRAW_BITS = 40  # of an epoch's number, above which draws of one entry are counted
FEW_VALUES = 256  # deletion values up to which their codes fit into one byte


def compact_features(
    entry: Entry,
    keep: np.ndarray,
    msa: np.ndarray,
    deletions: np.ndarray,
    *,
    training: bool = True,
    exact_bonds: bool = False,
) -> dict[str, Tensor | None]:
    """One example for the tokens in `keep` and the alignment rows given (already cropped), as `expand.expand` takes it.

    Args:
        entry: the uncropped structure; its alignment is not needed.
        keep: bool [N].
        msa: residue classes, uint8 [S, n].
        deletions: index into the entry's `deletion_values`, uint8 or uint16 [S, n].
        training: install the bonds of the mmCIF file, as the baseline does in training only.
        exact_bonds: all of those bonds; the baseline misses most of ligands (`crop.structure_features`).
    """
    arrays = entry.arrays
    values = arrays["deletion_values"]
    codes = deletions.T.astype(np.uint8 if len(values) <= FEW_VALUES else np.int16, copy=False)
    index = keep.nonzero()[0]
    arrays_of_template = {name: arrays[name].take(index, axis=1) for name in GEOMETRY}
    made = {
        "msa_classes": np.ascontiguousarray(msa.T),
        "deletion_codes": np.ascontiguousarray(codes),
        "deletion_values": values.astype(np.float32),
        "msa_mask": np.ones(len(msa), bool),
        "additional_token_feats": arrays["profile"].take(index, axis=0),
        "template_mask": arrays["template_mask"].copy(),
        **arrays_of_template,
    }
    return {
        **crop.structure_features(entry, keep, training=training, exact_bonds=exact_bonds),
        **{name: torch.from_numpy(value) for name, value in made.items()},
    }


def model_features(
    entry: Entry, keep: np.ndarray, msa: np.ndarray, deletions: np.ndarray, *, training: bool = True
) -> dict[str, Tensor | None]:
    """Every field of an `AtomInput`: `compact_features`, expanded.

    Equal to the baseline's for the same crop mask and alignment rows, bit for bit, with atom pairs windowed.
    """
    made = expand(compact_features(entry, keep, msa, deletions, training=training))
    return {name: value for name, value in made.items() if name not in ABSENT}


class CachedStructures(Dataset):
    """Cropped examples from a cache.

    Args:
        cache: the HDF5 file.
        crop_size: tokens per example, at most.
        msa_depth: alignment rows per example, at most: any of them, the query is not always one (as in AF3).
        seed: with the epoch and the entry's id it decides everything that is random.
        entries: ids to use; None for all.
        labels: False drops `resolved_labels` and `atom_indices_for_frame`, so that the model trains without its
            confidence head (workload `core`).
        templates: False drops the template features.
        weights: of the `contiguous`, `spatial` and `interface` crops; AF3's by default.
        training: install the bonds of the mmCIF file, as the baseline does in training only.
        exact_bonds: all of those bonds; the baseline misses most of ligands (`crop.structure_features`).
        clusters: tables of clusters (`megafold.evopipe.clusters`), which weight entries, chains and interfaces; without
            them every entry comes once an epoch, and each of its chains and interfaces counts as a cluster of its own.

    Raises:
        InputError: no such cache, a corrupt entry, an unknown entry, a size below 1, tables that name no entry.
    """

    def __init__(
        self,
        cache: str | os.PathLike[str],
        *,
        crop_size: int,
        msa_depth: int,
        seed: int = 0,
        entries: Sequence[str] | None = None,
        labels: bool = True,
        templates: bool = True,
        weights: dict[str, float] | None = None,
        training: bool = True,
        exact_bonds: bool = False,
        clusters: Sequence[str | os.PathLike[str]] | None = None,
    ) -> None:
        for name, value in (("crop_size", crop_size), ("msa_depth", msa_depth)):
            if value < 1:
                raise InputError(str(cache), name, f"must be at least 1, not {value}")
        self.cache = StructureCache(cache)
        self.crop_size, self.msa_depth, self.seed, self.weights = crop_size, msa_depth, seed, weights
        self.labels, self.templates, self.training = labels, templates, training
        self.exact_bonds = exact_bonds
        known = self.cache.names
        self.entries: Sequence[str] = known if entries is None else list(entries)
        unknown = [entry for entry in self.entries if entry not in known] if entries is not None else []
        if unknown or not len(self.entries):
            raise InputError(self.cache.path, unknown[0] if unknown else "entries", "no such entry in the cache")
        self.clusters = None if clusters is None else Clusters(clusters)
        self.entry_weights = self._entry_weights()
        # shared, so that workers that outlive an epoch see the next one
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    def _entry_weights(self) -> np.ndarray | None:
        """How often each entry is drawn, float64 [entries]; None where each comes once an epoch."""
        if self.clusters is None:
            return None
        weights = np.array([self.clusters.total(name) for name in self.entries])
        unknown = int((weights == 0).sum())
        if unknown == len(weights):
            raise InputError(self.cache.path, "clusters", "the tables name none of the entries")
        if unknown:
            reason = f"{self.cache.path}: {unknown} of {len(weights)} entries are in no table of clusters: never drawn"
            warnings.warn(reason, stacklevel=3)
        return weights

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the crops and alignment rows of this epoch from now on, in this process and in its workers."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Tensor | None]:
        """Example `index` in its compact form, and `chains`. Beyond the entries: another draw of `index` % entries."""
        draw, place = divmod(index, len(self))
        return self.read(self.entries[place], draw)

    def name_of(self, index: int) -> str:
        """The entry of example `index`."""
        return self.entries[index % len(self)]

    def choose(self, name: str, draw: int = 0) -> tuple[Entry, augment.Choice, np.ndarray]:
        """An entry without its alignment, and the tokens and alignment rows that its example has in this epoch.

        Args:
            draw: how often the entry has come before in this epoch, where entries are drawn by weights.
        """
        entry, epoch = self.cache.read_structure(name), self.epoch + (draw << DRAW_BITS)
        sampled = None if self.clusters is None else self.clusters.of(name, entry.chains)
        options = {"epoch": epoch, "seed": self.seed}
        choice = augment.choose_crop(entry, self.crop_size, weights=self.weights, sampled=sampled, **options)
        return entry, choice, augment.choose_rows(name, self.cache.msa_depth(name), self.msa_depth, **options)

    def read(self, name: str, draw: int = 0) -> dict[str, Tensor | None]:
        """The example of an entry in this epoch, as `__getitem__` gives it."""
        entry, choice, rows = self.choose(name, draw)
        msa, deletions = self.cache.read_alignment(name, rows, choice.keep)
        options = {"training": self.training, "exact_bonds": self.exact_bonds}
        fields = compact_features(entry, choice.keep, msa, deletions, **options)
        fields["chains"] = torch.from_numpy(np.array(choice.chains, np.int64))
        if not self.templates:
            fields |= dict.fromkeys([*GEOMETRY, "template_mask"])
        if not self.labels:
            fields |= dict.fromkeys(CONFIDENCE_FIELDS)
        return fields

    def features(self, index: int) -> dict[str, Tensor | None]:
        """Fields of an `AtomInput` of example `index` by name (all but the file's)."""
        return {name: value for name, value in expand(self[index]).items() if name not in ABSENT}

    def atom_input(self, index: int) -> Any:
        """Example `index` as an `alphafold3_pytorch.inputs.AtomInput`."""
        from alphafold3_pytorch.inputs import AtomInput

        return AtomInput(**self.features(index), filepath=self.name_of(index))


class ShuffledByEpoch(Sampler[int]):
    """Indices in an order that is a pure function of (seed, epoch).

    Where entries have weights, as many are drawn as there are; one that comes again has its index raised by the number
    of entries each time, and so another crop.
    """

    def __init__(self, dataset: CachedStructures, *, shuffle: bool) -> None:
        self.dataset, self.shuffle = dataset, shuffle

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self):
        if not self.shuffle:
            return iter(range(len(self.dataset)))
        rng = augment.generator("order of the entries", self.dataset.epoch, self.dataset.seed, "shuffle")
        weights, n = self.dataset.entry_weights, len(self.dataset)
        if weights is None:
            return iter(rng.permutation(n).tolist())
        seen, order = Counter(), []
        for place in draw_entries(weights, n, rng):
            order.append(place + n * seen[place])
            seen[place] += 1
        return iter(order)


def collate(examples: Sequence[Mapping[str, Tensor | None]]) -> dict[str, Tensor | None]:
    """Compact examples, filled up to the longest in every dimension and stacked, as the baseline's collation does."""
    batch = {}
    for name in examples[0]:
        values = [example[name] for example in examples]
        present = [value for value in values if value is not None]
        if name in NOT_FOR_THE_MODEL:
            continue
        if not present:
            batch[name] = None
            continue
        dtype = max((value.dtype for value in present), key=lambda kind: kind.itemsize)  # codes may differ
        padding = PADDING.get(name, 0 if dtype.is_floating_point or dtype == torch.bool else -1)
        shape = [max(sizes) for sizes in zip(*(value.shape for value in present))]
        out = torch.full((len(values), *shape), padding, dtype=dtype)
        for target, value in zip(out, values):
            if value is not None:
                target[tuple(slice(0, size) for size in value.shape)] = value
        batch[name] = out
    return batch


class ExpandingLoader(DataLoader):
    """Batches as the model takes them: expanded here, in the main process, on the CPU."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for batch in super().__iter__():
            yield expand(batch)


def _one_thread(_worker: int) -> None:
    torch.set_num_threads(1)


def make_loader(
    cache: str | os.PathLike[str],
    *,
    crop_size: int,
    msa_depth: int,
    batch_size: int = 1,
    workers: int = 0,
    seed: int = 0,
    entries: Sequence[str] | None = None,
    labels: bool = True,
    shuffle: bool = True,
    templates: bool = True,
    compact: bool = False,
    exact_bonds: bool = False,
    clusters: Sequence[str | os.PathLike[str]] | None = None,
) -> DataLoader:
    """Batches of keyword arguments for `Alphafold3.forward`: `dict[str, Tensor | None]` on the CPU.

    With `compact` they are what the workers made, 50 times smaller: move them to the device and call `expand.expand`.
    Call `loader.dataset.set_epoch(epoch)` before each epoch; it decides order, crops and alignment rows. Atom pairs are
    windowed, [batch, windows, 27, 54, 5]. Arguments as in `CachedStructures`; `workers` are processes.
    """
    dataset = CachedStructures(
        Path(cache),
        crop_size=crop_size,
        msa_depth=msa_depth,
        seed=seed,
        entries=entries,
        labels=labels,
        templates=templates,
        exact_bonds=exact_bonds,
        clusters=clusters,
    )
    return (DataLoader if compact else ExpandingLoader)(
        dataset,
        batch_size=batch_size,
        sampler=ShuffledByEpoch(dataset, shuffle=shuffle),
        num_workers=workers,
        collate_fn=collate,
        worker_init_fn=_one_thread,
        persistent_workers=workers > 0,
    )
