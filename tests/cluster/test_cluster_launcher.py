"""The launcher with submitit's local executor: real jobs, and drivers that are killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cluster.launcher import launch
from cluster.site import load_site
from megafold.errors import InputError


def driver(folder: Path, *command: str, options: tuple[str, ...] = (), **kwargs) -> subprocess.Popen:
    """A launcher in a process of its own."""
    arguments = ["--site", "local", "--name", "job", "--folder", str(folder), *options, "--", *command]
    return subprocess.Popen([sys.executable, "-m", "cluster.launcher", *arguments], text=True, **kwargs)


def run(folder: Path, *command: str, **kwargs) -> tuple[int, str]:
    """Exit code and what the user saw."""
    process = driver(folder, *command, stderr=subprocess.PIPE, **kwargs)
    _, text = process.communicate(timeout=60)
    return process.returncode, text


def wait_for(condition, what: str, patience: float = 30.0) -> None:
    """Fail where `condition` does not come true."""
    end = time.time() + patience
    while not condition():
        assert time.time() < end, f"waited in vain for {what}"
        time.sleep(0.05)


def alive(pid: str) -> bool:
    """Whether the process runs (a zombie does not)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def counting(tmp_path: Path, seconds: float) -> list[str]:
    """A command that leaves one line for each time it was started, and one when it got to its end."""
    script = f"echo $$ >> {tmp_path}/starts; sleep {seconds}; echo done >> {tmp_path}/ends"
    return ["bash", "-c", script]


def lines(path: Path) -> list[str]:
    """The lines of a file that may not exist yet."""
    return path.read_text().splitlines() if path.exists() else []


def test_success_tells_progress_and_leaves_an_outcome(tmp_path):
    code, text = run(tmp_path / "a", "bash", "-c", "echo step 1 of 1")
    assert code == 0
    assert "job: | step 1 of 1" in text and "finished" in text and "Traceback" not in text
    outcome = json.loads((tmp_path / "a" / "job.json").read_text())["outcome"]
    assert (outcome["status"], outcome["exit_code"]) == ("ok", 0)
    assert outcome["started"] and outcome["host"]


def test_failure_is_one_line_with_the_log_and_the_commands_exit_code(tmp_path):
    code, text = run(tmp_path / "a", "bash", "-c", "echo no such luck >&2; exit 3")
    assert code == 3
    told = [line for line in text.splitlines() if "failed" in line]
    assert len(told) == 1 and "exit code 3" in told[0] and "no such luck" in told[0]
    assert Path(told[0].rpartition("log: ")[2]).is_file()


def test_a_job_that_kills_itself_is_told(tmp_path):
    code, text = run(tmp_path / "a", "bash", "-c", "kill -SEGV $$")
    assert code == 1 and "ended by SIGSEGV" in text


def test_time_limit(tmp_path):
    command = counting(tmp_path, 30)
    code, text = run(tmp_path / "a", *command, options=("--time", "00:00:03"))
    assert code == 124 and "timeout: the time limit of the job ended it" in text
    assert not lines(tmp_path / "ends")
    assert not alive(lines(tmp_path / "starts")[0])


def test_notice_of_the_time_limit_that_reaches_the_command(tmp_path):
    """The scheduler's SIGUSR2 may hit the command before its parent saw it."""
    code, text = run(tmp_path / "a", "bash", "-c", "kill -USR2 $$")
    assert code == 124 and "timeout: the time limit of the job ended it" in text


def test_the_job_sees_the_drivers_gpus(tmp_path, monkeypatch):
    command = ("bash", "-c", 'test "$CUDA_VISIBLE_DEVICES" = 1')
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert run(tmp_path / "a", *command)[0] == 0
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert run(tmp_path / "b", "bash", "-c", 'test -z "${CUDA_VISIBLE_DEVICES+set}"')[0] == 0


def test_ranks_of_several_tasks(tmp_path):
    code, _ = run(
        tmp_path / "a", "bash", "-c", f'echo "$RANK/$WORLD_SIZE" > {tmp_path}/rank$LOCAL_RANK', options=("--tasks", "2")
    )
    assert code == 0
    assert [lines(tmp_path / f"rank{rank}") for rank in range(2)] == [["0/2"], ["1/2"]]


def test_one_failing_task_fails_the_job(tmp_path):
    code, text = run(tmp_path / "a", "bash", "-c", "exit $((5 * RANK))", options=("--tasks", "2"))
    assert code == 5 and "_1_log.err" in text


