"""The launcher on a real SLURM: two nodes of a throw-away cluster on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytestmark = pytest.mark.slurm


class Launched:
    """A driver in a process of its own, with what it told."""

    def __init__(self, name: str, folder: Path, *command: str, options: tuple[str, ...] = (), env=None):
        self.folder = folder / name
        self.log = folder / f"{name}.driver"
        self.name = f"{name}-{folder.name}"
        arguments = [
            "--site",
            "slurm-test",
            "--name",
            self.name,
            "--folder",
            str(self.folder),
            *options,
            "--",
            *command,
        ]
        with self.log.open("a") as stream:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "cluster.launcher", *arguments], stderr=stream, env={**os.environ, **(env or {})}
            )

    def end(self, patience: float = 120) -> tuple[int, str]:
        """Exit code, and everything that was told."""
        return self.process.wait(patience), self.log.read_text()

    @property
    def record(self) -> dict:
        """job.json."""
        return json.loads((self.folder / "job.json").read_text())


@pytest.fixture(scope="module")
def limits(slurm, tmp_path_factory):
    """Two slow ends, started before the other tests and looked at after them: the time limit, and too much memory."""
    folder = tmp_path_factory.mktemp("limits")
    hungry = "import time; filled = bytearray(7 * 10**9); time.sleep(60)"
    return {
        "timeout": Launched("timeout", folder, "sleep", "300", options=("--time", "00:01:00")),
        "oom": Launched("oom", folder, sys.executable, "-c", hungry),
    }


def wait_for(condition, what: str, patience: float = 40.0) -> None:
    """Fail where `condition` does not come true."""
    end = time.time() + patience
    while not condition():
        assert time.time() < end, f"waited in vain for {what}"
        time.sleep(0.1)


def counting(folder: Path, seconds: float) -> list[str]:
    """A command that leaves one line for each time it was started."""
    return ["bash", "-c", f"echo start >> {folder}/starts; sleep {seconds}"]


def lines(path: Path) -> list[str]:
    """The lines of a file that may not exist yet."""
    return path.read_text().splitlines() if path.exists() else []


def test_two_nodes_and_their_ranks(limits, tmp_path):
    script = f'echo "$RANK $WORLD_SIZE $MASTER_ADDR $SLURMD_NODENAME $OMP_NUM_THREADS" > {tmp_path}/rank$SLURM_PROCID'
    code, text = Launched("a", tmp_path, "bash", "-c", script, options=("--nodes", "2", "--tasks", "2")).end()
    assert code == 0, text
    found = [lines(tmp_path / f"rank{rank}")[0].split() for rank in range(2)]
    assert [entry[:2] for entry in found] == [["0", "2"], ["1", "2"]]
    assert found[0][2] == found[1][2] and {found[0][3], found[1][3]} == {"n1", "n2"}
    assert found[0][4] == "1"


def test_a_job_that_dies_is_one_line(limits, tmp_path):
    code, text = Launched("a", tmp_path, "bash", "-c", "echo no such luck >&2; kill -SEGV $$").end()
    told = [line for line in text.splitlines() if ": failed: " in line]
    assert code == 1 and len(told) == 1
    assert "ended by SIGSEGV" in told[0] and "no such luck" in told[0]
    assert Path(told[0].rpartition("log: ")[2]).is_file()


def test_killed_driver_then_attach_without_a_second_job(limits, jobs, tmp_path):
    command = counting(tmp_path, 6)
    first = Launched("a", tmp_path, *command)
    wait_for(lambda: lines(tmp_path / "starts"), "the job's start")
    first.process.kill()
    first.process.wait()
    again = Launched("a", tmp_path, *command)
    code, text = again.end()
    assert code == 0 and f"attached to job {again.record['job_id']} (running)" in text
    assert jobs(again.name) == ["COMPLETED"] and lines(tmp_path / "starts") == ["start"]


def test_death_between_sbatch_and_the_record(limits, jobs, tmp_path):
    """sbatch answered, and the driver dies before it could write the id, or give the job its pickle."""
    command = counting(tmp_path, 1)
    crash = (
        "import os, sys; from cluster import launcher; from submitit.slurm.slurm import SlurmExecutor\n"
        "SlurmExecutor._get_job_id_from_submission_command = staticmethod(lambda answer: os._exit(9))\n"
        "launcher.main(sys.argv[1:])"
    )
    name = f"a-{tmp_path.name}"
    arguments = ["--site", "slurm-test", "--name", name, "--folder", str(tmp_path / "a"), "--", *command]
    assert subprocess.run([sys.executable, "-c", crash, *arguments], timeout=60).returncode == 9
    assert json.loads((tmp_path / "a" / "job.json").read_text())["job_id"] is None
    code, text = Launched("a", tmp_path, *command).end()
    assert code == 0 and "attached to job" in text
    assert jobs(name) == ["COMPLETED"] and lines(tmp_path / "starts") == ["start"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_a_signal_cancels_the_job(limits, jobs, tmp_path, number):
    launched = Launched("a", tmp_path, *counting(tmp_path, 300))
    wait_for(lambda: lines(tmp_path / "starts"), "the job's start")
    launched.process.send_signal(number)
    code, text = launched.end()
    assert code == 128 + number and "cancelling job" in text
    wait_for(lambda: jobs(launched.name) == ["CANCELLED"], "the job's end")


def test_a_job_cancelled_from_outside_is_told(limits, tmp_path):
    launched = Launched("a", tmp_path, *counting(tmp_path, 300))
    wait_for(lambda: lines(tmp_path / "starts"), "the job's start")
    subprocess.run(["timeout", "20", "scancel", launched.record["job_id"]], check=True)
    code, text = launched.end()
    assert code == 130 and "cancelled: it was cancelled from outside" in text


def test_a_hopeless_refusal_names_its_cause(limits, jobs, tmp_path):
    launched = Launched("a", tmp_path, "true", env={"SBATCH_PARTITION": "nowhere"})
    code, text = launched.end()
    assert code == 1 and "invalid partition specified: nowhere" in text.splitlines()[-1]
    assert jobs(launched.name) == []


def test_a_refusal_that_may_pass_is_tried_again(limits, tmp_path):
    def partition(state: str) -> None:
        subprocess.run(["timeout", "20", "scontrol", "update", "PartitionName=batch", f"State={state}"], check=True)

    partition("INACTIVE")
    try:
        launched = Launched("a", tmp_path, "true")
        wait_for(lambda: "refused" in launched.log.read_text(), "the refusal")
    finally:
        partition("UP")
    code, text = launched.end()
    assert code == 0, text
    assert "attempt 2 of 4" in text and "finished" in text


def test_time_limit(limits):
    code, text = limits["timeout"].end()
    assert code == 124 and "timeout: the time limit of the job ended it; log: /" in text


def test_out_of_memory(limits):
    code, text = limits["oom"].end()
    assert code == 137 and "oom: the host's memory, or the job's share of it, ran out; log: /" in text


def test_a_job_on_a_node_that_fails_runs_again_on_another(limits, jobs, tmp_path):
    """SLURM requeues it; the driver just goes on waiting."""
    script = f"echo $SLURMD_NODENAME >> {tmp_path}/nodes; sleep 4"
    launched = Launched("a", tmp_path, "bash", "-c", script)
    wait_for(lambda: lines(tmp_path / "nodes"), "the job's start")
    (node,) = lines(tmp_path / "nodes")
    update = ["timeout", "20", "scontrol", "update"]
    subprocess.run([*update, f"NodeName={node}", "State=DOWN", "Reason=test"], check=True)
    wait_for(lambda: jobs(launched.name) == ["PENDING"], "the job's return to the queue")
    # SLURM lets it wait for two minutes
    subprocess.run([*update, f"JobId={launched.record['job_id']}", "StartTime=now"], check=True)
    code, text = launched.end()
    subprocess.run([*update, f"NodeName={node}", "State=RESUME"], check=True)
    assert code == 0, text
    assert len(lines(tmp_path / "nodes")) == 2 and lines(tmp_path / "nodes")[1] != node
