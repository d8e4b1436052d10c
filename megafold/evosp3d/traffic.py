"""What a rank sends, counted where it is sent."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

KINDS = ("all_to_all", "all_gather", "reduce_scatter", "all_reduce")


class Traffic:
    """Bytes that this rank sent to others and calls, by kind of collective and by the operator that asked for it.

    A collective of the emulation counts as a real one: the count depends on shapes and the number of ranks alone.
    ``all_gather`` and ``reduce_scatter`` count (P - 1) blocks, ``all_reduce`` 2 (P - 1) / P of the tensor (both what a
    bandwidth-optimal algorithm sends), ``all_to_all`` the blocks that are not the rank's own.
    """

    def __init__(self) -> None:
        self._bytes: Counter[tuple[str, str]] = Counter()
        self._calls: Counter[tuple[str, str]] = Counter()

    def add(self, kind: str, operator: str, size: int) -> None:
        self._bytes[kind, operator] += size
        self._calls[kind, operator] += 1

    def add_all(self, other: Traffic) -> None:
        """Count what ``other`` has counted."""
        self._bytes.update(other._bytes)
        self._calls.update(other._calls)

    @contextmanager
    def apart(self) -> Iterator[Traffic]:
        """What is sent in the block is counted in what comes out of it instead, complete when the block ends."""
        sent, before = Traffic(), (self._bytes, self._calls)
        self._bytes, self._calls = sent._bytes, sent._calls
        try:
            yield sent
        finally:
            self._bytes, self._calls = before

    def clear(self) -> None:
        self._bytes.clear()
        self._calls.clear()

    @property
    def total(self) -> int:
        """Bytes of all collectives."""
        return sum(self._bytes.values())

    def by_kind(self) -> dict[str, int]:
        """Bytes of each kind of collective, 0 included."""
        return {kind: sum(n for (k, _), n in self._bytes.items() if k == kind) for kind in KINDS}

    def calls_by_kind(self) -> dict[str, int]:
        """How often each kind of collective was called."""
        return {kind: sum(n for (k, _), n in self._calls.items() if k == kind) for kind in KINDS}

    def by_operator(self) -> dict[str, int]:
        """Bytes that each operator of the model asked for, its backward included."""
        found: Counter[str] = Counter()
        for (_, operator), size in self._bytes.items():
            found[operator] += size
        return dict(found)


def seconds_at(traffic: Mapping[str, int], bytes_per_second: float) -> float:
    """How long sending ``traffic`` (bytes by kind) takes at a stated bandwidth, if nothing is overlapped."""
    return sum(traffic.values()) / bytes_per_second
