"""Blocks of a stack as CUDA (HIP) graphs: a block costs the host two launches, one in the forward, one in the backward.

A block has two graphs. The first computes its output without keeping anything; the second, in the backward, computes it
again and then its gradients, so one tensor a block is kept, as under checkpointing. Both read the state of the device's
generator when they run: put back to where it stood in the forward, it draws the same dropout again.

Graphs hold addresses, so inputs are copied into buffers that all blocks of a shape share, and weights that moved are
captured anew. All graphs of one shape share a memory pool, in which they need what one block needs: they run one after
another, and what leaves a graph is copied out. A shape that was not used for longest is dropped with its pool.

Nothing here has run on a GPU yet; `Emulated` has the same interface and checks everything but the graphs themselves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import Module
from torch.utils._pytree import tree_flatten, tree_unflatten

MOST_SHAPES = 4

Compute = Callable[[], list[Tensor]]


class Recorder(Protocol):
    """Records a computation on fixed buffers, to run it again."""

    def runs_on(self, device: torch.device) -> bool: ...

    def pool(self) -> Any:
        """Memory for the recordings of one shape; freed with the last of them."""

    def record(self, compute: Compute, pool: Any) -> tuple[Callable[[], None], list[Tensor]]:
        """What runs it again, and its outputs, which every run writes anew."""

    def position(self) -> Any:
        """Where the random numbers stand."""

    def seek(self, position: Any) -> None: ...


class Captured:
    """CUDA and HIP graphs."""

    def runs_on(self, device: torch.device) -> bool:
        return device.type == "cuda"

    def pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    def record(self, compute: Compute, pool: Any) -> tuple[Callable[[], None], list[Tensor]]:
        here = torch.cuda.current_stream()
        aside = torch.cuda.Stream()
        aside.wait_stream(here)
        with torch.cuda.stream(aside):  # what compiles, tunes or allocates workspace does so before the capture
            compute()
        here.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool):
            outputs = compute()
        return graph.replay, outputs

    def position(self) -> int:
        return self._generator().get_offset()

    def seek(self, position: int) -> None:
        self._generator().set_offset(position)

    def _generator(self) -> torch.Generator:
        return torch.cuda.default_generators[torch.cuda.current_device()]


class Emulated:
    """The same on a CPU, by computing anew: for tests."""

    def runs_on(self, device: torch.device) -> bool:
        return device.type == "cpu"

    def pool(self) -> Any:
        return object()

    def record(self, compute: Compute, pool: Any) -> tuple[Callable[[], None], list[Tensor]]:
        outputs = [output.clone() for output in compute()]

        def replay() -> None:
            for output, fresh in zip(outputs, compute()):
                output.copy_(fresh)

        return replay, outputs

    def position(self) -> Tensor:
        return torch.get_rng_state()

    def seek(self, position: Tensor) -> None:
        torch.set_rng_state(position)


class BlockGraphs:
    """The graphs of a model's blocks, for the last ``most`` shapes."""

    def __init__(self, recorder: Recorder | None = None, most: int = MOST_SHAPES) -> None:
        self.recorder, self.most = recorder or Captured(), most
        self._shapes: OrderedDict[Hashable, _Shape] = OrderedDict()

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockGraphs:
        return BlockGraphs(self.recorder, self.most)  # a copy of a model has weights elsewhere

    @property
    def shapes(self) -> int:
        """How many shapes have graphs now."""
        return len(self._shapes)

    def release(self) -> None:
        """Drop every graph and its memory."""
        self._shapes.clear()

    def runs(self, *args: Any) -> bool:
        """Whether blocks with these arguments can be recorded: all their tensors are on the recorder's device."""
        tensors = [leaf for leaf in tree_flatten(args)[0] if torch.is_tensor(leaf)]
        return all(self.recorder.runs_on(tensor.device) for tensor in tensors)

    def run(self, block: Callable[..., Any], layer: Sequence[Module | None], *args: Any) -> Any:
        """``block(layer, *args)``, tensors anywhere in ``args`` and in the result; nothing but they may change."""
        leaves, structure = tree_flatten(args)
        places = [index for index, leaf in enumerate(leaves) if torch.is_tensor(leaf)]
        tensors = [leaves[index] for index in places]
        others = tuple(leaf for leaf in leaves if not torch.is_tensor(leaf))
        device = tensors[0].device.type
        precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None
        kinds = tuple((tuple(t.shape), t.dtype, t.requires_grad) for t in tensors)
        shape = self._shape((block.__qualname__, kinds, others, str(structure), precision), tensors)

        def call(given: Sequence[Tensor]) -> Any:
            filled = list(leaves_of_nothing)
            for index, tensor in zip(places, given):
                filled[index] = tensor
            # Without the cache every graph casts its weights itself, so none reads what another has freed.
            with torch.autocast(device, dtype=precision, enabled=precision is not None, cache_enabled=False):
                return block(layer, *tree_unflatten(filled, structure))

        leaves_of_nothing = [None if torch.is_tensor(leaf) else leaf for leaf in leaves]
        parameters = [p for module in layer if module is not None for p in module.parameters() if p.requires_grad]
        cell = shape.cell(id(layer), [module for module in layer if module is not None], call, parameters)
        outputs = _Replayed.apply(cell, len(tensors), *tensors, *parameters)
        return tree_unflatten(list(outputs), cell.structure)

    def _shape(self, key: Hashable, tensors: Sequence[Tensor]) -> _Shape:
        if key in self._shapes:
            self._shapes.move_to_end(key)
        else:
            while len(self._shapes) >= self.most:
                self._shapes.popitem(last=False)
            self._shapes[key] = _Shape(self.recorder, tensors)
        return self._shapes[key]


