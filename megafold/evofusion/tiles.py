"""Pieces that the kernels share: LayerNorm of a tile and its gradient, sigmoid, tiles of rows.

Rows of width C are contiguous; a tile is BLOCK_L of them, all of one group (a row i of a structure b), so that the
same tile can be addressed by rows [.., L, C] and by columns [.., C, L].
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def normalize(x, eps, AXIS: tl.constexpr):
    """(x - mean) / sqrt(variance + eps) along an axis, in fp32, and 1 / sqrt(variance + eps)."""
    size: tl.constexpr = x.shape[AXIS]
    centred = x - tl.expand_dims(tl.sum(x, AXIS) / size, AXIS)
    variance = tl.sum(centred * centred, AXIS) / size
    rstd = tl.div_rn(1.0, tl.sqrt_rn(variance + eps))
    return centred * tl.expand_dims(rstd, AXIS), rstd


@triton.jit
def normalize_gradient(grad, x_hat, rstd, AXIS: tl.constexpr):
    """Gradient of what `normalize` was given, from that of x_hat."""
    size: tl.constexpr = x_hat.shape[AXIS]
    mean = tl.expand_dims(tl.sum(grad, AXIS) / size, AXIS)
    slope = tl.expand_dims(tl.sum(grad * x_hat, AXIS) / size, AXIS)
    return tl.expand_dims(rstd, AXIS) * (grad - mean - x_hat * slope)


@triton.jit
def sigmoid(x, FAST: tl.constexpr = False):
    """1 / (1 + exp(-x)) in fp32. FAST: in 4 instructions of NVIDIA's and not in 14, which also serve denormals."""
    if FAST:
        return tl.inline_asm_elementwise(
            "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
            "=f,f",
            [x * -1.4426950408889634],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def load_rows(x, row, at, length, width, column, BLOCK: tl.constexpr):
    """[BLOCK_L, BLOCK] in fp32: rows `row` + at (at < length) of a matrix of rows of `width`, columns from `column`."""
    c = column + tl.arange(0, BLOCK)
    return tl.load(x + row * width + at[:, None] * width + c[None, :], mask=(at < length)[:, None], other=0.0).to(
        tl.float32
    )


@triton.jit
def load_rows_again(x, row, at, length, width, column, BLOCK: tl.constexpr):
    """`load_rows` a second time: with another cache hint, or the compiler would keep the first one in registers."""
    c = column + tl.arange(0, BLOCK)
    pointers = x + row * width + at[:, None] * width + c[None, :]
    tile = tl.load(pointers, mask=(at < length)[:, None], other=0.0, eviction_policy="evict_first")
    return tile.to(tl.float32)


@triton.jit
def store_rows(x, row, at, length, width, column, value, BLOCK: tl.constexpr):
    """Store [BLOCK_L, BLOCK] as `load_rows` reads it, in the dtype of x."""
    c = column + tl.arange(0, BLOCK)
    pointers = x + row * width + at[:, None] * width + c[None, :]
    tl.store(pointers, value.to(x.dtype.element_ty), mask=(at < length)[:, None])


@triton.jit
def load_weight(w, row, width, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """[ROWS, COLUMNS] of a weight matrix [O, width] in its own dtype, from row `row` and column 0."""
    return tl.load(w + (row + tl.arange(0, ROWS))[:, None] * width + tl.arange(0, COLUMNS)[None, :])


@triton.jit
def affine(x_hat, weight, bias, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr):
    """x_hat * weight + bias for rows [BLOCK_L, WIDTH]; weight and bias are vectors in memory."""
    c = tl.arange(0, WIDTH)
    out = x_hat * tl.load(weight + c).to(tl.float32)[None, :]
    if HAS_BIAS:
        out += tl.load(bias + c).to(tl.float32)[None, :]
    return out
