"""Smooth lDDT and bond losses of the augmentations in turn, so that no [48, M, M] tensor exists.

Each augmentation's distances [M, M] are computed, reduced and forgotten; the backward computes them again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafold.model.geometry import distances

if TYPE_CHECKING:
    from torch.nn import Module

# Pairs of atoms that one chunk may have.
CHUNK_PAIRS = 1 << 24


def smooth_lddt_loss(
    self: Module,
    pred_coords: Tensor,
    true_coords: Tensor,
    is_dna: Tensor,
    is_rna: Tensor,
    coords_mask: Tensor | None = None,
    loss_reduction: str = "mean",
) -> Tensor:
    """``SmoothLDDTLoss.forward`` (AF3 algorithm 27): coordinates [B, M, 3], atom masks [B, M] -> a scalar, or [B]."""
    mask = torch.ones_like(is_dna) if coords_mask is None else coords_mask

    def of_chunk(pred: Tensor, true: Tensor, nucleic: Tensor, valid: Tensor) -> Tensor:
        of_true, errors = _distances(pred, true)
        score = sum(torch.sigmoid(threshold - errors) for threshold in self.lddt_thresholds) / len(self.lddt_thresholds)
        near = torch.where(_pairs(nucleic), of_true < self.nucleic_acid_cutoff, of_true < self.other_cutoff)
        counted = near & ~torch.eye(pred.shape[1], dtype=torch.bool, device=pred.device) & _pairs(valid)
        return (score * counted).sum(dim=(1, 2)) / counted.sum(dim=(1, 2)).clamp(min=1)

    loss = 1.0 - in_chunks(of_chunk, pred_coords, true_coords, is_dna | is_rna, mask)
    return loss if loss_reduction == "none" else loss.mean()


def bond_loss(pred_coords: Tensor, true_coords: Tensor, weights: Tensor, mask: Tensor) -> Tensor:
    """Mean squared error of all distances (the stock model's bond loss): [B, M, 3], weights [B], mask [B, M] -> [B]."""

    def of_chunk(pred: Tensor, true: Tensor, weight: Tensor, valid: Tensor) -> Tensor:
        _, errors = _distances(pred, true)
        counted = _pairs(valid)
        total = (errors.square() * weight[:, None, None] * counted).sum(dim=(1, 2))
        return total / counted.sum(dim=(1, 2)).clamp(min=1e-5)

    return in_chunks(of_chunk, pred_coords, true_coords, weights, mask)


def in_chunks(function: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """``function`` of the tensors [B, M, ...] in chunks of B, computed again in the backward -> [B]."""
    atoms = tensors[0].shape[1]
    size = max(1, CHUNK_PAIRS // max(1, atoms * atoms))
    parts = zip(*(tensor.split(size) for tensor in tensors))
    return torch.cat([checkpoint(function, *part, use_reentrant=False, preserve_rng_state=False) for part in parts])


def _distances(pred: Tensor, true: Tensor) -> tuple[Tensor, Tensor]:
    """True distances and the errors of the predicted ones, both [b, M, M]."""
    of_true = distances(true, true)
    return of_true, (of_true - distances(pred, pred)).abs()


def _pairs(mask: Tensor) -> Tensor:
    return mask.unsqueeze(-1) & mask.unsqueeze(-2)
