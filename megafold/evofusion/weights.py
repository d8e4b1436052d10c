"""Weights as kernels read them, made in one launch: in the dtype of products, transposed, columns dealt out."""

from __future__ import annotations

import itertools

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafold.evofusion.launch import ceil_div
from megafold.replay import launch_kernel

BLOCK = 32
MOST = 4

PLAIN, TRANSPOSED, DEALT = 0, 1, 2
"""How a weight [R, C] is wanted: as it is, as [C, R], and as [C, R] with columns in the order in which a product leaves
them in registers (see `hopper.common`; R is a multiple of 32 then)."""


@triton.jit
def dealt_place(column):
    """Where a column is dealt to; see `hopper.common`."""
    return column // 32 * 32 + column // 2 % 4 * 8 + column // 8 % 4 * 2 + column % 2


@triton.jit
def _prepare(w, out, tile, ROWS, COLUMNS, KIND: tl.constexpr, BLOCK: tl.constexpr):
    across = tl.cdiv(COLUMNS, BLOCK)
    r = tile // across * BLOCK + tl.arange(0, BLOCK)
    c = tile % across * BLOCK + tl.arange(0, BLOCK)
    inside = (r < ROWS)[:, None] & (c < COLUMNS)[None, :]
    value = tl.load(w + r[:, None] * COLUMNS + c[None, :], mask=inside, other=0.0).to(out.dtype.element_ty)
    if KIND == 0:
        tl.store(out + r[:, None] * COLUMNS + c[None, :], value, mask=inside)
    elif KIND == 1:
        tl.store(out + c[None, :] * ROWS + r[:, None], value, mask=inside)
    else:
        tl.store(out + c[None, :] * ROWS + dealt_place(r)[:, None], value, mask=inside)


@triton.jit
def prepare_kernel(
    w0, w1, w2, w3, out0, out1, out2, out3, R0, R1, R2, R3, C0, C1, C2, C3, end0, end1, end2,
    COUNT: tl.constexpr, KIND0: tl.constexpr, KIND1: tl.constexpr, KIND2: tl.constexpr, KIND3: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK x BLOCK of one of COUNT weights. end: of its programs."""
    pid = tl.program_id(0)
    if pid < end0:
        _prepare(w0, out0, pid, R0, C0, KIND0, BLOCK)
    if COUNT > 1 and (pid >= end0) & (pid < end1):
        _prepare(w1, out1, pid - end0, R1, C1, KIND1, BLOCK)
    if COUNT > 2 and (pid >= end1) & (pid < end2):
        _prepare(w2, out2, pid - end1, R2, C2, KIND2, BLOCK)
    if COUNT > 3 and pid >= end2:
        _prepare(w3, out3, pid - end2, R3, C3, KIND3, BLOCK)


def prepared(dtype: torch.dtype, *wanted: Tensor | tuple) -> tuple[Tensor, ...]:
    """Up to four weights in `dtype` and contiguous.

    Args:
        wanted: a weight [R, C], which comes back itself where it is so already; or a tuple of a weight, a kind and,
            where it matters, a contiguous tensor to write to.
    """
    found: list[Tensor | None] = []
    work: list[tuple[int, Tensor, int]] = []
    for at, entry in enumerate(wanted):
        weight, kind, out = (entry, PLAIN, None) if isinstance(entry, Tensor) else (*entry, None)[:3]
        if out is None and kind == PLAIN and weight.dtype == dtype:
            found.append(weight.contiguous())
            continue
        shape = weight.shape if kind == PLAIN else weight.mT.shape
        found.append(weight.new_empty(shape, dtype=dtype) if out is None else out)
        work.append((at, weight.contiguous(), kind))
    if not work:
        return tuple(found)
    ends = list(itertools.accumulate(ceil_div(w.shape[0], BLOCK) * ceil_div(w.shape[1], BLOCK) for _, w, _ in work))
    filled = work + [work[0]] * (MOST - len(work))
    launch_kernel(
        prepare_kernel, (ends[-1],),
        *(w for _, w, _ in filled), *(found[at] for at, *_ in filled), *(w.shape[0] for _, w, _ in filled),
        *(w.shape[1] for _, w, _ in filled), *(ends + ends[-1:] * MOST)[: MOST - 1], COUNT=len(work),
        **{f"KIND{p}": kind for p, (*_, kind) in enumerate(filled)}, BLOCK=BLOCK, num_warps=4,
    )  # fmt: skip
    return tuple(found)
