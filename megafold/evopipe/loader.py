"""Training batches from the cache: crop, choose alignment rows, and collate to the keyword arguments of the model.

What one example is depends on (entry, epoch, seed) alone, not on the worker, the order, or the batch.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from megafold.errors import InputError
from megafold.evopipe import augment, crop, layout, templates
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.layout import Entry

CONFIDENCE_FIELDS = ("resolved_labels", "atom_indices_for_frame")


def alignment_features(msa: np.ndarray, deletions: np.ndarray, values: np.ndarray) -> dict[str, Tensor]:
    """One-hot alignment float32 [S, n, 32], deletion features [S, n, 2] and row mask [S], as the baseline has them.

    Args:
        msa: residue classes, uint8 [S, n].
        deletions: index into `values`, uint16 [S, n].
        values: the deletion feature, float32.
    """
    # numpy, not torch: its large arrays come in huge pages, which makes this several times faster
    one_hot = np.eye(layout.NUM_MSA_CLASSES, dtype=np.float32).take(msa, axis=0)
    table = np.stack([(values > 0).astype(np.float32), values], axis=-1)
    return {
        "msa": torch.from_numpy(one_hot),
        "additional_msa_feats": torch.from_numpy(table.take(deletions, axis=0)),
        "msa_mask": torch.ones(len(msa), dtype=torch.bool),
    }


def model_features(
    entry: Entry, keep: np.ndarray, msa: np.ndarray, deletions: np.ndarray, *, training: bool = True
) -> dict[str, Tensor | None]:
    """Every field of an `AtomInput` for the tokens in `keep` and the alignment rows given (already cropped).

    Equal to the baseline's for the same crop mask and alignment rows, bit for bit, with atom pairs windowed.
    """
    arrays = entry.arrays
    template, template_mask = templates.dense(arrays, keep)
    return {
        **crop.structure_features(entry, keep, training=training),
        **alignment_features(msa, deletions, arrays["deletion_values"]),
        "additional_token_feats": torch.from_numpy(arrays["profile"][keep]),
        "templates": template,
        "template_mask": template_mask,
    }


class CachedStructures(Dataset):
    """Cropped examples from a cache.

    Args:
        cache: the HDF5 file.
        crop_size: tokens per example, at most.
        msa_depth: alignment rows per example, at most; the query is always the first.
        seed: with the epoch and the entry's id it decides everything that is random.
        entries: ids to use; None for all.
        labels: False drops `resolved_labels` and `atom_indices_for_frame`, so that the model trains without its
            confidence head (workload `core`).
        templates: False drops the template features.
        weights: of the `contiguous`, `spatial` and `interface` crops; AF3's by default.
        training: install the bonds of the mmCIF file, as the baseline does in training only.

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
    ) -> None:
        for name, value in (("crop_size", crop_size), ("msa_depth", msa_depth)):
            if value < 1:
                raise InputError(str(cache), name, f"must be at least 1, not {value}")
        self.cache = StructureCache(cache)
        self.crop_size, self.msa_depth, self.seed, self.weights = crop_size, msa_depth, seed, weights
        self.labels, self.templates, self.training = labels, templates, training
        known = self.cache.entries()
        self.entries = list(known if entries is None else entries)
        unknown = [entry for entry in self.entries if entry not in known]
        if unknown or not self.entries:
            raise InputError(self.cache.path, unknown[0] if unknown else "entries", "no such entry in the cache")
        self.cache.close()  # workers open their own
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

    def features(self, index: int) -> dict[str, Tensor | None]:
        """Fields of example `index` by name."""
        name = self.entries[index]
        entry = self.cache.read_structure(name)
        choice = augment.choose_crop(entry, self.crop_size, epoch=self.epoch, seed=self.seed, weights=self.weights)
        available = self.cache.msa_depth(name)
        rows = augment.choose_rows(name, available, self.msa_depth, epoch=self.epoch, seed=self.seed)
        msa, deletions = self.cache.read_alignment(name, rows, choice.keep)
        fields = model_features(entry, choice.keep, msa, deletions, training=self.training)
        fields["chains"] = torch.tensor(choice.chains)
        if not self.templates:
            fields["templates"] = fields["template_mask"] = None
        if not self.labels:
            fields |= dict.fromkeys(CONFIDENCE_FIELDS)
        return fields

    def __getitem__(self, index: int) -> Any:
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


def collate(examples: list[Any], window: int = layout.ATOMS_PER_WINDOW) -> dict[str, Tensor | None]:
    """The baseline's collation: pad, stack, and keep what `Alphafold3.forward` takes."""
    from alphafold3_pytorch.inputs import collate_inputs_to_batched_atom_input

    batch = collate_inputs_to_batched_atom_input(examples, atoms_per_window=window, transform_to_atom_inputs=False)
    return batch.model_forward_dict()


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
) -> DataLoader:
    """Batches of keyword arguments for `Alphafold3.forward`: `dict[str, Tensor | None]` on the CPU.

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
    )
    return DataLoader(
        dataset,
        batch_size=batch_size,
        sampler=ShuffledByEpoch(dataset, shuffle=shuffle),
        num_workers=workers,
        collate_fn=partial(collate),
        worker_init_fn=_one_thread,
        persistent_workers=workers > 0,
    )
