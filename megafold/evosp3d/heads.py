"""Distogram and confidence heads (AF3 algorithm 31) and their losses, on rows of pairs.

Labels, a few bytes a pair, are made for all pairs by every rank; logits, 64 of them a pair, exist for a rank's own
rows. The number of labelled pairs is known to every rank from the labels, so that a rank's part of a mean is its sum
over that number and the parts add up. What all ranks compute alike (losses over atoms) enters divided by P.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from alphafold3_pytorch.alphafold3 import masked_mean
from torch import Tensor

from megafold.evosp3d.collectives import Exchange, run
from megafold.model.rebind import with_names
from megafold.model.repeated import materialize

if TYPE_CHECKING:
    from torch.nn import Module

    from megafold.evosp3d.mesh import Shards


def bins_of(distance: Tensor, bins: Tensor, return_labels: bool = True) -> Tensor:
    """``distance_to_dgram`` with labels, without its one-hot [..., bins]: the last bin whose edge is not above."""
    if not return_labels:
        raise ValueError("return_labels: labels are what the parallel heads use")
    return (torch.bucketize(distance.abs().contiguous(), bins, right=True) - 1).clamp(min=0)


def symmetrize_rows(pairs: Tensor, shards: Shards) -> Tensor:
    """x + x^T for rows [b, n, N, c]."""
    total = pairs.shape[2]
    columns = run(Exchange(split=2, split_total=total, join=1, join_total=total), pairs, shards, "symmetrize")
    return pairs + columns.transpose(1, 2)


def cross_entropy_of_rows(shards: Shards):
    """``F.cross_entropy`` where logits [b, l, n, N] are rows and labels [b, N, N] are whole; else the stock function.

    With ``reduction="none"`` the losses of the rows; with the mean over labelled pairs this rank's part of it.
    """

    def cross_entropy(logits: Tensor, labels: Tensor, ignore_index: int = -100, reduction: str = "mean") -> Tensor:
        if logits.ndim != 4:
            return F.cross_entropy(logits, labels, ignore_index=ignore_index, reduction=reduction)
        own = shards.narrow(labels, 1)
        if reduction == "none":
            return F.cross_entropy(logits, own, ignore_index=ignore_index, reduction="none")
        total = F.cross_entropy(logits, own, ignore_index=ignore_index, reduction="sum")
        return total / (labels != ignore_index).sum()

    return cross_entropy


def masked_mean_of_part(shards: Shards):
    """``masked_mean`` over a whole batch: of rows of pairs [b, n, N] this rank's part, of atoms [b, M] a P-th."""

    def mean(loss: Tensor, mask: Tensor) -> Tensor:
        if loss.ndim == 3:
            own = loss * shards.narrow(mask, 1)
            return own.sum() / mask.sum().clamp(min=1e-5)
        return masked_mean(loss, mask) / shards.size

    return mean


def confidence_head(self: Module, *, shards: Shards, **kwargs: Any) -> Any:
    """``ConfidenceHead.forward`` with pairs as rows: pae and pde logits [B, l, n, N], the others whole."""

    def rows_of_bins(distance: Tensor, bins: Tensor, return_labels: bool = True) -> Tensor:
        return bins_of(shards.narrow(distance, 1), bins, return_labels)

    forward = with_names(
        type(self).forward, distance_to_dgram=rows_of_bins, symmetrize=lambda pairs: symmetrize_rows(pairs, shards)
    )
    return forward(self, **{name: materialize(value) for name, value in kwargs.items()})
