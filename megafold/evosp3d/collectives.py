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

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megafold.evosp3d.mesh import Shards

Pending = Callable[[], Tensor]

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
        own = shards.block(self.total)[1]
        parts, wait = _all_to_all(x.movedim(self.dim, 0), self.total, [own] * shards.size, shards, self.kind, operator)

        def finish() -> Tensor:
            wait()
            stacked = parts.unflatten(0, (shards.size, own)) if own else parts.new_zeros(1, 0, *parts.shape[1:])
            wide = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
            return stacked.sum(0, dtype=wide).to(x.dtype).movedim(0, self.dim)

        return finish

    def alone(self, x: Tensor) -> Tensor:
        return x


@dataclass(frozen=True)
class Exchange:
    """A tensor sharded over ``join`` -> the same sharded over ``split`` (all-to-all); lengths are the wholes'."""

    split: int
    split_total: int
    join: int
    join_total: int
    kind = "all_to_all"

    @property
    def adjoint(self) -> Exchange:
        return Exchange(self.join, self.join_total, self.split, self.split_total)

    def launch(self, x: Tensor, shards: Shards, operator: str) -> Pending:
        dims = (self.split, self.join)
        front = x.movedim(dims, (0, 1))
        own, lengths = shards.block(self.split_total)[1], shards.lengths(self.join_total)
        rest = front.shape[2:]
        sizes = [own * length for length in lengths]
        # Blocks come flat, since those of different ranks have different lengths along the joined dimension.
        flat, wait = _all_to_all(front, self.split_total, sizes, shards, self.kind, operator, rest)

        def finish() -> Tensor:
            wait()
            if len(set(lengths)) == 1:
                joined = flat.view(shards.size, own, lengths[0], *rest).transpose(0, 1).flatten(1, 2)
            else:
                parts = flat.split(sizes)
                joined = torch.cat([part.view(own, n, *rest) for part, n in zip(parts, lengths)], dim=1)
            return joined.movedim((0, 1), dims)

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


def _all_to_all(
    x: Tensor, total: int, received: list[int], shards: Shards, kind: str, operator: str, rest: tuple | None = None
) -> tuple[Tensor, Callable[[], None]]:
    """Send rank s block s of the first dimension (``total`` long); ``received`` counts what each rank sends here.

    Counts are in units of x[0], or of x[0, 0] where ``rest`` (the shape of that) is given and blocks arrive flat.
    """
    inner = 1 if rest is None else x.shape[1]
    sent = [length * inner for length in shards.lengths(total)]
    unit = x.shape[1:] if rest is None else rest
    out = _buffer((sum(received), *unit), x, shards)
    packed = x.contiguous().view(sum(sent), *unit) if x.numel() else x.new_empty((sum(sent), *unit))
    shards.traffic.add(kind, operator, (sum(sent) - sent[shards.rank]) * x.element_size() * torch.Size(unit).numel())
    work = dist.all_to_all_single(out, packed, received, sent, group=shards.group, async_op=True)

    def wait(kept: Tensor = packed) -> None:
        work.wait()

    return out, wait


def _buffer(shape: tuple[int, ...], like: Tensor, shards: Shards) -> Tensor:
    """What a collective writes to; zeros where nobody will, since what lies there may be NaN."""
    return like.new_zeros(shape) if shards.emulated else like.new_empty(shape)


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
