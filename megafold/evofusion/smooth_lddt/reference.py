"""Eager definition of the smooth lDDT loss, with all atom pairs in memory."""

from __future__ import annotations

import torch
from torch import Tensor

THRESHOLDS = (0.5, 1.0, 2.0, 4.0)
"""Distance differences in angstrom at which a pair counts half, a quarter each."""


def smooth_lddt(
    pred: Tensor,
    true: Tensor,
    is_nucleotide: Tensor,
    mask: Tensor | None,
    nucleic_acid_cutoff: float,
    other_cutoff: float,
) -> Tensor:
    """AF3 algorithm 27: smooth lDDT [B] of pred and true [B, M, 3]; masks [B, M] bool."""
    differences = (_distances(true) - _distances(pred)).abs()
    score = sum((threshold - differences).sigmoid() for threshold in THRESHOLDS) / len(THRESHOLDS)
    return _masked_mean(score, scored_pairs(true, is_nucleotide, mask, nucleic_acid_cutoff, other_cutoff))


def scored_pairs(
    true: Tensor, is_nucleotide: Tensor, mask: Tensor | None, nucleic_acid_cutoff: float, other_cutoff: float
) -> Tensor:
    """[B, M, M] bool: pairs of different atoms, both in the mask, that are near each other in truth."""
    distances = _distances(true)
    both = is_nucleotide[:, :, None] & is_nucleotide[:, None, :]
    near = torch.where(both, distances < nucleic_acid_cutoff, distances < other_cutoff)
    near = near & ~torch.eye(true.shape[1], dtype=torch.bool, device=true.device)
    return near if mask is None else near & mask[:, :, None] & mask[:, None, :]


def _distances(points: Tensor) -> Tensor:
    return torch.cdist(points, points, compute_mode="donot_use_mm_for_euclid_dist")


def _masked_mean(score: Tensor, pairs: Tensor) -> Tensor:
    return (score * pairs).sum((-1, -2)) / pairs.sum((-1, -2)).clamp(min=1)
