"""Eager definition of triangle multiplication, in the dtype of its inputs or under autocast."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def triangle_multiplication(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    in_weight: Tensor,
    gate_weight: Tensor,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor,
    out_weight: Tensor,
    outgoing: bool,
    mask: Tensor | None = None,
    dropped: Tensor | None = None,
    residual: bool = True,
) -> Tensor:
    """Arguments as in `api.triangle_multiplication`; `mask` [B, N, N] bool."""
    normed = F.layer_norm(x, x.shape[-1:], norm_weight, norm_bias)
    left, right = F.glu(F.linear(normed, in_weight), dim=-1).chunk(2, dim=-1)
    if mask is not None:
        left, right = left * mask.unsqueeze(-1), right * mask.unsqueeze(-1)
    equation = "bikd,bjkd->bijd" if outgoing else "bkjd,bkid->bijd"
    product = torch.einsum(equation, left, right)
    out = F.linear(F.layer_norm(product, product.shape[-1:], out_norm_weight, out_norm_bias), out_weight)
    if dropped is not None:
        out = out * dropped.to(out.dtype)
    out = out * F.linear(normed, gate_weight).sigmoid()
    return x + out if residual else out
