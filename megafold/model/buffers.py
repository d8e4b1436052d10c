"""Fixed memory that the graphs of one shape read and write, and the graphs of one block on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from loguru import logger
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

if TYPE_CHECKING:
    from megafold.model.graphs import Layer, Recorder

ALIGNMENT = 64  # elements: what is cut from one allocation starts where a new one would


class Buffers:
    """What the blocks of one shape share: buffers, a pool, and the blocks.

    Attributes:
        inputs: what the blocks read. The first ``carried`` hold what one block hands to the next.
        outputs: what the blocks write; the carried inputs themselves where blocks ``chains``.
        structure: of the output, for pytrees.
        fails: a graph of it could not be recorded: its blocks compute on the buffers one operator at a time.
        name: of the block, for warnings.
        gives: dtypes of the output, None where its shapes are not those of the carried inputs.
    """

    def __init__(
        self,
        recorder: Recorder,
        pool: Any,
        call: Callable[[Layer, Sequence[Tensor]], Any],
        precision: torch.dtype | None,
        carried: int,
        name: str = "a block",
    ) -> None:
        self.recorder, self.pool, self.call, self.precision, self.carried = recorder, pool, call, precision, carried
        self.name = name
        self.inputs: list[Tensor] = []
        self.outputs: list[Tensor] = []
        self.wants: list[bool] = []
        self.chains = False
        self.fails = False
        self.structure: Any = None
        self.gives: list[torch.dtype] | None = None
        # Gradients of the outputs (where blocks chain also those of the carried inputs), of the inputs, and of the
        # parameters one after another.
        self.of_outputs: list[Tensor | None] = []
        self.of_inputs: list[Tensor | None] = []
        self._flat: dict[int, Tensor] = {}
        self._reached: list[bool] = []
        self._cells: dict[tuple[int, ...], Cell] = {}
        self.warm: set[Any] = set()  # what has run: kinds of layers, and kinds with the outputs that have a gradient

    def allocate(self, layer: Layer, tensors: Sequence[Tensor]) -> None:
        """Buffers as ``tensors`` and as what ``layer`` makes of them; whatever compiles or tunes does so now."""
        self.inputs = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in tensors]
        self.fill([tensor.detach() for tensor in tensors])
        position = self.recorder.position()
        with self.recorder.rehearsal():
            outputs, self.structure = tree_flatten(self.cell(layer).compute())
        self.recorder.seek(position)
        self.warm.add(self.cell(layer).kind)
        self.wants = [tensor.requires_grad for tensor in tensors]
        if not self.carried:
            self.outputs = [torch.empty_like(output, memory_format=torch.contiguous_format) for output in outputs]
            return
        before = self.inputs[: self.carried]
        if [output.shape for output in outputs] == [buffer.shape for buffer in before]:
            self.gives = [output.dtype for output in outputs]
        self.chains = self.gives == [buffer.dtype for buffer in before]
        if self.chains:
            self.outputs = before
            self.wants[: self.carried] = [buffer.is_floating_point() for buffer in before]
        else:  # nothing will run on these
            self.inputs = []

    def release(self) -> None:
        """Drop the graphs; they and this refer to one another."""
        self._cells.clear()

    def cell(self, layer: Layer) -> Cell:
        """The graphs of one block, recorded anew where a weight has moved."""
        key = tuple(id(module) for module in layer)
        found = self._cells.get(key)
        if found is None or found.moved():
            found = self._cells[key] = Cell(self, layer)
        return found

    def fill(self, tensors: Sequence[Tensor], first: int = 0) -> None:
        """Put ``tensors`` where the blocks read them, from the input ``first`` on."""
        for buffer, tensor in zip(self.inputs[first:], tensors):
            buffer.copy_(tensor)

    def fill_gradients(self, gradients: Sequence[Tensor | None]) -> tuple[bool, ...]:
        """Those of the outputs, before the last block's backward; returns which there are."""
        if not self.of_outputs:
            of_outputs = [torch.empty_like(out) if out.is_floating_point() else None for out in self.outputs]
            of_inputs = [
                torch.empty_like(buffer) if wants and index >= (self.carried if self.chains else 0) else None
                for index, (buffer, wants) in enumerate(zip(self.inputs, self.wants))
            ]
            if self.chains:
                of_inputs[: self.carried] = of_outputs
            self.of_outputs, self.of_inputs = of_outputs, of_inputs  # both or, out of memory, none
        for buffer, gradient in zip(self.of_outputs, gradients):
            if gradient is not None:
                buffer.copy_(gradient)
        first = self.carried if self.chains else 0
        kept = [buffer for buffer in self.of_inputs[first:] if buffer is not None]
        if kept:
            torch._foreach_zero_(kept)
        self._reached = [False] * len(self.inputs)
        return tuple(gradient is not None for gradient in gradients)

    def reach(self, inputs: Sequence[int]) -> tuple[bool, ...]:
        """Note which inputs a block had gradients of; returns which outputs of the block before have some."""
        for index in inputs:
            self._reached[index] = True
        if self.chains:
            self._reached[: self.carried] = [index in inputs for index in range(self.carried)]
        return tuple(self._reached[: self.carried])

    def record(self, compute: Callable[[], None]) -> Callable[[], None]:
        """What runs ``compute`` again: as a graph, or as it is where an operator cannot be recorded."""
        if self.fails:
            return compute
        try:
            return self.recorder.record(compute, self.pool)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # of torch, or what a library makes of it: a wait for the device, for instance
            reason = " ".join(str(error).split())[:300]
            logger.warning(f"{self.name} runs one operator at a time: it could not be recorded: {reason}")
            self.fails = True
            return compute

    def gradients(self) -> list[Tensor | None]:
        """Those of the inputs, after the first block's backward."""
        return [
            buffer.clone() if reached and buffer is not None else None
            for buffer, reached in zip(self.of_inputs, self._reached)
        ]

    def flat(self, size: int, like: Tensor) -> Tensor:
        """Room for the gradients of the parameters of a block with ``size`` of them, as ``like``."""
        if size not in self._flat:
            self._flat[size] = torch.empty(size, dtype=like.dtype, device=like.device)
        return self._flat[size]


