"""Eager definition of the MSA operators, with their large intermediates in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def outer_product_mean(
    msa: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    hidden_weight: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    mask: Tensor | None,
    msa_mask: Tensor | None,
    eps: float,
) -> Tensor:
    """AF3 algorithm 9; arguments as in `api.outer_product_mean`."""
    normed = F.layer_norm(msa, msa.shape[-1:], norm_weight, norm_bias)
    a, b = F.linear(normed, hidden_weight).chunk(2, dim=-1)
    if msa_mask is None:
        outer = torch.einsum("bsid,bsje->bijde", a, b) / msa.shape[1]
    else:
        keep = msa_mask.to(msa.dtype)[:, :, None, None]
        count = msa_mask.to(msa.dtype).sum(-1).clamp(min=eps)
        outer = torch.einsum("bsid,bsje->bijde", a * keep, b * keep) / count[:, None, None, None, None]
    outer = outer.flatten(-2)
    if mask is not None:
        outer = outer * (mask[:, :, None] & mask[:, None, :]).to(msa.dtype).unsqueeze(-1)
    return F.linear(outer, out_weight, out_bias)


def pair_weighted_averaging(
    msa: Tensor,
    pair: Tensor,
    msa_norm_weight: Tensor,
    msa_norm_bias: Tensor,
    values_gates_weight: Tensor,
    pair_norm_weight: Tensor,
    pair_norm_bias: Tensor,
    bias_weight: Tensor,
    out_weight: Tensor,
    mask: Tensor | None,
    dropped: Tensor | None,
    residual: bool,
) -> Tensor:
    """AF3 algorithm 10; arguments as in `api.pair_weighted_averaging`."""
    heads = bias_weight.shape[0]
    normed = F.layer_norm(msa, msa.shape[-1:], msa_norm_weight, msa_norm_bias)
    values, gates = (
        t.unflatten(-1, (heads, -1)) for t in F.linear(normed, values_gates_weight).chunk(2, dim=-1)
    )  # [B, S, N, H, D]
    logits = F.linear(F.layer_norm(pair, pair.shape[-1:], pair_norm_weight, pair_norm_bias), bias_weight)
    logits = logits.movedim(-1, 1)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None, :], -torch.finfo(logits.dtype).max)
    weights = logits.softmax(dim=-1)
    out = torch.einsum("bhij,bsjhd->bsihd", weights.to(values.dtype), values) * gates.sigmoid()
    out = F.linear(out.flatten(-2), out_weight)
    if dropped is not None:
        out = out * dropped.to(out.dtype)
    return msa + out if residual else out
