"""From partial sums over rows to gradients of weights, of a bias and of a LayerNorm's parameters, in two launches.

What `weight_gradient` leaves are sums over shares of the rows. One kernel adds the shares of up to two weights and
makes their gradients, in the dtypes of the parameters; another adds what its programs found for the LayerNorm. Nothing
is added with atomics: results repeat.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafold.evofusion.launch import ceil_div
from megafold.replay import launch_kernel

WHOLE = {"BLOCK_S": 1, "BLOCK_O": 32, "BLOCK_C": 128, "num_warps": 8}
SHARED = {"BLOCK_S": 32, "BLOCK_O": 2, "BLOCK_C": 32, "num_warps": 8}
MANY_SHARED = {"BLOCK_S": 64, "BLOCK_O": 2, "BLOCK_C": 32, "num_warps": 16}
"""Blocks of sums that are there as one, in shares, and in more than four blocks of them. Compilers keep only about two
loads of a thread on their way, whatever it asks for: so threads have two of 16 bytes each, and there are many threads.
More shares come with fewer outputs, and as many threads then take them."""

NORM_BLOCK = {"BLOCK_S": 128, "BLOCK_C": 8, "num_warps": 4}


@triton.jit
def _finish(
    products, sums, weight, gamma, beta, grad, bias, shares, p_s, p_o, s_s, s_o, splits, block, OUTPUTS, BIASED, C,
    BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, NORM: tl.constexpr, HAS_BETA: tl.constexpr,
    HAS_BIAS: tl.constexpr, TURNED: tl.constexpr,
):  # fmt: skip
    o = block * BLOCK_O + tl.arange(0, BLOCK_O)
    c = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.arange(0, BLOCK_S)
    inside = (o < OUTPUTS)[:, None] & (c < C)[None, :]
    parts = tl.zeros([BLOCK_S, BLOCK_O, BLOCK_C], tl.float32)
    of_rows = tl.zeros([BLOCK_S, BLOCK_O], tl.float32)
    summed = (o < OUTPUTS) & (HAS_BETA or tl.program_id(1) == 0)
    at = c[None, :] * OUTPUTS + o[:, None] if TURNED else o[:, None] * C + c[None, :]
    if NORM:
        # On their way while the shares are added.
        w = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.load(gamma + c, mask=c < C, other=0.0).to(tl.float32)
    for first in range(0, splits, BLOCK_S):
        s = (first + split).to(tl.int64)
        there = first + split < splits
        pointers = products + s[:, None, None] * p_s + o[None, :, None] * p_o + c[None, None, :]
        parts += tl.load(pointers, mask=there[:, None, None] & inside[None, :, :], other=0.0).to(tl.float32)
        if HAS_BETA or HAS_BIAS:
            pointers = sums + s[:, None] * s_s + o[None, :] * s_o
            of_rows += tl.load(pointers, mask=there[:, None] & summed[None, :], other=0.0).to(tl.float32)
    g = tl.sum(parts, 0)
    total = tl.sum(of_rows, 0)
    out = g
    if NORM:
        out = g * scale[None, :]
        if HAS_BETA:
            out += total[:, None] * tl.load(beta + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        share = shares + block * 2 * C + c
        tl.store(share, tl.sum(w * g, 0), mask=c < C)
        if HAS_BETA:
            tl.store(share + C, tl.sum(w * total[:, None], 0), mask=c < C)
    tl.store(grad + at, out.to(grad.dtype.element_ty), mask=inside)
    if HAS_BIAS and tl.program_id(1) == 0:
        tl.store(bias + o, total.to(bias.dtype.element_ty), mask=o < BIASED)


@triton.jit
def finish_kernel(
    products0, products1, sums0, sums1, weight0, weight1, gamma, beta, grad0, grad1, bias, shares0, shares1, p_s0, p_s1,
    p_o0, p_o1, s_s0, s_s1, s_o0, s_o1, splits0, splits1, blocks0, OUTPUTS0, OUTPUTS1, BIASED, C,
    BLOCK_S: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, PARTS: tl.constexpr, NORM0: tl.constexpr,
    NORM1: tl.constexpr, HAS_BETA: tl.constexpr, HAS_BIAS: tl.constexpr, TURNED0: tl.constexpr, TURNED1: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_O x BLOCK_C of the gradient of one of PARTS weights, and with NORM its share [2, C] of those
    of gamma and beta. The bias is that of the first BIASED rows of the first weight. TURNED: a weight is [C, OUTPUTS].
    """
    block = tl.program_id(0)
    if PARTS == 1 or block < blocks0:
        _finish(
            products0, sums0, weight0, gamma, beta, grad0, bias, shares0, p_s0, p_o0, s_s0, s_o0, splits0, block,
            OUTPUTS0, BIASED, C, BLOCK_S, BLOCK_O, BLOCK_C, NORM0, HAS_BETA and NORM0, HAS_BIAS, TURNED0,
        )  # fmt: skip
    else:
        _finish(
            products1, sums1, weight1, gamma, beta, grad1, bias, shares1, p_s1, p_o1, s_s1, s_o1, splits1,
            block - blocks0, OUTPUTS1, BIASED, C, BLOCK_S, BLOCK_O, BLOCK_C, NORM1, HAS_BETA and NORM1, False, TURNED1,
        )  # fmt: skip


