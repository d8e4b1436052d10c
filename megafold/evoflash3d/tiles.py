"""Pieces that the forward and backward kernels share: tile access, dropout bits, grids over (batch, row, head)."""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def load_tile(
    base, stride, start, length, D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr
):
    """[BLOCK, BLOCK_D] from row `start` of a matrix with `length` rows of D elements; what lies outside reads as 0."""
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    # The start is advanced in 64 bits, so that only offsets inside one tile have to fit in 32.
    pointers = base + tl.cast(start, tl.int64) * stride + n[:, None] * stride + d[None, :]
    if EVEN and D == BLOCK_D:
        return tl.load(pointers)
    elif EVEN:
        return tl.load(pointers, mask=d[None, :] < D, other=0.0)
    else:
        return tl.load(pointers, mask=((start + n) < length)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_tile(
    base,
    stride,
    start,
    length,
    value,
    condition,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Store [BLOCK, BLOCK_D] from row `start`, where it lies inside and `condition` (a scalar) holds."""
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    pointers = base + tl.cast(start, tl.int64) * stride + n[:, None] * stride + d[None, :]
    inside = ((start + n) < length)[:, None] & (d < D)[None, :] & condition
    tl.store(pointers, value.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_bias(
    base,
    stride,
    row,
    column,
    n_rows,
    n_columns,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EVEN_ROWS: tl.constexpr,
    EVEN_COLUMNS: tl.constexpr,
):
    """[ROWS, COLUMNS] of the bias in its own dtype."""
    i = tl.arange(0, ROWS)
    j = tl.arange(0, COLUMNS)
    pointers = base + tl.cast(row, tl.int64) * stride + column + i[:, None] * stride + j[None, :]
    if EVEN_ROWS and EVEN_COLUMNS:
        return tl.load(pointers)
    else:
        inside = ((row + i) < n_rows)[:, None] & ((column + j) < n_columns)[None, :]
        return tl.load(pointers, mask=inside, other=0.0)


@triton.jit
def keep_factor(seed, threshold, inverse_keep, b, r, h, i, j):
    """1 / (1 - p) where dropout keeps the probability of the global (b, r, h, i, j), else 0; i and j broadcast."""
    c0 = j + i * 0
    c1 = i + j * 0
    bits, _, _, _ = tl.philox(seed, c0, c1, c1 * 0 + r, c1 * 0 + b * 65536 + h, 7)
    return tl.where(bits.to(tl.int64) >= threshold, inverse_keep, 0.0)
