"""Checkpoints: whole or absent, the last few kept, nothing executed when they are read."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest
import torch

from megafold.errors import InputError
from megafold.train import checkpoint


def _state(value: float) -> dict:
    return {"model": {"state_dict": {"weight": torch.full((4,), value)}}, "note": (1, "two", None)}


def test_what_was_saved_is_loaded(tmp_path):
    path = checkpoint.save(tmp_path, 7, _state(1.5), keep=2)
    loaded = checkpoint.load(path)
    assert path.name == "step-00000007.pt"
    assert (loaded["step"], loaded["note"]) == (7, (1, "two", None))
    assert torch.equal(loaded["model"]["state_dict"]["weight"], torch.full((4,), 1.5))


def test_only_the_last_are_kept(tmp_path):
    for step in (1, 2, 10, 30):
        checkpoint.save(tmp_path, step, _state(step), keep=2)
    assert [path.name for path in checkpoint.checkpoints(tmp_path)] == ["step-00000010.pt", "step-00000030.pt"]


_KILLED_WHILE_WRITING = """
import io, os, signal, sys
from pathlib import Path
import torch
from megafold.train import checkpoint

def half(value, file):
    whole = io.BytesIO()
    original(value, whole)
    file.write(whole.getvalue()[: len(whole.getvalue()) // 2])
    file.flush()
    os.kill(os.getpid(), signal.SIGKILL)

original, torch.save = torch.save, half
checkpoint.save(Path(sys.argv[1]), 20, {"model": {"weight": torch.ones(1000)}}, keep=1)
"""


def test_kill_in_the_middle_of_a_write_leaves_the_previous_checkpoint(tmp_path):
    checkpoint.save(tmp_path, 10, _state(3.0), keep=1)
    done = subprocess.run([sys.executable, "-c", _KILLED_WHILE_WRITING, tmp_path], timeout=100)
    assert done.returncode == -signal.SIGKILL
    assert list(tmp_path.glob(".*.tmp")), "the kill did not come in the middle of the write"
    path, state, problems = checkpoint.load_latest(tmp_path)
    assert (path.name, state["step"], problems) == ("step-00000010.pt", 10, [])
    checkpoint.save(tmp_path, 20, _state(4.0), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000010.pt", "step-00000020.pt"]


def test_damaged_newest_is_named_and_the_one_before_is_used(tmp_path):
    checkpoint.save(tmp_path, 1, _state(1.0), keep=5)
    newest = checkpoint.save(tmp_path, 2, _state(2.0), keep=5)
    newest.write_bytes(newest.read_bytes()[:200])
    path, _, problems = checkpoint.load_latest(tmp_path)
    assert path.name == "step-00000001.pt"
    assert len(problems) == 1
    assert str(newest) in problems[0]


def test_only_damaged_checkpoints_are_an_error_and_none_is_a_fresh_start(tmp_path):
    assert checkpoint.load_latest(tmp_path) is None
    assert checkpoint.load_latest(tmp_path / "absent") is None
    (tmp_path / "step-00000001.pt").write_bytes(b"")
    with pytest.raises(InputError, match="no checkpoint is whole"):
        checkpoint.load_latest(tmp_path)


class _Payload:
    def __reduce__(self):
        return print, ("code of a stranger",)


def test_code_in_a_checkpoint_is_not_run(tmp_path, capsys):
    path = tmp_path / "step-00000001.pt"
    torch.save({"format": 1, "step": 1, "model": _Payload()}, path)
    with pytest.raises(InputError):
        checkpoint.load(path)
    assert "stranger" not in capsys.readouterr().out


def test_other_format_version_is_refused(tmp_path):
    path = tmp_path / "step-00000001.pt"
    torch.save({"format": 99, "step": 1, "model": {}}, path)
    with pytest.raises(InputError, match="format"):
        checkpoint.load(path)
