"""Kernels around the products of pair-weighted averaging, over sequences of one token at a time.

What is between the kernels lies by token: gates [B, N, S, H E]; and by head and token: values and averages
[B, H, N, S, E], which are operands of the vendor's products [N, N] x [N, S E] as they stand.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafold.evofusion.tiles import affine, normalize, normalize_gradient, sigmoid


@triton.jit
def _place(tile, S, N, BLOCK_L: tl.constexpr):
    """BLOCK_L sequences of a token: structure, token, the first sequence, offsets, and which of them exist."""
    blocks = tl.cdiv(S, BLOCK_L)
    token = tile // blocks
    start = tile % blocks * BLOCK_L
    at = tl.arange(0, BLOCK_L)
    return token // N, token % N, start, at, (start + at < S)[:, None]


@triton.jit
def _of_msa(b, n, start, at, S, N, WIDTH: tl.constexpr):
    """Offsets [BLOCK_L, WIDTH] in [B, S, N, WIDTH]."""
    first = ((b.to(tl.int64) * S + start) * N + n) * WIDTH
    return first + at.to(tl.int64)[:, None] * (N * WIDTH) + tl.arange(0, WIDTH)[None, :]


@triton.jit
def _by_token(b, n, start, at, column, S, N, WIDTH, BLOCK: tl.constexpr):
    """Offsets [BLOCK_L, BLOCK] in [B, N, S, WIDTH], columns from `column`."""
    first = ((b.to(tl.int64) * N + n) * S + start) * WIDTH + column
    return first + at[:, None] * WIDTH + tl.arange(0, BLOCK)[None, :]


@triton.jit
def _by_head(b, n, start, at, column, S, N, HEADS: tl.constexpr, E: tl.constexpr, BLOCK: tl.constexpr):
    """Offsets [BLOCK_L, BLOCK] in [B, HEADS, N, S, E], columns (h, e) from `column`."""
    c = column + tl.arange(0, BLOCK)
    plane = ((b.to(tl.int64) * HEADS + c // E) * N + n) * S + start
    return plane[None, :] * E + at[:, None] * E + (c % E)[None, :]


@triton.jit
def _factor(dropped, b, n, start, at, exists, d_b, d_s, d_n, WIDTH: tl.constexpr):
    """[BLOCK_L, WIDTH] of the dropout factor, whose shared axis has the stride 0."""
    first = b.to(tl.int64) * d_b + n * d_n + start.to(tl.int64) * d_s
    pointers = dropped + first + at[:, None] * d_s + tl.arange(0, WIDTH)[None, :]
    return tl.load(pointers, mask=exists, other=0.0).to(tl.float32)


@triton.jit
def values_kernel(
    msa, gamma, beta, w, values, gates, S, N, eps,
    C: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Values and gates of a tile. w [2 HEADS E, C]."""
    b, n, start, at, exists = _place(tl.program_id(0), S, N, BLOCK_L)
    rows = tl.load(msa + _of_msa(b, n, start, at, S, N, C), mask=exists, other=0.0).to(tl.float32)
    x_hat, _ = normalize(rows, eps, 1)
    normed = affine(x_hat, gamma, beta, C, True).to(w.dtype.element_ty)
    c, o = tl.arange(0, C), tl.arange(0, BLOCK_O)
    for k in range(0, HEADS * E, BLOCK_O):
        part = tl.load(w + (k + o)[:, None] * C + c[None, :])
        y = tl.dot(normed, tl.trans(part), input_precision=PRECISION).to(values.dtype.element_ty)
        tl.store(values + _by_head(b, n, start, at, k, S, N, HEADS, E, BLOCK_O), y, mask=exists)
    for k in range(0, HEADS * E, BLOCK_O):
        part = tl.load(w + (HEADS * E + k + o)[:, None] * C + c[None, :])
        y = tl.dot(normed, tl.trans(part), input_precision=PRECISION).to(gates.dtype.element_ty)
        tl.store(gates + _by_token(b, n, start, at, k, S, N, HEADS * E, BLOCK_O), y, mask=exists)


@triton.jit
def output_kernel(
    averaged, gates, w, dropped, msa, out, d_b, d_s, d_n, S, N,
    C: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr,
    HAS_DROPPED: tl.constexpr, RESIDUAL: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the result. w [C, HEADS E]."""
    b, n, start, at, exists = _place(tl.program_id(0), S, N, BLOCK_L)
    c, o = tl.arange(0, C), tl.arange(0, BLOCK_O)
    acc = tl.zeros([BLOCK_L, C], tl.float32)
    for k in range(0, HEADS * E, BLOCK_O):
        value = tl.load(averaged + _by_head(b, n, start, at, k, S, N, HEADS, E, BLOCK_O), mask=exists, other=0.0)
        gate = tl.load(gates + _by_token(b, n, start, at, k, S, N, HEADS * E, BLOCK_O), mask=exists, other=0.0)
        value = value.to(tl.float32) * sigmoid(gate.to(tl.float32), FAST)
        part = tl.load(w + c[None, :] * (HEADS * E) + (k + o)[:, None])
        acc = tl.dot(value.to(w.dtype.element_ty), part, acc, input_precision=PRECISION)
    if HAS_DROPPED:
        acc *= _factor(dropped, b, n, start, at, exists, d_b, d_s, d_n, C)
    offsets = _of_msa(b, n, start, at, S, N, C)
    if RESIDUAL:
        acc += tl.load(msa + offsets, mask=exists, other=0.0).to(tl.float32)
    tl.store(out + offsets, acc.to(out.dtype.element_ty), mask=exists)


@triton.jit
def output_gradient_kernel(
    grad_out, averaged, gates, w, dropped, grad_averaged, grad_gates, partial, d_b, d_s, d_n, S, N, tiles, programs,
    C: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr,
    STAGES: tl.constexpr, HAS_DROPPED: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_O columns of every `programs`-th tile of the gradients of averages and of gates, and of the program's share
    partial[program] of the weight's gradient [C, HEADS E], fp32."""
    pid, k = tl.program_id(0), tl.program_id(1) * BLOCK_O
    c, o = tl.arange(0, C), tl.arange(0, BLOCK_O)
    of_weight = c[:, None] * (HEADS * E) + (k + o)[None, :]
    part = tl.load(w + of_weight)
    acc = tl.zeros([C, BLOCK_O], tl.float32)
    for step in tl.range(0, tl.cdiv(tiles - pid, programs), num_stages=STAGES):
        b, n, start, at, exists = _place(pid + step * programs, S, N, BLOCK_L)
        by_head = _by_head(b, n, start, at, k, S, N, HEADS, E, BLOCK_O)
        by_token = _by_token(b, n, start, at, k, S, N, HEADS * E, BLOCK_O)
        y = tl.load(grad_out + _of_msa(b, n, start, at, S, N, C), mask=exists, other=0.0)
        value = tl.load(averaged + by_head, mask=exists, other=0.0).to(tl.float32)
        gate = sigmoid(tl.load(gates + by_token, mask=exists, other=0.0).to(tl.float32), FAST)
        if HAS_DROPPED:
            y = y.to(tl.float32) * _factor(dropped, b, n, start, at, exists, d_b, d_s, d_n, C)
        y = y.to(w.dtype.element_ty)
        grad = tl.dot(y, part, input_precision=PRECISION)
        value *= gate
        acc = tl.dot(tl.trans(y), value.to(w.dtype.element_ty), acc, input_precision=PRECISION)
        of_gate = grad * value * (1.0 - gate)
        tl.store(grad_gates + by_token, of_gate.to(grad_gates.dtype.element_ty), mask=exists)
        tl.store(grad_averaged + by_head, (grad * gate).to(grad_averaged.dtype.element_ty), mask=exists)
    tl.store(partial + pid.to(tl.int64) * (C * HEADS * E) + of_weight, acc)


@triton.jit
def input_gradient_kernel(
    grad_values, grad_gates, msa, gamma, w, grad_out, grad_msa, x_hats, S, N, eps,
    C: tl.constexpr, HEADS: tl.constexpr, E: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr,
    RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A tile of the gradient of the MSA, with RESIDUAL plus grad_out; and its normalised rows, by token."""
    b, n, start, at, exists = _place(tl.program_id(0), S, N, BLOCK_L)
    c, o = tl.arange(0, C), tl.arange(0, BLOCK_O)
    grad = tl.zeros([BLOCK_L, C], tl.float32)
    for k in range(0, HEADS * E, BLOCK_O):
        y = tl.load(grad_values + _by_head(b, n, start, at, k, S, N, HEADS, E, BLOCK_O), mask=exists, other=0.0)
        part = tl.load(w + (k + o)[:, None] * C + c[None, :])
        grad = tl.dot(y, part, grad, input_precision=PRECISION)
    for k in range(0, HEADS * E, BLOCK_O):
        y = tl.load(grad_gates + _by_token(b, n, start, at, k, S, N, HEADS * E, BLOCK_O), mask=exists, other=0.0)
        part = tl.load(w + (HEADS * E + k + o)[:, None] * C + c[None, :])
        grad = tl.dot(y, part, grad, input_precision=PRECISION)
    offsets = _of_msa(b, n, start, at, S, N, C)
    x_hat, rstd = normalize(tl.load(msa + offsets, mask=exists, other=0.0).to(tl.float32), eps, 1)
    tl.store(x_hats + _by_token(b, n, start, at, 0, S, N, C, C), x_hat.to(x_hats.dtype.element_ty), mask=exists)
    grad *= tl.load(gamma + c).to(tl.float32)[None, :]
    grad = normalize_gradient(grad, x_hat, rstd, 1)
    if RESIDUAL:
        grad += tl.load(grad_out + offsets, mask=exists, other=0.0).to(tl.float32)
    tl.store(grad_msa + offsets, grad.to(grad_msa.dtype.element_ty), mask=exists)
