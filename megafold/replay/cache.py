"""Tapes by signature."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

from megafold import triton_support
from megafold.replay.recorder import Recorder, recording
from megafold.replay.tape import Tape

ALIGNMENT = 16
"""Bytes; kernels are compiled for addresses that are multiples of it, and for others."""

MOST_TAPES = 512
"""Of one operator; the oldest goes first. One takes tens of kilobytes."""

TRIES = 3
"""To record a signature; arguments may lie in each other in one call and not in the next."""

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


def replayed(function: Callable) -> Callable:
    """The same function of tensors, None, numbers, dtypes and lists of numbers; its calls are recorded and repeated.

    It has to launch kernels through `launch_kernel`, to `note` whatever else goes past PyTorch's dispatcher, and to
    decide by nothing but its arguments (shapes, strides, dtypes, device, alignment; never values of tensors) and by
    PyTorch's settings for TF32 and for deterministic algorithms. The first argument that is not None is a tensor.
    """
    tapes: dict[tuple, Tape | int] = {}

    @functools.wraps(function)
    def call(*arguments):
        tensor = next(argument for argument in arguments if argument is not None)
        if _ordinary or not serves(tensor) or recording() is not None:
            return function(*arguments)
        return _repeat_or_record(function, tapes, tensor.get_device(), arguments)

    return call


def serves(tensor: Tensor) -> bool:
    """Whether calls on a tensor's device are recorded: on NVIDIA's. It has not been tried on AMD's, where Triton's
    kernels depend on sizes of tensors, too; on a CPU there is nothing to gain."""
    return tensor.is_cuda and not torch.version.hip


def _repeat_or_record(function: Callable, tapes: dict[tuple, Tape | int], index: int, arguments: tuple):
    """Call a function by its tape; without one, record it unless the signature is new.

    Args:
        tapes: by signature; in the place of a tape, how often it was seen. index: of the device, -1 for the CPU.
    """
    key: list[object] = [index, *_settings()]
    tensors: list[Tensor | None] = []
    first: dict[int, int] = {}
    for argument in arguments:
        if isinstance(argument, Tensor):
            address = argument.data_ptr()
            same = first.setdefault(address, len(tensors))  # the same tensor twice is another signature than two
            key.append((argument.shape, argument.stride(), argument.dtype, address % ALIGNMENT, same))
            tensors.append(argument)
        else:
            key.append(tuple(argument) if isinstance(argument, list) else argument)
            tensors.append(None)
    signature = tuple(key)
    found = tapes.get(signature, 0)
    if isinstance(found, Tape):
        if index < 0:
            return found(tensors, None)
        with torch.cuda.device(index):
            return found(tensors, _stream(index))
    if not found and len(tapes) >= MOST_TAPES:
        tapes.pop(next(iter(tapes)), None)
    tapes[signature] = found + 1
    if not 0 < found <= TRIES:
        return function(*arguments)
    with Recorder(arguments) as recorder:
        results = function(*arguments)
    tape = recorder.tape(results)
    if tape is not None:
        tapes[signature] = tape
    return results


def _settings() -> tuple[object, ...]:
    """What decides besides arguments: see `replayed`."""
    deterministic = torch.are_deterministic_algorithms_enabled()
    fills = deterministic and torch.utils.deterministic.fill_uninitialized_memory
    return triton_support.float32_precision(), deterministic, fills


def _stream(index: int) -> int:
    from triton.runtime import driver

    return driver.active.get_current_stream(index)
