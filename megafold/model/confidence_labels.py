"""What the confidence head is trained to say of a rolled-out structure (AF3 section 4.3): errors and lDDT as bins.

All in fp32 and without gradients, for c rollouts of one structure: M atoms, N tokens; nothing is larger than [c, M, N].
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from megafold.model.bins import bin_labels
from megafold.model.geometry import distances
from megafold.model.tokens import mark_atoms

if TYPE_CHECKING:
    from alphafold3_pytorch import Alphafold3

PROTEIN, RNA, DNA = 0, 1, 2


class Structure(NamedTuple):
    """One structure's part of a batch; every tensor has a first dimension of 1.

    lengths [1, N], types bool [1, N, 5], centres and representatives: indices of atoms [1, N], has_centre bool [1, N],
    frames: indices of atoms [1, N, 3] or None, has_frame bool [1, N] or None, mask bool [1, N], atom_mask bool [1, M].
    """

    lengths: Tensor
    types: Tensor
    centres: Tensor
    has_centre: Tensor
    representatives: Tensor
    frames: Tensor | None
    has_frame: Tensor | None
    mask: Tensor
    atom_mask: Tensor


class Labels(NamedTuple):
    """Bins, int64: pae [c, N, N] (None without frames), pde [c, N, N], plddt [c, M]; else the model's ignore index."""

    pae: Tensor | None
    pde: Tensor
    plddt: Tensor


@torch.no_grad()
def confidence_labels(model: Alphafold3, structure: Structure, pred: Tensor, true: Tensor) -> Labels:
    """From predicted and aligned true positions, both [c, M, 3]."""
    with torch.autocast(pred.device.type, enabled=False):
        return Labels(
            pae=None if structure.frames is None else _pae(model, structure, pred, true),
            pde=_pde(model, structure, pred, true),
            plddt=_plddt(model, structure, pred, true),
        )


def _pae(model: Alphafold3, structure: Structure, pred: Tensor, true: Tensor) -> Tensor:
    """Aligned error (AF3 algorithm 30): how far token i's representative atom is off, seen from token j's frame."""
    seen_pred, seen_true = (
        _in_frames(_at(positions, structure.representatives), _frames(positions, structure.frames))
        for positions in (pred, true)
    )
    errors = F.pairwise_distance(seen_pred, seen_true, eps=model.compute_alignment_error.eps)
    valid = _pairs(structure.has_frame)
    # The error of a pair without frames is 0 in the stock model; its label is ignored.
    return bin_labels(errors, model.pae_bins).masked_fill(~valid, model.ignore_index)


def _pde(model: Alphafold3, structure: Structure, pred: Tensor, true: Tensor) -> Tensor:
    of_pred, of_true = (distances(centres, centres) for centres in (_at(t, structure.centres) for t in (pred, true)))
    labels = bin_labels((of_pred - of_true).abs(), model.pde_bins)
    return labels.masked_fill(~_pairs(structure.has_centre), model.ignore_index)


def _plddt(model: Alphafold3, structure: Structure, pred: Tensor, true: Tensor) -> Tensor:
    """lDDT of each atom against the centre atoms of polymer tokens, of those within a radius of it."""
    atoms = pred.shape[1]
    pred_distances, true_distances = (distances(t, _at(t, structure.centres)) for t in (pred, true))
    is_nucleic = structure.types[..., RNA] | structure.types[..., DNA]
    is_polymer = is_nucleic | structure.types[..., PROTEIN]
    # As in the stock model the kind of the molecule is that of the atom, which for a centre atom is its token's.
    nucleic, polymer = (
        mark_atoms(kind, structure.lengths, atoms).gather(1, structure.centres) for kind in (is_nucleic, is_polymer)
    )
    radius = torch.where(nucleic, model.lddt_mask_nucleic_acid_cutoff, model.lddt_mask_other_cutoff)
    counts = polymer & structure.has_centre & structure.atom_mask.gather(1, structure.centres)
    itself = torch.arange(atoms, device=pred.device)[:, None] == structure.centres[:, None]
    counted = (true_distances < radius[:, None]) & counts[:, None] & ~itself & structure.atom_mask[:, :, None]

    errors = (true_distances - pred_distances).abs()
    score = sum((errors <= threshold).to(errors.dtype) for threshold in model.lddt_thresholds)
    score = score / len(model.lddt_thresholds)
    mean = (score * counted).sum(dim=-1) / counted.sum(dim=-1).clamp(min=1)
    return (mean * model.num_plddt_bins).floor().long().clamp(max=model.num_plddt_bins - 1)


def _frames(positions: Tensor, indices: Tensor) -> tuple[Tensor, Tensor]:
    """Frames of three atoms (AF3 algorithm 29): origins [c, N, 3] and rows of axes [c, N, 3, 3]."""
    first, origin, third = (_at(positions, indices[..., corner]) for corner in range(3))
    to_first, to_third = (F.normalize(t - origin, dim=-1, eps=1e-8) for t in (first, third))
    axis_1 = F.normalize(to_first + to_third, dim=-1, eps=1e-8)
    axis_2 = F.normalize(to_third - to_first, dim=-1, eps=1e-8)
    return origin, torch.stack((axis_1, axis_2, torch.linalg.cross(axis_1, axis_2)), dim=-2)


def _in_frames(points: Tensor, frames: tuple[Tensor, Tensor]) -> Tensor:
    """[c, N, 3] in each of N frames -> [c, N, N, 3], points first."""
    origins, axes = frames
    offsets = points.unsqueeze(2) - origins.unsqueeze(1)
    return torch.stack([(offsets * axes[:, None, :, axis]).sum(dim=-1) for axis in range(3)], dim=-1)


def _at(positions: Tensor, indices: Tensor) -> Tensor:
    """[c, M, 3] at the atoms ``indices`` [1, N] -> [c, N, 3]."""
    return positions.gather(1, indices.unsqueeze(-1).expand(len(positions), -1, positions.shape[-1]))


def _pairs(mask: Tensor) -> Tensor:
    return mask.unsqueeze(-1) & mask.unsqueeze(-2)