class Cell:
    """One block at one shape; graphs are recorded when they are first needed."""

    def __init__(self, shape: Buffers, layer: Layer) -> None:
        self._shape, self._layer = shape, layer
        self.kind = tuple(type(module) for module in layer)
        self._owned = [
            (owner, name)
            for module in layer
            if module is not None
            for owner in module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        unique = {id(owner._parameters[name]): owner._parameters[name] for owner, name in self._owned}
        self.parameters = [parameter for parameter in unique.values() if parameter.requires_grad]
        narrows = {
            id(owner._parameters[name]) for owner, name in self._owned if shape.precision and type(owner) is nn.Linear
        }
        self._narrows = [id(parameter) in narrows for parameter in self.parameters]
        self._facts = self._now()
        sizes = [parameter.numel() for parameter in self.parameters]
        self._starts = [0]
        for size in sizes:
            self._starts.append(self._starts[-1] + -(-size // ALIGNMENT) * ALIGNMENT)
        self._forward: Callable[[], None] | None = None
        # By which outputs have a gradient: nothing flows back to what no loss depends on.
        self._backward: dict[tuple[bool, ...], tuple[Callable[[], None], _Reached]] = {}
        self._both: tuple[Callable[[], None], _Reached] | None = None

    def _now(self) -> list[tuple[int, bool]]:
        return [
            (parameter.data_ptr(), parameter.requires_grad)
            for parameter in (owner._parameters[name] for owner, name in self._owned)
        ]

    def moved(self) -> bool:
        """Whether a weight is elsewhere, or trained or not, as when the graphs were recorded."""
        return self._facts != self._now()

    def forward(self) -> None:
        """From the input buffers to the output buffers."""
        recorder = self._shape.recorder
        if self._forward is None:
            position = recorder.position()
            if self.kind not in self._shape.warm:
                with recorder.rehearsal():
                    self.compute()
                self._shape.warm.add(self.kind)
                recorder.seek(position)
            self._forward = self._shape.record(self._compute)
            recorder.seek(position)
        self._forward()

    def backward(self, comes: tuple[bool, ...], position: Any) -> tuple[tuple[bool, ...], list[Tensor | None]]:
        """From the buffers of gradients of the outputs that come to those of the inputs.

        Returns which of the carried inputs have a gradient, and the gradients of the parameters (None: has none).
        """
        shape, recorder = self._shape, self._shape.recorder
        if comes not in self._backward:
            reached = _Reached()
            if (self.kind, comes) not in shape.warm:
                recorder.seek(position)
                with recorder.rehearsal():
                    self._compute_gradients(comes, reached, writes=False)
                shape.warm.add((self.kind, comes))
            recorder.seek(position)
            replay = shape.record(partial(self._compute_gradients, comes, reached, writes=True))
            self._backward[comes] = replay, reached
        replay, reached = self._backward[comes]
        recorder.seek(position)
        replay()
        return shape.reach(reached.inputs), self._of_parameters(reached)

    def both(self) -> list[Tensor | None]:
        """From the input buffers to the output buffers; returns the gradients of the parameters of the first output.

        Raises:
            RuntimeError: it cannot be recorded.
        """
        shape, recorder = self._shape, self._shape.recorder
        comes = (True, *(False for _ in shape.outputs[1:]))
        shape.fill_gradients([torch.ones_like(shape.outputs[0]), *(None for _ in shape.outputs[1:])])
        if self._both is None:
            reached, position = _Reached(), recorder.position()
            with recorder.rehearsal():
                self._compute_gradients(comes, reached, writes=False)
            recorder.seek(position)
            compute = partial(self._compute_gradients, comes, reached, writes=True, gives=True)
            self._both = recorder.record(compute, shape.pool), reached
            recorder.seek(position)
        replay, reached = self._both
        replay()
        return self._of_parameters(reached)

    def _of_parameters(self, reached: _Reached) -> list[Tensor | None]:
        results: list[Tensor | None] = [None] * len(self.parameters)
        if reached.parameters:  # they outlive the next block's, so they are copied, all at once
            of_parameters = self._cut(self._flat().clone(), reached.parameters)
            for index, gradient in zip(reached.parameters, of_parameters):
                results[index] = gradient
        return results

    def compute(self) -> Any:
        """What the block makes of the input buffers."""
        with torch.no_grad(), self._in_place(self._narrowed()):
            return self._shape.call(self._layer, self._shape.inputs)

    def _flat(self) -> Tensor:
        return self._shape.flat(self._starts[-1], self.parameters[0])

    def _compute(self) -> None:
        for buffer, output in zip(self._shape.outputs, tree_flatten(self.compute())[0]):
            buffer.copy_(output)

    def _compute_gradients(self, comes: Sequence[bool], reached: _Reached, writes: bool, gives: bool = False) -> None:
        """Gradients, written to their buffers if ``writes``, and the outputs too if ``gives``."""
        shape = self._shape
        inputs = [t.detach().requires_grad_(w) for t, w in zip(shape.inputs, shape.wants)]
        # Leaves of this recording: the parameters' own belong to the stream of the step, which must not be waited
        # for in a capture.
        weights = [weight.requires_grad_() for weight in self._narrowed()]
        sources = [t for t in inputs if t.requires_grad] + weights
        # Around the backward too: what a block itself checkpoints is computed again there.
        with self._in_place(weights):
            with torch.enable_grad():
                outputs = tree_flatten(shape.call(self._layer, inputs))[0]
            if gives:
                for buffer, output in zip(shape.outputs, outputs):
                    buffer.copy_(output.detach())
            pairs = [(o, g) for o, g, c in zip(outputs, shape.of_outputs, comes) if c and o.requires_grad]
            if not pairs:
                return
            outputs, given = zip(*pairs)
            found = torch.autograd.grad(outputs, sources, given, allow_unused=True)
        wanted = iter(found)
        of_inputs = [next(wanted) if want else None for want in shape.wants]
        of_parameters = list(wanted)
        reached.inputs = [index for index, gradient in enumerate(of_inputs) if gradient is not None]
        reached.parameters = [index for index, gradient in enumerate(of_parameters) if gradient is not None]
        if writes:
            self._write(of_inputs, of_parameters)

    def _write(self, of_inputs: Sequence[Tensor | None], of_parameters: Sequence[Tensor | None]) -> None:
        shape = self._shape
        for index, (buffer, gradient) in enumerate(zip(shape.of_inputs, of_inputs)):
            if gradient is None:
                continue
            if shape.chains and index < shape.carried:
                buffer.copy_(gradient)
            else:
                buffer.add_(gradient)
        for narrow in (False, True):  # one launch each: of one dtype
            some = [i for i, g in enumerate(of_parameters) if g is not None and self._narrows[i] == narrow]
            if some:
                torch._foreach_copy_(self._cut(self._flat(), some), [of_parameters[i] for i in some])

    def _cut(self, flat: Tensor, indices: Sequence[int]) -> list[Tensor]:
        """The places of some parameters in a tensor that holds all of them one after another."""
        parameters = ((self.parameters[index], self._starts[index]) for index in indices)
        return [flat[start : start + parameter.numel()].view(parameter.shape) for parameter, start in parameters]

    def _narrowed(self) -> list[Tensor]:
        """The parameters, those of linear layers in the dtype of products where autocast is on: cast in one launch."""
        weights = [parameter.detach() for parameter in self.parameters]
        some = [index for index, narrow in enumerate(self._narrows) if narrow]
        if some:
            dtype, device = self._shape.precision, weights[0].device
            room = torch.empty(self._starts[-1], dtype=dtype, device=device)
            casts = self._cut(room, some)
            torch._foreach_copy_(casts, [weights[i] for i in some])
            for index, cast in zip(some, casts):
                weights[index] = cast.detach()
        return weights

    @contextmanager
    def _in_place(self, others: Sequence[Tensor]) -> Iterator[None]:
        """The modules compute with ``others`` instead of their parameters."""
        other = {id(parameter): tensor for parameter, tensor in zip(self.parameters, others)}
        places = [
            (owner, name, owner._parameters[name])
            for owner, name in self._owned
            if id(owner._parameters[name]) in other
        ]
        try:
            for owner, name, parameter in places:
                owner._parameters[name] = other[id(parameter)]
            yield
        finally:
            for owner, name, parameter in places:
                owner._parameters[name] = parameter


@dataclass
class _Reached:
    """Which inputs and parameters of a block have a gradient."""

    inputs: list[int] = field(default_factory=list)
    parameters: list[int] = field(default_factory=list)
