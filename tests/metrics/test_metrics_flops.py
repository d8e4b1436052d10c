"""The analytic FLOP counts against PyTorch's counter on the stock model, and the meaning of the two totals."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megafold.metrics.architecture import Architecture
from megafold.metrics.flops import forward_flops, iteration_flops, mfu
from megafold.model.build import build_model
from megafold.model.presets import preset
from megafold.train.synthetic import synthetic_batch

# 8 atoms a token and windows of 27 atoms: 264 atoms need padding, so the padded windows are counted too.
SHAPE = {"n_tokens": 33, "n_atoms": 264, "msa_depth": 10, "templates": 2}
# Not matrix products of the network, so not modelled: random rotations of the augmentation, 3 x 3 alignments and their
# covariances, frames of the confidence labels. The counter sees those; norms, softmax, gates and dropout it does not.
UNMODELLED = 0.002
CHECKPOINTED = {
    f"checkpoint_{part}": True
    for part in ("input_embedding", "trunk_pairformer", "diffusion_module", "distogram_head", "confidence_head")
}


def _count(workload: str, recycles: int, **overrides) -> tuple[dict[str, int], int, int]:
    """FLOPs by module of the forward, of the forward in all, and of forward and backward."""
    torch.manual_seed(0)
    model = build_model("tiny", **overrides).train()
    batch = synthetic_batch(33, msa_depth=10, templates=2, workload=workload, model_kwargs=preset("tiny"))
    with FlopCounterMode(display=False, depth=4) as counter:
        loss = model(**batch, num_recycling_steps=recycles)
        forward = counter.get_total_flops()
        modules = {name: sum(ops.values()) for name, ops in counter.get_flop_counts().items()}
        (loss[0] if isinstance(loss, tuple) else loss).backward()
    return modules, forward, counter.get_total_flops()


@pytest.fixture(scope="module")
def core() -> tuple[dict[str, int], int, int]:
    return _count("core", 1)


@pytest.fixture(scope="module")
def full() -> tuple[dict[str, int], int, int]:
    return _count("full", 2)


@pytest.mark.parametrize(
    "name",
    ["input_embedder", "template_embedder", "msa_module", "pairformer", "distogram_head", "confidence_head"],
)
def test_module_equals_the_counter(full, name):
    modules, _, _ = full
    analytic = forward_flops(preset("tiny"), **SHAPE, recycles=2, workload="full", redundant=True)
    assert analytic[name] == modules[f"Alphafold3.{name}"]


def test_diffusion_module_and_features_equal_the_counter(core):
    modules, _, _ = core
    analytic = forward_flops(preset("tiny"), **SHAPE, redundant=True)
    assert analytic["diffusion_module"] == modules["Alphafold3.edm.net"]
    features = modules["Alphafold3.relative_position_encoding"] + modules["Alphafold3.token_bond_to_pairwise_feat"]
    assert analytic["pair_features"] == features


def test_rollout_and_recycling_equal_the_counter(full, core):
    analytic = forward_flops(preset("tiny"), **SHAPE, recycles=2, workload="full", redundant=True)
    network = full[0]["Alphafold3.edm.net"]
    assert analytic["diffusion_module"] + analytic["rollout"] == network
    recycled = full[0]["Alphafold3.recycle_single"] + full[0]["Alphafold3.recycle_pairwise"]
    assert analytic["recycling"] == recycled


@pytest.mark.parametrize(("workload", "recycles"), [("core", 1), ("full", 2)])
def test_forward_total_is_within_the_unmodelled_share(request, workload, recycles):
    _, forward, _ = request.getfixturevalue(workload)
    flops = forward_flops(preset("tiny"), **SHAPE, recycles=recycles, workload=workload, redundant=True)
    assert sum(flops.values()) == pytest.approx(forward, rel=UNMODELLED)


@pytest.mark.parametrize(("workload", "recycles"), [("core", 1), ("full", 2)])
def test_training_step_is_within_four_percent(request, workload, recycles):
    """Inputs need no gradient and the last MSA row update reaches no loss, so the backward is a little under twice."""
    _, _, total = request.getfixturevalue(workload)
    flops = iteration_flops(preset("tiny"), **SHAPE, recycles=recycles, workload=workload)
    assert 0.96 < total / flops.hardware <= 1.0


def test_recomputation_of_checkpointed_modules_equals_the_counter(full):
    _, _, plain = full
    _, _, recomputed = _count("full", 2, **CHECKPOINTED)
    arguments = {**SHAPE, "recycles": 2, "workload": "full"}
    added = iteration_flops({**preset("tiny"), **CHECKPOINTED}, **arguments).hardware
    added -= iteration_flops(preset("tiny"), **arguments).hardware
    assert recomputed - plain == pytest.approx(added, rel=1e-3)


def test_model_flops_do_not_depend_on_the_implementation():
    stock = iteration_flops(preset("paper"), n_tokens=384, n_atoms=3072, msa_depth=512, templates=1)
    shared = iteration_flops(
        preset("paper"),
        n_tokens=384,
        n_atoms=3072,
        msa_depth=512,
        templates=1,
        shared_conditioning=True,
        fused_attention=True,
    )
    no_checkpoint = {**preset("paper"), **dict.fromkeys(CHECKPOINTED, False)}
    kept = iteration_flops(no_checkpoint, n_tokens=384, n_atoms=3072, msa_depth=512, templates=1)
    assert stock.model == shared.model == kept.model
    assert stock.hardware > shared.hardware > shared.model
    assert stock.hardware > kept.hardware > kept.model


def test_model_flops_count_equal_results_once():
    """One augmentation has nothing to repeat: there both counts agree."""
    arguments = {**SHAPE, "workload": "core"}
    once = forward_flops(preset("tiny"), augmentations=1, redundant=False, **arguments)
    assert once == forward_flops(preset("tiny"), augmentations=1, redundant=True, **arguments)
    many = [forward_flops(preset("tiny"), augmentations=4, redundant=r, **arguments) for r in (False, True)]
    assert many[0]["diffusion_module"] < many[1]["diffusion_module"]
    assert {k: v for k, v in many[0].items() if k != "diffusion_module"} == {
        k: v for k, v in many[1].items() if k != "diffusion_module"
    }


def test_architecture_defaults_are_the_stock_models():
    from alphafold3_pytorch import Alphafold3

    defaults = Architecture.from_kwargs({"dim_atom_inputs": 3, "dim_template_feats": 108})
    explicit = {
        name: parameter.default
        for name, parameter in inspect.signature(Alphafold3.__init__).parameters.items()
        if parameter.default is not inspect.Parameter.empty
    }
    stock = Architecture.from_kwargs({"dim_atom_inputs": 3, "dim_template_feats": 108, **explicit})
    assert stock == defaults
    flags = {name: True for name in CHECKPOINTED if "distogram" not in name}
    assert Architecture.from_kwargs(preset("paper")) == replace(defaults, **flags)


@pytest.mark.parametrize(
    "option",
    [
        {"distogram_atom_resolution": True},
        {"diffusion_candidates": 2},
        {"pairformer_stack": {"num_register_tokens": 4}},
        {"diffusion_module_kwargs": {"use_linear_attn": True}},
        {"diffusion_module_kwargs": {"token_transformer_kwargs": {"attn_num_memory_kv": 2}}},
    ],
    ids=lambda option: "-".join(option),
)
def test_option_that_is_not_modelled_is_refused(option):
    with pytest.raises(ValueError, match="not modelled"):
        Architecture.from_kwargs({**preset("tiny"), **option})


def test_mfu_is_a_fraction_of_the_peak():
    assert mfu(989e12, 2.0, 989e12) == 0.5
    with pytest.raises(ValueError):
        mfu(1.0, 0.0, 989e12)


def test_one_rollout_costs_one_rollout_and_one_confidence_head():
    kwargs, shape = preset("paper"), {"n_tokens": 64, "n_atoms": 512, "msa_depth": 16, "templates": 1}
    core = forward_flops(kwargs, **shape)
    many = forward_flops(kwargs, **shape, workload="full")
    one = forward_flops(kwargs, **shape, workload="full", rollouts=1)
    assert {name: one[name] for name in core} == core
    shared = forward_flops(kwargs, **shape, workload="full", augmentations=1)
    assert (one["rollout"], one["confidence_head"]) == (shared["rollout"], shared["confidence_head"])
    assert 20 < many["rollout"] / one["rollout"] < 48 and 20 < many["confidence_head"] / one["confidence_head"] < 48
