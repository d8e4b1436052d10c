"""Coordinates stay in fp32 where the stock model's products would round them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from megafold.model.geometry import augmented, distances, rotated


def _points(count=40, seed=0):
    return torch.randn(2, count, 3, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 50


def test_distances_are_exact_for_near_points_and_have_finite_gradients():
    points = torch.cat((_points(), _points() + 1e-3), dim=1)
    single = points.float().requires_grad_()
    rounded = single.detach().double()
    exact = torch.cdist(rounded, rounded, compute_mode="donot_use_mm_for_euclid_dist")
    torch.testing.assert_close(distances(single.detach(), single.detach()).double(), exact, rtol=2**-21, atol=0)
    (gradient,) = torch.autograd.grad(distances(single, single).sum(), single)
    assert gradient.isfinite().all() and gradient.abs().max() > 1


def test_augmentation_is_rounded_once():
    from alphafold3_pytorch.alphafold3 import CentreRandomAugmentation

    module, points, found = CentreRandomAugmentation(), _points().float(), []
    for given in (points, points.double()):
        torch.manual_seed(4)
        found.append(augmented(module, given))
    assert torch.equal(found[0], found[1].float())


def test_augmentation_takes_the_motions_of_a_seeded_one():
    from alphafold3_pytorch.alphafold3 import CentreRandomAugmentation

    from megafold.evopipe.augment import seeded_augmentation

    model, points = SimpleNamespace(augmenter=CentreRandomAugmentation()), _points().float()
    with seeded_augmentation(model, "1abc", epoch=0, seed=0):
        expected = model.augmenter(points)
        torch.testing.assert_close(augmented(model.augmenter, points), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
def test_augmentation_is_the_stock_modules_and_rigid_also_under_autocast(masked):
    from alphafold3_pytorch.alphafold3 import CentreRandomAugmentation

    module, points = CentreRandomAugmentation(), _points().float()
    mask = torch.arange(40).expand(2, -1) < 30 if masked else None
    torch.manual_seed(4)
    expected = module(points, mask=mask)
    torch.manual_seed(4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = augmented(module, points, mask)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-4)
    kept = slice(0, 30)
    torch.testing.assert_close(
        distances(found[:, kept], found[:, kept]), distances(points[:, kept], points[:, kept]), rtol=1e-5, atol=1e-4
    )


def test_rigid_alignment_is_the_stock_modules():
    from alphafold3_pytorch.alphafold3 import WeightedRigidAlign

    from megafold.model.alignment import rigid_align

    module, true, g = WeightedRigidAlign(), _points(seed=1), torch.Generator().manual_seed(2)
    turn = torch.linalg.qr(torch.randn(2, 3, 3, generator=g, dtype=torch.float64))[0]
    pred = rotated(true, turn) + torch.randn(2, 40, 3, generator=g, dtype=torch.float64) + 7
    weights, mask = torch.rand(2, 40, generator=g, dtype=torch.float64), torch.rand(2, 40, generator=g) < 0.8
    for arguments in ({}, {"weights": weights}, {"weights": weights, "mask": mask, "return_transforms": True}):
        expected, found = module(pred, true, **arguments), rigid_align(module, pred, true, **arguments)
        torch.testing.assert_close(found, expected)
    with pytest.raises(torch.linalg.LinAlgError):
        rigid_align(module, pred * float("nan"), true)


@pytest.mark.parametrize("kind", ["turned", "mirrored", "noisy", "flat", "one atom", "nothing"])
def test_rotations_without_a_solver_agree_as_well_as_any(kind):
    from megafold.model.alignment import _rotation, rotation_by_squaring

    g = torch.Generator().manual_seed(len(kind))
    true = torch.randn(7, 30, 3, generator=g)
    turn = torch.linalg.qr(torch.randn(7, 3, 3, generator=g))[0]
    turn = turn * torch.linalg.det(turn)[:, None, None] * (-1 if kind == "mirrored" else 1)
    if kind == "flat":
        true[..., 2] = 0
    pred = rotated(true, turn)
    pred = pred + torch.randn(pred.shape, generator=g) * (3 if kind == "noisy" else 0)
    count = {"one atom": 1, "nothing": 0}.get(kind, 30)
    covariance = torch.einsum("bni,bnj->bij", true[:, :count], pred[:, :count])
    expected, found = _rotation(covariance), rotation_by_squaring(covariance)
    torch.testing.assert_close(found @ found.mT, torch.eye(3).expand(7, 3, 3), rtol=0, atol=1e-5)
    torch.testing.assert_close(torch.linalg.det(found), torch.ones(7))
    close = {"rtol": 1e-6, "atol": 1e-6}
    agreement = torch.einsum("bij,bji->b", found.double(), covariance.double())
    torch.testing.assert_close(agreement, torch.einsum("bij,bji->b", expected.double(), covariance.double()), **close)
    if kind in ("turned", "flat", "noisy"):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    assert not rotation_by_squaring(covariance * float("nan")).isfinite().any()
