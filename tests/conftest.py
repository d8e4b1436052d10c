"""Fixtures and collection rules shared by every test."""

from __future__ import annotations

import os
from pathlib import Path

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
