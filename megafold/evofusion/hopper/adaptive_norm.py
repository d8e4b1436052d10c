"""Gradients of an adaptive LayerNorm, as `conditioned.kernels.adaptive_norm_gradient_kernel` makes them.

Columns of d(out) and of x go by in parts of STEP. Weights that are multiplied with them have their columns dealt out.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

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
from megafold.gluon_barriers import release


@gluon.jit
def load_partition(
    shared, loads, GROUP: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr, HELD: gl.constexpr, OTHERS: gl.constexpr
):
    """Brings the tiles of one group, or of both where they share a place; and what they read by themselves to L2."""
    w_s, t_s, x_s, c_s, g_s, _, w_ready, ready, free = shared
    x, cond, grad_out, w, w_t, other_x, other_cond, M, tiles = loads
    PARTS: gl.constexpr = C // STEP
    if GROUP == 0:
        mbarrier.expect(w_ready, PARTS * (w.block_type.nbytes + 2 * w_t.block_type.nbytes))
        for part in range(0, PARTS):
            tma.async_copy_global_to_shared(w, [part * (STEP // 32), 0, 0, 0, 0], w_ready, w_s.index(part))
        for part in range(0, 2 * PARTS):
            at = [part // PARTS * (C // 32), 0, 0, 0, part % PARTS * STEP]
            tma.async_copy_global_to_shared(w_t, at, w_ready, t_s.index(part))
    if GROUP < HELD:
        for turn in range(0, tiles_of(GROUP, tiles, HELD)):
            count = HELD * turn + GROUP
            start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
            mine = ready.index(count % 2)
            for piece in range(0, PARTS):
                place = GROUP * PARTS + piece
                mbarrier.wait(free.index(place), (turn & 1) ^ 1)
                if piece == 0:
                    nbytes: gl.constexpr = x.block_type.nbytes + grad_out.block_type.nbytes
                    mbarrier.expect(mine, cond.block_type.nbytes + PARTS * nbytes)
                tma.async_copy_global_to_shared(x, [start, piece * STEP], mine, x_s.index(place))
                tma.async_copy_global_to_shared(grad_out, [start, piece * STEP], mine, g_s.index(place))
            mbarrier.wait(free.index(HELD * PARTS + GROUP), (turn & 1) ^ 1)
            tma.async_copy_global_to_shared(cond, [start, 0], mine, c_s.index(GROUP))
            if OTHERS:
                prefetch_rows(other_x, start, M, C, 1)
                prefetch_rows(other_cond, start, M, C, 1)


@gluon.jit
def moments(x_s, first, eps, C: gl.constexpr, PARTS: gl.constexpr, layout: gl.constexpr):
    """Mean and 1 / std of rows whose columns lie in PARTS."""
    total = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, layout))
    for part in gl.static_range(PARTS):
        total += gl.sum(x_s.index(first + part).load(layout).to(gl.float32), 1)
    mean = total / C
    total = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, layout))
    for part in gl.static_range(PARTS):
        centred = x_s.index(first + part).load(layout).to(gl.float32) - mean[:, None]
        total += gl.sum(centred * centred, 1)
    return mean, 1.0 / gl.sqrt(total / C + eps)


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr, HELD: gl.constexpr, OTHERS: gl.constexpr
):
    w_s, t_s, x_s, c_s, g_s, bias_s, w_ready, ready, free = shared
    cond_gamma, other_x, other_cond, grad_x, grad_cond, grad_gate, M, tiles, eps = work
    dtype: gl.constexpr = w_s.dtype
    PARTS: gl.constexpr = C // STEP
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    wide: gl.constexpr = wide_layout(C)
    some: gl.constexpr = wide_layout(STEP)
    zero = gl.zeros([TILE, STEP], gl.float32, narrow)
    across: gl.constexpr = gl.SliceLayout(0, some)
    n = gl.arange(0, STEP, across)
    mbarrier.wait(w_ready, 0)
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        count = 2 * turn + GROUP
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        held = count % HELD
        row = start + gl.arange(0, TILE, gl.SliceLayout(1, some))
        inside = (row < M)[:, None]
        at = row.to(gl.int64)[:, None] * C + n[None, :]
        mbarrier.wait(ready.index(GROUP), turn & 1)
        normed, _ = normalize(c_s.index(held).load(left).to(gl.float32), eps, C)
        c = gl.arange(0, C, gl.SliceLayout(0, left))
        normed = (normed * gl.load(cond_gamma + c).to(gl.float32)[None, :]).to(dtype)
        mean, rstd = moments(x_s, held * PARTS, eps, C, PARTS, some)
        of_mean = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, some))
        of_std = gl.zeros([TILE], gl.float32, gl.SliceLayout(1, some))
        grad = gl.zeros([TILE, C], gl.float32, product)
        for part in range(0, PARTS):
            gate = warpgroup_mma(normed, columns_of(w_s, part, STEP, C), zero, use_acc=False, is_async=True)
            upstream = g_s.index(held * PARTS + part).load(some)
            above = gl.convert_layout(deal(upstream, STEP, narrow), left)
            grad = warpgroup_mma(above, columns_of(t_s, part, C, STEP), grad, is_async=True)
            x_hat = (x_s.index(held * PARTS + part).load(some).to(gl.float32) - mean[:, None]) * rstd[:, None]
            gate = warpgroup_mma_wait(1, [gate])
            gate = sigmoid(spread(gate, STEP) + bias_s.index(part).load(across)[None, :])
            scaled = upstream.to(gl.float32) * gate
            of_mean += gl.sum(scaled, 1)
            scaled *= x_hat
            of_std += gl.sum(scaled, 1)
            of_gate = (scaled * (1.0 - gate)).to(dtype)
            gl.store(grad_gate + at + part * STEP, of_gate, mask=inside)
            grad = warpgroup_mma_wait(0, [grad])
            above = gl.convert_layout(deal(of_gate, STEP, narrow), left)
            grad = warpgroup_mma(above, columns_of(t_s, PARTS + part, C, STEP), grad, is_async=True)
            grad = warpgroup_mma_wait(0, [grad])
        for part in range(0, PARTS):
            gate = warpgroup_mma(normed, columns_of(w_s, part, STEP, C), zero, use_acc=False, is_async=True)
            upstream = g_s.index(held * PARTS + part).load(some).to(gl.float32)
            x_hat = x_s.index(held * PARTS + part).load(some).to(gl.float32)
            release(free.index(held * PARTS + part))
            x_hat = (x_hat - mean[:, None]) * rstd[:, None]
            gate = warpgroup_mma_wait(0, [gate])
            gate = sigmoid(spread(gate, STEP) + bias_s.index(part).load(across)[None, :])
            result = upstream * gate - (of_mean / C)[:, None] - x_hat * (of_std / C)[:, None]
            result *= rstd[:, None]
            if OTHERS:
                result += gl.load(other_x + at + part * STEP, mask=inside, other=0.0).to(gl.float32)
            gl.store(grad_x + at + part * STEP, result.to(grad_x.dtype.element_ty), mask=inside)
        cond_hat, cond_rstd = normalize(c_s.index(held).load(wide).to(gl.float32), eps, C)
        release(free.index(HELD * PARTS + held))
        c = gl.arange(0, C, gl.SliceLayout(0, wide))
        row = start + gl.arange(0, TILE, gl.SliceLayout(1, wide))
        inside = (row < M)[:, None]
        at = row.to(gl.int64)[:, None] * C + c[None, :]
        of_cond = spread(grad, C) * gl.load(cond_gamma + c).to(gl.float32)[None, :]
        middle = (gl.sum(of_cond, 1) / C)[:, None]
        slope = (gl.sum(of_cond * cond_hat, 1) / C)[:, None]
        of_cond = cond_rstd[:, None] * (of_cond - middle - cond_hat * slope)
        if OTHERS:
            of_cond += gl.load(other_cond + at, mask=inside, other=0.0).to(gl.float32)
        gl.store(grad_cond + at, of_cond.to(grad_cond.dtype.element_ty), mask=inside)


@gluon.jit
def adaptive_norm_gradient_kernel_sm90(
    x, cond, grad_out, w, w_t, cond_gamma, bias, other_x, other_cond, grad_x, grad_cond, grad_gate, M, tiles, eps,
    C: gl.constexpr, STEP: gl.constexpr, HELD: gl.constexpr, OTHERS: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: cond [M, C]; x and grad_out [M, C], STEP columns at once; dealt, w [C, C]: of gamma, and with dealt
    columns w_t [2 C, C]: of beta and of gamma, transposed. The width of cond is that of x."""
    w_s = gl.allocate_shared_memory(w.dtype, [C // STEP, STEP // 32, 4, 4, 2, C], w.layout)
    t_s = gl.allocate_shared_memory(w.dtype, [2 * C // STEP, C // 32, 4, 4, 2, STEP], w_t.layout)
    x_s = gl.allocate_shared_memory(x.dtype, [HELD * C // STEP, TILE, STEP], x.layout)
    c_s = gl.allocate_shared_memory(cond.dtype, [HELD, TILE, C], cond.layout)
    g_s = gl.allocate_shared_memory(grad_out.dtype, [HELD * C // STEP, TILE, STEP], grad_out.layout)
    bias_s = gl.allocate_shared_memory(gl.float32, [C // STEP, STEP], VECTOR)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [HELD * (C // STEP + 1), 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, 2)
    init_barriers(free, HELD * (C // STEP + 1))
    hold_vectors(bias_s, bias, C // STEP, STEP)
    shared = (w_s, t_s, x_s, c_s, g_s, bias_s, w_ready, ready, free)
    loads = (x, cond, grad_out, w, w_t, other_x, other_cond, M, tiles)
    work = (cond_gamma, other_x, other_cond, grad_x, grad_cond, grad_gate, M, tiles, eps)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, 0, C, STEP, HELD, OTHERS)),
            (product_partition, (shared, work, 1, C, STEP, HELD, OTHERS)),
            (load_partition, (shared, loads, 0, C, STEP, HELD, OTHERS)),
            (load_partition, (shared, loads, 1, C, STEP, HELD, OTHERS)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )
