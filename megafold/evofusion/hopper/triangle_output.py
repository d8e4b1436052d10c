"""What the backward of a triangle multiplication begins with, in one pass over pairs that are not padded.

LayerNorm of x and of the product, and gradients of the output projection, of the output gate and of the product.
In place of `normalize_kernel`, `normalize_product_kernel`, `output_gradient_kernel` and `product_gradient_kernel` of
`triangle_multiplication.kernels`. What only the weights' gradients want is written in rows. Channels of the product are
dealt out as they are read, so columns of weights that are multiplied with them come in that order too.
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
    columns_of,
    deal,
    init_barriers,
    normalize,
    sigmoid,
    spread,
    tiles_of,
    wide_layout,
)
from megafold.gluon_barriers import release, thread_barrier


@gluon.jit
def load_partition(shared, loads, C: gl.constexpr, STEP: gl.constexpr, HELD: gl.constexpr):
    w_s, t_s, x_s, p_s, _, _, w_ready, ready, free = shared
    x, product, w, w_t, tiles = loads
    mbarrier.expect(w_ready, 2 * C // STEP * w.block_type.nbytes + C // STEP * w_t.block_type.nbytes)
    for part in range(0, 2 * C // STEP):
        tma.async_copy_global_to_shared(w, [part * (STEP // 32), 0, 0, 0, 0], w_ready, w_s.index(part))
    for part in range(0, C // STEP):
        tma.async_copy_global_to_shared(w_t, [0, 0, 0, 0, part * STEP], w_ready, t_s.index(part))
    for count in range(0, tiles_of(0, tiles, 1)):
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        group = count % 2
        held = count % HELD
        mbarrier.wait(free.index(held), ((count // HELD) & 1) ^ 1)
        mbarrier.expect(ready.index(group), x.block_type.nbytes)
        tma.async_copy_global_to_shared(x, [start, 0], ready.index(group), x_s.index(held))
        mbarrier.wait(free.index(2 + group), ((count // 2) & 1) ^ 1)
        mbarrier.expect(ready.index(2 + group), product.block_type.nbytes)
        tma.async_copy_global_to_shared(product, [0, 0, 0, 0, start], ready.index(2 + group), p_s.index(group))


@gluon.jit
def store_ones(out, start, C: gl.constexpr):
    """Behind C columns of rows: a column of ones and seven of zeros."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [32, 1], [4, 1], [1, 0])
    row = (start + gl.arange(0, TILE, gl.SliceLayout(1, layout))).to(gl.int64)[:, None]
    column = gl.arange(0, 8, gl.SliceLayout(0, layout))[None, :]
    gl.store(out + row * (C + 8) + C + column, ((column + row * 0) == 0).to(out.dtype.element_ty))


