"""optimize and restore: what is counted, listed, left alone and undone."""

from __future__ import annotations

import copy

import pytest
import torch

from megafold.model.plan import Plan


@pytest.fixture(scope="module")
def batch(make_batch):
    return make_batch(9, 6, confidence=True)


@pytest.fixture()
def model(make_model):
    return make_model()


def _same_bits(left, right) -> bool:
    return torch.equal(left[0], right[0]) and all(torch.equal(g, right[1][n]) for n, g in left[1].items())


def test_restore_gives_the_stock_computation_bit_for_bit(model, batch, step):
    from megafold.model.optimize import optimize, restore

    before, keys = step(model, batch), list(model.state_dict())
    methods = {path: set(vars(module)) for path, module in model.named_modules()}
    optimize(model, Plan())
    assert list(model.state_dict()) == keys
    assert not _same_bits(step(model, batch), before), "the plan changed nothing"
    restore(model)
    assert {path: set(vars(module)) for path, module in model.named_modules()} == methods
    assert _same_bits(step(model, batch), before)
    restore(model)
    assert _same_bits(step(model, batch), before)


def test_other_models_stay_stock(model, make_model, batch, step):
    from alphafold3_pytorch import alphafold3

    from megafold.model.optimize import optimize

    other, repeat = make_model(), alphafold3.repeat
    before = step(other, batch)
    optimize(model, Plan())
    step(model, batch)
    assert alphafold3.repeat is repeat
    assert _same_bits(step(other, batch), before)


def test_a_second_plan_takes_the_place_of_the_first(model, make_model, batch, step):
    from megafold.model.optimize import optimize, restore

    once = make_model()
    report = optimize(once, Plan())
    optimize(model, Plan.only("evoflash3d", "asynchronous"))
    optimize(model, Plan())
    assert optimize(model, Plan()) == report
    assert _same_bits(step(model, batch), step(once, batch))
    stock = optimize(model, Plan.none())
    restore(once)
    assert (stock.replaced, stock.not_replaced) == ({}, [])
    assert _same_bits(step(model, batch), step(once, batch))


def test_weights_move_between_a_stock_and_an_optimized_model(model, make_model, batch, step):
    from megafold.model.optimize import optimize

    other = make_model()
    optimize(other, Plan())
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(1.01)
    model.load_state_dict(other.state_dict())
    optimize(model, Plan())
    assert _same_bits(step(model, batch), step(other, batch))


def test_a_copy_of_an_optimized_model_is_its_own(model, batch, step):
    from megafold.model.optimize import optimize, restore

    stock = step(model, batch)
    optimize(model, Plan())
    twin = copy.deepcopy(model)
    expected = step(model, batch)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert _same_bits(step(twin, batch), expected)
    restore(twin)
    assert _same_bits(step(twin, batch), stock)


def test_a_method_replaced_by_someone_else_comes_back(model):
    from megafold.model.optimize import optimize, restore

    head = model.confidence_head
    head.forward = marker = lambda **kwargs: "theirs"
    optimize(model, Plan())
    assert head.forward is not marker
    restore(model)
    assert head.forward is marker


def test_report_counts_every_attention(model):
    from alphafold3_pytorch.alphafold3 import AttentionPairBias, TriangleAttention

    from megafold.model.optimize import optimize

    modules = list(model.modules())
    triangles = sum(isinstance(m, TriangleAttention) for m in modules)
    atoms = sum(isinstance(m, AttentionPairBias) and m.window_size is not None for m in modules)
    others = sum(isinstance(m, AttentionPairBias) and m.window_size is None for m in modules)
    report = optimize(model, Plan.only("sdpa", "evoflash3d"))
    assert report.not_replaced == []
    assert report.as_dict()["replaced"] == {
        "triangle attention (evoflash3d)": triangles,
        "atom attention (sdpa)": atoms,
        "single attention (evoflash3d)": others - 1,
        "token attention (evoflash3d)": 1,
    }
    assert (triangles, atoms, others) == (8, 3, 3)


