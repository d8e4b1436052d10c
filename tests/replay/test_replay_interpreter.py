"""Every operator repeated without a GPU: the same numbers, from other memory, with its launchers run twice."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
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
def results() -> dict[str, dict]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(SCRIPT.parents[2])}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, env=environment, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads(done.stdout)


@pytest.mark.interpreter
@pytest.mark.parametrize("case", names())
def test_what_is_repeated_is_what_a_call_gives(results, case):
    assert not results[case]["wrong"] and not results[case]["problems"]
    assert results[case]["tapes"] >= 2, "forward and backward"