@gluon.jit
def store_planes(out, stage, channel, start, value, CHANNELS: gl.constexpr):
    """A tile [TILE, CHANNELS], dealt, to [channels, pairs] by the copy engine, from `channel` on."""
    stage.reshape([CHANNELS, TILE]).permute((1, 0)).store(value)
    fence_async_shared()
    thread_barrier()
    tma.async_copy_shared_to_global(out, [channel // 32, 0, 0, 0, start], stage)


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr, HELD: gl.constexpr,
    HAS_DROPPED: gl.constexpr,
):  # fmt: skip
    w_s, t_s, x_s, p_s, gate_s, grad_s, w_ready, ready, free = shared
    grad_out, dropped, gate_shift, out_shift, x_hats, rstds, p_hats, upstreams, outs, d_i, d_j, N, tiles, eps = work
    grad_gate, grad_product = outs
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
    n = gl.arange(0, STEP, gl.SliceLayout(0, some))
    mbarrier.wait(w_ready, 0)
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        count = 2 * turn + GROUP
        start = (gl.program_id(0) + count * gl.num_programs(0)) * TILE
        held = count % HELD
        rows = (start + l).to(gl.int64)[:, None]
        mbarrier.wait(ready.index(GROUP), turn & 1)
        x_tile = x_s.index(held).load(wide)
        release(free.index(held))
        x_hat, rstd = normalize(x_tile.to(gl.float32), eps, C)
        x_hat = x_hat.to(dtype)
        gl.store(x_hats + rows * (C + 8) + c, x_hat)
        gl.store(rstds + start + l, rstd)
        store_ones(x_hats, start, C)
        x_hat = gl.convert_layout(deal(x_hat, C, product), left)
        mbarrier.wait(ready.index(2 + GROUP), turn & 1)
        p_tile = p_s.index(GROUP).reshape([C, TILE]).permute((1, 0)).load(left)
        # What the copy engine wrote out of the stages for the tile before has been read.
        tma.store_wait(0)
        release(free.index(2 + GROUP))
        p_hat, inverse = normalize(p_tile.to(gl.float32), eps, C)
        p_hat = p_hat.to(dtype)
        gl.store(p_hats + rows * (C + 8) + c, spread(gl.convert_layout(p_hat, product), C))
        store_ones(p_hats, start, C)
        grad = gl.zeros([TILE, C], gl.float32, product)
        row = start + gl.arange(0, TILE, gl.SliceLayout(1, some))
        at = row.to(gl.int64)[:, None] * C + n[None, :]
        for part in range(0, PARTS):
            gate = warpgroup_mma(x_hat, columns_of(w_s, part, STEP, C), zero, use_acc=False, is_async=True)
            value = warpgroup_mma(p_hat, columns_of(w_s, PARTS + part, STEP, C), zero, use_acc=False, is_async=True)
            upstream = gl.load(grad_out + at + part * STEP).to(gl.float32)
            if HAS_DROPPED:
                factor = row // N * d_i + row % N * d_j + part * STEP
                upstream *= gl.load(dropped + factor[:, None] + n[None, :]).to(gl.float32)
            gate = warpgroup_mma_wait(1, [gate])
            gate = sigmoid(spread(gate, STEP) + gl.load(gate_shift + part * STEP + n)[None, :])
            upstream *= gate
            gl.store(upstreams + at + part * STEP, upstream.to(dtype))
            value = warpgroup_mma_wait(0, [value])
            value = spread(value, STEP) + gl.load(out_shift + part * STEP + n)[None, :]
            above = gl.convert_layout(deal(upstream.to(dtype), STEP, narrow), gl.DotOperandLayout(0, product, 2))
            grad = warpgroup_mma(above, columns_of(t_s, part, C, STEP), grad, is_async=True)
            of_gate = deal((upstream * (1.0 - gate) * value).to(dtype), STEP, narrow)
            store_planes(grad_gate, gate_s.index(GROUP * PARTS + part), part * STEP, start, of_gate, STEP)
            grad = warpgroup_mma_wait(0, [grad])
        hat = gl.convert_layout(p_hat, product).to(gl.float32)
        mean = (gl.sum(grad, 1) / C)[:, None]
        slope = (gl.sum(grad * hat, 1) / C)[:, None]
        inverse = gl.convert_layout(inverse, gl.SliceLayout(1, product))
        grad = inverse[:, None] * (grad - mean - hat * slope)
        store_planes(grad_product, grad_s.index(GROUP), 0, start, grad.to(dtype), C)
    tma.store_wait(0)


@gluon.jit
def triangle_output_kernel_sm90(
    x, product, w, w_t, grad_out, dropped, gate_shift, out_shift, x_hats, rstds, p_hats, upstreams, grad_gate,
    grad_product, d_i, d_j, N, tiles, eps, C: gl.constexpr, STEP: gl.constexpr, HELD: gl.constexpr,
    HAS_DROPPED: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: x [M, C]; dealt, product, grad_gate and grad_product [C, M], and with dealt columns too w [2 C, C]:
    of gate, output, and w_t [C, C]: the latter transposed.

    Rows: grad_out and upstreams [M, C], x_hats and p_hats [M, C + 8], with ones behind; rstds [M]."""
    w_s = gl.allocate_shared_memory(w.dtype, [2 * C // STEP, STEP // 32, 4, 4, 2, C], w.layout)
    t_s = gl.allocate_shared_memory(w.dtype, [C // STEP, C // 32, 4, 4, 2, STEP], w_t.layout)
    x_s = gl.allocate_shared_memory(x.dtype, [HELD, TILE, C], x.layout)
    p_s = gl.allocate_shared_memory(product.dtype, [2, C // 32, 4, 4, 2, TILE], product.layout)
    gate_s = gl.allocate_shared_memory(product.dtype, [2 * C // STEP, STEP // 32, 4, 4, 2, TILE], grad_gate.layout)
    grad_s = gl.allocate_shared_memory(product.dtype, [2, C // 32, 4, 4, 2, TILE], product.layout)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [4, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, 4)
    init_barriers(free, 4)
    shared = (w_s, t_s, x_s, p_s, gate_s, grad_s, w_ready, ready, free)
    outs = (grad_gate, grad_product)
    work = (grad_out, dropped, gate_shift, out_shift, x_hats, rstds, p_hats, upstreams, outs, d_i, d_j, N, tiles, eps)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, 0, C, STEP, HELD, HAS_DROPPED)),
            (product_partition, (shared, work, 1, C, STEP, HELD, HAS_DROPPED)),
            (load_partition, (shared, (x, product, w, w_t, tiles), C, STEP, HELD)),
        ],
        [4, 1],
        [REGISTERS, 24],
    )