@pytest.mark.parametrize(
    ("model_kwargs", "plan", "expected"),
    [
        pytest.param(
            {"diffusion_candidates": 2},
            Plan(recompute=False, sdpa=False, evoflash3d=False, evofusion=False, graphs=False),
            [
                ("", "shared_conditioning: XMWrapper"),
                ("", "asynchronous: XMWrapper"),
                ("", "chunked_heads: XMWrapper"),
                ("edm", "shared_rollout: needs shared_conditioning"),
                ("edm", "asynchronous: XMWrapper"),
            ],
            id="candidates",
        ),
        pytest.param(
            {"diffusion_module_kwargs": {"token_transformer_kwargs": {"num_register_tokens": 1}}},
            Plan(evofusion=False, graphs=False),
            [("diffusion_module.token_transformer", "shared_conditioning: register tokens")],
            id="register-tokens",
        ),
        pytest.param(
            {"pairformer_stack": {"pair_bias_attn_kwargs": {"enable_attn_softclamp": True}}},
            Plan(evofusion=False, graphs=False),
            [("pairformer.layers.0.1.fn", "evoflash3d: the logits"), ("pairformer.layers.0.1.fn", "sdpa: the logits")],
            id="softclamp",
        ),
        pytest.param(
            {"pairformer_stack": {"pair_bias_attn_dim_head": 12}},
            Plan(evofusion=False, graphs=False),
            [("pairformer.layers.0.1.fn", "evoflash3d: head dimension 12")],
            id="head-dimension",
        ),
        pytest.param(
            {"input_embedder_kwargs": {"atom_transformer_kwargs": {"use_linear_attn": True}}},
            Plan(evoflash3d=False, evofusion=False, graphs=False),
            [("input_embedder.atom_transformer.layers.0.0", "sdpa: TaylorSeriesLinearAttn")],
            id="linear-attention",
        ),
        pytest.param(
            {"input_embedder_kwargs": {"atom_transformer_kwargs": {"use_colt5_attn": True}}},
            Plan.only("sdpa"),
            [("input_embedder.atom_transformer.layers.0.1", "sdpa: ConditionalRoutedAttention")],
            id="routed-attention",
        ),
    ],
)
def test_what_cannot_be_replaced_is_listed(model_kwargs, plan, expected, make_model):
    from megafold.model.optimize import optimize

    missed = optimize(make_model(**model_kwargs), plan).not_replaced
    assert [path for path, _ in missed] == [path for path, _ in expected]
    assert all(found.startswith(reason) for (_, found), (_, reason) in zip(missed, expected))


def test_run_time_type_checks_leave_the_conditioning_stock(model, monkeypatch):
    from megafold.model import replacements as module
    from megafold.model.optimize import optimize

    monkeypatch.setattr(module, "should_typecheck", True)
    report = optimize(model, Plan.only("shared_conditioning"))
    assert not report.replaced
    assert report.not_replaced == [("", "shared_conditioning: run-time type checks are on (TYPECHECK)")]


def test_on_a_cpu_a_note_says_that_sdpa_does_the_work_of_evoflash3d(model):
    from megafold.model.optimize import optimize

    (note,) = optimize(model, Plan()).notes
    assert note == "evoflash3d on cpu: no Triton backend for device type 'cpu': SDPA computes the attention"
    (note,) = optimize(model, Plan(sdpa=False)).notes
    assert note.endswith("its chunked reference does")
    assert optimize(model, Plan(evoflash3d=False)).notes == []


@pytest.mark.parametrize(
    ("rollouts", "plan", "problem"),
    [(0, Plan(), "is no count"), (1, Plan.only("sdpa"), "needs asynchronous or chunked_heads")],
    ids=["none", "stock-forward"],
)
def test_rollouts_that_nothing_heeds_are_refused(rollouts, plan, problem, model):
    from megafold.model.optimize import optimize

    with pytest.raises(ValueError, match=f"rollouts={rollouts} {problem}"):
        optimize(model, plan, rollouts=rollouts)


@pytest.mark.parametrize(
    "plan",
    [Plan(), Plan.only("shared_conditioning", "shared_rollout"), Plan(sdpa=False), Plan(graphs=False)],
    ids=["default", "shared", "evoflash3d", "evofusion"],
)
def test_inference_samples_the_same_structures(model, batch, plan):
    from megafold.model.optimize import optimize

    features = {k: v for k, v in batch.items() if k not in {"atom_pos", "resolved_labels", "missing_atom_mask"}}
    model.eval()
    samples = []
    for change in (Plan.none(), plan):
        optimize(model, change)
        torch.manual_seed(5)
        with torch.no_grad():
            samples.append(model(**features, num_sample_steps=2, return_loss=False))
    assert samples[0].abs().max() > 1
    torch.testing.assert_close(samples[1], samples[0], rtol=1e-4, atol=1e-3)


def test_only_an_alphafold3_is_taken(model):
    from megafold.model.optimize import optimize

    with pytest.raises(TypeError, match="Alphafold3, not PairformerStack"):
        optimize(model.pairformer, Plan())
