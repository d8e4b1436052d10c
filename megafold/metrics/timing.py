"""Times of device work: events on a GPU, the wall clock on a CPU, and what a table shows of repeated samples."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    import torch

    Mark: TypeAlias = float | torch.cuda.Event


@dataclass(frozen=True)
class Summary:
    """Order statistics of repeated samples, in their unit: median, 20th and 80th percentile, and their number."""

    median: float
    p20: float
    p80: float
    n: int

    def as_dict(self) -> dict[str, float | int]:
        return asdict(self)


def summarize(samples: Sequence[float]) -> Summary:
    """The order statistics of ``samples``, interpolated linearly.

    Raises:
        ValueError: for no sample at all, or one that is not finite.
    """
    ordered = sorted(float(sample) for sample in samples)
    if not ordered:
        raise ValueError("no sample to summarise")
    if any(value != value or value in (float("inf"), float("-inf")) for value in ordered):
        raise ValueError(f"a sample is not finite: {ordered}")
    return Summary(_quantile(ordered, 0.5), _quantile(ordered, 0.2), _quantile(ordered, 0.8), len(ordered))


class Timer:
    """Marks points in the work of one device and tells the seconds between two of them.

    On a GPU (CUDA or ROCm) a mark is an event in the current stream: setting one does not wait for the device, reading
    an interval does. On a CPU a mark is the wall clock.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._events = str(device).startswith("cuda")
        self._device = device

    def mark(self) -> Mark:
        """A point in time, after all work that was queued so far."""
        if not self._events:
            return time.perf_counter()
        import torch

        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def seconds(self, start: Mark, end: Mark) -> float:
        """Seconds from one mark to another; waits for the later one on a GPU."""
        if not self._events:
            return end - start
        end.synchronize()
        return start.elapsed_time(end) / 1e3

    def synchronize(self) -> None:
        """Wait until the device has done all its work; nothing on a CPU."""
        if self._events:
            import torch

            torch.cuda.synchronize(self._device)


def _quantile(ordered: list[float], fraction: float) -> float:
    position = fraction * (len(ordered) - 1)
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)
