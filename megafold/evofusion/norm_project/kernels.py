"""Kernels of LayerNorm and several projections: one reads x once for all of them, the other makes its gradient."""

from __future__ import annotations

import triton
import triton.language as tl

from megafold.evofusion.tiles import affine, load_rows, load_weight, normalize, normalize_gradient, store_rows


@triton.jit
def place(L, BLOCK_L: tl.constexpr):
    """Structure, first row of the program in it, offsets in the tile, rows that are left, and the row in [B, L]."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(L, BLOCK_L)
    b = (pid // blocks).to(tl.int64)
    start = (pid % blocks) * BLOCK_L
    return b, start, tl.arange(0, BLOCK_L), L - start, b * L + start


@triton.jit
def _heads(b, start, at, length, L, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    """Offsets [BLOCK_H, BLOCK_L] in [B, HEADS, L], and which of them exist."""
    h = tl.arange(0, BLOCK_H)
    offsets = (b * HEADS + h)[:, None] * L + start + at[None, :]
    return offsets, (h < HEADS)[:, None] & (at < length)[None, :]


@triton.jit
def _head_weight(w_heads, C: tl.constexpr, HEADS: tl.constexpr, BLOCK_H: tl.constexpr):
    h = tl.arange(0, BLOCK_H)
    pointers = w_heads + h[:, None] * C + tl.arange(0, C)[None, :]
    return tl.load(pointers, mask=(h < HEADS)[:, None], other=0.0)


@triton.jit
def select(p, t0, t1, t2, t3, COUNT: tl.constexpr):
    """The p-th of COUNT pointers."""
    if COUNT > 1:
        t0 = tl.where(p == 1, t1, t0)
    if COUNT > 2:
        t0 = tl.where(p == 2, t2, t0)
    if COUNT > 3:
        t0 = tl.where(p == 3, t3, t0)
    if COUNT > 1:
        t0 = tl.multiple_of(t0, 16)
    return t0


@triton.jit
def project_kernel(
    x, gamma, beta, w, bias, w_heads, out0, out1, out2, out3, heads, L, eps,
    C: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_H: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, HAS_BETA: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows of all. w [COUNT * OUTPUTS, C]; out0.. [B, L, OUTPUTS], heads [B, HEADS, L].

    The first BIASED columns of all outputs have a bias.
    """
    b, start, at, length, row = place(L, BLOCK_L)
    x_hat, _ = normalize(load_rows(x, row, at, length, C, 0, C), eps, 1)
    normed = affine(x_hat, gamma, beta, C, HAS_BETA).to(heads.dtype.element_ty)
    # One loop over the rows of all weights, so that the next ones are on their way during a product.
    for k in range(0, COUNT * OUTPUTS, BLOCK_O):
        y = tl.dot(normed, tl.trans(load_weight(w, k, C, BLOCK_O, C)), input_precision=PRECISION)
        if BIASED > 0:
            column = k + tl.arange(0, BLOCK_O)
            y += tl.load(bias + column, mask=column < BIASED, other=0.0).to(tl.float32)[None, :]
        out = select(k // OUTPUTS, out0, out1, out2, out3, COUNT)
        store_rows(out, row, at, length, OUTPUTS, tl.multiple_of(k % OUTPUTS, 16), y, BLOCK_O)
    if HEADS > 0:
        part = _head_weight(w_heads, C, HEADS, BLOCK_H)
        y = tl.dot(part, tl.trans(normed), input_precision=PRECISION)
        offsets, exists = _heads(b, start, at, length, L, HEADS, BLOCK_H)
        tl.store(heads + offsets, y.to(heads.dtype.element_ty), mask=exists)


@triton.jit
def _project_to(
    normed, w, bias, out, row, at, length,
    p: tl.constexpr, OUTPUTS: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    y = tl.dot(normed, w, input_precision=PRECISION)
    if p * OUTPUTS < BIASED:
        y += tl.load(bias + p * OUTPUTS + tl.arange(0, OUTPUTS)).to(tl.float32)[None, :]
    store_rows(out, row, at, length, OUTPUTS, 0, y, OUTPUTS)


@triton.jit
def resident_project_kernel(
    x, gamma, beta, w, bias, w_heads, out0, out1, out2, out3, heads, L, tiles, programs, eps,
    C: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_H: tl.constexpr, STAGES: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, HAS_BETA: tl.constexpr, BIASED: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`project_kernel` with all weights in shared memory: every `programs`-th tile of rows."""
    pid = tl.program_id(0)
    w0 = tl.trans(load_weight(w, 0, C, OUTPUTS, C))
    w1, w2, w3 = w0, w0, w0
    if COUNT > 1:
        w1 = tl.trans(load_weight(w, OUTPUTS, C, OUTPUTS, C))
    if COUNT > 2:
        w2 = tl.trans(load_weight(w, 2 * OUTPUTS, C, OUTPUTS, C))
    if COUNT > 3:
        w3 = tl.trans(load_weight(w, 3 * OUTPUTS, C, OUTPUTS, C))
    blocks = tl.cdiv(L, BLOCK_L)
    at = tl.arange(0, BLOCK_L)
    for k in tl.range(0, tl.cdiv(tiles - pid, programs), num_stages=STAGES):
        tile = pid + k * programs
        b = (tile // blocks).to(tl.int64)
        start = (tile % blocks) * BLOCK_L
        row, length = b * L + start, L - start
        x_hat, _ = normalize(load_rows(x, row, at, length, C, 0, C), eps, 1)
        normed = affine(x_hat, gamma, beta, C, HAS_BETA).to(heads.dtype.element_ty)
        _project_to(normed, w0, bias, out0, row, at, length, 0, OUTPUTS, BIASED, PRECISION)
        if COUNT > 1:
            _project_to(normed, w1, bias, out1, row, at, length, 1, OUTPUTS, BIASED, PRECISION)
        if COUNT > 2:
            _project_to(normed, w2, bias, out2, row, at, length, 2, OUTPUTS, BIASED, PRECISION)
        if COUNT > 3:
            _project_to(normed, w3, bias, out3, row, at, length, 3, OUTPUTS, BIASED, PRECISION)
        if HEADS > 0:
            part = _head_weight(w_heads, C, HEADS, BLOCK_H)
            y = tl.dot(part, tl.trans(normed), input_precision=PRECISION)
            offsets, exists = _heads(b, start, at, length, L, HEADS, BLOCK_H)
            tl.store(heads + offsets, y.to(heads.dtype.element_ty), mask=exists)


@triton.jit
def gradient_kernel(
    x, gamma, w, w_heads, grad0, grad1, grad2, grad3, grad_heads, other, grad_x, x_hats, L, eps,
    C: tl.constexpr, OUTPUTS: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_H: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, OTHER: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows of the gradient of x, from those of every projection, with OTHER plus `other` [.., C].

    Also stores the normalised rows, for the weights' gradients.
    """
    b, start, at, length, row = place(L, BLOCK_L)
    grad = tl.zeros([BLOCK_L, C], tl.float32)
    for k in range(0, COUNT * OUTPUTS, BLOCK_O):
        source = select(k // OUTPUTS, grad0, grad1, grad2, grad3, COUNT)
        y = load_rows(source, row, at, length, OUTPUTS, tl.multiple_of(k % OUTPUTS, 16), BLOCK_O)
        part = load_weight(w, k, C, BLOCK_O, C)
        grad = tl.dot(y.to(w.dtype.element_ty), part, grad, input_precision=PRECISION)
    if HEADS > 0:
        offsets, exists = _heads(b, start, at, length, L, HEADS, BLOCK_H)
        y = tl.trans(tl.load(grad_heads + offsets, mask=exists, other=0.0))
        part = _head_weight(w_heads, C, HEADS, BLOCK_H)
        grad = tl.dot(y.to(w_heads.dtype.element_ty), part, grad, input_precision=PRECISION)
    x_hat, rstd = normalize(load_rows(x, row, at, length, C, 0, C), eps, 1)
    store_rows(x_hats, row, at, length, C, 0, x_hat, C)
    grad *= tl.load(gamma + tl.arange(0, C)).to(tl.float32)[None, :]
    grad = normalize_gradient(grad, x_hat, rstd, 1)
    if OTHER:
        grad += load_rows(other, row, at, length, C, 0, C)
    store_rows(grad_x, row, at, length, C, 0, grad, C)


@triton.jit
def resident_gradient_kernel(
    x, gamma, w, w_heads, grad0, grad1, grad2, grad3, grad_heads, other, grad_x, x_hats, L, tiles, programs, eps,
    C: tl.constexpr, OUTPUTS: tl.constexpr, WIDE: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_H: tl.constexpr,
    COUNT: tl.constexpr, HEADS: tl.constexpr, OTHER: tl.constexpr, STAGES: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`gradient_kernel` with all weights in shared memory: every `programs`-th tile of rows.

    Weights and gradients go by up to four blocks of WIDE columns: of one projection, or each of its own.
    """
    pid = tl.program_id(0)
    BLOCKS: tl.constexpr = COUNT * (OUTPUTS // WIDE)
    STEP: tl.constexpr = WIDE if COUNT == 1 else 0
    w0 = load_weight(w, 0, C, WIDE, C)
    w1, w2, w3 = w0, w0, w0
    if BLOCKS > 1:
        w1 = load_weight(w, WIDE, C, WIDE, C)
    if BLOCKS > 2:
        w2 = load_weight(w, 2 * WIDE, C, WIDE, C)
    if BLOCKS > 3:
        w3 = load_weight(w, 3 * WIDE, C, WIDE, C)
    blocks = tl.cdiv(L, BLOCK_L)
    at = tl.arange(0, BLOCK_L)
    for k in tl.range(0, tl.cdiv(tiles - pid, programs), num_stages=STAGES):
        tile = pid + k * programs
        b = (tile // blocks).to(tl.int64)
        start = (tile % blocks) * BLOCK_L
        row, length = b * L + start, L - start
        # All loads first: one wait for all of them.
        y0 = load_rows(grad0, row, at, length, OUTPUTS, 0, WIDE).to(w.dtype.element_ty)
        y1, y2, y3 = y0, y0, y0
        if BLOCKS > 1:
            y1 = load_rows(grad1, row, at, length, OUTPUTS, STEP, WIDE).to(w.dtype.element_ty)
        if BLOCKS > 2:
            y2 = load_rows(grad2, row, at, length, OUTPUTS, 2 * STEP, WIDE).to(w.dtype.element_ty)
        if BLOCKS > 3:
            y3 = load_rows(grad3, row, at, length, OUTPUTS, 3 * STEP, WIDE).to(w.dtype.element_ty)
        x_tile = load_rows(x, row, at, length, C, 0, C)
        grad = tl.dot(y0, w0, input_precision=PRECISION)
        if BLOCKS > 1:
            grad = tl.dot(y1, w1, grad, input_precision=PRECISION)
        if BLOCKS > 2:
            grad = tl.dot(y2, w2, grad, input_precision=PRECISION)
        if BLOCKS > 3:
            grad = tl.dot(y3, w3, grad, input_precision=PRECISION)
        if HEADS > 0:
            offsets, exists = _heads(b, start, at, length, L, HEADS, BLOCK_H)
            y = tl.trans(tl.load(grad_heads + offsets, mask=exists, other=0.0))
            part = _head_weight(w_heads, C, HEADS, BLOCK_H)
            grad = tl.dot(y.to(w_heads.dtype.element_ty), part, grad, input_precision=PRECISION)
        x_hat, rstd = normalize(x_tile, eps, 1)
        store_rows(x_hats, row, at, length, C, 0, x_hat, C)
        grad *= tl.load(gamma + tl.arange(0, C)).to(tl.float32)[None, :]
        grad = normalize_gradient(grad, x_hat, rstd, 1)
        if OTHER:
            grad += load_rows(other, row, at, length, C, 0, C)
        store_rows(grad_x, row, at, length, C, 0, grad, C)
