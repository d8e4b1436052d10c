"""Portability gate: shipped configurations compile for NVIDIA and AMD without a device, and are fit to run there.

By default one configuration per kernel, head dim and word size; `MEGAFOLD_GATE=full` compiles everything.
"""

from __future__ import annotations

import os

import pytest

pytest.importorskip("triton")

from megafold import triton_support
from megafold.evoflash3d import portability
from megafold.evoflash3d.hopper import offline
from megafold.evoflash3d.launch import LENGTH_BUCKETS, PADDING
from megafold.testing import SHARED_MEMORY_CAP, OfflineKernel

FULL = os.environ.get("MEGAFOLD_GATE") == "full"
CASES = [*portability.cases(full=FULL), *offline.cases(full=FULL)]


@pytest.mark.gate
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shipped_configuration_compiles_and_fits(case):
    compiled = case.compile()
    assert not portability.problems(case, compiled, SHARED_MEMORY_CAP[case.arch])
    assert compiled.awaited < 1.0 or not isinstance(case, offline.HopperCase)
    assert not compiled.early_releases


def test_gate_refuses_what_is_not_fit():
    case = CASES[0]
    bad = OfflineKernel(registers=255, spill_bytes=8, shared_bytes=70000, matrix_instructions=0, swap_loops=1)
    assert len(portability.problems(case, bad, SHARED_MEMORY_CAP["gfx90a"])) == 4


@pytest.mark.parametrize("arch", triton_support.ARCHITECTURES)
def test_table_is_complete_and_says_where_it_comes_from(arch):
    table = triton_support.shipped_table("evoflash3d", arch)
    assert table["architecture"] == arch
    assert table["source"].startswith(("measured on", "chosen by the offline compiler"))
    buckets = {*map(str, LENGTH_BUCKETS), "longer"}
    for kernel in ("forward", "queries", "keys", "bias"):
        for bits in ("16", "32"):
            for dim in ("D32", "D64", "D128"):
                configs = table["configs"][kernel][bits][dim]
                assert set(configs) - {"dropout"} == buckets
                assert all(PADDING % c["block_i"] == 0 and PADDING % c["block_j"] == 0 for c in configs.values())
