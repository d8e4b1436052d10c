"""Distances as labels of bins, without a one-hot tensor of every bin; a row of a table for each label."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

CHUNK_ELEMENTS = 1 << 23  # of one-hot labels, in the backward of an embedding


def bin_labels(distances: Tensor, bins: Tensor) -> Tensor:
    """The bin that each distance (angstrom) lies in: from ``bins[i]`` to below ``bins[i + 1]``, the last open.

    As in the stock model what lies before the first bin, infinity and NaN are labelled 0.

    Returns:
        int64 of the shape of ``distances``.
    """
    distances = distances.abs()
    found = torch.bucketize(distances, bins.to(distances.dtype), right=True) - 1
    return found.clamp(min=0).masked_fill(~distances.isfinite(), 0)


def embed_bins(labels: Tensor, table: Tensor) -> Tensor:
    """Row ``labels[...]`` of ``table``: ``F.embedding``, whose own gradient differs from run to run on a GPU.

    Args:
        labels: int64 [..., L], from 0 to below K.
        table: [K, d]. Its gradient is a product with the one-hot labels, a part of them at a time, in the table's
            precision also under autocast and where TF32 is allowed.

    Returns:
        [..., L, d].
    """
    return _Embedded.apply(labels, table)


class _Embedded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, labels: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(labels)
        ctx.count = len(table)
        return F.embedding(labels, table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (labels,) = ctx.saved_tensors
        length, width = labels.shape[-1], gradient.shape[-1]
        places = torch.arange(ctx.count, device=labels.device).unsqueeze(-1)
        total = gradient.new_zeros(ctx.count, width)
        rows = max(1, CHUNK_ELEMENTS // max(1, ctx.count * length))
        pieces = labels.reshape(-1, 1, length).split(rows), gradient.reshape(-1, length, width).split(rows)
        with torch.autocast(gradient.device.type, enabled=False):
            for some, part in zip(*pieces):
                hot = (places == some).to(gradient.dtype)
                # A product a row fills the device, which one product with a sum of 10^5 terms may not.
                high, *low = in_two_parts(part)
                sums = torch.bmm(hot, high)
                for rest in low:
                    sums = sums.baddbmm_(hot, rest)
                total += sums.sum(dim=0)
        return None, total


def in_two_parts(values: Tensor) -> tuple[Tensor, ...]:
    """Tensors that sum up to ``values``, fp32: a product in TF32 (11 bits) takes the first as it is, and rounds at most
    2^-21 of the whole off the second. Other types as they are."""
    if values.dtype != torch.float32:
        return (values,)
    high = (values.contiguous().view(torch.int32) & ~0x1FFF).view(torch.float32)
    return high, values - high
