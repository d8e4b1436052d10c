"""Forward for sm_90: out and the log-sum-exp of 128 queries of ROWS rows."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from megafold.evoflash3d.hopper.common import LN2, LOG2E, item_of, widen
from megafold.gluon_barriers import release, thread_barrier


@gluon.jit
def load_partition(
    shared, loads, ROWS: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr
):
    q_s, k_s, v_s, bias_s, q_ready, q_free, ready, free = shared
    q, k, v, bias, R, H, NQ, NK, BIAS_ROWS, items = loads
    q_bytes: gl.constexpr = ROWS * q.block_type.nbytes
    tile_bytes: gl.constexpr = 2 * ROWS * k.block_type.nbytes + bias.block_type.nbytes
    tile = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, r, h, i_start = item_of(item, R, H, NQ, ROWS, BLOCK_I)
        mbarrier.wait(q_free, (count & 1) ^ 1)
        mbarrier.expect(q_ready, q_bytes)
        for row in gl.static_range(ROWS):
            tma.async_copy_global_to_shared(q, [b, r + row, h, i_start, 0], q_ready, q_s.index(row))
        bias_row = (b * H + h) * BIAS_ROWS + i_start
        for j_start in range(0, NK, BLOCK_J):
            stage = tile % STAGES
            bar = ready.index(stage)
            mbarrier.wait(free.index(stage), ((tile // STAGES) & 1) ^ 1)
            mbarrier.expect(bar, tile_bytes)
            for row in gl.static_range(ROWS):
                tma.async_copy_global_to_shared(k, [b, r + row, h, j_start, 0], bar, k_s.index(stage * ROWS + row))
            tma.async_copy_global_to_shared(bias, [bias_row, j_start], bar, bias_s.index(stage))
            for row in gl.static_range(ROWS):
                tma.async_copy_global_to_shared(v, [b, r + row, h, j_start, 0], bar, v_s.index(stage * ROWS + row))
            tile += 1
        count += 1  # noqa: SIM113 - no enumerate here


@gluon.jit
def finish(
    out, lse, acc, maximum, total, o_n, start, NQ, head_dim,
    D: gl.constexpr, PART: gl.constexpr, NATURAL: gl.constexpr, queries: gl.constexpr,
):  # fmt: skip
    """Store out and the log-sum-exp; `out` and `lse` point to the row."""
    total = gl.where(total == 0.0, 1.0, total)
    qi = gl.arange(0, PART, gl.SliceLayout(1, queries))
    qd = gl.arange(0, D, gl.SliceLayout(0, queries))[None, :]
    i = start + qi
    inverse = gl.convert_layout(1.0 / total, gl.SliceLayout(1, queries))
    if NATURAL:
        value = maximum + gl.log2(total) * LN2
    else:
        # Without a key the maximum is -inf; +inf gives the backward exp(-inf) = 0 instead of NaN.
        value = gl.where(maximum == float("-inf"), float("inf"), maximum * LOG2E + gl.log2(total))
    value = gl.convert_layout(value, gl.SliceLayout(1, queries))
    at = i[:, None].to(gl.int64) * o_n + qd
    gl.store(out + at, (acc * inverse[:, None]).to(out.dtype.element_ty), mask=(i < NQ)[:, None] & (qd < head_dim))
    gl.store(lse + i, value, mask=i < NQ)


@gluon.jit
def shares(p, PART: gl.constexpr, STEP: gl.constexpr):
    """[PART, 4]: of each row the sum of what each of its four threads holds, so that no thread asks another."""
    return gl.sum(gl.sum(p.reshape([PART, STEP // 8, 4, 2]), 3), 1)


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, D: gl.constexpr, ROWS: gl.constexpr, BLOCK_I: gl.constexpr,
    BLOCK_J: gl.constexpr, STAGES: gl.constexpr, STEP: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr,
    NATURAL: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    q_s, k_s, v_s, bias_s, q_ready, q_free, ready, free = shared
    out, lse, o_b, o_r, o_h, o_n, R, H, NQ, NK, head_dim, pitch, scale, items = work
    dtype: gl.constexpr = q_s.dtype
    PART: gl.constexpr = BLOCK_I // PARTS
    ROW: gl.constexpr = GROUP // PARTS
    AT: gl.constexpr = (GROUP % PARTS) * PART
    scores: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, STEP, 16])
    queries: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [WARPS, 1], [16, D, 16])
    per_query: gl.constexpr = gl.SliceLayout(1, scores)
    per_line: gl.constexpr = gl.SliceLayout(1, queries)
    left: gl.constexpr = gl.DotOperandLayout(0, scores, 2)
    operand: gl.constexpr = gl.DotOperandLayout(0, queries, 2)
    zero = gl.zeros([PART, STEP], gl.float32, scores)
    tile = 0
    count = 0
    for item in range(gl.program_id(0), items, gl.num_programs(0)):
        b, r, h, i_start = item_of(item, R, H, NQ, ROWS, BLOCK_I)
        i_start += AT
        r += ROW
        mbarrier.wait(q_ready, count & 1)
        q_tile = q_s.index(ROW).reshape([BLOCK_I, D]).slice(AT, PART, 0).load(left)
        acc = gl.zeros([PART, D], gl.float32, queries)
        maximum = gl.full([PART], float("-inf"), gl.float32, per_query)
        total = shares(zero, PART, STEP) if SHARES else gl.zeros([PART], gl.float32, per_query)
        release(q_free)
        for _j_start in range(0, NK, BLOCK_J):
            stage = tile % STAGES
            k_tile = k_s.index(stage * ROWS + ROW).reshape([BLOCK_J, D])
            v_tile = v_s.index(stage * ROWS + ROW).reshape([BLOCK_J, D])
            bias_tile = bias_s.index(stage).slice(AT, PART, 0)
            mbarrier.wait(ready.index(stage), (tile // STAGES) & 1)
            for part in gl.static_range(BLOCK_J // STEP):
                k_part = k_tile.slice(part * STEP, STEP, 0)
                s_async = warpgroup_mma(q_tile, k_part.permute((1, 0)), zero, use_acc=False, is_async=True)
                bias_part = bias_tile.slice(part * STEP, STEP, 1).load(scores)
                acc, s = warpgroup_mma_wait(0, [acc, s_async])
                x = s * scale + widen(bias_part)
                new_maximum = gl.maximum(maximum, gl.max(x, 1))
                # While no key has been seen the maximum is -inf; 0 in its place gives exp(-inf) = 0 instead of NaN.
                safe = gl.where(new_maximum == float("-inf"), 0.0, new_maximum) * LOG2E
                p = gl.exp2(x * LOG2E - safe[:, None])
                alpha = gl.exp2(maximum * LOG2E - safe)
                if SHARES:
                    shrink = gl.convert_layout(alpha, gl.SliceLayout(1, total.type.layout), assert_trivial=True)
                    total = total * shrink[:, None] + shares(p, PART, STEP)
                else:
                    total = total * alpha + gl.sum(p, 1)
                maximum = new_maximum
                acc = acc * gl.convert_layout(alpha, per_line)[:, None]
                p = gl.convert_layout(p.to(dtype), operand)
                v_part = v_tile.slice(part * STEP, STEP, 0)
                acc = warpgroup_mma(p, v_part, acc, is_async=True)
            acc = warpgroup_mma_wait(0, [acc])
            thread_barrier()
            mbarrier.arrive(free.index(stage), count=1)
            tile += 1
        if SHARES:
            total = gl.convert_layout(gl.sum(total, 1), per_query)
        if r < R:
            b64, r64, h64 = b.to(gl.int64), r.to(gl.int64), h.to(gl.int64)
            out_row = out + b64 * o_b + r64 * o_r + h64 * o_h
            lse_row = lse + ((b64 * R + r) * H + h) * pitch
            finish(out_row, lse_row, acc, maximum, total, o_n, i_start, NQ, head_dim, D, PART, NATURAL, queries)
        count += 1  # noqa: SIM113 - no enumerate here


@gluon.jit
def forward_kernel_sm90(
    q, k, v, bias, out, lse,
    o_b, o_r, o_h, o_n, R, H, NQ, NK, BIAS_ROWS, head_dim, pitch, scale, items,
    D: gl.constexpr, ROWS: gl.constexpr, BLOCK_I: gl.constexpr, BLOCK_J: gl.constexpr, STAGES: gl.constexpr,
    STEP: gl.constexpr, WARPS: gl.constexpr, PARTS: gl.constexpr, REGISTERS: gl.constexpr,
    NATURAL: gl.constexpr, SHARES: gl.constexpr,
):  # fmt: skip
    """Descriptors: q, k, v [B, R, H, N, D]; the padded bias [B * H * BIAS_ROWS, columns].

    NATURAL: lse in base e, -inf without a key; otherwise in base 2, +inf without a key. SHARES: each
    thread sums up the probabilities that it holds, and rows are added up at the end."""
    dtype: gl.constexpr = q.dtype
    q_s = gl.allocate_shared_memory(dtype, [ROWS, 1, 1, 1, BLOCK_I, D], q.layout)
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
    shared = (q_s, k_s, v_s, bias_s, q_ready, q_free, ready, free)
    work = (out, lse, o_b, o_r, o_h, o_n, R, H, NQ, NK, head_dim, pitch, scale, items)
    loads = (q, k, v, bias, R, H, NQ, NK, BIAS_ROWS, items)
    if ROWS * PARTS == 1:
        gl.warp_specialize(
            [
                (
                    product_partition,
                    (shared, work, 0, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, NATURAL, SHARES),
                ),
                (load_partition, (shared, loads, ROWS, BLOCK_I, BLOCK_J, STAGES)),
            ],
            [1],
            [24],
        )
    elif ROWS * PARTS == 2:
        gl.warp_specialize(
            [
                (
                    product_partition,
                    (shared, work, 0, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, NATURAL, SHARES),
                ),
                (
                    product_partition,
                    (shared, work, 1, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, NATURAL, SHARES),
                ),
                (load_partition, (shared, loads, ROWS, BLOCK_I, BLOCK_J, STAGES)),
            ],
            [WARPS, 1],
            [REGISTERS, 24],
        )
    else:
        gl.warp_specialize(
            [
                (
                    product_partition,
                    (shared, work, 0, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, NATURAL, SHARES),
                ),
                (
                    product_partition,
                    (shared, work, 1, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, NATURAL, SHARES),
                ),
                (
                    product_partition,
                    (shared, work, 2, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, NATURAL, SHARES),
                ),
                (
                    product_partition,
                    (shared, work, 3, D, ROWS, BLOCK_I, BLOCK_J, STAGES, STEP, WARPS, PARTS, NATURAL, SHARES),
                ),
                (load_partition, (shared, loads, ROWS, BLOCK_I, BLOCK_J, STAGES)),
            ],
            [WARPS, WARPS, WARPS, 1],
            [REGISTERS, REGISTERS, REGISTERS, 24],
        )
