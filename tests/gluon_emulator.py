"""Runs the warp-specialised Gluon kernels on a CPU: the source itself, with NumPy in the place of Gluon.

Every group of warps is a thread of Python that waits for the barriers of shared memory as on the device: with a parity,
so that a barrier which has changed twice looks as one which has not changed. The copy engine copies at once. Layouts
are ignored: what the registers hold where is the business of the compiler.
"""

from __future__ import annotations

import threading
import types

import numpy as np

LIMIT = 20.0
"""Seconds that a group waits for a barrier before it is taken to wait forever."""


class Tensor(np.ndarray):
    type = types.SimpleNamespace(layout=None)

    def to(self, dtype):
        return self.astype(np.int64).view(Tensor) if dtype == "int64" else self

    def permute(self, order):
        return np.ascontiguousarray(self.transpose(order)).view(Tensor)

    def reshape(self, shape):
        return np.reshape(np.asarray(self), shape).view(Tensor)


class Scalar(int):
    """An integer of 32 bits of a kernel; what it makes with integers is one, too, and has to fit."""

    def to(self, dtype):
        return Wide(self) if dtype == "int64" else self


class Wide(Scalar):
    """An integer of 64 bits."""


def _operator(name):
    plain = getattr(int, name)

    def operate(self, other):
        found = plain(self, other)
        if not isinstance(found, int):
            return found
        if isinstance(self, Wide) or isinstance(other, Wide):
            return Wide(found)
        assert -(2**31) <= found < 2**31, f"{int(self)} {name} {other}: more than 32 bits"
        return Scalar(found)

    return operate


for _name in ("add", "sub", "mul", "floordiv", "mod", "and", "xor"):
    for _side in ("", "r"):
        setattr(Scalar, f"__{_side}{_name}__", _operator(f"__{_side}{_name}__"))


class Pointer:
    def __init__(self, flat: np.ndarray, offset=0) -> None:
        self.flat, self.offset = flat, offset
        self.dtype = types.SimpleNamespace(element_ty=types.SimpleNamespace(primitive_bitwidth=16))

    def __add__(self, other):
        return Pointer(self.flat, self.offset + other)


class Descriptor:
    """Of an array, through strides in elements, as the copy engine sees it."""

    def __init__(self, array: np.ndarray, shape, strides, block) -> None:
        self.flat, self.shape, self.strides = array.reshape(-1), shape, strides
        self.dtype, self.layout = "", None
        self.block_type = types.SimpleNamespace(shape=list(block), nbytes=int(np.prod(block)))

    def places(self, at):
        """Offsets of a block, and which of its elements exist."""
        index = np.indices(self.block_type.shape)
        inside, offset = np.ones(self.block_type.shape, bool), np.zeros(self.block_type.shape, np.int64)
        for axis, (start, size, stride) in enumerate(zip(at, self.shape, self.strides)):
            inside &= index[axis] + start < size
            offset += (index[axis] + start) * stride
        return offset, inside


class Memory:
    """Shared memory, NaN where nothing was written."""

    def __init__(self, array: np.ndarray) -> None:
        self.array, self.dtype = array, ""

    def index(self, i):
        return Memory(self.array[int(i)])

    def reshape(self, shape):
        found = self.array.reshape(shape)
        assert np.shares_memory(found, self.array)
        return Memory(found)

    def _reinterpret(self, dtype, shape, layout):
        return self.reshape(shape)

    def permute(self, order):
        return Memory(self.array.transpose(order))

    def slice(self, start, length, axis=0):
        return Memory(self.array[(slice(None),) * axis + (slice(start, start + length),)])

    def load(self, layout):
        return self.array.copy().view(Tensor)

    def store(self, value):
        self.array[...] = value


class Barrier:
    changed = threading.Condition()

    def __init__(self) -> None:
        self.count = self.pending = self.bytes = self.phase = 0

    def update(self, arrived=0, expected=0):
        with Barrier.changed:
            self.pending -= arrived
            self.bytes += expected
            if not self.pending and not self.bytes:
                self.phase, self.pending = self.phase + 1, self.count
            Barrier.changed.notify_all()

    def wait(self, parity):
        with Barrier.changed:
            if not Barrier.changed.wait_for(lambda: self.phase % 2 != parity, LIMIT):
                raise TimeoutError("a group of warps waits forever")


class Barriers:
    def __init__(self, shape) -> None:
        self.all = [Barrier() for _ in range(shape[0])]

    def index(self, i):
        return self.all[int(i)]


