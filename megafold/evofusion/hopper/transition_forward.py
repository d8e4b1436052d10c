"""The transition, as `transition.kernels.transition_kernel` makes it."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from megafold.evofusion.hopper.common import (
    TILE,
    columns_of,
    init_barriers,
    normalize,
    sigmoid,
    spread,
    tiles_of,
    wide_layout,
)
from megafold.gluon_barriers import release


@gluon.jit
def load_partition(shared, loads, PARTS: gl.constexpr, STEP: gl.constexpr, SLOTS: gl.constexpr):
    w_s, out_s, x_s, w_ready, ready, free = shared
    x, w_in, w_out, tiles = loads
    mbarrier.expect(w_ready, 2 * PARTS * w_in.block_type.nbytes + PARTS * w_out.block_type.nbytes)
    for part in range(0, 2 * PARTS):
        tma.async_copy_global_to_shared(w_in, [part * STEP, 0], w_ready, w_s.index(part))
    for part in range(0, PARTS):
        tma.async_copy_global_to_shared(w_out, [0, 0, 0, 0, part * STEP], w_ready, out_s.index(part))
    for count in range(0, tiles_of(0, tiles, 1)):
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        slot = count % SLOTS
        mbarrier.wait(free.index(slot), ((count // SLOTS) & 1) ^ 1)
        mbarrier.expect(ready.index(count % 2), x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [start, 0], ready.index(count % 2), x_s.index(slot))


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, C: gl.constexpr, PARTS: gl.constexpr, STEP: gl.constexpr, NORM: gl.constexpr,
    RESIDUAL: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    w_s, out_s, x_s, w_ready, ready, free = shared
    gamma, beta, x_again, out, M, tiles, eps = work
    dtype: gl.constexpr = w_s.dtype
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    second: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    middle: gl.constexpr = gl.DotOperandLayout(0, second, 2)
    wide: gl.constexpr = wide_layout(C)
    zero = gl.zeros([TILE, STEP], gl.float32, product)
    c = gl.arange(0, C, gl.SliceLayout(0, left))
    l = gl.arange(0, TILE, gl.SliceLayout(1, wide))  # noqa: E741
    o = gl.arange(0, C, gl.SliceLayout(0, wide))
    mbarrier.wait(w_ready, 0)
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        count = 2 * turn + GROUP
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        slot = count % SLOTS
        mbarrier.wait(ready.index(GROUP), turn & 1)
        normed = x_s.index(slot).load(left)
        release(free.index(slot))
        if NORM:
            x_hat, _ = normalize(normed.to(gl.float32), eps, C)
            normed = x_hat * gl.load(gamma + c).to(gl.float32)[None, :] + gl.load(beta + c).to(gl.float32)[None, :]
        normed = normed.to(dtype)
        acc = gl.zeros([TILE, C], gl.float32, second)
        for part in range(0, PARTS):
            gates = warpgroup_mma(normed, columns_of(w_s, PARTS + part, STEP, C), zero, use_acc=False, is_async=True)
            values = warpgroup_mma(normed, columns_of(w_s, part, STEP, C), zero, use_acc=False, is_async=True)
            gates = warpgroup_mma_wait(1, [gates])
            silu = gates * sigmoid(gates)
            values = warpgroup_mma_wait(0, [values])
            hidden = gl.convert_layout((values * silu).to(dtype), middle)
            acc = warpgroup_mma(hidden, columns_of(out_s, part, C, STEP), acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
        y = spread(acc, C)
        inside = (start + l < M)[:, None]
        at = (start + l).to(gl.int64)[:, None] * C + o[None, :]
        if RESIDUAL:
            y += gl.load(x_again + at, mask=inside, other=0.0).to(gl.float32)
        gl.store(out + at, y.to(out.dtype.element_ty), mask=inside)


@gluon.jit
def transition_kernel_sm90(
    x, w_in, w_out, gamma, beta, x_again, out, M, tiles, eps,
    C: gl.constexpr, PARTS: gl.constexpr, STEP: gl.constexpr, NORM: gl.constexpr, RESIDUAL: gl.constexpr,
    SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: x [M, C]; w_in [2 PARTS STEP, C]; w_out [C, PARTS STEP], dealt. x_again: x for the residual."""
    w_s = gl.allocate_shared_memory(w_in.dtype, [2 * PARTS, STEP, C], w_in.layout)
    out_s = gl.allocate_shared_memory(w_out.dtype, [PARTS, C // 32, 4, 4, 2, STEP], w_out.layout)
    x_s = gl.allocate_shared_memory(x.dtype, [SLOTS, TILE, C], x.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, 2)
    init_barriers(free, SLOTS)
    shared = (w_s, out_s, x_s, w_ready, ready, free)
    work = (gamma, beta, x_again, out, M, tiles, eps)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, 0, C, PARTS, STEP, NORM, RESIDUAL, SLOTS)),
            (product_partition, (shared, work, 1, C, PARTS, STEP, NORM, RESIDUAL, SLOTS)),
            (load_partition, (shared, (x, w_in, w_out, tiles), PARTS, STEP, SLOTS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
