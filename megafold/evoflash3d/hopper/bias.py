"""d(bias) for sm_90: a tile of 128 queries and BLOCK_J keys over a chunk of rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from megafold.evoflash3d.hopper.common import (
    LOG2E,
    launch_dependents,
    wait_for_the_kernel_before,
    widen,
)
from megafold.gluon_barriers import release


@gluon.jit
def tile_of(item, H, NQ, NK, B, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr):
    """(b, h, i_start, j_start, chunk) of an item; tiles of one head and chunk are neighbours."""
    n_i, n_j = gl.cdiv(NQ, BLOCK_I), gl.cdiv(NK, BLOCK_J)
    i_start = (item % n_i) * BLOCK_I
    j_start = ((item // n_i) % n_j) * BLOCK_J
    bh = (item // (n_i * n_j)) % (H * B)
    chunk = item // (n_i * n_j * H * B)
    return bh // H, bh % H, i_start, j_start, chunk


@gluon.jit
def load_partition(shared, loads, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr):
    q_s, g_s, k_s, v_s, lse_s, delta_s, ready, free = shared
    q, k, v, g, lse2, delta, B, R, H, NQ, NK, rows_per_chunk, items = loads
    row_bytes: gl.constexpr = 2 * (q.block_type.nbytes + k.block_type.nbytes + lse2.block_type.nbytes)
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, i_start, j_start, chunk = tile_of(item, H, NQ, NK, B, BLOCK_I, BLOCK_J)
        first = chunk * rows_per_chunk
        for r in range(first, gl.minimum(first + rows_per_chunk, R)):
            stage = tile % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), ((tile // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, row_bytes)
            tma.async_copy_global_to_shared(q, [b, r, h, i_start, 0], bar, q_s.index(stage))
            tma.async_copy_global_to_shared(k, [b, r, h, j_start, 0], bar, k_s.index(stage))
            tma.async_copy_global_to_shared(g, [b, r, h, i_start, 0], bar, g_s.index(stage))
            tma.async_copy_global_to_shared(v, [b, r, h, j_start, 0], bar, v_s.index(stage))
            line = (b * R + r) * H + h
            tma.async_copy_global_to_shared(lse2, [line, i_start], bar, lse_s.index(stage))
            tma.async_copy_global_to_shared(delta, [line, i_start], bar, delta_s.index(stage))
            tile += 1


@gluon.jit
def part_gradient(
    q_tile, k_part, g_tile, v_part, x, lse, delta, scale2,
    PART: gl.constexpr, STEP: gl.constexpr, KEEP_16: gl.constexpr, scores: gl.constexpr,
):  # fmt: skip
    """d(scores) of 64 queries and STEP keys of one row; x: bias in base 2, or with KEEP_16 as it is."""
    zero = gl.zeros([PART, STEP], gl.float32, scores)
    s_async = warpgroup_mma(q_tile, k_part.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp_async = warpgroup_mma(g_tile, v_part.permute((1, 0)), zero, use_acc=False, is_async=True)
    y = widen(x) * LOG2E - lse if KEEP_16 else x - lse
    s = warpgroup_mma_wait(1, [s_async])
    p = gl.exp2(s * scale2 + y)
    return p * (warpgroup_mma_wait(0, [dp_async]) - delta)


@gluon.jit
def load_bias(pointer, columns, KEEP_16: gl.constexpr, i, j):
    x = gl.load(pointer + i.to(gl.int64) * columns + j)
    return x if KEEP_16 else x.to(gl.float32) * LOG2E


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, D: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr,
    STAGES: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
):  # fmt: skip
    q_s, g_s, k_s, v_s, lse_s, delta_s, ready, free = shared
    bias, dbias, B, R, H, NQ, NK, BIAS_ROWS, BIAS_COLUMNS, rows_per_chunk, scale, items = work
    PART: gl.constexpr = BLOCK_I // PARTS
    AT: gl.constexpr = (GROUP % PARTS) * PART
    AT_J: gl.constexpr = (GROUP // PARTS) * 64
    KEEP_16: gl.constexpr = BLOCK_J == 128 or BLOCK_I == 256
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, STEP, 16])
    per_query: gl.constexpr = gl.SliceLayout(1, scores)
    si = gl.arange(0, PART, per_query)[:, None]
    sj = gl.arange(0, STEP, gl.SliceLayout(0, scores))[None, :]
    scale2 = scale * LOG2E
    tile = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, h, i_start, j_start, chunk = tile_of(item, H, NQ, NK, B, BLOCK_I, BLOCK_J)
        i = i_start + AT + si
        j = j_start + AT_J + sj
        bh = (b * H + h).to(gl.int64)
        pointer = bias + bh * BIAS_ROWS * BIAS_COLUMNS
        x_0 = load_bias(pointer, BIAS_COLUMNS, KEEP_16, i, j)
        total_0 = gl.zeros([PART, STEP], gl.float32, scores)
        if STEP == 32:
            x_1 = load_bias(pointer, BIAS_COLUMNS, KEEP_16, i, j + STEP)
            total_1 = gl.zeros([PART, STEP], gl.float32, scores)
        first = chunk * rows_per_chunk
        for _r in range(first, gl.minimum(first + rows_per_chunk, R)):
            stage = tile % STAGES
            mbarrier.wait(ready.index(stage), (tile // STAGES) & 1)
            q_tile = q_s.index(stage).reshape([BLOCK_I, D]).slice(AT, PART, 0)
            g_tile = g_s.index(stage).reshape([BLOCK_I, D]).slice(AT, PART, 0)
            k_tile = k_s.index(stage).reshape([BLOCK_J, D])
            v_tile = v_s.index(stage).reshape([BLOCK_J, D])
            lse = lse_s.index(stage).reshape([BLOCK_I]).slice(AT, PART, 0).load(per_query)[:, None]
            delta = delta_s.index(stage).reshape([BLOCK_I]).slice(AT, PART, 0).load(per_query)[:, None]
            total_0 += part_gradient(
                q_tile, k_tile.slice(AT_J, STEP, 0), g_tile, v_tile.slice(AT_J, STEP, 0), x_0, lse, delta, scale2,
                PART, STEP, KEEP_16, scores,
            )  # fmt: skip
            if STEP == 32:
                total_1 += part_gradient(
                    q_tile, k_tile.slice(AT_J + STEP, STEP, 0), g_tile, v_tile.slice(AT_J + STEP, STEP, 0), x_1, lse,
                    delta, scale2, PART, STEP, KEEP_16, scores,
                )  # fmt: skip
            release(free.index(stage))
            tile += 1
        base = dbias + (chunk.to(gl.int64) * (B * H) + bh) * NQ * NK + i.to(gl.int64) * NK
        gl.store(base + j, total_0.to(dbias.dtype.element_ty), mask=(i < NQ) & (j < NK))
        if STEP == 32:
            gl.store(base + j + STEP, total_1.to(dbias.dtype.element_ty), mask=(i < NQ) & (j + STEP < NK))


@gluon.jit
def bias_kernel_sm90(
    q, k, v, grad_out, lse2, delta, bias, dbias,
    B, R, H, NQ, NK, BIAS_ROWS, BIAS_COLUMNS, rows_per_chunk, scale, items,
    D: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr,
    WARPS: gl.constexpr, PARTS: gl.constexpr, REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Descriptors: q, k, v, d(out) [B, R, H, N, D]; lse2, delta [B * R * H, NQ]. The padded bias, [B * H * BIAS_ROWS,
    BIAS_COLUMNS], is read once a tile."""
    if OVERLAP:
        launch_dependents()
    dtype: gl.constexpr = q.dtype
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BLOCK_I, D], q.layout)
    g_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BLOCK_I, D], q.layout)
    k_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BLOCK_J, D], k.layout)
    v_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BLOCK_J, D], k.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_I], lse2.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_I], lse2.layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=BLOCK_J // 64 * PARTS)
    shared = (q_s, g_s, k_s, v_s, lse_s, delta_s, ready, free)
    work = (bias, dbias, B, R, H, NQ, NK, BIAS_ROWS, BIAS_COLUMNS, rows_per_chunk, scale, items)
    loads = (q, k, v, grad_out, lse2, delta, B, R, H, NQ, NK, rows_per_chunk, items)
    if BLOCK_J // 64 * PARTS == 1:
        gl.warp_specialize(
            [
                (product_partition, (shared, work, 0, D, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (load_partition, (shared, loads, BLOCK_I, BLOCK_J, STAGES)),
            ],
            [1],
            [24],
        )
    elif BLOCK_J // 64 * PARTS == 2:
        gl.warp_specialize(
            [
                (product_partition, (shared, work, 0, D, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (product_partition, (shared, work, 1, D, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (load_partition, (shared, loads, BLOCK_I, BLOCK_J, STAGES)),
            ],
            [WARPS, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (product_partition, (shared, work, 0, D, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (product_partition, (shared, work, 1, D, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (product_partition, (shared, work, 2, D, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (product_partition, (shared, work, 3, D, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS)),
                (load_partition, (shared, loads, BLOCK_I, BLOCK_J, STAGES)),
            ],
            [WARPS, WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
    if OVERLAP:
        wait_for_the_kernel_before()
