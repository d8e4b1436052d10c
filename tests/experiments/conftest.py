"""Fake contenders for the measuring process and its workers."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from experiments.spec import Comparison, Contender, Protocol, Setting

HERE = Path(__file__).parent


@pytest.fixture
def fakes(monkeypatch, tmp_path) -> Path:
    """Makes the providers fake_* known here and in the workers; the file to which they write what they do."""
    trace = tmp_path / "trace.txt"
    monkeypatch.syspath_prepend(str(HERE))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("MEGAFOLD_PROVIDERS", "fake_providers")
    monkeypatch.setenv("FAKE_TRACE", str(trace))
    return trace


@pytest.fixture
def fake_comparison():
    """Build a comparison of fake contenders by name: fake_comparison("good", "crash", n_tokens=32, timeout_s=5)."""

    def build(*names: str, n_tokens: int = 32, visits: int = 2, timeout_s: int = 60) -> Comparison:
        setting = Setting(
            sweep="fake",
            what="kernel",
            workload="triangle_attention",
            model="",
            data="synthetic",
            variant="",
            dtype="fp32",
            shape=(("n_tokens", n_tokens),),
            protocol=Protocol(visits=visits, warmup=1, repeats=2, timeout_s=timeout_s),
        )
        return Comparison(setting, tuple(Contender(name, f"fake_{name}") for name in names))

    return build
