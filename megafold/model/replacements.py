"""What of a stock model (alphafold3-pytorch 0.8.3) a plan replaces, and by what.

====================  ======================================================  ==========================================
switch                stock                                                   replaced by
====================  ======================================================  ==========================================
sdpa, evoflash3d      TriangleAttention.forward                               attention.triangle_attention
sdpa, evoflash3d      AttentionPairBias.forward (single, token transformer)   attention.pair_bias_attention
sdpa                  AttentionPairBias.forward (atoms, in windows)           attention.windowed_attention
shared_conditioning   Alphafold3.forward, where it stays stock                the same code with a lazy ``repeat``
shared_conditioning   DiffusionModule.forward                                 denoiser.denoise
shared_conditioning   AttentionPairBias.forward (token transformer)           attention.pair_bias_attention
shared_conditioning   ConditionWrapper.forward, AdaptiveLayerNorm.forward     denoiser.conditioned, adaptive_layer_norm
                      (diffusion module)
shared_conditioning   ElucidatedAtomDiffusion.preconditioned_network_forward  denoiser.precondition
shared_conditioning   ConfidenceHead.forward                                  denoiser.confidence_of_copies
asynchronous,         Alphafold3.forward, of training steps                   forward.training_forward
chunked_heads         ElucidatedAtomDiffusion.forward                         diffusion.diffusion_loss
                      MultiChainPermutationAlignment.forward                  alignment.permute_chains
asynchronous,         ElucidatedAtomDiffusion.sample                          rollout.sample
shared_rollout
asynchronous          WeightedRigidAlign.forward                              alignment.rigid_align
asynchronous          AtomToTokenPooler.forward                               tokens.pool_atoms
asynchronous          TemplateEmbedder.forward                                trunk.embed_templates
chunked_heads         SmoothLDDTLoss.forward                                  lddt.smooth_lddt_loss
evofusion             PairwiseBlock.forward                                   fused.pair_block
evofusion             PreLayerNorm.forward (transitions), Transition.forward  fused.normed_transition, plain_transition
evofusion             ConditionWrapper.forward                                fused.condition_wrapper, on what
                      (DiffusionTransformer, checkpointed)                    fused.prepared made once for all layers
evofusion             OuterProductMean.forward                                fused.outer_product
evofusion             MSAPairWeightedAveraging.forward                        fused.pair_weighted
evofusion             SmoothLDDTLoss.forward                                  fused.smooth_lddt
evofusion             AttentionPairBias.forward                               attention.*, bias and windows by EvoFusion
recompute, graphs     DiffusionTransformer.to_checkpointed_serial_layers      recompute.transformer_blocks
recompute, graphs     PairformerStack.to_checkpointed_layers                  recompute.pairformer_blocks
graphs, evofusion     DiffusionTransformer.to_serial_layers (tokens; all)     recompute.serial_blocks
graphs                MSAModule.to_checkpointed_layers                        recompute.msa_blocks
graphs                TemplateEmbedder.to_checkpointed_layers                 recompute.template_blocks
graphs                Attend.forward (blocks whose attention stays stock)     attention.attend_in_graphs
recompute             RelativePositionEncoding.forward                        recompute.relative_positions
====================  ======================================================  ==========================================

How an attention is computed is one function of :mod:`megafold.model.attend`: EvoFlash-3D, SDPA or the eager definition.
MSAPairWeightedAveraging has weights from pairs alone, no queries and keys: it is no attention for sdpa and evoflash3d.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from alphafold3_pytorch import alphafold3 as stock
from alphafold3_pytorch.attention import Attend, Attention
from alphafold3_pytorch.tensor_typing import should_typecheck
from torch.nn import Module

from megafold.model import alignment, attend, attention, denoiser, diffusion, lddt, recompute, rollout, tokens, trunk
from megafold.model.forward import Step, training_forward
from megafold.model.graphs import GRAPHS, BlockGraphs
from megafold.model.plan import Plan
from megafold.model.rebind import with_names
from megafold.model.repeated import repeat_lazily

# (path of the module, name of its attribute, its new value: a function becomes a method; kind of the replacement)
Replacement = tuple[str, str, Any, str]
Missed = list[tuple[str, str]]
_OTHER_ATTENTION = (stock.TaylorSeriesLinearAttn, stock.ConditionalRoutedAttention)
# What the training forward works through, by the paths of all instances.
_BY_KIND: tuple[tuple[str, type[Module], str, Callable[..., Any], str], ...] = (
    ("asynchronous", stock.WeightedRigidAlign, "forward", alignment.rigid_align, "rigid alignment"),
    ("asynchronous", stock.AtomToTokenPooler, "forward", tokens.pool_atoms, "atom pooling"),
    ("asynchronous", stock.TemplateEmbedder, "forward", trunk.embed_templates, "template embedder"),
    ("chunked_heads", stock.SmoothLDDTLoss, "forward", lddt.smooth_lddt_loss, "smooth lDDT"),
    (
        "recompute",
        stock.DiffusionTransformer,
        "to_checkpointed_serial_layers",
        recompute.transformer_blocks,
        "transformer blocks",
    ),
    ("recompute", stock.RelativePositionEncoding, "forward", recompute.relative_positions, "position encoding"),
)


def replacements(
    model: stock.Alphafold3, plan: Plan, missed: Missed, notes: list[str], rollouts: int | None
) -> Iterator[Replacement]:
    """Every attribute to be set; what a switch does not reach is added to ``missed``, remarks to ``notes``.

    Raises:
        ValueError: ``rollouts`` is no count, or nothing can heed it.
    """
    no_sharing = _cannot_share(model) if plan.shared_conditioning else None
    if no_sharing:
        missed.append(("", f"shared_conditioning: {no_sharing}"))
    shares = plan.shared_conditioning and not no_sharing
    forwards = [switch for switch in ("asynchronous", "chunked_heads") if getattr(plan, switch)]
    no_forward = _cannot_own_forward(model) if forwards else None
    missed.extend(("", f"{switch}: {no_forward}") for switch in forwards if no_forward)
    owns = bool(forwards) and not no_forward
    if rollouts is not None and (rollouts < 1 or not owns):
        problem = "is no count" if rollouts < 1 else f"needs asynchronous or chunked_heads{_because(no_forward)}"
        raise ValueError(f"rollouts={rollouts} {problem}")

    if owns:
        yield from _training_forward(model, plan, shares, rollouts)
    elif shares:
        yield "", "forward", with_names(type(model).forward, repeat=repeat_lazily), "forward (shared_conditioning)"
    if shares:
        yield from _sharing(model, plan, missed)
    yield from _sampling(model, plan, shares, missed)
    yield from _single_kinds(model, plan, missed)
    if plan.recompute or plan.graphs:
        yield from _stacks(model, plan, missed)
    if plan.evofusion:
        from megafold.model.fused import fuse

        yield from fuse(model, partial(_way, plan), missed)
    if shares or plan.sdpa or plan.evoflash3d or plan.evofusion:
        yield from _attentions(model, plan, shares, missed)
    notes.extend(_notes(model, plan))


def _training_forward(model: stock.Alphafold3, plan: Plan, shares: bool, rollouts: int | None) -> Iterator[Replacement]:
    how = "+".join(switch for switch in ("asynchronous", "chunked_heads") if getattr(plan, switch))
    forward = type(model).forward
    stock_forward = with_names(forward, repeat=repeat_lazily) if shares else forward
    step = Step(stock_forward, shares=shares, chunks=plan.chunked_heads, rollouts=rollouts)
    yield "", "forward", partial(_training_forward_of, step=step), f"forward ({how})"
    yield "edm", "forward", diffusion.diffusion_loss, f"diffusion loss ({how})"
    for path, module in model.named_modules():
        if _is(module, stock.MultiChainPermutationAlignment):
            yield path, "forward", alignment.permute_chains, f"chain alignment ({how})"


def _training_forward_of(self: Module, *args: Any, step: Step, **kwargs: Any) -> Any:
    return training_forward(self, *args, step=step, **kwargs)


def _sharing(model: stock.Alphafold3, plan: Plan, missed: Missed) -> Iterator[Replacement]:
    kind = "{} (shared_conditioning)".format
    yield "edm", "preconditioned_network_forward", denoiser.precondition, kind("noise level")
    yield "confidence_head", "forward", denoiser.confidence_of_copies, kind("confidence head")
    yield "diffusion_module", "forward", denoiser.denoise, kind("diffusion module")
    for path, module in model.diffusion_module.named_modules(prefix="diffusion_module"):
        if _is(module, stock.ConditionWrapper) and not plan.evofusion:
            yield path, "forward", denoiser.conditioned, kind("conditioning wrapper")
        elif _is(module, stock.AdaptiveLayerNorm):
            yield path, "forward", denoiser.adaptive_layer_norm, kind("adaptive layer norm")
    if model.diffusion_module.token_transformer.has_registers:
        missed.append(("diffusion_module.token_transformer", "shared_conditioning: register tokens need the copies"))


def _sampling(model: stock.Alphafold3, plan: Plan, shares: bool, missed: Missed) -> Iterator[Replacement]:
    if plan.shared_rollout and not shares:
        missed.append(("edm", "shared_rollout: needs shared_conditioning"))
    asked = [s for s in ("asynchronous", "shared_rollout") if getattr(plan, s) and (shares or s == "asynchronous")]
    if not asked:
        return
    if not isinstance(model.edm, stock.ElucidatedAtomDiffusion):
        missed.append(("edm", f"asynchronous: {type(model.edm).__name__} samples in parts (diffusion_candidates)"))
        return
    remembers = plan.shared_rollout and shares
    yield "edm", "sample", partial(_sample, remembers), f"rollout ({'+'.join(asked)})"


def _sample(remembers: bool, self: Module, *args: Any, **kwargs: Any) -> Any:
    return rollout.sample(self, *args, shares_rollout=remembers, **kwargs)


def _single_kinds(model: stock.Alphafold3, plan: Plan, missed: Missed) -> Iterator[Replacement]:
    for switch, cls, name, function, kind in _BY_KIND:
        if not getattr(plan, switch) or (cls is stock.SmoothLDDTLoss and plan.evofusion):
            continue
        for path, module in model.named_modules():
            if isinstance(module, cls) and getattr(type(module), name) is not getattr(cls, name):
                missed.append((path, f"{switch}: {type(module).__name__} has a {name} of its own"))
            elif isinstance(module, cls):
                yield path, name, function, f"{kind} ({switch})"
    if plan.recompute and model.diffusion_module.token_transformer.checkpoint:
        yield "diffusion_module", recompute.RECOMPUTES, True, "diffusion conditioning (recompute)"
    for path, module in model.named_modules():
        if plan.recompute and isinstance(module, stock.PairformerStack):
            yield path, recompute.RECOMPUTES, True, "groups of pair blocks (recompute)"


def _way(plan: Plan, attn: Attention) -> attend.Attend:
    """How a fused pair block attends: the first way of the plan that can, else the definition."""
    for switch in _asked(plan):
        if _cannot_attend(switch, _head_dim(attn), None) is None:
            return _ways(plan)[switch]
    return attend.attend_eager


def _ways(plan: Plan) -> dict[str, attend.Attend]:
    kernel = attend.attend_by_device if plan.sdpa else attend.attend_evoflash3d
    return {"evoflash3d": kernel, "sdpa": attend.attend_sdpa}


def _head_dim(attn: Attention) -> int:
    return attn.to_q.out_features // attn.split_heads.axes_lengths["h"]


def _stacks(model: stock.Alphafold3, plan: Plan, missed: Missed) -> Iterator[Replacement]:
    """Stacks that work block by block, and the graphs of the largest of them."""
    graphs, how = None, "graphs" if plan.graphs else "recompute"
    if plan.graphs:
        graphs = BlockGraphs()
        graphs.patience = 1
    if graphs is not None and model.device.type != "cuda":
        missed.append(("", f"graphs: the model is on {model.device}; blocks run one operator at a time there"))
    stacks: dict[str, tuple[str, Callable[..., Any]]] = {
        "pairformer": ("to_checkpointed_layers", recompute.pairformer_blocks),
        "confidence_head.pairformer_stack": ("to_checkpointed_layers", recompute.pairformer_blocks),
        "diffusion_module.token_transformer": ("to_checkpointed_serial_layers", recompute.transformer_blocks),
    }
    if graphs is not None:
        stacks["msa_module"] = ("to_checkpointed_layers", recompute.msa_blocks)
        stacks["template_embedder"] = ("to_checkpointed_layers", recompute.template_blocks)
    for path, (name, function) in stacks.items():
        module = model.get_submodule(path)
        is_confidence = path == "confidence_head.pairformer_stack"
        if graphs is not None and (not is_confidence or module.checkpoint):
            if not module.checkpoint:
                missed.append((path, "graphs: without checkpointing its blocks stay as they are"))
                continue
            yield path, GRAPHS, graphs, "graphs"
            for inner, attend_module in module.named_modules(prefix=path):
                if _is(attend_module, Attend):
                    yield inner, "forward", attention.attend_in_graphs, "masks of stock attention (graphs)"
            if path == "diffusion_module.token_transformer":
                yield path, "to_serial_layers", recompute.serial_blocks, "blocks of a rollout (graphs)"
        if not (plan.recompute and path == "diffusion_module.token_transformer"):
            yield path, name, function, f"blocks ({how})"


def _cannot_own_forward(model: stock.Alphafold3) -> str | None:
    if inspect.unwrap(type(model).forward) is not inspect.unwrap(stock.Alphafold3.forward):
        return f"{type(model).__name__} has a forward of its own"
    if not isinstance(model.edm, stock.ElucidatedAtomDiffusion):
        return f"{type(model.edm).__name__} splits the batch of augmentations (diffusion_candidates)"
    if not _is(model.edm, stock.ElucidatedAtomDiffusion):
        return f"{type(model.edm).__name__} has a loss of its own"
    return None


def _cannot_share(model: stock.Alphafold3) -> str | None:
    edm, network = model.edm, model.diffusion_module
    if should_typecheck:
        return "run-time type checks are on (TYPECHECK)"
    if inspect.unwrap(type(model).forward) is not inspect.unwrap(stock.Alphafold3.forward):
        return f"{type(model).__name__} has a forward of its own"
    if not isinstance(edm, stock.ElucidatedAtomDiffusion):
        return f"{type(edm).__name__} splits the batch of augmentations (diffusion_candidates)"
    if not _is(network, stock.DiffusionModule) or edm.net is not network:
        return "the diffusion module is not the stock one"
    token_transformer = network.token_transformer
    if not all(_is(layer[2].fn, stock.AttentionPairBias) for layer in token_transformer.layers):
        return "the token transformer's attention is not the stock one"
    return None


def _attentions(model: stock.Alphafold3, plan: Plan, shares: bool, missed: Missed) -> Iterator[Replacement]:
    inside: set[Module] = set()
    for path, module in model.named_modules():
        if _is(module, stock.TriangleAttention):
            function, kind, needed = attention.triangle_attention, "triangle attention", False
        elif _is(module, stock.AttentionPairBias) and module.window_size is not None:
            function, kind, needed = attention.windowed_attention, "atom attention", plan.evofusion
        elif _is(module, stock.AttentionPairBias):
            is_token = path.startswith("diffusion_module.token_transformer.")
            kind = "token attention" if is_token else "single attention"
            function, needed = attention.pair_bias_attention, (shares and is_token) or plan.evofusion
        else:
            if isinstance(module, (Attention, *_OTHER_ATTENTION)) and module not in inside:
                missed.extend((path, f"{switch}: {type(module).__name__} stays stock") for switch in _asked(plan))
            continue
        inside.add(module.attn)
        way, how = _attend_for(path, module.attn, plan, kind != "atom attention", needed, missed)
        if way is None:
            continue
        options = {}
        if plan.evofusion and kind != "triangle attention":
            from megafold.model.fused import attention_options

            options = attention_options(module)
            how = "evofusion" if "attend_windows" in options else how
        yield path, "forward", partial(_method, function, way, options), f"{kind} ({how})"


def _attend_for(
    path: str, attn: Attention, plan: Plan, rows: bool, needed: bool, missed: Missed
) -> tuple[attend.Attend | None, str]:
    """How to compute one attention, and the name of that way; None: it stays stock. ``needed``: it may not."""
    clamp = attn.attend.attn_softclamp_value if attn.attend.enable_attn_softclamp else None
    for switch in _asked(plan):
        if switch == "evoflash3d" and not rows:
            continue
        problem = _cannot_attend(switch, _head_dim(attn), clamp)
        if problem is None:
            return _ways(plan)[switch], switch
        missed.append((path, f"{switch}: {problem}"))
    if not needed:
        return None, ""
    softmax_dtype = torch.float32 if attn.attend.softmax_full_precision else None
    return partial(attend.attend_eager, softclamp=clamp, softmax_dtype=softmax_dtype), "eager"


def _cannot_attend(switch: str, head_dim: int, clamp: float | None) -> str | None:
    if clamp is not None:
        return "the logits are soft-clamped"
    if switch == "evoflash3d":
        from megafold.evoflash3d.api import MAX_HEAD_DIM

        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            return f"head dimension {head_dim} is no multiple of 8 up to {MAX_HEAD_DIM}"
    return None


def _notes(model: stock.Alphafold3, plan: Plan) -> Iterator[str]:
    from megafold.triton_support import why_not

    problem = why_not(model.device) if plan.evoflash3d else None
    if problem:
        yield f"evoflash3d on {model.device}: {problem.partition(':')[0]}: " + (
            "SDPA computes the attention" if plan.sdpa else "its chunked reference does"
        )


def _asked(plan: Plan) -> list[str]:
    return [switch for switch in ("evoflash3d", "sdpa") if getattr(plan, switch)]


def _because(reason: str | None) -> str:
    return f": {reason}" if reason else ""


def _method(
    function: Callable[..., Any],
    way: attend.Attend,
    options: dict[str, Any],
    self: Module,
    *args: Any,
    **kwargs: Any,
) -> Any:
    return function(self, *args, attend=way, **options, **kwargs)


def _is(module: Module, cls: type[Module]) -> bool:
    """Whether ``module`` computes as ``cls`` does: a subclass with a forward of its own does not."""
    return isinstance(module, cls) and type(module).forward is cls.forward
