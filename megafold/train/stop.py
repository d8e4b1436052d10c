"""Ending a run from outside: a signal asks, and the run ends after the step it is in."""

from __future__ import annotations

import signal
import threading
from types import FrameType

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)  # scancel and time limit, SLURM --signal, Ctrl-C


class StopRequest:
    """While active, remembers the first of SIGTERM, SIGUSR1 and SIGINT; a second Ctrl-C interrupts at once.

    Attributes:
        signal: name of the signal that came, or None.
    """

    def __init__(self) -> None:
        self.signal: str | None = None
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopRequest:
        if threading.current_thread() is threading.main_thread():
            self._previous = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _remember(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = self.signal or signal.Signals(number).name
