"""The pair block (AF3 algorithm 17, lines 2 to 6) on a block of rows over EvoFusion's operators.

What :func:`megafold.model.fused.pair_block` does on one device; what is sent, and when, is as in
:mod:`megafold.evosp3d.triangle`. Rows that go to columns are normalised before, in the dtype of products.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold import triton_support
from megafold.evofusion import rows
from megafold.evofusion.attention_output.api import attention_output
from megafold.evofusion.norm_project.api import norm_project_and_pass
from megafold.evofusion.operator import is_narrow, product_dtype, uses_kernels
from megafold.evofusion.transition.api import transition
from megafold.evosp3d.collectives import Exchange, Gather, run, start
from megafold.evosp3d.sharded_triangle import triangle_update
from megafold.model.fused import cannot_fuse

if TYPE_CHECKING:
    from torch.nn import Module

    from megafold.evosp3d.mesh import Shards
    from megafold.model.attend import Attend

ATTENTION = "triangle_attention"


def pair_block(
    self: Module,
    pairwise_repr: Tensor,
    *,
    mask: Tensor | None = None,
    value_residuals: tuple[Tensor, Tensor] | None = None,
    return_values: bool = False,
    shards: Shards,
    attend: Attend,
) -> Tensor | tuple[Tensor, tuple[None, None]]:
    """``PairwiseBlock.forward``: rows of pairs [b, n, N, C], mask [b, N] -> rows of pairs.

    The values that the stock block returns beside are None: it stands where no later layer takes them.
    """
    pairs = pairwise_repr
    for layer, outgoing in ((self.tri_mult_outgoing, True), (self.tri_mult_incoming, False)):
        pairs = _update(layer, pairs, mask, outgoing, shards)
    for layer in (self.tri_attn_starting, self.tri_attn_ending):
        pairs = _attention(layer, pairs, mask, shards, attend)
    layer = self.pairwise_transition
    pairs = transition(pairs, layer.norm.weight, layer.norm.bias, layer.fn.ff[0].weight, layer.fn.ff[2].weight)
    return (pairs, (None, None)) if return_values else pairs


def _update(layer: Module, pairs: Tensor, mask: Tensor | None, outgoing: bool, shards: Shards) -> Tensor:
    norm, fn, width = layer.norm, layer.fn, pairs.shape[-1]
    to_out, dropout = fn.to_out
    # Whether kernels run must not depend on the rank: one without rows sends and receives like the others.
    if not (uses_kernels(pairs) and is_narrow(width) and to_out.weight.shape == (width, width)):
        return layer(pairs, mask=mask) + pairs
    return triangle_update(
        pairs,
        norm.weight,
        norm.bias,
        fn.left_right_proj[0].weight,
        fn.out_gate.weight,
        fn.to_out_norm.weight,
        fn.to_out_norm.bias,
        to_out.weight,
        outgoing=outgoing,
        mask=None if mask is None else shards.narrow(mask, 1).unsqueeze(2) & mask.unsqueeze(1),
        dropped=_drawn(dropout, pairs, shards),
        shards=shards,
    )


def _attention(layer: Module, pairs: Tensor, mask: Tensor | None, shards: Shards, attend: Attend) -> Tensor:
    fn, norm, total = layer.fn, layer.norm, pairs.shape[2]
    if cannot_fuse(fn):
        return layer(pairs, mask=mask) + pairs
    attn, ending = fn.attn, fn.need_transpose
    weights = [attn.to_q.weight, *attn.to_kv.weight.chunk(2), attn.to_gates[0].weight]
    biases = [attn.to_q.bias, None, None, None]
    if ending:
        hat, scaled = normalized(pairs, norm)
        turning = start(Exchange(split=2, split_total=total, join=1, join_total=total), hat, shards, ATTENTION)
        del hat
    # By itself, so that it is on its way while the projections are computed; what flows back to the pairs from there on
    # is added in its kernel.
    _, bias, pairs = norm_project_and_pass(pairs, norm.weight, norm.bias, head_weight=fn.to_attn_bias[0].weight)
    flight = start(Gather(dim=2, total=total), bias, shards, ATTENTION)
    if ending:
        # Whole columns, still rows first: attention takes any strides, and what comes out lies as what went in.
        turned, order = turning.wait(), (0, 2, 3, 1, 4)
        affine = [folded(w, b, None if scaled else norm) for w, b in zip(weights, biases)]
        q, k, v, gate = projected(turned, *zip(*affine))
    else:
        (q, k, v, gate), _, pairs = norm_project_and_pass(pairs, norm.weight, norm.bias, weights, biases)
        order = (0, 1, 3, 2, 4)
    q, k, v = (t.unflatten(-1, (bias.shape[1], -1)).permute(order) for t in (q, k, v))
    bias = flight.wait()
    bias = bias.transpose(-1, -2) if ending else bias
    out = attend(q, k, v, bias, None if mask is None else mask.unsqueeze(1))
    out = out.permute((0, 3, 1, 2, 4) if ending else order).flatten(-2)
    dropped = _drawn(fn.dropout, pairs, shards, columns=ending)
    out = attention_output(out, gate, attn.to_out.weight, dropped=dropped, residual=None if ending else pairs)
    if not ending:
        return out
    return pairs + run(Exchange(split=1, split_total=total, join=2, join_total=total), out, shards, ATTENTION)


def normalized(x: Tensor, norm: Module) -> tuple[Tensor, bool]:
    """LayerNorm of x [..., C] in the dtype of products, and whether it is scaled and shifted already.

    Where it is not, the projections behind it are to do both (:func:`folded`): one pass over x writes half the bytes.
    """
    dtype = product_dtype(x)
    if uses_kernels(x) and x.shape[-1] % 16 == 0:
        return _Normalized.apply(x, dtype), False
    return F.layer_norm(x, x.shape[-1:], norm.weight, norm.bias).to(dtype), True


def folded(weight: Tensor, bias: Tensor | None, norm: Module | None) -> tuple[Tensor, Tensor | None]:
    """Weight and bias of a projection that scales and shifts what a LayerNorm left out; None: it left nothing out."""
    if norm is None:
        return weight, bias
    shift = (weight * norm.bias).sum(-1)
    return weight * norm.weight, shift if bias is None else shift + bias


def projected(x: Tensor, weights: Sequence[Tensor], shifts: Sequence[Tensor | None]) -> tuple[Tensor, ...]:
    """``F.linear`` of x [..., R, C] with each weight [O, C] and shift [O] (or None), in the dtype of x.

    In the backward the gradients of x are summed up in the products, and those of a shift a row of pairs at a time,
    then over the rows, in fp32: torch's own sum of so many half-precision rows takes as long as two of the products.
    """
    return _Projected.apply(x, len(weights), *weights, *shifts)


class _Projected(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, count: int, *parameters: Tensor | None) -> tuple[Tensor, ...]:
        weights, shifts = parameters[:count], parameters[count:]
        ctx.save_for_backward(x, *weights)
        ctx.shifts = [None if shift is None else shift.dtype for shift in shifts]
        shifts = (None if shift is None else shift.to(x.dtype) for shift in shifts)
        return tuple(F.linear(x, weight.to(x.dtype), shift) for weight, shift in zip(weights, shifts))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        rows, of_weights, of_shifts, of_rows = x.reshape(-1, x.shape[-1]), [], [], None
        for grad, weight, dtype in zip(grads, weights, ctx.shifts):
            flat, cast = grad.reshape(-1, grad.shape[-1]), weight.to(x.dtype)
            of_rows = flat @ cast if of_rows is None else of_rows.addmm_(flat, cast)
            of_weights.append((flat.mT @ rows).to(weight.dtype))
            wide = torch.promote_types(grad.dtype, torch.float32)
            total = None if dtype is None else grad.sum(-2, dtype=wide).flatten(0, -2).sum(0).to(dtype)
            of_shifts.append(total)
        return of_rows.view(x.shape), None, *of_weights, *of_shifts


class _Normalized(torch.autograd.Function):
    """(x - mean) / std of rows, C a multiple of 16: one pass each way; a rank without rows has nothing to do."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x)
        if not x.numel():
            return x.to(dtype)
        with triton_support.device_guard(x.device):
            return rows.normalized(x.reshape(-1, x.shape[-1]), dtype)[0].view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        if not x.numel():
            return torch.zeros_like(x), None
        with triton_support.device_guard(x.device):
            flat, of_flat = (t.reshape(-1, t.shape[-1]) for t in (x, grad))
            return rows.normalized_gradient(flat.contiguous(), of_flat.contiguous()).view(x.shape), None


def _drawn(dropout: Module, x: Tensor, shards: Shards, *, columns: bool = False) -> Tensor | None:
    """The factor of a row- or column-shared dropout for rows x [b, n, N, C], drawn for all N rows on every rank.

    With ``columns`` for whole columns [b, N, n, C] of the same pairs, which the rank holds in the order of its rows.
    """
    if not (dropout.training and dropout.dropout.p > 0 and dropout.dropout_type in ("row", "col")):
        return None
    batch, _, total, width = x.shape
    by_row = dropout.dropout_type == "row"
    shape = (batch, 1, total, width) if by_row else (batch, total, 1, width)
    drawn = dropout.dropout(torch.ones(shape, dtype=product_dtype(x), device=x.device))
    if by_row == columns:  # one factor for each of what is cut
        drawn = shards.narrow(drawn, 2 if by_row else 1)
    return drawn
