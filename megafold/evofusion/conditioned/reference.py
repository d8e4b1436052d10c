"""Eager definition of the conditioned blocks, in the dtype of their inputs or under autocast."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def adaptive_norm(
    x: Tensor,
    cond: Tensor,
    cond_norm_weight: Tensor,
    gamma_weight: Tensor,
    gamma_bias: Tensor,
    beta_weight: Tensor,
) -> Tensor:
    """AF3 algorithm 26; arguments as in `api.adaptive_norm`."""
    normed_cond = F.layer_norm(cond, cond.shape[-1:], cond_norm_weight)
    gamma = F.linear(normed_cond, gamma_weight, gamma_bias).sigmoid()
    return F.layer_norm(x, x.shape[-1:]) * gamma + F.linear(normed_cond, beta_weight)


def condition_gate(y: Tensor, cond: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None = None) -> Tensor:
    """The last lines of AF3 algorithm 25; arguments as in `api.condition_gate`."""
    out = y * F.linear(cond, weight, bias).sigmoid()
    return out if residual is None else residual + out
