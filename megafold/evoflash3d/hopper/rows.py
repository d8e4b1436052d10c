"""dq, dk and dv of a whole row for sm_90: scores are made once for all three, and dq is summed in shared memory.

A program holds one row of one head. Keys pass by 128 at a time, two groups of warps with 64 each; for each of these
blocks all queries pass by, 64 at a time. A group multiplies as in `keys`, and leaves its d(scores) in shared memory.
From there a third group makes this block's share of dq and adds it to what the blocks before gave, in their order: in
shared memory, for all queries, which is what limits the length of a row. Nothing is counted along the loops: stages
and the turns of their barriers follow from the loops' own indices.
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

from megafold.evoflash3d.hopper.common import (
    LOG2E,
    launch_dependents,
    wait_for_the_kernel_before,
    widen,
)
from megafold.gluon_barriers import thread_barrier

BLOCK_I = gl.constexpr(64)
"""Queries of a tile: the rows of one product of a group of warps."""
BLOCK_J = gl.constexpr(128)
"""Keys of a block."""
PART = gl.constexpr(64)
"""Keys of a group of warps."""


@gluon.jit
def row_of(item, R, H):
    """(b, r, h) of an item: rows of one head are neighbours, since they read the same bias."""
    return item // (R * H), item % R, (item // R) % H


@gluon.jit
def tiles_of(NQ):
    """Tiles of queries, which are taken two at a time; what is behind the last query is 0 and adds nothing."""
    return gl.cdiv(NQ, 2 * BLOCK_I) * 2


@gluon.jit
def load_partition(shared, loads, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr):
    q_s, g_s, k_s, v_s, bias_s, lse_s, delta_s, _ds_s, _dq_s, keys_ready, keys_free, ready, free, _made, _used = shared
    q, k, v, g, bias, lse2, delta, R, H, NQ, NK, BIAS_ROWS, items = loads
    keys_bytes: gl.constexpr = 2 * k.block_type.nbytes
    tile_bytes: gl.constexpr = 2 * (q.block_type.nbytes + lse2.block_type.nbytes) + bias.block_type.nbytes
    tiles = tiles_of(NQ)
    blocks = gl.cdiv(NK, BLOCK_J)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, r, h = row_of(item, R, H)
        turn = item // gl.num_programs(0) * blocks
        for j in range(0, blocks):
            at = turn + j
            key_stage = at % KEY_STAGES
            bar = keys_ready.index(key_stage)
            mbarrier.wait(keys_free.index(key_stage), ((at // KEY_STAGES) & 1) ^ 1)
            mbarrier.expect(bar, keys_bytes)
            tma.async_copy_global_to_shared(k, [b, r, h, j * BLOCK_J, 0], bar, k_s.index(key_stage))
            tma.async_copy_global_to_shared(v, [b, r, h, j * BLOCK_J, 0], bar, v_s.index(key_stage))
            for i in range(0, tiles):
                tile = at * tiles + i
                stage = tile % STAGES
                bar = ready.index(stage)
                mbarrier.wait(free.index(stage), ((tile // STAGES) & 1) ^ 1)
                mbarrier.expect(bar, tile_bytes)
                i_start = i * BLOCK_I
                tma.async_copy_global_to_shared(q, [b, r, h, i_start, 0], bar, q_s.index(stage))
                tma.async_copy_global_to_shared(g, [b, r, h, i_start, 0], bar, g_s.index(stage))
                line = (b * R + r) * H + h
                tma.async_copy_global_to_shared(lse2, [line, i_start], bar, lse_s.index(stage))
                tma.async_copy_global_to_shared(delta, [line, i_start], bar, delta_s.index(stage))
                bias_row = (b * H + h) * BIAS_ROWS + i_start
                tma.async_copy_global_to_shared(bias, [bias_row, j * BLOCK_J], bar, bias_s.index(stage))


@gluon.jit
def score_products(shared, k_tile, v_tile, tile, D: gl.constexpr, STAGES: gl.constexpr, scores: gl.constexpr):
    """Start k times q and v times d(out), transposed scores and their gradients, of a tile when it is there."""
    q_s, g_s, _k_s, _v_s, _bias_s, _lse_s, _delta_s, _ds_s, _dq_s, _keys_ready, _keys_free, ready, _free, _m, _u = (
        shared
    )
    zero = gl.zeros([PART, BLOCK_I], gl.float32, scores)
    stage = tile % STAGES
    mbarrier.wait(ready.index(stage), (tile // STAGES) & 1)
    q_tile, g_tile = q_s.index(stage).reshape([BLOCK_I, D]), g_s.index(stage).reshape([BLOCK_I, D])
    s = warpgroup_mma(k_tile, q_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    dp = warpgroup_mma(v_tile, g_tile.permute((1, 0)), zero, use_acc=False, is_async=True)
    return s, dp


@gluon.jit
def gradients_of_tile(
    shared, s, dp, dk_acc, dv_acc, tile, scale2, AT: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr,
    scores: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """d(scores) of 64 keys and a tile's queries from `score_products`; starts their share of dk and dv."""
    q_s, g_s, _k_s, _v_s, bias_s, lse_s, delta_s, _ds_s, _dq_s, _keys_ready, _keys_free, _ready, _free, _m, _u = shared
    dtype: gl.constexpr = q_s.dtype
    per_query: gl.constexpr = gl.SliceLayout(0, scores)
    stage = tile % STAGES
    lse = lse_s.index(stage).reshape([BLOCK_I]).load(per_query)[None, :]
    bias_tile = bias_s.index(stage).slice(AT, PART, 1).permute((1, 0))  # transposed as it is loaded
    y = widen(bias_tile.load(scores)) * LOG2E - lse
    p = gl.exp2(warpgroup_mma_wait(1, [s]) * scale2 + y)
    g_tile = g_s.index(stage).reshape([BLOCK_I, D])
    dv_acc = warpgroup_mma(gl.convert_layout(p.to(dtype), operand), g_tile, dv_acc, is_async=True)
    delta = delta_s.index(stage).reshape([BLOCK_I]).load(per_query)[None, :]
    ds = (p * (warpgroup_mma_wait(1, [dp]) - delta)).to(dtype)
    q_tile = q_s.index(stage).reshape([BLOCK_I, D])
    dk_acc = warpgroup_mma(gl.convert_layout(ds, operand), q_tile, dk_acc, is_async=True)
    return ds, dk_acc, dv_acc


