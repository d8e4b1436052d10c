"""Where a record comes from. `software` loads neither torch nor the model; `hardware` needs torch."""

from __future__ import annotations

import datetime
import importlib.metadata
import os
import platform
import re
import subprocess
from pathlib import Path
from typing import Any

PACKAGES = ("torch", "triton", "alphafold3-pytorch", "rdkit", "h5py", "numpy")


def now() -> str:
    """The time, UTC, ISO 8601 to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def software(command: str) -> dict[str, Any]:
    """Commit, dirty flag, versions, host count, SLURM job and the command line.

    Outside a git checkout of its own (a copy sent to a machine without git), `commit` is what MEGAFOLD_COMMIT says, or
    None, and `dirty` is None: nobody can tell.
    """
    commit, dirty = checkout(Path(__file__))
    commit = commit or os.environ.get("MEGAFOLD_COMMIT")
    return {
        "commit": commit,
        "dirty": dirty,
        "packages": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "hosts": int(os.environ.get("SLURM_JOB_NUM_NODES", "1")),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "command": command,
    }


def checkout(file: Path) -> tuple[str | None, bool | None]:
    """Commit of the checkout that tracks `file`, and whether tracked files differ from it; None, None outside one."""
    folder, name = file.resolve().parent, file.name
    if _git(folder, "ls-files", "--error-unmatch", name) is None:
        return None, None
    commit = _git(folder, "rev-parse", "HEAD")
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return (commit, None if changes is None else bool(changes)) if commit else (None, None)


def hardware(device: str) -> dict[str, Any]:
    """Vendor, device name, driver, and the numeric flags and allocator of this process; `device`: "cpu" or "cuda"."""
    import torch

    flags = {
        "tf32": bool(torch.backends.cuda.matmul.allow_tf32),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
    }
    if device == "cpu":
        return {"vendor": "cpu", "device": _cpu_name(), "driver": None, "threads": torch.get_num_threads(), **flags}
    amd = torch.version.hip is not None
    return {
        "vendor": "amd" if amd else "nvidia",
        "device": torch.cuda.get_device_name(0),
        "driver": _read("/sys/module/amdgpu/version") if amd else _nvidia_driver(),
        "runtime": torch.version.hip or torch.version.cuda,
        "memory_GiB": round(torch.cuda.get_device_properties(0).total_memory / 2**30, 2),
        "allocator": os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF"),
        **flags,
    }


def vendor_here() -> str:
    """Whose GPU this host has, from its device files: for records of workers that died before they could tell."""
    if Path("/dev/nvidiactl").exists():
        return "nvidia"
    return "amd" if Path("/dev/kfd").exists() else "cpu"


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _git(folder: Path, *arguments: str) -> str | None:
    command = ["git", "-C", str(folder), *arguments]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


def _nvidia_driver() -> str | None:
    found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _read("/proc/driver/nvidia/version") or "")
    return found.group(1) if found else None


def _cpu_name() -> str:
    found = re.search(r"^model name\s*:\s*(.+)$", _read("/proc/cpuinfo") or "", re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine()


def _read(path: str) -> str | None:
    try:
        return Path(path).read_text().strip()
    except OSError:
        return None
