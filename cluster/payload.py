"""What runs inside a job: one command line, its environment, and a note of how it ended. Pickled by reference."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

GRACE_S = 0.7  # submitit's local controller kills a second after it asked


def run_command(
    command: Sequence[str],
    folder: str,
    environment: Mapping[str, str | None],
    node_local: Mapping[str, str],
) -> int:
    """Run a command in every task of a job and write <folder>/<job id>_<rank>_end.json.

    Args:
        command: program and arguments; its output goes to the job's log.
        folder: where the note goes (shared between nodes).
        environment: variables to set; None removes one.
        node_local: variables that name folders on this node, created here; ${NAME} is expanded.

    Returns:
        the command's exit code, negative for a signal.
    """
    job_id, rank, local_rank, tasks, head = _place()
    note = Path(folder) / f"{job_id}_{rank}_end.json"
    note.unlink(missing_ok=True)  # of an earlier run of a job that was requeued
    env = _environment(environment, node_local)
    if tasks > 1:
        env |= {"RANK": str(rank), "LOCAL_RANK": str(local_rank), "WORLD_SIZE": str(tasks)}
        env.setdefault("MASTER_ADDR", head)
        env.setdefault("MASTER_PORT", str(20000 + int(job_id) % 20000))
    result: dict[str, Any] = {"started": _now(), "host": os.uname().nodename, "command": list(command)}
    kills = _oom_kills()
    sys.stdout.flush()
    child = subprocess.Popen(list(command), env=env, start_new_session=True)
    try:
        code = child.wait()
    except BaseException as error:  # time limit, cancellation, requeue: all arrive as exceptions
        _stop(child)
        if isinstance(error, SystemExit):  # requeued: it will run again
            raise
        limit = type(error).__name__ == "UncompletedJobError"
        status = "timeout" if limit else "cancelled"
        _write(note, {**result, "ended": _now(), "status": status, "exit_code": None, "reason": status})
        raise
    if code == 0:
        status, reason = "ok", ""
    elif code == -signal.SIGUSR2:  # the scheduler's notice of the time limit reached the command first
        status = reason = "timeout"
    elif code < 0:
        status = "oom" if -code == signal.SIGKILL and _oom_kills() > kills else "failed"
        reason = f"the command was ended by {signal.Signals(-code).name}"
    else:
        status, reason = "failed", f"the command ended with exit code {code}"
    _write(note, {**result, "ended": _now(), "status": status, "exit_code": code, "reason": reason})
    return code


def read_ends(folder: Path, job_id: str) -> list[dict[str, Any]]:
    """The notes of a job's tasks, in the order of their ranks."""
    paths = sorted(folder.glob(f"{job_id}_*_end.json"), key=lambda path: int(path.name.split("_")[1]))
    return [json.loads(path.read_text()) for path in paths]


def _place() -> tuple[str, int, int, int, str]:
    from submitit import JobEnvironment

    job = JobEnvironment()
    return job.job_id, job.global_rank, job.local_rank, job.num_tasks, job.hostnames[0]


def _environment(environment: Mapping[str, str | None], node_local: Mapping[str, str]) -> dict[str, str]:
    env = dict(os.environ)
    for name, value in environment.items():
        if value is None:
            env.pop(name, None)
        else:
            env[name] = os.path.expandvars(value)
    for name, folder in node_local.items():
        env[name] = os.path.expandvars(folder)
        Path(env[name]).mkdir(parents=True, exist_ok=True)
    return env


def _stop(child: subprocess.Popen) -> None:
    for number, patience in ((signal.SIGTERM, GRACE_S), (signal.SIGKILL, 5.0)):
        try:
            os.killpg(child.pid, number)
            child.wait(patience)
        except ProcessLookupError:
            return
        except subprocess.TimeoutExpired:
            continue
    # the command is gone; what it started may have outlived it
    try:
        os.killpg(child.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        return


def _oom_kills() -> int:
    """Processes that the kernel killed for memory in this process's cgroup so far; 0 where that is not told."""
    try:
        entries = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0
    for entry in entries:
        _, controllers, path = entry.split(":", 2)
        base = Path("/sys/fs/cgroup") / "memory" if controllers == "memory" else Path("/sys/fs/cgroup")
        if controllers not in ("", "memory"):
            continue
        for folder in (base / path.lstrip("/"), base):
            for name in ("memory.events", "memory.oom_control"):
                try:
                    lines = (folder / name).read_text().splitlines()
                except OSError:
                    continue
                found = [int(line.split()[1]) for line in lines if line.startswith("oom_kill ")]
                if found:
                    return found[0]
    return 0


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")


def _write(path: Path, content: Mapping[str, Any]) -> None:
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
