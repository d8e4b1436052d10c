"""The life of one job as its driver sees it: attach or submit, wait, settle; and what signals do to that."""

from __future__ import annotations

import contextlib
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from cluster.executors import EXECUTORS, Request, Scheduler, adopt_pickle
from cluster.locks import locked
from cluster.outcome import ENDED, Outcome, settle
from cluster.payload import read_ends
from cluster.site import Site
from cluster.slurm import Refused, Silent

SETTLE_S = 5.0  # shared file systems show the last files of a job late
# SLURM shows these for a moment before it puts the job back into the queue; only where they stay are they the end.
PASSING = ("NODE_FAIL", "BOOT_FAIL", "PREEMPTED")
REQUEUE_S = 15.0
T = TypeVar("T")


class Cancelled(BaseException):
    """The user wants out: SIGINT or SIGTERM arrived, and the job has been cancelled."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


class Driver:
    """Runs one Request at a Site. `job.json` in the folder of the request holds what a later driver must know.

    Its fields: name, site, command, submitted (seconds, epoch), job_id (null between the decision to submit and the
    answer of sbatch), previous (ids of earlier jobs of this folder), outcome (null until the end was seen).
    """

    def __init__(self, site: Site, request: Request, note: Callable[[str], None]) -> None:
        self.site, self.request = site, request
        self.note = lambda text: note(f"{request.label}: {text}")
        self.scheduler: Scheduler = EXECUTORS[site.executor](site, request.folder.parent)
        self.file: Path = request.folder / "job.json"
        self.record: dict[str, Any] = {"name": request.name, "site": site.name, "job_id": None, "previous": []}
        self.signal: int | None = None
        self.shielded = False
        self.shown: dict[Path, int] = {}

    def run(self) -> Outcome:
        """The job's outcome; Cancelled after a signal. Handlers are in place before anything is submitted."""
        before = {number: signal.signal(number, self._interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            waiting = "another driver holds this job; this one goes on when that one ended"
            with locked(self.request.folder / "driver.lock", waiting=lambda: self.note(waiting)):
                return self._run()
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _run(self) -> Outcome:
        try:
            job_id = self._attach() or self._submit()
            state = self._wait(job_id)
            return self._finish(self._settle(job_id, state))
        except Refused as refused:
            reason = f"refused by the scheduler: {refused}"
            return self._finish(Outcome(self.request.label, "", "failed", reason, str(self.request.folder)))
        except Cancelled as cancelled:
            job_id = self.record["job_id"]
            self.note(f"{cancelled}: cancelling job {job_id or '(id not known yet)'}")
            self.scheduler.cancel(self.request, job_id)
            reason = f"cancelled by {cancelled}"
            self._finish(Outcome(self.request.label, job_id or "", "cancelled", reason, str(self.request.folder)))
            raise

    def _attach(self) -> str | None:
        """The id of a job that an earlier driver left waiting or running, or that ended unseen."""
        try:
            record = json.loads(self.file.read_text())
        except (OSError, ValueError):
            return None
        if record["outcome"]:
            self.record["previous"] = [*record["previous"], *([record["job_id"]] if record["job_id"] else [])]
            return None
        previous = record["previous"]
        job_id = record["job_id"] or self._patiently(lambda: self.scheduler.recover(self.request, previous))
        if not job_id:
            self.record["previous"] = previous
            return None
        self.record = {**record, "job_id": job_id}
        self._save()
        adopt_pickle(self.request.folder, job_id)
        state, _ = self._patiently(lambda: self.scheduler.state(job_id, record["submitted"]))
        if state in ("", "FINISHED") and not read_ends(self.request.folder, job_id):
            self.note(f"job {job_id} is gone and left no result; submitting again")
            self.record["previous"] = [*previous, job_id]
            return None
        self.note(f"attached to job {job_id} ({state.lower() or 'ended'})")
        if record["command"] != list(self.request.command):
            self.note(f"job {job_id} runs what was asked for then: {' '.join(record['command'])}")
        return job_id

    def _submit(self) -> str:
        """The id of a new job; Refused when every attempt was."""
        self.record |= {"command": list(self.request.command), "job_id": None}
        wait = self.site.submit_wait
        for attempt in range(1, self.site.submit_attempts + 1):
            try:
                self._patiently(self._submit_once)
                break
            except Refused as refused:
                self._check_signal()
                if refused.hopeless:
                    raise
                # a client that gave up may have left a job with the controller
                self.record["job_id"] = self._patiently(
                    lambda: self.scheduler.recover(self.request, self.record["previous"])
                )
                if self.record["job_id"]:
                    adopt_pickle(self.request.folder, self.record["job_id"])
                    self._save()
                    break
                if attempt == self.site.submit_attempts:
                    raise
                self.note(f"refused ({refused}); attempt {attempt + 1} of {self.site.submit_attempts} in {wait:g} s")
                time.sleep(wait)
                wait *= 2
        self._check_signal()
        self.note(f"submitted job {self.record['job_id']}")
        return self.record["job_id"]

    def _submit_once(self) -> None:
        with self.scheduler.slot(self.request, self.note):
            with self._shield():  # until the id is on disk a signal only leaves a mark
                self.record["submitted"] = time.time()
                self._save()  # from here on a job of this name may exist
                self.record["job_id"] = self.scheduler.submit(self.request)
                self._save()

    def _wait(self, job_id: str) -> str:
        """Poll until the job ended, telling each change; returns the scheduler's last word."""
        last, lost_since = ("", ""), None
        while True:
            state, why = self._patiently(lambda: self.scheduler.state(job_id, self.record["submitted"]))
            self._show_log(job_id)
            lost_since = (lost_since or time.monotonic()) if state in PASSING else None
            if lost_since is not None and time.monotonic() - lost_since < REQUEUE_S:
                time.sleep(self.site.poll)
                continue
            if state in ENDED or state in ("", "FINISHED"):
                return state
            if "held" in why or state == "REQUEUE_HOLD":  # SLURM gave up starting it and would keep it for ever
                self.scheduler.cancel(self.request, job_id)
                return "NODE_FAIL"
            if (state, why) != last:
                self.note(f"job {job_id} is {state.lower()}" + (f" ({why})" if why not in ("", "None") else ""))
                last = (state, why)
            time.sleep(self.site.poll)

    def _show_log(self, job_id: str) -> None:
        """Pass on what the first task printed since the last time: long work shows its progress."""
        for kind in ("out", "err"):
            path = self.request.folder / f"{job_id}_0_log.{kind}"
            with contextlib.suppress(OSError), path.open("rb") as stream:
                stream.seek(self.shown.get(path, 0))
                whole, newline, _ = stream.read().rpartition(b"\n")
                self.shown[path] = self.shown.get(path, 0) + len(whole + newline)
                for line in whole.decode(errors="replace").splitlines():
                    if line.strip() and not line.startswith("submitit "):
                        self.note(f"| {line}")

    def _settle(self, job_id: str, state: str) -> Outcome:
        end = time.time() + SETTLE_S
        ends = read_ends(self.request.folder, job_id)
        while state in ("COMPLETED", "") and len(ends) < self.request.tasks and time.time() < end:
            time.sleep(0.2)
            ends = read_ends(self.request.folder, job_id)
        return settle(self.request.label, job_id, state, ends, self.request.tasks, self.request.folder)

    def _finish(self, outcome: Outcome) -> Outcome:
        self._save(outcome)
        self.note(outcome.line)
        return outcome

    def _patiently(self, ask: Callable[[], T]) -> T:
        """Ask until the scheduler answers."""
        told = False
        while True:
            try:
                return ask()
            except Silent:
                if not told:
                    self.note("the scheduler does not answer; waiting for it")
                    told = True
            time.sleep(self.site.poll)

    def _save(self, outcome: Outcome | None = None) -> None:
        content = {**self.record, "outcome": outcome.as_dict() if outcome else None}
        temporary = self.file.with_suffix(".tmp")
        temporary.write_text(json.dumps(content, indent=1) + "\n")
        temporary.replace(self.file)

    def _interrupt(self, number: int, frame: Any) -> None:
        if self.signal is None:  # the second Ctrl-C must not stop the cancelling
            self.signal = number
            if not self.shielded:
                raise Cancelled(number)

    def _check_signal(self) -> None:
        if self.signal is not None:
            raise Cancelled(self.signal)

    @contextlib.contextmanager
    def _shield(self) -> Iterator[None]:
        self.shielded = True
        try:
            yield
        finally:
            self.shielded = False