@gluon.jit
def leave_scores(shared, ds, tile, AT: gl.constexpr, SCORE_STAGES: gl.constexpr):
    """Put d(scores) into shared memory, when what lay there has been used."""
    _q_s, _g_s, _k_s, _v_s, _bias_s, _lse_s, _delta_s, ds_s, _dq_s, _keys_ready, _keys_free, _ready, _free, _m, used = (
        shared
    )
    score_stage = tile % SCORE_STAGES
    mbarrier.wait(used.index(score_stage), ((tile // SCORE_STAGES) & 1) ^ 1)
    ds_s.index(score_stage).slice(AT, PART, 0).store(ds)


@gluon.jit
def tell_scores(shared, tile, SCORE_STAGES: gl.constexpr):
    """Let products read this group's d(scores), and anyone write what it has read of this tile."""
    (
        _q_s,
        _g_s,
        _k_s,
        _v_s,
        _bias_s,
        _lse_s,
        _delta_s,
        _ds_s,
        _dq_s,
        _keys_ready,
        _keys_free,
        _ready,
        _free,
        made,
        _u,
    ) = shared
    fence_async_shared()
    thread_barrier()
    mbarrier.arrive(made.index(tile % SCORE_STAGES), count=1)


@gluon.jit
def keys_partition(
    shared, work, GROUP: gl.constexpr, D: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    SCORE_STAGES: gl.constexpr,
):  # fmt: skip
    """dk and dv of 64 keys, and d(scores) for the group that makes dq."""
    q_s, _g_s, k_s, v_s, _bias_s, _lse_s, _delta_s, _ds_s, _dq_s, keys_ready, keys_free, _ready, _free, _m, _u = shared
    dk, dv, dk_b, dk_r, dk_h, dk_n, dv_b, dv_r, dv_h, dv_n, R, H, NQ, NK, head_dim, scale, items = work
    dtype: gl.constexpr = q_s.dtype
    AT: gl.constexpr = GROUP * PART
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_I, 16])
    keys: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    operand: gl.constexpr = gl.DotOperandLayout(0, keys, 2)
    kj = gl.arange(0, PART, gl.SliceLayout(1, keys))[:, None]
    kd = gl.arange(0, D, gl.SliceLayout(0, keys))[None, :]
    scale2 = scale * LOG2E
    tiles = tiles_of(NQ)
    blocks = gl.cdiv(NK, BLOCK_J)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, r, h = row_of(item, R, H)
        turn = item // gl.num_programs(0) * blocks
        for j in range(0, blocks):
            at = turn + j
            key_stage = at % KEY_STAGES
            mbarrier.wait(keys_ready.index(key_stage), (at // KEY_STAGES) & 1)
            k_tile = k_s.index(key_stage).reshape([BLOCK_J, D]).slice(AT, PART, 0).load(left)
            v_tile = v_s.index(key_stage).reshape([BLOCK_J, D]).slice(AT, PART, 0).load(left)
            dk_acc = gl.zeros([PART, D], gl.float32, keys)
            dv_acc = gl.zeros([PART, D], gl.float32, keys)
            for i in range(0, tiles, 2):
                tile = at * tiles + i
                s, dp = score_products(shared, k_tile, v_tile, tile, D, STAGES, scores)
                ds, dk_acc, dv_acc = gradients_of_tile(
                    shared, s, dp, dk_acc, dv_acc, tile, scale2, AT, D, STAGES, scores, operand
                )
                leave_scores(shared, ds, tile, AT, SCORE_STAGES)
                # The next tile's products start before this one's end.
                s, dp = score_products(shared, k_tile, v_tile, tile + 1, D, STAGES, scores)
                dk_acc, dv_acc = warpgroup_mma_wait(2, [dk_acc, dv_acc])
                tell_scores(shared, tile, SCORE_STAGES)
                ds, dk_acc, dv_acc = gradients_of_tile(
                    shared, s, dp, dk_acc, dv_acc, tile + 1, scale2, AT, D, STAGES, scores, operand
                )
                leave_scores(shared, ds, tile + 1, AT, SCORE_STAGES)
                dk_acc, dv_acc = warpgroup_mma_wait(0, [dk_acc, dv_acc])
                tell_scores(shared, tile + 1, SCORE_STAGES)
            # All threads have used their keys when they meet in `tell_scores`.
            mbarrier.arrive(keys_free.index(key_stage), count=1)
            b64, h64, r64 = b.to(gl.int64), h.to(gl.int64), r.to(gl.int64)
            row = (j * BLOCK_J + AT + kj).to(gl.int64)
            dk_base = dk + b64 * dk_b + r64 * dk_r + h64 * dk_h
            dv_base = dv + b64 * dv_b + r64 * dv_r + h64 * dv_h
            fits = (row < NK) & (kd < head_dim)
            gl.store(dk_base + row * dk_n + kd, (dk_acc * scale).to(dtype), mask=fits)
            gl.store(dv_base + row * dv_n + kd, dv_acc.to(dtype), mask=fits)


@gluon.jit
def queries_partition(
    shared, work, D: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr, SCORE_STAGES: gl.constexpr
):
    """dq: the d(scores) of 64 queries and a block of keys times these keys, added up block by block.

    What both other groups are done with is also told from here, which spares each of them a barrier."""
    _q_s, _g_s, k_s, _v_s, _bias_s, _lse_s, _delta_s, ds_s, dq_s, keys_ready, keys_free, _ready, free, made, used = (
        shared
    )
    dq, dq_b, dq_r, dq_h, dq_n, R, H, NQ, NK, head_dim, scale, items = work
    dtype: gl.constexpr = k_s.dtype
    queries: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, D, 16])
    zero = gl.zeros([BLOCK_I, D], gl.float32, queries)
    qi = gl.arange(0, BLOCK_I, gl.SliceLayout(1, queries))[:, None]
    qd = gl.arange(0, D, gl.SliceLayout(0, queries))[None, :]
    tiles = tiles_of(NQ)
    blocks = gl.cdiv(NK, BLOCK_J)
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, r, h = row_of(item, R, H)
        turn = item // gl.num_programs(0) * blocks
        base = dq + b.to(gl.int64) * dq_b + r.to(gl.int64) * dq_r + h.to(gl.int64) * dq_h
        for j in range(0, blocks):
            at = turn + j
            key_stage = at % KEY_STAGES
            k_tile = k_s.index(key_stage).reshape([BLOCK_J, D])
            mbarrier.wait(keys_ready.index(key_stage), (at // KEY_STAGES) & 1)
            for i in range(0, tiles):
                tile = at * tiles + i
                score_stage = tile % SCORE_STAGES
                mbarrier.wait(made.index(score_stage), (tile // SCORE_STAGES) & 1)
                mbarrier.arrive(free.index(tile % STAGES), count=1)
                ds_tile = ds_s.index(score_stage).permute((1, 0))
                product = warpgroup_mma(ds_tile, k_tile, zero, use_acc=False, is_async=True)
                acc = warpgroup_mma_wait(0, [product])
                thread_barrier()
                mbarrier.arrive(used.index(score_stage), count=1)
                if j > 0:
                    acc += dq_s.index(i).load(queries)
                if j < blocks - 1:
                    dq_s.index(i).store(acc)
                else:
                    row = i * BLOCK_I + qi
                    fits = (row < NQ) & (qd < head_dim)
                    gl.store(base + row.to(gl.int64) * dq_n + qd, (acc * scale).to(dtype), mask=fits)
            mbarrier.arrive(keys_free.index(key_stage), count=1)


@gluon.jit
def rows_kernel_sm90(
    q, k, v, grad_out, bias, lse2, delta, dq, dk, dv,
    dq_b, dq_r, dq_h, dq_n, dk_b, dk_r, dk_h, dk_n, dv_b, dv_r, dv_h, dv_n,
    R, H, NQ, NK, BIAS_ROWS, head_dim, scale, items,
    D: gl.constexpr, QUERIES: gl.constexpr, STAGES: gl.constexpr, KEY_STAGES: gl.constexpr,
    SCORE_STAGES: gl.constexpr, REGISTERS: gl.constexpr, QUERY_REGISTERS: gl.constexpr,
    OVERLAP: gl.constexpr,
):  # fmt: skip
    """Descriptors: q, k, v, d(out) [B, R, H, N, D]; the padded bias [B * H * BIAS_ROWS, columns]; lse2 and delta
    [B * R * H, NQ]. QUERIES: what shared memory has room for, at least NQ. REGISTERS: of a thread that makes dk and
    dv; QUERY_REGISTERS: of one that makes dq."""
    if OVERLAP:
        launch_dependents()
    dtype: gl.constexpr = q.dtype
    scores_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_J, BLOCK_I], dtype)
    # What a thread of `queries_partition` holds of a row lies in 32 bytes: no two of them meet in a bank.
    sums_layout: gl.constexpr = gl.SwizzledSharedLayout(8, 1, D // 8, [1, 0])
    q_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BLOCK_I, D], q.layout)
    g_s = gl.allocate_shared_memory(dtype, [STAGES, 1, 1, 1, BLOCK_I, D], q.layout)
    k_s = gl.allocate_shared_memory(dtype, [KEY_STAGES, 1, 1, 1, BLOCK_J, D], k.layout)
    v_s = gl.allocate_shared_memory(dtype, [KEY_STAGES, 1, 1, 1, BLOCK_J, D], k.layout)
    bias_s = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_I, BLOCK_J], bias.layout)
    lse_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_I], lse2.layout)
    delta_s = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_I], lse2.layout)
    ds_s = gl.allocate_shared_memory(dtype, [SCORE_STAGES, BLOCK_J, BLOCK_I], scores_layout)
    dq_s = gl.allocate_shared_memory(gl.float32, [QUERIES // BLOCK_I, BLOCK_I, D], sums_layout)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    keys_ready = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    keys_free = gl.allocate_shared_memory(gl.int64, [KEY_STAGES, 1], mbarrier.MBarrierLayout())
    made = gl.allocate_shared_memory(gl.int64, [SCORE_STAGES, 1], mbarrier.MBarrierLayout())
    used = gl.allocate_shared_memory(gl.int64, [SCORE_STAGES, 1], mbarrier.MBarrierLayout())
    for s in gl.static_range(STAGES):
        mbarrier.init(ready.index(s), count=1)
        mbarrier.init(free.index(s), count=1)
    for s in gl.static_range(KEY_STAGES):
        mbarrier.init(keys_ready.index(s), count=1)
        mbarrier.init(keys_free.index(s), count=3)
    for s in gl.static_range(SCORE_STAGES):
        mbarrier.init(made.index(s), count=2)
        mbarrier.init(used.index(s), count=1)
    shared = (q_s, g_s, k_s, v_s, bias_s, lse_s, delta_s, ds_s, dq_s, keys_ready, keys_free, ready, free, made, used)
    keys_work = (dk, dv, dk_b, dk_r, dk_h, dk_n, dv_b, dv_r, dv_h, dv_n, R, H, NQ, NK, head_dim, scale, items)
    queries_work = (dq, dq_b, dq_r, dq_h, dq_n, R, H, NQ, NK, head_dim, scale, items)
    loads = (q, k, v, grad_out, bias, lse2, delta, R, H, NQ, NK, BIAS_ROWS, items)
    gl.warp_specialize(
        [
            (keys_partition, (shared, keys_work, 0, D, STAGES, KEY_STAGES, SCORE_STAGES)),
            (keys_partition, (shared, keys_work, 1, D, STAGES, KEY_STAGES, SCORE_STAGES)),
            (queries_partition, (shared, queries_work, D, STAGES, KEY_STAGES, SCORE_STAGES)),
            (load_partition, (shared, loads, STAGES, KEY_STAGES)),
        ],
        [4, 4, 1],
        [REGISTERS, QUERY_REGISTERS, 24],
    )
    if OVERLAP:
        wait_for_the_kernel_before()
