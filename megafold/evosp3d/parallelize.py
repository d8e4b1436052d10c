"""``parallelize(model, mesh)``: a stock model computes its part of a batch on each rank; ``serialize`` undoes it.

Methods of single modules are replaced on the instance, as :mod:`megafold.model.optimize` does and also over what it has
replaced; parameters, their names and the state_dict stay. Whatever works on single pairs, rows or atoms (norms,
transitions, recycling, checkpointing, the stacks themselves) stays as it was.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from types import MethodType
from typing import TYPE_CHECKING, Any

import torch
from alphafold3_pytorch import alphafold3 as stock
from torch.nn import Module

from megafold.evosp3d import diffusion, embed, forward, heads, msa, pair_block, single, triangle
from megafold.evosp3d.graphs import RankGraphs
from megafold.evosp3d.mesh import Shards
from megafold.evosp3d.spread import einx_of_rows
from megafold.model import attend, denoiser, fused, recompute
from megafold.model.geometry import augmented
from megafold.model.rebind import with_names

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from megafold.model.plan import Plan

_STATE = "_megafold_parallel"
Replacement = tuple[Module, str, Any]  # a callable becomes a method


def parallelize(model: stock.Alphafold3, mesh: DeviceMesh | None, plan: Plan | None = None) -> Shards:
    """Make ``model`` compute this rank's part of every batch of its data-parallel group.

    Args:
        model: stock, or what ``optimize`` made of it; the same weights on all ranks.
        mesh: 2-D, dimensions "dp" and "sp"; all ranks of an sp group get the same batch, random state included. None
            stands for one rank without a process group.
        plan: how attentions are computed on a rank's rows (``sdpa``, ``evoflash3d``); eager by default.

    Returns:
        the sequence-parallel group, which counts what this rank sends.

    Raises:
        TypeError: where ``model`` is no ``Alphafold3``.
        ValueError: for a mesh without these dimensions, or an option of the model that cannot be split (named).
    """
    if not isinstance(model, stock.Alphafold3):
        raise TypeError(f"parallelize takes an alphafold3_pytorch.Alphafold3, not {type(model).__name__}")
    if mesh is not None and tuple(mesh.mesh_dim_names or ()) != ("dp", "sp"):
        raise ValueError(f"mesh: has dimensions {mesh.mesh_dim_names}, expected ('dp', 'sp')")
    for problem in unsupported(model):
        raise ValueError(f"model: {problem}, which cannot be split over ranks")
    serialize(model)
    shards = Shards(None if mesh is None else mesh.get_group("sp"))
    state = model.__dict__.setdefault(_STATE, [])
    for module, method, replacement in list(_replacements(model, shards, plan)):
        if not any(module is done and method == name for done, name, _ in state):
            state.append((module, method, module.__dict__.get(method)))
            module.__dict__[method] = MethodType(replacement, module) if callable(replacement) else replacement
    return shards


def serialize(model: Module) -> None:
    """Undo :func:`parallelize`. Does nothing to a model that is not parallel."""
    for module, method, before in reversed(model.__dict__.pop(_STATE, [])):
        if before is None:
            del module.__dict__[method]
        else:
            module.__dict__[method] = before


def unsupported(model: stock.Alphafold3) -> Iterator[str]:
    """Options of the model that EvoSP-3D does not split, in words."""
    if stock.ElucidatedAtomDiffusion.forward is not type(model.edm).forward:
        yield "it splits the batch of augmentations (diffusion_candidates)"
    if model.distogram_atom_resolution:
        yield "its distogram is of atoms (distogram_atom_resolution)"
    if not model.diffusion_module or model.edm.net is not model.diffusion_module:
        yield "its diffusion module is not the stock one"
    for path, module in model.named_modules():
        if getattr(module, "has_registers", False):
            yield f"{path} has register tokens"
        if isinstance(module, (stock.TaylorSeriesLinearAttn, stock.ConditionalRoutedAttention)):
            yield f"{path} is {type(module).__name__}"
        windowed = isinstance(module, stock.AttentionPairBias) and module.window_size is not None
        if isinstance(module, (stock.AttentionPairBias, stock.TriangleAttention)) and not windowed:
            if module.attn.memory_kv is not None:
                yield f"{path} has memory keys (num_memory_kv)"
            is_trunk = not path.startswith("diffusion_module")
            drops = isinstance(module, stock.TriangleAttention) or not is_trunk
            if drops and module.attn.attend.attn_dropout.p:
                yield f"{path} drops attention probabilities"


def _replacements(model: stock.Alphafold3, shards: Shards, plan: Plan | None) -> Iterator[Replacement]:
    def on(module: Module, function: Callable[..., Any], **fixed: Any) -> Replacement:
        return module, "forward", partial(_method, partial(function, shards=shards, **fixed))

    replaced = "forward" in model.edm.__dict__
    yield on(model, forward.model_forward, replaced=replaced)
    # einx would copy a number to the device here, and the host wait for the whole trunk.
    of_points = augmented if replaced else with_names(type(model.augmenter).forward, einx=einx_of_rows())
    yield model.augmenter, "forward", of_points
    yield on(model.token_bond_to_pairwise_feat, embed.rows_of_input)
    for embedding in model.constraint_embeds if model.constraints is not None else ():
        yield on(embedding, embed.rows_of_input)
    yield on(model.template_embedder, embed.template_embedder)
    yield on(model.relative_position_encoding, embed.relative_positions)
    yield model.msa_module, "forward", msa.msa_module
    yield on(model.msa_module.msa_init_proj, msa.embed_alignment)
    yield on(model.edm, diffusion.diffusion_loss, replaced=replaced)
    yield model.edm, "sample", partial(_method, partial(diffusion.sample, shards=shards))
    yield model.edm, "preconditioned_network_forward", denoiser.precondition
    yield model.diffusion_module, "forward", denoiser.denoise
    yield on(model.diffusion_module.pairwise_repr_to_atompair_feat_cond, diffusion.atom_pairs_of_tokens)
    yield model.edm.weighted_rigid_align, "forward", diffusion.align_or_nan(model.edm.weighted_rigid_align)
    yield on(model.confidence_head, heads.confidence_head)
    for name in ("to_layers", "to_checkpointed_layers"):
        symmetrize = partial(heads.symmetrize_rows, shards=shards)
        yield model.distogram_head, name, with_names(getattr(stock.DistogramHead, name), symmetrize=symmetrize)
    by_block = plan is not None and (plan.recompute or plan.graphs)
    fuses = plan is not None and plan.evofusion
    if by_block:
        yield model.msa_module, "to_checkpointed_layers", recompute.msa_blocks
    if recompute.GRAPHS in model.template_embedder.__dict__:
        yield model.template_embedder, "to_checkpointed_layers", recompute.template_blocks
    make_bias, graphs = fused.pair_bias if fuses else single.bias_of_pairs, None
    for path, module in model.named_modules():
        in_denoiser = path.startswith("diffusion_module.")
        if isinstance(module, _STOCK_ON_ROWS):
            yield module, "forward", embed.stock_on_rows(type(module), shards)
        elif isinstance(module, stock.TriangleMultiplication):
            yield on(module, triangle.triangle_multiplication)
        elif isinstance(module, stock.TriangleAttention):
            yield on(module, triangle.triangle_attention, attend=_attend(module, plan))
        elif isinstance(module, stock.OuterProductMean):
            yield on(module, msa.fused_outer_product_mean if fuses else msa.outer_product_mean)
        elif isinstance(module, stock.MSAPairWeightedAveraging):
            yield on(module, msa.pair_weighted_averaging)
        elif isinstance(module, stock.PairformerStack):
            yield on(module, single.pairformer)
            if by_block:
                yield module, "to_checkpointed_layers", recompute.pairformer_blocks
        elif isinstance(module, stock.PairwiseBlock) and fuses and "forward" in module.__dict__:
            way = _attend(module.tri_attn_starting.fn, plan)
            yield on(module, pair_block.pair_block, attend=way)
        elif isinstance(module, stock.AttentionPairBias) and module.window_size is None:
            function = single.token_attention if in_denoiser else single.single_attention
            yield on(module, function, attend=_attend(module, plan), make_bias=make_bias)
        elif in_denoiser and isinstance(module, stock.ConditionWrapper) and not _is_fused(module):
            yield module, "forward", denoiser.conditioned
        elif in_denoiser and isinstance(module, stock.AdaptiveLayerNorm) and not _is_fused(module):
            yield module, "forward", denoiser.adaptive_layer_norm
        if not _works_on_rows(module):
            # Whoever replaced something else may have drawn a module into it that has to send messages here.
            for method, value in module.__dict__.items():
                if isinstance(value, MethodType) and hasattr(type(module), method):
                    yield module, method, getattr(type(module), method)
        found = module.__dict__.get(recompute.GRAPHS)
        if found is not None:
            graphs = graphs or RankGraphs(shards, found.recorder, most=found.most, patience=found.patience)
            yield module, recompute.GRAPHS, graphs


_STOCK_ON_ROWS = (stock.LinearNoBiasThenOuterSum, stock.InputFeatureEmbedder)
_ROWS = (
    stock.Transition,
    stock.AdaptiveLayerNorm,
    stock.ConditionWrapper,
    stock.DiffusionTransformer,
    stock.AttentionPairBias,
    stock.AtomToTokenPooler,
    stock.WeightedRigidAlign,
    stock.MultiChainPermutationAlignment,
    stock.SmoothLDDTLoss,
)


def _works_on_rows(module: Module) -> bool:
    """Whether what ``optimize`` made of the module holds for a rank's rows, atoms and augmentations too."""
    if isinstance(module, stock.PreLayerNorm):
        return isinstance(module.fn, stock.Transition)
    return isinstance(module, _ROWS)


