"""`outer_product_mean` and `pair_weighted_averaging`: argument checks and what their operators compute."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.evofusion.attention_output.api import gated
from megafold.evofusion.msa import average
from megafold.evofusion.msa.outer_product import outer_product
from megafold.evofusion.msa.regroup import regroup
from megafold.evofusion.norm_project.api import norm_project
from megafold.evofusion.operator import check_dropped, check_rows, check_tensors, refuse


def outer_product_mean(
    msa: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    hidden_weight: Tensor,
    out_weight: Tensor,
    out_bias: Tensor,
    *,
    mask: Tensor | None = None,
    msa_mask: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """AF3 algorithm 9, without the [N, N, H * H] tensor.

    Args:
        msa: [B, S, N, D], fp32, bf16 or fp16 (or fp64).
        norm_weight, norm_bias: [D], of the LayerNorm (eps 1e-5).
        hidden_weight: [2 H, D]: the two factors' projections. out_weight: [C, H * H]. out_bias: [C].
        mask: [B, N] bool: a pair is its bias alone where a token is not kept. msa_mask: [B, S] bool: what counts.
        eps: least number of sequences to divide by.

    Returns:
        [B, N, N, C] in the dtype of products.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward.
    """
    name = "outer_product_mean"
    width = check_rows(name, "msa", msa, 4)
    batch, depth, size, _ = msa.shape
    hidden, outputs = hidden_weight.shape[0] // 2, out_weight.shape[0]
    expected = {
        "norm_weight": (norm_weight, (width,), ()),
        "norm_bias": (norm_bias, (width,), ()),
        "hidden_weight": (hidden_weight, (2 * hidden, width), ()),
        "out_weight": (out_weight, (outputs, hidden * hidden), ()),
        "out_bias": (out_bias, (outputs,), ()),
        "mask": (mask, (batch, size), (torch.bool,)),
        "msa_mask": (msa_mask, (batch, depth), (torch.bool,)),
    }
    check_tensors(name, msa, expected)
    (a, b), _ = norm_project(msa, norm_weight, norm_bias, hidden_weight.chunk(2))
    # The factor goes to one of the two, before their product: in fp16 the sum alone could be too large.
    if msa_mask is None:
        a = a * (1.0 / depth)
    else:
        count = msa_mask.sum(-1, keepdim=True).clamp(min=eps)
        a = a * (msa_mask / count).to(a.dtype)[:, :, None, None]
    if mask is not None:  # a pair is kept where both tokens are: its product is zero elsewhere
        keep = mask.to(a.dtype)[:, None, :, None]
        a, b = a * keep, b * keep
    return outer_product(a, b, out_weight, out_bias)


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
    *,
    mask: Tensor | None = None,
    dropped: Tensor | None = None,
    residual: bool = True,
) -> Tensor:
    """AF3 algorithm 10 on a residual stream.

    Args:
        msa: [B, S, N, D]; pair: [B, N, N, C]; fp32, bf16 or fp16 (or fp64).
        msa_norm_weight, msa_norm_bias: [D]. pair_norm_weight, pair_norm_bias: [C] (eps 1e-5).
        values_gates_weight: [2 H E, D]: values of all heads, then gates. bias_weight: [H, C]. out_weight: [D, H E].
        mask: [B, N] bool, True = token is averaged over.
        dropped: the drawn factor of a row- or column-shared dropout: [B, 1, N, D] or [B, S, 1, D]; it gets no gradient.
        residual: add msa. Without, the result has the dtype of products.

    Returns:
        [B, S, N, D].

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward.
    """
    name = "pair_weighted_averaging"
    width, pair_width = check_rows(name, "msa", msa, 4), check_rows(name, "pair", pair, 4)
    batch, depth, size, _ = msa.shape
    heads, inner = bias_weight.shape[0], out_weight.shape[-1]
    if inner % heads:
        refuse(name, "out_weight", f"has {inner} columns", f"a multiple of the {heads} heads of bias_weight")
    expected = {
        "pair": (pair, (batch, size, size, pair_width), ()),
        "msa_norm_weight": (msa_norm_weight, (width,), ()),
        "msa_norm_bias": (msa_norm_bias, (width,), ()),
        "values_gates_weight": (values_gates_weight, (2 * inner, width), ()),
        "pair_norm_weight": (pair_norm_weight, (pair_width,), ()),
        "pair_norm_bias": (pair_norm_bias, (pair_width,), ()),
        "bias_weight": (bias_weight, (heads, pair_width), ()),
        "out_weight": (out_weight, (width, inner), ()),
        "mask": (mask, (batch, size), (torch.bool,)),
    }
    check_tensors(name, msa, expected)
    check_dropped(name, dropped, msa.shape, msa.device)
    _, logits = norm_project(pair, pair_norm_weight, pair_norm_bias, head_weight=bias_weight)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None, :], torch.finfo(logits.dtype).min)
    weights = logits.softmax(dim=-1)
    if average.serves(msa, heads, inner):
        parameters = msa_norm_weight, msa_norm_bias, values_gates_weight, out_weight
        return average.average(msa, weights, *parameters, dropped, residual)
    (values, gates), _ = norm_project(msa, msa_norm_weight, msa_norm_bias, values_gates_weight.chunk(2))
    # One product a head: [N, N] x [N, S E].
    values = regroup(values.unflatten(-1, (heads, -1)))
    averaged = weights.to(values.dtype) @ values.flatten(-2)
    averaged = regroup(averaged.unflatten(-1, (depth, -1))).flatten(-2)
    out = F.linear(gated(averaged, gates), out_weight.to(averaged.dtype))
    if dropped is not None:
        out = out * dropped.detach().to(out.dtype)
    return (msa + out).to(msa.dtype) if residual else out
