"""The kernels' arithmetic, without a GPU: error budget in the Triton interpreter (fp32 and fp16; it has no bf16)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreter_cases.py")


def names() -> list[str]:
    assigned = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.Assign)
    }
    fp32_alone = ast.literal_eval(assigned["FP32_ALONE"])
    cases = [key.value for key in assigned["CASES"].keys]
    plain = [f"{case} {dtype}" for case in cases for dtype in ("float32", "float16")[: 1 if case in fp32_alone else 2]]
    plain += [f"{key.value} float16" for key in assigned["RESIDENT"].keys]
    plain += [f"{key.value} float32" for key in assigned["BY_THEMSELVES"].keys]
    plain += [f"{key.value} strided" for key in assigned["STRIDED"].keys]
    more = {"autocast": assigned["UNDER_AUTOCAST"], "compiled": assigned["COMPILED"]}
    return plain + [f"{case} {how}" for how, listed in more.items() for case in ast.literal_eval(listed)]


@pytest.fixture(scope="module")
def results(printed_by) -> dict[str, list]:
    return printed_by(SCRIPT)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", names())
def test_kernels_keep_the_error_budget(results, case):
    assert len(results[case]) >= 2
    assert not [line for line in results[case] if not line[1]]
