"""What the kernels share: how rows stream past weights that stay, and small pieces of arithmetic.

A program a multiprocessor reads all weights into shared memory once. One warp keeps the copy engine busy with tiles of
`TILE` rows, or one for each group; two groups of four warps take every other tile each, so
that one multiplies while the other finishes.
Where both groups use a buffer in turn, each has a barrier of its own that says it is filled: a barrier tells two states
apart, and one for both groups changes twice from one tile of a group to its next.

Columns of a product are dealt out to threads in pairs, and a thread would store 4 bytes at a time. The copy engine
therefore brings the rows of a weight that become such columns in another order (`launch._dealt`), in which a thread
gets eight neighbours of the true order: `spread` then only renames what the registers hold.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from megafold.gluon_barriers import thread_barrier

TILE = gl.constexpr(64)
VECTOR = gl.constexpr(gl.SwizzledSharedLayout(1, 1, 1, [0]))


@gluon.constexpr_function
def wide_layout(columns):
    """Of [TILE, columns] over four warps: what `spread` gives, eight neighbours of a row in consecutive registers."""
    far = [[0, 1 << bit] for bit in range(5, (columns - 1).bit_length())]
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [0, 4], [8, 0], *far],
        lane_bases=[[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]],
        warp_bases=[[16, 0], [32, 0]],
        block_bases=[],
        shape=[64, columns],
    )


@gluon.jit
def spread(x, COLUMNS: gl.constexpr):
    """[TILE, COLUMNS] in the true order of columns, of a product with a weight whose rows were dealt out."""
    x = x.reshape([TILE, COLUMNS // 32, 4, 4, 2])
    x = x.permute((0, 1, 3, 2, 4)).reshape([TILE, COLUMNS])
    return gl.convert_layout(x, wide_layout(COLUMNS))


@gluon.jit
def deal(x, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """[TILE, COLUMNS] in the layout of products, columns in the order that `spread` undoes."""
    x = x.reshape([TILE, COLUMNS // 32, 4, 4, 2])
    x = x.permute((0, 1, 3, 2, 4)).reshape([TILE, COLUMNS])
    return gl.convert_layout(x, layout)


@gluon.jit
def normalize(x, eps, C: gl.constexpr):
    """(x - mean) / sqrt(variance + eps) of rows, fp32, and 1 / sqrt(variance + eps)."""
    centred = x - (gl.sum(x, 1) / C)[:, None]
    rstd = 1.0 / gl.sqrt(gl.sum(centred * centred, 1) / C + eps)
    return centred * rstd[:, None], rstd


@gluon.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) in 4 instructions."""
    return gl.inline_asm_elementwise(
        "{ .reg .f32 e; ex2.approx.ftz.f32 e, $1; add.f32 e, e, 0f3F800000; rcp.approx.ftz.f32 $0, e; }",
        "=f,f",
        [x * -1.4426950408889634],
        dtype=gl.float32,
        is_pure=True,
        pack=1,
    )


@gluon.jit
def prefetch(pointers):
    """Bring the lines that pointers point into to L2, and wait for none."""
    gl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=gl.int32, is_pure=False, pack=1
    )


@gluon.jit
def prefetch_rows(source, start, M, PITCH: gl.constexpr, WARPS: gl.constexpr):
    """A tile of rows of M, to L2: lines of 128 bytes, whole sets of them, of which the last may be of the
    rows behind it, or the last element's more than once."""
    EACH: gl.constexpr = 1024 // source.dtype.element_ty.primitive_bitwidth
    AT_ONCE: gl.constexpr = 32 * WARPS
    line = gl.arange(0, AT_ONCE, gl.BlockedLayout([1], [32], [WARPS], [0])) * EACH
    # Not the product of all rows: that may have more than 31 bits.
    most = gl.minimum(M - start, 2 * TILE) * PITCH - 1
    for first in range(0, TILE * PITCH, AT_ONCE * EACH):
        at = line + first
        prefetch(source + start.to(gl.int64) * PITCH + gl.where(at < most, at, most))


@gluon.jit
def tiles_of(group, tiles, GROUPS: gl.constexpr):
    """How many tiles a group of a program has; its k-th is the program's (group + GROUPS k)-th."""
    mine = gl.cdiv(tiles - gl.program_id(0), gl.num_programs(0))
    return gl.cdiv(mine - group, GROUPS)


@gluon.jit
def init_barriers(barriers, COUNT: gl.constexpr):
    for s in gl.static_range(COUNT):
        mbarrier.init(barriers.index(s), count=1)


@gluon.jit
def hold_vectors(held, source, COUNT: gl.constexpr, LENGTH: gl.constexpr):
    """COUNT vectors, one behind the other, to shared memory in fp32, before the groups part: what a loop reads again
    and again does not stay in the little that is left of the first cache."""
    n = gl.arange(0, LENGTH, gl.BlockedLayout([1], [32], [4], [0]))
    for v in gl.static_range(COUNT):
        held.index(v).store(gl.load(source + v * LENGTH + n).to(gl.float32))
    thread_barrier()


@gluon.jit
def columns_of(w_s, block, COLUMNS: gl.constexpr, C: gl.constexpr):
    """[C, COLUMNS]: a block of COLUMNS rows of weights [rows, C] that were dealt out, transposed.

    A loop over blocks is to stay one: unrolled, their addresses are all made ahead, and take the registers."""
    return w_s.index(block).reshape([COLUMNS, C]).permute((1, 0))
