"""Kernels of windowed attention: one program a window and head, no unfolded copies of keys, values or masks.

The keys of window n are the rows (n - 1) W .. (n + 1) W of k, so they lie side by side; so do the queries that see the
keys of window n: n W .. (n + 2) W. That makes every gradient the work of one program: no atomics, no partial sums.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _place(NW, H):
    pid = tl.program_id(0)
    h = pid % H
    n = pid // H % NW
    b = (pid // (H * NW)).to(tl.int64)
    return b, n, h


@triton.jit
def _load(x, b, h, rows, exists, x_b, x_m, x_h, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """[rows, BLOCK_D] of [B, M, H, D]."""
    d = tl.arange(0, BLOCK_D)
    pointers = x + b * x_b + h * x_h + rows.to(tl.int64)[:, None] * x_m + d[None, :]
    return tl.load(pointers, mask=exists[:, None] & (d < D)[None, :], other=0.0)


@triton.jit
def _store(x, b, h, rows, exists, x_b, x_m, x_h, value, D: tl.constexpr, BLOCK_D: tl.constexpr):
    d = tl.arange(0, BLOCK_D)
    pointers = x + b * x_b + h * x_h + rows.to(tl.int64)[:, None] * x_m + d[None, :]
    tl.store(pointers, value.to(x.dtype.element_ty), mask=exists[:, None] & (d < D)[None, :])


@triton.jit
def _pairs(b, window, i, j, NW, W: tl.constexpr):
    """Offsets of query i and key j of a window in [B, NW, W, 2 W]."""
    return ((b * NW + window) * W + i) * (2 * W) + j


@triton.jit
def _scores(
    q, k, bias, mask, windowed_mask, b, h, window, i, keys, j, inside, exists, scale, NW, M, H, wm_b,
    W: tl.constexpr, HAS_MASK: tl.constexpr, HAS_WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scaled scores with the bias, -inf where a key is not seen. window, i, j: [Q, 1] or [Q, K]; keys: [K]. inside: in
    the tensors of pairs, which hold keys beyond the ends too; unlike `exists` it lets two elements be read at once."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    offsets = _pairs(b * H + h, window, i, j, NW, W)
    scores += tl.load(bias + offsets, mask=inside, other=0.0).to(tl.float32)
    if HAS_MASK:
        exists = exists & (tl.load(mask + b * M + keys, mask=(keys >= 0) & (keys < M), other=0) != 0)[None, :]
    if HAS_WINDOWED:
        offsets = b * wm_b + _pairs(b * 0, window, i, j, NW, W)
        exists = exists & (tl.load(windowed_mask + offsets, mask=inside, other=0) != 0)
    return tl.where(exists, scores, float("-inf"))


@triton.jit
def forward_kernel(
    q, k, v, bias, mask, windowed_mask, out, lse, q_b, q_m, q_h, k_b, k_m, k_h, v_b, v_m, v_h, wm_b, M, H, NW, scale,
    W: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out [B, M, H, D] and log-sum-exp [B, H, M]; 0 and -inf for a query without a key."""
    b, n, h = _place(NW, H)
    i, j = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)
    queries, keys = n * W + i, (n - 1) * W + j
    has_q = (i < W) & (queries < M)
    has_k = (j < 2 * W) & (keys >= 0) & (keys < M)
    q_tile = _load(q, b, h, queries, has_q, q_b, q_m, q_h, D, BLOCK_D)
    k_tile = _load(k, b, h, keys, has_k, k_b, k_m, k_h, D, BLOCK_D)
    x = _scores(
        q_tile, k_tile, bias, mask, windowed_mask, b, h, n, i[:, None], keys, j[None, :],
        (i < W)[:, None] & (j < 2 * W)[None, :], has_q[:, None] & has_k[None, :], scale, NW,
        M, H, wm_b, W, HAS_MASK, HAS_WINDOWED, PRECISION,
    )  # fmt: skip
    largest = tl.max(x, 1)
    p = tl.exp(x - tl.where(largest == float("-inf"), 0.0, largest)[:, None])
    total = tl.sum(p, 1)
    v_tile = _load(v, b, h, keys, has_k, v_b, v_m, v_h, D, BLOCK_D)
    y = tl.dot(p.to(v_tile.dtype), v_tile, input_precision=PRECISION)
    y /= tl.where(total == 0.0, 1.0, total)[:, None]
    _store(out, b, h, queries, has_q, tl.cast(M, tl.int64) * H * D, H * D, D, y, D, BLOCK_D)
    tl.store(lse + (b * H + h) * M + queries, largest + tl.log(total), mask=has_q)


@triton.jit
def _gradient_of_scores(x, lse, delta, upstream, v, PRECISION: tl.constexpr):
    """Probabilities and the gradient of the scores."""
    p = tl.exp(x - tl.where(lse == float("-inf"), 0.0, lse)[:, None])
    grad = tl.dot(upstream, tl.trans(v), input_precision=PRECISION)
    return p, p * (grad - delta[:, None])


