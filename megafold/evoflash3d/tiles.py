"""Pieces that the forward and backward kernels share: tile access and dropout bits.

With TMA, an argument such as `q` is a tensor descriptor (host-made, rank 5) and the copy engine fetches tiles; without,
it is a pointer. Both forms read 0 outside of the tensor.
"""

from __future__ import annotations

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    tensor, b, r, h, start, s_b, s_r, s_h, s_n, length,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, EVEN: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """[BLOCK, BLOCK_D] of a [B, R, H, N, D] tensor: (b, r, h), rows from `start`."""
    if TMA:
        return tensor.load([b, r, h, start, 0]).reshape(BLOCK, BLOCK_D)
    else:
        n = tl.arange(0, BLOCK)
        d = tl.arange(0, BLOCK_D)
        pointers = row_pointer(tensor, b, r, h, start, s_b, s_r, s_h, s_n) + n[:, None] * s_n + d[None, :]
        if EVEN and D == BLOCK_D:
            return tl.load(pointers)
        else:
            return tl.load(pointers, mask=((start + n) < length)[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def store_tile(
    tensor, b, r, h, start, s_b, s_r, s_h, s_n, length, value,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Store [BLOCK, BLOCK_D] where it lies inside of a [B, R, H, N, D] tensor."""
    n = tl.arange(0, BLOCK)
    d = tl.arange(0, BLOCK_D)
    pointers = row_pointer(tensor, b, r, h, start, s_b, s_r, s_h, s_n) + n[:, None] * s_n + d[None, :]
    tl.store(pointers, value.to(tensor.dtype.element_ty), mask=((start + n) < length)[:, None] & (d < D)[None, :])


@triton.jit
def row_pointer(tensor, b, r, h, start, s_b, s_r, s_h, s_n):
    """Address of a row; 64-bit products, so that only offsets inside one tile have to fit in 32 bits."""
    far = tl.cast(b, tl.int64) * s_b + tl.cast(r, tl.int64) * s_r + tl.cast(h, tl.int64) * s_h
    return tensor + far + tl.cast(start, tl.int64) * s_n


@triton.jit
def load_bias(bias, row, column, n_columns, ROWS: tl.constexpr, COLUMNS: tl.constexpr, TMA: tl.constexpr):
    """[ROWS, COLUMNS] of the padded bias, a matrix of B * H * padded rows, in its own dtype."""
    if TMA:
        return bias.load([row, column])
    else:
        i = tl.arange(0, ROWS)
        j = tl.arange(0, COLUMNS)
        return tl.load(bias + tl.cast(row, tl.int64) * n_columns + column + i[:, None] * n_columns + j[None, :])


@triton.jit
def load_statistics(statistics, item, start, length, pitch, BLOCK: tl.constexpr, TMA: tl.constexpr):
    """[BLOCK] of a [B * R * H, pitch] matrix of per-query numbers; what lies outside reads as 0.

    0 is harmless for padded queries: their d(out) reads as 0 too, so whatever their p, they add nothing.
    """
    if TMA:
        return statistics.load([item, start]).reshape(BLOCK)
    else:
        n = start + tl.arange(0, BLOCK)
        return tl.load(statistics + tl.cast(item, tl.int64) * pitch + n, mask=n < length, other=0.0)


@triton.jit
def exp_wide(x):
    """exp with the rounding of x * log2(e) taken back to first order: as good as a library's expf."""
    y = x * LOG2E
    lost = tl.fma(x, LOG2E, -y) + x * 1.925963033500612e-8  # log2(e) is its fp32 value plus this
    p = tl.exp2(y)
    # Where x is -inf, so is y, and what was lost is not a number.
    return tl.where(p == 0.0, 0.0, p + p * (lost * LN2))


@triton.jit
def probability(product, scale, bias_tile, lse_i, HAS_BIAS: tl.constexpr, WIDE: tl.constexpr):
    """exp(scale product + bias - lse), with lse in base 2, or with WIDE (fp32 inputs) in base e.

    Base 2 saves an operation; in fp32 its second rounding of the log-sum-exp would double the error. There the
    log-sum-exp goes to the product and not to the bias: else Triton works out the probabilities twice, in two layouts.
    """
    if WIDE:
        x = product * scale
        if HAS_BIAS:
            x += bias_tile.to(tl.float32)
        return exp_wide(x - lse_i)
    else:
        x = product * (scale * LOG2E) - lse_i
        if HAS_BIAS:
            x += bias_tile.to(tl.float32) * LOG2E
        return tl.exp2(x)


@triton.jit
def score_gradient(p, dp, delta, AXIS: tl.constexpr, FEW: tl.constexpr):
    """d(scores) = p (d(p) - delta), with delta per query; keys along AXIS.

    FEW: the tile holds all keys, so that the probabilities can be made to sum to 1 and delta comes from the same d(p);
    `delta` is then only what d(lse) adds. So the gradient of a query with one live key is exactly 0.
    """
    if FEW:
        total = tl.sum(p, AXIS)
        p = tl.div_rn(p, tl.expand_dims(tl.where(total == 0.0, 1.0, total), AXIS) + tl.zeros_like(p))
        delta += tl.sum(p * dp, AXIS)
    return p * (dp - tl.expand_dims(delta, AXIS))


@triton.jit
def keep_factor(seed, threshold, inverse_keep, b, r, h, i, j):
    """1 / (1 - p) where dropout keeps the probability of the global (b, r, h, i, j), else 0; i and j broadcast."""
    c0 = j + i * 0
    c1 = i + j * 0
    bits, _, _, _ = tl.philox(tl.load(seed), c0, c1, c1 * 0 + r, c1 * 0 + b * 65536 + h, 7)
    return tl.where(bits.to(tl.int64) >= threshold, inverse_keep, 0.0)
