"""How a call is recorded: what PyTorch is asked for, and the kernels and calls that go past it."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from megafold.replay import tape
from megafold.replay.tape import Empty, State, Tape, View

_thread = threading.local()

_ATEN = torch.ops.aten
ALLOCATIONS = (
    _ATEN.empty.memory_format,
    _ATEN.empty_like.default,
    _ATEN.empty_strided.default,
    _ATEN.new_empty.default,
    _ATEN.new_empty_strided.default,
)
PLAIN = (int, float, bool, str, type(None), torch.dtype)


def launch_kernel(kernel: Any, grid: tuple[int, ...], /, *arguments: object, **keywords: object) -> None:
    """`kernel[grid](*arguments, **keywords)`, which a recorder notes: the one way in which operators launch kernels."""
    compiled = kernel[grid](*arguments, **keywords)
    if (recorder := recording()) is not None:
        recorder.launched(kernel, compiled, grid, arguments, keywords)


def note(function: Callable[..., None], *tensors: Tensor) -> None:
    """Say that what was just done with tensors is done again by calling `function` with their addresses."""
    if (recorder := recording()) is not None:
        recorder.called(function, tensors)


def recording() -> Recorder | None:
    """The recorder of the call that this thread is in."""
    return getattr(_thread, "recorder", None)


def runner_of(compiled: Any, grid: tuple[int, ...]) -> Callable | None:
    """A function that launches a compiled kernel with addresses in the place of tensors; None where there is none."""
    from triton.compiler import CompiledKernel

    return compiled[(*grid, 1, 1)[:3]] if isinstance(compiled, CompiledKernel) else None


class CannotRepeat(Exception):
    """Why a call is not recorded."""


class Recorder(TorchDispatchMode):
    """Inside, what happens on this thread becomes steps.

    Attributes:
        problem: why there is no tape, or None.
    """

    def __init__(self, arguments: Sequence[object]) -> None:
        super().__init__()
        self.problem: str | None = None
        self._steps: list[tuple[Callable[[State], None], list[int]]] = []
        self._alive: dict[int, StorageWeakRef] = {}
        self._count = len(arguments)
        # By address of a storage: buffer, its tensor's first byte and the one behind its last.
        self._found: dict[int, list[tuple[int, int, int]]] = {}
        self._like: list[tuple | None] = [None] * len(arguments)
        for number, argument in enumerate(arguments):
            if isinstance(argument, Tensor):
                self._try(self._add, number, argument)

    def __enter__(self) -> Recorder:
        _thread.recorder = self
        return super().__enter__()

    def __exit__(self, *error: object) -> None:
        _thread.recorder = None
        super().__exit__(*error)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        _thread.recorder = None  # an operator's own kernels belong to it
        try:
            found = func(*args, **(kwargs or {}))
        finally:
            _thread.recorder = self
        self._try(self._dispatched, func, args, kwargs or {}, found)
        return found

    def launched(self, kernel, compiled, grid: tuple[int, ...], arguments: tuple, keywords: dict) -> None:
        """A kernel was launched with these arguments."""
        self._try(self._launched, kernel, compiled, grid, arguments, keywords)

    def called(self, function: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        """See `note`."""
        self._try(self._called, function, tensors)

    def tape(self, results: Tensor | Sequence[Tensor | None]) -> Tape | None:
        """What repeats the call, which gave these results; None with a problem."""
        single = isinstance(results, Tensor)
        views = self._try(lambda: [None if t is None else self._view(t) for t in ([results] if single else results)])
        if views is not None and any(isinstance(view, View) and view.buffer < self._count for view in views):
            self.problem = "a result is an argument"
        return None if self.problem else Tape(self._steps, views, single)

    def _try(self, function: Callable, *arguments: object) -> Any:
        if self.problem is None:
            try:
                return function(*arguments)
            except Exception as problem:  # the call itself has gone well
                self.problem = str(problem) or type(problem).__name__
        return None

    def _add(self, number: int, tensor: Tensor) -> None:
        self._like[number] = tuple(tensor.shape), tensor.stride(), tensor.dtype
        if tensor.numel():
            start, storage = tensor.data_ptr(), tensor.untyped_storage().data_ptr()
            self._found.setdefault(storage, []).append((number, start, start + _extent(tensor)))

    def _new(self, tensor: Tensor) -> int:
        """The number of a new buffer."""
        number = len(self._like)
        self._like.append(None)
        self._add(number, tensor)
        self._alive[number] = StorageWeakRef(tensor.untyped_storage())
        return number

    def _append(self, step: Callable[[State], None]) -> None:
        """What was let go of since the last step is let go of after it."""
        dead = [number for number, storage in self._alive.items() if storage.expired()]
        for number in dead:
            del self._alive[number]
            self._steps[-1][1].append(number)
        if dead:  # their addresses may be given to others
            self._found = {at: [e for e in entries if e[0] not in dead] for at, entries in self._found.items()}
        self._steps.append((step, []))

    def _place(self, tensor: Tensor) -> tuple[int, int]:
        """Buffer, and offset in bytes, of a tensor with elements."""
        start = tensor.data_ptr()
        end = start + _extent(tensor)
        entries = self._found.get(tensor.untyped_storage().data_ptr(), ())
        inside = [(number, start - first) for number, first, behind in entries if first <= start and end <= behind]
        if not inside:
            raise CannotRepeat("a tensor from elsewhere")
        # Arguments with one address have one in every call with this signature.
        if len({offset for _, offset in inside}) > 1:
            raise CannotRepeat("arguments that lie in each other")
        return inside[0]

    def _view(self, tensor: Tensor) -> View | Empty:
        if not tensor.numel():
            return Empty(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)
        buffer, offset = self._place(tensor)
        own = tuple(tensor.shape), tensor.stride(), tensor.dtype
        return View(buffer, own[0], own[1], offset, own[2], own == self._like[buffer] and offset == 0)

    def _dispatched(self, func, args: tuple, kwargs: dict, found: object) -> None:
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        tensors = [found] if isinstance(found, Tensor) else found
        if not isinstance(tensors, (tuple, list)) or not all(isinstance(tensor, Tensor) for tensor in tensors):
            if given:
                raise CannotRepeat(f"{func} tells the host something of a tensor")
            return
        if func in ALLOCATIONS:
            if found.numel() and found.device.type != "meta":
                self._append(tape.allocation(tuple(found.shape), found.stride(), found.dtype, found.device))
                self._new(found)
            return
        storages = {value.untyped_storage().data_ptr() for value in given}
        fresh = [at for at, tensor in enumerate(tensors) if tensor.untyped_storage().data_ptr() not in storages]
        if not fresh and not func._schema.is_mutable:
            return  # views
        args, kwargs = pytree.tree_map_only(Tensor, self._view, (args, kwargs))
        self._append(tape.operator(func, args, kwargs, _chosen(fresh)))
        for at in fresh:
            self._new(tensors[at])

    def _launched(self, kernel, compiled, grid: tuple[int, ...], arguments: tuple, keywords: dict) -> None:
        runner = runner_of(compiled, grid)
        if runner is None:
            raise CannotRepeat("a kernel that is not compiled")
        names = kernel.arg_names
        parameters = inspect.signature(kernel.fn).parameters
        rest = (keywords[name] if name in keywords else parameters[name].default for name in names[len(arguments) :])
        values, pointers, descriptors = [*arguments, *rest], [], []
        for at, value in enumerate(values):
            if isinstance(value, Tensor):
                values[at] = 0
                if value.numel():
                    pointers.append((at, *self._place(value)))
            elif isinstance(getattr(value, "base", None), Tensor) and hasattr(value, "block_shape"):
                descriptors.append((at, _without_base(value), *self._place(value.base)))
                values[at] = None
            elif not isinstance(value, PLAIN):
                raise CannotRepeat(f"a kernel's argument of type {type(value).__name__}")
        self._append(tape.kernel(runner, values, pointers, descriptors))

    def _called(self, function: Callable[..., None], tensors: Sequence[Tensor]) -> None:
        self._append(tape.call(function, [self._place(tensor) for tensor in tensors]))


def _extent(tensor: Tensor) -> int:
    """Bytes from the first element to behind the last one."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride()))
    return (last + 1) * tensor.element_size()


def _without_base(descriptor: Any) -> Any:
    found = object.__new__(type(descriptor))
    found.__dict__.update(descriptor.__dict__, base=None)
    return found


def _chosen(places: Sequence[int]) -> Callable[[object], list[Tensor]]:
    """Results of an operator, by their places."""
    return lambda found: [([found] if isinstance(found, Tensor) else found)[at] for at in places]
