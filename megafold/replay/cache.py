"""Tapes by signature."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megafold import triton_support
from megafold.replay.recorder import Recorder, recording
from megafold.replay.tape import Tape

ALIGNMENT = 16
"""Bytes; kernels are compiled for addresses that are multiples of it, and for others."""

MOST = 512
"""Tapes of one operator, and signatures without one that it remembers: what was recorded or seen first goes first. A
tape takes tens of kilobytes."""

TRIES = 3
"""To record a signature: arguments may lie in each other in one call and not in the next. A call that fails is none."""

_ordinary = 0


@contextmanager
def ordinary() -> Iterator[None]:
    """Inside, calls run as written: for what changes how kernels are launched, and for comparisons."""
    global _ordinary
    _ordinary += 1
    try:
        yield
    finally:
        _ordinary -= 1


class Tapes:
    """Of one operator, by signature."""

    def __init__(self) -> None:
        self.recorded: dict[tuple, Tape] = {}
        self._left: dict[tuple, int] = {}
        self._lock = threading.Lock()

    def wants(self, signature: tuple) -> bool:
        """Whether to record a call with a signature without a tape: not the first one, and not after too many tries."""
        with self._lock:
            if signature not in self._left:
                self._left[signature] = TRIES
                _bound(self._left)
                return False
            return self._left[signature] > 0

    def add(self, signature: tuple, tape: Tape | None) -> None:
        """What came of recording a call."""
        with self._lock:
            if tape is None:
                self._left[signature] = self._left.get(signature, TRIES) - 1
            else:
                self._left.pop(signature, None)
                self.recorded[signature] = tape
                _bound(self.recorded)


def _bound(entries: dict) -> None:
    if len(entries) > MOST:
        del entries[next(iter(entries))]


def replayed(function: Callable) -> Callable:
    """The same function of tensors, None, numbers, dtypes and lists of numbers; its calls are recorded and repeated.

    It has to launch kernels through `launch_kernel`, to `note` whatever else goes past PyTorch's dispatcher, and to
    decide by nothing but its arguments (shapes, strides, dtypes, devices, alignment; never values of tensors) and by
    PyTorch's settings for TF32, deterministic algorithms and autocast. The first argument that is not None is a tensor.
    """
    tapes = Tapes()

    @functools.wraps(function)
    def call(*arguments):
        tensor = next(argument for argument in arguments if argument is not None)
        if _ordinary or not serves(tensor) or recording() is not None:
            return function(*arguments)
        return _repeat_or_record(function, tapes, tensor.device, arguments)

    return call


def serves(tensor: Tensor) -> bool:
    """Whether calls on a tensor's device are recorded: on NVIDIA's. It has not been tried on AMD's, where Triton's
    kernels depend on sizes of tensors, too; on a CPU there is nothing to gain."""
    return tensor.is_cuda and not torch.version.hip


def _repeat_or_record(function: Callable, tapes: Tapes, device: torch.device, arguments: tuple):
    """Call a function by its tape, where there is one."""
    signature, tensors = _signature(device.type, arguments)
    if (tape := tapes.recorded.get(signature)) is not None:
        if device.type == "cpu":
            return tape(tensors, None)
        with torch.cuda.device(device):
            return tape(tensors, _stream(device.index))
    if not tapes.wants(signature):
        return function(*arguments)
    with Recorder(arguments) as recorder:
        results = function(*arguments)
    tapes.add(signature, recorder.tape(results))
    return results


def _signature(kind: str, arguments: tuple) -> tuple[tuple, list[Tensor | None]]:
    """What a call follows from, and its tensors, None in the place of other arguments. kind: of the device."""
    key: list[object] = [*_settings(kind)]
    tensors: list[Tensor | None] = []
    first: dict[int, int] = {}
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            key += (argument.shape, argument.stride(), argument.dtype, argument.get_device(), address % ALIGNMENT)
            # Where the storage begins matters to views as elements of another size.
            key.append(argument.storage_offset() * argument.itemsize % ALIGNMENT)
            key.append(first.setdefault(address, len(tensors)))  # the same tensor twice is another signature than two
            tensors.append(argument)
            continue
        tensors.append(None)
        if isinstance(argument, list):
            argument = tuple(argument)
        elif isinstance(argument, float):
            argument = argument.hex()  # 0.0 == -0.0
        key.append(argument)
    return tuple(key), tensors


def _settings(kind: str) -> tuple[object, ...]:
    """What decides besides arguments: see `replayed`."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fills = deterministic and torch.utils.deterministic.fill_uninitialized_memory
    autocast = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
    return triton_support.float32_precision(), deterministic, fills, autocast


def _stream(index: int) -> int:
    from triton.runtime import driver

    return driver.active.get_current_stream(index)
