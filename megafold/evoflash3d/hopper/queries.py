"""dq for sm_90: 128 queries of ROWS rows; the keys pass by.

With OWN_DELTA the kernel also does what `delta_kernel` does, from a tile of the output, for the kernels that follow.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from megafold.evoflash3d.hopper.common import (
    LOG2E,
    item_of,
    launch_dependents,
    wait_for_the_kernel_before,
    widen,
)
from megafold.gluon_barriers import release, thread_barrier


@gluon.jit
def load_partition(
    shared, loads, ROWS: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
    OWN_DELTA: gl.constexpr,
):  # fmt: skip
    q_s, g_s, o_s, k_s, v_s, bias_s, q_ready, q_free, ready, free = shared
    q, k, v, g, out, bias, R, H, NQ, NK, BIAS_ROWS, items = loads
    q_bytes: gl.constexpr = (3 if OWN_DELTA else 2) * ROWS * q.block_type.nbytes
    tile_bytes: gl.constexpr = 2 * ROWS * k.block_type.nbytes + bias.block_type.nbytes
    tile = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, r, h, i_start = item_of(item, R, H, NQ, ROWS, BLOCK_I)
        mbarrier.wait(q_free, (count & 1) ^ 1)
        mbarrier.expect(q_ready, q_bytes)
        for row in gl.static_range(ROWS):
            tma.async_copy_global_to_shared(q, [b, r + row, h, i_start, 0], q_ready, q_s.index(row))
            tma.async_copy_global_to_shared(g, [b, r + row, h, i_start, 0], q_ready, g_s.index(row))
            if OWN_DELTA:
                tma.async_copy_global_to_shared(out, [b, r + row, h, i_start, 0], q_ready, o_s.index(row))
        bias_row = (b * H + h) * BIAS_ROWS + i_start
        for j_start in range(0, NK, BLOCK_J):
            stage = tile % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), ((tile // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, tile_bytes)
            for row in gl.static_range(ROWS):
                tma.async_copy_global_to_shared(k, [b, r + row, h, j_start, 0], bar, k_s.index(stage * ROWS + row))
                tma.async_copy_global_to_shared(v, [b, r + row, h, j_start, 0], bar, v_s.index(stage * ROWS + row))
            tma.async_copy_global_to_shared(bias, [bias_row, j_start], bar, bias_s.index(stage))
            tile += 1
        count += 1  # noqa: SIM113 - no enumerate here


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, BLOCK_I: gl.constexpr,
    BLOCK_J: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
    OWN_DELTA: gl.constexpr,
):  # fmt: skip
    q_s, g_s, o_s, k_s, v_s, bias_s, q_ready, q_free, ready, free = shared
    lse2, delta2, dq, dq_b, dq_r, dq_h, dq_n, R, H, NQ, NK, head_dim, pitch, scale, items = work
    dtype: gl.constexpr = q_s.dtype
    PART: gl.constexpr = BLOCK_I // PARTS
    ROW: gl.constexpr = GROUP // PARTS
    AT: gl.constexpr = (GROUP % PARTS) * PART
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, STEP, 16])
    queries: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    operand: gl.constexpr = gl.DotOperandLayout(0, queries, 2)
    zero = gl.zeros([PART, STEP], gl.float32, scores)
    si = gl.arange(0, PART, gl.SliceLayout(1, scores))
    qi = gl.arange(0, PART, gl.SliceLayout(1, queries))[:, None]
    qd = gl.arange(0, D, gl.SliceLayout(0, queries))[None, :]
    scale2 = scale * LOG2E
    tile = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, r, h, i_start = item_of(item, R, H, NQ, ROWS, BLOCK_I)
        i_start += AT
        r += ROW
        b64, h64, r64 = b.to(gl.int64), h.to(gl.int64), r.to(gl.int64)
        line = (b64 * R + r) * H + h
        stats = line * pitch + i_start + si
        inside = (i_start + si < NQ) & (r < R)
        lse = gl.load(lse2 + stats, mask=inside, other=0.0)
        if not OWN_DELTA:
            delta = gl.load(delta2 + stats, mask=inside, other=0.0)
        mbarrier.wait(q_ready, count & 1)
        q_tile = q_s.index(ROW).reshape([BLOCK_I, D]).slice(AT, PART, 0).load(left)
        g_tile = g_s.index(ROW).reshape([BLOCK_I, D]).slice(AT, PART, 0).load(left)
        if OWN_DELTA:
            o_tile = o_s.index(ROW).reshape([BLOCK_I, D]).slice(AT, PART, 0).load(left)
            delta = gl.sum(g_tile.to(gl.float32) * o_tile.to(gl.float32), 1)
            delta = gl.convert_layout(delta, gl.SliceLayout(1, scores))
            gl.store(delta2 + stats, delta, mask=inside)
        lse, delta = lse[:, None], delta[:, None]
        acc = gl.zeros([PART, D], gl.float32, queries)
        release(q_free)
        for _j_start in range(0, NK, BLOCK_J):
            stage = tile % STAGES
            k_tile = k_s.index(stage * ROWS + ROW).reshape([BLOCK_J, D])
            v_tile = v_s.index(stage * ROWS + ROW).reshape([BLOCK_J, D])
            bias_tile = bias_s.index(stage).slice(AT, PART, 0)
            mbarrier.wait(ready.index(stage), (tile // STAGES) & 1)
            for part in gl.static_range(BLOCK_J // STEP):
                k_part = k_tile.slice(part * STEP, STEP, 0)
                v_part = v_tile.slice(part * STEP, STEP, 0)
                s_async = warpgroup_mma(q_tile, k_part.permute((1, 0)), zero, use_acc=False, is_async=True)
                dp_async = warpgroup_mma(g_tile, v_part.permute((1, 0)), zero, use_acc=False, is_async=True)
                y = widen(bias_tile.slice(part * STEP, STEP, 1).load(scores)) * LOG2E - lse
                acc, s = warpgroup_mma_wait(1, [acc, s_async])
                p = gl.exp2(s * scale2 + y)
                dp = warpgroup_mma_wait(0, [dp_async])
                ds = gl.convert_layout((p * (dp - delta)).to(dtype), operand)
                acc = warpgroup_mma(ds, k_part, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            thread_barrier()
            mbarrier.arrive(free.index(stage), count=1)
            tile += 1
        row = (i_start + qi).to(gl.int64)
        base = dq + b64 * dq_b + r64 * dq_r + h64 * dq_h
        fits = (i_start + qi < NQ) & (qd < head_dim) & (r < R)
        gl.store(base + row * dq_n + qd, (acc * scale).to(dtype), mask=fits)
        count += 1  # noqa: SIM113 - no enumerate here


@gluon.jit
def queries_kernel_sm90(
    q, k, v, grad_out, out, bias, lse2, delta, dq,
    dq_b, dq_r, dq_h, dq_n, R, H, NQ, NK, BIAS_ROWS, head_dim, pitch, scale, items,
    D: gl.constexpr, ROWS: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
    STEP: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, REGISTERS: gl.constexpr,
    OWN_DELTA: gl.constexpr, OVERLAP: gl.constexpr,
):  # fmt: skip
    """Descriptors: q, k, v, d(out) and the output [B, R, H, N, D]; the padded bias [B * H * BIAS_ROWS, columns].

    OWN_DELTA: read `out` and write `delta`, which is read otherwise."""
    if OVERLAP:
        launch_dependents()
    dtype: gl.constexpr = q.dtype
    q_s = gl.allocate_shared_memory(dtype, [ROWS, 1, 1, 1, BLOCK_I, D], q.layout)
    g_s = gl.allocate_shared_memory(dtype, [ROWS, 1, 1, 1, BLOCK_I, D], q.layout)
    if OWN_DELTA:
        o_s = gl.allocate_shared_memory(dtype, [ROWS, 1, 1, 1, BLOCK_I, D], q.layout)
    else:
        o_s = g_s
    k_s = gl.allocate_shared_memory(dtype, [STAGES * ROWS, 1, 1, 1, BLOCK_J, D], k.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES * ROWS, 1, 1, 1, BLOCK_J, D], k.layout)
    bias_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_I, BLOCK_J], bias.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    q_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=ROWS * PARTS)
    mbarrier.init(q_ready, count=1)
    mbarrier.init(q_free, count=ROWS * PARTS)
    shared = (q_s, g_s, o_s, k_s, v_s, bias_s, q_ready, q_free, ready, free)
    work = (lse2, delta, dq, dq_b, dq_r, dq_h, dq_n, R, H, NQ, NK, head_dim, pitch, scale, items)
    loads = (q, k, v, grad_out, out, bias, R, H, NQ, NK, BIAS_ROWS, items)
    if ROWS * PARTS == 1:
        gl.warp_specialize(
            [
                (
                    product_partition,
                    (shared, work, 0, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, OWN_DELTA),
                ),
                (load_partition, (shared, loads, ROWS, BLOCK_I, BLOCK_J, STAGES, OWN_DELTA)),
            ],
            [1],
            [24],
        )
    elif ROWS * PARTS == 2:
        gl.warp_specialize(
            [
                (
                    product_partition,
                    (shared, work, 0, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, OWN_DELTA),
                ),
                (
                    product_partition,
                    (shared, work, 1, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, OWN_DELTA),
                ),
                (load_partition, (shared, loads, ROWS, BLOCK_I, BLOCK_J, STAGES, OWN_DELTA)),
            ],
            [WARPS, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    product_partition,
                    (shared, work, 0, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, OWN_DELTA),
                ),
                (
                    product_partition,
                    (shared, work, 1, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, OWN_DELTA),
                ),
                (
                    product_partition,
                    (shared, work, 2, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, OWN_DELTA),
                ),
                (
                    product_partition,
                    (shared, work, 3, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, OWN_DELTA),
                ),
                (load_partition, (shared, loads, ROWS, BLOCK_I, BLOCK_J, STAGES, OWN_DELTA)),
            ],
            [WARPS, WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
    if OVERLAP:
        wait_for_the_kernel_before()
