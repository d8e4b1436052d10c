"""LayerNorm and several projections, as `norm_project.kernels.project_kernel` makes them."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from megafold.evofusion.hopper.common import (
    TILE,
    columns_of,
    init_barriers,
    normalize,
    spread,
    tiles_of,
    wide_layout,
)
from megafold.gluon_barriers import release


@gluon.jit
def load_partition(
    shared, loads, C: gl.constexpr, COUNT: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, HEADS: gl.constexpr
):
    w_s, h_s, x_s, w_ready, ready, free = shared
    x, w, w_heads, tiles = loads
    mbarrier.expect(w_ready, COUNT * C // STEP * w.block_type.nbytes + (w_heads.block_type.nbytes if HEADS else 0))
    for part in range(0, COUNT * C // STEP):
        tma.async_copy_global_to_shared(w, [part * (STEP // 32), 0, 0, 0, 0], w_ready, w_s.index(part))
    if HEADS:
        tma.async_copy_global_to_shared(w_heads, [0, 0], w_ready, h_s)
    for count in range(0, tiles_of(0, tiles, 1)):
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        stage = count % STAGES
        mbarrier.wait(free.index(stage), ((count // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [start, 0], ready.index(stage), x_s.index(stage))


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, C: gl.constexpr, COUNT: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    HEADS: gl.constexpr, HAS_BETA: gl.constexpr, BIASED: gl.constexpr,
):  # fmt: skip
    w_s, h_s, x_s, w_ready, ready, free = shared
    gamma, beta, bias, outs, heads, M, L, tiles, eps = work
    dtype: gl.constexpr = w_s.dtype
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 16, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    wide: gl.constexpr = wide_layout(STEP)
    zero = gl.zeros([TILE, STEP], gl.float32, product)
    c = gl.arange(0, C, gl.SliceLayout(0, left))
    l = gl.arange(0, TILE, gl.SliceLayout(1, wide))  # noqa: E741
    o = gl.arange(0, STEP, gl.SliceLayout(0, wide))
    mbarrier.wait(w_ready, 0)
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        count = 2 * turn + GROUP
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        stage = count % STAGES
        mbarrier.wait(ready.index(stage), (count // STAGES) & 1)
        tile = x_s.index(stage).load(left)
        release(free.index(stage))
        x_hat, _ = normalize(tile.to(gl.float32), eps, C)
        x_hat = x_hat * gl.load(gamma + c).to(gl.float32)[None, :]
        if HAS_BETA:
            x_hat += gl.load(beta + c).to(gl.float32)[None, :]
        normed = x_hat.to(dtype)
        inside = (start + l < M)[:, None]
        at = (start + l).to(gl.int64)[:, None] * C + o[None, :]
        for k in gl.static_range(COUNT):
            out = outs[k] + at
            for part in range(0, C // STEP):
                w_part = columns_of(w_s, k * (C // STEP) + part, STEP, C)
                y = warpgroup_mma(normed, w_part, zero, use_acc=False, is_async=True)
                y = spread(warpgroup_mma_wait(0, [y]), STEP)
                if k * C < BIASED:
                    y += gl.load(bias + k * C + part * STEP + o).to(gl.float32)[None, :]
                gl.store(out + part * STEP, y.to(dtype), mask=inside)
        if HEADS:
            few = gl.convert_layout(normed, gl.DotOperandLayout(0, narrow, 2))
            y = warpgroup_mma(few, h_s.permute((1, 0)), gl.zeros([TILE, 16], gl.float32, narrow), use_acc=False)
            h = gl.arange(0, 16, gl.SliceLayout(0, narrow))[None, :]
            i = gl.arange(0, TILE, gl.SliceLayout(1, narrow))[:, None]
            first = (start // L * HEADS).to(gl.int64) * L + start % L
            keep = (start + i < M) & (h < HEADS)
            gl.store(heads + first + h.to(gl.int64) * L + i, y.to(heads.dtype.element_ty), mask=keep)


@gluon.jit
def project_kernel_sm90(
    x, w, w_heads, gamma, beta, bias, out0, out1, out2, out3, heads, M, L, tiles, eps,
    C: gl.constexpr, COUNT: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, HEADS: gl.constexpr,
    HAS_BETA: gl.constexpr, BIASED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: x [M, C]; w [COUNT C, C], dealt; w_heads [HEADS <= 16, C].

    out0.. [M, C], heads [M / L, HEADS, L]; bias [BIASED], of the first columns of all outputs."""
    w_s = gl.allocate_shared_memory(w.dtype, [COUNT * C // STEP, STEP // 32, 4, 4, 2, C], w.layout)
    h_s = gl.allocate_shared_memory(w_heads.dtype, [16, C], w_heads.layout)
    x_s = gl.allocate_shared_memory(x.dtype, [STAGES, TILE, C], x.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, STAGES)
    init_barriers(free, STAGES)
    shared = (w_s, h_s, x_s, w_ready, ready, free)
    work = (gamma, beta, bias, (out0, out1, out2, out3), heads, M, L, tiles, eps)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, 0, C, COUNT, STEP, STAGES, HEADS, HAS_BETA, BIASED)),
            (product_partition, (shared, work, 1, C, COUNT, STEP, STAGES, HEADS, HAS_BETA, BIASED)),
            (load_partition, (shared, (x, w, w_heads, tiles), C, COUNT, STEP, STAGES, HEADS)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
