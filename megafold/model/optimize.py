"""``optimize(model, plan)``: a stock model computes through MegaFold; ``restore(model)``: it is stock again.

Only methods of single modules are replaced, on the instance; parameters, buffers, their names, hooks and other models
stay as they are. What replaces what:

====================  ======================================================  ==========================================
switch                stock (alphafold3-pytorch 0.8.3)                        replaced by
====================  ======================================================  ==========================================
sdpa, evoflash3d      TriangleAttention.forward                               attention.triangle_attention
sdpa, evoflash3d      AttentionPairBias.forward (single, token transformer)   attention.pair_bias_attention
sdpa                  AttentionPairBias.forward (atoms, in windows)           attention.windowed_attention
shared_conditioning   Alphafold3.forward                                      the same code with a lazy ``repeat``
shared_conditioning   DiffusionModule.forward                                 denoiser.denoise
shared_conditioning   AttentionPairBias.forward (token transformer)           attention.pair_bias_attention
shared_conditioning   ConditionWrapper.forward, AdaptiveLayerNorm.forward     denoiser.conditioned, adaptive_layer_norm
                      (diffusion module)
shared_conditioning   ElucidatedAtomDiffusion.preconditioned_network_forward  denoiser.precondition
shared_conditioning   ConfidenceHead.forward                                  denoiser.confidence_of_copies
====================  ======================================================  ==========================================

How an attention is computed is one function of :mod:`megafold.model.attend`: EvoFlash-3D, SDPA or the eager definition.
MSAPairWeightedAveraging has weights from pairs alone, no queries and keys: it is no attention for these switches.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from types import MethodType
from typing import Any

import torch
from alphafold3_pytorch import alphafold3 as stock
from alphafold3_pytorch.attention import Attention
from alphafold3_pytorch.tensor_typing import should_typecheck
from torch.nn import Module

from megafold.model import attend, attention, denoiser
from megafold.model.plan import Plan
from megafold.model.repeated import with_lazy_repeat

_STATE = "_megafold_replaced"


@dataclass
class OptimizeReport:
    """What :func:`optimize` did.

    Attributes:
        replaced: how many methods were replaced, by "kind (how)".
        not_replaced: (path of the module, "switch: reason") for what a switch is for but does not reach.
    """

    replaced: dict[str, int] = field(default_factory=Counter)
    not_replaced: list[tuple[str, str]] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "replaced": dict(self.replaced)}


def optimize(model: stock.Alphafold3, plan: Plan | None = None) -> OptimizeReport:
    """Make ``model`` compute as ``plan`` says (default: ``Plan()``), whatever plan it had before.

    Calling it twice with one plan is as calling it once; another plan takes the place of the first. With dropout off
    the loss and every gradient equal the stock model's up to rounding, and random numbers are drawn in the same order;
    with dropout on, the single attention draws other numbers of the same distribution.

    Raises:
        TypeError: when ``model`` is not an ``Alphafold3`` (of a wrapper pass what is inside).
    """
    if not isinstance(model, stock.Alphafold3):
        raise TypeError(f"optimize takes an alphafold3_pytorch.Alphafold3, not {type(model).__name__}")
    plan = plan or Plan()
    restore(model)
    report = OptimizeReport()
    for path, method, replacement, kind in _replacements(model, plan, report.not_replaced):
        module = model.get_submodule(path)
        model.__dict__.setdefault(_STATE, []).append((path, method, module.__dict__.get(method)))
        module.__dict__[method] = MethodType(replacement, module)
        report.replaced[kind] += 1
    return report


def restore(model: Module) -> None:
    """Undo :func:`optimize`: the model computes as before it, bit for bit. Does nothing to a model that is stock."""
    for path, method, before in reversed(model.__dict__.pop(_STATE, [])):
        attributes = model.get_submodule(path).__dict__
        if before is None:
            del attributes[method]
        else:
            attributes[method] = before


Replacement = tuple[str, str, Callable[..., Any], str]


def _replacements(model: stock.Alphafold3, plan: Plan, missed: list[tuple[str, str]]) -> Iterator[Replacement]:
    reason = _cannot_share(model) if plan.shared_conditioning else None
    if reason:
        missed.append(("", f"shared_conditioning: {reason}"))
    shares = plan.shared_conditioning and not reason
    if shares:
        yield from _sharing(model, missed)
    if shares or plan.sdpa or plan.evoflash3d:
        yield from _attentions(model, plan, shares, missed)


def _sharing(model: stock.Alphafold3, missed: list[tuple[str, str]]) -> Iterator[Replacement]:
    kind = "{} (shared_conditioning)".format
    yield "", "forward", with_lazy_repeat(type(model).forward), kind("forward")
    yield "edm", "preconditioned_network_forward", denoiser.precondition, kind("noise level")
    yield "confidence_head", "forward", denoiser.confidence_of_copies, kind("confidence head")
    yield "diffusion_module", "forward", denoiser.denoise, kind("diffusion module")
    for path, module in model.diffusion_module.named_modules(prefix="diffusion_module"):
        if _is(module, stock.ConditionWrapper):
            yield path, "forward", denoiser.conditioned, kind("conditioning wrapper")
        elif _is(module, stock.AdaptiveLayerNorm):
            yield path, "forward", denoiser.adaptive_layer_norm, kind("adaptive layer norm")
    if model.diffusion_module.token_transformer.has_registers:
        missed.append(("diffusion_module.token_transformer", "shared_conditioning: register tokens need the copies"))


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


def _attentions(
    model: stock.Alphafold3, plan: Plan, shares: bool, missed: list[tuple[str, str]]
) -> Iterator[Replacement]:
    inside: set[Module] = set()
    for path, module in model.named_modules():
        if _is(module, stock.TriangleAttention):
            function, kind, needed = attention.triangle_attention, "triangle attention", False
        elif _is(module, stock.AttentionPairBias) and module.window_size is not None:
            function, kind, needed = attention.windowed_attention, "atom attention", False
        elif _is(module, stock.AttentionPairBias):
            is_token = path.startswith("diffusion_module.token_transformer.")
            kind = "token attention" if is_token else "single attention"
            function, needed = attention.pair_bias_attention, shares and is_token
        else:
            if isinstance(module, (Attention, *_OTHER_ATTENTION)) and module not in inside:
                missed.extend((path, f"{switch}: {type(module).__name__} stays stock") for switch in _asked(plan))
            continue
        inside.add(module.attn)
        way, how = _attend_for(path, module.attn, plan, kind != "atom attention", needed, missed)
        if way is not None:
            yield path, "forward", partial(_method, function, way), f"{kind} ({how})"


def _attend_for(
    path: str, attn: Attention, plan: Plan, rows: bool, needed: bool, missed: list[tuple[str, str]]
) -> tuple[attend.Attend | None, str]:
    """How to compute one attention, and the name of that way; None: it stays stock. ``needed``: it may not."""
    clamp = attn.attend.attn_softclamp_value if attn.attend.enable_attn_softclamp else None
    head_dim = attn.to_q.out_features // attn.split_heads.axes_lengths["h"]
    for switch in _asked(plan):
        if switch == "evoflash3d" and not rows:
            continue
        problem = _cannot_attend(switch, head_dim, clamp)
        if problem is None:
            return (attend.attend_evoflash3d if switch == "evoflash3d" else attend.attend_sdpa), switch
        missed.append((path, f"{switch}: {problem}"))
    if not needed:
        return None, ""
    softmax_dtype = torch.float32 if attn.attend.softmax_full_precision else None
    return partial(attend.attend_eager, softclamp=clamp, softmax_dtype=softmax_dtype), "shared_conditioning"


def _cannot_attend(switch: str, head_dim: int, clamp: float | None) -> str | None:
    if clamp is not None:
        return "the logits are soft-clamped"
    if switch == "evoflash3d":
        from megafold.evoflash3d.api import MAX_HEAD_DIM

        if head_dim % 8 or head_dim > MAX_HEAD_DIM:
            return f"head dimension {head_dim} is no multiple of 8 up to {MAX_HEAD_DIM}"
    return None


_OTHER_ATTENTION = (stock.TaylorSeriesLinearAttn, stock.ConditionalRoutedAttention)


def _asked(plan: Plan) -> list[str]:
    return [switch for switch in ("evoflash3d", "sdpa") if getattr(plan, switch)]


def _method(function: Callable[..., Any], way: attend.Attend, self: Module, *args: Any, **kwargs: Any) -> Any:
    return function(self, *args, attend=way, **kwargs)


def _is(module: Module, cls: type[Module]) -> bool:
    """Whether ``module`` computes as ``cls`` does: a subclass with a forward of its own does not."""
    return isinstance(module, cls) and type(module).forward is cls.forward
