"""Ranks that end together: a thread a rank, beside whatever the rank is waiting in.

A rank that raises leaves its error in the store that all ranks share; the others read it within seconds and end, also
while they wait in a collective that will never come back. A collective over NCCL that fails or times out ends its
process from below, without an exception: the sign that torch leaves in the store before is read too. A rank that is
killed leaves nothing: it stops counting, and the rank before it, which looks at its count, reports it. A store that is
gone was on rank 0.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch.distributed as dist

EVERY_S = 1.0
SILENT_S = 30.0
EXIT_OTHER_RANK = 1
_FAILED, _BEAT, _DONE = "failed", "beat", "done"
# Where torch's NCCL groups leave the number of a rank on which a collective failed; without prefix, for all groups.
_NCCL_FAILED = "exception_dump"


class Watch:
    """Watches over one rank of ``size``, from its making to :meth:`finish`."""

    def __init__(self, store: dist.Store, rank: int, size: int, *, silent_s: float = SILENT_S) -> None:
        # A connection of its own: one that waits for a key would block the other user of it.
        self._store = store.clone() if hasattr(store, "clone") else store
        self._base = _base(self._store)
        self._rank, self._size, self._silent_s = rank, size, silent_s
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="ranks", daemon=True)
        self._thread.start()

    def fail(self, error: BaseException) -> str:
        """Tell all ranks why this one ends. Returns what another rank had told before, "" where this one is the first.

        A collective fails at once on ranks whose neighbour is gone: their errors follow from the first.
        """
        self._over.set()
        return self._tell(f"rank {self._rank} failed: {type(error).__name__}: {_first_line(error)}")

    def finish(self) -> None:
        """This rank is done and will not be heard of again."""
        self._over.set()
        self._thread.join()
        try:
            self._store.set(f"{_BEAT}/{self._rank}", _DONE)
        except RuntimeError:  # rank 0 was done first, and its store with it
            return

    def _tell(self, line: str) -> str:
        try:
            if self._store.add("blamed", 1) == 1:
                self._store.set(_FAILED, line)
                return ""
            return self._store.get(_FAILED).decode()
        except RuntimeError:
            return ""

    def _watch(self) -> None:
        beat, seen, since, answered = 0, None, time.monotonic(), time.monotonic()
        after = (self._rank + 1) % self._size
        while not self._over.wait(EVERY_S):
            beat += 1
            try:
                self._store.set(f"{_BEAT}/{self._rank}", str(beat))
                if self._store.check([_FAILED]):
                    self._end(self._store.get(_FAILED).decode())
                if self._base.check([_NCCL_FAILED]):
                    number = int.from_bytes(self._base.get(_NCCL_FAILED), "little")
                    line = f"rank {number}: a collective over NCCL failed or timed out; its output says which"
                    self._end(self._tell(line) or line)
                key = f"{_BEAT}/{after}"
                count = self._store.get(key) if self._store.check([key]) else None
                answered = time.monotonic()
            except RuntimeError as error:
                if time.monotonic() - answered > self._silent_s and not self._over.is_set():
                    self._end(f"rank 0, which holds the store, is gone ({_first_line(error)}); its own output says why")
                continue
            if count != seen or count is None or count == _DONE.encode():
                seen, since = count, time.monotonic()
            elif time.monotonic() - since > self._silent_s:
                line = f"rank {after} has not been heard of for {self._silent_s:g} s: killed, or its host is gone"
                self._tell(line)
                self._end(line)

    def _end(self, line: str) -> None:
        if self._over.is_set():  # this rank's own error is about to end it
            return
        print(f"error: rank {self._rank} ends: {line}", file=sys.stderr, flush=True)
        os._exit(EXIT_OTHER_RANK)


def forget_failures(store: dist.Store) -> None:
    """Remove what a process group that failed before left in the store, where later groups would take it for theirs."""
    base = _base(store)
    if base.check([_NCCL_FAILED]):
        base.delete_key(_NCCL_FAILED)


def _base(store: dist.Store) -> dist.Store:
    """The store below all prefixes."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _first_line(error: BaseException) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")[:500]
