"""From the gradients of a triangle multiplication's operands to that of x, in one pass over pairs that are not padded.

In place of `gate_gradient_kernel` and `input_gradient_kernel` of `triangle_multiplication.kernels`: values and gates
are made again, their gradients are multiplied with the weights as they come, and are written for the weights' gradients
where the operands' gradients were read. One copy of the weights serves both ways. Their columns are dealt out, since
rows of x are dealt as they are read and rows of the result as they are written.

Each group has stages of its own, which it reads, overwrites and hands to the copy engine; what that has read is free.
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
    deal,
    hold_vectors,
    init_barriers,
    prefetch_rows,
    sigmoid,
    spread,
    tiles_of,
    wide_layout,
)
from megafold.gluon_barriers import thread_barrier


@gluon.jit
def load_partition(
    shared, loads, GROUP: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    RESIDUAL: gl.constexpr,
):  # fmt: skip
    """Keeps the stages of one group filled, and has what it reads by itself on the way to L2."""
    w_s, g_s, _, _, w_ready, ready, free = shared
    x_hat, grads, w, grad_out, tiles = loads
    OPERANDS: gl.constexpr = 2 * C // STEP
    PARTS: gl.constexpr = 3 * C // STEP
    if GROUP == 0:
        mbarrier.expect(w_ready, 5 * C // STEP * w.block_type.nbytes)
        for part in range(0, 5 * C // STEP):
            tma.async_copy_global_to_shared(w, [part * STEP, 0], w_ready, w_s.index(part))
    for at in range(0, tiles_of(GROUP, tiles, 2) * PARTS):
        turn, part = at // PARTS, at % PARTS
        start = (gl.program_id(0) + (2 * turn + GROUP) * gl.num_programs(0)) * TILE
        if part == 0:
            prefetch_rows(x_hat, start, tiles * TILE, C + 8, 1)
            if RESIDUAL:
                prefetch_rows(grad_out, start, tiles * TILE, C, 1)
        # Gradients of the operands, then that of the output's gate, behind those that are written.
        channel = part * STEP + gl.where(part < OPERANDS, 0, 2 * C)
        stage = GROUP * STAGES + at % STAGES
        mbarrier.wait(free.index(stage), ((at // STAGES) & 1) ^ 1)
        mbarrier.expect(ready.index(stage), grads.block_type.nbytes)
        tma.async_copy_global_to_shared(grads, [channel, start], ready.index(stage), g_s.index(stage))


@gluon.jit
def product_partition(
    shared, work, GROUP: gl.constexpr, C: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr,
    HAS_MASK: gl.constexpr, RESIDUAL: gl.constexpr,
):  # fmt: skip
    w_s, g_s, gate_s, shift_s, w_ready, ready, free = shared
    x_hat, grads, mask, rstd, grad_out, grad_x, tiles = work
    dtype: gl.constexpr = w_s.dtype
    OPERANDS: gl.constexpr = 2 * C // STEP
    PARTS: gl.constexpr = 3 * C // STEP
    product: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, C, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, STEP, 16])
    left: gl.constexpr = gl.DotOperandLayout(0, product, 2)
    wide: gl.constexpr = wide_layout(C)
    zero = gl.zeros([TILE, STEP], gl.float32, narrow)
    l = gl.arange(0, TILE, gl.SliceLayout(1, wide))  # noqa: E741
    c = gl.arange(0, C, gl.SliceLayout(0, wide))[None, :]
    across: gl.constexpr = gl.SliceLayout(0, narrow)
    stage_of_gates = gate_s.index(GROUP).permute((1, 0))
    mbarrier.wait(w_ready, 0)
    for turn in range(0, tiles_of(GROUP, tiles, 2)):
        start = (gl.program_id(0) + (2 * turn + GROUP) * gl.num_programs(0)) * TILE
        hat = gl.load(x_hat + (start + l).to(gl.int64)[:, None] * (C + 8) + c)
        inverse = gl.load(rstd + start + l)[:, None]
        hat = gl.convert_layout(deal(hat, C, product), left)
        if HAS_MASK:
            pairs = start + gl.arange(0, TILE, gl.SliceLayout(1, narrow))
            keep = (gl.load(mask + pairs) != 0)[:, None]
        grad = gl.zeros([TILE, C], gl.float32, product)
        for part in range(0, OPERANDS):
            gates = warpgroup_mma(hat, w_s.index(OPERANDS + part).permute((1, 0)), zero, use_acc=False, is_async=True)
            values = warpgroup_mma(hat, w_s.index(part).permute((1, 0)), zero, use_acc=False, is_async=True)
            at = turn * PARTS + part
            stage = GROUP * STAGES + at % STAGES
            mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
            planes = g_s.index(stage).permute((1, 0))
            of_value = gl.convert_layout(planes.load(left), narrow).to(gl.float32)
            if HAS_MASK:
                of_value = gl.where(keep, of_value, 0.0)
            gates = warpgroup_mma_wait(1, [gates])
            gates = sigmoid(gates + shift_s.index(OPERANDS + part).load(across)[None, :])
            of_value *= gates
            values = warpgroup_mma_wait(0, [values])
            values += shift_s.index(part).load(across)[None, :]
            of_gate = (of_value * values * (1.0 - gates)).to(dtype)
            of_value = of_value.to(dtype)
            grad = warpgroup_mma(gl.convert_layout(of_value, left), w_s.index(part), grad, is_async=True)
            grad = warpgroup_mma(gl.convert_layout(of_gate, left), w_s.index(OPERANDS + part), grad, is_async=True)
            # The copy engine has read what the part before left in the stages.
            tma.store_wait(0)
            thread_barrier()
            if part > 0:
                mbarrier.arrive(free.index(GROUP * STAGES + (at - 1) % STAGES), count=1)
            planes.store(of_value)
            stage_of_gates.store(of_gate)
            fence_async_shared()
            thread_barrier()
            tma.async_copy_shared_to_global(grads, [part * STEP, start], g_s.index(stage))
            tma.async_copy_shared_to_global(grads, [(OPERANDS + part) * STEP, start], gate_s.index(GROUP))
            grad = warpgroup_mma_wait(0, [grad])
        if RESIDUAL:  # on its way during the last products
            above = gl.load(grad_out + (start + l).to(gl.int64)[:, None] * C + c)
        for part in range(OPERANDS, PARTS):
            at = turn * PARTS + part
            stage = GROUP * STAGES + at % STAGES
            mbarrier.wait(ready.index(stage), (at // STAGES) & 1)
            of_gate = g_s.index(stage).permute((1, 0))
            grad = warpgroup_mma(of_gate, w_s.index(OPERANDS + part), grad, is_async=True)
            if part == OPERANDS:
                tma.store_wait(0)
                thread_barrier()
                mbarrier.arrive(free.index(GROUP * STAGES + (at - 1) % STAGES), count=1)
            grad = warpgroup_mma_wait(0, [grad])
            thread_barrier()
            mbarrier.arrive(free.index(stage), count=1)
        grad = spread(grad, C)
        hat = spread(gl.convert_layout(hat, product), C).to(gl.float32)
        mean = gl.sum(grad, 1) / C
        slope = gl.sum(grad * hat, 1) / C
        grad = inverse * (grad - mean[:, None] - hat * slope[:, None])
        places = (start + l).to(gl.int64)[:, None] * C + c
        if RESIDUAL:
            grad += above.to(gl.float32)
        gl.store(grad_x + places, grad.to(grad_x.dtype.element_ty))
    tma.store_wait(0)


@gluon.jit
def triangle_both_kernel_sm90(
    x_hat, grads, w, shift, mask, rstd, grad_out, grad_x, tiles,
    C: gl.constexpr, STEP: gl.constexpr, STAGES: gl.constexpr, HAS_MASK: gl.constexpr,
    RESIDUAL: gl.constexpr, REGISTERS: gl.constexpr,
):  # fmt: skip
    """Descriptors: grads [5 C, M], see `triangle_multiplication.kernels`; w [5 C, C] with dealt columns. x_hat
    [M, C + 8], shift [4 C], mask and rstd [M], grad_out and grad_x [M, C]; M is a whole number of tiles."""
    w_s = gl.allocate_shared_memory(w.dtype, [5 * C // STEP, STEP, C], w.layout)
    g_s = gl.allocate_shared_memory(grads.dtype, [2 * STAGES, STEP, TILE], grads.layout)
    gate_s = gl.allocate_shared_memory(grads.dtype, [2, STEP, TILE], grads.layout)
    shift_s = gl.allocate_shared_memory(gl.float32, [4 * C // STEP, STEP], VECTOR)
    w_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    free = gl.allocate_shared_memory(gl.int64, [2 * STAGES, 1], mbarrier.MBarrierLayout())
    mbarrier.init(w_ready, count=1)
    init_barriers(ready, 2 * STAGES)
    init_barriers(free, 2 * STAGES)
    hold_vectors(shift_s, shift, 4 * C // STEP, STEP)
    shared = (w_s, g_s, gate_s, shift_s, w_ready, ready, free)
    loads = (x_hat, grads, w, grad_out, tiles)
    work = (x_hat, grads, mask, rstd, grad_out, grad_x, tiles)
    gl.warp_specialize(
        [
            (product_partition, (shared, work, 0, C, STEP, STAGES, HAS_MASK, RESIDUAL)),
            (product_partition, (shared, work, 1, C, STEP, STAGES, HAS_MASK, RESIDUAL)),
            (load_partition, (shared, loads, 0, C, STEP, STAGES, RESIDUAL)),
            (load_partition, (shared, loads, 1, C, STEP, STAGES, RESIDUAL)),
        ],
        [4, 1, 1],
        [REGISTERS, 24, 24],
    )
