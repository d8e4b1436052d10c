"""The forward of a training step (AF3 algorithm 1 and section 4): trunk, distogram, diffusion and confidence losses.

Same losses as ``Alphafold3.forward``. It waits for the device where the host must know something (the chains, once; the
rigid alignments) and otherwise never, and no tensor of it has the size of 48 pair representations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.nn.functional as F
from alphafold3_pytorch import alphafold3 as stock
from loguru import logger
from torch import Tensor

from megafold.model.alignment import Chains
from megafold.model.bins import bin_labels
from megafold.model.confidence import Inputs, Terms, confidence_loss
from megafold.model.confidence_labels import Structure
from megafold.model.diffusion import alignment_weights, permuted_or_as_is
from megafold.model.geometry import augmented, distances
from megafold.model.pair_loss import pair_cross_entropy
from megafold.model.repeated import Repeated
from megafold.model.trunk import Trunk, bonds_of_tokens, run_trunk

if TYPE_CHECKING:
    from alphafold3_pytorch import Alphafold3

_ARGUMENTS = frozenset(inspect.signature(inspect.unwrap(stock.Alphafold3.forward)).parameters) - {"self"}


@dataclass(frozen=True)
class Step:
    """How :func:`training_forward` works.

    Attributes:
        stock_forward: what computes everything but a training loss.
        shares: the augmentations share their features (else each gets its copy).
        chunks: heads and losses a part at a time.
        rollouts: structures rolled out for the confidence head; None: one for each augmentation, as the stock model.
    """

    stock_forward: Callable[..., Any]
    shares: bool
    chunks: bool
    rollouts: int | None = None


class _Truth(NamedTuple):
    """Labels of b structures: positions [b, M, 3], has_centre and has_representative bool [b, N], indices of atoms (0
    where there is none) centres and representatives [b, N] (None: not given), frames [b, N, 3] and has_frame [b, N]."""

    positions: Tensor
    centres: Tensor | None
    has_centre: Tensor
    representatives: Tensor | None
    has_representative: Tensor
    frames: Tensor | None
    has_frame: Tensor | None


def training_forward(self: Alphafold3, *, step: Step, **inputs: Any) -> Any:
    """``Alphafold3.forward`` with true positions: the loss, and with ``return_loss_breakdown`` its terms.

    The confidence terms of the breakdown carry no gradient (the loss does). Calls that ask for something else than the
    loss go to the stock forward.
    """
    wants_loss = inputs.get("atom_pos") is not None and inputs.get("return_loss") is not False
    if not wants_loss or inputs.keys() - _ARGUMENTS:
        return step.stock_forward(self, **inputs)
    if inputs.get("hard_validate") or stock.IS_DEBUGGING:
        _validate(inputs)
    # First, while the device has nothing to finish before it can answer.
    chains = read_chains(inputs) if inputs["molecule_atom_lens"].shape[0] == 1 else None
    trunk = run_trunk(self, inputs)
    truth = _truth(inputs, trunk)
    distogram = _distogram_loss(self, step, inputs, trunk, truth)
    diffusion, terms = _diffusion_loss(self, step, inputs, trunk, truth, chains)
    confidence, confidence_terms = self.zero, Terms(*[self.zero] * 4)
    labelled = any(inputs.get(name) is not None for name in ("atom_indices_for_frame", "resolved_labels"))
    if labelled and truth.centres is not None and self.pdb_training_set:
        confidence, confidence_terms = _confidence_loss(self, step, inputs, trunk, truth, chains)

    loss = (
        distogram * self.loss_distogram_weight
        + diffusion * self.loss_diffusion_weight
        + confidence * self.loss_confidence_weight
    )
    if not inputs.get("return_loss_breakdown"):
        return loss
    return loss, stock.LossBreakdown(
        total_loss=loss,
        total_diffusion=diffusion,
        distogram=distogram,
        confidence=confidence,
        **confidence_terms._asdict(),
        **terms._asdict(),
    )


def _validate(inputs: Mapping[str, Any]) -> None:
    """The stock model's own checks of the order of atoms; they wait for the device."""
    modified = inputs.get("is_molecule_mod")
    is_polymer = inputs["is_molecule_types"][..., stock.IS_BIOMOLECULE_INDICES].any(dim=-1)
    plain = is_polymer if modified is None else is_polymer & ~modified.to_dense().any(dim=-1)
    names = {"distogram_atom_indices": None, "molecule_atom_indices": None, "atom_indices_for_frame": plain}
    for name, mask in names.items():
        if inputs.get(name) is not None:
            kwargs = {} if mask is None else {"mask": mask}
            stock.hard_validate_atom_indices_ascending(inputs[name], name, **kwargs)


