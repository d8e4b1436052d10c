"""How a job ended, and how that is told: one line, one exit code, one JSON object."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

# status -> exit code of the launcher; "failed" passes the command's own code on where it has one
EXIT_CODES = {"ok": 0, "failed": 1, "cancelled": 130, "timeout": 124, "oom": 137, "node_failure": 75}
# what SLURM calls the end of a job
ENDED = {
    "COMPLETED": "ok",
    "FAILED": "failed",
    "CANCELLED": "cancelled",
    "REVOKED": "cancelled",
    "TIMEOUT": "timeout",
    "DEADLINE": "timeout",
    "OUT_OF_MEMORY": "oom",
    "NODE_FAIL": "node_failure",
    "BOOT_FAIL": "node_failure",
    "PREEMPTED": "node_failure",
}
# what slurmstepd, srun and submitit (and nobody else: "CUDA out of memory" is another matter) write into a job's log
# where the job's state says only FAILED or CANCELLED
MARKS = tuple(
    (status, re.compile(rf"^(slurmstepd\S*|srun|submitit\.core\S*): .*({words})", re.I | re.M))
    for status, words in (
        ("oom", r"oom[-_ ]kill|Out Of Memory|exceeded (job|step|memory) (memory )?limit"),
        # SIGUSR2 announces the limit, and SLURM may send it up to a minute early: before the task can take it
        ("timeout", r"CANCELLED AT .* DUE TO TIME LIMIT|task.*: User defined signal 2|not requeued because: timed-out"),
        ("node_failure", r"DUE TO NODE FAILURE|Node failure on"),
    )
)


@dataclass(frozen=True)
class Outcome:
    """`status`: a key of EXIT_CODES; `reason`: one line; `exit_code`: the command's own, None where it has none."""

    name: str
    job_id: str
    status: str
    reason: str
    log: str
    exit_code: int | None = None
    started: str = ""
    ended: str = ""
    host: str = ""

    @property
    def code(self) -> int:
        """Exit code of the launcher."""
        if self.status == "failed" and self.exit_code is not None and 0 < self.exit_code < 124:
            return self.exit_code
        return EXIT_CODES[self.status]

    @property
    def line(self) -> str:
        """The one line for the user, after the name."""
        if self.status == "ok":
            return f"job {self.job_id} finished"
        where = f"job {self.job_id}: " if self.job_id else ""
        return f"{where}{self.status}: {self.reason}; log: {self.log}"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def settle(name: str, job_id: str, state: str, results: list[dict[str, Any]], tasks: int, folder: Path) -> Outcome:
    """Bring together what is known about a job that ended.

    Args:
        state: the scheduler's word for it; "" where it forgot the job.
        results: what the job's tasks wrote down (cluster.payload), in the order of their ranks.
        tasks: how many of them there should be.
    """
    bad = next((result for result in results if result["status"] != "ok"), None)
    rank = results.index(bad) if bad else 0
    log = folder / f"{job_id}_{rank}_log.err"
    shown = bad or (results[0] if results else {})
    facts = {key: str(shown.get(key, "")) for key in ("started", "ended", "host")}
    known = {"name": name, "job_id": job_id, "log": str(log), "exit_code": shown.get("exit_code"), **facts}
    if bad is None and len(results) == tasks and state in ("", "COMPLETED", "FINISHED"):
        return Outcome(status="ok", reason="", **known)
    text = read_tail(log)
    marked = next((status for status, mark in MARKS if mark.search(text)), None)
    status = ENDED.get(state, "failed")
    if bad is not None and status in ("ok", "failed"):
        status = bad["status"]
    if status in ("ok", "failed", "cancelled") and marked:
        status = marked
    if status == "ok":  # it completed, but tasks left nothing behind
        status = "failed"
    return Outcome(status=status, reason=_reason(status, state, bad, text), **known)


def _reason(status: str, state: str, bad: dict[str, Any] | None, text: str) -> str:
    if status == "timeout":
        return "the time limit of the job ended it"
    if status == "oom":
        return "the host's memory, or the job's share of it, ran out"
    if status == "node_failure":
        return f"the node failed ({state or 'said the log'})"
    if status == "cancelled":
        return "it was cancelled from outside"
    how = bad["reason"] if bad else f"the job ended without a result (state {state or 'unknown to the scheduler'})"
    lines = [line.strip() for line in text.splitlines() if line.strip() and "submitit" not in line]
    return f"{how}; last line of the log: {lines[-1][:200]}" if lines else how


def read_tail(path: Path, size: int = 20_000) -> str:
    """The last `size` bytes of a log; "" where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(0, path.stat().st_size - size))
            return stream.read().decode(errors="replace")
    except OSError:
        return ""
