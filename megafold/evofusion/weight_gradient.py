"""Gradients of a projection y = LN(x) W^T, or x W^T, by its weights, without atomics and in a fixed order.

Programs sum dy^T x_hat over their share of the rows; the shares are then added. From G = dy^T x_hat and s, the sum of
dy over the rows, follow dW = G gamma + s beta, d(gamma) = sum_o W G and d(beta) = sum_o W s: the gradients of the
LayerNorm's parameters cost nothing more (`weight_finish`). x_hat is what the gradient of x left, or made anew from x.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.launch import EPS, block, ceil_div, configuration, options
from megafold.evofusion.tiles import normalize
from megafold.evofusion.weight_finish import Part, gradients
from megafold.replay import launch_kernel

MOST_OPERANDS = 4
SUM_COLUMNS = 16
"""Columns behind those of G; the first holds s. Triton knows of strides whether 16 divides them."""


@triton.jit
def _over_rows(
    a, x, partial, a_b, a_i, a_s, a_apart, x_b, x_i, x_s, p_split, p_o, GROUPS, L, tiles, split, splits, first, o_start,
    c_start, OUTPUTS, C, eps,
    BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, EVEN_O: tl.constexpr, FLAT: tl.constexpr,
    NORM: tl.constexpr, SUMS: tl.constexpr, A_COLUMNS: tl.constexpr, A_SIDE: tl.constexpr, X_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """BLOCK_O x BLOCK_C of G, to row `first` + o_start of `partial`, over every `splits`-th tile of rows."""
    o = tl.arange(0, BLOCK_O)
    c = c_start + tl.arange(0, BLOCK_C)
    at = tl.arange(0, BLOCK_L)
    known = (o_start + o) < OUTPUTS
    columns = (o_start + o).to(tl.int64)
    if A_SIDE:
        columns = columns // A_SIDE * a_apart + columns % A_SIDE
    blocks_l = tl.cdiv(L, BLOCK_L)
    # One column of ones: the sums over the rows are a product, too.
    ones = tl.zeros([BLOCK_L, 16], tl.float32) + (tl.arange(0, 16) == 0)[None, :]
    acc = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    sums = tl.zeros([BLOCK_O, 16], tl.float32)
    for k in range(0, tl.cdiv(tiles - split, splits)):
        # From the end: what the kernel before this one read last may still be in the cache.
        tile = tiles - 1 - split - k * splits
        if FLAT:
            start = tile * BLOCK_L
            a_first, x_first = tl.zeros([], tl.int64), tl.zeros([], tl.int64)
        else:
            start = (tile % blocks_l) * BLOCK_L
            i = (tile // blocks_l % GROUPS).to(tl.int64)
            b = (tile // (blocks_l * GROUPS)).to(tl.int64)
            a_first, x_first = b * a_b + i * a_i, b * x_b + i * x_i
        inside = (start + at) < L
        if A_COLUMNS:
            pointers = a + a_first + start + columns[:, None] * a_s + at[None, :]
            a_mask = inside[None, :] if EVEN_O else inside[None, :] & known[:, None]
            a_tile = tl.load(pointers, mask=a_mask, other=0.0)
        else:
            pointers = a + a_first + start.to(tl.int64) * a_s + at[:, None] * a_s + columns[None, :]
            a_mask = inside[:, None] if EVEN_O else inside[:, None] & known[None, :]
            a_tile = tl.trans(tl.load(pointers, mask=a_mask, other=0.0))
        if X_COLUMNS:
            pointers = x + x_first + start + c.to(tl.int64)[:, None] * x_s + at[None, :]
            x_tile = tl.trans(tl.load(pointers, mask=inside[None, :], other=0.0))
        else:
            pointers = x + x_first + start.to(tl.int64) * x_s + at[:, None] * x_s + c[None, :]
            x_tile = tl.load(pointers, mask=inside[:, None], other=0.0)
        if NORM:
            x_hat, _ = normalize(x_tile.to(tl.float32), eps, 1)
            x_tile = x_hat
        # Products in the narrower dtype of the two.
        if a_tile.dtype.primitive_bitwidth <= x_tile.dtype.primitive_bitwidth:
            x_tile = x_tile.to(a_tile.dtype)
        else:
            a_tile = a_tile.to(x_tile.dtype)
        acc = tl.dot(a_tile, x_tile, acc, input_precision=PRECISION)
        if SUMS:
            sums = tl.dot(a_tile, ones.to(a_tile.dtype), sums, input_precision=PRECISION)
    rows = partial + split.to(tl.int64) * p_split + (first + o_start + o) * p_o
    tl.store(rows[:, None] + c[None, :], acc, mask=known[:, None])
    if SUMS and c_start == 0:
        tl.store(rows + C, tl.sum(sums, 1), mask=known)


@triton.jit
def weight_gradient_kernel(
    a0, a1, a2, a3, x, partial, a_b, a_i, a_s, a_apart, x_b, x_i, x_s, p_split, p_o,
    GROUPS, L, tiles, splits, blocks_each, blocks_c, OUTPUTS, C, eps,
    COUNT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, EVEN_O: tl.constexpr,
    FLAT: tl.constexpr, NORM: tl.constexpr, SUMS: tl.constexpr, A_COLUMNS: tl.constexpr, A_SIDE: tl.constexpr,
    X_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_O x BLOCK_C of G of one of COUNT operands a, over every `splits`-th tile of rows.

    a_s, x_s: distance of rows where rows are contiguous; of columns with A_COLUMNS, X_COLUMNS. FLAT: one group. A_SIDE:
    so many columns of a row of a lie side by side, a_apart from the next ones; 0: all.
    """
    pid = tl.program_id(0)
    block_o = pid % (COUNT * blocks_each)
    c_start = (pid // (COUNT * blocks_each) % blocks_c) * BLOCK_C
    split = pid // (COUNT * blocks_each * blocks_c)
    operand = block_o // blocks_each
    o_start = (block_o % blocks_each) * BLOCK_O
    a = _operand(a0, a1, a2, a3, operand, COUNT)
    _over_rows(
        a, x, partial, a_b, a_i, a_s, a_apart, x_b, x_i, x_s, p_split, p_o, GROUPS, L, tiles, split, splits,
        operand * OUTPUTS, o_start, c_start, OUTPUTS, C, eps, BLOCK_L, BLOCK_O, BLOCK_C, EVEN_O, FLAT, NORM, SUMS,
        A_COLUMNS, A_SIDE, X_COLUMNS, PRECISION,
    )  # fmt: skip


@triton.jit
def two_weight_gradients_kernel(
    a0, a1, a2, a3, x, partial, a_b, a_i, a_s, x_b, x_i, x_s, p_split, p_o, GROUPS, L, tiles, blocks_each, OUTPUTS,
    other_a, other_x, other_partial, other_a_b, other_a_i, other_a_s, other_x_b, other_x_i, other_x_s, other_p_split,
    other_p_o, OTHER_GROUPS, OTHER_L, other_tiles, other_blocks, OTHER_OUTPUTS, splits, C, eps,
    COUNT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, OTHER_BLOCK_O: tl.constexpr,
    BLOCK_C: tl.constexpr, EVEN_O: tl.constexpr, OTHER_EVEN_O: tl.constexpr, FLAT: tl.constexpr,
    OTHER_FLAT: tl.constexpr, SUMS: tl.constexpr, OTHER_SUMS: tl.constexpr, OTHER_A_COLUMNS: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """`weight_gradient_kernel` for two sums at once, each of its own rows and of BLOCK_C = C columns.

    Programs of both go through the rows together, so that one reads from the cache what another has read.
    """
    pid = tl.program_id(0)
    blocks = COUNT * blocks_each + other_blocks
    block_o = pid % blocks
    split = pid // blocks
    if block_o < COUNT * blocks_each:
        operand = block_o // blocks_each
        a = _operand(a0, a1, a2, a3, operand, COUNT)
        _over_rows(
            a, x, partial, a_b, a_i, a_s, 0, x_b, x_i, x_s, p_split, p_o, GROUPS, L, tiles, split, splits,
            operand * OUTPUTS, (block_o % blocks_each) * BLOCK_O, 0, OUTPUTS, C, eps, BLOCK_L, BLOCK_O, BLOCK_C, EVEN_O,
            FLAT, False, SUMS, False, 0, False, PRECISION,
        )  # fmt: skip
    else:
        _over_rows(
            other_a, other_x, other_partial, other_a_b, other_a_i, other_a_s, 0, other_x_b, other_x_i, other_x_s,
            other_p_split, other_p_o, OTHER_GROUPS, OTHER_L, other_tiles, split, splits, 0,
            (block_o - COUNT * blocks_each) * OTHER_BLOCK_O, 0, OTHER_OUTPUTS, C, eps, BLOCK_L, OTHER_BLOCK_O, BLOCK_C,
            OTHER_EVEN_O, OTHER_FLAT, False, OTHER_SUMS, OTHER_A_COLUMNS, 0, False, PRECISION,
        )  # fmt: skip


@triton.jit
def _operand(a0, a1, a2, a3, operand, COUNT: tl.constexpr):
    a = a0
    if COUNT > 1:
        a = tl.where(operand == 1, a1, a)
    if COUNT > 2:
        a = tl.where(operand == 2, a2, a)
    if COUNT > 3:
        a = tl.where(operand == 3, a3, a)
    return a


@dataclass(frozen=True)
class Operand:
    """A matrix over the rows of B x I groups of L rows, as the kernel addresses it.

    Attributes:
        tensor: its storage. b, i: distances of structures and groups. step: distance of rows, or with `columns`, where
            the rows of a group are contiguous for each column, of columns. side, apart: so many columns lie side by
            side, at this distance from the next ones; 0: all do.
    """

    tensor: Tensor
    b: int
    i: int
    step: int
    columns: bool = False
    side: int = 0
    apart: int = 0


def by_rows(x: Tensor) -> Operand:
    """A contiguous [B, I, L, C], or [L, C] as one group."""
    batch_stride, group_stride = x.stride()[:2] if x.dim() == 4 else (0, 0)
    return Operand(x, batch_stride, group_stride, x.stride(-2))


@dataclass
class Rows:
    """How the rows of one call are grouped, and partial sums over them of gradients of `outputs` x `inputs` weights.

    More calls of `add` with other columns, or with other rows (then `shares` > 1), fill the same partial sums. For
    `add_together`, `beside` are the outputs of the other sums, and those have as many `splits` as these.
    """

    batch: int
    groups: int
    length: int
    outputs: int
    inputs: int
    device: torch.device
    dtype: torch.dtype
    shares: int = 1
    beside: int = 0
    splits: int = 0

    def __post_init__(self) -> None:
        self.config = configuration("weight_gradient", self.dtype, self.device)
        self.block_l = self.config["block_l"]
        tiles = self.tiles(self.length)
        programs = self.config.get("programs", 2) * triton_support.multiprocessors(self.device)
        if self.outputs < self.config["block_o"]:
            # As few programs add the shares later: not more of them than keep the memory busy.
            programs = min(programs, triton_support.multiprocessors(self.device))
        blocks = self._blocks(self.outputs + self.beside, self.config["block_o"])
        self.splits = self.splits or max(1, min(programs // blocks, tiles))
        self.partial = torch.empty(
            (self.shares, self.splits, self.outputs, self.inputs + SUM_COLUMNS), device=self.device, dtype=torch.float32
        )

    def tiles(self, length: int) -> int:
        """Tiles of all groups of that many rows."""
        return self.batch * self.groups * ceil_div(length, self.block_l)

    def _blocks(self, columns: int, block_o: int) -> int:
        return ceil_div(columns, block_o) * ceil_div(self.inputs, 128)

    def add(
        self,
        a: Operand | Sequence[Operand],
        x: Operand,
        columns: int,
        first: int = 0,
        *,
        norm: bool = False,
        sums: bool = True,
        share: int = 0,
        length: int = 0,
    ) -> None:
        """Sum a^T x over all rows (of `length`, if given, instead of all) into rows `first`.. of the gradient.

        Args:
            a: one operand, or up to four with the same distances, which x is read for together. columns: of each.
            norm: normalise the rows of x. sums: also sum the rows of a; without, there is no s.
        """
        operands = [a] if isinstance(a, Operand) else list(a)
        one, count = operands[0], len(operands)
        block_c, length = self.inputs if norm else block({"c": 128}, "c", self.inputs), length or self.length
        block_o = max(16, min(self.config["block_o"], 1 << (columns - 1).bit_length()))
        blocks_o, blocks_c = ceil_div(columns, block_o), self.inputs // block_c
        partial, groups = self.partial[share, :, first:], self.batch * self.groups
        launch_kernel(
            weight_gradient_kernel, (count * blocks_o * blocks_c * self.splits,),
            *(operand.tensor for operand in operands), *[one.tensor] * (MOST_OPERANDS - count), x.tensor, partial,
            one.b, one.i, one.step, one.apart, x.b, x.i, x.step, *partial.stride()[:2], self.groups, length,
            self.tiles(length), self.splits, blocks_o, blocks_c, columns, self.inputs, EPS, COUNT=count,
            BLOCK_L=self.block_l, BLOCK_O=block_o, BLOCK_C=block_c, EVEN_O=columns % block_o == 0, FLAT=groups == 1,
            NORM=norm, SUMS=sums, A_COLUMNS=one.columns, A_SIDE=one.side, X_COLUMNS=x.columns,
            PRECISION=triton_support.float32_precision(), **options(self.config),
        )  # fmt: skip

    def part(self, weight: Tensor, first: int = 0, *, normed: bool = True, turned: bool = False) -> Part:
        """What was summed for a weight, from row `first` of the gradient on."""
        last = first + weight.shape[1 if turned else 0]
        shares = self.partial.flatten(0, 1)[:, first:last]
        return Part(weight, shares[..., : self.inputs], shares[..., self.inputs], normed, turned)


def runs_together(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether a configuration asks for two sums in one launch."""
    return bool(configuration("weight_gradient", dtype, device).get("joint"))


@dataclass(frozen=True)
class Term:
    """What `Rows.add` is given, for `add_together`."""

    rows: Rows
    a: Operand | Sequence[Operand]
    x: Operand
    columns: int
    sums: bool = True


def add_together(term: Term, other: Term, share: int = 0, length: int = 0) -> None:
    """Both sums in one launch; `other` has one operand. C is that of both, at most 128, and so are the splits."""
    operands = [term.a] if isinstance(term.a, Operand) else list(term.a)
    one, two, rows, count = operands[0], other.a, term.rows, len(operands)
    block_o = max(16, min(rows.config["block_o"], 1 << (term.columns - 1).bit_length()))
    # Not less for a few heads: with blocks of 16 rows the products want twice the registers.
    other_block_o = rows.config["block_o"]
    blocks_o, other_blocks_o = ceil_div(term.columns, block_o), ceil_div(other.columns, other_block_o)
    partial, other_partial = rows.partial[share], other.rows.partial[share]
    lengths = length or rows.length, length or other.rows.length
    launch_kernel(
        two_weight_gradients_kernel, ((count * blocks_o + other_blocks_o) * rows.splits,),
        *(operand.tensor for operand in operands), *[one.tensor] * (MOST_OPERANDS - count), term.x.tensor, partial,
        one.b, one.i, one.step, term.x.b, term.x.i, term.x.step, partial.stride(0), partial.stride(1), rows.groups,
        lengths[0], rows.tiles(lengths[0]), blocks_o, term.columns, two.tensor, other.x.tensor, other_partial, two.b,
        two.i, two.step, other.x.b, other.x.i, other.x.step, other_partial.stride(0), other_partial.stride(1),
        other.rows.groups, lengths[1], other.rows.tiles(lengths[1]), other_blocks_o, other.columns, rows.splits,
        rows.inputs, EPS, COUNT=count, BLOCK_L=rows.block_l, BLOCK_O=block_o, OTHER_BLOCK_O=other_block_o,
        BLOCK_C=rows.inputs, EVEN_O=term.columns % block_o == 0, OTHER_EVEN_O=other.columns % other_block_o == 0,
        FLAT=rows.batch * rows.groups == 1, OTHER_FLAT=other.rows.batch * other.rows.groups == 1, SUMS=term.sums,
        OTHER_SUMS=other.sums, OTHER_A_COLUMNS=two.columns, PRECISION=triton_support.float32_precision(),
        **options(rows.config),
    )  # fmt: skip


def product_over_rows(a: Tensor, x: Tensor) -> Tensor:
    """a^T x [O, C] of rows [M, O] and [M, C] in one dtype, by the vendor's product; in fp32 where it can."""
    if a.is_cuda and not torch.version.hip and a.dtype != torch.float32:
        return torch.mm(a.mT, x, out_dtype=torch.float32)
    return a.mT @ x


def through_norm(
    products: Tensor, sums: Tensor, weights: Sequence[Tensor], gamma: Tensor, beta: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of weights, one below the other in `products`, and of the LayerNorm's parameters.

    Args:
        products, sums: [O, C] and [O, 1], fp32. weights: as the parameters are.

    Returns:
        A gradient for each weight, d(gamma) and, unless beta is None, d(beta), in the dtypes of the parameters.
    """
    sizes = [weight.shape[0] for weight in weights]
    halves = zip(weights, products.split(sizes), sums.split(sizes))
    found = gradients([Part(w, g[None], s[None, :, 0]) for w, g, s in halves], gamma, beta)
    return (*found.weights, *found.norms)
