"""Blocks of a stack as CUDA (HIP) graphs: a block costs the host two launches, one in the forward, one in the backward.

A block has two graphs. The first computes its output without keeping anything; the second, in the backward, computes it
again and then its gradients, so one tensor a block is kept, as under checkpointing. Both read the state of the device's
generator when they run: put back to where it stood in the forward, it draws the same dropout again.

Graphs hold addresses: they read and write buffers (:mod:`megafold.model.buffers`) that all blocks of a shape share, and
weights that moved are captured anew. A block of a stack writes its output over its input, so nothing is copied between
two blocks but the tensor that is kept. Graphs run one after another and leave nothing behind in their memory: all of
all shapes share one pool, in which they need what the largest block needs. A shape that was not used for longest is
dropped with its buffers; one of another length is recorded when it comes again.

:class:`Emulated` has the interface of captures and checks everything but the graphs themselves, on a CPU.
"""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, Protocol

import torch
from loguru import logger
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils.checkpoint import checkpoint

from megafold.model.buffers import Buffers, Cell

GRAPHS = "_megafold_graphs"  # where a stack finds its graphs
MOST_SHAPES = 16
FIRST_SHAPES, KNOWN_SHAPES = 8, 256
# Blocks on larger tensors (N above 1448, with 128 channels of pairs) keep a device busy without graphs, whose memory
# nothing else can use.
MOST_ELEMENTS = 1 << 28

Layer = Sequence[Module | None]


class Recorder(Protocol):
    """Records a computation on fixed buffers, to run it again."""

    def runs_on(self, device: torch.device) -> bool: ...

    def pool(self) -> Any:
        """Memory for recordings that never run at once and leave nothing in it."""

    def record(self, compute: Callable[[], None], pool: Any) -> Callable[[], None]:
        """What runs ``compute`` again; it has not run yet."""

    def position(self) -> Any:
        """Where the random numbers stand."""

    def seek(self, position: Any) -> None: ...

    def rehearsal(self) -> AbstractContextManager[Any]:
        """Around what runs once before it is recorded."""


