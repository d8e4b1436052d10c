"""The confidence head and its losses (AF3 section 4.3), a few rollouts at a time.

The head sees detached inputs, so its loss has gradients for its own parameters alone. They are worked out chunk by
chunk in the forward and summed up, where the stock model keeps 48 pair representations until the backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from megafold.model.bins import bin_labels, embed_bins
from megafold.model.confidence_labels import Structure, confidence_labels
from megafold.model.geometry import distances
from megafold.model.graphs import GRAPHS
from megafold.model.pair_loss import pair_cross_entropy
from megafold.model.tokens import to_atoms

if TYPE_CHECKING:
    from alphafold3_pytorch import Alphafold3
    from alphafold3_pytorch.alphafold3 import ConfidenceHead, PairformerStack

# Token pairs of one chunk of rollouts: one rollout from N = 362 on, and more of shorter ones to fill the device.
CHUNK_PAIRS = 1 << 18
# Up to this many elements of pair representations (all blocks) a chunk keeps its activations: nothing is done twice.
KEPT_ELEMENTS = 1 << 27


class Inputs(NamedTuple):
    """What the head sees of one structure, detached: single [1, N, ds], single_inputs [1, N, di], pairs [1, N, N, dp],
    atom_feats [1, M, da]."""

    single: Tensor
    single_inputs: Tensor
    pairs: Tensor
    atom_feats: Tensor


class Terms(NamedTuple):
    """The four losses, scalars: predicted aligned error, predicted distance error, predicted lDDT, resolved atoms."""

    pae: Tensor
    pde: Tensor
    plddt: Tensor
    resolved: Tensor


def confidence_loss(
    model: Alphafold3,
    structures: list[Structure],
    inputs: list[Inputs],
    pred: Tensor,
    true: Tensor,
    resolved: Tensor | None,
    weights: Tensor,
) -> tuple[Tensor, Terms]:
    """The sum of the four losses, with gradients, and the losses themselves, without.

    Args:
        structures, inputs: b of each.
        pred, true: positions [b * c, M, 3] of c rollouts of each structure.
        resolved: int64 [b, M], 1 for an atom that the experiment saw; None: no loss for it.
        weights: [b], 0 for a structure whose confidence is not trained.
    """
    head, rollouts = model.confidence_head, pred.shape[0] // len(structures)
    pairs_counted = sum(structure.mask.sum().square() for structure in structures) * rollouts
    atoms_counted = sum(structure.atom_mask.sum() for structure in structures) * rollouts
    per_pair, per_atom = (1.0 / count.clamp(min=1e-5) for count in (pairs_counted, atoms_counted))
    size = max(1, CHUNK_PAIRS // structures[0].mask.shape[1] ** 2)

    def chunks() -> Iterator[tuple[Any, ...]]:
        for index, (structure, given) in enumerate(zip(structures, inputs)):
            seen = None if resolved is None else resolved[index : index + 1]
            span = slice(index * rollouts, (index + 1) * rollouts)
            scales = tuple(weights[index] * scale for scale in (per_pair, per_pair, per_atom, per_atom))
            for some_pred, some_true in zip(pred[span].split(size), true[span].split(size)):
                yield structure, given, some_pred, some_true, seen, scales

    parameters = [parameter for parameter in head.parameters() if parameter.requires_grad]
    run = partial(_run, _Chunk(model), parameters, size * structures[0].mask.shape[1] ** 2)
    total, *terms = _Accumulated.apply(run, chunks, *parameters)
    return total, Terms(*terms)


class _Chunk(NamedTuple):
    """The head's loss for some rollouts of one structure, as a block of one layer, the head."""

    model: Alphafold3

    def loss(
        self,
        layer: Sequence[Any],
        structure: Structure,
        given: Inputs,
        pred: Tensor,
        true: Tensor,
        resolved: Tensor | None,
        scales: Sequence[Tensor],
    ) -> tuple[Tensor, ...]:
        """The scaled sum of the four losses and each of them."""
        losses = _losses(self.model, structure, given, pred, true, resolved)
        terms = [scale * loss for scale, loss in zip(scales, losses)]
        return sum(terms), *terms


def _run(
    chunk: _Chunk, parameters: Sequence[Tensor], pairs: int, args: Sequence[Any], wants: bool
) -> tuple[Sequence[Tensor], Sequence[Tensor | None]]:
    """Loss and terms of a chunk of ``pairs`` token pairs and, if it ``wants`` them, the gradients of its loss.

    Without checkpoints if the activations are few enough to be kept. As one graph then where the head has graphs; else
    its blocks are graphs: the host needs longer to launch a block than the device to compute it once more.
    """
    head = chunk.model.confidence_head
    stack = head.pairformer_stack
    elements = pairs * head.dist_bin_pairwise_embed.embedding_dim * len(stack.layers) * stack.recurrent_depth
    graphs = getattr(stack, GRAPHS, None)
    keeps, replays = elements <= KEPT_ELEMENTS, graphs is not None and graphs.runs(args)
    if wants and keeps and replays:
        with _without_checkpoints(stack):
            found = graphs.run_with_gradients(chunk.loss, [head], *args)
        if found is not None:
            return found
    with _without_checkpoints(stack) if keeps and not replays else nullcontext():
        with torch.set_grad_enabled(wants):
            results = chunk.loss([head], *args)
        return results, torch.autograd.grad(results[0], parameters, allow_unused=True) if wants else []


