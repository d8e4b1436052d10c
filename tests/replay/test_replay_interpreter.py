"""Every operator repeated without a GPU: the same numbers, from other memory, with its launchers run twice."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreter_replays.py")


def names() -> list[str]:
    assigned = {
        ast.unparse(node.targets[0]): node.value
        for node in ast.parse(SCRIPT.read_text()).body
        if isinstance(node, ast.Assign)
    }
    return [key.value for listed in ("CASES", "ATTENTION") for key in assigned[listed].keys]


@pytest.fixture(scope="module")
def results(printed_by) -> dict[str, dict]:
    return printed_by(SCRIPT)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", names())
def test_what_is_repeated_is_what_a_call_gives(results, case):
    assert not results[case]["wrong"] and not results[case]["problems"]
    assert results[case]["tapes"] >= 2, "forward and backward"
