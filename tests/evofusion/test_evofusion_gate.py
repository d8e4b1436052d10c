"""Portability gate: shipped configurations compile for NVIDIA and AMD without a device, and are fit to run there.

By default each kernel in bf16 at the width of pairs, and on the oldest architectures in fp32; `MEGAFOLD_GATE=full`
compiles every dtype and width.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")

from megafold import triton_support
from megafold.evofusion import portability
from megafold.testing import SHARED_MEMORY_CAP, OfflineKernel

CASES = list(portability.cases(full=os.environ.get("MEGAFOLD_GATE") == "full"))


@pytest.mark.gate
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shipped_configuration_compiles_and_fits(case):
    assert not portability.problems(case, case.compile(), SHARED_MEMORY_CAP[case.arch])


def test_gate_refuses_what_is_not_fit():
    bad = OfflineKernel(registers=255, spill_bytes=8, shared_bytes=70000, matrix_instructions=0, swap_loops=1)
    assert len(portability.problems(CASES[0], bad, SHARED_MEMORY_CAP["gfx90a"])) == 4


@pytest.mark.parametrize("arch", triton_support.ARCHITECTURES)
def test_table_is_complete_and_says_where_it_comes_from(arch):
    table = triton_support.shipped_table("evofusion", arch)
    assert table["architecture"] == arch
    assert table["source"].startswith(("measured on", "chosen by the offline compiler"))
    assert set(table["configs"]) == set(portability.KERNELS)
    for kernel, by_bits in table["configs"].items():
        assert set(by_bits) == ({"32"} if kernel.startswith("smooth_lddt") else {"16", "32"})
        assert all({"num_warps", "num_stages"} <= set(config) for config in by_bits.values())
