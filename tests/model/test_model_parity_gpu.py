"""Loss and gradients on a GPU, with every switch on: kernels and graphs in the whole model, in bf16 and in fp32."""

from __future__ import annotations

import pytest
import torch

from megafold.model.plan import Plan

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]

DEEP = {
    **{f"checkpoint_{part}": True for part in ("input_embedding", "trunk_pairformer", "diffusion_module")},
    "pairformer_stack": {"depth": 3},
    "msa_module_kwargs": {"depth": 2},
    "diffusion_module_kwargs": {"token_transformer_depth": 2},
}
ONE_ROUNDING = 2.0**-8  # of bf16


def joined(steps):
    """The steps of several batches as one: losses added, gradients of a name end to end."""
    gradients = {name: torch.cat([step[1][name].flatten() for step in steps]) for name in steps[0][1]}
    return sum(step[0] for step in steps), gradients


@pytest.mark.parametrize("recycles", [1, 2])
@pytest.mark.parametrize("tokens", [128, 384])
def test_bf16_is_as_close_to_float64_as_the_stock_model(
    tokens, recycles, make_model, make_batch, step, step_in_float64, beyond_budget
):
    """Over several batches: in one alone the stock model's error of a small gradient may be small by chance."""
    from megafold.model.optimize import optimize

    model, options = make_model(**DEEP).cuda(), {"num_recycling_steps": recycles}
    batches = [{name: value.cuda() for name, value in make_batch(tokens, seed=seed).items()} for seed in range(3)]
    exact = joined([step_in_float64(model, batch, **options) for batch in batches])
    with torch.autocast("cuda", dtype=torch.bfloat16):
        stock = joined([step(model, batch, **options) for batch in batches])
        optimize(model, Plan())
        for _ in range(3):  # once without graphs, recorded, replayed
            found = joined([step(model, batch, **options) for batch in batches])
            assert beyond_budget(found, stock, exact, roundings=ONE_ROUNDING) == []
    assert model.pairformer._megafold_graphs.shapes > 2


@pytest.fixture
def ieee():
    """Products of float32 without TF32."""
    before = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    yield
    torch.backends.cuda.matmul.allow_tf32 = before


@pytest.mark.usefixtures("ieee")
@pytest.mark.parametrize(("tokens", "recycles"), [(37, 2), (128, 2), (384, 1)])
def test_fp32_is_as_close_to_float64_as_the_stock_model(
    tokens, recycles, make_model, make_batch, step, step_in_float64, beyond_budget
):
    from megafold.model.optimize import optimize

    model, options = make_model(**DEEP).cuda(), {"num_recycling_steps": recycles}
    batches = [{name: value.cuda() for name, value in make_batch(tokens, seed=seed).items()} for seed in range(2)]
    exact = joined([step_in_float64(model, batch, **options) for batch in batches])
    stock = joined([step(model, batch, **options) for batch in batches])
    optimize(model, Plan())
    for _ in range(2):
        found = joined([step(model, batch, **options) for batch in batches])
        assert beyond_budget(found, stock, exact) == []
    assert model.pairformer._megafold_graphs.shapes > 2


@pytest.mark.parametrize("plan", [Plan(graphs=False), Plan()], ids=["fused", "graphs"])
def test_two_runs_give_the_same_bits(plan, make_model, make_batch, step):
    from megafold.model.optimize import optimize

    batch, found = {name: value.cuda() for name, value in make_batch(100).items()}, []
    for _ in range(2):
        model = make_model(**DEEP).cuda()
        for module in model.modules():
            if isinstance(module, torch.nn.Dropout):
                module.p = 0.2
        optimize(model, plan)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            found.append([step(model, batch) for _ in range(3)])
    for first, second in zip(*found):
        assert torch.equal(first[0], second[0])
        assert [name for name, gradient in first[1].items() if not torch.equal(gradient, second[1][name])] == []
