"""How much of what a device does at once is communication under computation, from a profiler's trace."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

Span = tuple[float, float]


@dataclass(frozen=True)
class Overlap:
    """Seconds of a trace, each moment counted once however many streams are busy.

    Attributes:
        total: from the first event to the last.
        communication, computation: in which some kernel of the kind runs.
        hidden: in which both do.
        idle: in which neither does.
    """

    total: float
    communication: float
    computation: float
    hidden: float
    idle: float


def overlap(communication: Iterable[Span], computation: Iterable[Span]) -> Overlap:
    """What two kinds of spans (start, end) in seconds have in common.

    Raises:
        ValueError: where there is no span at all.
    """
    sends, computes = merged(communication), merged(computation)
    busy = merged([*sends, *computes])
    if not busy:
        raise ValueError("no spans: nothing ran on the device")
    total, sum_sends, sum_computes = busy[-1][1] - busy[0][0], length(sends), length(computes)
    hidden = sum_sends + sum_computes - length(busy)
    return Overlap(total, sum_sends, sum_computes, hidden, total - length(busy))


def merged(spans: Iterable[Span]) -> list[Span]:
    """The moments that some span covers, as spans that do not meet, in order."""
    found: list[Span] = []
    for start, end in sorted(spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(spans: Iterable[Span]) -> float:
    return sum(end - start for start, end in spans)
