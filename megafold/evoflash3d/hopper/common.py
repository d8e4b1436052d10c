"""What the Hopper kernels share: the order of the work, the bias, and how kernels of the backward overlap.

Gluon is Triton's lower level: layouts, shared memory, the copy engine and asynchronous products are spelt out. In each
of these kernels some groups of warps multiply, out of step with each other, and one warp keeps the copy engine busy.
`ROWS` rows, which share the tiles of the bias, have `PARTS` groups of `WARPS` warps each; a warp holds 16 queries (or
keys) of its row. Operands that stay for a whole loop are held in registers, since a product that reads both from shared
memory is bound by it. `STEP` columns of scores go through a product at once: 32 where that saves registers.

With `OVERLAP` a kernel of the backward takes the multiprocessors that the one before it leaves idle in its last wave:
each lets its successor start at once, and waits for its predecessor only when its own work is done. None of them reads
what another of them writes; that a kernel has ended still means that all before it have, as later work expects.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

launch_dependents, wait_for_the_kernel_before = gdc_launch_dependents, gdc_wait
LOG2E = gl.constexpr(1.4426950408889634)
LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def item_of(item, R, H, NQ, ROWS: gl.constexpr, BLOCK: gl.constexpr):
    """(b, r, h, start) of an item; blocks of one row are neighbours."""
    blocks = gl.cdiv(NQ, BLOCK)
    rows = gl.cdiv(R, ROWS)
    start = (item % blocks) * BLOCK
    r = ((item // blocks) % rows) * ROWS
    h = (item // (blocks * rows)) % H
    b = item // (blocks * rows * H)
    return b, r, h, start


@gluon.jit
def widen(x):
    """fp32 of 16-bit numbers, exactly. For two bf16 in a register two operations, where the compiler takes three."""
    if x.dtype == gl.bfloat16:
        return gl.inline_asm_elementwise(
            "shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000;", "=r,=r,r", [x], dtype=gl.float32, is_pure=True, pack=2
        )
    else:
        return x.to(gl.float32)