@triton.jit
def gradient_kernel(
    grad_out, q, k, v, bias, mask, windowed_mask, out, lse, dq, dk, dv, dbias,
    q_b, q_m, q_h, k_b, k_m, k_h, v_b, v_m, v_h, wm_b, M, H, NW, scale,
    W: tl.constexpr, D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_MASK: tl.constexpr, HAS_WINDOWED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq and dbias of window n, then dk and dv of the same window, which its queries and those of n + 1 see."""
    b, n, h = _place(NW, H)
    o_b, o_m = tl.cast(M, tl.int64) * H * D, H * D  # grad_out, out, dq, dk, dv are contiguous
    few, many = tl.arange(0, BLOCK_Q), tl.arange(0, BLOCK_K)

    queries, keys = n * W + few, (n - 1) * W + many
    has_q = (few < W) & (queries < M)
    has_k = (many < 2 * W) & (keys >= 0) & (keys < M)
    q_tile = _load(q, b, h, queries, has_q, q_b, q_m, q_h, D, BLOCK_D)
    k_tile = _load(k, b, h, keys, has_k, k_b, k_m, k_h, D, BLOCK_D)
    v_tile = _load(v, b, h, keys, has_k, v_b, v_m, v_h, D, BLOCK_D)
    g_tile = _load(grad_out, b, h, queries, has_q, o_b, o_m, D, D, BLOCK_D)
    o_tile = _load(out, b, h, queries, has_q, o_b, o_m, D, D, BLOCK_D)
    delta = tl.sum(g_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    lse_tile = tl.load(lse + (b * H + h) * M + queries, mask=has_q, other=0.0)
    x = _scores(
        q_tile, k_tile, bias, mask, windowed_mask, b, h, n, few[:, None], keys, many[None, :],
        (few < W)[:, None] & (many < 2 * W)[None, :], has_q[:, None] & has_k[None, :], scale, NW,
        M, H, wm_b, W, HAS_MASK, HAS_WINDOWED, PRECISION,
    )  # fmt: skip
    _, ds = _gradient_of_scores(x, lse_tile, delta, g_tile, v_tile, PRECISION)
    offsets = _pairs(b * H + h, n, few[:, None], many[None, :], NW, W)
    tl.store(dbias + offsets, ds.to(dbias.dtype.element_ty), mask=(few < W)[:, None] & (many < 2 * W)[None, :])
    dq_tile = tl.dot(ds.to(k_tile.dtype), k_tile, input_precision=PRECISION) * scale
    _store(dq, b, h, queries, has_q, o_b, o_m, D, dq_tile, D, BLOCK_D)

    queries, keys = n * W + many, n * W + few
    has_q = (many < 2 * W) & (queries < M)
    has_k = (few < W) & (keys < M)
    later = (many >= W).to(tl.int32)  # queries of window n + 1 have these keys as their first W
    q_tile = _load(q, b, h, queries, has_q, q_b, q_m, q_h, D, BLOCK_D)
    k_tile = _load(k, b, h, keys, has_k, k_b, k_m, k_h, D, BLOCK_D)
    v_tile = _load(v, b, h, keys, has_k, v_b, v_m, v_h, D, BLOCK_D)
    g_tile = _load(grad_out, b, h, queries, has_q, o_b, o_m, D, D, BLOCK_D)
    o_tile = _load(out, b, h, queries, has_q, o_b, o_m, D, D, BLOCK_D)
    delta = tl.sum(g_tile.to(tl.float32) * o_tile.to(tl.float32), 1)
    lse_tile = tl.load(lse + (b * H + h) * M + queries, mask=has_q, other=0.0)
    i = (many - later * W)[:, None]
    j = few[None, :] + (1 - later)[:, None] * W
    x = _scores(
        q_tile, k_tile, bias, mask, windowed_mask, b, h, (n + later)[:, None], i, keys, j,
        ((many < 2 * W) & (n + later < NW))[:, None] & (few < W)[None, :], has_q[:, None] & has_k[None, :], scale, NW,
        M, H, wm_b, W, HAS_MASK, HAS_WINDOWED, PRECISION,
    )  # fmt: skip
    p, ds = _gradient_of_scores(x, lse_tile, delta, g_tile, v_tile, PRECISION)
    dv_tile = tl.dot(tl.trans(p.to(g_tile.dtype)), g_tile, input_precision=PRECISION)
    _store(dv, b, h, keys, has_k, o_b, o_m, D, dv_tile, D, BLOCK_D)
    dk_tile = tl.dot(tl.trans(ds.to(q_tile.dtype)), q_tile, input_precision=PRECISION) * scale
    _store(dk, b, h, keys, has_k, o_b, o_m, D, dk_tile, D, BLOCK_D)
