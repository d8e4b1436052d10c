"""Attention with a pair bias (AF3 algorithm 24): the trunk's single attention and the denoiser's token attention.

The trunk: a rank holds n of N rows of the single representation and asks for these; keys and values come from all rows,
gathered before their projection (N ds elements; the pair bias of its own rows is on the rank already, so nothing of
size N^2 is sent). The denoiser: a rank holds some augmentations of all tokens, and its bias is gathered layer by
layer, H N^2 elements, never the conditioned pairs, which stay sharded.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.evosp3d.collectives import Gather, run, start
from megafold.evosp3d.triangle import project_attention
from megafold.model import recompute
from megafold.model.repeated import Repeated, once_and_copies

if TYPE_CHECKING:
    from torch.nn import Module

    from megafold.evosp3d.mesh import Shards
    from megafold.model.attend import Attend


def bias_of_pairs(self: Module, pairs: Tensor) -> Tensor:
    """The bias of an ``AttentionPairBias``: rows of pairs [b, n, N, c] -> [b, H, n, N]."""
    return self.to_attn_bias(self.to_attn_bias_norm(pairs))


def single_attention(
    self: Module,
    single_repr: Tensor,
    *,
    pairwise_repr: Tensor,
    return_values: bool = False,
    value_residual: Tensor | None = None,
    mask: Tensor | None = None,
    shards: Shards,
    attend: Attend,
    make_bias: Callable[[Module, Tensor], Tensor],
) -> Tensor | tuple[Tensor, Tensor]:
    """``AttentionPairBias.forward`` in the trunk: single [b, n, ds], pairs [b, n, N, dp], mask [b, N] -> [b, n, ds].

    Attention probabilities are dropped as on one device: the mask is drawn for all N x N of them.
    """
    attn, total = self.attn, pairwise_repr.shape[2]
    flight = start(Gather(dim=1, total=total), single_repr, shards, "single_attention")
    bias = make_bias(self, pairwise_repr)
    gate = None if attn.to_gates is None else attn.to_gates(single_repr)
    heads = bias.shape[1]
    whole = flight.wait()
    q = attn.to_q(single_repr).unflatten(-1, (heads, -1)).transpose(1, 2)
    k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in attn.to_kv(whole).chunk(2, dim=-1))
    values = v
    if value_residual is not None:
        v = v.lerp(value_residual, attn.to_value_residual_mix(whole))
    dropout = attn.attend.attn_dropout
    if dropout.training and dropout.p:
        out = _attend_with_dropout(attn, q, k, v, bias, mask, shards)
    else:
        seen = None if mask is None else mask.unsqueeze(1)
        out = attend(*(t.unsqueeze(1) for t in (q, k, v)), bias, seen).squeeze(1)
    out = out.transpose(1, 2).flatten(-2)
    out = attn.to_out(out if gate is None else out * gate)
    return (out, values) if return_values else out


def _attend_with_dropout(
    attn: Module, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, shards: Shards
) -> Tensor:
    """The stock attention on this rank's queries [b, H, n, D], with its part of the N x N dropout mask."""
    stock = attn.attend
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2) + bias
    if stock.enable_attn_softclamp:
        logits = torch.tanh(logits / stock.attn_softclamp_value) * stock.attn_softclamp_value
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -torch.finfo(logits.dtype).max)
    weights = logits.softmax(dim=-1, dtype=torch.float32 if stock.softmax_full_precision else None).to(v.dtype)
    ones = weights.new_ones(*weights.shape[:2], weights.shape[3], weights.shape[3])
    kept = shards.narrow(F.dropout(ones, stock.attn_dropout.p), 2)
    return (weights * kept) @ v


def token_attention(
    self: Module,
    single_repr: Tensor,
    *,
    pairwise_repr: Tensor | Repeated,
    return_values: bool = False,
    value_residual: Tensor | None = None,
    mask: Tensor | None = None,
    windowed_mask: None = None,
    shards: Shards,
    attend: Attend,
    make_bias: Callable[[Module, Tensor], Tensor],
) -> Tensor | tuple[Tensor, Tensor]:
    """``AttentionPairBias.forward`` in the denoiser: B = b * copies augmentations of this rank, [B, N, d] -> [B, N, d].

    pairwise_repr: rows of the conditioned pairs [b, n, N, dp], one copy for all augmentations.
    """
    once, copies = once_and_copies(pairwise_repr)
    flight = start(Gather(dim=2, total=once.shape[2]), make_bias(self, once), shards, "token_attention")
    x = single_repr.unflatten(0, (-1, copies))
    q, k, v, values = project_attention(self.attn, x, value_residual)
    out = attend(q, k, v, flight.wait(), None if mask is None else mask[::copies].unsqueeze(1))
    out = out.transpose(2, 3).flatten(-2)
    if self.attn.to_gates is not None:
        out = out * self.attn.to_gates(x)
    out = self.attn.to_out(out).flatten(0, 1)
    return (out, values) if return_values else out


def pairformer(
    self: Module, *, single_repr: Tensor, pairwise_repr: Tensor, mask: Tensor | None = None, shards: Shards
) -> tuple[Tensor, Tensor]:
    """``PairformerStack.forward``: the whole single [b, N, ds] and rows of pairs [b, n, N, dp], in and out.

    Between the layers a rank holds its rows of the single representation only.
    """
    total = single_repr.shape[1]
    self.__dict__[recompute.MOST_ROWS] = shards.block(total, 0)[1]
    try:
        single_repr, pairwise_repr = type(self).forward(
            self, single_repr=shards.narrow(single_repr, 1), pairwise_repr=pairwise_repr, mask=mask
        )
    finally:
        del self.__dict__[recompute.MOST_ROWS]
    return run(Gather(dim=1, total=total), single_repr, shards, "pairformer"), pairwise_repr
