"""Kernels over single rows of any width: LayerNorm with padded output, SwiGLU, scale and shift, gates.

They surround the vendor's matrix products where rows are too wide for a program to hold them beside the weights. A row
of the output may be longer than its input, padded with zeros to a multiple of 16 elements: fast products and loads need
rows of whole 16 bytes, which a width such as 801 does not give.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafold.evofusion.launch import EPS, ceil_div, round_up
from megafold.evofusion.tiles import sigmoid
from megafold.replay import launch_kernel

ELEMENTS = 2048
"""Elements that a program holds at once."""

GATE_BLOCK = {"BLOCK_L": 4, "BLOCK_C": 512}


@triton.jit
def _moments(x, inside, C, eps):
    """x - mean (0 outside), and 1 / sqrt(variance + eps), of rows whose last columns are padding."""
    centred = tl.where(inside, x - (tl.sum(x, 1) / C)[:, None], 0.0)
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, 1) / C + eps))
    return centred * rstd[:, None], rstd


@triton.jit
def _load(x, rows, c, pitch, C, M):
    return tl.load(x + rows[:, None] * pitch + c[None, :], mask=(rows < M)[:, None] & (c < C)[None, :], other=0.0).to(
        tl.float32
    )


@triton.jit
def _store(x, rows, c, pitch, M, value):
    """Store columns below `pitch`, the padding too."""
    pointers = x + rows[:, None] * pitch + c[None, :]
    tl.store(pointers, value.to(x.dtype.element_ty), mask=(rows < M)[:, None] & (c < pitch)[None, :])


@triton.jit
def _rows(BLOCK_L: tl.constexpr):
    return tl.program_id(0).to(tl.int64) * BLOCK_L + tl.arange(0, BLOCK_L)


@triton.jit
def normalize_kernel(
    x, out, copy, M, C, pitch, eps,
    BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, COPY: tl.constexpr, ONES: tl.constexpr,
):  # fmt: skip
    """(x - mean) / std, padded, and with COPY x itself, padded; with ONES the padding's first column holds ones."""
    rows = _rows(BLOCK_L)
    c = tl.arange(0, BLOCK_C)
    tile = _load(x, rows, c, C, C, M)
    x_hat, _ = _moments(tile, (c < C)[None, :], C, eps)
    if ONES:
        behind = (c == C)[None, :]
        tile, x_hat = tl.where(behind, 1.0, tile), tl.where(behind, 1.0, x_hat)
    if COPY:
        _store(copy, rows, c, pitch, M, tile)
    _store(out, rows, c, pitch, M, x_hat)


