"""Eager definition of LayerNorm and several projections, in the dtype of its inputs or under autocast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def norm_project(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    head_weight: Tensor | None,
    count: int,
) -> tuple[list[Tensor], Tensor | None]:
    """`count` projections [..., O] of the normalised x, from weight [count * O, C], and heads [B, H, ...]."""
    normed = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias)
    rows = [] if weight is None else list(F.linear(normed, weight, bias).chunk(count, dim=-1))
    heads = None if head_weight is None else torch.movedim(F.linear(normed, head_weight), -1, 1)
    return rows, heads
