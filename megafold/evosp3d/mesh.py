"""Who holds which rows: a 2-D mesh (dp, sp) and the contiguous blocks of a dimension.

A dimension of n is cut into blocks of ceil(n / P); the last one that is not empty may be short, and ranks behind it
hold nothing. Nothing is ever padded: a rank's tensors hold its own rows and no others, so that there is no padding
which could be attended to.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megafold.evosp3d.traffic import Traffic

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Shards:
    """The ranks of one sequence-parallel group, seen from one of them.

    Attributes:
        rank, size: place of this rank in the group, and P.
        group: the process group; None stands for one device without a process group.
        emulated: collectives leave their outputs unwritten (torch's fake process group), so they are filled with zeros.
        traffic: bytes that this rank sent in the group.
        augmentations: how many the group denoises at the moment; 0 outside of :meth:`denoising`.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        self.group = group
        self.rank = dist.get_rank(group) if group is not None else 0
        self.size = dist.get_world_size(group) if group is not None else 1
        self.emulated = group is not None and dist.get_backend(group) == "fake"
        self.traffic = Traffic()
        self.augmentations = 0

    @contextmanager
    def denoising(self, total: int) -> Iterator[None]:
        """Around what works on this rank's share of ``total`` augmentations.

        Two totals may give a rank equal shares and another rank unequal ones: who remembers something by the shapes of
        its tensors has to remember it by the total too, or the ranks would not agree on what they have seen.
        """
        before, self.augmentations = self.augmentations, total
        try:
            yield
        finally:
            self.augmentations = before

    def block(self, total: int, rank: int | None = None) -> tuple[int, int]:
        """First index and length of a rank's block (this rank's by default) of a dimension of ``total``."""
        step = -(-total // self.size)
        start = min(step * (self.rank if rank is None else rank), total)
        return start, min(step, total - start)

    def lengths(self, total: int) -> list[int]:
        """Length of every rank's block."""
        return [self.block(total, rank)[1] for rank in range(self.size)]

    def narrow(self, tensor: Tensor, dim: int) -> Tensor:
        """This rank's block of a dimension of a tensor that every rank has (a view).

        Its gradient is this rank's part of the tensor's; see :mod:`megafold.evosp3d.collectives` for who sums what.
        """
        start, length = self.block(tensor.shape[dim])
        return tensor.narrow(dim, start, length)


def make_mesh(dp: int, sp: int, device: str) -> DeviceMesh:
    """The 2-D mesh (dp, sp) over all ranks of the default process group; neighbours share a structure.

    Its groups are connected when this returns: no communicator is made in a step, or while a graph is captured.

    Raises:
        ValueError: where dp * sp is not the number of ranks.
    """
    from torch.distributed.device_mesh import init_device_mesh

    if dp * sp != dist.get_world_size():
        raise ValueError(f"dp={dp} times sp={sp} is not the number of ranks, {dist.get_world_size()}")
    mesh = init_device_mesh(device, (dp, sp), mesh_dim_names=("dp", "sp"))
    for name in ("dp", "sp"):
        dist.all_reduce(torch.zeros((), device=device), group=mesh.get_group(name))
    return mesh
