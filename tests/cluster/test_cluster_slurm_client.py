"""SLURM's commands replaced by small programs: shared queries, refusals, lost answers. The real one: tests/slurm."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from pathlib import Path

import pytest

from cluster import driver
from cluster.executors import Request, Slurm
from cluster.launcher import launch
from cluster.outcome import settle
from cluster.site import load_site
from cluster.slurm import Queue, Refused, Silent

SITE = dataclasses.replace(load_site("slurm-test"), poll=0.05, submit_wait=0.05, max_queued_jobs=2)


@pytest.fixture
def clients(tmp_path, monkeypatch):
    """Installs a program under a name of SLURM's; each call is noted in <name>.calls."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def install(name: str, script: str) -> Path:
        calls = tmp_path / f"{name}.calls"
        (folder / name).write_text(f'#!/bin/bash\necho "$*" >> {calls}\n{script}\n')
        (folder / name).chmod(0o755)
        return calls

    for name in ("squeue", "sbatch", "scancel", "sacct", "scontrol"):
        install(name, "exit 1")
    install("srun", "exit 0")
    return install


def request(tmp_path: Path) -> Request:
    folder = tmp_path / "jobs" / "a"
    folder.mkdir(parents=True, exist_ok=True)
    return Request("a", "a-1234", folder, ("true",), 1, 1, 5)


def calls(path: Path) -> list[str]:
    return path.read_text().splitlines() if path.exists() else []


def test_one_query_serves_all_jobs_and_drivers(tmp_path, clients):
    noted = clients("squeue", "printf '7|RUNNING|x-1|None\\n8|PENDING|y-2|Resources\\n'")
    site = dataclasses.replace(SITE, poll=30)
    (tmp_path / "state").mkdir()
    for _ in range(3):
        queue = Queue(site, tmp_path / "state")
        assert queue.find("7", submitted=1.0).state == "RUNNING"
        assert queue.find("8", submitted=1.0).why == "Resources"
    assert len(calls(noted)) == 1
    queue.find("7", submitted=time.time() + 0.0)  # a job that is younger than the answer needs a new one
    assert len(calls(noted)) == 2


@pytest.mark.parametrize(
    ("sacct", "scontrol", "wanted"),
    [
        ("echo 'TIMEOUT'", "exit 1", "TIMEOUT"),
        ("echo 'CANCELLED by 0'", "exit 1", "CANCELLED"),
        (
            "echo 'Slurm accounting storage is disabled' >&2; exit 1",
            "echo 'JobId=7 JobState=NODE_FAIL A=b'",
            "NODE_FAIL",
        ),
        ("exit 1", "echo 'slurm_load_jobs error: Invalid job id specified' >&2; exit 1", ""),
    ],
    ids=["sacct", "sacct-with-user", "scontrol", "forgotten"],
)
def test_a_job_that_left_the_queue_is_looked_up(tmp_path, clients, sacct, scontrol, wanted):
    clients("squeue", "exit 0")
    clients("sacct", sacct)
    clients("scontrol", scontrol)
    assert Queue(SITE, tmp_path).find("7", submitted=1.0).state == wanted


def test_no_answer_is_not_an_empty_queue(tmp_path, clients):
    with pytest.raises(Silent):
        Queue(SITE, tmp_path).jobs(since=time.time())
    with pytest.raises(Silent):
        Slurm(SITE, tmp_path).recover(request(tmp_path), [])


def test_the_sites_limit_on_queued_jobs_is_kept(tmp_path, clients):
    listing = tmp_path / "listing"
    listing.write_text("1|RUNNING|x|None\n2|PENDING|y|Priority\n3|COMPLETED|z|None\n")
    clients("squeue", f"cat {listing}")
    told: list[str] = []

    def note(line: str) -> None:
        told.append(line)
        listing.write_text("1|COMPLETED|x|None\n2|RUNNING|y|None\n")

    with Slurm(SITE, tmp_path).slot(request(tmp_path), note):
        pass
    assert told == ["waits: 2 jobs are queued, and the site's limit is 2"]


