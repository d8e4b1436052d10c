"""Coordinates in fp32 throughout: distances and rotations without matrix products, which may run in TF32 or bf16.

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
    """``CentreRandomAugmentation.forward`` (AF3 algorithm 19) and its random numbers: points [B, M, 3], mask [B, M]."""
    if mask is None:
        centre = points.mean(dim=1, keepdim=True)
    else:
        points = points.masked_fill(~mask.unsqueeze(-1), 0.0)
        centre = points.sum(dim=1, keepdim=True) / mask.sum(dim=1).clamp(min=1)[:, None, None]
    rotation = module._random_rotation_matrix(len(points))
    translation = module._random_translation_vector(len(points))
    return rotated(points - centre, rotation) + translation.unsqueeze(1)
