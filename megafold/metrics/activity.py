"""What the host does in a step: kernels it launches, times it waits for the device, alignments it gives up.

Launches and waits are read from torch's profiler, so from one step that is not timed. Alignments that fail are told by
the stock model in warnings and nowhere else; they are counted there.
"""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
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
class Count:
    """A number that goes on counting."""

    value: int = 0


def count_activity(step: Callable[[], Any]) -> Activity:
    """Run ``step`` once under the profiler. Counts calls of the runtime, so that what a graph replays counts once.

    The profiler follows the device and the runtime alone: operators of the host are many times as many events. Should
    it tell no launch without them, ``step`` runs once more with them.
    """
    import torch
    from torch.profiler import ProfilerActivity

    if not torch.cuda.is_available():
        step()
        return Activity(0, 0, 0)
    found = counted(calls_by_name(step, [ProfilerActivity.CUDA]).items())
    if found.launches + found.graphs == 0:
        found = counted(calls_by_name(step, [ProfilerActivity.CPU, ProfilerActivity.CUDA]).items())
    return found


def calls_by_name(step: Callable[[], Any], activities: Sequence[Any]) -> Counter[str]:
    """How often each event of torch's profiler came while ``step`` ran, by its name.

    Read from the trace itself: torch's own tables first make a tree of Python objects, which takes many seconds for the
    events of a training step.
    """
    from torch.profiler import profile

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*clears events")  # of the cycle before; there is one
        with profile(activities=activities) as trace:
            step()
    return Counter(event.name() for event in trace.profiler.kineto_results.events())


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
def alignment_failures() -> Iterator[Count]:
    """Counts the alignments that the model gives up while the context is open, stock or not."""
    from loguru import logger

    counter = Count()

    def is_skipped(record: Any) -> bool:
        return record["message"].startswith(_SKIPPED) and "alignment" in record["message"]

    def count(_: Any) -> None:
        counter.value += 1

    handle = logger.add(count, level="WARNING", filter=is_skipped, format="{message}")
    try:
        yield counter
    finally:
        logger.remove(handle)
