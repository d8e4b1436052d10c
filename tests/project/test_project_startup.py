"""What starts often starts fast: help, sweeps, records, sites and tables load neither torch nor the stock model."""

from __future__ import annotations

import resource
import subprocess
import sys

import pytest

HEAVY = ("torch", "alphafold3_pytorch", "rdkit", "triton")


@pytest.mark.parametrize(
    "modules",
    [
        "experiments.spec, experiments.record",
        "experiments.run",
        "cluster, cluster.site, cluster.launcher",
        "analysis, analysis.tables, analysis.figures, analysis.report",
        "megafold.cli",
        "megafold.model.plan, megafold.model.presets, megafold.train.config",
        "megafold.evopipe.sources, megafold.evopipe.sample_data",
    ],
)
def test_import_is_light(modules):
    code = f"import sys, {modules}; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[]"


def test_loading_a_sweep_is_light():
    code = (
        "import sys; from experiments.spec import load_sweep, sweep_names;"
        "[load_sweep(name) for name in sweep_names()];"
        f"print([name for name in {HEAVY!r} if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


def test_help_answers_within_a_second():
    """Of a processor's time: what other tests do beside it does not count."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-m", "megafold", "--help"], capture_output=True, text=True, timeout=60)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert done.returncode == 0
    assert "measure" in done.stdout
    assert after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime < 1.0
