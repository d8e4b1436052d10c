"""What the launchers share: configurations from the tables, compiler options, sizes."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch import Tensor

from megafold import triton_support
from megafold.replay import ordinary

EPS = 1e-5
"""Of every LayerNorm of the stock model."""

ROW_MULTIPLE = 16
"""Elements that rows are filled up to where their width is free: what the vendor's products and accesses of 16 bytes
want (Triton only knows of sizes whether they are multiples of 16)."""

INTERPRETED = {"block_l": 16, "block_o": 32, "num_warps": 4, "num_stages": 1}
"""Configuration of every kernel in Triton's interpreter, which alone runs kernels on a CPU."""


def configuration(kernel: str, dtype: torch.dtype, device: torch.device) -> dict:
    """The table's configuration of a kernel for products in `dtype` on `device`."""
    if kernel in _overrides:
        return _overrides[kernel]
    if device.type == "cpu":
        return INTERPRETED
    return _from_table(kernel, "32" if dtype == torch.float32 else "16", triton_support.architecture(device.index))


_overrides: dict[str, dict] = {}


@contextmanager
def overridden(kernel: str, config: dict) -> Iterator[None]:
    """Inside, a kernel runs with this configuration and not with the table's."""
    _overrides[kernel] = config
    try:
        with ordinary():
            yield
    finally:
        del _overrides[kernel]


@functools.cache
def _from_table(kernel: str, bits: str, arch: str) -> dict:
    return triton_support.load_table("evofusion", arch)["configs"][kernel][bits]


def options(config: dict) -> dict[str, int]:
    """Compiler options of a configuration."""
    names = ("num_warps", "num_stages", "maxnreg", "waves_per_eu")
    return {name: config[name] for name in names if config.get(name) is not None}


def hopper_kernels(config: dict, x: Tensor, dtype: torch.dtype, *others: Tensor) -> ModuleType | None:
    """`hopper.launch` where a configuration asks for its kernels and they serve rows x [.., C], else None.

    Args:
        others: what else the copy engine is to read.
    """
    if "gluon" not in config or not triton_support.has_gluon():
        return None
    from megafold.evofusion.hopper import launch

    return launch if launch.serves(x, dtype, *others) else None


def block(config: dict, name: str, size: int) -> int:
    """A block size of the configuration, halved until it divides `size`, a multiple of 16."""
    wanted = config[name]
    while size % wanted:
        wanted //= 2
    return wanted


def ceil_div(a: int, b: int) -> int:
    """a / b, rounded up."""
    return -(-a // b)


def round_up(size: int) -> int:
    """The next multiple of ROW_MULTIPLE."""
    return ceil_div(size, ROW_MULTIPLE) * ROW_MULTIPLE


def aligned(x: Tensor) -> Tensor:
    """x contiguous and at a whole 16 bytes, which a kernel takes for granted where it chooses among tensors."""
    x = x.contiguous()
    return x if x.data_ptr() % 16 == 0 else x.clone()


def shared_strides(dropped: Tensor | None) -> tuple[int, int, int]:
    """Strides of a dropout factor [B, I, J, C] along B, I and J; 0 along an axis that shares it, or without one."""
    if dropped is None:
        return 0, 0, 0
    return tuple(0 if size == 1 else stride for size, stride in zip(dropped.shape[:3], dropped.stride()))