class Emulator:
    """Emulates kernels of some modules; `launch` runs every program of one, one after another."""

    def __init__(self, *modules) -> None:
        self.program, self.programs, self.errors = 0, 1, []
        known = {"gl": self._language(), "mbarrier": self._barriers(), "tma": self._copies(), "range": self._range}
        known |= {"thread_barrier": lambda: None, "release": lambda free: free.update(arrived=1)}
        known |= {"fence_async_shared": lambda: None, "warpgroup_mma": self._product}
        known |= {"warpgroup_mma_wait": lambda outstanding, deps: deps[0] if len(deps) == 1 else deps}
        known |= {"sigmoid": lambda x: 1 / (1 + np.exp(-x)), "widen": lambda x: x}
        known |= {"prefetch": lambda pointers: pointers.flat[np.asarray(pointers.offset)]}
        self.functions = {}
        for module in modules:
            for name, value in vars(module).items():
                if hasattr(value, "fn") and value.fn.__module__ == module.__name__:
                    names = dict(vars(module)) | known
                    self.functions[value.fn] = types.FunctionType(value.fn.__code__, names, name)
        for function in self.functions.values():
            names = function.__globals__
            for name, value in list(names.items()):
                if name not in known and getattr(value, "fn", None) in self.functions:
                    names[name] = self.functions[value.fn]
                elif name not in known and type(value).__name__ == "constexpr":
                    names[name] = value.value

    def launch(self, kernel, programs, *arguments, **constants):
        for self.program in range(programs):
            self.programs = programs
            self.functions[kernel.fn](*arguments, **constants)
            if self.errors:
                raise self.errors[0]

    def _range(self, *bounds):
        return (Scalar(i) for i in range(*bounds))

    def _language(self):
        def load(pointer, mask=None, other=0.0):
            offset, flat = np.asarray(pointer.offset), pointer.flat
            if mask is None:
                return flat[offset].view(Tensor)
            offset, mask = np.broadcast_arrays(offset, mask)
            return np.where(mask, flat[np.where(mask, offset, 0)], other).astype(flat.dtype).view(Tensor)

        def store(pointer, value, mask=True):
            offset, value, mask = np.broadcast_arrays(np.asarray(pointer.offset), value, mask)
            pointer.flat[offset[mask]] = value[mask]

        def memory(dtype, shape, layout):
            if dtype == "int64":
                return Barriers(shape) if len(shape) > 1 else Barriers(shape).all[0]
            return Memory(np.full([int(s) for s in shape], np.nan, np.float32))

        def anything(*arguments, **keywords):
            return None

        return types.SimpleNamespace(
            load=load, store=store, allocate_shared_memory=memory, warp_specialize=self._specialize,
            program_id=lambda axis: Scalar(self.program), num_programs=lambda axis: Scalar(self.programs),
            cdiv=lambda a, b: Scalar(-(-a // b)), static_range=range, float32="float32", int64="int64",
            arange=lambda start, stop, layout: np.arange(start, stop).view(Tensor),
            zeros=lambda shape, dtype, layout: np.zeros(shape, np.float32).view(Tensor),
            sum=lambda x, axis: np.sum(np.asarray(x), axis, dtype=np.float32).view(Tensor), sqrt=np.sqrt,
            where=lambda condition, a, b: np.where(condition, a, b).view(Tensor),
            convert_layout=lambda x, layout, **options: x,
            constexpr=int, NVMMADistributedLayout=anything, DotOperandLayout=anything, SliceLayout=anything,
            BlockedLayout=anything, DistributedLinearLayout=anything, SwizzledSharedLayout=anything,
            NVMMASharedLayout=types.SimpleNamespace(get_default_for=anything),
            full=lambda shape, value, dtype, layout: np.full(shape, value, np.float32).view(Tensor),
            max=lambda x, axis: np.max(np.asarray(x), axis).view(Tensor), maximum=np.maximum,
            exp2=np.exp2, log2=np.log2, minimum=lambda a, b: Scalar(min(a, b)),
        )  # fmt: skip

    def _barriers(self):
        def init(barrier, count):
            barrier.count = barrier.pending = count

        return types.SimpleNamespace(
            init=init, MBarrierLayout=lambda: None, wait=lambda barrier, phase: barrier.wait(int(phase)),
            expect=lambda barrier, nbytes: barrier.update(arrived=1, expected=nbytes),
            arrive=lambda barrier, count: barrier.update(arrived=count),
        )  # fmt: skip

    def _copies(self):
        def copy_in(descriptor, at, barrier, memory):
            offset, inside = descriptor.places(at)
            tile = np.where(inside, descriptor.flat[np.where(inside, offset, 0)], 0.0)
            memory.array[...] = tile.reshape(memory.array.shape)
            barrier.update(expected=-descriptor.block_type.nbytes)

        def copy_out(descriptor, at, memory):
            offset, inside = descriptor.places(at)
            descriptor.flat[offset[inside]] = memory.array.reshape(offset.shape)[inside]

        return types.SimpleNamespace(
            async_copy_global_to_shared=copy_in, async_copy_shared_to_global=copy_out, store_wait=lambda pending: None
        )

    @staticmethod
    def _product(a, b, acc, use_acc=True, is_async=False):
        a, b = (x.array if isinstance(x, Memory) else np.asarray(x) for x in (a, b))
        found = (a @ b).astype(np.float32)
        return (found + acc if use_acc else found).view(Tensor)

    def _specialize(self, partitions, warps, registers):
        def run(function, arguments):
            try:
                function(*arguments)
            except BaseException as error:
                self.errors.append(error)

        threads = [threading.Thread(target=run, args=part) for part in partitions]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
