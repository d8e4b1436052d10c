"""`megafold verify` for EvoFusion as it meets a machine without a GPU, and an operator that is wrong."""

from __future__ import annotations

import pytest
import torch

from megafold.evofusion import cases, verify


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
