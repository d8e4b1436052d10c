"""Kernels of what follows an attention: gate, output projection, shared dropout and residual in one pass."""

from __future__ import annotations

import triton
import triton.language as tl

from megafold.evofusion.tiles import load_rows, load_weight, sigmoid, store_rows


@triton.jit
def _place(tile, GROUPS, J, BLOCK_L: tl.constexpr):
    """b, i, j, how many j there are from the first of the tile, and the row in [B, GROUPS, J]."""
    blocks = tl.cdiv(J, BLOCK_L)
    start = (tile % blocks) * BLOCK_L
    i = (tile // blocks % GROUPS).to(tl.int64)
    b = (tile // (blocks * GROUPS)).to(tl.int64)
    return b, i, start, tl.arange(0, BLOCK_L), J - start, (b * GROUPS + i) * J + start


@triton.jit
def _dropped(dropped, b, i, start, at, length, d_b, d_i, d_j, column, BLOCK: tl.constexpr):
    """[BLOCK_L, BLOCK] of the dropout factor, whose shared axis has the stride 0."""
    pointers = dropped + b * d_b + i * d_i + (start + at)[:, None] * d_j + column + tl.arange(0, BLOCK)[None, :]
    return tl.load(pointers, mask=(at < length)[:, None], other=0.0).to(tl.float32)


@triton.jit
def output_kernel(
    attended, gate, w, dropped, residual, out, d_b, d_i, d_j, GROUPS, J, tiles, programs,
    C: tl.constexpr, INNER: tl.constexpr, BLOCK_L: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    HAS_DROPPED: tl.constexpr, RESIDUAL: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every `programs`-th tile of rows. attended, gate [B, GROUPS, J, INNER], w [C, INNER], residual, out [.., C]."""
    pid = tl.program_id(0)
    weight = tl.trans(load_weight(w, 0, INNER, C, INNER))
    for k in tl.range(0, tl.cdiv(tiles - pid, programs), num_stages=STAGES):
        b, i, start, at, length, row = _place(pid + k * programs, GROUPS, J, BLOCK_L)
        value = load_rows(attended, row, at, length, INNER, 0, INNER)
        if GATED:
            value *= sigmoid(load_rows(gate, row, at, length, INNER, 0, INNER), FAST)
        y = tl.dot(value.to(w.dtype.element_ty), weight, input_precision=PRECISION)
        if HAS_DROPPED:
            y *= _dropped(dropped, b, i, start, at, length, d_b, d_i, d_j, 0, C)
        if RESIDUAL:
            y += load_rows(residual, row, at, length, C, 0, C)
        store_rows(out, row, at, length, C, 0, y, C)


@triton.jit
def gradient_kernel(
    grad_out, attended, gate, w, dropped, grad_attended, grad_gate, gated, scaled, d_b, d_i, d_j, GROUPS, J, tiles,
    programs,
    C: tl.constexpr, INNER: tl.constexpr, BLOCK_L: tl.constexpr, STAGES: tl.constexpr, GATED: tl.constexpr,
    HAS_DROPPED: tl.constexpr, COPY: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Every `programs`-th tile of rows. Also stores, for the weight's gradient, attended * sigmoid(gate), and with COPY
    grad_out * dropped."""
    pid = tl.program_id(0)
    weight = load_weight(w, 0, INNER, C, INNER)
    for k in tl.range(0, tl.cdiv(tiles - pid, programs), num_stages=STAGES):
        b, i, start, at, length, row = _place(pid + k * programs, GROUPS, J, BLOCK_L)
        y = load_rows(grad_out, row, at, length, C, 0, C)
        if HAS_DROPPED:
            y *= _dropped(dropped, b, i, start, at, length, d_b, d_i, d_j, 0, C)
        y = y.to(w.dtype.element_ty)
        if COPY:
            store_rows(scaled, row, at, length, C, 0, y, C)
        grad = tl.dot(y, weight, input_precision=PRECISION)
        if GATED:
            value = load_rows(attended, row, at, length, INNER, 0, INNER)
            s = sigmoid(load_rows(gate, row, at, length, INNER, 0, INNER), FAST)
            value *= s
            store_rows(gated, row, at, length, INNER, 0, value, INNER)
            store_rows(grad_gate, row, at, length, INNER, 0, grad * value * (1.0 - s), INNER)
            grad *= s
        store_rows(grad_attended, row, at, length, INNER, 0, grad, INNER)
