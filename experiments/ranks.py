"""A measurement on several ranks: each runs `megafold measure` with the same comparisons and must take the same steps.

Rank 0 holds a store at MASTER_ADDR:MASTER_PORT (the launcher sets them). Whatever decides what comes next, which points
are missing and how a worker answered, is agreed over it; so all ranks send their workers the same commands, and the
workers meet in process groups of their own. Rank 0 alone writes records.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

# The outcome of several ranks is the first of these that one of them had.
WORST = ("oom", "timeout", "unsupported", "error", "node_failure")
GRACE_S = 120


class Alone:
    """One rank: nothing to agree on."""

    leads, size = True, 1

    def same(self, value: Any) -> Any:
        """Rank 0's value."""
        return value

    def worst(self, reply: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        """Rank 0's reply, or that of a rank that failed."""
        return reply

    def meeting(self) -> str:
        """A name for the next process group of the workers."""
        return ""

    def close(self) -> None:
        """Wait for the others, so that the store outlives them."""


class Ranks(Alone):
    """The ranks of a job, over a store. Every method is called by all of them in the same order."""

    def __init__(self, rank: int, size: int, store: Any) -> None:
        self.leads = rank == 0
        self._rank, self.size, self._store, self._count = rank, size, store, 0

    def same(self, value: Any) -> Any:
        key = self._key()
        if self.leads:
            self._store.set(key, json.dumps(value))
        return json.loads(self._store.get(key))

    def worst(self, reply: dict[str, Any], timeout_s: float) -> dict[str, Any]:
        key = self._key()
        self._store.set(f"{key}/{self._rank}", json.dumps(reply))
        keys = [f"{key}/{rank}" for rank in range(self.size)]
        self._store.wait(keys, timedelta(seconds=timeout_s + GRACE_S))
        replies = [json.loads(self._store.get(key)) for key in keys]
        for status in WORST:
            for rank, other in enumerate(replies):
                if other["status"] == status:
                    return {**other, "reason": f"rank {rank}: {other.get('reason', '')}"}
        return replies[0]

    def meeting(self) -> str:
        return self._key()

    def close(self) -> None:
        self.worst({"status": "ok"}, GRACE_S)
        self._store.set(f"left/{self._rank}", "")
        if self.leads:  # the store goes with this process, and the others still have to read the answer
            self._store.wait([f"left/{rank}" for rank in range(self.size)], timedelta(seconds=GRACE_S))

    def _key(self) -> str:
        self._count += 1
        return f"measure/{self._count}"


def join_ranks(environment: Mapping[str, str] | None = None) -> Alone:
    """The ranks that the launcher, torchrun or srun started; one alone needs no store and does not load torch."""
    env = os.environ if environment is None else environment
    if int(env.get("WORLD_SIZE", "1")) == 1:
        return Alone()
    rank, size = int(env["RANK"]), int(env["WORLD_SIZE"])
    return Ranks(rank, size, open_store(rank == 0, env))


def open_store(is_host: bool, environment: Mapping[str, str] | None = None) -> Any:
    """The store at MASTER_ADDR:MASTER_PORT, held by this process or another one."""
    from torch.distributed import TCPStore

    env = os.environ if environment is None else environment
    address, port = env["MASTER_ADDR"], int(env["MASTER_PORT"])
    is_host = is_host and env.get("TORCHELASTIC_USE_AGENT_STORE") != "True"  # torchrun holds one there already
    return TCPStore(address, port, is_master=is_host, wait_for_workers=False, timeout=timedelta(seconds=300))
