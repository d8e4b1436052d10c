"""Bad input at the command line: one line that names the file and the field, exit code 2, nothing written."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch


def _megafold(*arguments: str, cwd) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "megafold", *arguments]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True, timeout=120)


def _refused(done: subprocess.CompletedProcess, *parts: str) -> None:
    assert done.returncode == 2, done.stdout + done.stderr
    lines = [line for line in done.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, done.stderr
    for part in parts:
        assert part in lines[0]


@pytest.mark.parametrize(
    ("sweep", "parts"),
    [
        (
            "what: iteration\nshape: {n_tokens: 64}\ntokens: 3\ncontenders: {eager: }\n",
            ("mine.yaml", "tokens", "unknown"),
        ),
        ("what: iteration\nshape: {n_tokens: 64}\ncontenders: {eagre: }\n", ("mine.yaml", "eagre", "eager")),
        ("what: iteration\nshape: {n_tokens: -1}\ncontenders: {eager: }\n", ("mine.yaml", "n_tokens", "-1")),
        ("what: [iteration\n", ("mine.yaml", "YAML")),
        (
            "what: iteration\nshape: {n_tokens: 64}\ncontenders: {megafold: {plan: {sdpaa: true}}}\n",
            ("mine.yaml", "sdpaa"),
        ),
    ],
    ids=["unknown-key", "unknown-provider", "negative-length", "not-yaml", "unknown-switch"],
)
def test_bad_sweep(tmp_path, sweep, parts):
    (tmp_path / "mine.yaml").write_text(sweep)
    _refused(_megafold("sweep", "mine.yaml", "--out", "out", cwd=tmp_path), *parts)
    assert not (tmp_path / "out").exists()


def test_unknown_sweep_names_those_that_exist(tmp_path):
    _refused(_megafold("sweep", "iterations", "--out", "out", cwd=tmp_path), "iterations", "iteration")


def test_unknown_setting(tmp_path):
    done = _megafold("sweep", "iteration", "--set", "n_token=64", "--out", "out", cwd=tmp_path)
    _refused(done, "n_token", "n_tokens")


def test_comparison_with_a_missing_field(tmp_path):
    (tmp_path / "broken.json").write_text(json.dumps({"contenders": [{"name": "e", "provider": "eager", "plan": {}}]}))
    _refused(_megafold("measure", "broken.json", "--records", "out", cwd=tmp_path), "broken.json", "is missing")


def test_missing_cache(tmp_path):
    _refused(_megafold("cache", "inspect", "nowhere.h5", cwd=tmp_path), "nowhere.h5")


def test_truncated_record(tmp_path):
    (tmp_path / "records").mkdir()
    (tmp_path / "records" / "half.json").write_text('{"schema": 1, "status"')
    done = _megafold("records", "import", "records", "--site", "elsewhere", cwd=tmp_path)
    _refused(done, "half.json", "JSON")
    assert not (tmp_path / "results").exists()


def test_unknown_site(tmp_path):
    _refused(_megafold("plan", "iteration", "--site", "nowhere", cwd=tmp_path), "nowhere")


def test_figures_of_a_folder_without_records(tmp_path):
    (tmp_path / "empty").mkdir()
    _refused(_megafold("figures", "empty", "--out", "out", cwd=tmp_path), "empty", "no record")
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU to tune for")
def test_tuning_without_a_gpu(tmp_path):
    _refused(_megafold("tune", "--out", "table.json", cwd=tmp_path), "megafold tune", "nothing to tune", "cpu")
    assert not (tmp_path / "table.json").exists()


@pytest.mark.parametrize(
    ("device", "parts"),
    [
        pytest.param(
            "cuda", ("no GPU is visible",), marks=pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
        ),
        ("tpu", ("tpu", "auto, cpu or cuda")),
    ],
)
def test_a_device_that_is_not_there_is_refused_before_the_stock_model_loads(device, parts, tmp_path):
    done = _megafold("verify", "--device", device, "--out", "checks.json", cwd=tmp_path)
    _refused(done, "device", *parts)
    assert not list(tmp_path.iterdir())
