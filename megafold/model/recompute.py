"""What the backward computes again instead of keeping it, besides what the stock model's checkpoint flags say.

One tensor is kept for each block of a stack; the rest of a block, and cheap parts with large outputs (atom pairs,
single conditioning, position encodings), are computed again.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from torch.nn import Module

RECOMPUTES = "_megafold_recomputes"
# From this many tokens on the Pairformer keeps one tensor for a group of blocks: a group is computed twice, then each
# of its blocks again. 48 pair tensors of 2 GiB (N = 2048) fit no device beside a block at work; 6 + 8 do.
GROUPED_FROM = 1536
GROUP = 8


def recomputed(function: Callable[..., Any], module: Module, *args: Any) -> Any:
    """``function(*args)``, its intermediate results dropped if ``module`` was told so (see :func:`recomputes`)."""
    if not (torch.is_grad_enabled() and module.training and getattr(module, RECOMPUTES, False)):
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False)


def transformer_blocks(
    self: Module,
    noised_repr: Tensor,
    *,
    single_repr: Any,
    pairwise_repr: Any,
    mask: Tensor | None = None,
    windowed_mask: Tensor | None = None,
) -> Tensor:
    """``DiffusionTransformer.to_checkpointed_serial_layers`` (AF3 algorithm 23), keeping one tensor [B, N, d] a block.

    The stock module keeps one before the attention and one before the transition.
    """
    first_values = None

    def block(x: Tensor, single: Any, pairs: Any, residual: Tensor | None, layer: Any) -> tuple[Tensor, Tensor]:
        linear_attention, routed_attention, attention, transition = layer
        for module in (linear_attention, routed_attention):
            if module is not None:
                x = module(x, mask=mask) + x
        out, values = attention(
            x,
            cond=single,
            pairwise_repr=pairs,
            mask=mask,
            windowed_mask=windowed_mask,
            return_values=True,
            value_residual=residual,
        )
        x = x + out
        x = transition(x, cond=single) + x
        return (x, values) if self.add_value_residual else (x, None)

    for layer in self.layers:
        noised_repr, values = checkpoint(
            block, noised_repr, single_repr, pairwise_repr, first_values, layer, use_reentrant=False
        )
        first_values = values if first_values is None else first_values
    return noised_repr


def pairformer_blocks(
    self: Module, *, single_repr: Tensor, pairwise_repr: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``PairformerStack.to_checkpointed_layers`` (AF3 algorithm 17) for long structures: blocks checkpointed in groups.

    Shorter ones, value residuals and recurrent depth take the stock way.
    """
    stock_way = type(self).to_checkpointed_layers
    if pairwise_repr.shape[1] < GROUPED_FROM or self.add_value_residual or self.recurrent_depth > 1:
        return stock_way(self, single_repr=single_repr, pairwise_repr=pairwise_repr, mask=mask)

    def block(single: Tensor, pairs: Tensor, layer: Any) -> tuple[Tensor, Tensor]:
        pair_block, attention, transition = layer
        pairs = pair_block(pairs, mask=mask)
        single = single + attention(single, pairwise_repr=pairs, mask=mask)
        return transition(single) + single, pairs

    def group(single: Tensor, pairs: Tensor, layers: list[Any]) -> tuple[Tensor, Tensor]:
        for layer in layers:
            single, pairs = checkpoint(block, single, pairs, layer, use_reentrant=False)
        return single, pairs

    layers = list(self.layers)
    for start in range(0, len(layers), GROUP):
        single_repr, pairwise_repr = checkpoint(
            group, single_repr, pairwise_repr, layers[start : start + GROUP], use_reentrant=False
        )
    return single_repr, pairwise_repr


def relative_positions(self: Module, *, additional_molecule_feats: Tensor) -> Tensor:
    """``RelativePositionEncoding.forward`` (AF3 algorithm 3): ids [b, N, 5] -> [b, N, N, d].

    The bins are indices already: each is one comparison, where the stock module takes the nearest of all bins.
    """
    ids = additional_molecule_feats
    if not torch.is_grad_enabled():
        return _encode_positions(self, ids)
    return checkpoint(_encode_positions, self, ids, use_reentrant=False, preserve_rng_state=False)


def _encode_positions(self: Module, ids: Tensor) -> Tensor:
    residue, token, chain, entity, copy = (column.unsqueeze(-1) - column.unsqueeze(-2) for column in ids.unbind(dim=-1))
    same_chain = chain == 0
    far, far_copy = 2 * self.r_max + 1, 2 * self.s_max + 1
    of_residue = torch.where(same_chain, (residue + self.r_max).clamp(0, far - 1), far)
    of_token = torch.where(same_chain & (residue == 0), (token + self.r_max).clamp(0, far - 1), far)
    of_copy = torch.where(~same_chain, (copy + self.s_max).clamp(0, far_copy - 1), far_copy)
    places = torch.arange(far + 1, device=ids.device)
    hot = (
        of_residue.unsqueeze(-1) == places,
        of_token.unsqueeze(-1) == places,
        (entity == 0).unsqueeze(-1),
        of_copy.unsqueeze(-1) == places[: far_copy + 1],
    )
    weight = self.out_embedder.weight
    return self.out_embedder(torch.cat(hot, dim=-1).to(weight.dtype))
