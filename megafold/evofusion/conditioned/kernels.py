"""Kernels of adaptive LayerNorm and of the gate by the conditioning, for rows that a program holds whole."""

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
def _place(M, BLOCK_L: tl.constexpr):
    row = tl.program_id(0).to(tl.int64) * BLOCK_L
    return row, tl.arange(0, BLOCK_L), M - row


@triton.jit
def _gate(rows, w, bias, o, WIDTH: tl.constexpr, BLOCK_O: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr):
    """sigmoid(rows w^T + bias), columns o.."""
    y = tl.dot(rows, tl.trans(load_weight(w, o, WIDTH, BLOCK_O, WIDTH)), input_precision=PRECISION)
    return sigmoid(y + tl.load(bias + o + tl.arange(0, BLOCK_O)).to(tl.float32)[None, :], FAST)


@triton.jit
def _condition(cond, cond_gamma, row, at, length, eps, D: tl.constexpr, DTYPE: tl.constexpr):
    """LN(cond) without a shift, in the dtype of products."""
    hat, _ = normalize(load_rows(cond, row, at, length, D, 0, D), eps, 1)
    return affine(hat, cond_gamma, cond_gamma, D, False).to(DTYPE)


@triton.jit
def _moments(x, row, at, length, eps, C: tl.constexpr):
    """Mean and 1 / std of rows, [BLOCK_L, 1] each."""
    tile = load_rows(x, row, at, length, C, 0, C)
    mean = tl.sum(tile, 1) / C
    centred = tile - mean[:, None]
    rstd = tl.div_rn(1.0, tl.sqrt_rn(tl.sum(centred * centred, 1) / C + eps))
    return mean[:, None], rstd[:, None]


@triton.jit
def adaptive_norm_kernel(
    x, cond, cond_gamma, w_gamma, gamma_bias, w_beta, out, M, eps,
    C: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows. x and out [M, C], cond [M, D], w_gamma and w_beta [C, D]."""
    row, at, length = _place(M, BLOCK_L)
    mean, rstd = _moments(x, row, at, length, eps, C)
    normed = _condition(cond, cond_gamma, row, at, length, eps, D, w_gamma.dtype.element_ty)
    for o in range(0, C, BLOCK_O):
        x_hat = (load_rows(x, row, at, length, C, o, BLOCK_O) - mean) * rstd
        y = x_hat * _gate(normed, w_gamma, gamma_bias, o, D, BLOCK_O, FAST, PRECISION)
        y = tl.dot(normed, tl.trans(load_weight(w_beta, o, D, BLOCK_O, D)), y, input_precision=PRECISION)
        store_rows(out, row, at, length, C, o, y, BLOCK_O)


@triton.jit
def adaptive_norm_gradient_kernel(
    grad_out, x, cond, cond_gamma, w_gamma, gamma_bias, w_beta, other_x, other_cond, grad_x, grad_cond, grad_gate, M,
    eps, C: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, OTHERS: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows. grad_gate [M, C]: of gamma before its sigmoid. With OTHERS, other_x and other_cond are
    added to the gradients of x and cond."""
    row, at, length = _place(M, BLOCK_L)
    mean, rstd = _moments(x, row, at, length, eps, C)
    normed = _condition(cond, cond_gamma, row, at, length, eps, D, w_gamma.dtype.element_ty)
    grad = tl.zeros([BLOCK_L, D], tl.float32)
    of_mean = tl.zeros([BLOCK_L], tl.float32)
    of_std = tl.zeros([BLOCK_L], tl.float32)
    for o in range(0, C, BLOCK_O):
        gate = _gate(normed, w_gamma, gamma_bias, o, D, BLOCK_O, FAST, PRECISION)
        upstream = load_rows(grad_out, row, at, length, C, o, BLOCK_O)
        part = load_weight(w_beta, o, D, BLOCK_O, D)
        grad = tl.dot(upstream.to(part.dtype), part, grad, input_precision=PRECISION)
        x_hat = (load_rows(x, row, at, length, C, o, BLOCK_O) - mean) * rstd
        upstream *= gate
        of_mean += tl.sum(upstream, 1)
        upstream *= x_hat
        of_std += tl.sum(upstream, 1)
        part = load_weight(w_gamma, o, D, BLOCK_O, D)
        of_gate = (upstream * (1.0 - gate)).to(part.dtype)
        store_rows(grad_gate, row, at, length, C, o, of_gate, BLOCK_O)
        grad = tl.dot(of_gate, part, grad, input_precision=PRECISION)
    cond_hat, cond_rstd = normalize(load_rows(cond, row, at, length, D, 0, D), eps, 1)
    grad = normalize_gradient(affine(grad, cond_gamma, cond_gamma, D, False), cond_hat, cond_rstd, 1)
    if OTHERS:
        grad += load_rows(other_cond, row, at, length, D, 0, D)
    store_rows(grad_cond, row, at, length, D, 0, grad, D)
    # The means of whole rows are known now; gates again, since keeping them would take the registers of the products.
    for o in range(0, C, BLOCK_O):
        result = _gate(normed, w_gamma, gamma_bias, o, D, BLOCK_O, FAST, PRECISION)
        result *= load_rows(grad_out, row, at, length, C, o, BLOCK_O)
        x_hat = (load_rows(x, row, at, length, C, o, BLOCK_O) - mean) * rstd
        result = rstd * (result - (of_mean / C)[:, None] - x_hat * (of_std / C)[:, None])
        if OTHERS:
            result += load_rows(other_x, row, at, length, C, o, BLOCK_O)
        store_rows(grad_x, row, at, length, C, o, result, BLOCK_O)


@triton.jit
def condition_gate_kernel(
    y, cond, w, bias, residual, out, M,
    C: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, RESIDUAL: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows of residual + y sigmoid(cond w^T + bias)."""
    row, at, length = _place(M, BLOCK_L)
    tile = load_rows(cond, row, at, length, D, 0, D).to(w.dtype.element_ty)
    for o in range(0, C, BLOCK_O):
        value = load_rows(y, row, at, length, C, o, BLOCK_O) * _gate(tile, w, bias, o, D, BLOCK_O, FAST, PRECISION)
        if RESIDUAL:
            value += load_rows(residual, row, at, length, C, o, BLOCK_O)
        store_rows(out, row, at, length, C, o, value, BLOCK_O)


@triton.jit
def condition_gate_gradient_kernel(
    grad_out, y, cond, w, bias, grad_y, grad_cond, grad_gate, M,
    C: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, FAST: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows. grad_gate [M, C]: of the gate before its sigmoid."""
    row, at, length = _place(M, BLOCK_L)
    tile = load_rows(cond, row, at, length, D, 0, D).to(w.dtype.element_ty)
    grad = tl.zeros([BLOCK_L, D], tl.float32)
    for o in range(0, C, BLOCK_O):
        gate = _gate(tile, w, bias, o, D, BLOCK_O, FAST, PRECISION)
        upstream = load_rows(grad_out, row, at, length, C, o, BLOCK_O)
        store_rows(grad_y, row, at, length, C, o, upstream * gate, BLOCK_O)
        upstream *= load_rows(y, row, at, length, C, o, BLOCK_O) * gate * (1.0 - gate)
        of_gate = upstream.to(w.dtype.element_ty)
        store_rows(grad_gate, row, at, length, C, o, of_gate, BLOCK_O)
        grad = tl.dot(of_gate, load_weight(w, o, D, BLOCK_O, D), grad, input_precision=PRECISION)
    store_rows(grad_cond, row, at, length, D, 0, grad, D)
