"""Kernels of triangle multiplication on R of the N rows of pairs, all of them or a block. Operands of the batched
product are channels of [B, channels, T, P]: rows padded to T and columns to P with zeros.

`project_kernel`         left and right operands from x: LayerNorm, gated projections, mask.
`output_kernel`          LayerNorm of the product, output projection, gate, shared dropout, residual.
`output_gradient_kernel` gradient of the product; gradients of the output projection and of the gate for the weights.
`input_gradient_kernel`  gradient of x; gradients of values and gates of the projections, in place of the operands'.

The two gradient kernels share [B, 5 C, T, P]: what the weights' gradients need, in the order of the weights' rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafold.evofusion.tiles import (
    affine,
    load_rows,
    load_weight,
    normalize,
    normalize_gradient,
    sigmoid,
    store_rows,
)


@triton.jit
def _place(R, N, T, P, BLOCK_L: tl.constexpr):
    """b, i, j of a program of a grid over [B, T, P], how many j exist, and where row (b, i) starts in [B, R, N]."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(P, BLOCK_L)
    start = (pid % blocks) * BLOCK_L
    i = pid // blocks % T
    b = pid // (blocks * T)
    j = start + tl.arange(0, BLOCK_L)
    length = tl.where(i < R, N, 0)  # a padded row has no element
    return b, i, j, length, (b.to(tl.int64) * R + i) * N


@triton.jit
def _keep(mask, row, j, length, HAS_MASK: tl.constexpr):
    """Which elements of the operands are not zero: those inside, and in the mask [B, R, N]."""
    if HAS_MASK:
        return tl.load(mask + row + j, mask=j < length, other=0) != 0
    else:
        return j < length


@triton.jit
def _column_offsets(b, o, i, channels, T, P):
    """Offsets in [B, channels, T, P] of row i of channels o (a vector), 64-bit."""
    return (b * channels + o).to(tl.int64) * T * P + i * P


@triton.jit
def _dropped(dropped, b, i, j, length, d_b, d_i, d_j, column, BLOCK: tl.constexpr):
    """[BLOCK_L, BLOCK] of the dropout factor, whose shared axis has the stride 0."""
    pointers = dropped + b.to(tl.int64) * d_b + i.to(tl.int64) * d_i + j[:, None] * d_j
    pointers += column + tl.arange(0, BLOCK)[None, :]
    return tl.load(pointers, mask=(j < length)[:, None], other=0.0).to(tl.float32)


