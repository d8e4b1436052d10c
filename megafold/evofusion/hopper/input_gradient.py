"""Gradient of rows x from those of projections of LayerNorm(x), as `norm_project.kernels.gradient_kernel` makes it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from megafold.evofusion.hopper.common import (
    TILE,
    columns_of,
    init_barriers,
    normalize,
    spread,
    tiles_of,
    wide_layout,
)
from megafold.gluon_barriers import release, thread_barrier


@gluon.jit
def load_partition(shared, loads, COUNT: gl.constexpr, WIDTH: gl.constexpr, STEP: gl.constexpr, HELD: gl.constexpr):
    w_s, g_s, x_s, w_ready, ready, free, x_ready, x_free = shared
    x, w, grads, tiles = loads
    mbarrier.expect(w_ready, COUNT * w.block_type.nbytes)
    for k in gl.static_range(COUNT):
        tma.async_copy_global_to_shared(w, [0, 0, 0, 0, k * WIDTH], w_ready, w_s.index(k))
    for count in range(0, tiles_of(0, tiles, 1)):
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        held = count % HELD
        mbarrier.wait(x_free.index(held), ((count // HELD) & 1) ^ 1)
        group = count % 2
        mbarrier.expect(x_ready.index(group), x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [start, 0], x_ready.index(group), x_s.index(held))
        for k in gl.static_range(COUNT):
            mbarrier.wait(free.index(k), (count & 1) ^ 1)
            mbarrier.expect(ready.index(2 * k + group), grads[k].block_type.nbytes)
            tma.async_copy_global_to_shared(grads[k], [start, k * STEP], ready.index(2 * k + group), g_s.index(k))


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, C: gl.constexpr, COUNT: gl.constexpr, WIDTH: gl.constexpr, HELD: gl.constexpr,
    HEADS: gl.constexpr, OTHER: gl.constexpr,
):  # fmt: skip
    w_s, g_s, x_s, w_ready, ready, free, x_ready, x_free = shared
    gamma, other, grad_heads, w_heads, grad_x, x_hats, M, L, tiles, eps = work
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    zero = gl.zeros([TILE, C], gl.float32, product)
    wide: gl.constexpr = wide_layout(C)
    l = gl.arange(0, TILE, gl.SliceLayout(1, wide))  # noqa: E741
    c = gl.arange(0, C, gl.SliceLayout(0, wide))
    mbarrier.wait(w_ready, 0)
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        count = 2 * turn + GROUP
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        held = count % HELD
        mbarrier.wait(x_ready.index(GROUP), turn & 1)
        x_hat, rstd = normalize(x_s.index(held).load(wide).to(gl.float32), eps, C)
        release(x_free.index(held))
        inside = (start + l < M)[:, None]
        at = (start + l).to(gl.int64)[:, None] * C + c[None, :]
        gl.store(x_hats + at, x_hat.to(x_hats.dtype.element_ty), mask=inside)
        acc = zero
        for k in range(0, COUNT):
            mbarrier.wait(ready.index(2 * k + GROUP), turn & 1)
            acc = warpgroup_mma(g_s.index(k), columns_of(w_s, k, C, WIDTH), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            thread_barrier()
            mbarrier.arrive(free.index(k), count=1)
        grad = spread(acc, C)
        for h in gl.static_range(HEADS):
            first = (start // L * HEADS + h).to(gl.int64) * L + start % L
            upstream = gl.load(grad_heads + first + l, mask=start + l < M, other=0.0).to(gl.float32)
            grad += upstream[:, None] * gl.load(w_heads + h * C + c).to(gl.float32)[None, :]
        grad *= gl.load(gamma + c).to(gl.float32)[None, :]
        mean = gl.sum(grad, 1) / C
        slope = gl.sum(grad * x_hat, 1) / C
        grad = rstd[:, None] * (grad - mean[:, None] - x_hat * slope[:, None])
        if OTHER:
            grad += gl.load(other + at, mask=inside, other=0.0).to(gl.float32)
        gl.store(grad_x + at, grad.to(grad_x.dtype.element_ty), mask=inside)


@gluon.jit
def input_gradient_kernel_sm90(
    x, w, grad0, grad1, grad2, grad3, gamma, other, grad_heads, w_heads, grad_x, x_hats, M, L, tiles, eps,
    C: gl.constexpr, COUNT: gl.constexpr, WIDTH: gl.constexpr, STEP: gl.constexpr,
    HELD: gl.constexpr, HEADS: gl.constexpr, OTHER: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: x [M, C]; w [C, COUNT columns], dealt; of the gradients [M, columns], from column k STEP of the
    k-th. grad_heads [M / L, HEADS, L], w_heads [HEADS, C]. Also stores the normalised rows."""
    w_s = gl.allocate_shared_memory(w.dtype, [COUNT, C // 32, 4, 4, 2, WIDTH], w.layout)
    g_s = gl.allocate_shared_memory(grad0.dtype, [COUNT, TILE, WIDTH], grad0.layout)
    x_s = gl.allocate_shared_memory(x.dtype, [HELD, TILE, C], x.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2 * COUNT, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    x_ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    x_free = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, 2 * COUNT)
    init_barriers(free, COUNT)
    init_barriers(x_ready, 2)
    init_barriers(x_free, HELD)
    shared = (w_s, g_s, x_s, w_ready, ready, free, x_ready, x_free)
    work = (gamma, other, grad_heads, w_heads, grad_x, x_hats, M, L, tiles, eps)
    loads = (x, w, (grad0, grad1, grad2, grad3), tiles)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, 0, C, COUNT, WIDTH, HELD, HEADS, OTHER)),
            (product_partition, (shared, work, 1, C, COUNT, WIDTH, HELD, HEADS, OTHER)),
            (load_partition, (shared, loads, COUNT, WIDTH, STEP, HELD)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