def _is_fused(module: Module) -> bool:
    """Whether ``optimize`` replaced the forward, and its replacement holds on a rank.

    What it makes of conditioned layers takes conditions that are one copy for all augmentations, as they are here.
    """
    return "forward" in module.__dict__ and _works_on_rows(module)


def _attend(module: Module, plan: Plan | None) -> attend.Attend:
    """How this rank's rows attend: as the plan says where it can, else the eager definition."""
    attn = module.attn
    clamp = attn.attend.attn_softclamp_value if attn.attend.enable_attn_softclamp else None
    head_dim = attn.to_q.out_features // attn.split_heads.axes_lengths["h"]
    way = None
    if plan is not None and clamp is None:
        if plan.evoflash3d and _fits_evoflash3d(head_dim):
            way = attend.attend_by_device if plan.sdpa else attend.attend_evoflash3d
        elif plan.sdpa:
            way = attend.attend_sdpa
    if way is None:
        softmax_dtype = torch.float32 if attn.attend.softmax_full_precision else None
        way = partial(attend.attend_eager, softclamp=clamp, softmax_dtype=softmax_dtype)
    return triangle.attend_or_nothing(way)


def _fits_evoflash3d(head_dim: int) -> bool:
    from megafold.evoflash3d.api import MAX_HEAD_DIM

    return head_dim % 8 == 0 and head_dim <= MAX_HEAD_DIM


def _method(function: Callable[..., Any], self: Module, *args: Any, **kwargs: Any) -> Any:
    return function(self, *args, **kwargs)
