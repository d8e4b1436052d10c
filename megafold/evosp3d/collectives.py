"""Differentiable collectives, and who sums which gradient.

**The one convention.** P ranks are one computation with P copies of every parameter. Rank r ends with a number L_r, and
what is differentiated is the sum of all L_r; nobody needs to form it. A loss that all ranks compute alike is divided by
P before it enters L_r; a loss over a shard enters as it is. Each collective's backward is the exact transpose of its
forward as a linear map over the ranks:

    =====================  ===========================================
    forward                backward
    =====================  ===========================================
    Gather  (all-gather)   reduce-scatter, summed: every rank that read a row sends what it wants of it
    Scatter (reduce-sc.)   all-gather
    Exchange (all-to-all)  the all-to-all back
    Sum     (all-reduce)   all-reduce
    narrow  (no message)   zeros around the block (plain autograd)
    =====================  ===========================================

So no operator has to know whether a tensor is "replicated" or who else read it: the gradient that a rank holds for its
copy of a parameter is d(sum of L) / d(that copy), and the gradient of the one parameter that the copies stand for is
their **sum over the group**: once, after the backward (:mod:`megafold.evosp3d.reduce`). Data-parallel groups are
averaged in the same reduction, since a batch's loss is a mean over its structures.

**Overlap.** :func:`start` sends at once and returns; :meth:`Flight.wait` gives the result. What is computed in between
runs under the message, and in the backward it does so again: the gradient leaves at what was the wait and is waited for
at what was the start, with the backward of what lay in between.

Sums over ranks are taken here, in float32 for half-precision tensors and always in the order of the ranks, so they are
rounded once and the same on every run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megafold.evosp3d.mesh import Shards

Pending = Callable[[], Tensor]
Landing = Callable[..., Tensor]

WIDE = torch.complex128  # the widest element; only copied
# Renamed by torch 2.13.
_ALL_GATHER = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Gather:
    """Every rank's block of dimension ``dim`` (``total`` long in all) -> the whole, on every rank."""

    dim: int
    total: int
    kind = "all_gather"

    @property
    def adjoint(self) -> Scatter:
        return Scatter(self.dim, self.total)

    def launch(self, x: Tensor, shards: Shards, operator: str) -> Pending:
        lengths = shards.lengths(self.total)
        block = x.movedim(self.dim, 0)
        rest = block.shape[1:]
        padded = _buffer((lengths[0], *rest), x, shards)
        padded[: block.shape[0]].copy_(block)
        whole = _buffer((shards.size * lengths[0], *rest), x, shards)
        shards.traffic.add(self.kind, operator, (shards.size - 1) * _bytes(padded))
        work = _ALL_GATHER(whole, padded, group=shards.group, async_op=True)

        def finish(sent: Tensor = padded) -> Tensor:
            work.wait()
            return whole[: self.total].movedim(0, self.dim)

        return finish

    def alone(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Scatter:
    """A tensor on every rank -> this rank's block of dimension ``dim`` of the sum over the ranks."""

    dim: int
    total: int
    kind = "reduce_scatter"

    @property
    def adjoint(self) -> Gather:
        return Gather(self.dim, self.total)

    def launch(self, x: Tensor, shards: Shards, operator: str) -> Pending:
        own, front = shards.block(self.total)[1], x.movedim(self.dim, 0)
        a_row = front[0].numel() if len(front) else 0
        sent = [length * a_row for length in shards.lengths(self.total)]
        received = [own * a_row] * shards.size
        parts, wait = _all_to_all(front.contiguous().view(-1), sent, received, shards, self.kind, operator)

        def finish() -> Tensor:
            wait()
            stacked = parts.view(shards.size, own, *front.shape[1:])
            wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
            return stacked.sum(0, dtype=wide).to(x.dtype).movedim(0, self.dim)

        return finish

    def alone(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Exchange:
    """A tensor sharded over ``join`` -> the same sharded over ``split`` (all-to-all); lengths are the wholes'.

    Blocks travel in the order of the tensor's dimensions, so that one side has nothing to copy where no dimension
    stands before the one that is cut (there) or joined (here): a batch of one structure, and rows or channels first.
    What is launched lands in a tensor of its own or in one that is given.
    """

    split: int
    split_total: int
    join: int
    join_total: int
    kind = "all_to_all"

    @property
    def adjoint(self) -> Exchange:
        return Exchange(self.join, self.join_total, self.split, self.split_total)

    def launch(self, x: Tensor, shards: Shards, operator: str) -> Landing:
        own, lengths = shards.block(self.split_total)[1], shards.lengths(self.join_total)
        shapes = [_with(x.shape, {self.split: own, self.join: length}) for length in lengths]
        received = [torch.Size(shape).numel() for shape in shapes]
        packed, sent = in_blocks(x, self.split, shards.lengths(self.split_total))
        flat, wait = _all_to_all(packed, sent, received, shards, self.kind, operator)

        def finish(into: Tensor | None = None) -> Tensor:
            wait()
            return from_blocks(flat, shapes, self.join, into)

        return finish

    def alone(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Sum:
    """A tensor on every rank -> the sum over the ranks, on every rank."""

    kind = "all_reduce"

    @property
    def adjoint(self) -> Sum:
        return self

    def launch(self, x: Tensor, shards: Shards, operator: str) -> Pending:
        total = x.clone(memory_format=torch.contiguous_format)
        shards.traffic.add(self.kind, operator, 2 * (shards.size - 1) * _bytes(total) // shards.size)
        work = dist.all_reduce(total, group=shards.group, async_op=True)

        def finish() -> Tensor:
            work.wait()
            return total

        return finish

    def alone(self, x: Tensor) -> Tensor:
        return x


Collective = Gather | Scatter | Exchange | Sum


class Flight:
    """A collective on its way. Between :func:`start` and :meth:`wait` the caller computes something else."""

    def __init__(self, what: Collective, shards: Shards, operator: str) -> None:
        self._what, self._shards, self._operator = what, shards, operator
        self._pending: Pending | None = None
        self._token: Tensor | None = None

    def send(self, x: Tensor) -> Flight:
        self._token = x if self._shards.size == 1 else _Start.apply(x, self)
        return self

    def wait(self) -> Tensor:
        """The result; to be called once."""
        token, self._token = self._token, None
        return self._what.alone(token) if self._shards.size == 1 else _Wait.apply(token, self)

    def launch(self, x: Tensor, *, back: bool) -> None:
        what = self._what.adjoint if back else self._what
        self._pending = what.launch(x, self._shards, self._operator)

    def land(self) -> Tensor:
        pending, self._pending = self._pending, None
        return pending()


def start(what: Collective, x: Tensor, shards: Shards, operator: str) -> Flight:
    """Send ``x``; ``operator`` names who asked, for the count of bytes."""
    return Flight(what, shards, operator).send(x)


def run(what: Collective, x: Tensor, shards: Shards, operator: str) -> Tensor:
    """Send ``x`` and wait for the result."""
    return start(what, x, shards, operator).wait()


class _Start(torch.autograd.Function):
    """Its output is empty: what is sent and what comes back go through the flight, on both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        flight.launch(x, back=False)
        return x.new_empty(0)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None]:
        return ctx.flight.land(), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, flight: Flight) -> Tensor:
        ctx.flight = flight
        return flight.land()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.flight.launch(gradient, back=True)
        return gradient.new_empty(0), None


def in_blocks(x: Tensor, dim: int, lengths: Sequence[int]) -> tuple[Tensor, list[int]]:
    """Blocks of a dimension, one after another in flat memory, and how many elements each has.

    ``x`` itself, flat, where it lies so already.
    """
    a_slice = torch.Size(_with(x.shape, {dim: 1})).numel()
    sizes = [length * a_slice for length in lengths]
    if torch.Size(x.shape[:dim]).numel() == 1:
        return x.contiguous().view(-1), sizes
    flat = x.new_empty(x.numel())
    if len(set(lengths)) == 1:
        blocks = x.unflatten(dim, (len(lengths), lengths[0])).movedim(dim, 0)
        copy_wide(flat.view(blocks.shape), blocks)
    else:
        for part, block in zip(flat.split(sizes), x.split(list(lengths), dim)):
            copy_wide(part.view(block.shape), block)
    return flat, sizes


def from_blocks(flat: Tensor, shapes: Sequence[Sequence[int]], dim: int, into: Tensor | None = None) -> Tensor:
    """Blocks of ``shapes``, one after another in flat memory, joined along a dimension; a view where that is one."""
    lengths = [shape[dim] for shape in shapes]
    whole = _with(shapes[0], {dim: sum(lengths)})
    if torch.Size(whole[:dim]).numel() == 1 and into is None:
        return flat.view(whole)
    into = flat.new_empty(whole) if into is None else into
    if len(set(lengths)) == 1:
        copy_wide(into.unflatten(dim, (len(lengths), lengths[0])).movedim(dim, 0), flat.view(len(shapes), *shapes[0]))
    else:
        parts = flat.split([torch.Size(shape).numel() for shape in shapes])
        for part, shape, place in zip(parts, shapes, into.split(lengths, dim)):
            copy_wide(place, part.view(shape))
    return into


def copy_wide(target: Tensor, source: Tensor) -> None:
    """``target.copy_(source)`` of one shape and dtype, 16 bytes at a time where both lie so in memory.

    A permuting copy of single half-precision numbers uses a fraction of the memory's bandwidth.
    """
    factor = WIDE.itemsize // source.element_size()
    if target.numel() and all(_is_aligned(tensor, factor) for tensor in (target, source)):
        target, source = target.view(WIDE), source.view(WIDE)
    target.copy_(source)


def _is_aligned(tensor: Tensor, factor: int) -> bool:
    numbers = (tensor.shape[-1], tensor.storage_offset(), *tensor.stride()[:-1])
    return tensor.stride(-1) == 1 and factor > 1 and not any(number % factor for number in numbers)


def _with(shape: Sequence[int], lengths: Mapping[int, int]) -> tuple[int, ...]:
    return tuple(lengths.get(dim, length) for dim, length in enumerate(shape))


def _all_to_all(
    packed: Tensor, sent: list[int], received: list[int], shards: Shards, kind: str, operator: str
) -> tuple[Tensor, Callable[[], None]]:
    """Send rank s the next ``sent[s]`` elements of a flat tensor; what is received lies flat in the ranks' order."""
    out = _buffer((sum(received),), packed, shards)
    shards.traffic.add(kind, operator, (sum(sent) - sent[shards.rank]) * packed.element_size())
    work = dist.all_to_all_single(out, packed, received, sent, group=shards.group, async_op=True)

    def wait(kept: Tensor = packed) -> None:
        work.wait()

    return out, wait


def _buffer(shape: tuple[int, ...], like: Tensor, shards: Shards) -> Tensor:
    """What a collective writes to; zeros where nobody will, since what lies there may be NaN."""
    return like.new_zeros(shape) if shards.emulated else like.new_empty(shape)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
