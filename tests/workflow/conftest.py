"""Runs Snakemake as a user does, from the checkout, with results in a temporary folder."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

HERE = Path(__file__).parent


@dataclass
class Ran:
    """What a command left: exit code, standard error and standard output together."""

    code: int
    text: str


@dataclass
class Workflow:
    """`snakemake(...)` in `folder`; `starts` lists what the stand-in for `megafold` was asked to do."""

    repository: Path
    folder: Path
    program: Path

    def command(self, site: str, *arguments: str) -> list[str]:
        """The command line."""
        snakemake = Path(sys.executable).parent / "snakemake"
        profile = self.repository / "cluster" / site
        where = ["--snakefile", str(self.repository / "Snakefile"), "--directory", str(self.folder)]
        return [str(snakemake), "--profile", str(profile), *where, *arguments]

    def environment(self, steer: str = "") -> dict[str, str]:
        """The environment, with what steers the stand-in."""
        return {**os.environ, "STAND_IN": steer, "STAND_IN_LOG": str(self.folder / "starts"), "OMP_NUM_THREADS": "1"}

    def snakemake(self, site: str, *arguments: str, steer: str = "") -> Ran:
        """Run to the end."""
        done = subprocess.run(
            self.command(site, *arguments),
            cwd=self.repository,
            env=self.environment(steer),
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=240,
        )
        return Ran(done.returncode, done.stdout)

    def starts(self, what: str) -> int:
        """How often the stand-in was started for `what`."""
        log = self.folder / "starts"
        return sum(line.startswith(what) for line in log.read_text().splitlines()) if log.exists() else 0


@pytest.fixture
def workflow(repository: Path, tmp_path: Path) -> Workflow:
    """Snakemake with a stand-in for the program `megafold`."""
    program = tmp_path / "megafold"
    program.write_text(f"#!{sys.executable}\n{(HERE / 'stand_in_megafold.py').read_text()}")
    program.chmod(0o755)
    return Workflow(repository, tmp_path, program)
