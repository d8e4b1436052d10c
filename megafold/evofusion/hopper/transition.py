"""Gradients of values and gates of a transition, as `transition.kernels.gradient_kernel` makes them."""

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
def load_partition(shared, loads, INNER: gl.constexpr, STEP: gl.constexpr, SLOTS: gl.constexpr):
    w_s, tile_s, w_ready, ready, free = shared
    x, grad_out, w_in, w_out, tiles = loads
    PARTS: gl.constexpr = INNER // STEP
    mbarrier.expect(w_ready, 3 * PARTS * w_in.block_type.nbytes)
    for part in range(0, 2 * PARTS):
        tma.async_copy_global_to_shared(w_in, [part * (STEP // 32), 0, 0, 0, 0], w_ready, w_s.index(part))
    for part in range(0, PARTS):
        tma.async_copy_global_to_shared(w_out, [part * (STEP // 32), 0, 0, 0, 0], w_ready, w_s.index(2 * PARTS + part))
    for count in range(0, tiles_of(0, tiles, 1)):
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        for which in gl.static_range(2):
            item = 2 * count + which
            slot = item % SLOTS
            mbarrier.wait(free.index(slot), ((item // SLOTS) & 1) ^ 1)
            mine = ready.index(2 * slot + count % 2)
            mbarrier.expect(mine, x.block_type.nbytes)
            source = grad_out if which else x
            tma.async_copy_global_to_shared(source, [start, 0], mine, tile_s.index(slot))


@gluon.jit
def next_tile(
    tile_s, ready, free, turn, which: gl.constexpr, GROUP: gl.constexpr, layout: gl.constexpr, SLOTS: gl.constexpr
):
    """x or grad_out of a group's turn-th tile, in registers; its slot is free again.

    A slot has a barrier for each group: one for both would have flipped twice while a group did not look."""
    slot: gl.constexpr = which % SLOTS
    mbarrier.wait(ready.index(2 * slot + GROUP), ((2 * turn + which) // SLOTS) & 1)
    tile = tile_s.index(slot).load(layout)
    release(free.index(slot))
    return tile


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, C: gl.constexpr, INNER: gl.constexpr, STEP: gl.constexpr, NORM: gl.constexpr,
    COPY: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    w_s, tile_s, w_ready, ready, free = shared
    gamma, beta, hidden, grads, upstream, M, tiles, eps = work
    dtype: gl.constexpr = w_s.dtype
    PARTS: gl.constexpr = INNER // STEP
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    wide: gl.constexpr = wide_layout(STEP)
    zero = gl.zeros([TILE, STEP], gl.float32, product)
    c = gl.arange(0, C, gl.SliceLayout(0, left))
    l = gl.arange(0, TILE, gl.SliceLayout(1, wide))  # noqa: E741
    n = gl.arange(0, STEP, gl.SliceLayout(0, wide))
    mbarrier.wait(w_ready, 0)
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        count = 2 * turn + GROUP
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        normed = next_tile(tile_s, ready, free, turn, 0, GROUP, left, SLOTS)
        if NORM:
            x_hat, _ = normalize(normed.to(gl.float32), eps, C)
            x_hat = x_hat * gl.load(gamma + c).to(gl.float32)[None, :] + gl.load(beta + c).to(gl.float32)[None, :]
            normed = x_hat
        normed = normed.to(dtype)
        above = next_tile(tile_s, ready, free, turn, 1, GROUP, left, SLOTS).to(dtype)
        if COPY:
            at = (start + gl.arange(0, TILE, gl.SliceLayout(1, left)))[:, None]
            gl.store(upstream + at.to(gl.int64) * C + c[None, :], above, mask=at < M)
        inside = (start + l < M)[:, None]
        rows = (start + l).to(gl.int64)[:, None]
        hidden_at = hidden + rows * INNER + n[None, :]
        grads_at = grads + rows * (2 * INNER) + n[None, :]
        for part in range(0, PARTS):
            w_gates = columns_of(w_s, PARTS + part, STEP, C)
            w_values = columns_of(w_s, part, STEP, C)
            w_hidden = columns_of(w_s, 2 * PARTS + part, STEP, C)
            gates = warpgroup_mma(normed, w_gates, zero, use_acc=False, is_async=True)
            values = warpgroup_mma(normed, w_values, zero, use_acc=False, is_async=True)
            grad = warpgroup_mma(above, w_hidden, zero, use_acc=False, is_async=True)
            gates = warpgroup_mma_wait(2, [gates])
            share = sigmoid(gates)
            silu = gates * share
            values = warpgroup_mma_wait(1, [values])
            gl.store(hidden_at + part * STEP, spread((values * silu).to(dtype), STEP), mask=inside)
            grad = warpgroup_mma_wait(0, [grad])
            gl.store(grads_at + part * STEP, spread((grad * silu).to(dtype), STEP), mask=inside)
            grad *= values * (share + silu * (1.0 - share))
            gl.store(grads_at + INNER + part * STEP, spread(grad.to(dtype), STEP), mask=inside)


@gluon.jit
def transition_gradient_kernel_sm90(
    x, grad_out, w_in, w_out, gamma, beta, hidden, grads, upstream, M, tiles, eps,
    C: gl.constexpr, INNER: gl.constexpr, STEP: gl.constexpr, NORM: gl.constexpr, COPY: gl.constexpr,
    SLOTS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: x and grad_out [M, C]; dealt, w_in [2 INNER, C] and w_out [INNER, C] (transposed).
    COPY: also store `upstream`, grad_out in the dtype of products."""
    w_s = gl.allocate_shared_memory(w_in.dtype, [3 * (INNER // STEP), STEP // 32, 4, 4, 2, C], w_in.layout)
    tile_s = gl.allocate_shared_memory(x.dtype, [SLOTS, TILE, C], x.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, 2 * SLOTS)
    init_barriers(free, SLOTS)
    shared = (w_s, tile_s, w_ready, ready, free)
    work = (gamma, beta, hidden, grads, upstream, M, tiles, eps)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, 0, C, INNER, STEP, NORM, COPY, SLOTS)),
            (product_partition, (shared, work, 1, C, INNER, STEP, NORM, COPY, SLOTS)),
            (load_partition, (shared, (x, grad_out, w_in, w_out, tiles), INNER, STEP, SLOTS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
