"""Checkpoints: written whole or not at all, read without running code, the last few kept."""

from __future__ import annotations

import os
import pickle
import re
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from megafold.errors import InputError

FORMAT = 1
_NAME = re.compile(r"step-(\d{8,})\.pt")


def save(folder: Path, step: int, state: Mapping[str, Any], *, keep: int) -> Path:
    """Write ``state`` (tensors and plain values) as the checkpoint of ``step``; older ones than the last ``keep`` go.

    The file appears under its name only when it is complete and on disk: a process that is killed while it writes
    leaves a hidden temporary file, which the next save removes, and all earlier checkpoints as they were.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".step-*.tmp"):
        stale.unlink(missing_ok=True)
    path = folder / f"step-{step:08d}.pt"
    temporary = folder / f".{path.name}.{os.getpid()}.tmp"
    try:
        with open(temporary, "wb") as file:
            torch.save({"format": FORMAT, "step": step, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    for old in checkpoints(folder)[:-keep]:
        old.unlink(missing_ok=True)
    return path


def checkpoints(folder: Path) -> list[Path]:
    """Complete checkpoints of a folder, oldest first."""
    found = [path for path in folder.glob("step-*.pt") if _NAME.fullmatch(path.name)] if folder.is_dir() else []
    return sorted(found, key=lambda path: int(_NAME.fullmatch(path.name)[1]))


def load(path: Path) -> dict[str, Any]:
    """Read a checkpoint into host memory (``weights_only``: a file from a stranger can hold data, not code).

    Raises:
        InputError: for a file that is missing, damaged, of another kind or of another format version.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise InputError(path, "", error.strerror or str(error)) from None
    except (RuntimeError, EOFError, KeyError, ValueError, pickle.UnpicklingError, zipfile.BadZipFile) as error:
        raise InputError(path, "", f"not a whole checkpoint ({type(error).__name__})") from None
    if not isinstance(state, dict) or "model" not in state:
        raise InputError(path, "", "not a checkpoint of this trainer")
    if state.get("format") != FORMAT:
        raise InputError(path, "format", f"found {state.get('format')!r}, this version reads {FORMAT}")
    return state


def load_latest(folder: Path) -> tuple[Path, dict[str, Any], list[str]] | None:
    """The newest checkpoint that is whole, with one line for each newer one that is damaged; None without any.

    Raises:
        InputError: if there are checkpoints and all are damaged (rather than starting over in their folder).
    """
    problems: list[str] = []
    for path in reversed(checkpoints(folder)):
        try:
            return path, load(path), problems
        except InputError as error:
            problems.append(str(error))
    if problems:
        raise InputError(folder, "", f"no checkpoint is whole; {'; '.join(problems)}")
    return None