def test_a_killed_driver_is_succeeded_by_one_that_attaches(tmp_path):
    command = counting(tmp_path, 4)
    first = driver(tmp_path / "a", *command)
    wait_for(lambda: lines(tmp_path / "starts"), "the start of the job")
    first.kill()
    first.wait()
    code, text = run(tmp_path / "a", *command)
    assert code == 0 and "attached to job" in text
    assert len(lines(tmp_path / "starts")) == len(lines(tmp_path / "ends")) == 1


def test_a_job_that_ended_unseen_is_collected_and_not_run_again(tmp_path):
    command = counting(tmp_path, 1)
    first = driver(tmp_path / "a", *command)
    wait_for(lambda: lines(tmp_path / "starts"), "the start of the job")
    first.kill()
    first.wait()
    wait_for(lambda: list((tmp_path / "a").glob("*_end.json")), "the end of the job")
    code, _ = run(tmp_path / "a", *command)
    assert code == 0 and len(lines(tmp_path / "starts")) == 1


def test_death_between_submission_and_its_record(tmp_path):
    """The driver dies when the controller runs, the pickle has no name yet, and job.json has no id."""
    folder, command = tmp_path / "a", counting(tmp_path, 3)
    crash = (
        "import os, sys; from cluster import launcher; from submitit.core.utils import JobPaths\n"
        "JobPaths.move_temporary_file = lambda *a, **k: os._exit(9)\n"
        "launcher.main(sys.argv[1:])"
    )
    arguments = ["--site", "local", "--name", "job", "--folder", str(folder), "--", *command]
    assert subprocess.run([sys.executable, "-c", crash, *arguments], timeout=60).returncode == 9
    assert json.loads((folder / "job.json").read_text())["job_id"] is None
    code, text = run(folder, *command)
    assert code == 0 and "attached to job" in text
    assert len(lines(tmp_path / "starts")) == 1


def test_a_second_driver_waits_for_the_first(tmp_path):
    command = counting(tmp_path, 3)
    first = driver(tmp_path / "a", *command)
    wait_for(lambda: lines(tmp_path / "starts"), "the start of the job")
    second = driver(tmp_path / "a", "true", stderr=subprocess.PIPE)
    _, text = second.communicate(timeout=60)
    assert first.wait() == 0 and second.returncode == 0
    assert "another driver holds this job" in text
    assert lines(tmp_path / "ends") == ["done"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["ctrl-c", "term"])
def test_a_signal_cancels_the_job(tmp_path, number):
    process = driver(tmp_path / "a", *counting(tmp_path, 60), stderr=subprocess.PIPE)
    wait_for(lambda: lines(tmp_path / "starts"), "the start of the job")
    process.send_signal(number)
    _, text = process.communicate(timeout=30)
    assert process.returncode == 128 + number and "cancelling job" in text and "Traceback" not in text
    pid = lines(tmp_path / "starts")[0]
    wait_for(lambda: not alive(pid), "the end of the job's command", 10)
    assert json.loads((tmp_path / "a" / "job.json").read_text())["outcome"]["status"] == "cancelled"


@pytest.mark.parametrize("fault", ["program", "interpreter"])
def test_nothing_is_submitted_for_a_command_that_does_not_exist(tmp_path, fault):
    program = tmp_path / "megafold"
    if fault == "interpreter":
        program.write_text("#!/nowhere/bin/python\n")
        program.chmod(0o755)
    code, text = run(tmp_path / "a", str(program))
    assert code == 2 and len(text.splitlines()) == 1
    assert text.startswith("error: command: ") and "nothing was submitted" in text
    assert not (tmp_path / "a").exists()


def test_site_that_is_not_filled_in_submits_nothing(tmp_path, monkeypatch):
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    with pytest.raises(InputError, match="account: is not set"):
        launch(load_site("frontier"), "job", tmp_path / "a", ["true"])
    assert not (tmp_path / "a").exists()


def test_bad_time_option(tmp_path):
    code, text = run(tmp_path / "a", "true", options=("--time", "5"))
    assert code == 2 and text.startswith("error: --time: is '5'; wanted")


def test_signal_handlers_are_put_back(tmp_path):
    before = signal.getsignal(signal.SIGTERM)
    outcome = launch(load_site("local"), "job", tmp_path / "a", ["true"], note=lambda line: None)
    assert outcome.status == "ok" and signal.getsignal(signal.SIGTERM) is before
    assert os.path.isabs(outcome.log)
