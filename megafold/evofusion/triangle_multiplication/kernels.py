"""Kernels of triangle multiplication on R of the N rows of pairs, all of them or a block. Operands of the batched
product are channels of [B, channels, T, P]: rows padded to T and columns to P with zeros.

`fold_kernel`              weights with a LayerNorm's scale in them, and its shift beside them.
`project_kernel`           left and right operands: LayerNorm, gated projections, mask.
`output_kernel`            LayerNorm of the product, output projection, gate, shared dropout, residual.

Those of the backward, which share [B, 5 C, T, P]: what the weights' gradients need, in the order of the weights' rows:

`normalize_kernel`         LayerNorm of x without scale and shift, [B, T, P, C + 8], with ones behind it.
`normalize_product_kernel` the same of the product, in the second C channels of what is shared.
`output_gradient_kernel`   gradients of the output projection and of the gate.
`product_gradient_kernel`  gradient of the product.
`gate_gradient_kernel`     gradients of values and gates of the operands, in place of the operands'.
`input_gradient_kernel`    gradient of x.

`output_gradient_kernel` and `gate_gradient_kernel` have a few programs for each multiprocessor, which hold rows of the
weights and go through the tiles of BLOCK_L pairs of a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

from megafold.evofusion.tiles import load_rows, load_weight, normalize, normalize_gradient, sigmoid, store_rows


@triton.jit
def _place(tile, R, N, T, P, BLOCK_L: tl.constexpr):
    """b, i, j of a tile of [B, T, P], how many j exist, and where row (b, i) starts in [B, R, N] and in [B, T, P]."""
    blocks = tl.cdiv(P, BLOCK_L)
    j = (tile % blocks) * BLOCK_L + tl.arange(0, BLOCK_L)
    i = tile // blocks % T
    b = tile // (blocks * T)
    length = tl.where(i < R, N, 0)  # a padded row has no element
    return b, i, j, length, (b.to(tl.int64) * R + i) * N, (b.to(tl.int64) * T + i) * P


@triton.jit
def _columns(b, first, i, j, channels, T, P, BLOCK: tl.constexpr):
    """64-bit offsets [BLOCK, BLOCK_L] in [B, channels, T, P] of row i of channels from `first`."""
    o = first + tl.arange(0, BLOCK)
    return ((b * channels + o).to(tl.int64) * T * P + i * P)[:, None] + j[None, :]


@triton.jit
def _load_columns(x, b, first, i, j, channels, T, P, BLOCK: tl.constexpr):
    """[BLOCK, BLOCK_L] in the dtype of x."""
    return tl.load(x + _columns(b, first, i, j, channels, T, P, BLOCK), mask=(j < P)[None, :], other=0.0)


@triton.jit
def _store_columns(x, b, first, i, j, channels, T, P, value, BLOCK: tl.constexpr):
    """Store [BLOCK, BLOCK_L], padding too."""
    offsets = _columns(b, first, i, j, channels, T, P, BLOCK)
    tl.store(x + offsets, value.to(x.dtype.element_ty), mask=(j < P)[None, :])


@triton.jit
def _normed(x_hat, padded_row, j, P, C: tl.constexpr):
    """[BLOCK_L, C] of what `normalize_kernel` stored, in the dtype of products."""
    pointers = x_hat + (padded_row + j)[:, None] * (C + 8) + tl.arange(0, C)[None, :]
    return tl.load(pointers, mask=(j < P)[:, None], other=0.0)


@triton.jit
def _hat(x, row, j, length, padded_row, P, eps, C: tl.constexpr, NORM: tl.constexpr, DTYPE: tl.constexpr):
    """[BLOCK_L, C] of (x - mean) / std in the dtype of products; without NORM x is what `normalize_kernel` stored."""
    if NORM:
        hat, _ = normalize(load_rows(x, row, j, length, C, 0, C), eps, 1)
        return hat.to(DTYPE)
    else:
        return _normed(x, padded_row, j, P, C)


@triton.jit
def _linear(w, shift, o, columns, C: tl.constexpr, BLOCK_O: tl.constexpr, PRECISION: tl.constexpr):
    """[BLOCK_O, BLOCK_L]: rows o.. of w times `columns` [C, BLOCK_L], plus the shift."""
    return tl.dot(load_weight(w, o, C, BLOCK_O, C), columns, input_precision=PRECISION) + _shift(shift, o, BLOCK_O)


@triton.jit
def _shift(shift, o, BLOCK: tl.constexpr):
    return tl.load(shift + o + tl.arange(0, BLOCK))[:, None]


@triton.jit
def _keep(mask, row, j, length, HAS_MASK: tl.constexpr):
    """Which elements of the operands are not zero: those inside, and in the mask [B, R, N]."""
    if HAS_MASK:
        return (tl.load(mask + row + j, mask=j < length, other=0) != 0)[None, :]
    else:
        return (j < length)[None, :]


@triton.jit
def _dropped(dropped, b, i, j, length, d_b, d_i, d_j, column, BLOCK: tl.constexpr):
    """[BLOCK_L, BLOCK] of the dropout factor, whose shared axis has the stride 0."""
    pointers = dropped + b.to(tl.int64) * d_b + i.to(tl.int64) * d_i + j[:, None] * d_j
    pointers += column + tl.arange(0, BLOCK)[None, :]
    return tl.load(pointers, mask=(j < length)[:, None], other=0.0).to(tl.float32)


@triton.jit
def fold_kernel(w0, w1, gamma, beta, w, shift, FIRST, C: tl.constexpr, BLOCK: tl.constexpr):
    """One program: BLOCK rows of w0 [FIRST, C] and then w1, times gamma, to w [O, C]; times beta, to shift [O]."""
    o = tl.program_id(0) * BLOCK
    c = tl.arange(0, C)
    at = tl.arange(0, BLOCK)[:, None] * C + c[None, :]
    if o < FIRST:
        part = tl.load(w0 + o * C + at).to(tl.float32)
    else:
        part = tl.load(w1 + (o - FIRST) * C + at).to(tl.float32)
    tl.store(w + o * C + at, (part * tl.load(gamma + c).to(tl.float32)[None, :]).to(w.dtype.element_ty))
    tl.store(shift + o + tl.arange(0, BLOCK), tl.sum(part * tl.load(beta + c).to(tl.float32)[None, :], 1))


@triton.jit
def normalize_kernel(x, x_hat, rstd, R, N, T, P, eps, C: tl.constexpr, BLOCK_L: tl.constexpr):
    """One program: a tile of (x - mean) / std with a column of ones, [B, T, P, C + 8], and of 1 / std [B, T, P]."""
    _, _, j, length, row, padded_row = _place(tl.program_id(0), R, N, T, P, BLOCK_L)
    hat, inverse = normalize(load_rows(x, row, j, length, C, 0, C), eps, 1)
    pitch: tl.constexpr = C + 8
    store_rows(x_hat, padded_row, j, P, pitch, 0, hat, C)
    behind = tl.arange(0, 8)[None, :] + j[:, None] * 0
    pointers = x_hat + (padded_row + j)[:, None] * pitch + C + behind
    tl.store(pointers, (behind == 0).to(x_hat.dtype.element_ty), mask=(j < P)[:, None])
    tl.store(rstd + padded_row + j, inverse, mask=j < P)


@triton.jit
def normalize_product_kernel(product, grads, rstd, R, N, T, P, eps, C: tl.constexpr, BLOCK_L: tl.constexpr):
    """One program: a tile of (product - mean) / std over channels, to the second C channels of grads [B, 5 C, T, P],
    and of 1 / std [B, T, P]."""
    b, i, j, _, _, padded_row = _place(tl.program_id(0), R, N, T, P, BLOCK_L)
    columns = _load_columns(product, b, 0, i, j, C, T, P, C)
    hat, inverse = normalize(columns.to(tl.float32), eps, 0)
    _store_columns(grads, b, C, i, j, 5 * C, T, P, hat, C)
    tl.store(rstd + padded_row + j, inverse, mask=j < P)


@triton.jit
def project_kernel(
    x, w, shift, mask, operands, first, channels, R, N, T, P, eps,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, HAS_MASK: tl.constexpr, NORM: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of both operands, from channel `first`. w [4 C, C]: values, then gates."""
    b, i, j, length, row, padded_row = _place(tl.program_id(0), R, N, T, P, BLOCK_L)
    normed = tl.trans(_hat(x, row, j, length, padded_row, P, eps, C, NORM, w.dtype.element_ty))
    keep = _keep(mask, row, j, length, HAS_MASK)
    for o in range(0, 2 * C, BLOCK_O):
        values = _linear(w, shift, o, normed, C, BLOCK_O, PRECISION)
        gates = sigmoid(_linear(w, shift, 2 * C + o, normed, C, BLOCK_O, PRECISION), FAST)
        operand = tl.where(keep, values * gates, 0.0)
        _store_columns(operands, b, first + o, i, j, channels, T, P, operand, BLOCK_O)


