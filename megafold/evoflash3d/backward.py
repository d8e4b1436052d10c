"""Backward kernels, without atomics.

`delta_kernel`  row sums of out * d(out), once.
`rows_kernel`   dq, dk and dv in one pass over the scores of one row: dk and dv of a block of keys stay in registers
                while the queries pass by; dq is summed over blocks of keys in fp32 in a slot of scratch memory that
                only this program uses, in a fixed order.
`bias_kernel`   d(bias) of one tile over a chunk of rows, in registers; chunks are then summed in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafold import triton_support
from megafold.evoflash3d.launch import Problem, as_like, block_d, last_contiguous, options, output_like
from megafold.evoflash3d.tiles import LOG2E, keep_factor, load_bias, load_tile, store_tile


@triton.jit
def delta_kernel(
    out, grad_out, lse, grad_lse, delta, lse2,
    o_b, o_r, o_h, o_n, g_b, g_r, g_h, g_n, R, H, N,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK: tl.constexpr, HAS_GRAD_LSE: tl.constexpr,
):  # fmt: skip
    """delta = sum over D of out * d(out), minus d(lse); lse2 = lse in base 2, +inf where a query has no key."""
    pid = tl.program_id(0)
    blocks = tl.cdiv(N, BLOCK)
    start = (pid % blocks) * BLOCK
    item = (pid // blocks).to(tl.int64)
    h, r, b = item % H, (item // H) % R, item // (H * R)
    o = load_tile(out + b * o_b + r * o_r + h * o_h, o_n, start, N, D, BLOCK, BLOCK_D, False).to(tl.float32)
    g = load_tile(grad_out + b * g_b + r * g_r + h * g_h, g_n, start, N, D, BLOCK, BLOCK_D, False).to(tl.float32)
    n = start + tl.arange(0, BLOCK)
    total = tl.sum(o * g, 1)
    log_sum_exp = tl.load(lse + item * N + n, mask=n < N, other=0.0)
    if HAS_GRAD_LSE:
        total -= tl.load(grad_lse + item * N + n, mask=n < N, other=0.0)
    tl.store(delta + item * N + n, total, mask=n < N)
    log_sum_exp = tl.where(log_sum_exp == float("-inf"), float("inf"), log_sum_exp * LOG2E)
    tl.store(lse2 + item * N + n, log_sum_exp, mask=n < N)


@triton.jit
def rows_kernel(
    q, k, v, bias, mask, seed, grad_out, lse2, delta, dq, dk, dv, scratch,
    q_b, q_r, q_h, q_n, k_b, k_r, k_h, k_n, v_b, v_r, v_h, v_n, g_b, g_r, g_h, g_n,
    dq_b, dq_r, dq_h, dq_n, dk_b, dk_r, dk_h, dk_n, dv_b, dv_r, dv_h, dv_n,
    bias_b, bias_h, bias_i, mask_b, mask_r,
    R, H, NQ, NK, scale, threshold, inverse_keep, b0, r0, h0, i0, j0, items, splits, keys_per_split,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    EVEN_I: tl.constexpr, EVEN_J: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr, ONE_BLOCK: tl.constexpr,
):  # fmt: skip
    """One program walks over items = (batch, row, head, split of the keys). `bias` is transposed: [B, H, NK, NQ]."""
    for item in range(tl.program_id(0), items, tl.num_programs(0)):
        split = item % splits
        h = (item // splits) % H
        r = (item // (splits * H)) % R
        b = item // (splits * H * R)
        b64, r64, h64 = tl.cast(b, tl.int64), tl.cast(r, tl.int64), tl.cast(h, tl.int64)
        q_base = q + b64 * q_b + r64 * q_r + h64 * q_h
        g_base = grad_out + b64 * g_b + r64 * g_r + h64 * g_h
        dq_base = dq + b64 * dq_b + r64 * dq_r + h64 * dq_h
        bias_base = bias + b64 * bias_b + h64 * bias_h
        per_query = ((b64 * R + r64) * H + h64) * NQ
        slot_index = item if SPLIT else tl.program_id(0)
        slot = scratch + tl.cast(slot_index, tl.int64) * NQ * BLOCK_D
        low = split * keys_per_split
        high = tl.minimum(low + keys_per_split, NK)
        for j_start in range(low, high, BLOCK_J):
            j = j_start + tl.arange(0, BLOCK_J)
            k_base, v_base = k + b64 * k_b + r64 * k_r + h64 * k_h, v + b64 * v_b + r64 * v_r + h64 * v_h
            k_tile = load_tile(k_base, k_n, j_start, NK, D, BLOCK_J, BLOCK_D, EVEN_J)
            v_tile = load_tile(v_base, v_n, j_start, NK, D, BLOCK_J, BLOCK_D, EVEN_J)
            keep_key = j < NK
            if HAS_MASK:
                keep_key = tl.load(mask + b64 * mask_b + r64 * mask_r + j, mask=keep_key, other=0) != 0
            dk_tile = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
            dv_tile = tl.zeros([BLOCK_J, BLOCK_D], tl.float32)
            for i_start in range(0, NQ, BLOCK_I):
                i = i_start + tl.arange(0, BLOCK_I)
                q_tile = load_tile(q_base, q_n, i_start, NQ, D, BLOCK_I, BLOCK_D, EVEN_I)
                g_tile = load_tile(g_base, g_n, i_start, NQ, D, BLOCK_I, BLOCK_D, EVEN_I)
                if EVEN_I:
                    lse_i = tl.load(lse2 + per_query + i)
                    delta_i = tl.load(delta + per_query + i)
                else:
                    lse_i = tl.load(lse2 + per_query + i, mask=i < NQ, other=float("inf"))
                    delta_i = tl.load(delta + per_query + i, mask=i < NQ, other=0.0)
                if not ONE_BLOCK:
                    d = tl.arange(0, BLOCK_D)
                    pointers = slot + i_start * BLOCK_D + tl.arange(0, BLOCK_I)[:, None] * BLOCK_D + d[None, :]
                    inside = (i < NQ)[:, None] & (d < BLOCK_D)[None, :]
                    before = tl.load(pointers, mask=inside & (j_start > low), other=0.0)
                x = tl.dot(k_tile, tl.trans(q_tile), input_precision=PRECISION) * (scale * LOG2E)
                if HAS_BIAS:
                    bias_tile = load_bias(
                        bias_base, bias_i, j_start, i_start, NK, NQ, BLOCK_J, BLOCK_I, EVEN_J, EVEN_I
                    ).to(tl.float32)
                    x += bias_tile * LOG2E - lse_i[None, :]
                else:
                    x -= lse_i[None, :]
                p = tl.exp2(x)
                if HAS_MASK or not EVEN_J:
                    p = tl.where(keep_key[:, None], p, 0.0)
                dp = tl.dot(v_tile, tl.trans(g_tile), input_precision=PRECISION)
                dropped = p
                if DROPOUT:
                    keep = keep_factor(
                        tl.load(seed), threshold, inverse_keep,
                        b + b0, r + r0, h + h0, (i + i0)[None, :], (j + j0)[:, None],
                    )  # fmt: skip
                    dropped = p * keep
                    dp *= keep
                dv_tile = tl.dot(dropped.to(g_tile.dtype), g_tile, dv_tile, input_precision=PRECISION)
                ds = (p * (dp - delta_i[None, :])).to(q_tile.dtype)
                dk_tile = tl.dot(ds, q_tile, dk_tile, input_precision=PRECISION)
                dq_tile = tl.dot(tl.trans(ds), k_tile, input_precision=PRECISION)
                if ONE_BLOCK:
                    store_tile(dq_base, dq_n, i_start, NQ, dq_tile * scale, True, D, BLOCK_I, BLOCK_D)
                else:
                    dq_tile += before
                    last = j_start + BLOCK_J >= high
                    if SPLIT:
                        tl.store(pointers, dq_tile, mask=inside)
                    else:
                        tl.store(pointers, dq_tile, mask=inside & (not last))
                        store_tile(dq_base, dq_n, i_start, NQ, dq_tile * scale, last, D, BLOCK_I, BLOCK_D)
            dk_base, dv_base = dk + b64 * dk_b + r64 * dk_r + h64 * dk_h, dv + b64 * dv_b + r64 * dv_r + h64 * dv_h
            store_tile(dk_base, dk_n, j_start, NK, dk_tile * scale, True, D, BLOCK_J, BLOCK_D)
            store_tile(dv_base, dv_n, j_start, NK, dv_tile, True, D, BLOCK_J, BLOCK_D)
            if not ONE_BLOCK:
                tl.debug_barrier()  # other threads of this program read these sums for the next block of keys


@triton.jit
def bias_kernel(
    q, k, v, bias, mask, seed, grad_out, lse2, delta, dbias,
    q_b, q_r, q_h, q_n, k_b, k_r, k_h, k_n, v_b, v_r, v_h, v_n, g_b, g_r, g_h, g_n,
    bias_b, bias_h, bias_i, mask_b, mask_r,
    R, H, NQ, NK, scale, threshold, inverse_keep, b0, r0, h0, i0, j0, B, rows_per_chunk,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    EVEN_I: tl.constexpr, EVEN_J: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of d(bias) over a chunk of rows; `dbias` is [chunks, B, H, NQ, NK]. The tiles of one head
    and chunk are neighbours, so that they read the same rows at about the same time."""
    pid = tl.program_id(0)
    n_i, n_j = tl.cdiv(NQ, BLOCK_I), tl.cdiv(NK, BLOCK_J)
    i_start = (pid % n_i) * BLOCK_I
    j_start = ((pid // n_i) % n_j) * BLOCK_J
    chunk = pid // (n_i * n_j * H * B)
    bh = (pid // (n_i * n_j)) % (H * B)
    h, b = bh % H, bh // H
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    i = i_start + tl.arange(0, BLOCK_I)
    j = j_start + tl.arange(0, BLOCK_J)
    bias_tile = load_bias(
        bias + b64 * bias_b + h64 * bias_h, bias_i, i_start, j_start, NQ, NK, BLOCK_I, BLOCK_J, EVEN_I, EVEN_J
    ).to(tl.float32)
    bias_tile *= LOG2E
    if not EVEN_J:
        bias_tile = tl.where((j < NK)[None, :], bias_tile, float("-inf"))
    total = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
    first = chunk * rows_per_chunk
    for r in range(first, tl.minimum(first + rows_per_chunk, R)):
        r64 = tl.cast(r, tl.int64)
        per_query = ((b64 * R + r64) * H + h64) * NQ
        q_tile = load_tile(q + b64 * q_b + r64 * q_r + h64 * q_h, q_n, i_start, NQ, D, BLOCK_I, BLOCK_D, EVEN_I)
        k_tile = load_tile(k + b64 * k_b + r64 * k_r + h64 * k_h, k_n, j_start, NK, D, BLOCK_J, BLOCK_D, EVEN_J)
        g_base = grad_out + b64 * g_b + r64 * g_r + h64 * g_h
        g_tile = load_tile(g_base, g_n, i_start, NQ, D, BLOCK_I, BLOCK_D, EVEN_I)
        v_tile = load_tile(v + b64 * v_b + r64 * v_r + h64 * v_h, v_n, j_start, NK, D, BLOCK_J, BLOCK_D, EVEN_J)
        if EVEN_I:
            lse_i = tl.load(lse2 + per_query + i)
            delta_i = tl.load(delta + per_query + i)
        else:
            lse_i = tl.load(lse2 + per_query + i, mask=i < NQ, other=float("inf"))
            delta_i = tl.load(delta + per_query + i, mask=i < NQ, other=0.0)
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * (scale * LOG2E)
        dp = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
        p = tl.exp2(x + (bias_tile - lse_i[:, None]))
        if HAS_MASK:
            keep_key = tl.load(mask + b64 * mask_b + r64 * mask_r + j, mask=j < NK, other=0) != 0
            p = tl.where(keep_key[None, :], p, 0.0)
        if DROPOUT:
            dp *= keep_factor(
                tl.load(seed), threshold, inverse_keep,
                b + b0, r + r0, h + h0, (i + i0)[:, None], (j + j0)[None, :],
            )  # fmt: skip
        total += p * (dp - delta_i[:, None])
    base = dbias + ((chunk.to(tl.int64) * B + b64) * H + h64) * NQ * NK
    pointers = base + i.to(tl.int64)[:, None] * NK + j[None, :]
    tl.store(pointers, total.to(dbias.dtype.element_ty), mask=(i < NQ)[:, None] & (j < NK)[None, :])


def launch_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
    dropout_p: float,
    offsets: list[int],
    needs_rows: bool,
    needs_bias: bool,
    configs: dict[str, dict] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, d(bias); those not needed come back with no element.

    Args:
        configs: {"rows": ..., "bias": ...} instead of the table's launch configurations.
    """
    none = q.new_empty(0)
    if out.numel() == 0 or k.shape[3] == 0:
        rows = [torch.zeros_like(t) for t in (q, k, v)] if needs_rows else [none] * 3
        return (*rows, torch.zeros_like(bias) if needs_bias else none)
    problem = Problem(q, k, v, bias, mask, seed, scale, dropout_p, offsets)
    configs = {"rows": problem.config("rows"), "bias": problem.config("bias")} if configs is None else configs
    with triton_support.device_guard(q.device):
        shared = _delta(problem, last_contiguous(grad_out), grad_lse, out, lse)
        # d(bias) first: its partial sums are gone before the larger gradients are allocated.
        dbias = _bias_gradient(problem, shared, bias, configs["bias"]) if needs_bias else none
        rows = _row_gradients(problem, shared, q, k, v, configs["rows"]) if needs_rows else (none,) * 3
    return (*rows, dbias)


def _delta(problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor) -> dict:
    delta, lse2 = torch.empty_like(lse), torch.empty_like(lse)
    block = 128 if problem.D <= 64 else 64
    grid = (triton.cdiv(problem.NQ, block) * problem.B * problem.R * problem.H,)
    out = last_contiguous(out)
    delta_kernel[grid](
        out=out, grad_out=grad_out, lse=lse, grad_lse=lse if grad_lse is None else grad_lse.contiguous(),
        delta=delta, lse2=lse2, **problem.strides("o", out), **problem.strides("g", grad_out),
        R=problem.R, H=problem.H, N=problem.NQ, D=problem.D, BLOCK_D=block_d(problem.D), BLOCK=block,
        HAS_GRAD_LSE=grad_lse is not None, num_warps=4,
    )  # fmt: skip
    return {"grad_out": grad_out, "lse2": lse2, "delta": delta, **problem.strides("g", grad_out)}


def _bias_gradient(problem: Problem, shared: dict, bias: Tensor, config: dict) -> Tensor:
    tiles = triton.cdiv(problem.NQ, config["block_i"]) * triton.cdiv(problem.NK, config["block_j"])
    tiles *= problem.B * problem.H
    # Enough chunks of rows to fill the device evenly: the last wave of programs should be nearly full.
    slots = config["programs_per_sm"] * triton_support.multiprocessors(problem.q.device)
    chunks = _chunks(tiles, slots, problem.R)
    rows_per_chunk = triton.cdiv(problem.R, chunks)
    chunks = triton.cdiv(problem.R, rows_per_chunk)
    shape = (problem.B, problem.H, problem.NQ, problem.NK)
    partial = bias.new_empty((chunks, *shape), dtype=torch.float32 if chunks > 1 else bias.dtype)
    bias_kernel[(tiles * chunks,)](
        **problem.inputs(), **shared, dbias=partial, **problem.sizes(), B=problem.B, rows_per_chunk=rows_per_chunk,
        **problem.constants(config), **options(config),
    )  # fmt: skip
    return partial.sum(0).to(bias.dtype) if chunks > 1 else partial[0]


def _chunks(tiles: int, slots: int, rows: int) -> int:
    """Number of chunks of rows (at most 16) that loses least to a part-filled last wave; fewer when equal."""

    def waste(chunks: int) -> float:
        programs, longest = tiles * chunks, triton.cdiv(rows, chunks)
        return triton.cdiv(programs, slots) * longest * slots / (tiles * rows)

    return min(range(1, min(16, rows) + 1), key=lambda chunks: (round(waste(chunks), 2), chunks))


def _row_gradients(
    problem: Problem, shared: dict, q: Tensor, k: Tensor, v: Tensor, config: dict
) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = output_like(q), output_like(k), output_like(v)
    rows = problem.B * problem.R * problem.H
    blocks = triton.cdiv(problem.NK, config["block_j"])
    slots = config["programs_per_sm"] * triton_support.multiprocessors(problem.q.device)
    # With few rows (R = 1) the keys are split over programs, and the parts of dq are summed afterwards.
    splits = min(blocks, triton.cdiv(slots, rows)) if 2 * rows <= slots else 1
    keys_per_split = triton.cdiv(blocks, splits) * config["block_j"]
    splits = triton.cdiv(problem.NK, keys_per_split)
    items = rows * splits
    programs = items if splits > 1 else min(items, slots)
    one_block = blocks == 1
    width = block_d(problem.D)
    scratch = q.new_empty(0 if one_block else programs * problem.NQ * width, dtype=torch.float32)
    bias = {} if problem.bias is None else {"bias": problem.bias.transpose(-1, -2).contiguous()}
    if bias:
        bias["bias_i"] = bias["bias"].stride(-2)
    rows_kernel[(programs,)](
        **{**problem.inputs(), **bias}, **shared, dq=dq, dk=dk, dv=dv, scratch=scratch,
        **problem.strides("dq", dq), **problem.strides("dk", dk), **problem.strides("dv", dv),
        **problem.sizes(), items=items, splits=splits, keys_per_split=keys_per_split,
        **problem.constants(config), SPLIT=splits > 1, ONE_BLOCK=one_block,
        **options(config),
    )  # fmt: skip
    if splits > 1:
        parts = scratch.view(problem.B, problem.R, problem.H, splits, problem.NQ, width)
        dq.copy_(parts.sum(3)[..., : problem.D] * problem.scale)
    return as_like(dq, q), as_like(dk, k), as_like(dv, v)
