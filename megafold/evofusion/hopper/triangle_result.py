"""The end of a triangle multiplication's forward, as `output_kernel` of `triangle_multiplication.kernels` makes it,
where pairs are not padded."""

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
def load_partition(shared, loads, PARTS: gl.constexpr, STEP: gl.constexpr, HELD: gl.constexpr):
    w_s, x_s, p_s, w_ready, ready, free = shared
    x, product, w_gate, w_out, tiles = loads
    mbarrier.expect(w_ready, 2 * PARTS * w_gate.block_type.nbytes)
    for part in range(0, PARTS):
        tma.async_copy_global_to_shared(w_gate, [part * (STEP // 32), 0, 0, 0, 0], w_ready, w_s.index(part))
        tma.async_copy_global_to_shared(w_out, [part * (STEP // 32), 0, 0, 0, 0], w_ready, w_s.index(PARTS + part))
    for count in range(0, tiles_of(0, tiles, 1)):
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        held = count % HELD
        mbarrier.wait(free.index(held), ((count // HELD) & 1) ^ 1)
        mbarrier.expect(ready.index(held), x.block_type.nbytes + product.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [start, 0], ready.index(held), x_s.index(held))
        tma.async_copy_global_to_shared(product, [0, start], ready.index(held), p_s.index(held))


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr, HELD: gl.constexpr,
    HAS_DROPPED: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    w_s, x_s, p_s, w_ready, ready, free = shared
    x_again, dropped, gate_shift, out_shift, out, d_i, d_j, N, tiles, eps = work
    dtype: gl.constexpr = w_s.dtype
    PARTS: gl.constexpr = C // STEP
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    wide: gl.constexpr = wide_layout(STEP)
    zero = gl.zeros([TILE, STEP], gl.float32, product)
    n = gl.arange(0, STEP, gl.SliceLayout(0, wide))
    mbarrier.wait(w_ready, 0)
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        count = 2 * turn + GROUP
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        held = count % HELD
        mbarrier.wait(ready.index(held), (count // HELD) & 1)
        x_tile = x_s.index(held).load(left)
        p_tile = p_s.index(held).permute((1, 0)).load(left)
        release(free.index(held))
        x_hat, _ = normalize(x_tile.to(gl.float32), eps, C)
        x_hat = x_hat.to(dtype)
        p_hat, _ = normalize(p_tile.to(gl.float32), eps, C)
        p_hat = p_hat.to(dtype)
        row = start + gl.arange(0, TILE, gl.SliceLayout(1, wide))
        at = row.to(gl.int64)[:, None] * C + n[None, :]
        factor = row // N * d_i + row % N * d_j
        for part in range(0, PARTS):
            gate = warpgroup_mma(x_hat, columns_of(w_s, part, STEP, C), zero, use_acc=False, is_async=True)
            value = warpgroup_mma(p_hat, columns_of(w_s, PARTS + part, STEP, C), zero, use_acc=False, is_async=True)
            if HAS_DROPPED:
                drawn = gl.load(dropped + (factor + part * STEP)[:, None] + n[None, :])
            if RESIDUAL:
                above = gl.load(x_again + at + part * STEP)
            gate = warpgroup_mma_wait(1, [gate])
            gate = sigmoid(spread(gate, STEP) + gl.load(gate_shift + part * STEP + n)[None, :])
            if HAS_DROPPED:
                gate *= drawn.to(gl.float32)
            value = warpgroup_mma_wait(0, [value])
            value = (spread(value, STEP) + gl.load(out_shift + part * STEP + n)[None, :]) * gate
            if RESIDUAL:
                value += above.to(gl.float32)
            gl.store(out + at + part * STEP, value.to(out.dtype.element_ty))


@gluon.jit
def triangle_result_kernel_sm90(
    x, product, w_gate, w_out, x_again, dropped, gate_shift, out_shift, out, d_i, d_j, N, tiles, eps,
    C: gl.constexpr, STEP: gl.constexpr, HELD: gl.constexpr, HAS_DROPPED: gl.constexpr, RESIDUAL: gl.constexpr,
    REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: x [M, C]; product [C, M]; dealt, w_gate and w_out [C, C]. HELD is even, so that each buffer is of
    one group. x_again: x for the residual."""
    w_s = gl.allocate_shared_memory(w_gate.dtype, [2 * C // STEP, STEP // 32, 4, 4, 2, C], w_gate.layout)
    x_s = gl.allocate_shared_memory(x.dtype, [HELD, TILE, C], x.layout)
    p_s = gl.allocate_shared_memory(product.dtype, [HELD, C, TILE], product.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [HELD, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, HELD)
    init_barriers(free, HELD)
    shared = (w_s, x_s, p_s, w_ready, ready, free)
    work = (x_again, dropped, gate_shift, out_shift, out, d_i, d_j, N, tiles, eps)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, 0, C, STEP, HELD, HAS_DROPPED, RESIDUAL)),
            (product_partition, (shared, work, 1, C, STEP, HELD, HAS_DROPPED, RESIDUAL)),
            (load_partition, (shared, (x, product, w_gate, w_out, tiles), C // STEP, STEP, HELD)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