@triton.jit
def finish_norm_kernel(shares, grad_gamma, grad_beta, count, C, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr):
    """One program: BLOCK_C columns of the gradient of gamma, or in the second row of programs of beta."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    split = tl.arange(0, BLOCK_S)
    parts = tl.zeros([BLOCK_S, BLOCK_C], tl.float32)
    for first in range(0, count, BLOCK_S):
        at = (first + split)[:, None] * 2 * C + tl.program_id(1) * C + c[None, :]
        parts += tl.load(shares + at, mask=(first + split < count)[:, None] & (c < C)[None, :], other=0.0)
    total = tl.sum(parts, 0)
    if tl.program_id(1) == 0:
        tl.store(grad_gamma + c, total.to(grad_gamma.dtype.element_ty), mask=c < C)
    else:
        tl.store(grad_beta + c, total.to(grad_beta.dtype.element_ty), mask=c < C)


@dataclass(frozen=True)
class Part:
    """A weight [O, C] and what its gradient follows from.

    Attributes:
        products: [S, O, C], shares of G = dy^T x over the rows. sums: [S, O], shares of the sums of dy.
        normed: whether x is x_hat of the LayerNorm, so that the gradient is G gamma + s beta; else it is G.
        turned: the weight is [C, O].
    """

    weight: Tensor
    products: Tensor
    sums: Tensor
    normed: bool = True
    turned: bool = False


@dataclass(frozen=True)
class Gradients:
    """In the dtypes of the parameters. norms: of gamma and, unless there is none, of beta."""

    weights: list[Tensor]
    bias: Tensor | None
    norms: list[Tensor]


def gradients(
    parts: Sequence[Part], gamma: Tensor | None = None, beta: Tensor | None = None, bias: Tensor | None = None
) -> Gradients:
    """Gradients of one or two weights [O, C], of a LayerNorm [C] before them, and of a bias [O] of the first.

    Args:
        gamma, beta: of the LayerNorm; wanted where a part is `normed`. bias: may be that of the first rows alone.
    """
    first, last, width = parts[0], parts[-1], parts[0].products.shape[-1]
    most = max(part.products.shape[0] for part in parts)
    blocks = WHOLE if most == 1 else SHARED if most <= 4 * SHARED["BLOCK_S"] else MANY_SHARED
    counts = [ceil_div(part.products.shape[1], blocks["BLOCK_O"]) for part in parts]
    normed = [count if part.normed else 0 for part, count in zip(parts, counts)]
    shares = torch.empty((max(1, sum(normed)), 2, width), device=first.products.device, dtype=torch.float32)
    grads = [torch.empty_like(part.weight, memory_format=torch.contiguous_format) for part in parts]
    of_bias = None if bias is None else torch.empty_like(bias, memory_format=torch.contiguous_format)
    weights = [part.weight.contiguous() for part in parts]
    gamma_, beta_ = (weights[0] if t is None else t for t in (gamma, beta))
    strides = [f(part) for f in _STRIDES for part in (first, last)]
    launch_kernel(
        finish_kernel, (sum(counts), ceil_div(width, blocks["BLOCK_C"])),
        first.products, last.products, first.sums, last.sums, weights[0], weights[-1], gamma_, beta_, grads[0],
        grads[-1], grads[0] if bias is None else of_bias, shares, shares[normed[0] :] if sum(normed[1:]) else shares,
        *strides, counts[0], first.products.shape[1], last.products.shape[1], 0 if bias is None else len(bias), width,
        **blocks, PARTS=len(parts), NORM0=first.normed, NORM1=last.normed, HAS_BETA=beta is not None,
        HAS_BIAS=bias is not None, TURNED0=first.turned, TURNED1=last.turned,
    )  # fmt: skip
    norms = [torch.empty_like(t) for t in (gamma, beta) if t is not None and sum(normed)]
    if norms:
        launch_kernel(
            finish_norm_kernel, (ceil_div(width, NORM_BLOCK["BLOCK_C"]), len(norms)),
            shares, norms[0], norms[-1], sum(normed), width, **NORM_BLOCK,
        )  # fmt: skip
    return Gradients(grads, of_bias, norms)


_STRIDES = (
    lambda part: part.products.stride(0),
    lambda part: part.products.stride(1),
    lambda part: part.sums.stride(0),
    lambda part: part.sums.stride(1),
    lambda part: part.products.shape[0],
)
