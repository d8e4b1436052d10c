"""Worker processes, one for each contender: set up side by side, measured one at a time, replaced when they die."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from experiments.spec import Contender

KILLED = "killed by SIGKILL, which the kernel sends when the host's or the job's memory is used up"


class Process:
    """A running `experiments.worker`. It has a log of its own; `hardware` is what it found when it was prepared."""

    def __init__(self, log: Path) -> None:
        log.parent.mkdir(parents=True, exist_ok=True)
        self.hardware: dict[str, Any] = {}
        self._log = log
        # A session of its own, so that its children (loaders, compilers) can be ended with it.
        self._process = subprocess.Popen(
            [sys.executable, "-m", "experiments.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            start_new_session=True,
        )
        self._replies: queue.Queue[dict[str, Any] | None] = queue.Queue()
        threading.Thread(target=_read_replies, args=(self._process.stdout, self._replies), daemon=True).start()

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, command: Mapping[str, Any]) -> None:
        """Ask for something; a worker that is gone is noticed by `receive`."""
        with contextlib.suppress(OSError):
            self._process.stdin.write(json.dumps(command) + "\n")
            self._process.stdin.flush()

    def receive(self, timeout_s: float) -> dict[str, Any]:
        """The final reply: {"status", "reason", ...}. A worker that is silent for `timeout_s` is killed: "timeout"."""
        while True:
            try:
                reply = self._replies.get(timeout=timeout_s)
            except queue.Empty:
                self.kill()
                return {"status": "timeout", "reason": f"no sign of life for {timeout_s:g} s"}
            if reply is None:
                return self._epitaph()
            if "status" in reply:
                return reply

    def ask(self, command: Mapping[str, Any], timeout_s: float) -> dict[str, Any]:
        """Send a command and wait for its final reply."""
        self.send(command)
        return self.receive(timeout_s)

    def kill(self) -> None:
        """End the worker and its children at once."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _epitaph(self) -> dict[str, Any]:
        try:
            code = self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.returncode
        if code == -signal.SIGKILL:
            return {"status": "oom", "reason": f"worker {KILLED}"}
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"ended with code {code}"
        last = _last_line(self._log)
        return {
            "status": "error",
            "reason": f"worker {how}; {f'last line of its log: {last}' if last else 'its log is empty'}",
        }


class Pool:
    """The workers of one call of `measure`: kept for the contenders that come again, ended with the block."""

    def __init__(self, logs: Path, device: str) -> None:
        self._logs, self._device = logs, device
        self._workers: dict[tuple[str, Contender], Process] = {}
        self._started = 0

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.kill()

    def prepare(self, what: str, contenders: Iterable[Contender], timeout_s: float) -> dict[Contender, dict[str, Any]]:
        """Workers for all these contenders; the replies of those whose start failed.

        New ones are started side by side, as many at a time as there are CPUs, and all are ready before this returns:
        nothing runs beside a measurement.
        """
        failed = {}
        missing = [contender for contender in contenders if not self._is_alive(what, contender)]
        for wave in _waves(missing):
            for contender in wave:
                self._started += 1
                name = re.sub(r"[^\w.-]", "_", contender.name)
                worker = Process(self._logs / f"{what}-{name}-{os.getpid()}-{self._started}.log")
                self._workers[what, contender] = worker
                worker.send({"do": "prepare", "what": what, "provider": contender.provider, "device": self._device})
            for contender in wave:
                worker = self._workers[what, contender]
                reply = worker.receive(timeout_s)
                worker.hardware = reply.get("hardware", {})
                if reply["status"] != "ok":
                    self.discard(what, contender)
                    failed[contender] = reply
        return failed

    def ask_all(
        self, what: str, commands: Mapping[Contender, Mapping[str, Any]], timeout_s: float
    ) -> dict[Contender, dict[str, Any]]:
        """The final replies of prepared workers to a command each; as in `prepare`, they work side by side."""
        replies = {}
        for wave in _waves(list(commands)):
            for contender in wave:
                self._workers[what, contender].send(commands[contender])
            for contender in wave:
                replies[contender] = self._workers[what, contender].receive(timeout_s)
        return replies

    def worker(self, what: str, contender: Contender) -> Process:
        """The prepared worker of a contender."""
        return self._workers[what, contender]

    def discard(self, what: str, contender: Contender) -> None:
        """End the worker of a contender, if it has one."""
        worker = self._workers.pop((what, contender), None)
        if worker is not None:
            worker.kill()

    def keep(self, wanted: Iterable[tuple[str, Contender]]) -> None:
        """End the workers of all other contenders."""
        for what, contender in set(self._workers) - set(wanted):
            self.discard(what, contender)

    def _is_alive(self, what: str, contender: Contender) -> bool:
        worker = self._workers.get((what, contender))
        return worker is not None and worker.alive


def _waves(contenders: Sequence[Contender]) -> list[Sequence[Contender]]:
    """In order, as many at a time as there are CPUs."""
    width = len(os.sched_getaffinity(0))
    return [contenders[first : first + width] for first in range(0, len(contenders), width)]


def _read_replies(stream: IO[str], replies: queue.Queue) -> None:
    for line in stream:
        try:
            replies.put(json.loads(line))
        except ValueError:  # the last line of a worker that died while writing
            break
    replies.put(None)


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1][:300] if lines else ""
