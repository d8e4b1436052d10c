"""SLURM through its client commands: one query for all jobs of a user, shared by every driver of a site."""

from __future__ import annotations

import getpass
import json
import re
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path

from cluster.locks import locked
from cluster.outcome import ENDED
from cluster.site import Site

CLIENT_TIMEOUT_S = 60
# sbatch will say the same the next time
HOPELESS = re.compile(
    r"invalid account|invalid partition|invalid qos|invalid feature|node configuration is not available|"
    r"time limit.*(invalid|exceed)|unrecognized option|invalid option|node count specification invalid|"
    r"account/partition combination|more processors requested than permitted|memory specification can not be satisfied|"
    r"invalid generic resource",
    re.I,
)


@dataclass(frozen=True)
class Queued:
    """One job as squeue shows it."""

    job_id: str
    state: str
    name: str
    why: str

    @property
    def live(self) -> bool:
        """It waits, runs, or is about to run again."""
        return self.state not in ENDED


class Refused(Exception):
    """sbatch would not take the job; `hopeless` where another attempt cannot help."""

    def __init__(self, problem: str) -> None:
        super().__init__(" ".join(problem.split()) or "sbatch gave no reason")
        self.hopeless = bool(HOPELESS.search(problem))


class Silent(Exception):
    """The scheduler does not answer at the moment; without an answer nothing may be submitted or given up."""


class Queue:
    """The user's jobs. `state` is a folder that all drivers of the site share: squeue runs once an interval for all."""

    def __init__(self, site: Site, state: Path) -> None:
        self.site, self.state = site, state
        self.file = state / "queue.json"

    def jobs(self, since: float) -> list[Queued]:
        """All jobs of the user, ended ones too while SLURM remembers them.

        Args:
            since: a snapshot taken before this time (seconds, epoch) is too old.

        Raises:
            Silent: where the scheduler does not answer at the moment.
        """
        with locked(self.state / "queue.lock"):
            snapshot = self._snapshot()
            if snapshot["taken"] < since:
                now = time.time()
                text = client(
                    "squeue", "--noheader", f"--user={getpass.getuser()}", "--states=all", "-o", "%i|%T|%j|%r"
                )
                if text is None:
                    raise Silent
                snapshot = {"taken": now, "jobs": [line.split("|", 3) for line in text.splitlines() if "|" in line]}
                temporary = self.file.with_suffix(".tmp")
                temporary.write_text(json.dumps(snapshot))
                temporary.replace(self.file)
        return [Queued(*entry[:4]) for entry in snapshot["jobs"]]

    def find(self, job_id: str, submitted: float) -> Queued:
        """The job, from a snapshot that is younger than its submission.

        A job that squeue forgot is looked up in the accounting or, without one, in the controller; its state is ""
        where nobody remembers it.
        """
        for job in self.jobs(since=max(submitted, time.time() - self.site.poll)):
            if job.job_id == job_id:
                return job
        return Queued(job_id, _forgotten(job_id), "", "")

    def cancel(self, name: str, job_id: str | None) -> None:
        """Cancel by id and by the unique name, which also reaches a job whose id never arrived."""
        if job_id:
            client("scancel", job_id)
        client("scancel", f"--user={getpass.getuser()}", f"--name={name}")

    def _snapshot(self) -> dict:
        try:
            return json.loads(self.file.read_text())
        except (OSError, ValueError):
            return {"taken": 0.0, "jobs": []}


def _forgotten(job_id: str) -> str:
    """Final state of a job that left the queue: sacct, else scontrol; "" where neither knows it."""
    text = client("sacct", "--noheader", "--allocations", "--parsable2", "--jobs", job_id, "--format=State")
    if text and text.strip():
        return text.split()[0]
    text = client("scontrol", "--oneliner", "show", "job", job_id) or ""
    found = re.search(r"JobState=(\w+)", text)
    return found[1] if found else ""


def client(*command: str) -> str | None:
    """Output of one of SLURM's commands; None where it fails, is missing, or does not answer in time."""
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=CLIENT_TIMEOUT_S,
            start_new_session=True,  # a Ctrl-C is for us; we then cancel with these commands
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
