"""What Triton can do on a device: whether kernels run there, the architecture's name, its launch configurations."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import json
import os
from pathlib import Path

import torch

from megafold.errors import InputError

ARCHITECTURES = ("sm_80", "sm_90", "sm_100", "gfx90a", "gfx942")
"""Architectures with a shipped table of launch configurations."""


# Looked up once, here: torch.compile does not trace a search for modules.
_HAS_TRITON = importlib.util.find_spec("triton") is not None


def triton_problem() -> str | None:
    """Why no Triton kernel can run in this process whatever the device, or None."""
    return None if _HAS_TRITON else "triton is not installed"


def runs_kernels(device: torch.device) -> bool:
    """Whether this project's Triton kernels run on `device`."""
    return device.type == "cuda" and triton_problem() is None and _capability_problem(device.index) is None


def why_not(device: torch.device) -> str | None:
    """One line for a user: why the reference runs instead of the kernels on `device`; None where the kernels run."""
    if device.type != "cuda":
        return f"no Triton backend for device type {device.type!r}: the chunked PyTorch reference runs"
    problem = triton_problem() or _capability_problem(device.index)
    return None if problem is None else f"{problem}: the chunked PyTorch reference runs"


@functools.cache
def has_gluon() -> bool:
    """Whether this Triton has the Gluon that kernels for sm_90 are written in: 3.6 and later."""
    import triton

    return tuple(int(part) for part in triton.__version__.split(".")[:2]) >= (3, 6)


@functools.cache
def architecture(device_index: int | None = None) -> str:
    """Name of a visible device's architecture: "sm_90", "gfx90a", ..."""
    if torch.version.hip:
        return torch.cuda.get_device_properties(device_index).gcnArchName.split(":")[0]
    major, minor = torch.cuda.get_device_capability(device_index)
    return f"sm_{major}{minor}"


def multiprocessors(device: torch.device) -> int:
    """Number of streaming multiprocessors (compute units on AMD); 1 for the CPU, where only the interpreter runs."""
    return _multiprocessors(device.index) if device.type == "cuda" else 1


def device_guard(device: torch.device):
    """Context in which Triton launches on `device`."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()


@functools.cache
def _multiprocessors(device_index: int | None) -> int:
    return torch.cuda.get_device_properties(device_index).multi_processor_count


def table_architecture(name: str) -> str:
    """The shipped table that serves an architecture: its own, or the nearest one of the same vendor."""
    if name in ARCHITECTURES:
        return name
    if name.startswith("gfx"):
        return "gfx942" if name.startswith("gfx95") else "gfx90a"
    generation = int(name.removeprefix("sm_"))
    return "sm_100" if generation in range(100, 110) else "sm_90" if generation == 90 else "sm_80"


@functools.cache
def load_table(package: str, arch: str) -> dict:
    """The table of launch configurations of a kernel package for an architecture.

    With `MEGAFOLD_TABLES=DIR`, a table that `megafold tune` wrote to DIR/<package>/<arch>.json comes first; for kernels
    that it does not know, since they are younger, the shipped one.

    Args:
        package: name under megafold/, such as "evoflash3d". arch: a name from `architecture`.

    Returns:
        {"architecture": ..., "source": how the configurations were chosen, "configs": ...}.

    Raises:
        InputError: the table in DIR is not one.
    """
    arch = table_architecture(arch)
    own = os.environ.get("MEGAFOLD_TABLES")
    shipped = shipped_table(package, arch)
    if own and (path := Path(own) / package / f"{arch}.json").is_file():
        return _filled_up(path, shipped)
    return shipped


def _filled_up(path: Path, shipped: dict) -> dict:
    try:
        table = json.loads(path.read_text())
    except ValueError as error:
        raise InputError(path, "", f"is no JSON ({error}); `megafold tune` writes such tables") from None
    if not isinstance(table, dict) or not isinstance(table.get("configs"), dict):
        raise InputError(path, "configs", "is missing; `megafold tune` writes such tables")
    return table | {"configs": shipped["configs"] | table["configs"]}


def shipped_table(package: str, arch: str) -> dict:
    """The table that the package brings for one of ARCHITECTURES."""
    return json.loads(_shipped_path(package, arch).read_text())


def table_to_tune(package: str) -> tuple[torch.device, dict]:
    """The device at hand and a copy of the shipped table of its architecture, marked as measured there.

    Raises:
        RuntimeError: there is no device that Triton kernels run on.
    """
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    if not runs_kernels(device):
        raise RuntimeError(f"nothing to tune: {why_not(device)}")
    arch = table_architecture(architecture(device.index))
    source = f"measured on {torch.cuda.get_device_name(device)} with torch {torch.__version__}"
    return device, shipped_table(package, arch) | {"architecture": arch, "source": source}


def write_table(table: dict, package: str, out: Path | None) -> Path:
    """Write a table, whole or not at all, to OUT/<package>/<architecture>.json; None: in place of the shipped one."""
    arch = table["architecture"]
    path = _shipped_path(package, arch) if out is None else Path(out) / package / f"{arch}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(f".{os.getpid()}.tmp")
    partial.write_text(json.dumps(table, indent=2) + "\n")
    partial.replace(path)
    return path


def _shipped_path(package: str, arch: str) -> Path:
    return Path(__file__).parent / package / "tables" / f"{arch}.json"


def float32_precision() -> str:
    """`input_precision` of a Triton fp32 dot: "tf32" where PyTorch may use TF32 for matrix products, else "ieee"."""
    if torch.version.hip:
        return "ieee"
    matmul = torch.backends.cuda.matmul
    # `allow_tf32` cannot be read once somebody has set the newer one.
    return "tf32" if matmul.fp32_precision == "tf32" else "ieee"


def takes_ptx(device: torch.device) -> bool:
    """Whether kernels on a device may contain instructions of NVIDIA's."""
    return device.type == "cuda" and not torch.version.hip


@functools.cache
def _capability_problem(device_index: int | None) -> str | None:
    if torch.version.hip:
        name = architecture(device_index)
        return (
            None if name.startswith(("gfx90a", "gfx94", "gfx95")) else f"{name} is not supported (gfx90a or newer is)"
        )
    major, minor = torch.cuda.get_device_capability(device_index)
    return None if major >= 8 else f"compute capability {major}.{minor} is not supported (8.0 or newer is)"