@triton.jit
def project_kernel(
    x, gamma, beta, w, mask, operands, first, channels, R, N, T, P, eps,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, HAS_MASK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L elements of a row, both operands, from channel `first`. w [4 C, C]: values, then gates."""
    b, i, j, length, row = _place(R, N, T, P, BLOCK_L)
    x_hat, _ = normalize(load_rows(x, row, j, length, C, 0, C), eps, 1)
    normed = tl.trans(affine(x_hat, gamma, beta, C, True).to(w.dtype.element_ty))
    keep = _keep(mask, row, j, length, HAS_MASK)
    for o in range(0, 2 * C, BLOCK_O):
        values = tl.dot(load_weight(w, o, C, BLOCK_O, C), normed, input_precision=PRECISION)
        gates = tl.dot(load_weight(w, 2 * C + o, C, BLOCK_O, C), normed, input_precision=PRECISION)
        operand = tl.where(keep[None, :], values * sigmoid(gates), 0.0)
        offsets = _column_offsets(b, first + o + tl.arange(0, BLOCK_O), i, channels, T, P)
        tl.store(operands + offsets[:, None] + j[None, :], operand.to(operands.dtype.element_ty), mask=(j < P)[None, :])


@triton.jit
def output_kernel(
    x, gamma, beta, w_gate, product, out_gamma, out_beta, w_out, dropped, out, d_b, d_i, d_j, R, N, T, P, eps,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, HAS_DROPPED: tl.constexpr,
    RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L elements of a row of the output."""
    b, i, j, length, row = _place(R, N, T, P, BLOCK_L)
    c = tl.arange(0, C)
    offsets = _column_offsets(b, c, i, C, T, P)
    columns = tl.load(product + offsets[:, None] + j[None, :], mask=(j < P)[None, :], other=0.0)
    p_hat, _ = normalize(columns.to(tl.float32), eps, 0)
    p_hat = p_hat * tl.load(out_gamma + c).to(tl.float32)[:, None] + tl.load(out_beta + c).to(tl.float32)[:, None]
    normed_product = tl.trans(p_hat.to(w_out.dtype.element_ty))
    x_hat, _ = normalize(load_rows(x, row, j, length, C, 0, C), eps, 1)
    normed = affine(x_hat, gamma, beta, C, True).to(w_gate.dtype.element_ty)
    for o in range(0, C, BLOCK_O):
        w = tl.trans(load_weight(w_out, o, C, BLOCK_O, C))
        value = tl.dot(normed_product, w, input_precision=PRECISION)
        w = tl.trans(load_weight(w_gate, o, C, BLOCK_O, C))
        value *= sigmoid(tl.dot(normed, w, input_precision=PRECISION))
        if HAS_DROPPED:
            value *= _dropped(dropped, b, i, j, length, d_b, d_i, d_j, o, BLOCK_O)
        if RESIDUAL:
            value += load_rows(x, row, j, length, C, o, BLOCK_O)
        store_rows(out, row, j, length, C, o, value, BLOCK_O)


@triton.jit
def output_gradient_kernel(
    grad_out, x, gamma, beta, w_gate, product, out_gamma, out_beta, w_out, dropped,
    grad_product, grads, d_b, d_i, d_j, R, N, T, P, eps,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, HAS_DROPPED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L elements of a row. The gradient of LN(product) W_out^T goes to the first C channels of grads
    [B, 5 C, T, P], that of the gate before its sigmoid to the last C."""
    b, i, j, length, row = _place(R, N, T, P, BLOCK_L)
    c = tl.arange(0, C)
    offsets = _column_offsets(b, c, i, C, T, P)
    columns = tl.load(product + offsets[:, None] + j[None, :], mask=(j < P)[None, :], other=0.0)
    p_hat, _ = normalize(columns.to(tl.float32), eps, 0)
    scale = tl.load(out_gamma + c).to(tl.float32)[:, None]
    shift = tl.load(out_beta + c).to(tl.float32)[:, None]
    normed_product = tl.trans((p_hat * scale + shift).to(w_out.dtype.element_ty))
    x_hat, _ = normalize(load_rows(x, row, j, length, C, 0, C), eps, 1)
    normed = affine(x_hat, gamma, beta, C, True).to(w_gate.dtype.element_ty)
    grad = tl.zeros([C, BLOCK_L], tl.float32)
    for o in range(0, C, BLOCK_O):
        w = load_weight(w_out, o, C, BLOCK_O, C)
        projected = tl.dot(normed_product, tl.trans(w), input_precision=PRECISION)
        gate = tl.trans(load_weight(w_gate, o, C, BLOCK_O, C))
        gate = sigmoid(tl.dot(normed, gate, input_precision=PRECISION))
        upstream = load_rows(grad_out, row, j, length, C, o, BLOCK_O)
        if HAS_DROPPED:
            upstream *= _dropped(dropped, b, i, j, length, d_b, d_i, d_j, o, BLOCK_O)
        at = _column_offsets(b, o + tl.arange(0, BLOCK_O), i, 5 * C, T, P)[:, None] + j[None, :]
        of_gate = tl.trans((upstream * projected * gate * (1.0 - gate)).to(w.dtype))
        tl.store(grads + at + tl.cast(4 * C, tl.int64) * T * P, of_gate, mask=(j < P)[None, :])
        upstream = tl.trans((upstream * gate).to(w.dtype))
        tl.store(grads + at, upstream, mask=(j < P)[None, :])
        grad = tl.dot(tl.trans(w), upstream, grad, input_precision=PRECISION)
    # Read and normalised again: kept through the loop it would take the registers that the products need.
    columns = tl.load(product + offsets[:, None] + j[None, :], mask=(j < P)[None, :], other=0.0)
    p_hat, rstd = normalize(columns.to(tl.float32), eps, 0)
    grad = normalize_gradient(grad * scale, p_hat, rstd, 0)
    tl.store(
        grad_product + offsets[:, None] + j[None, :], grad.to(grad_product.dtype.element_ty), mask=(j < P)[None, :]
    )


@triton.jit
def input_gradient_kernel(
    grad_out, x, gamma, beta, w, w_gate, mask, grads, grad_x, R, N, T, P, eps,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, HAS_MASK: tl.constexpr,
    RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L elements of a row. The first 2 C channels of grads [B, 5 C, T, P] hold the gradients of the
    operands and become those of the values; the next 2 C become those of the gates before their sigmoid, and the last C
    hold that of the output gate."""
    b, i, j, length, row = _place(R, N, T, P, BLOCK_L)
    x_hat, _ = normalize(load_rows(x, row, j, length, C, 0, C), eps, 1)
    normed = tl.trans(affine(x_hat, gamma, beta, C, True).to(w.dtype.element_ty))
    keep = _keep(mask, row, j, length, HAS_MASK)
    grad = tl.zeros([BLOCK_L, C], tl.float32)
    for o in range(0, 2 * C, BLOCK_O):
        w_values = load_weight(w, o, C, BLOCK_O, C)
        w_gates = load_weight(w, 2 * C + o, C, BLOCK_O, C)
        values = tl.dot(w_values, normed, input_precision=PRECISION)
        gates = sigmoid(tl.dot(w_gates, normed, input_precision=PRECISION))
        offsets = _column_offsets(b, o + tl.arange(0, BLOCK_O), i, 5 * C, T, P)[:, None] + j[None, :]
        upstream = tl.load(grads + offsets, mask=keep[None, :], other=0.0).to(tl.float32)
        grad_v = (upstream * gates).to(w.dtype.element_ty)
        tl.store(grads + offsets, grad_v, mask=(j < P)[None, :])
        grad = tl.dot(tl.trans(grad_v), w_values, grad, input_precision=PRECISION)
        grad_g = (upstream * values * gates * (1.0 - gates)).to(w.dtype.element_ty)
        tl.store(grads + offsets + tl.cast(2 * C, tl.int64) * T * P, grad_g, mask=(j < P)[None, :])
        grad = tl.dot(tl.trans(grad_g), w_gates, grad, input_precision=PRECISION)
    for o in range(0, C, BLOCK_O):
        offsets = _column_offsets(b, 4 * C + o + tl.arange(0, BLOCK_O), i, 5 * C, T, P)[:, None] + j[None, :]
        upstream = tl.load(grads + offsets, mask=(j < P)[None, :], other=0.0)
        grad = tl.dot(tl.trans(upstream), load_weight(w_gate, o, C, BLOCK_O, C), grad, input_precision=PRECISION)
    grad *= tl.load(gamma + tl.arange(0, C)).to(tl.float32)[None, :]
    x_hat, rstd = normalize(load_rows(x, row, j, length, C, 0, C), eps, 1)  # again, as above
    grad = normalize_gradient(grad, x_hat, rstd, 1)
    if RESIDUAL:
        grad += load_rows(grad_out, row, j, length, C, 0, C)
    store_rows(grad_x, row, j, length, C, 0, grad, C)
