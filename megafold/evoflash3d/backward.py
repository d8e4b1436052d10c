"""Backward kernels, without atomics; every sum has a fixed order.

`delta_kernel`    row sums of out * d(out); from a natural log-sum-exp also the one in base 2.
`few_keys_delta_kernel`  the same delta from probabilities, where the rounding of the output would be seen.
`queries_kernel`  dq of a block of queries; the keys pass by.
`keys_kernel`     dk and dv of a block of keys; the queries pass by, with transposed scores.
`bias_kernel`     d(bias) of one tile over a chunk of rows, in registers.
`sum_kernel`      chunks added up in a fixed order, and rounded to the dtype of the bias in the same pass.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafold.evoflash3d.tiles import (
    LOG2E,
    exp_wide,
    keep_factor,
    load_bias,
    load_statistics,
    load_tile,
    probability,
    score_gradient,
    store_tile,
)


@triton.jit
def delta_kernel(
    out, grad_out, lse, grad_lse, delta, lse2,
    o_b, o_r, o_h, o_n, g_b, g_r, g_h, g_n, R, H, NQ, pitch,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    NATURAL: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta = sum over D of out * d(out), minus d(lse). NATURAL: also lse2, which the forward makes otherwise."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(NQ, BLOCK)
    start = (pid % blocks) * BLOCK
    item = pid // blocks
    h, r, b = item % H, (item // H) % R, item // (H * R)
    o = load_tile(out, b, r, h, start, o_b, o_r, o_h, o_n, NQ, D, BLOCK, BLOCK_D, False, False).to(tl.float32)
    g = load_tile(grad_out, b, r, h, start, g_b, g_r, g_h, g_n, NQ, D, BLOCK, BLOCK_D, False, False).to(tl.float32)
    n = start + tl.arange(0, BLOCK)
    total = tl.sum(o * g, 1)
    if HAS_GRAD_LSE:
        total -= tl.load(grad_lse + item.to(tl.int64) * NQ + n, mask=n < NQ, other=0.0)
    tl.store(delta + item.to(tl.int64) * pitch + n, total, mask=n < NQ)
    if NATURAL:
        log_sum_exp = tl.load(lse + item.to(tl.int64) * NQ + n, mask=n < NQ, other=0.0)
        if not WIDE:
            log_sum_exp *= LOG2E
        log_sum_exp = tl.where(log_sum_exp == float("-inf"), float("inf"), log_sum_exp)
        tl.store(lse2 + item.to(tl.int64) * pitch + n, log_sum_exp, mask=n < NQ)


@triton.jit
def few_keys_delta_kernel(
    q, k, v, bias, mask, seed, grad_out, lse2, delta, grad_lse,
    q_b, q_r, q_h, q_n, k_b, k_r, k_h, k_n, v_b, v_r, v_h, v_n, g_b, g_r, g_h, g_n,
    mask_b, mask_r, BIAS_ROWS, BIAS_COLUMNS, pitch,
    R, H, NQ, NK, scale, threshold, inverse_keep, b0, r0, h0, i0, j0,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
    EVEN_I: tl.constexpr, EVEN_J: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """delta = sum over at most BLOCK_J keys of p * d(p), minus d(lse): equal to what `delta_kernel` makes but for the
    rounding of the output. With few keys d(p) - delta cancels so far that this rounding is most of its error. For the
    Hopper kernels; those below make the sum themselves (FEW), and their `delta` is only minus d(lse)."""
    pid = tl.program_id(0)
    n_i = tl.cdiv(NQ, BLOCK_I)
    i_start = (pid % n_i) * BLOCK_I
    item = pid // n_i
    h, r, b = item % H, (item // H) % R, item // (H * R)
    i = i_start + tl.arange(0, BLOCK_I)
    j = tl.arange(0, BLOCK_J)
    q_tile = load_tile(q, b, r, h, i_start, q_b, q_r, q_h, q_n, NQ, D, BLOCK_I, BLOCK_D, EVEN_I, TMA)
    g_tile = load_tile(grad_out, b, r, h, i_start, g_b, g_r, g_h, g_n, NQ, D, BLOCK_I, BLOCK_D, EVEN_I, TMA)
    k_tile = load_tile(k, b, r, h, 0, k_b, k_r, k_h, k_n, NK, D, BLOCK_J, BLOCK_D, EVEN_J, TMA)
    v_tile = load_tile(v, b, r, h, 0, v_b, v_r, v_h, v_n, NK, D, BLOCK_J, BLOCK_D, EVEN_J, TMA)
    lse_i = load_statistics(lse2, item, i_start, NQ, pitch, BLOCK_I, False)
    product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
    bias_tile = product
    if HAS_BIAS:
        bias_tile = load_bias(bias, (b * H + h) * BIAS_ROWS + i_start, 0, BIAS_COLUMNS, BLOCK_I, BLOCK_J, TMA)
    p = probability(product, scale, bias_tile, lse_i[:, None], HAS_BIAS, WIDE)
    if HAS_MASK:
        keep_key = tl.load(mask + b.to(tl.int64) * mask_b + r.to(tl.int64) * mask_r + j, mask=j < NK, other=0) != 0
        p = tl.where(keep_key[None, :], p, 0.0)
    dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
    if DROPOUT:
        dp *= keep_factor(seed, threshold, inverse_keep, b + b0, r + r0, h + h0, (i + i0)[:, None], (j + j0)[None, :])
    total = tl.sum(p * dp, 1)
    if HAS_GRAD_LSE:
        total -= tl.load(grad_lse + item.to(tl.int64) * NQ + i, mask=i < NQ, other=0.0)
    tl.store(delta + item.to(tl.int64) * pitch + i, total, mask=i < NQ)


@triton.jit
def queries_kernel(
    q, k, v, bias, mask, seed, grad_out, lse2, delta, dq,
    q_b, q_r, q_h, q_n, k_b, k_r, k_h, k_n, v_b, v_r, v_h, v_n, g_b, g_r, g_h, g_n, dq_b, dq_r, dq_h, dq_n,
    mask_b, mask_r, BIAS_ROWS, BIAS_COLUMNS, pitch,
    R, H, NQ, NK, scale, threshold, inverse_keep, b0, r0, h0, i0, j0,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    EVEN_I: tl.constexpr, EVEN_J: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """One program: one row, one head, BLOCK_I queries."""
    pid = tl.program_id(0)
    n_i = tl.cdiv(NQ, BLOCK_I)
    i_start = (pid % n_i) * BLOCK_I
    r = (pid // n_i) % R
    h = (pid // (n_i * R)) % H
    b = pid // (n_i * R * H)
    item = (b * R + r) * H + h
    i = i_start + tl.arange(0, BLOCK_I)
    q_tile = load_tile(q, b, r, h, i_start, q_b, q_r, q_h, q_n, NQ, D, BLOCK_I, BLOCK_D, EVEN_I, TMA)
    g_tile = load_tile(grad_out, b, r, h, i_start, g_b, g_r, g_h, g_n, NQ, D, BLOCK_I, BLOCK_D, EVEN_I, TMA)
    lse_i = load_statistics(lse2, item, i_start, NQ, pitch, BLOCK_I, False)
    delta_i = load_statistics(delta, item, i_start, NQ, pitch, BLOCK_I, False)
    acc = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    for j_start in range(0, NK, BLOCK_J):
        j = j_start + tl.arange(0, BLOCK_J)
        k_tile = load_tile(k, b, r, h, j_start, k_b, k_r, k_h, k_n, NK, D, BLOCK_J, BLOCK_D, EVEN_J, TMA)
        v_tile = load_tile(v, b, r, h, j_start, v_b, v_r, v_h, v_n, NK, D, BLOCK_J, BLOCK_D, EVEN_J, TMA)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        bias_tile = product
        if HAS_BIAS:
            bias_row = (b * H + h) * BIAS_ROWS + i_start
            bias_tile = load_bias(bias, bias_row, j_start, BIAS_COLUMNS, BLOCK_I, BLOCK_J, TMA)
        p = probability(product, scale, bias_tile, lse_i[:, None], HAS_BIAS, WIDE)
        if HAS_MASK:
            keep_key = tl.load(mask + b.to(tl.int64) * mask_b + r.to(tl.int64) * mask_r + j, mask=j < NK, other=0) != 0
            p = tl.where(keep_key[None, :], p, 0.0)
        elif not EVEN_J and not HAS_BIAS:  # p may be infinite there, and infinity times the 0 of K is NaN
            p = tl.where((j < NK)[None, :], p, 0.0)
        dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        if DROPOUT:
            dp *= keep_factor(
                seed, threshold, inverse_keep, b + b0, r + r0, h + h0, (i + i0)[:, None], (j + j0)[None, :]
            )
        ds = score_gradient(p, dp, delta_i, 1, FEW).to(k_tile.dtype)
        acc = tl.dot(ds, k_tile, acc, input_precision=PRECISION)
    store_tile(dq, b, r, h, i_start, dq_b, dq_r, dq_h, dq_n, NQ, acc * scale, D, BLOCK_I, BLOCK_D)


@triton.jit
def keys_kernel(
    q, k, v, bias, mask, seed, grad_out, lse2, delta, dk, dv,
    q_b, q_r, q_h, q_n, k_b, k_r, k_h, k_n, v_b, v_r, v_h, v_n, g_b, g_r, g_h, g_n,
    dk_b, dk_r, dk_h, dk_n, dv_b, dv_r, dv_h, dv_n, mask_b, mask_r, BIAS_ROWS, BIAS_COLUMNS, pitch,
    R, H, NQ, NK, scale, threshold, inverse_keep, b0, r0, h0, i0, j0,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    EVEN_I: tl.constexpr, EVEN_J: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """One program: one row, one head, BLOCK_J keys. `bias` is transposed: [B, H, NK, NQ], padded."""
    pid = tl.program_id(0)
    n_j = tl.cdiv(NK, BLOCK_J)
    j_start = (pid % n_j) * BLOCK_J
    item = pid // n_j
    h, r, b = item % H, (item // H) % R, item // (H * R)
    j = j_start + tl.arange(0, BLOCK_J)
    k_tile = load_tile(k, b, r, h, j_start, k_b, k_r, k_h, k_n, NK, D, BLOCK_J, BLOCK_D, EVEN_J, TMA)
    v_tile = load_tile(v, b, r, h, j_start, v_b, v_r, v_h, v_n, NK, D, BLOCK_J, BLOCK_D, EVEN_J, TMA)
    if HAS_MASK:
        keep_key = tl.load(mask + b.to(tl.int64) * mask_b + r.to(tl.int64) * mask_r + j, mask=j < NK, other=0) != 0
    dk_tile = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    dv_tile = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
    for i_start in range(0, NQ, BLOCK_I):
        q_tile = load_tile(q, b, r, h, i_start, q_b, q_r, q_h, q_n, NQ, D, BLOCK_I, BLOCK_D, EVEN_I, TMA)
        g_tile = load_tile(grad_out, b, r, h, i_start, g_b, g_r, g_h, g_n, NQ, D, BLOCK_I, BLOCK_D, EVEN_I, TMA)
        lse_i = load_statistics(lse2, item, i_start, NQ, pitch, BLOCK_I, TMA)
        delta_i = load_statistics(delta, item, i_start, NQ, pitch, BLOCK_I, TMA)
        product = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION)
        bias_tile = product
        if HAS_BIAS:
            bias_row = (b * H + h) * BIAS_ROWS + j_start
            bias_tile = load_bias(bias, bias_row, i_start, BIAS_COLUMNS, BLOCK_J, BLOCK_I, TMA)
        p = probability(product, scale, bias_tile, lse_i[None, :], HAS_BIAS, WIDE)
        if HAS_MASK:
            p = tl.where(keep_key[:, None], p, 0.0)
        elif FEW and not HAS_BIAS:
            p = tl.where((j < NK)[:, None], p, 0.0)
        dp = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            i = i_start + tl.arange(0, BLOCK_I)
            keep = keep_factor(
                seed, threshold, inverse_keep, b + b0, r + r0, h + h0, (i + i0)[None, :], (j + j0)[:, None]
            )
            dropped = p * keep
            dp *= keep
        dv_tile = tl.dot(dropped.to(g_tile.dtype), g_tile, dv_tile, input_precision=PRECISION)
        ds = score_gradient(p, dp, delta_i, 0, FEW).to(q_tile.dtype)
        dk_tile = tl.dot(ds, q_tile, dk_tile, input_precision=PRECISION)
    store_tile(dk, b, r, h, j_start, dk_b, dk_r, dk_h, dk_n, NK, dk_tile * scale, D, BLOCK_J, BLOCK_D)
    store_tile(dv, b, r, h, j_start, dv_b, dv_r, dv_h, dv_n, NK, dv_tile, D, BLOCK_J, BLOCK_D)


@triton.jit
def bias_kernel(
    q, k, v, bias, mask, seed, grad_out, lse2, delta, dbias,
    q_b, q_r, q_h, q_n, k_b, k_r, k_h, k_n, v_b, v_r, v_h, v_n, g_b, g_r, g_h, g_n,
    mask_b, mask_r, BIAS_ROWS, BIAS_COLUMNS, pitch,
    R, H, NQ, NK, scale, threshold, inverse_keep, b0, r0, h0, i0, j0, B, rows_per_chunk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    EVEN_I: tl.constexpr, EVEN_J: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    FEW: tl.constexpr,
):  # fmt: skip
    """One program: a tile of d(bias) over a chunk of rows; `dbias` is [chunks, B, H, NQ, NK]. The tiles of one head
    and chunk are neighbours, so that they read the same rows at about the same time."""
    pid = tl.program_id(0)
    n_i, n_j = tl.cdiv(NQ, BLOCK_I), tl.cdiv(NK, BLOCK_J)
    i_start = (pid % n_i) * BLOCK_I
    j_start = ((pid // n_i) % n_j) * BLOCK_J
    chunk = pid // (n_i * n_j * H * B)
    bh = (pid // (n_i * n_j)) % (H * B)
    h, b = bh % H, bh // H
    i = i_start + tl.arange(0, BLOCK_I)
    j = j_start + tl.arange(0, BLOCK_J)
    bias_tile = load_bias(bias, bh * BIAS_ROWS + i_start, j_start, BIAS_COLUMNS, BLOCK_I, BLOCK_J, TMA)
    bias_tile = bias_tile.to(tl.float32)
    total = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
    first = chunk * rows_per_chunk
    last = tl.minimum(first + rows_per_chunk, R)
    # Triton pipelines what products need; the statistics of the next row are fetched ahead by hand.
    lse_i = load_statistics(lse2, (b * R + first) * H + h, i_start, NQ, pitch, BLOCK_I, False)
    delta_i = load_statistics(delta, (b * R + first) * H + h, i_start, NQ, pitch, BLOCK_I, False)
    for r in range(first, last):
        ahead = (b * R + tl.minimum(r + 1, last - 1)) * H + h
        q_tile = load_tile(q, b, r, h, i_start, q_b, q_r, q_h, q_n, NQ, D, BLOCK_I, BLOCK_D, EVEN_I, TMA)
        k_tile = load_tile(k, b, r, h, j_start, k_b, k_r, k_h, k_n, NK, D, BLOCK_J, BLOCK_D, EVEN_J, TMA)
        g_tile = load_tile(grad_out, b, r, h, i_start, g_b, g_r, g_h, g_n, NQ, D, BLOCK_I, BLOCK_D, EVEN_I, TMA)
        v_tile = load_tile(v, b, r, h, j_start, v_b, v_r, v_h, v_n, NK, D, BLOCK_J, BLOCK_D, EVEN_J, TMA)
        next_lse = load_statistics(lse2, ahead, i_start, NQ, pitch, BLOCK_I, False)
        next_delta = load_statistics(delta, ahead, i_start, NQ, pitch, BLOCK_I, False)
        product = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
        dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        if WIDE:
            p = exp_wide(product * scale + bias_tile - lse_i[:, None])
        else:  # here the bias stays in registers, so that it is the cheaper place for the log-sum-exp
            p = tl.exp2(product * (scale * LOG2E) + (bias_tile * LOG2E - lse_i[:, None]))
        if HAS_MASK:
            row_mask = mask + b.to(tl.int64) * mask_b + tl.cast(r, tl.int64) * mask_r
            p = tl.where((tl.load(row_mask + j, mask=j < NK, other=0) != 0)[None, :], p, 0.0)
        if DROPOUT:
            dp *= keep_factor(
                seed, threshold, inverse_keep, b + b0, r + r0, h + h0, (i + i0)[:, None], (j + j0)[None, :]
            )
        total += score_gradient(p, dp, delta_i, 1, FEW)
        lse_i, delta_i = next_lse, next_delta
    base = dbias + (chunk.to(tl.int64) * (B * H) + bh) * NQ * NK
    pointers = base + i.to(tl.int64)[:, None] * NK + j[None, :]
    tl.store(pointers, total.to(dbias.dtype.element_ty), mask=(i < NQ)[:, None] & (j < NK)[None, :])


@triton.jit
def sum_kernel(partial, total, size, CHUNKS: tl.constexpr, BLOCK: tl.constexpr):
    """total [size] = sum of partial [CHUNKS, size], fp32, in the order of the chunks."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = at < size
    value = tl.load(partial + at, mask=inside, other=0.0)
    for chunk in tl.static_range(1, CHUNKS):
        value += tl.load(partial + tl.cast(size, tl.int64) * chunk + at, mask=inside, other=0.0)
    tl.store(total + at, value.to(total.dtype.element_ty), mask=inside)