def _truth(inputs: Mapping[str, Any], trunk: Trunk) -> _Truth:
    exists = inputs["molecule_atom_lens"] >= 0

    def indices(name: str) -> tuple[Tensor | None, Tensor]:
        given = inputs.get(name)
        if given is None:
            return None, exists
        valid = (given >= 0) & exists
        return given.masked_fill(~valid, 0), valid

    frames = inputs.get("atom_indices_for_frame")
    has_frame = inputs.get("valid_atom_indices_for_frame")
    if frames is not None:
        valid = (frames >= 0).all(dim=-1) & exists
        has_frame = valid if has_frame is None else has_frame & valid
        frames = frames.masked_fill(~has_frame.unsqueeze(-1), 0)
    centres, representatives = indices("molecule_atom_indices"), indices("distogram_atom_indices")
    return _Truth(inputs["atom_pos"], *centres, *representatives, frames, has_frame)


def read_chains(inputs: Mapping[str, Any]) -> Chains:
    """The chains of a batch of one structure; waits for the device once."""
    ids, types = inputs["additional_molecule_feats"], inputs["is_molecule_types"]
    lengths = inputs["molecule_atom_lens"].clamp(min=0)
    bonds = bonds_of_tokens(inputs.get("token_bonds"), lengths)
    return Chains.read(ids, types, bonds, lengths, inputs["atom_inputs"].shape[1])


def _distogram_loss(self: Alphafold3, step: Step, inputs: Mapping[str, Any], trunk: Trunk, truth: _Truth) -> Tensor:
    at_atoms = self.distogram_atom_resolution
    labels, ignore = inputs.get("distance_labels"), self.ignore_index
    if labels is None:
        if truth.representatives is None:
            return self.zero
        positions, valid = truth.positions, trunk.atom_mask
        if not at_atoms:
            positions, valid = _at(positions, truth.representatives), truth.has_representative
        labels = bin_labels(distances(positions, positions), self.distance_bins).masked_fill(~_pairs(valid), ignore)
    labels = labels.masked_fill(~_pairs(trunk.atom_mask if at_atoms else trunk.mask), ignore)
    if at_atoms or not step.chunks:
        logits = self.distogram_head(trunk.pairs, molecule_atom_lens=trunk.lengths, atom_feats=trunk.atom_feats)
        return F.cross_entropy(logits, labels, ignore_index=ignore)
    to_logits = self.distogram_head.to_distogram_logits[0]
    total = pair_cross_entropy(trunk.pairs, to_logits, labels, ignore=ignore, symmetric=True).sum()
    return total / (labels != ignore).sum()


def _diffusion_loss(
    self: Alphafold3, step: Step, inputs: Mapping[str, Any], trunk: Trunk, truth: _Truth, chains: Chains | None
) -> tuple[Tensor, Any]:
    copies = self.num_augmentations + int(self.stochastic_frame_average)
    positions = _augmented(self, trunk, truth, copies)
    parents, missing = inputs.get("atom_parent_ids"), inputs.get("missing_atom_mask")
    loss, _, terms, _ = self.edm(
        positions,
        **_features(step, trunk, copies),
        atom_parent_ids=None if parents is None else _copied(parents, copies),
        missing_atom_mask=None if missing is None else _copied(missing, copies),
        molecule_atom_indices=None if truth.centres is None else _copied(truth.centres, copies),
        is_molecule_types=_copied(inputs["is_molecule_types"], copies),
        chains=chains,
        add_smooth_lddt_loss=inputs.get("diffusion_add_smooth_lddt_loss", False),
        add_bond_loss=inputs.get("diffusion_add_bond_loss", False),
        nucleotide_loss_weight=self.nucleotide_loss_weight,
        ligand_loss_weight=self.ligand_loss_weight,
        filepath=inputs.get("filepath"),
    )
    return loss, terms


def _augmented(self: Alphafold3, trunk: Trunk, truth: _Truth, copies: int) -> Tensor:
    """True positions [b * copies, M, 3], each turned and moved on its own (AF3 algorithm 19), in fp32."""
    if copies == 1:  # the stock model moves nothing then
        return truth.positions
    dtype = truth.positions.dtype
    positions, mask = _copied(truth.positions, copies).float(), _copied(trunk.atom_mask, copies)
    with torch.autocast(positions.device.type, enabled=False):
        framed = []
        if self.stochastic_frame_average:  # of the first copy of the first structure alone, as the stock model does
            framed = [self.frame_average(positions[:1], frame_average_mask=mask[:1]).type(dtype)]
        first = len(framed)
        moved = augmented(self.augmenter, positions[first:], mask[first:]).type(dtype)
    return torch.cat((*framed, moved))


