"""Floating-point operations of a training step of AlphaFold 3, counted from the architecture and the shape.

A product of an [a, b] and a [b, c] matrix counts 2 a b c; everything else (normalisation, softmax, gates, dropout,
gathers, losses, 3 x 3 alignments) counts nothing. Two numbers come out of one set of formulas:

* **Model FLOPs**: what the algorithm needs, each equal result once. The stock model conditions its 48 augmentations on
  48 equal copies of the pair representation; here that is one. The same number serves every contender, so their MFUs
  compare as their times do.
* **Hardware FLOPs**: what a given implementation executes: the repetitions that it does, and the second forward of
  what it recomputes in the backward pass.

A backward pass counts twice its forward. Letters: N tokens, M atoms, S alignment rows, T templates, A augmentations,
C pair width, c single width, H heads of D, w atoms a window, W = ceil(M / w) windows.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from megafold.metrics.architecture import Architecture, PairBlock, Stack

MFU_DEFINITION = (
    "model FLOPs / (seconds x dense bf16 peak); model FLOPs = matrix products of the algorithm, each equal result "
    "counted once, backward = 2 x forward, earlier recycles and rollouts forward only, no recomputation"
)
HFU_DEFINITION = (
    "hardware FLOPs / (seconds x dense bf16 peak); hardware FLOPs = model FLOPs + what the implementation repeats "
    "(stock: pair conditioning and attention biases once an augmentation) + forward recomputed by checkpointing "
    "and by fused attention"
)


@dataclass(frozen=True)
class Shape:
    """Sizes of one structure in a training step; ``augmentations`` are the noised copies of the diffusion module."""

    n_tokens: int
    n_atoms: int
    msa_depth: int
    templates: int
    augmentations: int
    rollouts: int


class Work(NamedTuple):
    """FLOPs of a module's forward.

    Attributes:
        total: all of them.
        scores: the part in attention scores (Q K^T), which fused attention computes again in its backward.
        kept: the part that checkpointing does not compute again: the last product of a checkpointed unit (only its
            sum with the residual follows, which needs no saved input) and what reaches no loss.
    """

    total: float
    scores: float = 0.0
    kept: float = 0.0

    def plus(self, *others: Work) -> Work:
        return Work(*(sum(parts) for parts in zip(self, *others)))

    def times(self, factor: float) -> Work:
        return Work(*(part * factor for part in self))

    def keeping(self, *others: Work) -> Work:
        """The same work, with the totals of ``others`` marked as not computed again."""
        return self._replace(kept=self.kept + sum(other.total for other in others))


def linear(rows: float, dim_in: float, dim_out: float) -> Work:
    """2 rows dim_in dim_out."""
    return Work(2.0 * rows * dim_in * dim_out)


def transition(rows: float, dim: int, expansion: float = 2.0) -> Work:
    """SwiGLU transition (Algorithm 11), e = int(expansion dim): rows (2 dim 2e + 2 e dim) = 6 rows dim e."""
    return Work(6.0 * rows * dim * int(dim * expansion))


def attention(rows: float, keys: float, dim: int, heads: int, dim_head: int) -> Work:
    """Gated attention without its bias: Q, K, V, gate and output projections 10 rows dim HD; scores and values
    2 x 2 rows keys HD (rows: all queries, keys: those that each query sees)."""
    inner = heads * dim_head
    scores = 2.0 * rows * keys * inner
    return Work(10.0 * rows * dim * inner + 2.0 * scores, scores)


def pair_block(block: PairBlock, n: int) -> Work:
    """`PairwiseBlock`: triangle multiplication (Algorithms 12, 13), triangle attention (14, 15) and transition (11).

    2 x [2 N^2 C (4 Ch) + 2 N^2 C Ch + 2 N^3 Ch + 2 N^2 Ch C]      multiplication: left/right with gates, gate, mix, out
    + 2 x [2 N^2 C H + 10 N^2 C HD + 4 N^3 HD]                     attention: bias, projections, scores and values
    + 12 N^2 C^2                                                   transition
    """
    pairs, width, hidden = n * n, block.dim, block.tri_mult_dim_hidden
    multiplication = Work(12.0 * pairs * width * hidden + 2.0 * n**3 * hidden)
    attended = attention(pairs, n, width, block.tri_attn_heads, block.tri_attn_dim_head)
    attended = attended.plus(linear(pairs, width, block.tri_attn_heads))
    work = multiplication.times(2).plus(attended.times(2), transition(pairs, width))
    return work.keeping(linear(pairs, int(2 * width), width))


def single_track(stack: Stack, n: int, dim: int, dim_pair: int) -> Work:
    """Single attention with pair bias and transition of one Pairformer layer (Algorithm 24 and 11).

    2 N^2 C H + 10 N c HD + 4 N^2 HD + 12 N c^2
    """
    attended = attention(n, n, dim, stack.heads, stack.dim_head)
    work = attended.plus(linear(n * n, dim_pair, stack.heads), transition(n, dim))
    return work.keeping(linear(n, stack.heads * stack.dim_head, dim), linear(n, int(2 * dim), dim))


def pairformer(model: Architecture, n: int, *, stack: Stack, block: PairBlock) -> Work:
    """`PairformerStack` (Algorithm 17): depth x (pair block + single track)."""
    layer = pair_block(block, n).plus(single_track(stack, n, model.dim_single, model.dim_pairwise))
    return layer.times(stack.depth)


def conditioned_layer(rows: float, keys: float, dim: int, stack: Stack, dim_cond: int, conditions: float) -> Work:
    """One layer of a `DiffusionTransformer` (Algorithms 23 to 26) without its attention bias.

    attention + transition + 2 x 3 x 2 conditions dim_cond dim (adaptive LayerNorm: gamma, beta, output gate; twice);
    ``conditions`` is the number of distinct condition rows.
    """
    layer = attention(rows, keys, dim, stack.heads, stack.dim_head).plus(transition(rows, dim, stack.expansion))
    return layer.plus(linear(conditions, dim_cond, 6 * dim))


def atom_transformer(model: Architecture, stack: Stack, copies: float, m: int, conditions: float) -> Work:
    """Windowed atom transformer (Algorithm 7): a window of w atoms sees itself and the window before.

    depth x [10 M d HD + 4 (W w)(2 w) HD + 6 M d int(2 d) + 12 M d d + 2 (W w)(2 w) Cap H], d the atom width; the
    last term is the bias from the atom pairs. Padding to whole windows is computed and so counted.
    """
    window = model.atoms_per_window
    padded = -(-m // window) * window
    pairs = linear(copies * padded * 2 * window, model.dim_atompair, stack.heads)
    layer = conditioned_layer(copies * m, 2 * window, model.dim_atom, stack, model.dim_atom, conditions * m)
    extra = 4.0 * copies * (padded - m) * 2 * window * stack.heads * stack.dim_head
    return layer.plus(pairs, Work(extra, extra / 2)).times(stack.depth)


def input_embedder(model: Architecture, shape: Shape) -> Work:
    """`InputFeatureEmbedder` (Algorithm 2): atom and atom-pair features, windowed atom transformer, pooling, token
    features to the first single and pair representations."""
    n, m, window = shape.n_tokens, shape.n_atoms, model.atoms_per_window
    atom_pairs = -(-m // window) * window * 2 * window
    return linear(m, model.dim_atom_inputs, model.dim_atom).plus(
        linear(atom_pairs, model.dim_atompair_inputs, model.dim_atompair),
        linear(m, model.dim_atom, 2 * model.dim_atompair),
        linear(atom_pairs, model.dim_atompair, 3 * model.dim_atompair),
        atom_transformer(model, model.input_atoms, 1, m, 1),
        linear(m, model.dim_atom, model.dim_input_embedder_token),
        linear(n, model.dim_single_inputs, model.dim_single + 2 * model.dim_pairwise),
    )


def pair_features(model: Architecture, shape: Shape) -> Work:
    """Relative positions (Algorithm 3), 2 N^2 (4 r + 2 s + 7) C, and token bonds, 2 N^2 C."""
    classes = 4 * model.r_max + 2 * model.s_max + 7
    return linear(shape.n_tokens**2, classes + 1, model.dim_pairwise)


def recycling(model: Architecture, shape: Shape) -> Work:
    """Projection of the previous pass: 2 N c^2 + 2 N^2 C^2."""
    pairs = linear(shape.n_tokens**2, model.dim_pairwise, model.dim_pairwise)
    return linear(shape.n_tokens, model.dim_single, model.dim_single).plus(pairs)


def template_embedder(model: Architecture, shape: Shape) -> tuple[Work, Work]:
    """`TemplateEmbedder` (Algorithm 16) as (checkpointed pair blocks, the rest); without templates the stock model
    embeds one empty template."""
    pairs, width, templates = shape.n_tokens**2, model.dim_template_model, max(1, shape.templates)
    blocks = pair_block(model.template_pair, shape.n_tokens).times(templates * model.template_depth)
    rest = linear(templates * pairs, model.dim_template_feats, width).plus(linear(pairs, model.dim_pairwise, 2 * width))
    return blocks, rest


def msa_module(model: Architecture, shape: Shape) -> tuple[Work, Work]:
    """`MSAModule` (Algorithm 8) as (checkpointed layers, the rest); nothing without an alignment.

    A layer: outer product mean (9) 4 S N e h + 2 S N^2 h^2 + 2 N^2 h^2 C; pair-weighted averaging (10)
    6 S N e HD + 2 N^2 C H + 2 S N^2 HD; transition on S N rows; pair block. e: alignment width, h: outer width.
    """
    depth = shape.msa_depth if model.max_num_msa is None else min(shape.msa_depth, model.max_num_msa)
    if not depth:
        return Work(0.0), Work(0.0)
    n, width, hidden = shape.n_tokens, model.dim_msa, model.msa_outer_hidden
    rows, pairs, inner = depth * n, n * n, model.msa_heads * model.msa_dim_head
    to_pairs = linear(pairs, hidden**2, model.dim_pairwise)
    outer = linear(rows, width, 2 * hidden).plus(Work(2.0 * rows * n * hidden**2), to_pairs).keeping(to_pairs)
    averaging = linear(rows, width, 3 * inner).plus(
        linear(pairs, model.dim_pairwise, model.msa_heads), Work(2.0 * rows * n * inner)
    )
    update = transition(rows, width).keeping(linear(rows, int(2 * width), width))
    layer = outer.plus(averaging, update, pair_block(model.msa_pair, n))
    # The last layer's rows feed nothing: their averaging and transition get no gradient and are not recomputed.
    unused = Work(averaging.total + update.total - update.kept)
    layers = layer.times(model.msa_depth).keeping(unused)
    rest = linear(rows, model.dim_msa_inputs + model.dim_additional_msa_feats, width)
    return layers, rest.plus(linear(n, model.dim_single, width))


def diffusion_module(
    model: Architecture, shape: Shape, *, pair_copies: float, condition_copies: float
) -> tuple[Work, Work]:
    """`DiffusionModule` (Algorithm 20) for A structures as (checkpointed transformers, the rest).

    Args:
        pair_copies: how often the pair conditioning and what follows from it alone (the biases of the token
            transformer, pair terms of the atom pairs) is computed: 1 when shared, A in the stock model, 0 where an
            earlier result serves.
        condition_copies: distinct single conditions: A in training (one noise level each), 1 in a rollout.
    """
    n, m, copies, window = shape.n_tokens, shape.n_atoms, shape.augmentations, model.atoms_per_window
    pairs, atom_pairs = n * n, -(-m // window) * window * 2 * window
    width, cond, token = model.dim_pairwise, model.dim_condition, model.dim_token

    shared = linear(pairs, 2 * width, width).plus(
        transition(pairs, width, model.pair_expansion).times(model.pair_transitions),
        linear(pairs, width, model.dim_atompair),
    )
    single = linear(1, 1 + cond, model.dim_fourier).plus(
        transition(n, cond, model.single_expansion).times(model.single_transitions),
        linear(n, cond, model.dim_atom + token),
    )
    structure = linear(m, 3, 2 * model.dim_atom).plus(
        linear(m, model.dim_atom, 2 * model.dim_atompair),
        linear(atom_pairs, model.dim_atompair, 3 * model.dim_atompair),
        linear(m, model.dim_atom, token),
        linear(n, token, model.dim_atom),
    )
    tokens = conditioned_layer(copies * n, n, token, model.token_transformer, cond, condition_copies * n)
    tokens = tokens.plus(linear(pair_copies * pairs, width, model.token_transformer.heads))
    transformers = tokens.times(model.token_transformer.depth).plus(
        atom_transformer(model, model.atom_encoder, copies, m, condition_copies),
        atom_transformer(model, model.atom_decoder, copies, m, condition_copies),
    )
    rest = shared.times(pair_copies).plus(single.times(condition_copies), structure.times(copies))
    return transformers, rest


def distogram_head(model: Architecture, shape: Shape) -> Work:
    """2 N^2 C bins."""
    return linear(shape.n_tokens**2, model.dim_pairwise, model.num_dist_bins)


def confidence_head(model: Architecture, shape: Shape, *, input_copies: float) -> tuple[Work, Work]:
    """`ConfidenceHead` (Algorithm 31) on A structures as (checkpointed Pairformer, the rest). What depends on the
    inputs alone is computed ``input_copies`` times: 1 when shared, A in the stock model."""
    n, m, copies = shape.n_tokens, shape.n_atoms, shape.augmentations
    stack = pairformer(model, n, stack=model.confidence, block=model.confidence_pair).times(copies)
    inputs = linear(n, model.dim_single_inputs, 2 * model.dim_pairwise).plus(
        linear(m, model.dim_atom, model.dim_single)
    )
    logits = linear(n * n, model.dim_pairwise, model.num_pae_bins + model.num_pde_bins)
    logits = logits.plus(linear(m, model.dim_single, model.num_plddt_bins + 2))
    return stack, inputs.times(input_copies).plus(logits.times(copies))


def _modules(model: Architecture, shape: Shape, workload: str, redundant: bool) -> dict[str, tuple[Work, Work]]:
    """Forward work of each module, as (what its checkpoint flag covers, the rest), one pass of the trunk."""
    none, copies = Work(0.0), shape.augmentations if redundant else 1
    modules = {
        "input_embedder": (none, input_embedder(model, shape)),
        "pair_features": (none, pair_features(model, shape)),
        "template_embedder": template_embedder(model, shape),
        "msa_module": msa_module(model, shape),
        "pairformer": (pairformer(model, shape.n_tokens, stack=model.trunk, block=model.trunk_pair), none),
        "diffusion_module": diffusion_module(model, shape, pair_copies=copies, condition_copies=shape.augmentations),
        "distogram_head": (none, distogram_head(model, shape)),
    }
    if workload != "core":
        shape = replace(shape, augmentations=shape.rollouts)
        copies = shape.rollouts if redundant else 1
        each = diffusion_module(
            model,
            shape,
            pair_copies=shape.rollouts if redundant else 0,
            condition_copies=copies,
        )
        evaluations = 2 * model.num_rollout_steps - 1  # Heun's method: two a step, one at the last
        modules["rollout"] = (none, each[0].plus(each[1]).times(evaluations))
        modules["confidence_head"] = confidence_head(model, shape, input_copies=copies)
    return modules


def _shape(
    model: Architecture,
    n_tokens: int,
    n_atoms: int,
    msa_depth: int,
    templates: int,
    augmentations: int | None,
    rollouts: int | None,
) -> Shape:
    if augmentations is None:
        augmentations = model.diffusion_num_augmentations
    return Shape(n_tokens, n_atoms, msa_depth, templates, augmentations, rollouts or augmentations)


def forward_flops(
    model_kwargs: Mapping[str, Any],
    *,
    n_tokens: int,
    n_atoms: int,
    msa_depth: int,
    templates: int,
    augmentations: int | None = None,
    rollouts: int | None = None,
    recycles: int = 1,
    workload: str = "core",
    redundant: bool = False,
) -> dict[str, float]:
    """FLOPs of one forward pass by module.

    Args:
        model_kwargs: constructor arguments of the model (a preset, or a preset with changes).
        n_tokens, n_atoms, msa_depth, templates: N, M, S and T of one structure.
        augmentations: A; the model's own number when left out.
        rollouts: structures rolled out for the confidence head; as many as augmentations when left out.
        recycles: passes of the trunk.
        workload: ``core`` without, anything else with rollout and confidence head.
        redundant: count what the stock model repeats for equal inputs (see the module's docstring).

    Raises:
        ValueError: for a model option that is not modelled.
    """
    model = Architecture.from_kwargs(model_kwargs)
    shape = _shape(model, n_tokens, n_atoms, msa_depth, templates, augmentations, rollouts)
    flops = {
        name: sum(work.total for work in parts) for name, parts in _modules(model, shape, workload, redundant).items()
    }
    for name in ("template_embedder", "msa_module", "pairformer"):
        flops[name] *= recycles
    flops["recycling"] = recycling(model, shape).total * (recycles - 1)
    return flops


class IterationFlops(NamedTuple):
    """FLOPs of one training step: what the algorithm needs, and what the implementation executes."""

    model: float
    hardware: float

    def times(self, structures: int) -> IterationFlops:
        """The same for a batch of equal structures."""
        return IterationFlops(self.model * structures, self.hardware * structures)


_CHECKPOINT_FLAG = {
    "template_embedder": "checkpoint_input_embedding",
    "msa_module": "checkpoint_input_embedding",
    "pairformer": "checkpoint_trunk_pairformer",
    "diffusion_module": "checkpoint_diffusion_module",
    "confidence_head": "checkpoint_confidence_head",
}


def iteration_flops(
    model_kwargs: Mapping[str, Any],
    *,
    n_tokens: int,
    n_atoms: int,
    msa_depth: int,
    templates: int,
    augmentations: int | None = None,
    rollouts: int | None = None,
    recycles: int = 1,
    workload: str = "core",
    shared_conditioning: bool = False,
    fused_attention: bool = False,
) -> IterationFlops:
    """FLOPs of one training step of one structure: forward, backward and, in the hardware number, recomputation.

    Args:
        shared_conditioning: the implementation computes once what the augmentations have in common (as the plan
            switch); changes the hardware number alone.
        fused_attention: the attention of the implementation keeps no scores and computes Q K^T again in its backward.
        Everything else: as in :func:`forward_flops`; the checkpoint flags in ``model_kwargs`` say what is recomputed.
    """
    model = Architecture.from_kwargs(model_kwargs)
    shape = _shape(model, n_tokens, n_atoms, msa_depth, templates, augmentations, rollouts)
    earlier = ("template_embedder", "msa_module", "pairformer")

    def forward_only(modules: dict[str, tuple[Work, Work]]) -> float:
        """Earlier passes of the trunk (their result is detached) and the rollout have no backward."""
        passes = sum(part.total for name in earlier for part in modules[name]) * (recycles - 1)
        passes += recycling(model, shape).total * max(0, recycles - 2)
        return passes + sum(part.total for part in modules.pop("rollout", ()))

    needed = _modules(model, shape, workload, redundant=False)
    total = forward_only(needed)
    last = recycling(model, shape).total if recycles > 1 else 0.0
    total += 3.0 * (last + sum(part.total for parts in needed.values() for part in parts))

    executed = _modules(model, shape, workload, redundant=not shared_conditioning)
    hardware = forward_only(executed) + 3.0 * last
    for name, (covered, rest) in executed.items():
        recomputed = getattr(model, _CHECKPOINT_FLAG[name]) if name in _CHECKPOINT_FLAG else False
        hardware += 3.0 * (covered.total + rest.total)
        hardware += (covered.total - covered.kept) if recomputed else 0.0
        hardware += (covered.scores + rest.scores) if fused_attention else 0.0
    return IterationFlops(total, hardware)


def mfu(flops: float, seconds: float, peak: float) -> float:
    """Utilisation as a fraction: ``flops / (seconds peak)``; model FLOPs give the MFU, hardware FLOPs the HFU.

    Raises:
        ValueError: for a time or peak that is not positive.
    """
    if not (seconds > 0 and peak > 0):
        raise ValueError(f"seconds={seconds!r}, peak={peak!r}: both must be positive")
    return flops / (seconds * peak)
