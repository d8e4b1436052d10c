"""Operands of a triangle multiplication, as `project_kernel` of `triangle_multiplication.kernels` makes them, where
pairs are not padded: channels [channels, M] of M = N^2 pairs.

Here the pairs are the columns of the products, so it is rows of pairs that are dealt out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from megafold.evofusion.hopper.common import (
    TILE,
    init_barriers,
    normalize,
    sigmoid,
    spread,
    tiles_of,
    wide_layout,
)
from megafold.gluon_barriers import thread_barrier


@gluon.jit
def load_partition(shared, loads, C: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr):
    w_s, x_s, w_ready, ready, free = shared
    x, w, tiles = loads
    mbarrier.expect(w_ready, 4 * C // TILE * w.block_type.nbytes)
    for part in range(0, 4 * C // TILE):
        tma.async_copy_global_to_shared(w, [part * TILE, 0], w_ready, w_s.index(part))
    for count in range(0, tiles_of(0, tiles, 1)):
        tile = gl.program_id(0) + count * gl.num_programs(0)
        stage = count % STAGES
        mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
        mine = ready.index(2 * stage + count % 2)
        mbarrier.expect(mine, x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [tile * (PAIRS // 32), 0, 0, 0, 0], mine, x_s.index(stage))


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, C: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr,
    NORM: gl.constexpr, HAS_MASK: gl.constexpr,
):  # fmt: skip
    w_s, x_s, w_ready, ready, free = shared
    shift, mask, operands, M, tiles, eps = work
    dtype: gl.constexpr = w_s.dtype
    PARTS: gl.constexpr = 2 * C // TILE
    # A group comes back to a stage after so many tiles.
    ROUND: gl.constexpr = STAGES * (1 + STAGES % 2)
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, PAIRS, 16])
    wide: gl.constexpr = wide_layout(PAIRS)
    across: gl.constexpr = gl.BlockedLayout([1, 8], [8, 4], [4, 1], [1, 0])
    zero = gl.zeros([TILE, PAIRS], gl.float32, product)
    o = gl.arange(0, TILE, gl.SliceLayout(1, wide))
    l = gl.arange(0, PAIRS, gl.SliceLayout(0, wide))  # noqa: E741
    mbarrier.wait(w_ready, 0)
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        count = 2 * turn + GROUP
        start = (gl.program_id(0) + count * gl.num_programs(0)) * PAIRS
        stage = count % STAGES
        rows = x_s.index(stage).reshape([PAIRS, C])
        at = o.to(gl.int64)[:, None] * M + (start + l)[None, :]
        inside = (start + l < M)[None, :]
        mbarrier.wait(ready.index(2 * stage + GROUP), (count // ROUND) & 1)
        if NORM:
            x_hat, _ = normalize(rows.load(across).to(gl.float32), eps, C)
            thread_barrier()
            rows.store(x_hat.to(dtype))
            fence_async_shared()
            thread_barrier()
        if HAS_MASK:
            keep = (gl.load(mask + start + l, mask=start + l < M, other=0) != 0)[None, :]
        normed = rows.permute((1, 0))
        for part in range(0, PARTS):
            gates = warpgroup_mma(w_s.index(PARTS + part), normed, zero, use_acc=False, is_async=True)
            values = warpgroup_mma(w_s.index(part), normed, zero, use_acc=False, is_async=True)
            there = operands + part.to(gl.int64) * TILE * M + at
            of_values = gl.load(shift + part * TILE + o)[:, None]
            of_gates = gl.load(shift + 2 * C + part * TILE + o)[:, None]
            gates = warpgroup_mma_wait(1, [gates])
            gates = sigmoid(spread(gates, PAIRS) + of_gates)
            values = warpgroup_mma_wait(0, [values])
            values = spread(values, PAIRS) + of_values
            operand = values * gates
            if HAS_MASK:
                operand = gl.where(keep, operand, 0.0)
            gl.store(there, operand.to(dtype), mask=inside)
        thread_barrier()
        mbarrier.arrive(free.index(stage), count=1)


@gluon.jit
def triangle_operands_kernel_sm90(
    x, w, shift, mask, operands, M, tiles, eps,
    C: gl.constexpr, PAIRS: gl.constexpr, STAGES: gl.constexpr, NORM: gl.constexpr, HAS_MASK: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: x [M, C], dealt, with NORM not yet normalised; w [4 C, C]: values, then gates.

    Writes both to operands [2 C, M]."""
    w_s = gl.allocate_shared_memory(w.dtype, [4 * C // TILE, TILE, C], w.layout)
    x_s = gl.allocate_shared_memory(x.dtype, [STAGES, PAIRS // 32, 4, 4, 2, C], x.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, 2 * STAGES)
    init_barriers(free, STAGES)
    shared = (w_s, x_s, w_ready, ready, free)
    work = (shift, mask, operands, M, tiles, eps)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, 0, C, PAIRS, STAGES, NORM, HAS_MASK)),
            (product_partition, (shared, work, 1, C, PAIRS, STAGES, NORM, HAS_MASK)),
            (load_partition, (shared, (x, w, tiles), C, PAIRS, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
