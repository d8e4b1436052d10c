"""`snakemake --profile cluster/slurm-test iteration` on a real SLURM, killed, interrupted, and with the real model."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from experiments.record import read_records
from experiments.spec import load_sweep
from megafold.evopipe.sources import load_data_section, materialize

pytestmark = pytest.mark.slurm
STAND_IN = Path(__file__).parents[1] / "workflow" / "stand_in_megafold.py"
SYNTHETIC = "settings=data=synthetic n_tokens=[32,64,96,128]"  # two jobs of two comparisons at this site


class Run:
    """Snakemake in a process group of its own; without `real` a stand-in measures."""

    def __init__(self, repository: Path, folder: Path, *config: str, steer: str = "", target: str = "iteration"):
        self.folder, self.results = folder, folder / "results" / "slurm-test"
        program = folder / "megafold"
        if not program.exists():
            program.write_text(f"#!{sys.executable}\n{STAND_IN.read_text()}")
            program.chmod(0o755)
        config = config or (SYNTHETIC, f"megafold={program}")
        command = [str(Path(sys.executable).parent / "snakemake"), "--profile", "cluster/slurm-test", target]
        command += ["--directory", str(folder), "--config", *config]
        environment = {**os.environ, "STAND_IN": steer, "STAND_IN_LOG": str(folder / "starts")}
        self.log = folder / "driver"
        with self.log.open("a") as stream:
            self.process = subprocess.Popen(
                command, cwd=repository, env=environment, stdout=stream, stderr=stream, start_new_session=True
            )

    def signal_all(self, number: int) -> None:
        """To Snakemake and all that it started here, as a terminal does; the jobs were started by SLURM."""
        os.killpg(self.process.pid, number)
        self.process.wait(60)

    def end(self, patience: float = 200) -> tuple[int, str]:
        """Exit code, and everything that was printed."""
        return self.process.wait(patience), self.log.read_text()

    def job_names(self) -> set[str]:
        """The scheduler's names of the measuring jobs."""
        records = self.results.glob("jobs/iteration-*/job.json")
        return {json.loads(path.read_text())["name"] for path in records}

    def statuses(self) -> dict[int, set[str]]:
        """Statuses of the records by number of tokens."""
        found: dict[int, set[str]] = {}
        for record in read_records(self.results / "records"):
            found.setdefault(record.point.setting.size("n_tokens"), set()).add(record.status)
        return found


def wait_for(condition, what: str, patience: float = 60.0) -> None:
    """Fail where `condition` does not come true."""
    end = time.time() + patience
    while not condition():
        assert time.time() < end, f"waited in vain for {what}"
        time.sleep(0.2)


def test_killed_while_jobs_run_then_nothing_is_submitted_twice(slurm, jobs, repository, tmp_path):
    first = Run(repository, tmp_path, steer="sleep=6")
    wait_for(lambda: len(list(first.results.glob("jobs/iteration-*/*_log.out"))) == 2, "two running jobs")
    names = first.job_names()
    first.signal_all(signal.SIGKILL)
    assert {state for name in names for state in jobs(name)} == {"RUNNING"}
    again = Run(repository, tmp_path)
    code, text = again.end()
    assert code == 0, text
    assert text.count("attached to job") == 2
    assert [jobs(name) for name in names] == [["COMPLETED"]] * 2
    assert again.statuses() == {size: {"ok"} for size in (32, 64, 96, 128)}
    assert (again.results / "tables" / "iteration.csv").is_file()


def test_ctrl_c_leaves_no_job_behind(slurm, jobs, repository, tmp_path):
    run = Run(repository, tmp_path, steer="hang=32 sleep=60")
    wait_for(lambda: list(run.results.glob("jobs/iteration-*/*_log.out")), "a running job")
    run.signal_all(signal.SIGINT)
    assert run.process.returncode != 0 and "cancelling job" in run.log.read_text()
    wait_for(lambda: not jobs("iteration-", "PENDING", "RUNNING", "COMPLETING"), "an empty queue")


def test_a_job_that_dies_is_recorded_and_the_other_goes_on(slurm, repository, tmp_path):
    run = Run(repository, tmp_path, steer="die=64", target="measure")
    code, text = run.end()
    assert code == 1 and "ended by SIGKILL" in text
    assert run.statuses() == {32: {"ok"}, 64: {"error"}, 96: {"ok"}, 128: {"ok"}}
    assert len(list(run.results.glob("batches/iteration/*.json"))) == 1


def test_the_demo_size_sweep_with_the_real_model(slurm, repository, tmp_path):
    """As `make demo` does it, but on SLURM and sooner done: one structure, one timed step, no torch.compile."""
    settings = ["contenders=[eager,megafold]", "visits=1", "repeats=1"]
    sample = materialize(load_data_section({"sample": True, "folder": str(repository / "data")}, "here.yaml"))
    (structure,) = sample.mmcif.rglob("1ubq*.cif*")
    (tmp_path / "ubiquitin.yaml").write_text(f"data: {{mmcif: {structure}}}\n")
    run = Run(repository, tmp_path, f"settings={' '.join(settings)}", "data=ubiquitin.yaml")
    code, text = run.end(400)
    assert code == 0, text
    wanted = load_sweep("iteration", size="demo", settings=settings)
    records = read_records(run.results / "records")
    assert len(records) == sum(len(entry.points) for entry in wanted.comparisons)
    assert {record.status for record in records} == {"ok"}
    assert all(record.provenance["slurm_job_id"] for record in records)
