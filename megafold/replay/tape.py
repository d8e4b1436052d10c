"""What is repeated: steps over buffers, which a call brings or makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


class State:
    """Of one call: the tensor and the address of each buffer, by number; those of the arguments come first."""

    __slots__ = ("addresses", "bases", "stream")

    def __init__(self, bases: list[Tensor | None], addresses: list[int], stream: int | None) -> None:
        self.bases, self.addresses, self.stream = bases, addresses, stream


@dataclass(frozen=True)
class Empty:
    """A tensor without elements: new each time, as nobody reads it."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def of(self, bases: Sequence[Tensor | None]) -> Tensor:
        """The tensor."""
        return torch.empty_strided(self.size, self.stride, dtype=self.dtype, device=self.device)


@dataclass(frozen=True)
class View:
    """A tensor in a buffer.

    Attributes:
        offset: in bytes, from the first element of the buffer's tensor. whole: it has shape, strides and dtype of that
            and begins where it does, so that it takes its place.
    """

    buffer: int
    size: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    whole: bool

    def of(self, bases: Sequence[Tensor | None]) -> Tensor:
        """The tensor."""
        base = bases[self.buffer]
        if self.whole:
            return base
        first = base.storage_offset() * base.element_size() + self.offset
        if base.dtype != self.dtype:
            found = torch.empty(0, dtype=self.dtype, device=base.device)
            return found.set_(base.untyped_storage(), first // found.element_size(), self.size, self.stride)
        return base.as_strided(self.size, self.stride, first // base.element_size())


class Address:
    """In the place of a tensor, for what asks a tensor for nothing but its address."""

    __slots__ = ("_address",)

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def allocation(size: Sequence[int], stride: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable:
    """A step that makes an uninitialised tensor."""
    size, stride = tuple(size), tuple(stride)

    def run(state: State) -> None:
        made = torch.empty_strided(size, stride, dtype=dtype, device=device)
        state.bases.append(made)
        state.addresses.append(made.data_ptr())

    return run


def kernel(
    runner: Callable,
    arguments: list,
    pointers: list[tuple[int, int, int]],
    descriptors: list[tuple[int, Any, int, int]],
) -> Callable:
    """A step that launches a compiled kernel.

    Args:
        arguments: all of them; those that follow are put in their places.
        pointers: place, buffer and offset in bytes. descriptors: place, what is like it but for its tensor, buffer and
            offset in bytes.
    """

    def run(state: State) -> None:
        found, addresses = arguments.copy(), state.addresses
        for place, buffer, offset in pointers:
            found[place] = addresses[buffer] + offset
        for place, like, buffer, offset in descriptors:
            found[place] = described = object.__new__(like.__class__)
            described.__dict__.update(like.__dict__, base=Address(addresses[buffer] + offset))
        runner(*found, stream=state.stream)

    return run


def call(function: Callable, places: Sequence[tuple[int, int]]) -> Callable:
    """A step that calls a function of addresses: of buffers, and offsets in bytes."""

    def run(state: State) -> None:
        function(*(state.addresses[buffer] + offset for buffer, offset in places))

    return run


def operator(function: Callable, arguments: tuple, keywords: dict, made: Callable) -> Callable:
    """A step that calls one of PyTorch's operators. made: which of its results are new tensors."""

    def run(state: State) -> None:
        bases = state.bases
        found = function(
            *_filled(arguments, bases), **{name: _filled(value, bases) for name, value in keywords.items()}
        )
        for tensor in made(found):
            bases.append(tensor)
            state.addresses.append(tensor.data_ptr())

    return run


def _filled(value: object, bases: Sequence[Tensor | None]) -> Any:
    """The same with tensors in the place of `View` and `Empty`."""
    if isinstance(value, (View, Empty)):
        return value.of(bases)
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(part, bases) for part in value)
    return value


class Tape:
    """Steps that give an operator's results from its arguments.

    A buffer is let go where the operator let go of it, not after the last step that uses it: kernels that run beside
    one another count on the memory of one not being given to the next.
    """

    def __init__(
        self,
        steps: Sequence[tuple[Callable[[State], None], Sequence[int]]],
        results: Sequence[View | Empty | None],
        single: bool,
    ) -> None:
        """steps: each with the buffers to let go of after it. results: in the operator's order. single: the operator
        gives one tensor, not a tuple."""
        self._results, self._single = tuple(results), single
        self._steps = tuple((run, tuple(dead)) for run, dead in steps)

    def __call__(self, tensors: list[Tensor | None], stream: int | None) -> Tensor | tuple[Tensor | None, ...]:
        """Run the steps on what an operator was called with, None in the place of other arguments."""
        bases = list(tensors)
        state = State(bases, [0 if tensor is None else tensor.data_ptr() for tensor in bases], stream)
        for run, dead in self._steps:
            run(state)
            for buffer in dead:
                bases[buffer] = None
        results = tuple(None if view is None else view.of(bases) for view in self._results)
        return results[0] if self._single else results