def _confidence_loss(
    self: Alphafold3, step: Step, inputs: Mapping[str, Any], trunk: Trunk, truth: _Truth, chains: Chains | None
) -> tuple[Tensor, Terms]:
    copies = step.rollouts or self.num_augmentations + int(self.stochastic_frame_average)
    count = inputs.get("num_rollout_steps")
    pred = self.edm.sample(
        num_sample_steps=self.num_rollout_steps if count is None else count,
        use_tqdm_pbar=inputs.get("rollout_show_tqdm_pbar", False),
        tqdm_pbar_title="Training rollout",
        **_features(step, trunk, copies),
    )
    true = _aligned(self, inputs, trunk, truth, chains, pred, copies)
    resolution = inputs.get("resolution")
    weights = trunk.single.new_zeros(len(trunk.mask))
    if resolution is not None:
        best, worst = inputs.get("min_conf_resolution", 0.1), inputs.get("max_conf_resolution", 4.0)
        weights = ((resolution >= best) & (resolution <= worst)).to(pred.dtype)
    structures = [_structure(inputs, trunk, truth, slice(i, i + 1)) for i in range(len(trunk.mask))]
    seen = [trunk.single, trunk.single_inputs, trunk.pairs, trunk.atom_feats]
    given = [Inputs(*(t[i : i + 1].detach() for t in seen)) for i in range(len(trunk.mask))]
    return confidence_loss(self, structures, given, pred, true, inputs.get("resolved_labels"), weights)


def _aligned(
    self: Alphafold3,
    inputs: Mapping[str, Any],
    trunk: Trunk,
    truth: _Truth,
    chains: Chains | None,
    pred: Tensor,
    copies: int,
) -> Tensor:
    """True positions on the rolled-out ones [b * copies, M, 3] (AF3 section 4.2); what fails is left out and told."""
    lengths, types = _copied(trunk.lengths, copies), _copied(inputs["is_molecule_types"], copies)
    true, mask = _copied(truth.positions, copies), _copied(trunk.atom_mask, copies)
    weights = alignment_weights(true, lengths, types, self.nucleotide_loss_weight, self.ligand_loss_weight)
    try:
        true = self.weighted_rigid_align(
            pred_coords=pred.float(), true_coords=true.float(), weights=weights.float(), mask=mask
        ).type(true.dtype)
    except torch.linalg.LinAlgError as error:
        logger.warning(f"Skipping weighted rigid alignment due to: {error}")
    if chains is None:
        return true
    permute, centres = self.multi_chain_permutation_alignment, _copied(truth.centres, copies)
    return permuted_or_as_is(permute, pred, true, centres, mask, chains, inputs.get("filepath"))


def _structure(inputs: Mapping[str, Any], trunk: Trunk, truth: _Truth, one: slice) -> Structure:
    if truth.representatives is None:
        raise ValueError("distogram_atom_indices: needed for the labels of the confidence head")
    optional = [None if t is None else t[one] for t in (truth.frames, truth.has_frame)]
    return Structure(
        lengths=trunk.lengths[one],
        types=inputs["is_molecule_types"][one],
        centres=truth.centres[one],
        has_centre=truth.has_centre[one],
        representatives=truth.representatives[one],
        frames=optional[0],
        has_frame=optional[1],
        mask=trunk.mask[one],
        atom_mask=trunk.atom_mask[one],
    )


def _features(step: Step, trunk: Trunk, copies: int) -> dict[str, Any]:
    """What the diffusion module is conditioned on, for ``copies`` of each structure."""
    features = {
        "atom_feats": trunk.atom_feats,
        "atompair_feats": trunk.atompair_feats,
        "single_trunk_repr": trunk.single,
        "single_inputs_repr": trunk.single_inputs,
        "pairwise_trunk": trunk.pairs,
        "pairwise_rel_pos_feats": trunk.relative_positions,
    }
    if step.shares:
        features = {name: Repeated(feature, copies) for name, feature in features.items()}
    else:
        features = {name: _copied(feature, copies) for name, feature in features.items()}
    others = {"atom_mask": trunk.atom_mask, "mask": trunk.mask, "molecule_atom_lens": trunk.lengths}
    return features | {name: _copied(other, copies) for name, other in others.items()}


def _copied(t: Tensor, copies: int) -> Tensor:
    return Repeated(t, copies).materialize()


def _at(positions: Tensor, indices: Tensor) -> Tensor:
    return positions.gather(1, indices.unsqueeze(-1).expand(-1, -1, positions.shape[-1]))


def _pairs(mask: Tensor) -> Tensor:
    return mask.unsqueeze(-1) & mask.unsqueeze(-2)
