"""The kernels' arithmetic, without a GPU: error budget in the Triton interpreter (fp32 and fp16; it has no bf16)."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreter_cases.py")


def case_names() -> list[str]:
    tree = ast.parse(SCRIPT.read_text())
    tables = [
        n.value for n in tree.body if isinstance(n, ast.Assign) and ast.unparse(n.targets[0]) in ("CASES", "SUMS")
    ]
    return [key.value for table in tables for key in table.keys]


@pytest.fixture(scope="module")
def results(printed_by) -> dict[str, list]:
    return printed_by(SCRIPT)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", case_names())
def test_kernels_keep_the_error_budget(results, case):
    assert len(results[case]) >= 5
    assert not [line for line in results[case] if not line[1]]
