"""Two branches of a block at once, where the block is captured as a graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager

import torch


class Fork:
    """A branch of small kernels that runs beside the rest of its block where that is captured, else before it.

    The backward of each branch runs beside that of the other, too: autograd follows the streams of the forward.
    """

    def __init__(self, device: torch.device) -> None:
        captured = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
        self._side = _side_stream() if captured else None
        self._forked = False

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What is computed in here may run beside what follows, up to :meth:`join`."""
        if self._side is None:
            yield
            return
        self._side.wait_stream(torch.cuda.current_stream())
        self._forked = True
        with torch.cuda.stream(self._side):
            yield

    def join(self) -> None:
        """From here on both branches are done."""
        if self._forked:  # a capture cannot wait for a stream that is no part of it
            torch.cuda.current_stream().wait_stream(self._side)


@functools.cache
def _side_stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(priority=-1)  # small kernels go first: they hardly delay the large ones
