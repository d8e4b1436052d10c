"""Kernels of what follows an attention: gate, output projection, shared dropout and residual in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from megafold.evofusion.tiles import load_rows, load_weight, sigmoid, store_rows


@triton.jit
def _place(GROUPS, J, BLOCK_L: tl.constexpr):
    """b, i, j, how many j there are from the first of the program, and the row in [B, GROUPS, J]."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(J, BLOCK_L)
    start = (pid % blocks) * BLOCK_L
    i = (pid // blocks % GROUPS).to(tl.int64)
    b = (pid // (blocks * GROUPS)).to(tl.int64)
    return b, i, start, tl.arange(0, BLOCK_L), J - start, (b * GROUPS + i) * J + start


@triton.jit
def _dropped(dropped, b, i, start, at, length, d_b, d_i, d_j, column, BLOCK: tl.constexpr):
    """[BLOCK_L, BLOCK] of the dropout factor, whose shared axis has the stride 0."""
    pointers = dropped + b * d_b + i * d_i + (start + at)[:, None] * d_j + column + tl.arange(0, BLOCK)[None, :]
    return tl.load(pointers, mask=(at < length)[:, None], other=0.0).to(tl.float32)


@triton.jit
def output_kernel(
    attended, gate, w, dropped, residual, out, d_b, d_i, d_j, GROUPS, J,
    C: tl.constexpr, INNER: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, GATED: tl.constexpr,
    HAS_DROPPED: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_L rows. attended, gate [B, GROUPS, J, INNER], w [C, INNER], residual, out [B, GROUPS, J, C]."""
    b, i, start, at, length, row = _place(GROUPS, J, BLOCK_L)
    value = load_rows(attended, row, at, length, INNER, 0, INNER)
    if GATED:
        value *= sigmoid(load_rows(gate, row, at, length, INNER, 0, INNER))
    value = value.to(w.dtype.element_ty)
    for o in range(0, C, BLOCK_O):
        y = tl.dot(value, tl.trans(load_weight(w, o, INNER, BLOCK_O, INNER)), input_precision=PRECISION)
        if HAS_DROPPED:
            y *= _dropped(dropped, b, i, start, at, length, d_b, d_i, d_j, o, BLOCK_O)
        if RESIDUAL:
            y += load_rows(residual, row, at, length, C, o, BLOCK_O)
        store_rows(out, row, at, length, C, o, y, BLOCK_O)


@triton.jit
def gradient_kernel(
    grad_out, attended, gate, w, dropped, grad_attended, grad_gate, gated, scaled, d_b, d_i, d_j, GROUPS, J,
    C: tl.constexpr, INNER: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, GATED: tl.constexpr,
    HAS_DROPPED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows. Also stores, for the weight's gradient, attended * sigmoid(gate) and grad_out *
    dropped where they are not what was given."""
    b, i, start, at, length, row = _place(GROUPS, J, BLOCK_L)
    grad = tl.zeros([BLOCK_L, INNER], tl.float32)
    for o in range(0, C, BLOCK_O):
        y = load_rows(grad_out, row, at, length, C, o, BLOCK_O)
        if HAS_DROPPED:
            y *= _dropped(dropped, b, i, start, at, length, d_b, d_i, d_j, o, BLOCK_O)
        y = y.to(w.dtype.element_ty)
        if HAS_DROPPED:
            store_rows(scaled, row, at, length, C, o, y, BLOCK_O)
        grad = tl.dot(y, load_weight(w, o, INNER, BLOCK_O, INNER), grad, input_precision=PRECISION)
    if GATED:
        value = load_rows(attended, row, at, length, INNER, 0, INNER)
        s = sigmoid(load_rows(gate, row, at, length, INNER, 0, INNER))
        store_rows(gated, row, at, length, INNER, 0, value * s, INNER)
        store_rows(grad_gate, row, at, length, INNER, 0, grad * value * s * (1.0 - s), INNER)
        grad *= s
    store_rows(grad_attended, row, at, length, INNER, 0, grad, INNER)