class Captured:
    """CUDA and HIP graphs."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def runs_on(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, compute: Callable[[], None], pool: Any) -> Callable[[], None]:
        if self._stream is None:  # one for all: memory of a pool is reused on its own stream alone
            self._stream = torch.cuda.Stream()
        here, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._stream.wait_stream(here)
        collects = gc.isenabled()
        gc.disable()  # what a collection frees may talk to the device, which a capture does not survive
        try:
            with torch.cuda.stream(self._stream):
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                try:
                    compute()
                except BaseException:
                    try:
                        graph.capture_end()
                    except RuntimeError:  # of a capture that broke; the allocator still takes it to go on
                        _end_allocation(pool)
                    with suppress(RuntimeError):  # one that ends well tells the generator that no capture goes on
                        again = torch.cuda.CUDAGraph()
                        again.capture_begin(capture_error_mode="thread_local")
                        again.capture_end()
                    raise
                graph.capture_end()
        finally:
            if collects:
                gc.enable()
        here.wait_stream(self._stream)
        return graph.replay

    def position(self) -> int:
        return self._generator().get_offset()

    def seek(self, position: int) -> None:
        self._generator().set_offset(position)

    def rehearsal(self) -> AbstractContextManager[Any]:
        return nullcontext()

    def _generator(self) -> torch.Generator:
        return torch.cuda.default_generators[torch.cuda.current_device()]


def _end_allocation(pool: Any) -> None:
    """Tell the allocator that no capture fills the pool any more: while one does it frees nothing that two streams
    used, and asks a graph, which is gone, about every allocation."""
    with suppress(RuntimeError):
        torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), pool)


class Emulated:
    """The same on a CPU, by computing anew: for tests."""

    def runs_on(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def pool(self) -> Any:
        return object()

    def record(self, compute: Callable[[], None], pool: Any) -> Callable[[], None]:
        return compute

    def position(self) -> Tensor:
        return torch.get_rng_state()

    def seek(self, position: Tensor) -> None:
        torch.set_rng_state(position)

    def rehearsal(self) -> AbstractContextManager[Any]:
        return nullcontext()


class BlockGraphs:
    """The graphs of a model's blocks, for the last ``most`` shapes.

    Attributes:
        patience: how often a shape is only checkpointed before it is recorded: recording pays for what comes again. The
            first ``FIRST_SHAPES``, those of one length, are recorded at once: most runs have one length.
    """

    def __init__(self, recorder: Recorder | None = None, most: int = MOST_SHAPES, patience: int = 0) -> None:
        self.recorder, self.most, self.patience = recorder or Captured(), most, patience
        self._shapes: OrderedDict[Hashable, Buffers] = OrderedDict()
        self._seen: OrderedDict[Hashable, int] = OrderedDict()
        self._pool: Any = None

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockGraphs:
        return BlockGraphs(self.recorder, self.most, self.patience)  # a copy of a model has weights elsewhere

    @property
    def shapes(self) -> int:
        """How many shapes have graphs now."""
        return len(self._shapes)

    def release(self) -> None:
        """Drop every graph and its memory."""
        while self._shapes:
            self._shapes.popitem()[1].release()
        self._pool = None

    def runs(self, *args: Any) -> bool:
        """Whether blocks with these arguments are recorded: all tensors on the recorder's device, none too large."""
        tensors = [leaf for leaf in tree_flatten(args)[0] if torch.is_tensor(leaf)]
        return all(self.recorder.runs_on(t.device) and t.numel() <= MOST_ELEMENTS for t in tensors)

    def situation(self) -> Hashable:
        """What blocks of equal shapes may differ in besides."""
        return None

    def run(self, block: Callable[..., Any], layer: Layer, *args: Any) -> Any:
        """``block(layer, *args)``, tensors anywhere in ``args`` and in the result; nothing but they may change."""
        shape, tensors = self._shape(block, layer, args, 0)
        if shape is None:
            return checkpoint(block, layer, *args, use_reentrant=False)
        return tree_unflatten(_replayed(shape, [layer], tensors), shape.structure)

    def run_stack(
        self,
        block: Callable[..., tuple[Tensor, ...]],
        layers: Sequence[Layer],
        carried: Sequence[Tensor],
        *context: Any,
    ) -> tuple[Tensor, ...]:
        """``carried = block(layer, *carried, *context)`` for one layer after another."""
        whole = max(layers, key=lambda layer: sum(module is not None for module in layer))  # says what all give
        shape, tensors = self._shape(block, whole, (*carried, *context), len(carried))
        if shape is None:
            for layer in layers:
                carried = checkpoint(block, layer, *carried, *context, use_reentrant=False)
            return tuple(carried)
        if not shape.chains and shape.gives is not None:
            wide = [torch.promote_types(tensor.dtype, dtype) for tensor, dtype in zip(carried, shape.gives)]
            if wide == shape.gives:  # the first block adds to a narrower tensor: it may as well be wide from the start
                carried = [tensor.to(dtype) for tensor, dtype in zip(carried, wide)]
                return self.run_stack(block, layers, carried, *context)
        if not shape.chains:  # what a block gives is no input of the next graph
            for layer in layers:
                carried = self.run(block, layer, *carried, *context)
            return tuple(carried)
        return tuple(_replayed(shape, layers, tensors))

    def run_with_gradients(
        self, block: Callable[..., Sequence[Tensor]], layer: Layer, *args: Any
    ) -> tuple[list[Tensor], list[Tensor | None]] | None:
        """``block(layer, *args)`` and the gradients of its first result for the parameters, in one graph.

        Nothing is computed twice, so what the backward needs is in the pool. The tensors in ``args`` get no gradients.
        None, and nothing done, where it is not recorded.
        """
        shape, tensors = self._shape(block, layer, args, 0)
        if shape is None or shape.fails:
            return None
        shape.fill(tensors)
        try:
            found = shape.cell(layer).both()
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:  # an operator that waits for the device, for instance
            logger.warning(f"{block.__qualname__} runs block by block: it could not be recorded: {error}")
            shape.fails = True
            return None
        return [output.clone() for output in shape.outputs], found

    def _shape(
        self, block: Callable[..., Any], layer: Layer, args: Sequence[Any], carried: int
    ) -> tuple[Buffers | None, list[Tensor]]:
        leaves, structure = tree_flatten(args)
        places = [index for index, leaf in enumerate(leaves) if torch.is_tensor(leaf)]
        tensors = [leaves[index] for index in places]
        others = tuple(None if torch.is_tensor(leaf) else leaf for leaf in leaves)
        device = tensors[0].device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        kinds = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        key = (block.__qualname__, kinds, others, str(structure), precision, carried, self.situation())
        if key in self._shapes:
            self._shapes.move_to_end(key)
            return self._shapes[key], tensors
        if not self._is_known(key):
            return None, tensors

        def call(layer: Layer, given: Sequence[Tensor]) -> Any:
            filled = list(others)
            for index, tensor in zip(places, given):
                filled[index] = tensor
            # Without the cache every graph casts its weights itself, so none reads what another has freed.
            with torch.autocast(device, dtype=precision, enabled=precision is not None, cache_enabled=False):
                return block(layer, *tree_unflatten(filled, structure))

        while len(self._shapes) >= self.most:
            self._shapes.popitem(last=False)[1].release()
        self._pool = self._pool or self.recorder.pool()
        shape = Buffers(self.recorder, self._pool, call, precision, carried, block.__qualname__)
        try:
            shape.allocate(layer, tensors)
        except BaseException:  # out of memory, for instance: the next call must not find a half of it
            shape.release()
            raise
        self._shapes[key] = shape
        return shape, tensors

    def _is_known(self, key: Hashable) -> bool:
        seen = self._seen.pop(key, 0)
        if seen >= self.patience or len(self._shapes) < FIRST_SHAPES:
            return True
        self._seen[key] = seen + 1
        while len(self._seen) > KNOWN_SHAPES:
            self._seen.popitem(last=False)
        return False


