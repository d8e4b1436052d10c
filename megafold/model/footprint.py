"""How much device memory a training step will need, from the architecture and the shape, before it runs.

    peak = weights, gradients, Adam state + the largest of three moments:
        forward:   its end, when all is stored and the gradients of the step before are still there
        diffusion: all that the trunk and the diffusion module have stored, and one block of the latter at work
        trunk:     all that the trunk has stored, and one pair block at work

With graphs a pair block works in a pool of its own, which is held at both moments, beside the buffers of the graphs.

What is stored was counted in the source (bytes an element, below). The constants of blocks at work were set so that
the measured records under ``docs/results/h200`` come out; a test holds the model to within 10 % of them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megafold.errors import InputError
from megafold.metrics.architecture import Architecture
from megafold.model.plan import Plan
from megafold.model.presets import preset

GIB = 2**30
PARAMETERS = {"paper": 456_701_750}
# Of megafold.model.recompute and graphs, which load torch; a test compares them.
GROUPED_FROM, GROUP, MOST_ELEMENTS = 1536, 8, 1 << 28
KEPT_ELEMENTS = 1 << 26  # of megafold.evofusion.triangle_multiplication.api
STREAM = 4  # residual streams are fp32, also under bf16 autocast
PERSISTENT_BYTES = 16  # a parameter, its gradient and Adam's two averages
# A block at work, in its backward: tensors of the dtype of products that are alive at once, in units of its stream.
PAIR_BLOCK_TENSORS, FUSED_PAIR_BLOCK_TENSORS = 80, 54
KEPT_OPERANDS = 4  # of both triangle updates, where they are kept: counted, not part of what was measured
ATOM_BLOCK_TENSORS, FUSED_ATOM_BLOCK_TENSORS = 71, 17
TRUNK_GRADIENTS = 0.6  # share of the gradients that do not exist yet in the backward of the diffusion module
EAGER_SCORES = 10  # logits, probabilities and their gradients


@dataclass(frozen=True)
class Prediction:
    """Bytes of one training step.

    Attributes:
        persistent: weights, gradients and optimizer state.
        stored: kept from the forward for the backward, by part of the model.
        working: the block at work at the peak.
        moment: when the peak is, at the end of the "forward" or in the backward of "diffusion" or "trunk".
    """

    persistent: int
    stored: dict[str, int]
    working: int
    moment: str

    @property
    def peak(self) -> int:
        return self.persistent + sum(self.stored.values()) + self.working

    def __str__(self) -> str:
        parts = [f"{name} {size / GIB:.1f}" for name, size in self.stored.items()]
        when = "at the end of the forward" if self.moment == "forward" else f"in the backward of the {self.moment}"
        return (
            f"{self.peak / GIB:.1f} GiB: persistent {self.persistent / GIB:.1f}, stored {', '.join(parts)}, "
            f"at work {self.working / GIB:.1f} (peak {when})"
        )


def predict_memory(
    model_kwargs: Mapping[str, Any],
    plan: Plan,
    *,
    parameters: int,
    n_tokens: int,
    atoms_per_token: int = 8,
    msa_depth: int = 512,
    templates: int = 1,
    dtype: str = "bf16",
) -> Prediction:
    """The peak of a training step of workload ``core`` on a GPU, checkpointed as the model says.

    Args:
        model_kwargs: constructor arguments of the model.
        plan: the switches that are on; ``Plan.none()`` is the stock model.
        parameters: of the model, in elements.
        n_tokens, atoms_per_token, msa_depth, templates: N, M / N, S, T of the one structure in the batch.
        dtype: of autocast, ``bf16`` or ``fp32`` (none).

    Raises:
        ValueError: for an unknown dtype, or a model option that is not modelled.
    """
    if dtype not in ("bf16", "fp32"):
        raise ValueError(f"dtype {dtype!r}: expected bf16 or fp32")
    model, narrow = Architecture.from_kwargs(model_kwargs), 2 if dtype == "bf16" else 4
    atoms = n_tokens * atoms_per_token
    trunk = _trunk(model, plan, n_tokens, msa_depth, templates)
    diffusion = _diffusion(model, plan, n_tokens, atoms, narrow)
    scores = not (plan.sdpa or plan.evoflash3d)
    pair_block = _pair_block(model, plan, n_tokens, narrow, scores)
    at_work = {"diffusion": _atom_block(model, plan, atoms, narrow) + scores * _token_scores(model, n_tokens)}
    at_work["trunk"] = pair_block
    if plan.graphs and n_tokens**2 * model.dim_pairwise <= MOST_ELEMENTS:
        trunk["graphs"] = _graph_buffers(model, n_tokens, msa_depth, templates) + pair_block
        at_work["trunk"] = 0
    at_work["forward"] = 0
    to_come = {"gradients_to_come": -int(TRUNK_GRADIENTS * parameters * STREAM)}
    moments = {"forward": {**trunk, **diffusion}, "diffusion": {**trunk, **diffusion, **to_come}, "trunk": trunk}
    moment = max(moments, key=lambda name: sum(moments[name].values()) + at_work[name])
    return Prediction(parameters * PERSISTENT_BYTES, moments[moment], at_work[moment], moment)


def memory_lines(n_tokens: int, name: str = "paper") -> list[str]:
    """What a training step at N tokens needs, with the default plan and without any: lines for `megafold doctor`.

    Raises:
        InputError: for an unknown preset, or one whose parameters are not counted.
        ValueError: for fewer than one token.
    """
    if n_tokens < 1:
        raise ValueError(f"n_tokens={n_tokens}: expected at least 1")
    kwargs = preset(name)
    if name not in PARAMETERS:
        raise InputError("doctor", "memory", f"is predicted for {', '.join(PARAMETERS)}, not {name}")
    shape = {"n_tokens": n_tokens, "parameters": PARAMETERS[name]}
    lines = [f"memory of a training step, N = {n_tokens}, 8 atoms a token, S = 512, T = 1, {name} model, core, bf16:"]
    for who, plan in (("MegaFold", Plan()), ("stock model", Plan.none())):
        lines.append(f"  {who} {predict_memory(kwargs, plan, **shape)}")
    return lines


def _trunk(model: Architecture, plan: Plan, n: int, depth: int, templates: int) -> dict[str, int]:
    pairs, msa = n * n * model.dim_pairwise * STREAM, depth * n * model.dim_msa * STREAM
    single = n * model.dim_single * STREAM
    blocks, grouped = model.trunk.depth, plan.recompute and n >= GROUPED_FROM
    kept = -(-blocks // GROUP) + GROUP if grouped else blocks
    return {
        "inputs": 4 * pairs + templates * n * n * model.dim_template_feats * STREAM,
        # One pair tensor a block; the stock MSA module, checkpointed by sub-layer, keeps each of its two streams twice.
        "pairformer": kept * (pairs + 2 * single),
        "msa_module": model.msa_depth * (1 if plan.graphs else 2) * (pairs + msa),
        "template_embedder": model.template_depth * templates * n * n * model.template_pair.dim * STREAM,
    }


def _diffusion(model: Architecture, plan: Plan, n: int, atoms: int, narrow: int) -> dict[str, int]:
    copies, units = model.diffusion_num_augmentations, 1 if plan.recompute else 2
    pair_copies = 1 if plan.shared_conditioning else copies
    # A transition keeps its stream, the normalised input, two halves of the hidden layer, a gate and their product; a
    # fused one its stream alone.
    transition = STREAM + (0 if plan.evofusion else narrow * (1 + 4 * 2 * model.pair_expansion / 2))
    # Features repeated, concatenated, projected, normalised; the transitions; the result.
    pair = STREAM + narrow + 2 * narrow + narrow + STREAM + model.pair_transitions * transition + STREAM
    pair = STREAM if plan.recompute and plan.shared_conditioning else pair
    atom_pairs = -(-atoms // model.atoms_per_window) * 2 * model.atoms_per_window**2 * model.dim_atompair
    of_atom_pairs = STREAM + (0 if plan.recompute else 3 * narrow)
    of_single = STREAM + (0 if plan.recompute else model.single_transitions * transition)
    atom_layers = model.atom_encoder.depth + model.atom_decoder.depth
    # Of tokens and atoms, normalised and as it is, padded; tokens' once more where graphs read it.
    prepared = copies * (n * model.dim_condition * (1 + plan.graphs) + atoms * model.dim_atom) * 2 * narrow
    return {
        "prepared_conditioning": prepared if plan.evofusion else 0,
        "pair_conditioning": int(pair_copies * n * n * model.dim_pairwise * pair),
        "single_conditioning": int(copies * n * model.dim_condition * of_single),
        "token_transformer": model.token_transformer.depth * units * copies * n * model.dim_token * STREAM,
        "atom_transformers": atom_layers * units * copies * atoms * model.dim_atom * STREAM,
        "atom_pairs": copies * atom_pairs * of_atom_pairs,
        # Noised, conditioning and skipped atoms, and the projection that is pooled.
        "atoms": copies * atoms * (model.dim_atom * 3 * STREAM + model.dim_token * narrow),
    }


def _graph_buffers(model: Architecture, n: int, depth: int, templates: int) -> int:
    """What graphs read and write, and the gradients of it: once for each kind of block."""
    copies, pairs = model.diffusion_num_augmentations, n * n * model.dim_pairwise
    trunk = 2 * pairs + n * model.dim_single + depth * n * model.dim_msa + templates * n * n * model.template_pair.dim
    token = copies * n * (model.dim_token + model.dim_condition) + pairs
    return 2 * STREAM * (trunk + token)


def _pair_block(model: Architecture, plan: Plan, n: int, narrow: int, scores: bool) -> int:
    tensors = FUSED_PAIR_BLOCK_TENSORS if plan.evofusion else PAIR_BLOCK_TENSORS
    if plan.evofusion and n * n * model.dim_pairwise <= KEPT_ELEMENTS:
        tensors += KEPT_OPERANDS
    block = n * n * model.dim_pairwise * tensors * narrow
    return block + scores * n**3 * model.trunk_pair.tri_attn_heads * EAGER_SCORES * narrow


def _atom_block(model: Architecture, plan: Plan, atoms: int, narrow: int) -> int:
    tensors = FUSED_ATOM_BLOCK_TENSORS if plan.evofusion else ATOM_BLOCK_TENSORS
    return model.diffusion_num_augmentations * atoms * model.dim_atom * tensors * narrow


def _token_scores(model: Architecture, n: int) -> int:
    return model.diffusion_num_augmentations * model.token_transformer.heads * n * n * EAGER_SCORES * 2