def test_a_refused_job_is_tried_again(tmp_path, clients):
    clients("squeue", f"grep -q x {tmp_path}/second 2>/dev/null && echo '5|COMPLETED|whatever|None'; exit 0")
    script = f"if [ -e {tmp_path}/second ]; then echo 'Submitted batch job 5'; else echo x > {tmp_path}/second; "
    noted = clients("sbatch", script + "echo 'sbatch: error: QOSMaxSubmitJobPerUserLimit' >&2; exit 1; fi")
    told: list[str] = []
    outcome = launch(SITE, "a", tmp_path / "jobs" / "a", ["true"], note=told.append)
    assert len(calls(noted)) == 2
    assert any("refused (sbatch: error: QOSMaxSubmitJobPerUserLimit); attempt 2 of 4" in line for line in told)
    assert outcome.job_id == "5" and "submitted job 5" in " ".join(told)


def test_a_hopeless_refusal_ends_at_once_and_the_next_run_may_submit(tmp_path, clients):
    clients("squeue", "exit 0")
    noted = clients("sbatch", "echo 'sbatch: error: Batch job submission failed: Invalid account' >&2; exit 1")
    for attempt in (1, 2):
        outcome = launch(SITE, "a", tmp_path / "jobs" / "a", ["true"], note=lambda line: None)
        assert (outcome.status, outcome.code) == ("failed", 1)
        assert "refused by the scheduler: sbatch: error" in outcome.reason and "Invalid account" in outcome.reason
        assert len(calls(noted)) == attempt


def test_an_answer_of_sbatch_that_got_lost_leads_to_no_second_job(tmp_path, clients):
    folder = tmp_path / "jobs" / "a"
    noted = clients("sbatch", "echo 'sbatch: error: Socket timed out on send/recv operation' >&2; exit 1")
    # the controller took the job all the same
    name = "$(sed -n 's/.*job-name=//p' " + str(folder) + "/.submission_file_*.sh 2>/dev/null)"
    clients("squeue", f'[ -e {noted} ] && echo "5|COMPLETED|{name}|None"; exit 0')
    outcome = launch(SITE, "a", folder, ["true"], note=lambda line: None)
    assert outcome.job_id == "5" and len(calls(noted)) == 1
    assert (folder / "5_submitted.pkl").exists(), "the job would wait for its pickle in vain"


def test_a_job_that_slurm_holds_for_ever_is_given_up(tmp_path, clients):
    clients("sbatch", "echo 'Submitted batch job 5'")
    listing = tmp_path / "listing"
    listing.write_text("")
    clients("squeue", f"cat {listing}; echo '5|PENDING|a|launch failed requeued held' > {listing}")
    cancelled = clients("scancel", "exit 0")
    outcome = launch(SITE, "a", tmp_path / "jobs" / "a", ["true"], note=lambda line: None)
    assert outcome.status == "node_failure" and "5" in calls(cancelled)


def test_sbatch_gets_the_sites_facts(tmp_path, clients, monkeypatch):
    """Frontier's flags and nothing of the allocation that the driver itself runs in."""
    clients("squeue", "exit 0")
    clients("sbatch", f"cp $1 {tmp_path}/script; env > {tmp_path}/env; echo 'Submitted batch job 5'")
    monkeypatch.setenv("SLURM_JOB_ID", "99")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    site = dataclasses.replace(load_site("frontier"), account="abc123")
    wanted = dataclasses.replace(request(tmp_path), nodes=2, tasks=16, minutes=120)
    assert Slurm(site, tmp_path).submit(wanted) == "5"
    script = (tmp_path / "script").read_text()
    for flag in ("account=abc123", "partition=batch", "nodes=2", "ntasks-per-node=8", "cpus-per-task=7", "time=120"):
        assert f"#SBATCH --{flag}" in script
    assert "gpus-per-node" not in script and "#SBATCH --qos" not in script
    srun = next(line for line in script.splitlines() if line.startswith("srun"))
    for flag in ("-c 7", "--network=disable_rdzv_get", "--gpus-per-task=1", "--gpu-bind=closest"):
        assert flag in srun
    assert script.index("module load rocm") < script.index("MASTER_ADDR") < script.index("srun --")
    assert os.environ["SLURM_JOB_ID"] == "99"
    inherited = (tmp_path / "env").read_text()
    assert "SLURM_JOB_ID" not in inherited and "SLURM_CONF=/etc/slurm.conf" in inherited


