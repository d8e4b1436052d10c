"""What Gluon kernels say to the copy engine through barriers in shared memory."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

# Triton 3.7 renamed it.
thread_barrier = getattr(gl, "thread_barrier", None) or gl.barrier


@gluon.jit
def release(free):
    """The threads of a group have loaded a stage, which the copy engine may fill again.

    A barrier of threads does not wait for loads that are under way. Behind other threads' many stores these take
    longer than the copy engine to bring the next tile, and without the fence find pieces of that one."""
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(free, count=1)
