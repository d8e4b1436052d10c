"""Host side of LayerNorm and several projections."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.launch import EPS, block, ceil_div, configuration, in_dtype, options
from megafold.evofusion.norm_project import kernels
from megafold.evofusion.weight_gradient import Operand, Rows, by_rows, through_norm

MOST = 4
"""Projections by rows that one call may have."""


def forward(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    head_weight: Tensor | None,
    count: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Four projections [..., O] and the heads [B, H, ...]; what was not asked for has no element."""
    x, (batch, length, width) = x.contiguous(), _sizes(x)
    outputs = 0 if weight is None else weight.shape[0] // count
    number = 0 if head_weight is None else head_weight.shape[0]
    rows = [x.new_empty((*x.shape[:-1], outputs) if p < count else (0,), dtype=dtype) for p in range(MOST)]
    heads = x.new_empty((batch, number, *x.shape[1:-1]) if number else (0,), dtype=dtype)
    w, w_heads = _weights(weight, head_weight, x, dtype)
    config = configuration("norm_project", dtype, x.device)
    with triton_support.device_guard(x.device):
        kernels.project_kernel[(batch * ceil_div(length, config["block_l"]),)](
            x, norm_weight, x if norm_bias is None else norm_bias, w, x if bias is None else bias, w_heads, *rows,
            heads, length, outputs, EPS, HAS_BETA=norm_bias is not None, HAS_BIAS=bias is not None,
            **_constants(config, width, outputs, count, number), **options(config),
        )  # fmt: skip
    return (*rows, heads)


def backward(
    grads: list[Tensor | None],
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    head_weight: Tensor | None,
    count: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Gradients of x and of the parameters; without elements for those that are not there."""
    x, (batch, length, width) = x.contiguous(), _sizes(x)
    outputs = 0 if weight is None else weight.shape[0] // count
    number = 0 if head_weight is None else head_weight.shape[0]
    rows = [x.new_zeros((*x.shape[:-1], outputs), dtype=dtype) if g is None else g.contiguous() for g in grads[:count]]
    heads = x
    if number:
        shape = (batch, number, *x.shape[1:-1])
        heads = x.new_zeros(shape, dtype=dtype) if grads[MOST] is None else grads[MOST].contiguous()
    w, w_heads = _weights(weight, head_weight, x, dtype)
    config = configuration("norm_project_gradient", dtype, x.device)
    grad_x = torch.empty_like(x)
    with triton_support.device_guard(x.device):
        kernels.gradient_kernel[(batch * ceil_div(length, config["block_l"]),)](
            x, norm_weight, w, w_heads, *rows, *[x] * (MOST - count), heads, grad_x, length, outputs, EPS,
            **_constants(config, width, outputs, count, number), **options(config),
        )  # fmt: skip
        sums = Rows(batch, 1, length, count * outputs + number, width, x.device, dtype)
        flat = by_rows(x.view(batch, 1, length, width))
        for p, grad in enumerate(rows):
            sums.add(by_rows(grad.view(batch, 1, length, outputs)), flat, outputs, p * outputs, norm=True)
        if number:
            columns = Operand(heads, number * length, 0, length, columns=True)
            sums.add(columns, flat, number, count * outputs, norm=True)
        products, totals = sums.finish()
        given = [t for t in (weight, head_weight) if t is not None]
        *grad_weights, grad_gamma, grad_beta = (
            *through_norm(products, totals, given, norm_weight, norm_bias),
            *([] if norm_bias is not None else [x.new_empty(0)]),
        )
    none = x.new_empty(0)
    split = count * outputs
    return (
        grad_x,
        grad_gamma,
        grad_beta,
        none if weight is None else grad_weights[0],
        none if bias is None else totals[:split, 0].to(bias.dtype),
        grad_weights[-1] if number else none,
    )


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Structures, rows of each, and their width."""
    batch, width = x.shape[0], x.shape[-1]
    return batch, x.numel() // (batch * width), width


def _weights(weight: Tensor | None, head_weight: Tensor | None, x: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """In the dtype of products; something of that dtype that is not read where one is missing."""
    given = head_weight if weight is None else weight
    return in_dtype(dtype, given if weight is None else weight, given if head_weight is None else head_weight)


def _constants(config: dict, width: int, outputs: int, count: int, heads: int) -> dict[str, object]:
    return {
        "C": width,
        "BLOCK_L": config["block_l"],
        "BLOCK_O": block(config, "block_o", outputs) if outputs else 16,
        "BLOCK_H": max(16, 1 << (heads - 1).bit_length()) if heads else 16,
        "COUNT": count,
        "HEADS": heads,
        "PRECISION": triton_support.float32_precision(),
    }
