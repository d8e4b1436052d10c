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
def _gate(rows, w, bias, o, WIDTH: tl.constexpr, BLOCK_O: tl.constexpr, PRECISION: tl.constexpr):
    """sigmoid(rows w^T + bias), columns o.."""
    y = tl.dot(rows, tl.trans(load_weight(w, o, WIDTH, BLOCK_O, WIDTH)), input_precision=PRECISION)
    return sigmoid(y + tl.load(bias + o + tl.arange(0, BLOCK_O)).to(tl.float32)[None, :])


@triton.jit
def adaptive_norm_kernel(
    x, cond, cond_gamma, w_gamma, gamma_bias, w_beta, out, M, eps,
    C: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows. x and out [M, C], cond [M, D], w_gamma and w_beta [C, D]."""
    row, at, length = _place(M, BLOCK_L)
    cond_hat, _ = normalize(load_rows(cond, row, at, length, D, 0, D), eps, 1)
    normed = affine(cond_hat, cond_gamma, cond_gamma, D, False).to(w_gamma.dtype.element_ty)
    x_hat, _ = normalize(load_rows(x, row, at, length, C, 0, C), eps, 1)
    y = x_hat * _gate(normed, w_gamma, gamma_bias, 0, D, C, PRECISION)
    y = tl.dot(normed, tl.trans(load_weight(w_beta, 0, D, C, D)), y, input_precision=PRECISION)
    store_rows(out, row, at, length, C, 0, y, C)


@triton.jit
def adaptive_norm_gradient_kernel(
    grad_out, x, cond, cond_gamma, w_gamma, gamma_bias, w_beta, grad_x, grad_cond, grad_gate, M, eps,
    C: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows. grad_gate [M, C]: of gamma before its sigmoid."""
    row, at, length = _place(M, BLOCK_L)
    cond_hat, _ = normalize(load_rows(cond, row, at, length, D, 0, D), eps, 1)
    normed = affine(cond_hat, cond_gamma, cond_gamma, D, False).to(w_gamma.dtype.element_ty)
    gate = _gate(normed, w_gamma, gamma_bias, 0, D, C, PRECISION)
    x_hat, rstd = normalize(load_rows(x, row, at, length, C, 0, C), eps, 1)
    upstream = load_rows(grad_out, row, at, length, C, 0, C)
    store_rows(grad_x, row, at, length, C, 0, normalize_gradient(upstream * gate, x_hat, rstd, 1), C)
    of_gate = (upstream * x_hat * gate * (1.0 - gate)).to(w_gamma.dtype.element_ty)
    store_rows(grad_gate, row, at, length, C, 0, of_gate, C)
    grad = tl.dot(of_gate, load_weight(w_gamma, 0, D, C, D), input_precision=PRECISION)
    upstream = load_rows(grad_out, row, at, length, C, 0, C).to(w_beta.dtype.element_ty)
    grad = tl.dot(upstream, load_weight(w_beta, 0, D, C, D), grad, input_precision=PRECISION)
    grad *= tl.load(cond_gamma + tl.arange(0, D)).to(tl.float32)[None, :]
    cond_hat, rstd = normalize(load_rows(cond, row, at, length, D, 0, D), eps, 1)
    store_rows(grad_cond, row, at, length, D, 0, normalize_gradient(grad, cond_hat, rstd, 1), D)


@triton.jit
def condition_gate_kernel(
    y, cond, w, bias, residual, out, M,
    C: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, RESIDUAL: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows of residual + y sigmoid(cond w^T + bias)."""
    row, at, length = _place(M, BLOCK_L)
    tile = load_rows(cond, row, at, length, D, 0, D).to(w.dtype.element_ty)
    for o in range(0, C, BLOCK_O):
        value = load_rows(y, row, at, length, C, o, BLOCK_O) * _gate(tile, w, bias, o, D, BLOCK_O, PRECISION)
        if RESIDUAL:
            value += load_rows(residual, row, at, length, C, o, BLOCK_O)
        store_rows(out, row, at, length, C, o, value, BLOCK_O)


@triton.jit
def condition_gate_gradient_kernel(
    grad_out, y, cond, w, bias, grad_y, grad_cond, grad_gate, M,
    C: tl.constexpr, D: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_L rows. grad_gate [M, C]: of the gate before its sigmoid."""
    row, at, length = _place(M, BLOCK_L)
    tile = load_rows(cond, row, at, length, D, 0, D).to(w.dtype.element_ty)
    grad = tl.zeros([BLOCK_L, D], tl.float32)
    for o in range(0, C, BLOCK_O):
        gate = _gate(tile, w, bias, o, D, BLOCK_O, PRECISION)
        upstream = load_rows(grad_out, row, at, length, C, o, BLOCK_O)
        store_rows(grad_y, row, at, length, C, o, upstream * gate, BLOCK_O)
        upstream *= load_rows(y, row, at, length, C, o, BLOCK_O) * gate * (1.0 - gate)
        of_gate = upstream.to(w.dtype.element_ty)
        store_rows(grad_gate, row, at, length, C, o, of_gate, BLOCK_O)
        grad = tl.dot(of_gate, load_weight(w, o, D, BLOCK_O, D), grad, input_precision=PRECISION)
    store_rows(grad_cond, row, at, length, D, 0, grad, D)