@triton.jit
def output_kernel(
    x, product, w_gate, gate_shift, w_out, out_shift, dropped, out, d_b, d_i, d_j, R, N, T, P, eps,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, HAS_DROPPED: tl.constexpr,
    RESIDUAL: tl.constexpr, FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the output."""
    b, i, j, length, row, _ = _place(tl.program_id(0), R, N, T, P, BLOCK_L)
    p_hat, _ = normalize(_load_columns(product, b, 0, i, j, C, T, P, C).to(tl.float32), eps, 0)
    p_hat = p_hat.to(w_out.dtype.element_ty)
    normed = tl.trans(_hat(x, row, j, length, row, P, eps, C, True, w_gate.dtype.element_ty))
    for o in range(0, C, BLOCK_O):
        value = _linear(w_out, out_shift, o, p_hat, C, BLOCK_O, PRECISION)
        value *= sigmoid(_linear(w_gate, gate_shift, o, normed, C, BLOCK_O, PRECISION), FAST)
        value = tl.trans(value)
        if HAS_DROPPED:
            value *= _dropped(dropped, b, i, j, length, d_b, d_i, d_j, o, BLOCK_O)
        if RESIDUAL:
            value += load_rows(x, row, j, length, C, o, BLOCK_O)
        store_rows(out, row, j, length, C, o, value, BLOCK_O)


@triton.jit
def output_gradient_kernel(
    grad_out, x_hat, w_gate, gate_shift, w_out, out_shift, dropped, grads, d_b, d_i, d_j, R, N, T, P, tiles,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, STAGES: tl.constexpr, HAS_DROPPED: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_O columns of the gradient of what was projected from the product, to the first C channels of grads
    [B, 5 C, T, P], and of that of the gate before its sigmoid, to the last C. The second C hold LN(product)."""
    o = tl.program_id(1) * BLOCK_O
    w_o, w_g = load_weight(w_out, o, C, BLOCK_O, C), load_weight(w_gate, o, C, BLOCK_O, C)
    of_out, of_gate = _shift(out_shift, o, BLOCK_O), _shift(gate_shift, o, BLOCK_O)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        b, i, j, length, row, padded_row = _place(tile, R, N, T, P, BLOCK_L)
        normed = tl.trans(_normed(x_hat, padded_row, j, P, C))
        upstream = load_rows(grad_out, row, j, length, C, o, BLOCK_O)
        if HAS_DROPPED:
            upstream *= _dropped(dropped, b, i, j, length, d_b, d_i, d_j, o, BLOCK_O)
        gate = sigmoid(tl.dot(w_g, normed, input_precision=PRECISION) + of_gate, FAST)
        upstream = tl.trans(upstream) * gate
        _store_columns(grads, b, o, i, j, 5 * C, T, P, upstream, BLOCK_O)
        upstream *= 1.0 - gate
        p_hat = _load_columns(grads, b, C, i, j, 5 * C, T, P, C)
        value = tl.dot(w_o, p_hat, input_precision=PRECISION) + of_out
        _store_columns(grads, b, 4 * C + o, i, j, 5 * C, T, P, upstream * value, BLOCK_O)


@triton.jit
def product_gradient_kernel(
    grads, rstd, w_out, grad_product, R, N, T, P,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the gradient of the product, from the first 2 C channels of grads [B, 5 C, T, P]."""
    b, i, j, _, _, padded_row = _place(tl.program_id(0), R, N, T, P, BLOCK_L)
    grad = tl.zeros([BLOCK_L, C], tl.float32)
    for o in range(0, C, BLOCK_O):
        upstream = tl.trans(_load_columns(grads, b, o, i, j, 5 * C, T, P, BLOCK_O))
        grad = tl.dot(upstream, load_weight(w_out, o, C, BLOCK_O, C), grad, input_precision=PRECISION)
    hat = tl.trans(_load_columns(grads, b, C, i, j, 5 * C, T, P, C)).to(tl.float32)
    grad = normalize_gradient(grad, hat, tl.load(rstd + padded_row + j, mask=j < P, other=0.0), 1)
    _store_columns(grad_product, b, 0, i, j, C, T, P, tl.trans(grad), C)


@triton.jit
def gate_gradient_kernel(
    x_hat, w, shift, mask, grads, R, N, T, P, tiles,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, STAGES: tl.constexpr, HAS_MASK: tl.constexpr,
    FAST: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_O of the first 2 C channels of grads [B, 5 C, T, P], which hold the gradients of the operands and become
    those of the values, and of the next 2 C, which become those of the gates before their sigmoid."""
    o = tl.program_id(1) * BLOCK_O
    w_values, w_gates = load_weight(w, o, C, BLOCK_O, C), load_weight(w, 2 * C + o, C, BLOCK_O, C)
    of_values, of_gates = _shift(shift, o, BLOCK_O), _shift(shift, 2 * C + o, BLOCK_O)
    for tile in tl.range(tl.program_id(0), tiles, tl.num_programs(0), num_stages=STAGES):
        b, i, j, length, row, padded_row = _place(tile, R, N, T, P, BLOCK_L)
        normed = tl.trans(_normed(x_hat, padded_row, j, P, C))
        upstream = _load_columns(grads, b, o, i, j, 5 * C, T, P, BLOCK_O).to(tl.float32)
        gates = sigmoid(tl.dot(w_gates, normed, input_precision=PRECISION) + of_gates, FAST)
        # The mask is not one of the load, whose elements would then be read one by one.
        upstream = tl.where(_keep(mask, row, j, length, HAS_MASK), upstream * gates, 0.0)
        _store_columns(grads, b, o, i, j, 5 * C, T, P, upstream, BLOCK_O)
        values = tl.dot(w_values, normed, input_precision=PRECISION) + of_values
        _store_columns(grads, b, 2 * C + o, i, j, 5 * C, T, P, upstream * values * (1.0 - gates), BLOCK_O)


@triton.jit
def input_gradient_kernel(
    grad_out, x_hat, rstd, w, grads, grad_x, R, N, T, P,
    C: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, RESIDUAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of the gradient of x. grads [B, 5 C, T, P]: of values, gates, output gate; w [5 C, C]."""
    b, i, j, length, row, padded_row = _place(tl.program_id(0), R, N, T, P, BLOCK_L)
    grad = tl.zeros([BLOCK_L, C], tl.float32)
    for o in range(0, 5 * C, BLOCK_O):
        upstream = tl.trans(_load_columns(grads, b, o, i, j, 5 * C, T, P, BLOCK_O))
        grad = tl.dot(upstream, load_weight(w, o, C, BLOCK_O, C), grad, input_precision=PRECISION)
    hat = _normed(x_hat, padded_row, j, P, C).to(tl.float32)
    grad = normalize_gradient(grad, hat, tl.load(rstd + padded_row + j, mask=j < P, other=0.0), 1)
    if RESIDUAL:
        grad += load_rows(grad_out, row, j, length, C, 0, C)
    store_rows(grad_x, row, j, length, C, 0, grad, C)
