"""`megafold verify` for EvoFusion as it meets a machine without a GPU, and an operator that is wrong."""

from __future__ import annotations

import copy

import pytest
import torch

from megafold import triton_support
from megafold.evofusion import cases, tune, verify
from megafold.evofusion.launch import INTERPRETED, configuration, overridden
from megafold.testing import check_budget


def test_the_references_pass_on_a_cpu_and_say_what_ran():
    results = verify.verify("cpu")
    assert "reference" in results[0].detail
    assert {r.name.split()[-1] for r in results} >= {"out", "dx", "din_weight", "dpred", "dmsa", "repeatable"}
    assert not [r for r in results if not r.ok]


@pytest.mark.parametrize(
    ("broken", "caught"),
    [
        (lambda x, **t: 1.001 * verify_reference(x, **t), "out"),
        (
            lambda x, in_weight, **t: verify_reference(x, in_weight=in_weight.detach() + 0 * in_weight, **t),
            "din_weight",
        ),
        (lambda x, **t: verify_reference(x, **t) + 1e-9 * torch.rand(1), "repeatable"),
    ],
    ids=["scaled", "no weight gradient", "not repeatable"],
)
def test_a_wrong_operator_is_caught(monkeypatch, broken, caught):
    def wrong(draw):
        case = cases.triangle_multiplication_case(draw, 9, 16)
        return cases.Case(broken, case.reference, case.inputs)

    monkeypatch.setattr(verify, "SMALL", {"wrong": wrong})
    assert any(r.name.endswith(caught) and not r.ok for r in verify.verify("cpu"))


def verify_reference(x, **t):
    from megafold.evofusion.triangle_multiplication.reference import triangle_multiplication

    return triangle_multiplication(x, **t, outgoing=True)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would tune")
def test_tuning_without_a_device_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="nothing to tune: no Triton backend for device type 'cpu'"):
        tune.tune(tmp_path)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("arch", triton_support.ARCHITECTURES)
def test_every_kernel_has_an_operator_that_times_it_and_candidates(arch):
    for kernel, by_bits in triton_support.shipped_table("evofusion", arch)["configs"].items():
        assert any(kernel.startswith(name) for name in tune.WORK)
        for config in by_bits.values():
            found = list(tune.candidates(config, arch))
            assert len(found) > 3 and all(set(candidate) == set(config) for candidate in found)


@pytest.mark.parametrize(
    ("kernel", "other"),
    [
        ("triangle_product_gradient", "triangle_output_gradient"),
        ("triangle_gate_gradient", "triangle_input_gradient"),
    ],
)
def test_a_kernel_is_timed_where_gluon_does_not_run_in_its_place(kernel, other, monkeypatch, tmp_path):
    table, seen = copy.deepcopy(triton_support.shipped_table("evofusion", "sm_90")), []
    plain = {name: value for name, value in table["configs"][other]["16"].items() if name != "gluon"}
    monkeypatch.setattr(triton_support, "table_to_tune", lambda name: (torch.device("cpu"), table))
    monkeypatch.setattr(triton_support, "architecture", lambda index=None: "sm_90")
    monkeypatch.setattr(tune, "_runner", lambda kernel, device: None)
    monkeypatch.setattr(
        tune, "_time", lambda *arguments: seen.append(configuration(other, torch.bfloat16, torch.device("cpu"))) or 1.0
    )
    tune.tune(tmp_path, kernels=(kernel,), progress=False)
    assert seen and all(config == plain for config in seen)
    assert configuration(other, torch.bfloat16, torch.device("cpu")) == INTERPRETED


def test_a_configuration_under_trial_is_used_inside_alone():
    trial, cpu = INTERPRETED | {"block_l": 128}, torch.device("cpu")
    with overridden("transition", trial):
        assert configuration("transition", torch.float32, cpu) == trial
        assert configuration("triangle_output", torch.float32, cpu) == INTERPRETED
    assert configuration("transition", torch.float32, cpu) == INTERPRETED


@pytest.mark.parametrize(("error", "ok"), [(2e-7, True), (2e-6, False)])
def test_what_cancels_is_judged_by_what_does_not(error, ok):
    exact = {"bias": torch.full((4,), 1e-17).double(), "weight": torch.ones(4).double()}
    eager = {name: t.float() for name, t in exact.items()}
    results = check_budget(eager | {"bias": torch.full((4,), error)}, eager, exact, {"bias": "weight"})
    assert [r.ok for r in results] == [ok, True]
