"""Eager definition of the transition, in the dtype of its inputs or under autocast."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def transition(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    in_weight: Tensor,
    out_weight: Tensor,
    residual: bool = True,
) -> Tensor:
    """Arguments as in `api.transition`."""
    normed = x if norm_weight is None else F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias)
    values, gates = F.linear(normed, in_weight).chunk(2, dim=-1)
    out = F.linear(F.silu(gates) * values, out_weight)
    return x + out if residual else out
