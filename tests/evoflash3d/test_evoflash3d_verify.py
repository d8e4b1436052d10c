"""`megafold verify` and `megafold tune` as they meet a machine without a GPU, and a kernel that is wrong."""

from __future__ import annotations

import json

import pytest
import torch

from megafold import triton_support
from megafold.evoflash3d import tune, verify
from megafold.evoflash3d.reference import eager_attention


def test_the_reference_passes_on_a_cpu_and_says_what_ran():
    results = verify.verify("cpu")
    assert "reference" in results[0].detail
    assert {r.name.split()[-1] for r in results} >= {"out", "dq", "dk", "dv", "dbias", "repeatable"}
    assert not [r for r in results if not r.ok]


@pytest.mark.parametrize(
    ("broken", "caught"),
    [
        (lambda q, k, v, bias, mask: 0.0 * eager_attention(q, k, v, bias, mask), "out"),
        (lambda q, k, v, bias, mask: eager_attention(q, k, v, bias.detach() + 0 * bias, mask), "dbias"),
        (lambda q, k, v, bias, mask: eager_attention(q, k, v, bias), "out"),
        (lambda q, k, v, bias, mask: eager_attention(q, k, v, bias, mask) + 1e-4 * torch.rand(1), "repeatable"),
    ],
    ids=["zeros", "no bias gradient", "mask ignored", "not repeatable"],
)
def test_wrong_kernels_are_caught(monkeypatch, broken, caught):
    monkeypatch.setattr(verify, "evoflash3d", broken)
    assert any(r.name.endswith(caught) and not r.ok for r in verify.verify("cpu"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="would tune")
def test_tuning_without_a_device_says_why(tmp_path):
    with pytest.raises(RuntimeError, match="nothing to tune: no Triton backend for device type 'cpu'"):
        tune.tune(tmp_path)
    assert not list(tmp_path.iterdir())


def test_every_tuning_candidate_reads_a_padded_bias_within_bounds():
    from megafold.evoflash3d.launch import PADDING

    for arch in ("sm_80", "sm_90", "gfx90a"):
        for kernel in ("forward", "queries", "keys", "bias"):
            found = list(tune.candidates(kernel, "16", arch))
            assert found and all(PADDING % c["block_i"] == 0 and PADDING % c["block_j"] == 0 for c in found)
            assert not any("tma" in c for c in found) or arch == "sm_90"


@pytest.mark.parametrize("kernel", ["forward", "queries", "keys", "bias"])
def test_hopper_candidates_hold_whole_tiles_and_fit_the_registers(kernel):
    for head_dim in (32, 64):
        for c in tune.hopper_candidates(kernel, "16", head_dim, "sm_90"):
            groups = c["parts"] * (c["block"] // 64 if kernel == "bias" else c["rows"])
            assert c["block"] % c["step"] == 0 and 16 * c["warps"] * c["parts"] == 128
            assert groups in (1, 2, 4) and 32 * groups * c["warps"] * c["registers"] + 128 * 24 <= 65536
    assert not list(tune.hopper_candidates(kernel, "16", 32, "sm_80"))
    assert not list(tune.hopper_candidates(kernel, "32", 32, "sm_90"))


@pytest.mark.parametrize("own", [False, True], ids=["in place of the shipped one", "in a folder"])
def test_a_tuned_table_is_written_whole(monkeypatch, tmp_path, own):
    shipped = tmp_path / "evoflash3d" / "tables" / "sm_90.json"
    monkeypatch.setattr(triton_support, "_shipped_path", lambda package, arch: shipped)
    table = {"architecture": "sm_90", "source": "measured on this card", "configs": {}}
    path = triton_support.write_table(table, "evoflash3d", tmp_path / "own" if own else None)
    assert path == (tmp_path / "own" / "evoflash3d" / "sm_90.json" if own else shipped)
    assert json.loads(path.read_text()) == table and list(path.parent.iterdir()) == [path]