def _replayed(shape: Buffers, layers: Sequence[Layer], tensors: Sequence[Tensor]) -> list[Tensor]:
    cells = [shape.cell(layer) for layer in layers]
    parameters = [parameter for cell in cells for parameter in cell.parameters]
    keeps = torch.is_grad_enabled() and any(t.requires_grad for t in (*tensors, *parameters))
    return list(_Replayed.apply(shape, cells, keeps, len(tensors), *tensors, *parameters))


class _Replayed(torch.autograd.Function):
    """One cell after another; the carried tensors of each are kept, what surrounds them once."""

    @staticmethod
    def forward(
        ctx: Any, shape: Buffers, cells: Sequence[Cell], keeps: bool, count: int, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        inputs, kept, recorder = tensors[:count], [], shape.recorder
        ctx.set_materialize_grads(False)
        shape.fill(inputs)
        ctx.positions = []
        for index, cell in enumerate(cells):
            if index and keeps:
                kept += [buffer.clone() for buffer in shape.inputs[: shape.carried]]
            ctx.positions.append(recorder.position())
            cell.forward()
        outputs = [buffer.clone() for buffer in shape.outputs]
        ctx.mark_non_differentiable(*(output for output in outputs if not output.is_floating_point()))
        ctx.shape, ctx.cells = shape, cells
        if keeps:
            ctx.save_for_backward(*inputs, *kept)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        shape, recorder, saved = ctx.shape, ctx.shape.recorder, ctx.saved_tensors
        now, carried, count = recorder.position(), ctx.shape.carried, len(ctx.shape.inputs)
        shape.fill(saved[carried:count], carried)
        comes = shape.fill_gradients(gradients)
        of_parameters: list[list[Tensor | None]] = []
        for index in reversed(range(len(ctx.cells))):
            first = count + (index - 1) * carried if index else 0
            shape.fill(saved[first : first + carried])
            comes, found = ctx.cells[index].backward(comes, ctx.positions[index])
            of_parameters.append(found)
        recorder.seek(now)
        results = shape.gradients()
        return None, None, None, None, *results, *(gradient for found in reversed(of_parameters) for gradient in found)


def release_graphs(model: Module) -> None:
    """Drop all graphs of a model and their memory; they are recorded again where they are needed."""
    for module in model.modules():
        graphs = module.__dict__.get(GRAPHS)
        if graphs is not None:
            graphs.release()
