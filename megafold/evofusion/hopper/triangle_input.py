"""Gradient of x of a triangle multiplication, as `input_gradient_kernel` of `triangle_multiplication.kernels` makes it,
where pairs are not padded. Both groups of warps have half of the pairs of each tile."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from megafold.evofusion.hopper.common import (
    TILE,
    columns_of,
    init_barriers,
    spread,
    tiles_of,
    wide_layout,
)
from megafold.gluon_barriers import thread_barrier


@gluon.jit
def load_partition(shared, loads, PARTS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr):
    w_s, g_s, w_ready, ready, free = shared
    grads, w, tiles = loads
    mbarrier.expect(w_ready, PARTS * w.block_type.nbytes)
    for part in range(0, PARTS):
        tma.async_copy_global_to_shared(w, [0, 0, 0, 0, part * STEP], w_ready, w_s.index(part))
    for count in range(0, tiles_of(0, tiles, 1)):
        start = (gl.program_id(0) + count * gl.num_programs(0)) * 2 * TILE
        for part in range(0, PARTS):
            at = count * PARTS + part
            stage = at % STAGES
            mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
            mbarrier.expect(ready.index(stage), grads.block_type.nbytes)
            tma.async_copy_global_to_shared(grads, [part * STEP, start], ready.index(stage), g_s.index(stage))


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, C: gl.constexpr, PARTS: gl.constexpr, STEP: gl.constexpr,
    STAGES: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    w_s, g_s, w_ready, ready, free = shared
    grad_out, x_hat, rstd, grad_x, M, tiles = work
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    wide: gl.constexpr = wide_layout(C)
    l = gl.arange(0, TILE, gl.SliceLayout(1, wide))  # noqa: E741
    c = gl.arange(0, C, gl.SliceLayout(0, wide))
    mbarrier.wait(w_ready, 0)
    for count in range(0, tiles_of(0, tiles, 1)):
        pairs = (gl.program_id(0) + count * gl.num_programs(0)) * 2 * TILE + GROUP * TILE + l
        inside = (pairs < M)[:, None]
        rows = pairs.to(gl.int64)[:, None]
        hat = gl.load(x_hat + rows * (C + 8) + c[None, :], mask=inside, other=0.0)
        inverse = gl.load(rstd + pairs, mask=pairs < M, other=0.0)[:, None]
        acc = gl.zeros([TILE, C], gl.float32, product)
        for part in range(0, PARTS):
            at = count * PARTS + part
            stage = at % STAGES
            mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
            g_part = g_s.index(stage).slice(GROUP * TILE, TILE, 1).permute((1, 0))
            acc = warpgroup_mma(g_part, columns_of(w_s, part, C, STEP), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            thread_barrier()
            mbarrier.arrive(free.index(stage), count=1)
        grad = spread(acc, C)
        hat = hat.to(gl.float32)
        mean = gl.sum(grad, 1) / C
        slope = gl.sum(grad * hat, 1) / C
        grad = inverse * (grad - mean[:, None] - hat * slope[:, None])
        if RESIDUAL:
            grad += gl.load(grad_out + rows * C + c[None, :], mask=inside, other=0.0).to(gl.float32)
        gl.store(grad_x + rows * C + c[None, :], grad.to(grad_x.dtype.element_ty), mask=inside)


@gluon.jit
def triangle_input_kernel_sm90(
    grads, w, grad_out, x_hat, rstd, grad_x, M, tiles,
    C: gl.constexpr, PARTS: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, RESIDUAL: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: grads [PARTS STEP, M]; w [C, PARTS STEP], dealt. grad_out and grad_x [M, C], x_hat [M, C + 8]."""
    w_s = gl.allocate_shared_memory(w.dtype, [PARTS, C // 32, 4, 4, 2, STEP], w.layout)
    g_s = gl.allocate_shared_memory(grads.dtype, [STAGES, STEP, 2 * TILE], grads.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, STAGES)
    for s in gl.static_range(STAGES):
        mbarrier.init(free.index(s), count=2)
    shared = (w_s, g_s, w_ready, ready, free)
    work = (grad_out, x_hat, rstd, grad_x, M, tiles)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, 0, C, PARTS, STEP, STAGES, RESIDUAL)),
            (product_partition, (shared, work, 1, C, PARTS, STEP, STAGES, RESIDUAL)),
            (load_partition, (shared, (grads, w, tiles), PARTS, STEP, STAGES)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
