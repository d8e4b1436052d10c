"""One rank of many on one device: right shapes, memory and bytes, wrong values.

torch's fake process group answers every collective at once and writes nothing; what it leaves unwritten is zero-filled
(in :mod:`megafold.evosp3d.collectives`), or NaNs would reach the alignment's singular values. Rank 0 is the one to
measure: its blocks are the longest.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist


@contextmanager
def emulated_ranks(size: int, rank: int = 0) -> Iterator[None]:
    """This process is one rank of ``size`` for the block, without the others.

    Raises:
        RuntimeError: where there is a process group already.
    """
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        raise RuntimeError("emulated ranks: this process is in a process group already")
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()
