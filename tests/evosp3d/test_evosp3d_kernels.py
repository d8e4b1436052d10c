"""Ranks through kernels, without a GPU: the Triton interpreter."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("interpreted_ranks.py")


@pytest.fixture(scope="module")
def results() -> dict[str, list[str]]:
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, SCRIPT], capture_output=True, text=True, timeout=400, env=env)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "case",
    [
        "two ranks, outgoing, a padded row",
        "three ranks, incoming, two structures",
        "five ranks, one without rows, outgoing",
        "one rank, incoming",
    ],
)
def test_triangle_update_on_ranks_keeps_the_error_budget(results, case):
    assert results[case] == []


@pytest.mark.interpreter
def test_a_norm_that_is_scaled_behind_the_message_keeps_the_error_budget(results):
    assert results["normalised and projected"] == []
