"""Loss and every gradient of the replaced model against the stock model, both measured against float64."""

from __future__ import annotations

import pytest
import torch

from megafold.model import attend
from megafold.model.plan import Plan

# A rollout is shared where the conditioning is; graphs, which need a GPU, are emulated in test_model_graphs.
NEEDS_MORE = ("shared_rollout", "graphs")
PLANS = {
    **{switch: Plan.only(switch) for switch in Plan().as_dict() if switch not in NEEDS_MORE},
    "all": Plan(graphs=False),
    "all-through-evoflash3d": Plan(sdpa=False, graphs=False),
}
CHECKPOINTED = {
    **{f"checkpoint_{part}": True for part in ("diffusion_module", "trunk_pairformer", "distogram_head")},
    "pairformer_stack": {"depth": 3},
}
# name -> lengths of the structures, arguments of the batch, of the model, of forward
CASES = {
    "one": ((11,), {}, {}, {}),
    "two-of-unequal-length": ((11, 7), {}, {}, {}),
    "two-recycles-without-msa-and-templates": (
        (7, 10),
        {"msa": False, "templates": False},
        {},
        {"num_recycling_steps": 2},
    ),
    "checkpointed": ((11, 6), {}, CHECKPOINTED, {}),
    "auxiliary-losses": ((9, 9), {}, {}, {"diffusion_add_bond_loss": True, "diffusion_add_smooth_lddt_loss": True}),
    "distance-labels-and-no-bonds": ((10, 6), {"distances": True}, {}, {}),
    "one-augmentation": ((9, 6), {}, {"diffusion_num_augmentations": 1}, {}),
    "atom-width-of-coordinates": ((9, 6), {}, {"dim_atompair": 3}, {}),
}


SHIFTS = ((0.0, 0.0, 0.0), (1.3, -0.7, 0.4), (-0.9, 0.6, 1.1), (0.2, 1.7, -1.2))  # angstrom


@pytest.fixture(scope="module", params=CASES.values(), ids=CASES)
def case(request, make_batch, make_model, step, step_in_float64):
    lengths, batch_kwargs, model_kwargs, forward_kwargs = request.param
    batch, model = make_batch(*lengths, **batch_kwargs), make_model(**model_kwargs)
    exact = step_in_float64(model, batch, **forward_kwargs)
    # Where the true structure lies changes nothing but rounding: several samples of the stock model's error, of which
    # one alone may be small by chance. A single augmentation is not centred.
    shifts = SHIFTS[: 1 if model.num_augmentations == 1 else None]
    moved = [{**batch, "atom_pos": batch["atom_pos"] + torch.tensor(by)} for by in shifts]
    stock = [step(model, one, **forward_kwargs) for one in moved]
    return model, batch, forward_kwargs, stock, exact


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_loss_and_gradients_equal_the_stock_models(case, plan, step, beyond_budget, small_chunks):
    from megafold.model.optimize import optimize, restore

    model, batch, forward_kwargs, stock, exact = case
    report = optimize(model, plan)
    try:
        found = step(model, batch, **forward_kwargs)
        drawn = torch.get_rng_state()
    finally:
        restore(model)
    step(model, batch, **forward_kwargs)
    assert report.replaced and not report.not_replaced
    assert beyond_budget(found, stock, exact) == []
    assert torch.equal(drawn, torch.get_rng_state()), (
        "random numbers were drawn in another order than by the stock model"
    )


def test_where_the_structure_lies_changes_nothing_but_rounding(case):
    model, _, _, (first, *others), (_, exact) = case
    if model.num_augmentations == 1:
        pytest.skip("the stock model does not centre a single augmentation")
    errors = torch.tensor([[(g[n] - true).norm() for n, true in exact.items()] for _, g in (first, *others)])
    ratios = errors[1:].median(dim=0).values / errors[0].clamp(min=1e-12)
    assert 0.5 < ratios.median() < 2


def test_the_reference_reaches_every_parameter(case):
    model, batch, forward_kwargs, _, (_, exact) = case
    missing = {n for n, p in model.named_parameters() if p.requires_grad and n not in exact}
    silent = {name for name, gradient in exact.items() if gradient.abs().max() < 1e-12}
    unused = [
        "confidence_head.",
        "msa_module.layers.0.1.",
        "msa_module.layers.0.2.",
    ]  # what the last MSA row would feed
    unused += [] if "msa" in batch else ["msa_module."]
    unused += [] if "num_recycling_steps" in forward_kwargs else ["recycle_"]
    without_effect = ["to_attn_bias_norm.bias"]  # the same number added to all logits
    without_effect += [] if "templates" in batch else ["template_embedder."]
    assert [name for name in sorted(missing) if not name.startswith(tuple(unused))] == []
    assert [name for name in sorted(silent) if not any(part in name for part in without_effect)] == []


def _without_bias(attend_as_it_is):
    return lambda q, k, v, bias, mask, **kw: attend_as_it_is(q, k, v, bias * 0, mask, **kw)


def _without_mask(attend_as_it_is):
    return lambda q, k, v, bias, mask, **kw: attend_as_it_is(q, k, v, bias, None, **kw)


def _slightly_other_scale(attend_as_it_is):
    return lambda q, k, v, bias, mask, **kw: attend_as_it_is(q * 1.0001, k, v, bias, mask, **kw)


@pytest.mark.parametrize("fault", [_without_bias, _without_mask, _slightly_other_scale])
def test_a_fault_in_attention_is_beyond_the_budget(
    fault, monkeypatch, make_batch, make_model, step, step_in_float64, beyond_budget
):
    from megafold.model.optimize import optimize

    batch, model = make_batch(11, 7), make_model()
    stock, exact = step(model, batch), step_in_float64(model, batch)
    monkeypatch.setattr(attend, "attend_sdpa", fault(attend.attend_sdpa))
    optimize(model, Plan())
    assert len(beyond_budget(step(model, batch), stock, exact)) > 10
