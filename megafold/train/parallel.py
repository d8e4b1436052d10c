"""A model on several ranks, for the trainer: parallelize it, reduce its gradients, agree on what must be agreed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megafold.evosp3d.forward import local_batch
from megafold.evosp3d.mesh import Shards, make_mesh
from megafold.evosp3d.parallelize import parallelize
from megafold.evosp3d.reduce import Doubtful, GradientReducer

if TYPE_CHECKING:
    from megafold.model.plan import Plan


class Parallel:
    """The (dp, sp) mesh over all ranks of the process group, and this rank's place in it.

    Args:
        sp: ranks that share a structure; the others make up data-parallel replicas.

    Raises:
        ValueError: where sp does not divide the number of ranks.
    """

    def __init__(self, sp: int, device: torch.device) -> None:
        size = dist.get_world_size()
        if size % sp:
            raise ValueError(f"sp={sp} does not divide the number of ranks, {size}")
        self.sp, self.dp, self.device = sp, size // sp, device
        self.rank = dist.get_rank()
        self._mesh = make_mesh(self.dp, sp, device.type)
        self.replica = self._mesh.get_local_rank("dp")
        self.shards: Shards | None = None
        self._reducer: GradientReducer | None = None

    def prepare(self, model: nn.Module, plan: Plan | None) -> None:
        """Make rank 0's weights everybody's and the model parallel; the model is on the device already."""
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.data, src=0)
        self.shards = parallelize(model, self._mesh, plan)
        self._reducer = GradientReducer(model.parameters(), dp=self.dp, traffic=self.shards.traffic)

    def local(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What of a batch this rank has to bring to its device."""
        return local_batch(dict(batch), self.shards)

    def reduce(self) -> Doubtful:
        """After the backward: every gradient becomes that of the global batch; which of them may be none at all."""
        return self._reducer.sum()

    def mean(self, loss: Tensor, terms: Mapping[str, Tensor]) -> tuple[Tensor, dict[str, Tensor]]:
        """Loss and terms of the global batch: the mean over the replicas, whose ranks agree already."""
        if self.dp == 1:
            return loss, dict(terms)
        values = torch.stack([loss, *(term.to(loss) for term in terms.values())])
        dist.all_reduce(values)
        loss, *rest = (values / dist.get_world_size()).unbind()
        return loss, dict(zip(terms, rest))

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on some rank."""
        found = torch.tensor(float(flag), device=self.device)
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
        return bool(found.item())

    def from_replicas(self, value: Any) -> list[Any]:
        """``value`` of the first rank of every replica, on all ranks."""
        values: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(values, value)
        return values[:: self.sp]
