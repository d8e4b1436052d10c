"""Real structures from the stock data pipeline go through every preset, stock and replaced alike."""

from __future__ import annotations

import random

import pytest
import torch

from megafold.model.plan import Plan

SHALLOW = {
    "pairformer_stack": {"depth": 1},
    "msa_module_kwargs": {"depth": 1},
    "confidence_head_kwargs": {"pairformer_depth": 1},
    "diffusion_module_kwargs": {"token_transformer_depth": 1, "atom_encoder_depth": 1, "atom_decoder_depth": 1},
    "diffusion_num_augmentations": 2,
}
# The published widths in one layer each: what a batch must fit is widths, and 48 layers take minutes here.
MODELS = {"tiny": {}, "demo": {"diffusion_num_augmentations": 2}, "paper": SHALLOW}


@pytest.fixture(scope="module")
def cache(shared_data, tmp_path_factory):
    from megafold.evopipe.build import build_cache
    from megafold.evopipe.sources import DataSource

    path = tmp_path_factory.mktemp("cache") / "209d.h5"
    (structure,) = (shared_data / "mmcif").glob("209d*")
    source = DataSource("209d", structure, shared_data / "msa", shared_data / "templates")
    report = build_cache(source, path, msa_depth=64, progress=False)
    assert report.built, str(report)
    return path


@pytest.mark.parametrize("labels", [False, True], ids=["core", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_a_real_structure_has_the_stock_loss_and_gradients(name, labels, cache):
    from megafold.evopipe.loader import make_loader
    from megafold.model.build import build_model
    from megafold.model.optimize import optimize

    (batch,) = make_loader(cache, crop_size=24, msa_depth=8, labels=labels)
    torch.manual_seed(0)
    model = build_model(name, num_rollout_steps=2, **MODELS[name])
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    found = []
    for plan in (Plan.none(), Plan()):
        optimize(model, plan)
        model.zero_grad()
        torch.manual_seed(1)
        random.seed(1)
        loss = model(**batch)
        loss.backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None]).norm()
        found.append(torch.stack([loss.detach(), norm]))
    assert found[0].isfinite().all() and (found[0] > 0).all()
    torch.testing.assert_close(found[1], found[0], rtol=2e-4, atol=0)
