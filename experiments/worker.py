"""One contender in a process of its own: `python -m experiments.worker`, commands and replies as JSON lines.

A crash, a hang or an out-of-memory kill costs this process only. Commands come in on standard input, replies go out on
what was standard output (prints of libraries go to standard error, the log). End of input ends the process, also amidst
a measurement, and so does the death of the parent.

Commands: `prepare` (import what takes long, find the device), `open` (set a point up, off the device), `visit` (warm
up, time; with `stays`, a session that can keeps its memory on the device), `close` (metrics of all visits). Each ends
with a reply that has "status"; replies without are signs of life.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import itertools
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from experiments.providers import Context, Session, Unsupported, find_provider
from experiments.spec import point_from_dict

PR_SET_PDEATHSIG = 1
OUT_OF_MEMORY = ("out of memory", "DefaultCPUAllocator", "can't allocate memory", "hipErrorOutOfMemory")


class Worker:
    """Carries out commands; `tell` sends one reply."""

    def __init__(self, tell: Callable[[Mapping[str, Any]], None]) -> None:
        self._tell = tell
        self._session: Session | None = None
        self._samples: dict[str, list[float]] = {}
        self._device = "cpu"

    def handle(self, command: Mapping[str, Any]) -> None:
        """Carry out one command and send its final reply; whatever it raises is a reply, not the end."""
        action = {"prepare": self._prepare, "open": self._open, "visit": self._visit, "close": self._close}
        try:
            reply = {"status": "ok", **action[command["do"]](command)}
        except Exception as error:
            traceback.print_exc()
            reply = outcome(error)
        if reply["status"] != "ok":
            # Outside the except block: until here the traceback kept what the contender had allocated.
            self._drop()
        self._tell(reply)

    def _prepare(self, command: Mapping[str, Any]) -> dict[str, Any]:
        provider = find_provider(command["what"], command["provider"])
        for name, value in provider.environment:
            os.environ.setdefault(name, value)
        for module in provider.preload:
            importlib.import_module(module)
        if "torch" not in sys.modules:
            return {"hardware": {}}
        import torch

        from experiments.provenance import hardware

        on_gpu = command["device"] != "cpu" and torch.cuda.is_available()
        self._device = "cuda" if on_gpu else "cpu"
        if command["device"] not in ("auto", self._device):
            raise Unsupported(f"this host has no device {command['device']!r}")
        # All contenders may use TF32 where a card has it; the flag is in every record.
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = True
        # Half a million objects of imported modules stay for ever. A full collection amidst a step would look through
        # them for half a second, and of several ranks all wait for the one that does.
        gc.collect()
        gc.freeze()
        return {"hardware": hardware(self._device)}

    def _open(self, command: Mapping[str, Any]) -> dict[str, Any]:
        self._drop()
        point = point_from_dict(command["point"], "point")
        cache = Path(command["cache"]) if command["cache"] else None
        provider = find_provider(point.setting.what, point.contender.provider)
        beside = command.get("contenders", 1)
        self._session = provider.open(Context(point, cache, self._device, command.get("meeting", ""), beside))
        self._session.suspend()
        return {}

    def _visit(self, command: Mapping[str, Any]) -> dict[str, Any]:
        session, marks = self._session, [time.perf_counter()]
        session.resume()
        marks.append(time.perf_counter())
        for repeat in range(command["warmup"] + command["repeats"]):
            sample = session.step()
            marks.append(time.perf_counter())
            self._tell({"step": repeat})
            if repeat >= command["warmup"]:
                for name, value in sample.items():
                    self._samples.setdefault(name, []).append(value)
        # A session without `stay` leaves the device in any case.
        leave = getattr(session, "stay", session.suspend) if command.get("stays") else session.suspend
        leave()
        memory = getattr(session, "memory", lambda: None)()
        resumed, *steps, left = (b - a for a, b in itertools.pairwise([*marks, time.perf_counter()]))
        each = " ".join(f"{seconds:.1f}" for seconds in steps)
        print(
            f"visit: resumed in {resumed:.1f} s, steps {sum(steps):.1f} s ({each}), suspended in {left:.1f} s",
            flush=True,
        )
        return {"memory": memory}

    def _close(self, command: Mapping[str, Any]) -> dict[str, Any]:
        metrics = {name: asdict(metric) for name, metric in self._session.finish(self._samples).items()}
        notes = list(getattr(self._session, "notes", ()))
        self._drop()
        return {"metrics": metrics, "notes": notes}

    def _drop(self) -> None:
        self._session, self._samples = None, {}
        gc.collect()
        if "torch._dynamo" in sys.modules:
            sys.modules["torch._dynamo"].reset()
        if self._device == "cuda":
            sys.modules["torch"].cuda.empty_cache()
        _trim_heap()


def outcome(error: BaseException) -> dict[str, str]:
    """Status and one-line reason of an exception; an out-of-memory error is found below those that wrap it too."""
    reason = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    if isinstance(error, Unsupported):
        return {"status": "unsupported", "reason": reason}
    reason = f"{type(error).__name__}: {reason}"[:500]
    cause: BaseException | None = error
    while cause is not None:
        known = isinstance(cause, RuntimeError) and any(text in str(cause) for text in OUT_OF_MEMORY)
        if isinstance(cause, MemoryError) or known:
            return {"status": "oom", "reason": reason}
        cause = cause.__cause__ or cause.__context__
    return {"status": "error", "reason": reason}


def _trim_heap() -> None:
    """Give freed memory back, so that the peak of the next point starts from what is really kept (glibc only)."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def _die_with_parent() -> None:
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _read_commands(commands: queue.Queue) -> None:
    for line in sys.stdin:
        commands.put(json.loads(line))
    os._exit(0)


def main() -> None:
    """Serve commands until the input ends."""
    _die_with_parent()
    replies = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    commands: queue.Queue = queue.Queue()
    threading.Thread(target=_read_commands, args=(commands,), daemon=True).start()
    worker = Worker(lambda reply: print(json.dumps(reply), file=replies, flush=True))
    while True:
        worker.handle(commands.get())


if __name__ == "__main__":
    main()
