"""What surrounds the kernels over pairs, in one launch before them and one behind them.

At N = 256 a launch for each weight and each sum takes as long as a pass over the pairs.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafold.evofusion.weights import dealt_place
from megafold.replay import launch_kernel

COLUMNS = 8
"""Of weights' gradients that a program of `finish_kernel` takes, with all of their rows."""

ROWS = 16
"""Of weights that a program of `fold_all_kernel` takes."""

Pair = tuple[Tensor, Tensor]


@triton.jit
def fold_all_kernel(
    w_in, w_gate, w_out, gamma, beta, out_gamma, out_beta, w, dealt, transposed, shift, C: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK rows of [6 C, C], the weights one below the other, times the scale of their LayerNorm, to w,
    and to dealt with columns 32 a + 8 b + 2 c + d in place 32 a + 8 c + 2 b + d; rows of w_out as columns of transposed
    [C, C], in such places too (both from C = 32 on); times beta, to shift [6 C]."""
    o = tl.program_id(0) * BLOCK
    row, c = tl.arange(0, BLOCK), tl.arange(0, C)
    at = row[:, None] * C + c[None, :]
    if o < 4 * C:
        part = tl.load(w_in + o * C + at).to(tl.float32)
    else:
        if o < 5 * C:
            part = tl.load(w_gate + (o - 4 * C) * C + at).to(tl.float32)
        else:
            part = tl.load(w_out + (o - 5 * C) * C + at).to(tl.float32)
    if o < 5 * C:
        scale, offset = tl.load(gamma + c).to(tl.float32), tl.load(beta + c).to(tl.float32)
    else:
        scale, offset = tl.load(out_gamma + c).to(tl.float32), tl.load(out_beta + c).to(tl.float32)
    folded = (part * scale[None, :]).to(w.dtype.element_ty)
    tl.store(w + o * C + at, folded)
    tl.store(shift + o + row, tl.sum(part * offset[None, :], 1))
    if C >= 32:
        tl.store(dealt + o * C + row[:, None] * C + dealt_place(c)[None, :], folded)
    if C >= 32 and o >= 5 * C:
        tl.store(transposed + c[None, :] * C + dealt_place(o - 5 * C + row)[:, None], folded)


@triton.jit
def _finish(
    products, sums, w0, w1, gamma, beta, grad0, grad1, grad_gamma, grad_beta, p_o, s_o, c, C: tl.constexpr,
    FIRST: tl.constexpr, PARTS: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """Columns c of the gradients of PARTS x C rows of weights, FIRST x C of them in w0, and of their LayerNorm; ROWS: a
    power of two that holds them."""
    scale, offset = tl.load(gamma + c).to(tl.float32), tl.load(beta + c).to(tl.float32)
    row = tl.arange(0, ROWS)
    at = row[:, None] * C + c[None, :]
    first, second = (row < FIRST * C)[:, None], ((row >= FIRST * C) & (row < PARTS * C))[:, None]
    # All loads before any store, so that they are on their way together.
    g = tl.load(products + row[:, None] * p_o + c[None, :], mask=first | second, other=0.0)
    s = tl.load(sums + row * s_o, mask=row < PARTS * C, other=0.0)[:, None]
    weight = tl.load(w0 + at, mask=first, other=0.0).to(tl.float32)
    if PARTS > FIRST:
        weight += tl.load(w1 + at - FIRST * C * C, mask=second, other=0.0).to(tl.float32)
    grad = g * scale[None, :] + s * offset[None, :]
    tl.store(grad0 + at, grad.to(grad0.dtype.element_ty), mask=first)
    if PARTS > FIRST:
        tl.store(grad1 + at - FIRST * C * C, grad.to(grad1.dtype.element_ty), mask=second)
    tl.store(grad_gamma + c, tl.sum(weight * g, 0).to(grad_gamma.dtype.element_ty))
    tl.store(grad_beta + c, tl.sum(weight * s, 0).to(grad_beta.dtype.element_ty))


@triton.jit
def finish_kernel(
    products, sums, out_products, out_sums, w_in, w_gate, w_out, gamma, beta, out_gamma, out_beta, grad_in, grad_gate,
    grad_out, grad_gamma, grad_beta, grad_out_gamma, grad_out_beta, p_o, s_o, out_p_o, out_s_o,
    C: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK columns of the gradients of all that one of the two LayerNorms feeds, and its own."""
    c = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    if tl.program_id(0) == 0:
        _finish(
            products, sums, w_in, w_gate, gamma, beta, grad_in, grad_gate, grad_gamma, grad_beta, p_o, s_o, c, C, 4, 5,
            8 * C,
        )  # fmt: skip
    else:
        _finish(
            out_products, out_sums, w_out, w_out, out_gamma, out_beta, grad_out, grad_out, grad_out_gamma,
            grad_out_beta, out_p_o, out_s_o, c, C, 1, 1, C,
        )  # fmt: skip


def fold_all(weights: tuple[Tensor, ...], norms: tuple[Tensor, ...], dtype: torch.dtype) -> Pair:
    """Weights with their LayerNorms' scales, [13 C, C]: see `split`; shifts [6 C], fp32.

    Args:
        weights: [4 C, C], [C, C], [C, C]. norms: gamma and beta, of x and of the product. dtype: of products.
    """
    width = weights[1].shape[1]
    w = torch.empty((13 * width, width), device=weights[0].device, dtype=dtype)
    shift = torch.empty(6 * width, device=w.device, dtype=torch.float32)
    launch_kernel(
        fold_all_kernel, (6 * width // ROWS,),
        *(weight.contiguous() for weight in weights), *norms, *split(w), shift, C=width, BLOCK=ROWS, num_warps=4,
    )  # fmt: skip
    return w, shift


def split(w: Tensor) -> tuple[Tensor, ...]:
    """What `fold_all` gave: all weights as they are [6 C, C], dealt [6 C, C], and the last transposed and dealt."""
    width = w.shape[1]
    return w.split((6 * width, 6 * width, width))


def finish(of_input: Pair, of_output: Pair, weights: tuple[Tensor, ...], norms: tuple[Tensor, ...]) -> list[Tensor]:
    """Gradients of the three weights and of what `norms` holds, in their dtypes.

    Args:
        of_input, of_output: products [5 C, C] and [C, C] over the pairs, and sums [.., 1], all fp32: see
            `weight_gradient`. The others: as for `fold_all`.
    """
    width = weights[1].shape[1]
    grads = [torch.empty_like(t, memory_format=torch.contiguous_format) for t in (*weights, *norms)]
    strides = (t.stride(0) for t in (*of_input, *of_output))
    launch_kernel(
        finish_kernel, (2, width // COLUMNS),
        *of_input, *of_output, *(weight.contiguous() for weight in weights), *norms, *grads, *strides, C=width,
        BLOCK=COLUMNS, num_warps=4,
    )  # fmt: skip
    return grads
