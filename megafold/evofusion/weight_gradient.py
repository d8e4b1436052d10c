"""Gradients of a projection y = LN(x) W^T, or x W^T, by its weights, without atomics and in a fixed order.

Programs sum dy^T x_hat over their share of the rows; the shares are then added. From G = dy^T x_hat and s, the sum of
dy over the rows, follow dW = G gamma + s beta, d(gamma) = sum_o W G and d(beta) = sum_o W s: the gradients of the
LayerNorm's parameters cost nothing more, and x_hat is made anew from x.
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

NORM_BLOCK = {"BLOCK_O": 64, "BLOCK_C": 16}
SUM_COLUMNS = 8
"""Columns behind those of G; the first holds s. Eight keep the rows aligned."""


@triton.jit
def weight_gradient_kernel(
    a, x, partial, a_b, a_i, a_s, x_b, x_i, x_s, p_split, p_o,
    GROUPS, L, tiles, tiles_a_program, blocks_o, blocks_c, OUTPUTS, C, eps,
    BLOCK_L: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, EVEN_O: tl.constexpr,
    NORM: tl.constexpr, A_COLUMNS: tl.constexpr, X_COLUMNS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_O x BLOCK_C of G over `tiles_a_program` tiles of rows.

    a_s, x_s: distance of rows where rows are contiguous; of columns with A_COLUMNS, X_COLUMNS.
    """
    pid = tl.program_id(0)
    o_start = (pid % blocks_o) * BLOCK_O
    c_start = (pid // blocks_o % blocks_c) * BLOCK_C
    split = pid // (blocks_o * blocks_c)
    o = tl.arange(0, BLOCK_O)
    c = c_start + tl.arange(0, BLOCK_C)
    known = (o_start + o) < OUTPUTS
    columns = (o_start + o).to(tl.int64)
    blocks_l = tl.cdiv(L, BLOCK_L)
    acc = tl.zeros([BLOCK_O, BLOCK_C], tl.float32)
    sums = tl.zeros([BLOCK_O], tl.float32)
    first = split * tiles_a_program
    for tile in range(first, tl.minimum(first + tiles_a_program, tiles)):
        start = (tile % blocks_l) * BLOCK_L
        i = (tile // blocks_l % GROUPS).to(tl.int64)
        b = (tile // (blocks_l * GROUPS)).to(tl.int64)
        at = tl.arange(0, BLOCK_L)
        inside = (start + at) < L
        if A_COLUMNS:
            pointers = a + b * a_b + i * a_i + start + columns[:, None] * a_s + at[None, :]
            a_mask = inside[None, :] if EVEN_O else inside[None, :] & known[:, None]
            a_tile = tl.load(pointers, mask=a_mask, other=0.0)
        else:
            pointers = a + b * a_b + i * a_i + start.to(tl.int64) * a_s + at[:, None] * a_s + columns[None, :]
            a_mask = inside[:, None] if EVEN_O else inside[:, None] & known[None, :]
            a_tile = tl.trans(tl.load(pointers, mask=a_mask, other=0.0))
        if X_COLUMNS:
            pointers = x + b * x_b + i * x_i + start + c.to(tl.int64)[:, None] * x_s + at[None, :]
            x_tile = tl.trans(tl.load(pointers, mask=inside[None, :], other=0.0))
        else:
            pointers = x + b * x_b + i * x_i + start.to(tl.int64) * x_s + at[:, None] * x_s + c[None, :]
            x_tile = tl.load(pointers, mask=inside[:, None], other=0.0)
        if NORM:
            x_hat, _ = normalize(x_tile.to(tl.float32), eps, 1)
            x_tile = x_hat
        acc = tl.dot(a_tile, x_tile.to(a_tile.dtype), acc, input_precision=PRECISION)
        sums += tl.sum(a_tile.to(tl.float32), 1)
    rows = partial + split.to(tl.int64) * p_split + (o_start + o)[:, None] * p_o
    tl.store(rows + c[None, :], acc, mask=known[:, None])
    if c_start == 0:
        tl.store(partial + split.to(tl.int64) * p_split + (o_start + o) * p_o + C, sums, mask=known)


@dataclass(frozen=True)
class Operand:
    """A matrix over the rows of B x I groups of L rows, as the kernel addresses it.

    Attributes:
        tensor: its storage. b, i: distances of structures and groups. step: distance of rows, or with `columns`, where
            the rows of a group are contiguous for each column, of columns.
    """

    tensor: Tensor
    b: int
    i: int
    step: int
    columns: bool = False


def by_rows(x: Tensor) -> Operand:
    """A contiguous [B, I, L, C], or [L, C] as one group."""
    batch_stride, group_stride = x.stride()[:2] if x.dim() == 4 else (0, 0)
    return Operand(x, batch_stride, group_stride, x.stride(-2))


@dataclass
class Rows:
    """How the rows of one call are grouped, and partial sums over them of gradients of `outputs` x `inputs` weights.

    More calls of `add` with other columns, or with other rows (then `shares` > 1), fill the same partial sums.
    """

    batch: int
    groups: int
    length: int
    outputs: int
    inputs: int
    device: torch.device
    dtype: torch.dtype
    shares: int = 1

    def __post_init__(self) -> None:
        self.config = configuration("weight_gradient", self.dtype, self.device)
        self.block_l = self.config["block_l"]
        self.tiles = self.batch * self.groups * ceil_div(self.length, self.block_l)
        wanted = ceil_div(2 * triton_support.multiprocessors(self.device), self._blocks(self.outputs))
        self.tiles_a_program = ceil_div(self.tiles, min(wanted, self.tiles))
        self.splits = ceil_div(self.tiles, self.tiles_a_program)
        self.partial = torch.empty(
            (self.shares, self.splits, self.outputs, self.inputs + SUM_COLUMNS), device=self.device, dtype=torch.float32
        )

    def _block_c(self, norm: bool) -> int:
        return self.inputs if norm else block({"c": 128}, "c", self.inputs)

    def _blocks(self, columns: int) -> int:
        return ceil_div(columns, self.config["block_o"]) * ceil_div(self.inputs, 128)

    def add(
        self, a: Operand, x: Operand, columns: int, first: int = 0, *, norm: bool, share: int = 0, length: int = 0
    ) -> None:
        """Sum a^T x over all rows (of `length`, if given, instead of all) into rows `first`.. of the gradient."""
        block_c, length = self._block_c(norm), length or self.length
        block_o = max(16, min(self.config["block_o"], 1 << (columns - 1).bit_length()))
        blocks_o, blocks_c = ceil_div(columns, block_o), self.inputs // block_c
        partial = self.partial[share, :, first:]
        tiles = self.batch * self.groups * ceil_div(length, self.block_l)
        weight_gradient_kernel[(blocks_o * blocks_c * self.splits,)](
            a.tensor, x.tensor, partial, a.b, a.i, a.step, x.b, x.i, x.step, partial.stride(0),
            partial.stride(1), self.groups, length, tiles, self.tiles_a_program, blocks_o, blocks_c,
            columns, self.inputs, EPS, BLOCK_L=self.block_l, BLOCK_O=block_o, BLOCK_C=block_c,
            EVEN_O=columns % block_o == 0, NORM=norm, A_COLUMNS=a.columns, X_COLUMNS=x.columns,
            PRECISION=triton_support.float32_precision(), **options(self.config),
        )  # fmt: skip

    def finish(self) -> tuple[Tensor, Tensor]:
        """G [outputs, inputs] and s [outputs, 1] in fp32."""
        total = self.partial.flatten(0, 1).sum(0)
        return total[:, : self.inputs], total[:, self.inputs : self.inputs + 1]


@triton.jit
def through_norm_kernel(
    products, sums, weight0, weight1, gamma, beta, grad0, grad1, grad_gamma, grad_beta, p_o, s_o, OUTPUTS, FIRST, C,
    BLOCK_O: tl.constexpr, BLOCK_C: tl.constexpr, HAS_BETA: tl.constexpr, TWO: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_C columns of the weights' gradients, FIRST rows in the first weight, and their part of those
    of gamma and beta."""
    c = tl.program_id(0) * BLOCK_C + tl.arange(0, BLOCK_C)
    scale = tl.load(gamma + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
    of_gamma = tl.zeros([BLOCK_C], tl.float32)
    of_beta = tl.zeros([BLOCK_C], tl.float32)
    for start in range(0, OUTPUTS, BLOCK_O):
        o = start + tl.arange(0, BLOCK_O)
        inside = (o < OUTPUTS)[:, None] & (c < C)[None, :]
        g = tl.load(products + o[:, None] * p_o + c[None, :], mask=inside, other=0.0)
        s = tl.load(sums + o * s_o, mask=o < OUTPUTS, other=0.0)[:, None]
        at = o[:, None] * C + c[None, :]
        in_first = inside & (o < FIRST)[:, None]
        w = tl.load(weight0 + at, mask=in_first, other=0.0).to(tl.float32)
        grad = g * scale
        if HAS_BETA:
            grad += s * tl.load(beta + c, mask=c < C, other=0.0).to(tl.float32)[None, :]
        tl.store(grad0 + at, grad.to(grad0.dtype.element_ty), mask=in_first)
        if TWO:
            at = at - FIRST * C
            in_second = inside & (o >= FIRST)[:, None]
            w += tl.load(weight1 + at, mask=in_second, other=0.0).to(tl.float32)
            tl.store(grad1 + at, grad.to(grad1.dtype.element_ty), mask=in_second)
        of_gamma += tl.sum(w * g, 0)
        of_beta += tl.sum(w * s, 0)
    tl.store(grad_gamma + c, of_gamma.to(grad_gamma.dtype.element_ty), mask=c < C)
    if HAS_BETA:
        tl.store(grad_beta + c, of_beta.to(grad_beta.dtype.element_ty), mask=c < C)


def through_norm(
    products: Tensor, sums: Tensor, weights: Sequence[Tensor], gamma: Tensor, beta: Tensor | None
) -> tuple[Tensor, ...]:
    """Gradients of one or two weights, one below the other in `products`, and of the LayerNorm's parameters.

    Args:
        products, sums: from `Rows.finish`, fp32. weights: as the parameters are.

    Returns:
        A gradient for each weight, d(gamma) and, unless beta is None, d(beta), in the dtypes of the parameters.
    """
    first, second = weights[0].contiguous(), weights[-1].contiguous()
    grads = [torch.empty_like(first), torch.empty_like(second)]
    grad_gamma, grad_beta = torch.empty_like(gamma), torch.empty_like(gamma if beta is None else beta)
    outputs, width = products.shape
    through_norm_kernel[(ceil_div(width, NORM_BLOCK["BLOCK_C"]),)](
        products, sums, first, second, gamma, gamma if beta is None else beta, *grads, grad_gamma, grad_beta,
        products.stride(0), sums.stride(0), outputs, first.shape[0], width, HAS_BETA=beta is not None,
        TWO=len(weights) == 2, **NORM_BLOCK, num_warps=4,
    )  # fmt: skip
    return (*grads[: len(weights)], grad_gamma, *([] if beta is None else [grad_beta]))
