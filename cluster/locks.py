"""Locks between drivers of one machine: files that the kernel unlocks when their holder dies."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def locked(path: Path, waiting: Callable[[], None] = lambda: None, poll: float = 0.2) -> Iterator[None]:
    """Hold the lock file `path`; `waiting` is called once if another process holds it (it may raise to give up).

    Waiting is a loop and not a blocking call, so that signals are answered at once.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as stream:
        told = False
        while True:
            try:
                fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if not told:
                    waiting()
                    told = True
                time.sleep(poll)
        yield
