"""What a run leaves for people and programs: JSON lines in a file, progress on a terminal or plain lines in a log."""

from __future__ import annotations

import json
import math
import sys
import time
from pathlib import Path
from typing import Any

from tqdm import tqdm

PLAIN_LINE_EVERY = 30.0  # seconds, so that a log of a long run stays readable


class StepLog:
    """Appends JSON objects, one a line, each on disk when its step is done. A value that is not finite becomes null.

    A step has the key ``step``; anything else that happened (start, resume, checkpoint, stop) has the key ``event``.
    """

    def __init__(self, path: Path | None) -> None:
        self._file = None
        if path is None:  # a rank that another one logs for
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        cut = path.exists() and path.stat().st_size > 0 and not path.read_bytes().endswith(b"\n")
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 - open as long as the log is
        if cut:  # by a kill: what follows must start on a line of its own
            self._file.write("\n")

    def write(self, **values: Any) -> None:
        if self._file is not None:
            self._file.write(json.dumps(_finite(values), allow_nan=False) + "\n")
            self._file.flush()

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_steps(path: Path) -> list[dict[str, Any]]:
    """The steps of a log in order. A step that was done again after a resume counts as done last; a line that a kill
    cut short is left out."""
    steps: dict[int, dict[str, Any]] = {}
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            values = json.loads(line)
        except json.JSONDecodeError:
            continue
        if "event" not in values:
            steps[values["step"]] = values
    return [steps[step] for step in sorted(steps)]


class Progress:
    """A bar on a terminal; elsewhere a plain line for the first and last step and every half minute between."""

    def __init__(self, done: int, total: int, *, shown: bool = True) -> None:
        self._total, self._shown = total, shown
        self._bar = tqdm(total=total, initial=done, unit="step") if shown and sys.stderr.isatty() else None
        self._last = -math.inf

    def step(self, step: int, *, loss: float, seconds: float, loader_wait: float, skipped: bool) -> None:
        """Show a finished step (counted from 1)."""
        if not self._shown:
            return
        if self._bar is not None:
            self._bar.set_postfix(loss=f"{loss:.3f}", wait=f"{loader_wait:.2f}s", refresh=False)
            self._bar.update()
            return
        now = time.monotonic()
        if now - self._last >= PLAIN_LINE_EVERY or step == self._total or skipped:
            self._last = now
            self.say(
                f"step {step}/{self._total}  loss {loss:.4f}  {seconds:.2f} s  loader wait {loader_wait:.2f} s"
                + ("  SKIPPED: loss or gradient not finite" if skipped else "")
            )

    def say(self, text: str) -> None:
        """A line that must be seen."""
        if self._bar is not None:
            self._bar.write(text)
        else:
            print(text, flush=True)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(part) for key, part in value.items()}
    return value
