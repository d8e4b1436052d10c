"""Training batches from the cache: crop, choose alignment rows, and collate, in a compact form; see `expand`.

What one example is depends on (entry, epoch, seed) alone, not on the worker, the order, or the batch.
"""

from __future__ import annotations

import os
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
    codes = deletions.astype(np.uint8 if len(values) <= FEW_VALUES else np.int16, copy=False)
    index = np.flatnonzero(keep)
    arrays_of_template = {name: arrays[name].take(index, axis=1) for name in GEOMETRY}
    made = {
        "msa_classes": np.ascontiguousarray(msa),
        "deletion_codes": codes,
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

    Raises:
        InputError: no such cache, a corrupt entry, an unknown entry, a size below 1.
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
        # shared, so that workers that outlive an epoch see the next one
        self._epoch = torch.zeros(1, dtype=torch.int64).share_memory_()

    @property
    def epoch(self) -> int:
        return int(self._epoch)

    def set_epoch(self, epoch: int) -> None:
        """Choose the crops and alignment rows of this epoch from now on, in this process and in its workers."""
        self._epoch.fill_(epoch)

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, index: int) -> dict[str, Tensor | None]:
        """Example `index` in its compact form, and `chains`."""
        return self.read(self.entries[index])

    def choose(self, name: str) -> tuple[Entry, augment.Choice, np.ndarray]:
        """An entry without its alignment, and the tokens and alignment rows that its example has in this epoch."""
        entry = self.cache.read_structure(name)
        choice = augment.choose_crop(entry, self.crop_size, epoch=self.epoch, seed=self.seed, weights=self.weights)
        available = self.cache.msa_depth(name)
        return entry, choice, augment.choose_rows(name, available, self.msa_depth, epoch=self.epoch, seed=self.seed)

    def read(self, name: str) -> dict[str, Tensor | None]:
        """The example of an entry in this epoch, as `__getitem__` gives it."""
        entry, choice, rows = self.choose(name)
        msa, deletions = self.cache.read_alignment(name, rows, choice.keep)
        options = {"training": self.training, "exact_bonds": self.exact_bonds}
        fields = compact_features(entry, choice.keep, msa, deletions, **options)
        fields["chains"] = torch.tensor(choice.chains)
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

        return AtomInput(**self.features(index), filepath=self.entries[index])


class ShuffledByEpoch(Sampler[int]):
    """Indices in an order that is a pure function of (seed, epoch)."""

    def __init__(self, dataset: CachedStructures, *, shuffle: bool) -> None:
        self.dataset, self.shuffle = dataset, shuffle

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self):
        if not self.shuffle:
            return iter(range(len(self.dataset)))
        rng = augment.generator("order of the entries", self.dataset.epoch, self.dataset.seed, "shuffle")
        return iter(rng.permutation(len(self.dataset)).tolist())


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
