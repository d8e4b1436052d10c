"""What the backward computes again instead of keeping it, besides what the stock model's checkpoint flags say.

One tensor is kept for each block of a stack; the rest of a block, and cheap parts with large outputs (atom pairs,
single conditioning, position encodings), are computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from megafold.model.fork import Fork
from megafold.model.graphs import GRAPHS
from megafold.model.repeated import Repeated, materialize

if TYPE_CHECKING:
    from torch.nn import Module

RECOMPUTES = "_megafold_recomputes"
ADDS = "_megafold_adds"  # a layer that adds its output to a residual itself
PREPARES = "_megafold_prepares"  # what a stack makes of its conditioning once, for all layers
MOST_ROWS = "_megafold_most_rows"  # of pairs on any rank: what is computed again, and sent again, is one answer for all
# From this many tokens on the Pairformer keeps one tensor for a group of blocks: a group is computed twice, then each
# of its blocks again. 48 pair tensors of 2 GiB (N = 2048) fit no device beside a block at work; 6 + 8 do.
GROUPED_FROM = 1536
GROUP = 8
# From this many tokens on the first third of the blocks also where a rank holds few rows of the pairs: the tensors of
# 48 blocks are more than half of what it needs (N = 2048 on 16 ranks: 6 of 11 GiB) and would keep memory from falling
# with the number of ranks. All blocks in groups are 17 % more operations in a step of that length, a third of them 6 %.
THIRD_GROUPED_FROM = 2048
# The Pairformer's single track beside the next pair block. Off: no GPU has captured it yet.
SHIFTS = False


def recomputed(function: Callable[..., Any], module: Module, *args: Any) -> Any:
    """``function(*args)``, its intermediate results dropped if ``module`` was told so (see :func:`recomputes`)."""
    if not (torch.is_grad_enabled() and module.training and getattr(module, RECOMPUTES, False)):
        return function(*args)
    return checkpoint(function, *args, use_reentrant=False)


def in_blocks(self: Module, block: Callable[..., Any], layer: Any, *args: Any) -> Any:
    """``block(layer, *args)``: its arguments are kept, its intermediate results computed again in the backward.

    As a graph where ``self`` has some (see :mod:`megafold.model.graphs`) for such arguments.
    """
    graphs = getattr(self, GRAPHS, None)
    if graphs is not None and graphs.runs(*args):
        return graphs.run(block, layer, *args)
    return checkpoint(block, layer, *args, use_reentrant=False)


def in_stack(
    self: Module,
    block: Callable[..., tuple[Tensor, ...]],
    layers: Sequence[Any],
    carried: tuple[Tensor, ...],
    *args: Any,
) -> tuple[Tensor, ...]:
    """``carried = block(layer, *carried, *args)``, one layer after another, each as by :func:`in_blocks`."""
    graphs = getattr(self, GRAPHS, None)
    if graphs is not None and layers and graphs.runs(*carried, *args):
        return graphs.run_stack(block, layers, carried, *args)
    for layer in layers:
        carried = checkpoint(block, layer, *carried, *args, use_reentrant=False)
    return carried


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
    prepares = getattr(self, PREPARES, None)
    single_repr = single_repr if prepares is None else prepares(single_repr)
    layers, context = list(self.layers), (single_repr, pairwise_repr, mask, windowed_mask)
    first_values = None
    if self.add_value_residual and layers:
        noised_repr, first_values = in_blocks(self, _first_block, layers.pop(0), noised_repr, *context, None)
    (noised_repr,) = in_stack(self, _transformer_block, layers, (noised_repr,), *context, first_values)
    return noised_repr


def serial_blocks(
    self: Module,
    noised_repr: Tensor,
    *,
    single_repr: Any,
    pairwise_repr: Any,
    mask: Tensor | None = None,
    windowed_mask: Tensor | None = None,
) -> Tensor:
    """``DiffusionTransformer.to_serial_layers`` of a rollout (AF3 algorithm 23): [B, N, d] -> [B, N, d].

    As graphs where the stack has some; a memory of biases is left out then: graphs read fixed addresses, and a bias is
    made faster than it is copied there. A conditioning that stands for equal copies is prepared as what it stands for:
    kernels that read a row of it for each row do in two passes what takes eight without them.
    """
    if torch.is_grad_enabled() or self.add_value_residual:
        given = {"single_repr": single_repr, "pairwise_repr": pairwise_repr}
        return type(self).to_serial_layers(self, noised_repr, **given, mask=mask, windowed_mask=windowed_mask)
    prepares = getattr(self, PREPARES, None)
    single_repr = single_repr if prepares is None else prepares(materialize(single_repr))
    graphs = getattr(self, GRAPHS, None)
    forgets = [Repeated(t.once, t.copies) if isinstance(t, Repeated) else t for t in (single_repr, pairwise_repr)]
    forgets += [mask, windowed_mask, None]
    if graphs is not None and graphs.runs(noised_repr, *forgets):
        return graphs.run_stack(_transformer_block, list(self.layers), (noised_repr,), *forgets)[0]
    for layer in self.layers:
        (noised_repr,) = _transformer_block(layer, noised_repr, single_repr, pairwise_repr, mask, windowed_mask, None)
    return noised_repr


def _transformer_block(layer: Any, *args: Any) -> tuple[Tensor]:
    return _first_block(layer, *args)[:1]


def _first_block(
    layer: Any,
    x: Tensor,
    single: Any,
    pairs: Any,
    mask: Tensor | None,
    windowed_mask: Tensor | None,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor]:
    linear_attention, routed_attention, attention, transition = layer
    for module in (linear_attention, routed_attention):
        if module is not None:
            x = module(x, mask=mask) + x
    options = {"pairwise_repr": pairs, "mask": mask, "windowed_mask": windowed_mask, "return_values": True}
    x, values = _added(attention, x, single, **options, value_residual=residual)
    return _added(transition, x, single), values


def _added(layer: Module, x: Tensor, single: Any, **options: Any) -> Any:
    """A conditioned layer's output plus its input, and what the layer returns besides."""
    if getattr(layer, ADDS, False):
        return layer(x, cond=single, residual=x, **options)
    out = layer(x, cond=single, **options)
    return (x + out[0], *out[1:]) if isinstance(out, tuple) else out + x


