"""Coordinates in fp32 or better: distances and rotations without matrix products, which may run in TF32 or bf16.

A TF32 product keeps 11 bits: of a coordinate of 50 angstrom no more than 0.02 angstrom, and of |a|^2 + |b|^2 - 2 a b,
by which `torch.cdist` finds distances of more than 25 points, nothing of a short one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from alphafold3_pytorch.alphafold3 import CentreRandomAugmentation


def distances(left: Tensor, right: Tensor) -> Tensor:
    """Between the points [..., I, 3] and [..., J, 3] -> [..., I, J], in the dtype given; the gradient at 0 is 0."""
    return torch.linalg.vector_norm(left.unsqueeze(-2) - right.unsqueeze(-3), dim=-1)


def rotated(points: Tensor, rotation: Tensor) -> Tensor:
    """``rotation`` [B, 3, 3] times each point of [B, M, 3] -> [B, M, 3]."""
    return (points.unsqueeze(-2) * rotation.unsqueeze(1)).sum(dim=-1)


def augmented(module: CentreRandomAugmentation, points: Tensor, mask: Tensor | None = None) -> Tensor:
    """``CentreRandomAugmentation.forward`` (AF3 algorithm 19) and its random numbers: points [B, M, 3], mask [B, M].

    Computed in fp64, as what is wrong with a rotation is wrong with all points. A module whose rotations somebody else
    draws (`megafold.evopipe.augment.seeded_augmentation`) keeps them.
    """
    dtype, points = points.dtype, points.double()
    if mask is None:
        centre = points.mean(dim=1, keepdim=True)
    else:
        points = points.masked_fill(~mask.unsqueeze(-1), 0.0)
        centre = points.sum(dim=1, keepdim=True) / mask.sum(dim=1).clamp(min=1)[:, None, None]
    drawn = vars(module).get("_random_rotation_matrix")
    if drawn is None:
        rotation = _turned(torch.rand((len(points), 3), device=module.device).double() * (2 * torch.pi))
    else:
        rotation = drawn(len(points)).double()
    translation = module._random_translation_vector(len(points))
    return (rotated(points - centre, rotation) + translation.unsqueeze(1)).to(dtype)


def _turned(angles: Tensor) -> Tensor:
    """Rotation matrices [B, 3, 3] by the angles [B, 3] about z, y and x: x first."""
    (sin_z, sin_y, sin_x), (cos_z, cos_y, cos_x) = angles.sin().unbind(-1), angles.cos().unbind(-1)
    none, one = torch.zeros_like(sin_z), torch.ones_like(sin_z)
    about_z = torch.stack((cos_z, -sin_z, none, sin_z, cos_z, none, none, none, one), dim=-1).view(-1, 3, 3)
    about_y = torch.stack((cos_y, none, sin_y, none, one, none, -sin_y, none, cos_y), dim=-1).view(-1, 3, 3)
    about_x = torch.stack((one, none, none, none, cos_x, -sin_x, none, sin_x, cos_x), dim=-1).view(-1, 3, 3)
    return about_z @ about_y @ about_x
