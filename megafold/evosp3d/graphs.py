"""Graphs of blocks that send messages to other ranks.

A message is a kernel of the graph like any other (NCCL and RCCL are captured with the stream they wait for), so a
replay sends what the block sent when it was recorded, and counts as much. Before it is recorded a block runs once,
which sends messages too: all ranks have to record the same blocks, or none. Their blocks have other shapes where a
dimension is cut unevenly, so the ranks agree on what is recorded, once a shape.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._pytree import tree_flatten

from megafold.model.graphs import BlockGraphs, Recorder
from megafold.model.recompute import THIRD_GROUPED_FROM

if TYPE_CHECKING:
    from megafold.evosp3d.mesh import Shards
    from megafold.evosp3d.traffic import Traffic

# Blocks on larger tensors (N above 790 on one rank, above 1580 on one of four, with 128 channels of pairs) keep a
# device busy without graphs.
MOST_ELEMENTS = 80_000_000
KNOWN_SHAPES = 4096
_ALIVE: WeakSet[RankGraphs] = WeakSet()


def release_all() -> None:
    """Drop the graphs of all models: a communicator that some graph still uses is never done with."""
    for graphs in list(_ALIVE):
        graphs.release()


class Counted:
    """A recorder whose replays count what they send."""

    def __init__(self, recorder: Recorder, traffic: Traffic) -> None:
        self.recorder, self._traffic = recorder, traffic
        self.runs_on, self.pool = recorder.runs_on, recorder.pool
        self.position, self.seek = recorder.position, recorder.seek

    def record(self, compute: Callable[[], None], pool: Any) -> Callable[[], None]:
        with self._traffic.apart() as sent:
            replay = self.recorder.record(compute, pool)

        def counted() -> None:
            self._traffic.add_all(sent)
            replay()

        return counted

    @contextmanager
    def rehearsal(self) -> Iterator[None]:
        with self._traffic.apart(), self.recorder.rehearsal():
            yield


class RankGraphs(BlockGraphs):
    """The graphs of a model's blocks on one rank of a sequence-parallel group."""

    def __init__(self, shards: Shards, recorder: Recorder | None = None, **options: Any) -> None:
        super().__init__(recorder, **options)
        self.recorder = Counted(self.recorder, shards.traffic)
        self._shards = shards
        self._agreed: dict[Any, bool] = {}
        _ALIVE.add(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> RankGraphs:
        return RankGraphs(self._shards, self.recorder.recorder, most=self.most, patience=self.patience)

    def runs(self, *args: Any) -> bool:
        """Whether blocks with these arguments are recorded, on every rank: asked once a shape."""
        tensors = [leaf for leaf in tree_flatten(args)[0] if torch.is_tensor(leaf)]
        # A rank without augmentations of a training step repeats one, as many as all ranks have of a rollout: the key
        # must tell the two apart there too, or this rank alone would not ask.
        kinds = tuple((tuple(t.shape), t.dtype, t.device.type, t.requires_grad) for t in tensors)
        key = torch.is_grad_enabled(), kinds, self.situation()
        if key not in self._agreed:
            if len(self._agreed) >= KNOWN_SHAPES:
                self._agreed.clear()
            own = super().runs(*args) and not any(map(_is_too_much, tensors))
            self._agreed[key] = self._agree(own, tensors[0].device)
        return self._agreed[key]

    def situation(self) -> Hashable:
        """How many augmentations all ranks have: of equal shares here others may be unequal elsewhere."""
        return self._shards.augmentations

    def _agree(self, own: bool, device: torch.device) -> bool:
        if self._shards.size == 1:
            return own
        all_do = torch.tensor(int(own), device=device)
        dist.all_reduce(all_do, op=dist.ReduceOp.MIN, group=self._shards.group)
        return bool(all_do.item())


def _is_too_much(tensor: Tensor) -> bool:
    """A tensor beyond MOST_ELEMENTS, or of pairs [b, n, N, c] so long that memory counts more than the host's time.

    What graphs work in serves nothing else.
    """
    is_long = tensor.ndim == 4 and tensor.shape[2] >= THIRD_GROUPED_FROM
    return is_long or tensor.numel() > MOST_ELEMENTS