def with_residual(transition: Module, x: Tensor) -> Tensor:
    """``transition(x) + x`` for a transition behind its LayerNorm."""
    return transition(x, residual=True) if getattr(transition, ADDS, False) else transition(x) + x


def pairformer_blocks(
    self: Module, *, single_repr: Tensor, pairwise_repr: Tensor, mask: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """``PairformerStack.to_checkpointed_layers`` (AF3 algorithm 17): long structures in groups of blocks, or as graphs.

    Everything else, value residuals and recurrent depth take the stock way.
    """
    graphs = getattr(self, GRAPHS, None)
    rows, columns = pairwise_repr.shape[1:3]
    layers = list(self.layers)
    grouped = _in_groups(getattr(self, MOST_ROWS, rows), columns, len(layers)) if hasattr(self, RECOMPUTES) else 0
    replays = graphs is not None and graphs.runs(single_repr, pairwise_repr)
    if not (grouped or replays) or self.add_value_residual or self.recurrent_depth > 1:
        stock_way = type(self).to_checkpointed_layers
        return stock_way(self, single_repr=single_repr, pairwise_repr=pairwise_repr, mask=mask)

    def group(single: Tensor, pairs: Tensor, layers: list[Any]) -> tuple[Tensor, Tensor]:
        return in_stack(self, _pairformer_block, layers, (single, pairs), mask)

    if not grouped and SHIFTS and len(layers) > 1:
        return in_stack(self, _shifted_block, _shifted(layers), (single_repr, pairwise_repr), mask)
    for start in range(0, grouped, GROUP):
        members = layers[start : min(start + GROUP, grouped)]
        single_repr, pairwise_repr = checkpoint(group, single_repr, pairwise_repr, members, use_reentrant=False)
    return group(single_repr, pairwise_repr, layers[grouped:])


def _in_groups(rows: int, columns: int, blocks: int) -> int:
    """How many of the first blocks on pairs [rows, columns] come in groups; of one of eight ranks at N = 1536 none."""
    if columns >= GROUPED_FROM and rows * columns * 8 > GROUPED_FROM**2:
        return blocks
    return blocks // 3 if columns >= THIRD_GROUPED_FROM else 0


def _pairformer_block(layer: Any, single: Tensor, pairs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    pair_block, attention, transition = layer
    pairs = pair_block(pairs, mask=mask)
    single = single + attention(single, pairwise_repr=pairs, mask=mask)
    return with_residual(transition, single), pairs


def _shifted(layers: Sequence[Any]) -> list[list[Any]]:
    """Each pair block with the single track of the layer before: pairs do not see singles, so neither waits."""
    pairs, singles = [layer[0] for layer in layers], [list(layer[1:]) for layer in layers]
    return [[pair, *single] for pair, single in zip([*pairs, None], [[None, None], *singles])]


def _shifted_block(layer: Any, single: Tensor, pairs: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    pair_block, attention, transition = layer
    fork = Fork(pairs.device)
    if attention is not None:
        with fork.aside():
            single = single + attention(single, pairwise_repr=pairs, mask=mask)
            single = with_residual(transition, single)
    if pair_block is not None:
        pairs = pair_block(pairs, mask=mask)
    fork.join()
    return single, pairs


def msa_blocks(
    self: Module, *, pairwise_repr: Tensor, msa: Tensor, mask: Tensor | None = None, msa_mask: Tensor | None = None
) -> Tensor:
    """``MSAModule.to_checkpointed_layers`` (AF3 algorithm 8) with a block as the unit: pairs [b, N, N, C]."""
    return in_stack(self, _msa_block, list(self.layers), (pairwise_repr, msa), mask, msa_mask)[0]


def _msa_block(
    layer: Any, pairs: Tensor, msa: Tensor, mask: Tensor | None, msa_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    outer_product, averaging, transition, pair_block = layer
    pairs = outer_product(msa, mask=mask, msa_mask=msa_mask) + pairs
    msa = averaging(msa=msa, pairwise_repr=pairs, mask=mask) + msa
    msa = with_residual(transition, msa)
    return pair_block(pairwise_repr=pairs, mask=mask), msa


def template_blocks(self: Module, templates: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """``TemplateEmbedder.to_checkpointed_layers`` (AF3 algorithm 16): pairs of templates [b T, N, N, d]."""
    return in_stack(self, _template_block, [[block] for block in self.pairformer_stack], (templates,), mask)[0]


def _template_block(layer: Any, templates: Tensor, mask: Tensor | None) -> tuple[Tensor]:
    return (layer[0](pairwise_repr=templates, mask=mask),)


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