def _losses(
    model: Alphafold3, structure: Structure, given: Inputs, pred: Tensor, true: Tensor, resolved: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sums of the four losses over a chunk of c rollouts [c, M, 3] of one structure."""
    head, labels = model.confidence_head, confidence_labels(model, structure, pred, true)
    single, pairs = _representations(head, structure, given, pred)
    atoms = to_atoms(single, structure.lengths, pred.shape[1]) + head.atom_feats_to_single(given.atom_feats)
    ignore, is_pair = model.ignore_index, structure.mask.unsqueeze(-1) & structure.mask.unsqueeze(-2)

    def of_pairs(to_logits: Any, wanted: Tensor, symmetric: bool) -> Tensor:
        wanted = wanted.masked_fill(~is_pair, ignore)
        return pair_cross_entropy(pairs, to_logits[0], wanted, ignore=ignore, symmetric=symmetric).sum()

    def of_atoms(to_logits: Any, wanted: Tensor) -> Tensor:
        wanted = wanted.expand(len(pred), -1).masked_fill(~structure.atom_mask, ignore)
        logits = to_logits[0](atoms).flatten(0, 1)
        return F.cross_entropy(logits, wanted.flatten(), ignore_index=ignore, reduction="sum")

    nothing = pairs.new_zeros((), dtype=torch.float32)
    return (
        nothing if labels.pae is None else of_pairs(head.to_pae_logits, labels.pae, symmetric=False),
        of_pairs(head.to_pde_logits, labels.pde, symmetric=True),
        of_atoms(head.to_plddt_logits, labels.plddt),
        # Without labels the stock model still sends a zero through the logits.
        0.0 * head.to_resolved_logits[0](atoms).sum()
        if resolved is None
        else of_atoms(head.to_resolved_logits, resolved.long()),
    )


def _representations(head: ConfidenceHead, structure: Structure, given: Inputs, pred: Tensor) -> tuple[Tensor, Tensor]:
    """``ConfidenceHead.forward`` up to its logits (AF3 algorithm 31): single [c, N, ds] and pairs [c, N, N, dp]."""
    centres = structure.centres.unsqueeze(-1).expand(len(pred), -1, pred.shape[-1])
    positions = pred.gather(1, centres)
    bins = bin_labels(distances(positions, positions), head.atompair_dist_bins)
    of_distances = embed_bins(bins, head.dist_bin_pairwise_embed.weight)
    pairs = given.pairs + head.single_inputs_to_pairwise(given.single_inputs) + of_distances
    single = given.single.expand(len(pred), -1, -1)
    return head.pairformer_stack(single_repr=single, pairwise_repr=pairs, mask=structure.mask.expand(len(pred), -1))


class _Accumulated(torch.autograd.Function):
    """Sums of what each chunk gives; the gradient of the first sum is ready when the forward ends."""

    @staticmethod
    def forward(
        ctx: Any, run: Callable[..., Any], chunks: Callable[[], Iterator[tuple[Any, ...]]], *parameters: Tensor
    ) -> tuple[Tensor, ...]:
        wants = any(ctx.needs_input_grad[2:])
        gradients: list[Tensor | None] = [None] * len(parameters)
        totals: list[Tensor] = []
        for args in chunks():
            results, found = run(args, wants)
            gradients = _sums(gradients, found)
            detached = [result.detach() for result in results]
            totals = [a + b for a, b in zip(totals, detached)] if totals else detached
        ctx.gradients = gradients
        ctx.mark_non_differentiable(*totals[1:])
        return tuple(totals)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
        found = [part for part in ctx.gradients if part is not None]
        scaled = iter(torch._foreach_mul(found, gradient) if found else ())
        return None, None, *(None if part is None else next(scaled) for part in ctx.gradients)


def _sums(totals: list[Tensor | None], parts: Sequence[Tensor | None]) -> list[Tensor | None]:
    """``totals``, to which ``parts`` are added in place, all in one launch."""
    both = [(total, part) for total, part in zip(totals, parts) if total is not None and part is not None]
    if both:
        torch._foreach_add_(*(list(side) for side in zip(*both)))
    return [part if total is None else total for total, part in zip(totals, parts)]


@contextmanager
def _without_checkpoints(stack: PairformerStack) -> Iterator[None]:
    before, stack.checkpoint = stack.checkpoint, False
    try:
        yield
    finally:
        stack.checkpoint = before
