"""Fixtures and collection rules shared by every test."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]

# Before torch looks at the processor: with AVX-512 its attention on a CPU takes an exponential of fewer digits than the
# stock model's softmax, three times the error, and what tests allow would depend on the machine.
if Path("/proc/cpuinfo").is_file() and "avx512" in Path("/proc/cpuinfo").read_text():
    os.environ.setdefault("ATEN_CPU_CAPABILITY", "avx2")


@pytest.fixture(scope="session")
def repository() -> Path:
    """The root of the checkout."""
    return REPOSITORY


@pytest.fixture(scope="session")
def shared_data() -> Path:
    """Folder with the structures 209d, 721p and 7a4d (mmcif/, msa/, templates/), which the project does not ship."""
    folder = REPOSITORY.parent / "shared" / "data" / "pdb"
    if not folder.is_dir():
        pytest.skip("the extra structures 209d, 721p and 7a4d are not beside this checkout")
    return folder


@pytest.fixture(scope="session")
def printed_by() -> Callable[[Path], Any]:
    """printed_by(script) -> the JSON that a script prints last, in a process of its own: Triton's interpreter has to be
    chosen before kernels are imported, and a process that has chosen it cannot compile."""

    def run(script: Path) -> Any:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(REPOSITORY)}
        done = subprocess.run([sys.executable, script], capture_output=True, text=True, env=environment, timeout=600)
        assert done.returncode == 0, done.stderr[-4000:]
        return json.loads(done.stdout.splitlines()[-1])

    return run
