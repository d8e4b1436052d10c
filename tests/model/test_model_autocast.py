"""Under bf16 autocast the replaced model is as exact as the stock model, both against float64."""

from __future__ import annotations

import pytest
import torch

from megafold.model.plan import Plan

PLANS = {
    "shared_conditioning": Plan.only("shared_conditioning"),
    "asynchronous": Plan.only("asynchronous"),
    "chunked_heads": Plan.only("chunked_heads"),
    "recompute": Plan.only("recompute"),
    "sdpa": Plan.only("sdpa"),
    "evofusion": Plan.only("evofusion"),
    "all": Plan(graphs=False),
    "all-through-evoflash3d": Plan(sdpa=False, graphs=False),
}


@pytest.fixture(scope="module")
def aligned_in_fp32():
    """The rigid alignment needs an LU decomposition, which CPUs lack in bf16 (on a GPU the stock code avoids it)."""
    from alphafold3_pytorch.alphafold3 import WeightedRigidAlign

    stock = WeightedRigidAlign.forward

    def align(self, *args, **kwargs):
        with torch.autocast("cpu", enabled=False):
            return stock(self, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightedRigidAlign, "forward", align)
        yield


@pytest.fixture(scope="module")
def case(aligned_in_fp32, make_batch, make_model, step, step_in_float64):
    checkpoints = {"checkpoint_diffusion_module": True, "checkpoint_trunk_pairformer": True}
    batch, model = make_batch(11, 7, confidence=True), make_model(**checkpoints)
    exact = step_in_float64(model, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return model, batch, step(model, batch), exact


def _distance(found, exact) -> float:
    """Relative distance of two sets of gradients as one long vector."""
    difference = sum((gradient - exact[1][name]).square().sum() for name, gradient in found[1].items())
    return (difference / sum(gradient.square().sum() for gradient in exact[1].values())).sqrt().item()


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_gradients_are_as_near_to_float64_as_the_stock_models(case, plan, step):
    from megafold.model.optimize import optimize, restore

    model, batch, stock, exact = case
    optimize(model, plan)
    try:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            found = step(model, batch)
    finally:
        restore(model)
    assert found[1].keys() == stock[1].keys()
    assert all(gradient.dtype == stock[1][name].dtype for name, gradient in found[1].items())
    assert 1e-3 < _distance(stock, exact) < 2e-2, "the stock run was not in bf16"
    assert _distance(found, exact) <= 1.25 * _distance(stock, exact)
    assert (found[0] - exact[0]).abs() <= 2 * (stock[0] - exact[0]).abs() + 2.0**-9 * exact[0].abs()
