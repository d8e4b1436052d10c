"""What makes the pair tensor (AF3 algorithms 2, 3 and 16, and token bonds): each rank makes its own rows.

Atoms, of which there are only O(N), are embedded by every rank alike. Nothing here sends a message.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafold.evosp3d.spread import einx_of_rows
from megafold.model.rebind import Stand, with_names

if TYPE_CHECKING:
    from torch.nn import Module

    from megafold.evosp3d.mesh import Shards


def rows_of_pairs(shards: Shards) -> Stand:
    """``einx`` whose outer sums over tokens i and j are taken for this rank's i."""
    whole = einx_of_rows()

    def add(pattern: str, left: Tensor, right: Tensor) -> Tensor:
        return whole.add(pattern, shards.narrow(left, 1) if _is_outer(pattern) else left, right)

    return einx_of_rows(add=add)


def _is_outer(pattern: str) -> bool:
    return pattern.startswith(("b i d, b j d ->", "b i dp, b j dp ->"))


def relative_positions(self: Module, *, additional_molecule_feats: Tensor, shards: Shards) -> Tensor:
    """``RelativePositionEncoding.forward`` (AF3 algorithm 3): ids [b, N, 5] -> rows [b, n, N, dp].

    The one-hot bins [b, n, N, 139] are made again in the backward.
    """
    return checkpoint(_encode, self, additional_molecule_feats, shards, use_reentrant=False, preserve_rng_state=False)


def _encode(self: Module, ids: Tensor, shards: Shards) -> Tensor:
    difference = shards.narrow(ids, 1).unsqueeze(2) - ids.unsqueeze(1)
    residue, token, chain, entity, copy = difference.unbind(-1)
    same_chain, far, far_copy = chain == 0, 2 * self.r_max + 1, 2 * self.s_max + 1
    bins = (
        (torch.where(same_chain, (residue + self.r_max).clamp(0, far - 1), far), far + 1),
        (torch.where(same_chain & (residue == 0), (token + self.r_max).clamp(0, far - 1), far), far + 1),
        (torch.where(same_chain, far_copy, (copy + self.s_max).clamp(0, far_copy - 1)), far_copy + 1),
    )
    of_residue, of_token, of_copy = (
        place.unsqueeze(-1) == torch.arange(count, device=ids.device) for place, count in bins
    )
    hot = torch.cat((of_residue, of_token, (entity == 0).unsqueeze(-1), of_copy), dim=-1)
    return self.out_embedder(hot.to(self.out_embedder.weight.dtype))


def rows_of_input(self: Module, pairs: Tensor, *, shards: Shards) -> Tensor:
    """A projection of whole inputs (token bonds, constraints): [b, N, N, ...] -> rows [b, n, N, dp]."""
    return type(self).forward(self, shards.narrow(pairs, 1))


def template_embedder(self: Module, *, templates: Tensor, pairwise_repr: Tensor, shards: Shards, **kwargs) -> Tensor:
    """``TemplateEmbedder.forward`` on rows of pairs; templates [b, T, N, N, dt], or n of their rows."""
    if templates.shape[2] != pairwise_repr.shape[1]:
        templates = shards.narrow(templates, 2)
    forward = with_names(type(self).forward, pack_one=_templates_as_batch, einx=einx_of_rows())
    return forward(self, templates=templates, pairwise_repr=pairwise_repr, **kwargs)


def _templates_as_batch(templates: Tensor, _: str) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """[b, T, n, N, d] -> [b * T, n, N, d] and the way back; the stock one fails where a rank holds no row."""
    return templates.flatten(0, 1), lambda packed: packed.unflatten(0, templates.shape[:2])


def stock_on_rows(cls: type[Module], shards: Shards):
    """The stock forward of ``cls`` (outer sum, input embedder) for this rank's rows of pairs."""
    return with_names(cls.forward, einx=rows_of_pairs(shards))
