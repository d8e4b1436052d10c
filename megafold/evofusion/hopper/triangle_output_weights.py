"""As `triangle_output`, with the products and sums over pairs that the gradients of the output's weights are made of.

A third group of warps multiplies what the two others leave in shared memory, so neither the normalised product nor the
gradient of what was projected from it is written. It adds tiles in their order; each program has a share [C, C + 8]:
products, and in column C the sums.
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
    VECTOR,
    columns_of,
    deal,
    hold_vectors,
    init_barriers,
    normalize,
    prefetch_rows,
    sigmoid,
    spread,
    tiles_of,
    wide_layout,
)
from megafold.evofusion.hopper.triangle_output import store_ones, store_planes
from megafold.gluon_barriers import release, thread_barrier

AHEAD = gl.constexpr(3)
"""Tiles of the output's gradient on their way to L2 before the groups ask for them."""


@gluon.jit
def start_of(count, tiles):
    """First pair of the program's count-th tile, from the end: the cache may hold what the forward ended with."""
    return (tiles - 1 - gl.program_id(0) - count * gl.num_programs(0)) * TILE


@gluon.jit
def load_partition(shared, loads, GROUP: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr):
    """Brings the tiles of one group, and all weights for both."""
    w_s, x_in, p_in, _, _, _, _, _, w_ready, ready, free, _, _ = shared
    x, product, w, tiles = loads
    if GROUP == 0:
        mbarrier.expect(w_ready, 2 * C // STEP * w.block_type.nbytes)
        for part in range(0, 2 * C // STEP):
            tma.async_copy_global_to_shared(w, [part * (STEP // 32), 0, 0, 0, 0], w_ready, w_s.index(part))
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        start = start_of(2 * turn + GROUP, tiles)
        mbarrier.wait(free.index(GROUP), (turn & 1) ^ 1)
        mbarrier.expect(ready.index(GROUP), x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [start, 0], ready.index(GROUP), x_in.index(GROUP))
        mbarrier.wait(free.index(2 + GROUP), (turn & 1) ^ 1)
        mbarrier.expect(ready.index(2 + GROUP), product.block_type.nbytes)
        tma.async_copy_global_to_shared(product, [0, 0, 0, 0, start], ready.index(2 + GROUP), p_in.index(GROUP))


@gluon.jit
def true_place(column):
    """The column that was dealt to a place, which is also the place that the column is dealt to."""
    return column // 32 * 32 + column // 2 % 4 * 8 + column // 8 % 4 * 2 + column % 2


@gluon.jit
def weight_partition(shared, grad_out, partial, tiles, C: gl.constexpr):
    _, _, _, _, p_s, u_s, one_s, _, _, _, _, made, taken = shared
    dtype: gl.constexpr = p_s.dtype
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    few: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 8, 16])
    plain: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    one_s.store(gl.full([8, TILE], 1.0, dtype, plain))
    fence_async_shared()
    thread_barrier()
    acc = gl.zeros([C, C], gl.float32, product)
    sums = gl.zeros([C, 8], gl.float32, few)
    # The group that has made a tile is at the next but one already.
    most = tiles_of(0, tiles, 1)
    for count in range(0, AHEAD):
        prefetch_rows(grad_out, start_of(gl.minimum(count, most - 1), tiles), tiles * TILE, C, 4)
    for count in range(0, most):
        group = count % 2
        mbarrier.wait(made.index(group), (count // 2) & 1)
        upstream = u_s.index(group).reshape([C, TILE])
        acc = warpgroup_mma(upstream, p_s.index(group).reshape([C, TILE]).permute((1, 0)), acc, is_async=True)
        sums = warpgroup_mma(upstream, one_s.permute((1, 0)), sums, is_async=True)
        acc, sums = warpgroup_mma_wait(0, [acc, sums])
        thread_barrier()
        mbarrier.arrive(taken.index(group), count=1)
        if count + AHEAD < most:
            prefetch_rows(grad_out, start_of(count + AHEAD, tiles), tiles * TILE, C, 4)
    mine = partial + gl.program_id(0) * C * (C + 8)
    o = true_place(gl.arange(0, C, gl.SliceLayout(1, product)))
    c = true_place(gl.arange(0, C, gl.SliceLayout(0, product)))
    gl.store(mine + o[:, None] * (C + 8) + c[None, :], acc)
    o = true_place(gl.arange(0, C, gl.SliceLayout(1, few)))
    gl.store(mine + o * (C + 8) + C, gl.sum(sums, 1) / 8)


@gluon.jit
def product_partition(
    shared, work, views, GROUP: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr, HAS_DROPPED: gl.constexpr,
    EPS: gl.constexpr,
):  # fmt: skip
    w_s, x_in, p_in, x_s, p_s, _, _, shift_s, w_ready, ready, free, made, taken = shared
    grad_out, dropped, x_hats, rstds, grad_gate, grad_product, d_i, d_j, N, tiles = work
    parts_s, gate_s, stage_s = views
    dtype: gl.constexpr = w_s.dtype
    PARTS: gl.constexpr = C // STEP
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    wide: gl.constexpr = wide_layout(C)
    some: gl.constexpr = wide_layout(STEP)
    zero = gl.zeros([TILE, STEP], gl.float32, narrow)
    l = gl.arange(0, TILE, gl.SliceLayout(1, wide))  # noqa: E741
    c = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    across: gl.constexpr = gl.SliceLayout(0, some)
    n = gl.arange(0, STEP, across)
    at = gl.arange(0, TILE, gl.SliceLayout(1, some))[:, None] * C + n[None, :]
    x_tile, p_tile = x_s.index(GROUP), p_s.index(GROUP).reshape([C, TILE]).permute((1, 0))
    mbarrier.wait(w_ready, 0)
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        start = start_of(2 * turn + GROUP, tiles)
        tile = grad_out + start.to(gl.int64) * C
        # Of the first part; those of the others each come during the one before.
        ahead = gl.load(tile + at)
        rows = (start + l).to(gl.int64)[:, None]
        mbarrier.wait(ready.index(GROUP), turn & 1)
        x_hat = x_in.index(GROUP).load(wide)
        release(free.index(GROUP))
        x_hat, rstd = normalize(x_hat.to(gl.float32), EPS, C)
        x_hat = x_hat.to(dtype)
        gl.store(x_hats + rows * (C + 8) + c, x_hat)
        gl.store(rstds + start + l, rstd)
        store_ones(x_hats, start, C)
        # The copy engine has read the product's gradient of the tile before.
        tma.store_wait(0)
        thread_barrier()
        x_tile.store(deal(x_hat, C, product))
        mbarrier.wait(ready.index(2 + GROUP), turn & 1)
        p_hat = p_in.index(GROUP).reshape([C, TILE]).permute((1, 0)).load(left)
        p_hat, inverse = normalize(p_hat.to(gl.float32), EPS, C)
        mbarrier.wait(taken.index(GROUP), (turn & 1) ^ 1)
        p_tile.store(gl.convert_layout(p_hat.to(dtype), product))
        fence_async_shared()
        thread_barrier()
        grad = gl.zeros([TILE, C], gl.float32, product)
        row = start + gl.arange(0, TILE, gl.SliceLayout(1, some))
        places = (row // N * d_i + row % N * d_j)[:, None] + n[None, :]
        for part in range(0, PARTS):
            upstream = ahead
            ahead = gl.load(tile + gl.minimum(part + 1, PARTS - 1) * STEP + at)
            gate = warpgroup_mma(x_tile, columns_of(w_s, part, STEP, C), zero, use_acc=False, is_async=True)
            if HAS_DROPPED:
                factor = gl.load(dropped + part * STEP + places)
            gate = warpgroup_mma_wait(0, [gate])
            value = warpgroup_mma(p_tile, columns_of(w_s, PARTS + part, STEP, C), zero, use_acc=False, is_async=True)
            gate = sigmoid(spread(gate, STEP) + shift_s.index(part).load(across)[None, :])
            upstream = upstream.to(gl.float32) * gate
            if HAS_DROPPED:
                upstream *= factor.to(gl.float32)
            value = warpgroup_mma_wait(0, [value])
            value = spread(value, STEP) + shift_s.index(PARTS + part).load(across)[None, :]
            of_gate = deal((upstream * (1.0 - gate) * value).to(dtype), STEP, narrow)
            above = deal(upstream.to(dtype), STEP, narrow)
            of_part = w_s.index(PARTS + part).reshape([STEP, C])
            grad = warpgroup_mma(gl.convert_layout(above, left), of_part, grad, is_async=True)
            parts_s.index(GROUP * PARTS + part).reshape([STEP, TILE]).permute((1, 0)).store(above)
            # A quarter of the product's tile, which was read.
            store_planes(grad_gate, gate_s.index(GROUP * PARTS + part), part * STEP, start, of_gate, STEP)
            grad = warpgroup_mma_wait(0, [grad])
        hat = p_tile.load(product).to(gl.float32)
        fence_async_shared()
        thread_barrier()
        mbarrier.arrive(made.index(GROUP), count=1)
        mean = (gl.sum(grad, 1) / C)[:, None]
        slope = (gl.sum(grad * hat, 1) / C)[:, None]
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, product))
        grad = inverse[:, None] * (grad - mean - hat * slope)
        tma.store_wait(0)
        release(free.index(2 + GROUP))
        # The normalised tile of x is not read any more.
        store_planes(grad_product, stage_s.index(GROUP), 0, start, grad.to(dtype), C)
    tma.store_wait(0)


@gluon.jit
def triangle_output_weights_kernel_sm90(
    x, product, w, grad_out, dropped, shift, x_hats, rstds, partial, grad_gate, grad_product, d_i,
    d_j, N, tiles, C: gl.constexpr, STEP: gl.constexpr, HAS_DROPPED: gl.constexpr, EPS: gl.constexpr,
    REGISTERS: gl.constexpr, OF_WEIGHTS: gl.constexpr,
):  # fmt: skip
    """As `triangle_output_kernel_sm90`, x in the dtype of products, w both ways; shift [2 C]: of gate, output; partial
    [programs, C, C + 8], fp32."""
    w_s = gl.allocate_shared_memory(w.dtype, [2 * C // STEP, STEP // 32, 4, 4, 2, C], w.layout)
    x_in = gl.allocate_shared_memory(x.dtype, [2, TILE, C], x.layout)
    p_in = gl.allocate_shared_memory(product.dtype, [2, C // 32, 4, 4, 2, TILE], product.layout)
    x_s = gl.allocate_shared_memory(x.dtype, [2, TILE, C], x.layout)
    p_s = gl.allocate_shared_memory(product.dtype, [2, C // 32, 4, 4, 2, TILE], product.layout)
    parts_s = gl.allocate_shared_memory(product.dtype, [2 * C // STEP, STEP // 32, 4, 4, 2, TILE], grad_gate.layout)
    one_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([8, TILE], product.dtype)
    one_s = gl.allocate_shared_memory(product.dtype, [8, TILE], one_layout)
    shift_s = gl.allocate_shared_memory(gl.float32, [2 * C // STEP, STEP], VECTOR)
    # The same bytes: parts of the gradient as a whole, tiles of the product as stages of the gate's gradient, and tiles
    # of x as stages of the product's.
    u_s = parts_s._reinterpret(product.dtype, [2, C // 32, 4, 4, 2, TILE], product.layout)
    gate_s = p_in._reinterpret(product.dtype, [2 * C // STEP, STEP // 32, 4, 4, 2, TILE], grad_gate.layout)
    stage_s = x_s._reinterpret(product.dtype, [2, C // 32, 4, 4, 2, TILE], product.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    taken = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, 4)
    init_barriers(free, 4)
    init_barriers(made, 2)
    init_barriers(taken, 2)
    hold_vectors(shift_s, shift, 2 * C // STEP, STEP)
    shared = (w_s, x_in, p_in, x_s, p_s, u_s, one_s, shift_s, w_ready, ready, free, made, taken)
    work = (grad_out, dropped, x_hats, rstds, grad_gate, grad_product, d_i, d_j, N, tiles)
    views = (parts_s, gate_s, stage_s)
    loads = (x, product, w, tiles)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, views, 0, C, STEP, HAS_DROPPED, EPS)),
            (product_partition, (shared, work, views, 1, C, STEP, HAS_DROPPED, EPS)),
            (weight_partition, (shared, grad_out, partial, tiles, C)),
            (load_partition, (shared, loads, 0, C, STEP)),
            (load_partition, (shared, loads, 1, C, STEP)),
        ],
        [4, 4, 1, 1],
        [REGISTERS, OF_WEIGHTS, 24, 24],
    )
