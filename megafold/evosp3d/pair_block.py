"""The pair block (AF3 algorithm 17, lines 2 to 6) on a block of rows over EvoFusion's operators.

What :func:`megafold.model.fused.pair_block` does on one device; what is sent, and when, is as in
:mod:`megafold.evosp3d.triangle`. Rows that go to columns are normalised before, in the dtype of products.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.evofusion.attention_output.api import attention_output
from megafold.evofusion.norm_project.api import norm_project
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
        normed = F.layer_norm(pairs, pairs.shape[-1:], norm.weight, norm.bias).to(product_dtype(pairs))
        turning = start(Exchange(split=2, split_total=total, join=1, join_total=total), normed, shards, ATTENTION)
        del normed
    # By itself, so that it is on its way while the projections are computed.
    _, bias = norm_project(pairs, norm.weight, norm.bias, head_weight=fn.to_attn_bias[0].weight)
    flight = start(Gather(dim=2, total=total), bias, shards, ATTENTION)
    if ending:
        turned = turning.wait().transpose(1, 2)
        q, k, v, gate = (F.linear(turned, weight, bias) for weight, bias in zip(weights, biases))
    else:
        (q, k, v, gate), _ = norm_project(pairs, norm.weight, norm.bias, weights, biases)
    q, k, v = (t.unflatten(-1, (bias.shape[1], -1)).transpose(2, 3) for t in (q, k, v))
    bias = flight.wait()
    bias = bias.transpose(-1, -2) if ending else bias
    out = attend(q, k, v, bias, None if mask is None else mask.unsqueeze(1)).transpose(2, 3).flatten(-2)
    dropped = _drawn(fn.dropout, pairs, shards)
    if not ending:
        return attention_output(out, gate, attn.to_out.weight, dropped=dropped, residual=pairs)
    out = attention_output(out, gate, attn.to_out.weight).transpose(1, 2)
    out = run(Exchange(split=1, split_total=total, join=2, join_total=total), out, shards, ATTENTION)
    return pairs + (out if dropped is None else out * dropped.to(out.dtype))


def _drawn(dropout: Module, x: Tensor, shards: Shards) -> Tensor | None:
    """The factor of a row- or column-shared dropout for rows x [b, n, N, C], drawn for all N rows on every rank."""
    if not (dropout.training and dropout.dropout.p > 0 and dropout.dropout_type in ("row", "col")):
        return None
    batch, _, total, width = x.shape
    by_row = dropout.dropout_type == "row"
    shape = (batch, 1, total, width) if by_row else (batch, total, 1, width)
    drawn = dropout.dropout(torch.ones(shape, dtype=product_dtype(x), device=x.device))
    return drawn if by_row else shards.narrow(drawn, 1)
