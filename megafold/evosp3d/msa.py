"""The MSA module (AF3 algorithms 8 to 10): alignment rows sharded, pairs by rows as everywhere.

An alignment [b, S, N, d] is cut over S. The transition is local then, and so is pair-weighted averaging once every rank
has the weights; the outer product mean sums over S and needs both operands at rows of the pair tensor. Sent per rank
and forward, in elements, with f = (P - 1) / P, m the hidden width of the outer product and H the heads of the
averaging: S N m / P f to bring the left operand to rows, S N m f for the right one (every rank needs all of it), N^2
H f for the weights. With the published 64, 32 and 8 the alternative, gathering alignment values, would cost S N 256
f.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafold.evofusion.msa.outer_product import outer_product
from megafold.evofusion.norm_project.api import norm_project
from megafold.evosp3d.collectives import Exchange, Gather, run, start
from megafold.evosp3d.spread import einx_of_rows
from megafold.model.rebind import with_names

if TYPE_CHECKING:
    from torch.nn import Module

    from megafold.evosp3d.mesh import Shards

# The outer products of a chunk of rows: [rows, N, m, m], made again in the backward instead of kept.
CHUNK_BYTES = 256 << 20


def embed_alignment(self: Module, msa: Tensor, *, shards: Shards) -> Tensor:
    """``msa_init_proj``: the whole alignment [b, S, N, features] -> this rank's rows of it, embedded."""
    return type(self).forward(self, shards.narrow(msa, 1))


def msa_module(self: Module, *, msa: Tensor, msa_mask: Tensor | None = None, **kwargs: object) -> Tensor:
    """``MSAModule.forward``. Its layers learn S from the mask, which is therefore made where there is none."""
    if msa_mask is None:
        msa_mask = torch.ones(msa.shape[:2], dtype=torch.bool, device=msa.device)
    return with_names(type(self).forward, einx=einx_of_rows())(self, msa=msa, msa_mask=msa_mask, **kwargs)


def outer_product_mean(
    self: Module, msa: Tensor, *, mask: Tensor | None = None, msa_mask: Tensor, shards: Shards
) -> Tensor:
    """``OuterProductMean.forward``: msa [b, s, N, d], mask [b, N], msa_mask [b, S] -> pairs [b, n, N, dp].

    The outer products [n, N, m, m] exist for a chunk of rows at a time only.
    """
    name, depth, tokens = "outer_product_mean", msa_mask.shape[1], msa.shape[2]
    left, right = self.to_hidden(self.norm(msa)).chunk(2, dim=-1)
    seen = shards.narrow(msa_mask, 1).type(msa.dtype)[..., None, None]
    left, right = left * seen, right * seen
    right_flight = start(Gather(dim=1, total=depth), right, shards, name)
    left = run(Exchange(split=2, split_total=tokens, join=1, join_total=depth), left, shards, name)
    right = right_flight.wait()
    count = msa_mask.type(msa.dtype).sum(-1).clamp(min=self.eps)
    pair_mask = None
    if mask is not None:
        pair_mask = (shards.narrow(mask, 1).unsqueeze(2) & mask.unsqueeze(1)).type(msa.dtype)
    return project_outer_products(self, left, right, count, pair_mask)


def fused_outer_product_mean(
    self: Module, msa: Tensor, *, mask: Tensor | None = None, msa_mask: Tensor, shards: Shards
) -> Tensor:
    """:func:`outer_product_mean` over EvoFusion's operators; what is sent is the same."""
    name, depth, tokens = "outer_product_mean", msa_mask.shape[1], msa.shape[2]
    (left, right), _ = norm_project(msa, self.norm.weight, self.norm.bias, self.to_hidden.weight.chunk(2))
    right_flight = start(Gather(dim=1, total=depth), right, shards, name)
    # The factor goes to one of the two, before their product: in fp16 the sum alone could be too large.
    share = shards.narrow(msa_mask, 1) / msa_mask.sum(-1, keepdim=True).clamp(min=self.eps)
    left = left * share.to(left.dtype)[..., None, None]
    left = run(Exchange(split=2, split_total=tokens, join=1, join_total=depth), left, shards, name)
    out = outer_product(left, right_flight.wait(), self.to_pairwise_repr.weight)
    if mask is not None:
        out = out * (shards.narrow(mask, 1).unsqueeze(2) & mask.unsqueeze(1)).unsqueeze(-1)
    return out + self.to_pairwise_repr.bias.to(out.dtype)


def project_outer_products(
    self: Module, left: Tensor, right: Tensor, count: Tensor, pair_mask: Tensor | None
) -> Tensor:
    """left [b, S, n, m], right [b, S, N, m], count [b], pair_mask [b, n, N] -> [b, n, N, dp], chunk by chunk."""

    def project(left: Tensor, right: Tensor, pair_mask: Tensor | None) -> Tensor:
        outer = torch.einsum("bsid,bsje->bijde", left, right) / count[:, None, None, None, None]
        outer = outer.flatten(-2)
        if pair_mask is not None:
            outer = outer * pair_mask.unsqueeze(-1)
        return self.to_pairwise_repr(outer)

    batch, _, rows, width = left.shape
    a_row = batch * right.shape[2] * width * width * left.element_size()
    step = max(1, CHUNK_BYTES // max(1, a_row))
    out = []
    for first in range(0, max(1, rows), step):
        part = left[:, :, first : first + step]
        part_mask = None if pair_mask is None else pair_mask[:, first : first + step]
        out.append(checkpoint(project, part, right, part_mask, use_reentrant=False, preserve_rng_state=False))
    return out[0] if len(out) == 1 else torch.cat(out, dim=1)


def pair_weighted_averaging(
    self: Module, *, msa: Tensor, pairwise_repr: Tensor, mask: Tensor | None = None, shards: Shards
) -> Tensor:
    """``MSAPairWeightedAveraging.forward``: msa [b, s, N, d], pairs [b, n, N, dp], mask [b, N] -> [b, s, N, d]."""
    logits = self.pairwise_repr_to_attn(pairwise_repr)
    if mask is not None:
        logits = logits.masked_fill(~mask[:, None, None], -torch.finfo(logits.dtype).max)
    # Softmax gives float32 under autocast; the product below takes the projection's dtype, so that is what is sent.
    weights = logits.softmax(dim=-1).to(logits.dtype)
    flight = start(Gather(dim=2, total=pairwise_repr.shape[2]), weights, shards, "pair_weighted_averaging")
    values, gates = self.msa_to_values_and_gates(msa)
    out = torch.einsum("bhij,bhsjd->bhsid", flight.wait(), values)
    return self.to_out(out * gates.sigmoid())
