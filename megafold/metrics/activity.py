"""What the host does in a step: kernels it launches, times it waits for the device, alignments it gives up.

Launches and waits are read from torch's profiler, so from one step that is not timed. Alignments that fail are told by
the stock model in warnings and nowhere else; they are counted there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

# Runtime calls by the part of their names that CUDA and HIP share.
_LAUNCHES = ("LaunchKernel", "LaunchCooperativeKernel", "ModuleLaunch")
_GRAPHS = ("GraphLaunch",)
_WAITS = ("StreamSynchronize", "DeviceSynchronize", "EventSynchronize")
_SKIPPED = "Skipping"


@dataclass(frozen=True)
class Activity:
    """Counts of one step: kernels launched one by one, graphs launched, waits of the host for the device."""

    launches: int
    graphs: int
    waits: int


@dataclass
class Counter:
    """A number that goes on counting."""

    value: int = 0


def count_activity(step: Callable[[], Any]) -> Activity:
    """Run ``step`` once under the profiler. Counts calls of the runtime, so that what a graph replays counts once."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as found:
        step()
    return counted((event.key, event.count) for event in found.key_averages())


def counted(calls: Iterable[tuple[str, int]]) -> Activity:
    """Sums up (name of a call, how often) by kind."""
    totals = dict.fromkeys(("launches", "graphs", "waits"), 0)
    for name, count in calls:
        if not name.startswith(("cuda", "hip", "cu")):
            continue
        for kind, parts in (("launches", _LAUNCHES), ("graphs", _GRAPHS), ("waits", _WAITS)):
            totals[kind] += count * any(part in name for part in parts)
    return Activity(**totals)


@contextmanager
def alignment_failures() -> Iterator[Counter]:
    """Counts the alignments that the model gives up while the context is open, stock or not."""
    from loguru import logger

    counter = Counter()

    def is_skipped(record: Any) -> bool:
        return record["message"].startswith(_SKIPPED) and "alignment" in record["message"]

    def count(_: Any) -> None:
        counter.value += 1

    handle = logger.add(count, level="WARNING", filter=is_skipped, format="{message}")
    try:
        yield counter
    finally:
        logger.remove(handle)
