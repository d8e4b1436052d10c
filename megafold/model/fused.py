"""The stock modules over EvoFusion's operators: projections, gates, dropout and residuals in few passes.

Each function is the ``forward`` of one stock module (``self``). A sub-layer that its operator cannot express (see
:func:`cannot_fuse`) is computed by the stock module in its place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from alphafold3_pytorch import alphafold3 as stock
from torch import Tensor
from torch.nn import Module

from megafold.evofusion.attention_output.api import attention_output, gated
from megafold.evofusion.conditioned.api import Conditioning, adaptive_norm_and_pass, condition_gate, prepare
from megafold.evofusion.msa.api import outer_product_mean, pair_weighted_averaging
from megafold.evofusion.norm_project.api import norm_project, norm_project_and_pass
from megafold.evofusion.smooth_lddt.api import smooth_lddt_loss as fused_smooth_lddt
from megafold.evofusion.transition.api import transition
from megafold.evofusion.triangle_multiplication.api import triangle_multiplication
from megafold.evofusion.windowed_attention.api import windowed_attention
from megafold.model import recompute
from megafold.model.denoiser import conditioned
from megafold.model.repeated import Repeated

if TYPE_CHECKING:
    from megafold.model.attend import Attend


def pair_block(
    self: Module,
    pairwise_repr: Tensor,
    *,
    mask: Tensor | None = None,
    value_residuals: tuple[Tensor, Tensor] | None = None,
    return_values: bool = False,
    attend: Attend,
) -> Tensor | tuple[Tensor, tuple[None, None]]:
    """``PairwiseBlock.forward`` (AF3 algorithm 17, lines 2 to 6): pairs [b, N, N, C], mask [b, N] -> pairs.

    The values that the stock block returns beside are None: it stands where no later layer takes them.
    """
    pairs = pairwise_repr
    of_pairs = None if mask is None else mask.unsqueeze(-1) & mask.unsqueeze(-2)
    for layer, mix in ((self.tri_mult_outgoing, "outgoing"), (self.tri_mult_incoming, "incoming")):
        pairs = _triangle_update(layer, pairs, of_pairs, mix)
    for layer in (self.tri_attn_starting, self.tri_attn_ending):
        pairs = _triangle_attention(layer, pairs, mask, attend)
    pairs = _transition(self.pairwise_transition, pairs)
    return (pairs, (None, None)) if return_values else pairs


def normed_transition(self: Module, x: Tensor, *, residual: bool = False) -> Tensor:
    """``PreLayerNorm.forward`` around a ``Transition`` (AF3 algorithm 11): [..., d] -> [..., d], x added if asked."""
    return transition(x, self.norm.weight, self.norm.bias, *_transition_weights(self.fn), residual=residual)


def plain_transition(self: Module, x: Tensor) -> Tensor:
    """``Transition.forward`` where something else normalises: [..., d] -> [..., d]."""
    return transition(x, None, None, *_transition_weights(self), residual=False)


def prepared(self: Module, cond: Tensor | Repeated) -> Conditioning | Tensor | Repeated:
    """The conditioning [B, N, dc] of a ``DiffusionTransformer``, normalised once for all its layers."""
    return cond if isinstance(cond, Repeated) else prepare(cond)


def condition_wrapper(
    self: Module, x: Tensor, *, cond: Conditioning | Tensor | Repeated, residual: Tensor | None = None, **kwargs: Any
) -> Any:
    """``ConditionWrapper.forward`` (AF3 algorithm 25): x [B, N, d], cond [B, N, dc], shared or prepared or neither.

    With a ``residual`` [B, N, d] the output is added to it.
    """
    if isinstance(cond, Repeated):
        out = conditioned(self, x, cond=cond, **kwargs)
        if residual is None:
            return out
        return (out[0] + residual, *out[1:]) if isinstance(out, tuple) else out + residual
    norm, gate = self.adaptive_norm, self.to_adaln_zero_gamma[0]
    normed, again, cond = adaptive_norm_and_pass(
        x, cond, norm.norm_cond.weight, norm.to_gamma[0].weight, norm.to_gamma[0].bias, norm.to_beta.weight
    )
    residual = again if residual is x else residual
    out = self.fn(normed, **kwargs)
    finish = partial(condition_gate, cond=cond, weight=gate.weight, bias=gate.bias, residual=residual)
    return (finish(out[0]), *out[1:]) if isinstance(out, tuple) else finish(out)


def outer_product(self: Module, msa: Tensor, *, mask: Tensor | None = None, msa_mask: Tensor | None = None) -> Tensor:
    """``OuterProductMean.forward`` (AF3 algorithm 9): msa [b, S, N, d] -> pairs [b, N, N, C]."""
    out = self.to_pairwise_repr
    return outer_product_mean(
        msa,
        self.norm.weight,
        self.norm.bias,
        self.to_hidden.weight,
        out.weight,
        out.bias,
        mask=mask,
        msa_mask=msa_mask,
        eps=self.eps,
    )


def pair_weighted(self: Module, *, msa: Tensor, pairwise_repr: Tensor, mask: Tensor | None = None) -> Tensor:
    """``MSAPairWeightedAveraging.forward`` (AF3 algorithm 10): msa [b, S, N, d], pairs [b, N, N, C] -> [b, S, N, d]."""
    msa_norm, to_values, _ = self.msa_to_values_and_gates
    pair_norm, to_bias, _ = self.pairwise_repr_to_attn
    _, to_out, dropout = self.to_out
    return pair_weighted_averaging(
        msa,
        pairwise_repr,
        msa_norm.weight,
        msa_norm.bias,
        to_values.weight,
        pair_norm.weight,
        pair_norm.bias,
        to_bias.weight,
        to_out.weight,
        mask=mask,
        dropped=_drawn(dropout, msa),
        residual=False,
    )


def pair_bias(self: Module, pairs: Tensor) -> Tensor:
    """The bias of an ``AttentionPairBias``: pairs [b, ..., c], token pairs or windows of atoms -> [b, H, ...]."""
    norm, to_bias = self.to_attn_bias_norm, self.to_attn_bias[0]
    return norm_project(pairs, norm.weight, norm.bias, head_weight=to_bias.weight)[1]


def smooth_lddt(
    self: Module,
    pred_coords: Tensor,
    true_coords: Tensor,
    is_dna: Tensor,
    is_rna: Tensor,
    coords_mask: Tensor | None = None,
    loss_reduction: str = "mean",
) -> Tensor:
    """``SmoothLDDTLoss.forward`` (AF3 algorithm 27), for the stock thresholds."""
    return fused_smooth_lddt(
        pred_coords,
        true_coords,
        is_dna,
        is_rna,
        coords_mask,
        reduction=loss_reduction,
        nucleic_acid_cutoff=self.nucleic_acid_cutoff,
        other_cutoff=self.other_cutoff,
    )


def fuse(model: stock.Alphafold3, way: Callable[[Module], Attend], missed: list[tuple[str, str]]) -> Iterator[Any]:
    """(path, attribute, function, kind) of what EvoFusion computes; ``way``: how a pair block attends."""
    takes_values = {
        block
        for stack in model.modules()
        if isinstance(stack, stock.PairformerStack) and stack.add_value_residual
        for block, *_ in stack.layers
    }
    for path, module in model.named_modules():
        if _is(module, stock.PairwiseBlock):
            if module in takes_values:
                missed.append((path, "evofusion: value residuals need the stock pair block"))
                continue
            for name in ("tri_attn_starting", "tri_attn_ending"):
                problem = cannot_fuse(getattr(module, name).fn)
                missed.extend([(f"{path}.{name}", f"evofusion: {problem}")] if problem else [])
            attends = way(module.tri_attn_starting.fn.attn)
            yield path, "forward", partial(_pair_block, attends), "pair block (evofusion)"
        is_transition = _is(module, stock.PreLayerNorm) and _is(module.fn, stock.Transition)
        for cls, (function, kind) in _FUSED.items():
            if _is(module, cls) and (cls is not stock.PreLayerNorm or is_transition):
                yield path, "forward", function, f"{kind} (evofusion)"
        if is_transition or _is(module, stock.ConditionWrapper):
            yield path, recompute.ADDS, True, "residual (evofusion)"
        if _is(module, stock.DiffusionTransformer) and all(
            _is(part, stock.ConditionWrapper) for part in module.modules() if isinstance(part, stock.ConditionWrapper)
        ):
            yield path, recompute.PREPARES, prepared, "conditioning of all layers (evofusion)"
            yield path, "to_serial_layers", recompute.serial_blocks, "blocks of a rollout (evofusion)"


def attention_options(module: Module) -> dict[str, Callable[..., Tensor]]:
    """What EvoFusion does in an ``AttentionPairBias``, as options for `megafold.model.attention`."""
    options: dict[str, Callable[..., Tensor]] = {"make_bias": pair_bias, "gate": gated}
    if module.window_size is not None and not module.attn.attend.enable_attn_softclamp:
        options["attend_windows"] = windowed_attention
    return options


def _pair_block(attend: Attend, self: Module, *args: Any, **kwargs: Any) -> Any:
    return pair_block(self, *args, attend=attend, **kwargs)


def cannot_fuse(module: Module) -> str | None:
    """Why a sub-layer stays stock under ``evofusion``; None where an operator computes it.

    A triangle update always can: the stock model runs for a hidden width equal to the pairs' alone.
    """
    if isinstance(module, stock.TriangleAttention):
        attn = module.attn
        if attn.accept_value_residual or attn.memory_kv is not None:
            return "value residuals and memory keys need the stock projections"
        if attn.to_gates is None or attn.attend.attn_dropout.p or attn.attend.enable_attn_softclamp:
            return "attention without a gate, with dropout or a soft clamp"
    return None


def _triangle_update(layer: Module, pairs: Tensor, mask: Tensor | None, mix: str) -> Tensor:
    norm, fn = layer.norm, layer.fn
    to_out, dropout = fn.to_out
    return triangle_multiplication(
        pairs,
        norm.weight,
        norm.bias,
        fn.left_right_proj[0].weight,
        fn.out_gate.weight,
        fn.to_out_norm.weight,
        fn.to_out_norm.bias,
        to_out.weight,
        mix=mix,
        mask=mask,
        dropped=_drawn(dropout, pairs),
    )


def _triangle_attention(layer: Module, pairs: Tensor, mask: Tensor | None, attend: Attend) -> Tensor:
    norm, fn = layer.norm, layer.fn
    if cannot_fuse(fn):
        return layer(pairs, mask=mask) + pairs
    attn, to_bias = fn.attn, fn.to_attn_bias[0].weight
    weights = [attn.to_q.weight, *attn.to_kv.weight.chunk(2), attn.to_gates[0].weight]
    (q, k, v, gate), bias, pairs = norm_project_and_pass(
        pairs, norm.weight, norm.bias, weights, [attn.to_q.bias, None, None, None], to_bias
    )
    # [b, i, j, H D] -> rows, heads, queries: rows are i, or j for the ending node, by strides alone.
    q, k, v = (t.unflatten(-1, (to_bias.shape[0], -1)) for t in (q, k, v))
    order = (0, 2, 3, 1, 4) if fn.need_transpose else (0, 1, 3, 2, 4)
    bias = bias.transpose(-1, -2) if fn.need_transpose else bias
    out = attend(*(t.permute(order) for t in (q, k, v)), bias, None if mask is None else mask.unsqueeze(1))
    back = (0, 3, 1, 2, 4) if fn.need_transpose else (0, 1, 3, 2, 4)
    out = out.permute(back).flatten(-2)
    return attention_output(out, gate, attn.to_out.weight, dropped=_drawn(fn.dropout, pairs), residual=pairs)


def _transition(layer: Module, x: Tensor) -> Tensor:
    return transition(x, layer.norm.weight, layer.norm.bias, *_transition_weights(layer.fn))


def _transition_weights(module: Module) -> tuple[Tensor, Tensor]:
    return module.ff[0].weight, module.ff[2].weight


def _drawn(dropout: Module, x: Tensor) -> Tensor | None:
    """The factor of a row- or column-shared dropout for x [b, i, j, d], drawn as the stock module draws it."""
    if not (dropout.training and dropout.dropout.p > 0 and dropout.dropout_type in ("row", "col")):
        return None
    batch, rows, columns, width = x.shape
    shape = (batch, 1, columns, width) if dropout.dropout_type == "row" else (batch, rows, 1, width)
    return dropout.dropout(torch.ones(shape, dtype=_product_dtype(x), device=x.device))


def _product_dtype(x: Tensor) -> torch.dtype:
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def _is(module: Module, cls: type[Module]) -> bool:
    return isinstance(module, cls) and type(module).forward is cls.forward


_FUSED: dict[type[Module], tuple[Callable[..., Any], str]] = {
    stock.PreLayerNorm: (normed_transition, "transition"),
    stock.Transition: (plain_transition, "transition of a conditioned layer"),
    stock.ConditionWrapper: (condition_wrapper, "conditioning wrapper"),
    stock.OuterProductMean: (outer_product, "outer product mean"),
    stock.MSAPairWeightedAveraging: (pair_weighted, "pair-weighted averaging"),
    stock.SmoothLDDTLoss: (smooth_lddt, "smooth lDDT"),
}