def test_refused_knows_what_is_hopeless():
    assert Refused("sbatch: error: Batch job submission failed: Invalid qos specification").hopeless
    assert Refused("error: Batch job submission failed: Requested node configuration is not available").hopeless
    for text in ("Socket timed out on send/recv operation", "QOSMaxSubmitJobPerUserLimit", ""):
        assert not Refused(text).hopeless


OK = {"status": "ok", "exit_code": 0, "reason": "", "started": "s", "ended": "e", "host": "h"}
BAD = {**OK, "status": "failed", "exit_code": 3, "reason": "the command ended with exit code 3"}


@pytest.mark.parametrize(
    ("state", "results", "log", "status", "code"),
    [
        ("COMPLETED", [OK], "", "ok", 0),
        ("", [OK], "", "ok", 0),
        ("COMPLETED", [BAD], "boom", "failed", 3),
        ("COMPLETED", [], "", "failed", 1),
        ("", [], "", "failed", 1),
        ("FAILED", [], "slurmstepd: error: Detected 1 oom-kill event(s) in StepId=7.0", "oom", 137),
        ("FAILED", [], "srun: error: n1: task 0: Out Of Memory", "oom", 137),
        ("FAILED", [BAD], "torch.OutOfMemoryError: CUDA out of memory", "failed", 3),
        ("OUT_OF_MEMORY", [], "", "oom", 137),
        ("TIMEOUT", [], "", "timeout", 124),
        (
            "CANCELLED",
            [],
            "slurmstepd: error: *** STEP 7.0 ON n1 CANCELLED AT 2026 DUE TO TIME LIMIT ***",
            "timeout",
            124,
        ),
        # the signal before the limit came while the task still started, or before it had its command
        ("FAILED", [], "srun: error: n1: task 0: User defined signal 2", "timeout", 124),
        (
            "FAILED",
            [],
            "submitit.core.utils.UncompletedJobError: Job not requeued because: timed-out and not checkpointable.",
            "timeout",
            124,
        ),
        ("CANCELLED", [], "", "cancelled", 130),
        ("NODE_FAIL", [OK], "", "node_failure", 75),
        (
            "FAILED",
            [],
            "slurmstepd: error: *** JOB 7 ON n1 CANCELLED AT 2026 DUE TO NODE FAILURE ***",
            "node_failure",
            75,
        ),
        ("FAILED", [{**BAD, "status": "timeout", "exit_code": None}], "", "timeout", 124),
    ],
)
def test_how_a_job_ended(tmp_path, state, results, log, status, code):
    (tmp_path / "7_0_log.err").write_text(log)
    outcome = settle("a", "7", state, results, 1, tmp_path)
    assert (outcome.status, outcome.code) == (status, code)
    assert "\n" not in outcome.line and (status == "ok" or f"log: {tmp_path}/7_0_log.err" in outcome.line)
    assert json.loads(json.dumps(outcome.as_dict()))["status"] == status


@pytest.mark.parametrize("passing", ["NODE_FAIL", "PREEMPTED"])
def test_a_state_that_slurm_takes_back_by_a_requeue_is_not_the_end(tmp_path, monkeypatch, passing):
    """A failed node or a preemption is shown for a moment before the job is in the queue again."""
    answers = iter(["RUNNING", passing, passing, "PENDING", "RUNNING", "COMPLETED"])
    waiting = driver.Driver(load_site("local"), Request("a", "a", tmp_path, ("true",), 1, 1, 60), lambda text: None)
    monkeypatch.setattr(waiting.scheduler, "state", lambda job_id, submitted: (next(answers), ""))
    monkeypatch.setattr(driver.time, "sleep", lambda seconds: None)
    waiting.record["submitted"] = 0.0
    assert waiting._wait("7") == "COMPLETED"


def test_a_node_failure_without_a_requeue_ends_the_wait(tmp_path, monkeypatch):
    waiting = driver.Driver(load_site("local"), Request("a", "a", tmp_path, ("true",), 1, 1, 60), lambda text: None)
    monkeypatch.setattr(waiting.scheduler, "state", lambda job_id, submitted: ("NODE_FAIL", ""))
    monkeypatch.setattr(driver, "REQUEUE_S", 0.2)
    waiting.record["submitted"] = 0.0
    assert waiting._wait("7") == "NODE_FAIL"