@triton.jit
def normalize_gradient_kernel(
    x, grad, other, out, M, C, pitch, eps,
    BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Gradient of x from that of (x - mean) / std [M, pitch], plus `other`: 1: [M, pitch], 2: [M, C]."""
    rows = _rows(BLOCK_L)
    c = tl.arange(0, BLOCK_C)
    x_hat, rstd = _moments(_load(x, rows, c, C, C, M), (c < C)[None, :], C, eps)
    g = _load(grad, rows, c, pitch, C, M)
    mean = (tl.sum(g, 1) / C)[:, None]
    slope = (tl.sum(g * x_hat, 1) / C)[:, None]
    result = rstd[:, None] * (g - mean - x_hat * slope)
    if OTHER == 1:
        result += _load(other, rows, c, pitch, C, M)
    elif OTHER == 2:
        result += _load(other, rows, c, C, C, M)
    pointers = out + rows[:, None] * C + c[None, :]
    tl.store(pointers, result.to(out.dtype.element_ty), mask=(rows < M)[:, None] & (c < C)[None, :])


@triton.jit
def fold_kernel(
    w0, w1, gamma, out, FIRST, M, C, pitch, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, SCALE: tl.constexpr
):
    """w0 [FIRST, C] and below it w1 [M - FIRST, C], with SCALE times gamma, padded: [M, pitch]."""
    rows = _rows(BLOCK_L)
    c = tl.arange(0, BLOCK_C)
    value = _load(w0, rows, c, C, C, FIRST)
    inside = ((rows >= FIRST) & (rows < M))[:, None] & (c < C)[None, :]
    value += tl.load(w1 + (rows - FIRST)[:, None] * C + c[None, :], mask=inside, other=0.0).to(tl.float32)
    if SCALE:
        value *= tl.load(gamma + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    _store(out, rows, c, pitch, M, value)


@triton.jit
def swiglu_kernel(pre, out, M, INNER, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    """pre [M, 2 INNER]: values, gates; out [M, INNER] = values silu(gates)."""
    rows = _rows(BLOCK_L)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    values = _load(pre, rows, c, 2 * INNER, INNER, M)
    gates = _load(pre + INNER, rows, c, 2 * INNER, INNER, M)
    _store(out, rows, c, INNER, M, values * gates * sigmoid(gates))


@triton.jit
def swiglu_gradient_kernel(pre, grad, out, hidden, M, INNER, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    """out [M, 2 INNER] from grad [M, INNER]; hidden [M, INNER] as the forward had it."""
    rows = _rows(BLOCK_L)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    values = _load(pre, rows, c, 2 * INNER, INNER, M)
    gates = _load(pre + INNER, rows, c, 2 * INNER, INNER, M)
    g = _load(grad, rows, c, INNER, INNER, M)
    s = sigmoid(gates)
    _store(hidden, rows, c, INNER, M, values * gates * s)
    inside = (rows < M)[:, None] & (c < INNER)[None, :]
    pointers = out + rows[:, None] * (2 * INNER) + c[None, :]
    tl.store(pointers, (g * gates * s).to(out.dtype.element_ty), mask=inside)
    tl.store(pointers + INNER, (g * values * s * (1.0 + gates * (1.0 - s))).to(out.dtype.element_ty), mask=inside)


@triton.jit
def scale_shift_kernel(x, pre, gamma_bias, out, M, C, eps, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr):
    """(x - mean) / std * sigmoid(pre[:, :C] + gamma_bias) + pre[:, C:]."""
    rows = _rows(BLOCK_L)
    c = tl.arange(0, BLOCK_C)
    x_hat, _ = _moments(_load(x, rows, c, C, C, M), (c < C)[None, :], C, eps)
    scale = _load(pre, rows, c, 2 * C, C, M) + tl.load(gamma_bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    _store(out, rows, c, C, M, x_hat * sigmoid(scale) + _load(pre + C, rows, c, 2 * C, C, M))


@triton.jit
def scale_shift_gradient_kernel(
    grad, x, pre, gamma_bias, other, grad_x, grad_pre, M, C, eps,
    BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, OTHER: tl.constexpr,
):  # fmt: skip
    """Gradients of x, with OTHER plus `other` [M, C], and of `pre` [M, 2 C]."""
    rows = _rows(BLOCK_L)
    c = tl.arange(0, BLOCK_C)
    inside = (rows < M)[:, None] & (c < C)[None, :]
    x_hat, rstd = _moments(_load(x, rows, c, C, C, M), (c < C)[None, :], C, eps)
    scale = _load(pre, rows, c, 2 * C, C, M) + tl.load(gamma_bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    scale = sigmoid(scale)
    g = _load(grad, rows, c, C, C, M)
    pointers = grad_pre + rows[:, None] * (2 * C) + c[None, :]
    tl.store(pointers, (g * x_hat * scale * (1.0 - scale)).to(grad_pre.dtype.element_ty), mask=inside)
    tl.store(pointers + C, g.to(grad_pre.dtype.element_ty), mask=inside)
    g *= scale
    mean = (tl.sum(g, 1) / C)[:, None]
    slope = (tl.sum(g * x_hat, 1) / C)[:, None]
    result = rstd[:, None] * (g - mean - x_hat * slope)
    if OTHER:
        result += _load(other, rows, c, C, C, M)
    _store(grad_x, rows, c, C, M, result)


@triton.jit
def _gate_of(pre, bias, rows, c, C, M, HAS_BIAS: tl.constexpr):
    gate = _load(pre, rows, c, C, C, M)
    if HAS_BIAS:
        gate += tl.load(bias + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    return gate


@triton.jit
def gate_kernel(
    y, pre, bias, residual, out, M, C,
    BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr, RESIDUAL: tl.constexpr,
):  # fmt: skip
    """residual + y sigmoid(pre + bias)."""
    rows = _rows(BLOCK_L)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    gate = _gate_of(pre, bias, rows, c, C, M, HAS_BIAS)
    value = _load(y, rows, c, C, C, M) * sigmoid(gate)
    if RESIDUAL:
        value += _load(residual, rows, c, C, C, M)
    _store(out, rows, c, C, M, value)


@triton.jit
def gate_gradient_kernel(
    grad, y, pre, bias, grad_y, grad_pre, M, C, BLOCK_L: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BIAS: tl.constexpr
):
    """Gradients of y and of `pre`."""
    rows = _rows(BLOCK_L)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    gate = sigmoid(_gate_of(pre, bias, rows, c, C, M, HAS_BIAS))
    g = _load(grad, rows, c, C, C, M)
    _store(grad_y, rows, c, C, M, g * gate)
    _store(grad_pre, rows, c, C, M, g * _load(y, rows, c, C, C, M) * gate * (1.0 - gate))


def gated(
    y: Tensor, pre: Tensor, bias: Tensor | None = None, residual: Tensor | None = None, *, out_dtype: torch.dtype
) -> Tensor:
    """residual + y sigmoid(pre + bias) of rows [M, C]."""
    out = torch.empty_like(y, dtype=out_dtype)
    launch_kernel(
        gate_kernel, _gate_grid(y),
        y, pre, y if bias is None else bias, y if residual is None else residual, out, *y.shape,
        HAS_BIAS=bias is not None, RESIDUAL=residual is not None, **GATE_BLOCK, num_warps=4,
    )  # fmt: skip
    return out


def gated_gradient(grad: Tensor, y: Tensor, pre: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Gradients of y and of `pre` [M, C], in their dtypes."""
    grad_y, grad_pre = torch.empty_like(y), torch.empty_like(pre)
    launch_kernel(
        gate_gradient_kernel, _gate_grid(y),
        grad, y, pre, y if bias is None else bias, grad_y, grad_pre, *y.shape, HAS_BIAS=bias is not None,
        **GATE_BLOCK, num_warps=4,
    )  # fmt: skip
    return grad_y, grad_pre


def _gate_grid(y: Tensor) -> tuple[int, int]:
    rows, width = y.shape
    return ceil_div(rows, GATE_BLOCK["BLOCK_L"]), ceil_div(width, GATE_BLOCK["BLOCK_C"])


def whole_rows(width: int) -> tuple[int, int]:
    """BLOCK_L and BLOCK_C of kernels that hold whole rows."""
    block_c = 1 << max(4, (width - 1).bit_length())
    return max(1, ELEMENTS // block_c), block_c


def normalized(
    x: Tensor, dtype: torch.dtype, *, copy: bool = False, ones: bool = False
) -> tuple[Tensor, Tensor | None]:
    """(x - mean) / std of rows [M, C], and with `copy` x, in `dtype` and padded to [M, multiple of 16].

    With `ones` the first column of the padding, if there is one, holds ones: a product over the rows then sums them.
    """
    rows, width = x.shape
    out = x.new_empty((rows, round_up(width)), dtype=dtype)
    second = torch.empty_like(out) if copy else None
    block_l, block_c = whole_rows(out.shape[1])
    launch_kernel(
        normalize_kernel, (ceil_div(rows, block_l),),
        x, out, out if second is None else second, rows, width, out.shape[1], EPS, BLOCK_L=block_l, BLOCK_C=block_c,
        COPY=copy, ONES=ones, num_warps=4,
    )  # fmt: skip
    return out, second


def normalized_gradient(x: Tensor, grad: Tensor, other: Tensor | None = None) -> Tensor:
    """Gradient of x [M, C] from that of `normalized` [M, padded], plus `other` [M, padded or C]."""
    rows, width = x.shape
    kind = 0 if other is None else 1 if other.shape[1] == grad.shape[1] else 2
    out = torch.empty_like(x)
    block_l, block_c = whole_rows(grad.shape[1])
    launch_kernel(
        normalize_gradient_kernel, (ceil_div(rows, block_l),),
        x, grad, x if other is None else other, out, rows, width, grad.shape[1], EPS, BLOCK_L=block_l,
        BLOCK_C=block_c, OTHER=kind, num_warps=4,
    )  # fmt: skip
    return out


def folded(weights: Sequence[Tensor], gamma: Tensor | None, dtype: torch.dtype) -> Tensor:
    """One or two weights [O, C] one below the other, times gamma [C], in `dtype`: [O, C filled up to 16] with zeros."""
    width, rows = weights[0].shape[1], sum(weight.shape[0] for weight in weights)
    out = weights[0].new_empty((rows, round_up(width)), dtype=dtype)
    first, last = weights[0].contiguous(), weights[-1].contiguous()
    block_l, block_c = whole_rows(out.shape[1])
    launch_kernel(
        fold_kernel, (ceil_div(rows, block_l),),
        first, last, first if gamma is None else gamma, out, first.shape[0], rows, width, out.shape[1],
        BLOCK_L=block_l, BLOCK_C=block_c, SCALE=gamma is not None, num_warps=4,
    )  # fmt: skip
    return out


def padded(weight: Tensor, dtype: torch.dtype, *, rows: int = 0, columns: int = 0) -> Tensor:
    """A copy of a weight matrix in `dtype`, filled up with zeros to at least `rows` x `columns`."""
    have_rows, have_columns = weight.shape
    if rows <= have_rows and columns <= have_columns:
        return weight.to(dtype).contiguous()
    out = weight.new_zeros((max(rows, have_rows), max(columns, have_columns)), dtype=dtype)
    out[:have_rows, :have_columns] = weight
    return out
