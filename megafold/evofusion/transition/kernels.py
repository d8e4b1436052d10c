"""Kernels of the transition for rows that a program holds whole; the wide intermediate stays in registers.

w_in [2 I, C]: values, then gates; w_out [C, I]. The backward stores gradients of values and gates [M, 2 I] and the
gated values [M, I]: what is left are gradients of plain projections.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafold.evofusion.tiles import (
    affine,
    load_rows,
    load_rows_again,
    load_weight,
    normalize,
    sigmoid,
    store_rows,
)


@triton.jit
def _normed(x, gamma, beta, row, at, length, eps, C: tl.constexpr, NORM: tl.constexpr):
    tile = load_rows(x, row, at, length, C, 0, C)
    if NORM:
        tile, _ = normalize(tile, eps, 1)
        tile = affine(tile, gamma, beta, C, True)
    return tile


@triton.jit
def _out_weight(w_out, n, INNER, C: tl.constexpr, BLOCK_O: tl.constexpr):
    """[C, BLOCK_O]: columns n.. of w_out."""
    return tl.load(w_out + tl.arange(0, C)[:, None] * INNER + n + tl.arange(0, BLOCK_O)[None, :])


@triton.jit
def transition_kernel(
    x, gamma, beta, w_in, w_out, out, M, INNER, eps,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, NORM: tl.constexpr, RESIDUAL: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_L
    length = M - row
    at = tl.arange(0, BLOCK_L)
    normed = _normed(x, gamma, beta, row, at, length, eps, C, NORM).to(w_in.dtype.element_ty)
    y = tl.zeros([BLOCK_L, C], tl.float32)
    for n in range(0, INNER, BLOCK_O):
        values = tl.dot(normed, tl.trans(load_weight(w_in, n, C, BLOCK_O, C)), input_precision=PRECISION)
        gates = tl.dot(normed, tl.trans(load_weight(w_in, INNER + n, C, BLOCK_O, C)), input_precision=PRECISION)
        hidden = (values * gates * sigmoid(gates, FAST)).to(w_out.dtype.element_ty)
        y = tl.dot(hidden, tl.trans(_out_weight(w_out, n, INNER, C, BLOCK_O)), y, input_precision=PRECISION)
    if RESIDUAL:
        y += load_rows_again(x, row, at, length, C, 0, C)
    store_rows(out, row, at, length, C, 0, y, C)


@triton.jit
def gradient_kernel(
    grad_out, x, gamma, beta, w_in, w_out, hidden, grads, upstream, M, INNER, eps,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, NORM: tl.constexpr, COPY: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows of `grads` [M, 2 INNER] and `hidden` [M, INNER]; with COPY also of `upstream` [M, C]:
    grad_out in the dtype of products."""
    row = tl.program_id(0).to(tl.int64) * BLOCK_L
    length = M - row
    at = tl.arange(0, BLOCK_L)
    normed = _normed(x, gamma, beta, row, at, length, eps, C, NORM).to(w_in.dtype.element_ty)
    above = load_rows(grad_out, row, at, length, C, 0, C).to(w_in.dtype.element_ty)
    if COPY:
        store_rows(upstream, row, at, length, C, 0, above, C)
    for n in range(0, INNER, BLOCK_O):
        values = tl.dot(normed, tl.trans(load_weight(w_in, n, C, BLOCK_O, C)), input_precision=PRECISION)
        gates = tl.dot(normed, tl.trans(load_weight(w_in, INNER + n, C, BLOCK_O, C)), input_precision=PRECISION)
        grad = tl.dot(above, _out_weight(w_out, n, INNER, C, BLOCK_O), input_precision=PRECISION)
        s = sigmoid(gates, FAST)
        silu = gates * s
        store_rows(hidden, row, at, length, INNER, n, values * silu, BLOCK_O)
        store_rows(grads, row, at, length, 2 * INNER, n, grad * silu, BLOCK_O)
        grad *= values * (s + silu * (1.0 - s))
        store_rows(grads, row, at, length, 2 * INNER, INNER + n, grad, BLOCK_O)


@triton.jit
def resident_gradient_kernel(
    grad_out, x, gamma, beta, w_in, w_out, hidden, grads, upstream, M, tiles, programs, eps,
    C: tl.constexpr, INNER: tl.constexpr, BLOCK_L: tl.constexpr, NORM: tl.constexpr, COPY: tl.constexpr,
    STAGES: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`gradient_kernel` with all weights in shared memory: every `programs`-th tile of rows."""
    pid = tl.program_id(0)
    HALF: tl.constexpr = INNER // 2
    v0 = tl.trans(load_weight(w_in, 0, C, HALF, C))
    v1 = tl.trans(load_weight(w_in, HALF, C, HALF, C))
    g0 = tl.trans(load_weight(w_in, INNER, C, HALF, C))
    g1 = tl.trans(load_weight(w_in, INNER + HALF, C, HALF, C))
    o0 = _out_weight(w_out, 0, INNER, C, HALF)
    o1 = _out_weight(w_out, HALF, INNER, C, HALF)
    at = tl.arange(0, BLOCK_L)
    for k in tl.range(0, tl.cdiv(tiles - pid, programs), num_stages=STAGES):
        row = (pid + k * programs).to(tl.int64) * BLOCK_L
        length = M - row
        above = load_rows(grad_out, row, at, length, C, 0, C).to(w_in.dtype.element_ty)
        normed = _normed(x, gamma, beta, row, at, length, eps, C, NORM).to(w_in.dtype.element_ty)
        if COPY:
            store_rows(upstream, row, at, length, C, 0, above, C)
        for half in tl.static_range(2):
            values = tl.dot(normed, v0 if half == 0 else v1, input_precision=PRECISION)
            gates = tl.dot(normed, g0 if half == 0 else g1, input_precision=PRECISION)
            grad = tl.dot(above, o0 if half == 0 else o1, input_precision=PRECISION)
            s = sigmoid(gates, FAST)
            silu = gates * s
            store_rows(hidden, row, at, length, INNER, half * HALF, values * silu, HALF)
            store_rows(grads, row, at, length, 2 * INNER, half * HALF, grad * silu, HALF)
            grad *= values * (s + silu * (1.0 - s))
            store_rows(grads, row, at, length, 2 * INNER, INNER + half * HALF, grad, HALF)
