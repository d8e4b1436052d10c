"""Peak memory of a stretch of work: of the allocator on a GPU, resident memory of the process on a CPU."""

from __future__ import annotations

import resource
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

_CLEAR_PEAK_RSS = "5"  # proc(5): /proc/pid/clear_refs, value 5 resets the peak resident set size


@dataclass(frozen=True)
class MemoryPeak:
    """Peak memory in bytes.

    Attributes:
        allocated: peak of what tensors held and what pools of recorded graphs keep besides (GPU), or of resident memory
            (CPU).
        reserved: peak of what the GPU allocator took from the device; None on a CPU.
        persistent: weights, gradients and optimizer state, as given; None if not given.
        above_persistent: ``allocated - persistent``, the activations and workspace; None if not given.
        source: how the peak was read, for the record.
    """

    allocated: int
    reserved: int | None
    persistent: int | None
    above_persistent: int | None
    source: str

    def as_dict(self) -> dict[str, int | str | None]:
        return asdict(self)


class MemoryProbe:
    """Peak memory between :meth:`reset` and :meth:`peak` on one device.

    On a CPU the peak resident set is reset through ``/proc/self/clear_refs``; where that is not allowed, the peak is
    that of the whole life of the process (``ru_maxrss``), and ``source`` says so.
    """

    def __init__(self, device: torch.device | str) -> None:
        self._device = device
        self._gpu = str(device).startswith("cuda")
        self._was_reset = False

    def reset(self) -> None:
        """Start a new stretch: the peak is now the current use."""
        if self._gpu:
            import torch

            torch.cuda.reset_peak_memory_stats(self._device)
            return
        try:
            Path("/proc/self/clear_refs").write_text(_CLEAR_PEAK_RSS)
            self._was_reset = _status_bytes("VmHWM") is not None
        except OSError:
            self._was_reset = False

    def peak(self, persistent: int | None = None) -> MemoryPeak:
        """The peak since :meth:`reset`; ``persistent`` bytes (see `Trainer.persistent_bytes`) are set apart."""
        if self._gpu:
            import torch

            torch.cuda.synchronize(self._device)
            allocated = torch.cuda.max_memory_allocated(self._device) + graph_memory()
            reserved = torch.cuda.max_memory_reserved(self._device)
            source = "torch.cuda.max_memory_allocated, and what private pools of graphs hold besides"
        else:
            reserved = None
            allocated = _status_bytes("VmHWM") if self._was_reset else None
            source = "VmHWM after clear_refs"
            if allocated is None:
                allocated = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
                source = "ru_maxrss of the whole process (its peak could not be reset)"
        above = None if persistent is None else allocated - persistent
        return MemoryPeak(allocated, reserved, persistent, above, source)


def graph_memory() -> int:
    """Bytes of all devices that only replays of recorded graphs can use; no tensor of now is in them.

    The allocator does not count what a graph works in as allocated, since it is free while nothing is recorded.
    """
    import torch

    segments = torch.cuda.memory_snapshot()
    return sum(
        s["total_size"] - s["allocated_size"] for s in segments if tuple(s.get("segment_pool_id", (0, 0))) != (0, 0)
    )


def _status_bytes(field: str) -> int | None:
    """A size in /proc/self/status, in bytes; None where the system does not tell."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * 1024
    return None
