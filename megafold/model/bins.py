"""Distances as labels of bins, without a one-hot tensor of every bin."""

from __future__ import annotations

import torch
from torch import Tensor


def bin_labels(distances: Tensor, bins: Tensor) -> Tensor:
    """The bin that each distance (angstrom) lies in: from ``bins[i]`` to below ``bins[i + 1]``, the last open.

    As in the stock model what lies before the first bin, infinity and NaN are labelled 0.

    Returns:
        int64 of the shape of ``distances``.
    """
    distances = distances.abs()
    found = torch.bucketize(distances, bins.to(distances.dtype), right=True) - 1
    return found.clamp(min=0).masked_fill(~distances.isfinite(), 0)
