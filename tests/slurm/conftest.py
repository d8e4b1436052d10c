"""One throw-away SLURM cluster for all tests of this folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def slurm(tmp_path_factory):
    """Starts two nodes; SLURM_CONF points to them for everything that the tests start."""
    folder = tmp_path_factory.mktemp("slurm")
    process = subprocess.Popen(
        [sys.executable, str(HERE / "throwaway.py"), str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    said = process.stdout.readline().strip()
    if said.startswith("not installed"):
        process.wait()
        pytest.skip(f"SLURM is {said} (apt-get install --no-install-recommends slurmctld slurmd slurm-client munge)")
    assert said.startswith("ready SLURM_CONF="), f"{said}; the cluster's logs are in {folder}"
    os.environ["SLURM_CONF"] = said.partition("=")[2]
    yield folder
    del os.environ["SLURM_CONF"]
    process.stdin.close()
    process.wait(30)


def client(*command: str) -> str:
    """Output of one of SLURM's commands, which must answer in time."""
    return subprocess.run(["timeout", "20", *command], capture_output=True, text=True, check=True).stdout


@pytest.fixture
def jobs(slurm):
    """Asks the scheduler: jobs("name") gives the states of all jobs, ended ones too, whose name starts so."""

    def ask(name: str, *states: str) -> list[str]:
        shown = client("squeue", "-h", f"--states={','.join(states) or 'all'}", "-o", "%j|%T").splitlines()
        return [state for job, state in (line.rsplit("|", 1) for line in shown) if job.startswith(name)]

    return ask
