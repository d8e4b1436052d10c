"""dk and dv for sm_90: 128 keys of ROWS rows; the queries pass by, with transposed scores."""

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
    shared, loads, ROWS: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr
):
    q_s, g_s, k_s, v_s, bias_s, lse_s, delta_s, kv_ready, kv_free, ready, free = shared
    q, k, v, g, bias, lse2, delta, R, H, NQ, NK, BIAS_ROWS, items = loads
    kv_bytes: gl.constexpr = 2 * ROWS * k.block_type.nbytes
    tile_bytes: gl.constexpr = 2 * ROWS * (q.block_type.nbytes + lse2.block_type.nbytes) + bias.block_type.nbytes
    tile = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, r, h, j_start = item_of(item, R, H, NK, ROWS, BLOCK_J)
        mbarrier.wait(kv_free, (count & 1) ^ 1)
        mbarrier.expect(kv_ready, kv_bytes)
        for row in gl.static_range(ROWS):
            tma.async_copy_global_to_shared(k, [b, r + row, h, j_start, 0], kv_ready, k_s.index(row))
            tma.async_copy_global_to_shared(v, [b, r + row, h, j_start, 0], kv_ready, v_s.index(row))
        bias_row = (b * H + h) * BIAS_ROWS
        for i_start in range(0, NQ, BLOCK_I):
            stage = tile % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), ((tile // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, tile_bytes)
            for row in gl.static_range(ROWS):
                at = stage * ROWS + row
                tma.async_copy_global_to_shared(q, [b, r + row, h, i_start, 0], bar, q_s.index(at))
                tma.async_copy_global_to_shared(g, [b, r + row, h, i_start, 0], bar, g_s.index(at))
                line = (b * R + r + row) * H + h
                tma.async_copy_global_to_shared(lse2, [line, i_start], bar, lse_s.index(at))
                tma.async_copy_global_to_shared(delta, [line, i_start], bar, delta_s.index(at))
            tma.async_copy_global_to_shared(bias, [bias_row + i_start, j_start], bar, bias_s.index(stage))
            tile += 1
        count += 1  # noqa: SIM113 - no enumerate here


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, BLOCK_I: gl.constexpr,
    BLOCK_J: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    q_s, g_s, k_s, v_s, bias_s, lse_s, delta_s, kv_ready, kv_free, ready, free = shared
    dk, dv, dk_b, dk_r, dk_h, dk_n, dv_b, dv_r, dv_h, dv_n, R, H, NQ, NK, head_dim, scale, items = work
    dtype: gl.constexpr = q_s.dtype
    PART: gl.constexpr = BLOCK_J // PARTS
    ROW: gl.constexpr = GROUP // PARTS
    AT: gl.constexpr = (GROUP % PARTS) * PART
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, STEP, 16])
    keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    per_query: gl.constexpr = gl.SliceLayout(0, scores)
    left: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    operand: gl.constexpr = gl.DotOperandLayout(0, keys, 2)
    zero = gl.zeros([PART, STEP], gl.float32, scores)
    kj = gl.arange(0, PART, gl.SliceLayout(1, keys))[:, None]
    kd = gl.arange(0, D, gl.SliceLayout(0, keys))[None, :]
    scale2 = scale * LOG2E
    tile = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, r, h, j_start = item_of(item, R, H, NK, ROWS, BLOCK_J)
        j_start += AT
        r += ROW
        mbarrier.wait(kv_ready, count & 1)
        k_tile = k_s.index(ROW).reshape([BLOCK_J, D]).slice(AT, PART, 0).load(left)
        v_tile = v_s.index(ROW).reshape([BLOCK_J, D]).slice(AT, PART, 0).load(left)
        dk_acc = gl.zeros([PART, D], gl.float32, keys)
        dv_acc = gl.zeros([PART, D], gl.float32, keys)
        release(kv_free)
        for _i_start in range(0, NQ, BLOCK_I):
            stage = tile % STAGES
            at = stage * ROWS + ROW
            q_tile, g_tile = q_s.index(at).reshape([BLOCK_I, D]), g_s.index(at).reshape([BLOCK_I, D])
            lse_tile, delta_tile = lse_s.index(at).reshape([BLOCK_I]), delta_s.index(at).reshape([BLOCK_I])
            bias_tile = bias_s.index(stage).slice(AT, PART, 1)
            mbarrier.wait(ready.index(stage), (tile // STAGES) & 1)
            for part in gl.static_range(BLOCK_I // STEP):
                q_part, g_part = q_tile.slice(part * STEP, STEP, 0), g_tile.slice(part * STEP, STEP, 0)
                s_async = warpgroup_mma(k_tile, q_part.permute((1, 0)), zero, use_acc=False, is_async=True)
                dp_async = warpgroup_mma(v_tile, g_part.permute((1, 0)), zero, use_acc=False, is_async=True)
                lse = lse_tile.slice(part * STEP, STEP, 0).load(per_query)[None, :]
                bias_part = bias_tile.slice(part * STEP, STEP, 0).permute((1, 0))  # transposed as it is loaded
                y = widen(bias_part.load(scores)) * LOG2E - lse
                s = warpgroup_mma_wait(1, [s_async])
                p = gl.exp2(s * scale2 + y)
                dv_acc = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), g_part, dv_acc, is_async=True)
                delta = delta_tile.slice(part * STEP, STEP, 0).load(per_query)[None, :]
                dp = warpgroup_mma_wait(1, [dp_async])
                ds = gl.convert_layout((p * (dp - delta)).to(dtype), operand)
                dk_acc = warpgroup_mma(ds, q_part, dk_acc, is_async=True)
                dk_acc, dv_acc = warpgroup_mma_wait(0, [dk_acc, dv_acc])
            thread_barrier()
            mbarrier.arrive(free.index(stage), count=1)
            tile += 1
        b64, h64, r64 = b.to(gl.int64), h.to(gl.int64), r.to(gl.int64)
        row = (j_start + kj).to(gl.int64)
        dk_base = dk + b64 * dk_b + r64 * dk_r + h64 * dk_h
        dv_base = dv + b64 * dv_b + r64 * dv_r + h64 * dv_h
        fits = (j_start + kj < NK) & (kd < head_dim) & (r < R)
        gl.store(dk_base + row * dk_n + kd, (dk_acc * scale).to(dtype), mask=fits)
        gl.store(dv_base + row * dv_n + kd, dv_acc.to(dtype), mask=fits)
        count += 1  # noqa: SIM113 - no enumerate here


@gluon.jit
def keys_kernel_sm90(
    q, k, v, grad_out, bias, lse2, delta, dk, dv,
    dk_b, dk_r, dk_h, dk_n, dv_b, dv_r, dv_h, dv_n, R, H, NQ, NK, BIAS_ROWS, head_dim, scale, items,
    D: gl.constexpr, ROWS: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
    STEP: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Descriptors: q, k, v, d(out) [B, R, H, N, D]; the padded bias [B * H * BIAS_ROWS, columns]; lse2 and delta
    [B * R * H, NQ]."""
    if OVERLAP:
        launch_dependents()
    dtype: gl.constexpr = q.dtype
    q_s = gl.allocate_shared_memory(dtype, [STAGES * ROWS, 1, 1, 1, BLOCK_I, D], q.layout)
    g_s = gl.allocate_shared_memory(dtype, [STAGES * ROWS, 1, 1, 1, BLOCK_I, D], q.layout)
    k_s = gl.allocate_shared_memory(dtype, [ROWS, 1, 1, 1, BLOCK_J, D], k.layout)
    v_s = gl.allocate_shared_memory(dtype, [ROWS, 1, 1, 1, BLOCK_J, D], k.layout)
    bias_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_I, BLOCK_J], bias.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES * ROWS, 1, BLOCK_I], lse2.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES * ROWS, 1, BLOCK_I], lse2.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    kv_free = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=ROWS * PARTS)
    mbarrier.init(kv_ready, count=1)
    mbarrier.init(kv_free, count=ROWS * PARTS)
    shared = (q_s, g_s, k_s, v_s, bias_s, lse_s, delta_s, kv_ready, kv_free, ready, free)
    work = (dk, dv, dk_b, dk_r, dk_h, dk_n, dv_b, dv_r, dv_h, dv_n, R, H, NQ, NK, head_dim, scale, items)
    loads = (q, k, v, grad_out, bias, lse2, delta, R, H, NQ, NK, BIAS_ROWS, items)
    if ROWS * PARTS == 1:
        gl.warp_specialize(
            [
                (product_partition, (shared, work, 0, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (load_partition, (shared, loads, ROWS, BLOCK_I, BLOCK_J, STAGES)),
            ],
            [1],
            [24],
        )
    elif ROWS * PARTS == 2:
        gl.warp_specialize(
            [
                (product_partition, (shared, work, 0, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (product_partition, (shared, work, 1, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (load_partition, (shared, loads, ROWS, BLOCK_I, BLOCK_J, STAGES)),
            ],
            [WARPS, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (product_partition, (shared, work, 0, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (product_partition, (shared, work, 1, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (product_partition, (shared, work, 2, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (product_partition, (shared, work, 3, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (load_partition, (shared, loads, ROWS, BLOCK_I, BLOCK_J, STAGES)),
            ],
            [WARPS, WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
    if OVERLAP:
        wait_for_the_kernel_before()
