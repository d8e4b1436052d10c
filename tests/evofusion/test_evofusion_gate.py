"""Portability gate: shipped configurations compile for NVIDIA and AMD without a device, and are fit to run there.

By default each kernel in bf16 at the width of pairs, and on the oldest architectures in fp32; `MEGAFOLD_GATE=full`
compiles every dtype and width.
"""

from __future__ import annotations

import json
import os

import pytest
import torch

pytest.importorskip("triton")

from megafold import triton_support
from megafold.errors import InputError
from megafold.evofusion import portability
from megafold.evofusion.attention_output import kernels, launch
from megafold.evofusion.launch import configuration
from megafold.testing import SHARED_MEMORY_CAP, OfflineKernel, compile_offline

CASES = list(portability.cases(full=os.environ.get("MEGAFOLD_GATE") == "full"))


@pytest.mark.gate
@pytest.mark.parametrize("case", CASES, ids=str)
def test_shipped_configuration_compiles_and_fits(case):
    assert not portability.problems(case, case.compile(), SHARED_MEMORY_CAP[case.arch])


@pytest.mark.gate
@pytest.mark.parametrize("name", ["attention_output", "attention_output_gradient"])
def test_attention_output_of_fp32_rows_fits_with_products_in_16_bit(name, monkeypatch):
    """Autocast before an attention that stayed in fp32; the tables' configurations are for rows of 16 bit."""
    monkeypatch.setattr(triton_support, "architecture", lambda index: "sm_90")
    monkeypatch.setattr(triton_support, "multiprocessors", lambda device: 132)
    rows, weight = torch.empty(1, 40, 40, 128, device="meta"), torch.empty(128, 128, device="meta")
    _, constants = launch._constants(name, rows, rows, weight, rows[:, :1], torch.bfloat16)
    config = configuration(name, torch.promote_types(rows.dtype, torch.bfloat16), rows.device)
    kernel = kernels.gradient_kernel if name.endswith("gradient") else kernels.output_kernel
    constants |= {"RESIDUAL": True, "COPY": True}
    constants = {key: constants[key] for key in kernel.arg_names if key in constants}
    pointers = dict.fromkeys(portability.KERNELS[name].pointers, "*fp32:16")
    signature = pointers | {"w": "*bf16:16", "gated": "*bf16:16", "scaled": "*bf16:16"}
    signature = {argument: signature.get(argument, "i32") for argument in kernel.arg_names if argument not in constants}
    compiled = compile_offline(kernel, signature, constants, "sm_90", portability.options(config))
    assert compiled.shared_bytes <= SHARED_MEMORY_CAP["sm_90"]
    assert not compiled.spill_bytes


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


def test_a_table_that_was_tuned_before_a_kernel_existed_is_filled_up(tmp_path, monkeypatch):
    table = triton_support.shipped_table("evofusion", "sm_90")
    new = table["configs"].pop("pair_weighted_output")
    table["configs"]["transition"]["16"]["block_l"] = 32
    (tmp_path / "evofusion").mkdir()
    (tmp_path / "evofusion" / "sm_90.json").write_text(json.dumps(table))
    monkeypatch.setenv("MEGAFOLD_TABLES", str(tmp_path))
    found = triton_support.load_table.__wrapped__("evofusion", "sm_90")
    assert found["configs"]["pair_weighted_output"] == new
    assert found["configs"]["transition"]["16"]["block_l"] == 32


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ('{"architecture": "sm_90"', "sm_90.json: is no JSON"),
        ('{"architecture": "sm_90"}', "sm_90.json: configs: is missing"),
    ],
    ids=["broken", "empty"],
)
def test_a_table_that_is_none_is_refused_in_one_line(tmp_path, monkeypatch, text, told):
    (tmp_path / "evofusion").mkdir()
    (tmp_path / "evofusion" / "sm_90.json").write_text(text)
    monkeypatch.setenv("MEGAFOLD_TABLES", str(tmp_path))
    with pytest.raises(InputError, match=told) as error:
        triton_support.load_table.__wrapped__("evofusion", "sm_90")
    assert "\n" not in str(error.value)
