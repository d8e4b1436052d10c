"""The smooth lDDT and its gradient over chunks of atoms in PyTorch: what runs where Triton does not."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megafold.evofusion.smooth_lddt.reference import THRESHOLDS

CHUNK_PAIRS = 1 << 22
"""Largest number of pairs held at once: 16 MiB in fp32."""


def sums(
    pred: Tensor,
    true: Tensor,
    is_nucleotide: Tensor,
    mask: Tensor | None,
    nucleic_acid_cutoff: float,
    other_cutoff: float,
) -> tuple[Tensor, Tensor]:
    """Sum of the scores and number of the pairs, each [B]."""
    total = pred.new_zeros(pred.shape[0], dtype=torch.float64)
    count = pred.new_zeros(pred.shape[0], dtype=torch.int64)
    for part in _parts(pred):
        truth, scored = _pairs(true, is_nucleotide, mask, nucleic_acid_cutoff, other_cutoff, part)
        difference = (truth - _distances(pred, part)[0]).abs()
        score = sum((threshold - difference).sigmoid() for threshold in THRESHOLDS) / len(THRESHOLDS)
        total += (score * scored).sum((-1, -2), dtype=torch.float64)
        count += scored.sum((-1, -2))
    return total.to(pred.dtype), count


def gradient(
    scale: Tensor,
    pred: Tensor,
    true: Tensor,
    is_nucleotide: Tensor,
    mask: Tensor | None,
    nucleic_acid_cutoff: float,
    other_cutoff: float,
) -> Tensor:
    """Gradient of pred from that of the sum of the scores, `scale` [B]."""
    grad = torch.empty_like(pred)
    for part in _parts(pred):
        truth, scored = _pairs(true, is_nucleotide, mask, nucleic_acid_cutoff, other_cutoff, part)
        found, vectors = _distances(pred, part)
        difference = truth - found
        slope = torch.zeros_like(difference)
        for threshold in THRESHOLDS:
            s = (threshold - difference.abs()).sigmoid()
            slope += s * (1.0 - s)
        slope = slope * difference.sign() * scored / found.masked_fill(found == 0.0, 1.0)
        factor = 2.0 / len(THRESHOLDS) * scale[:, None, None]
        grad[:, part] = factor * (slope.unsqueeze(-1) * vectors).sum(2)
    return grad


def _parts(pred: Tensor) -> Iterator[slice]:
    atoms = pred.shape[1]
    step = max(1, CHUNK_PAIRS // max(1, pred.shape[0] * atoms))
    return (slice(start, min(start + step, atoms)) for start in range(0, atoms, step))


def _distances(points: Tensor, part: slice) -> tuple[Tensor, Tensor]:
    """Distances [B, part, M] and vectors [B, part, M, 3]."""
    vectors = points[:, part, None] - points[:, None]
    return vectors.square().sum(-1).sqrt(), vectors


def _pairs(true, is_nucleotide, mask, nucleic_acid_cutoff, other_cutoff, part) -> tuple[Tensor, Tensor]:
    """Distances in truth [B, part, M], and which pairs count."""
    truth = _distances(true, part)[0]
    both = is_nucleotide[:, part, None] & is_nucleotide[:, None]
    atoms = torch.arange(true.shape[1], device=true.device)
    scored = torch.where(both, truth < nucleic_acid_cutoff, truth < other_cutoff) & (atoms[part, None] != atoms)
    return truth, scored if mask is None else scored & mask[:, part, None] & mask[:, None]