class _Shape:
    """What the blocks of one shape share: buffers for their inputs, a pool, and the blocks."""

    def __init__(self, recorder: Recorder, tensors: Sequence[Tensor]) -> None:
        self.recorder, self.pool = recorder, recorder.pool()
        self.inputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        self.wants = [tensor.requires_grad for tensor in tensors]
        self._cells: dict[int, _Cell] = {}

    def cell(
        self, key: int, modules: Sequence[Module], call: Callable[..., Any], parameters: list[Tensor]
    ) -> _Cell:
        places = tuple(parameter.data_ptr() for parameter in parameters)
        found = self._cells.get(key)
        if found is None or found.places != places:
            found = self._cells[key] = _Cell(self, modules, call, parameters, places)
        return found


class _Cell:
    """One block at one shape; graphs are recorded when they are first needed."""

    def __init__(
        self,
        shape: _Shape,
        modules: Sequence[Module],
        call: Callable[..., Any],
        parameters: list[Tensor],
        places: tuple[int, ...],
    ) -> None:
        self.shape, self.places = shape, places
        self._modules, self._call, self._parameters = modules, call, parameters
        self._forward: tuple[Callable[[], None], list[Tensor]] | None = None
        # By which outputs have a gradient: nothing flows back to what no loss depends on.
        self._backward: dict[tuple[bool, ...], tuple[Callable[[], None], list[Tensor], _Gradients]] = {}
        self.structure: Any = None

    def forward(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], Any]:
        """The outputs, and where the random numbers stood."""
        recorder = self.shape.recorder
        position = recorder.position()
        self._fill(tensors)
        if self._forward is None:
            self._forward = recorder.record(self._compute, self.shape.pool)
            recorder.seek(position)
        replay, outputs = self._forward
        replay()
        return [output.clone() for output in outputs], position

    def backward(
        self, tensors: Sequence[Tensor], gradients: Sequence[Tensor | None], position: Any
    ) -> list[Tensor | None]:
        """Gradients of the inputs and of the parameters, None where there is none."""
        recorder, now = self.shape.recorder, self.shape.recorder.position()
        self._fill(tensors)
        kind = tuple(gradient is not None for gradient in gradients)
        if kind not in self._backward:
            facts = _Gradients([None if gradient is None else gradient.clone() for gradient in gradients])
            recorder.seek(position)
            self._backward[kind] = (*recorder.record(partial(self._compute_gradients, facts), self.shape.pool), facts)
        replay, found, facts = self._backward[kind]
        for buffer, gradient in zip(facts.given, gradients):
            if buffer is not None:
                buffer.copy_(gradient)
        recorder.seek(position)
        replay()
        recorder.seek(now)
        *of_inputs, flat = found
        results: list[Tensor | None] = [None] * (len(self.shape.inputs) + len(self._parameters))
        for index, gradient in zip(facts.inputs, of_inputs):
            results[index] = gradient.clone()
        sizes = [self._parameters[index].numel() for index in facts.parameters]
        for index, part in zip(facts.parameters, flat.clone().split(sizes)):
            results[len(self.shape.inputs) + index] = part.view_as(self._parameters[index])
        return results

    def _fill(self, tensors: Sequence[Tensor]) -> None:
        for buffer, tensor in zip(self.shape.inputs, tensors):
            buffer.copy_(tensor)

    def _compute(self) -> list[Tensor]:
        with torch.no_grad():
            outputs, self.structure = tree_flatten(self._call(self.shape.inputs))
        return outputs

    def _compute_gradients(self, facts: _Gradients) -> list[Tensor]:
        with torch.enable_grad():
            inputs = [t.detach().requires_grad_(w) for t, w in zip(self.shape.inputs, self.shape.wants)]
            # Leaves of this recording: the parameters' own belong to the stream of the step, which must not be waited
            # for in a capture.
            weights = [parameter.detach().requires_grad_() for parameter in self._parameters]
            with _in_place_of(self._parameters, weights, self._modules):
                outputs = tree_flatten(self._call(inputs))[0]
        sources = [t for t in inputs if t.requires_grad] + weights
        pairs = [(o, g) for o, g in zip(outputs, facts.given) if o.requires_grad and g is not None]
        outputs, given = zip(*pairs)
        found = torch.autograd.grad(outputs, sources, given, allow_unused=True)
        wanted = iter(found)
        of_inputs = [next(wanted) if want else None for want in self.shape.wants]
        of_parameters = list(wanted)
        facts.inputs = [index for index, gradient in enumerate(of_inputs) if gradient is not None]
        facts.parameters = [index for index, gradient in enumerate(of_parameters) if gradient is not None]
        flat = torch.cat([of_parameters[index].reshape(-1) for index in facts.parameters])
        return [*(of_inputs[index] for index in facts.inputs), flat]


@dataclass
class _Gradients:
    """Of one recorded backward: buffers for what comes in, and which inputs and parameters have a gradient."""

    given: list[Tensor | None]
    inputs: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)


@contextmanager
def _in_place_of(parameters: Sequence[Tensor], others: Sequence[Tensor], modules: Sequence[Module]) -> Iterator[None]:
    """The modules compute with ``others`` instead of ``parameters``."""
    other = {id(parameter): tensor for parameter, tensor in zip(parameters, others)}
    places = [
        (owner._parameters, name, parameter)
        for module in modules
        for owner in module.modules()
        for name, parameter in owner._parameters.items()
        if id(parameter) in other
    ]
    try:
        for owned, name, parameter in places:
            owned[name] = other[id(parameter)]
        yield
    finally:
        for owned, name, parameter in places:
            owned[name] = parameter


class _Replayed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, cell: _Cell, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[:count]
        ctx.set_materialize_grads(False)
        outputs, ctx.position = cell.forward(inputs)
        ctx.cell = cell
        ctx.save_for_backward(*inputs)
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        return None, None, *ctx.cell.backward(ctx.saved_tensors, gradients, ctx.position)
