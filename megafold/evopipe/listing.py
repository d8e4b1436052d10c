"""Files of a folder by the start of their names. That of a database has a million: it is listed once, not per entry."""

from __future__ import annotations

import bisect
import os
from functools import lru_cache
from pathlib import Path


def starting_with(folder: Path, stem: str) -> list[Path]:
    """The files (and pipes) of a folder whose names start with `stem`, sorted; [] where there is no such folder."""
    try:
        names = _names(folder, folder.stat().st_mtime_ns)
    except OSError:
        return []
    first = bisect.bisect_left(names, stem)
    last = first
    while last < len(names) and names[last].startswith(stem):
        last += 1
    return [folder / name for name in names[first:last]]


@lru_cache(maxsize=4)
def _names(folder: Path, changed: int) -> list[str]:
    """Sorted; listed again when the folder changed."""
    return sorted(entry.name for entry in os.scandir(folder) if not entry.is_dir())
