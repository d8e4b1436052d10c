"""Forward kernel: online softmax over blocks of keys; a group of rows in one program shares each bias tile."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafold import triton_support
from megafold.evoflash3d.launch import Problem, as_like, options, output_like
from megafold.evoflash3d.tiles import LOG2E, keep_factor, load_bias, load_tile, store_tile


@triton.jit
def forward_kernel(
    q, k, v, bias, mask, seed, out, lse,
    q_b, q_r, q_h, q_n, k_b, k_r, k_h, k_n, v_b, v_r, v_h, v_n, o_b, o_r, o_h, o_n,
    bias_b, bias_h, bias_i, mask_b, mask_r,
    R, H, NQ, NK, scale, threshold, inverse_keep, b0, r0, h0, i0, j0,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, ROWS: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    EVEN_I: tl.constexpr, EVEN_J: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: ROWS rows, one head, BLOCK_I queries. Blocks of queries are neighbours, so that they share K and V
    in the L2 cache; the bias is small enough to stay there."""
    pid = tl.program_id(0)
    n_i = tl.cdiv(NQ, BLOCK_I)
    n_groups = tl.cdiv(R, ROWS)
    i_start = (pid % n_i) * BLOCK_I
    group = (pid // n_i) % n_groups
    h = (pid // (n_i * n_groups)) % H
    b = pid // (n_i * n_groups * H)
    b64, h64 = b.to(tl.int64), h.to(tl.int64)
    i = i_start + tl.arange(0, BLOCK_I)

    q_tiles, k_bases, v_bases, mask_bases = (), (), (), ()
    maxima, sums, accumulators = (), (), ()
    for g in tl.static_range(ROWS):
        row = tl.minimum(group * ROWS + g, R - 1).to(tl.int64)  # a row too many repeats the last and is not stored
        q_tiles += (load_tile(q + b64 * q_b + row * q_r + h64 * q_h, q_n, i_start, NQ, D, BLOCK_I, BLOCK_D, EVEN_I),)
        k_bases += (k + b64 * k_b + row * k_r + h64 * k_h,)
        v_bases += (v + b64 * v_b + row * v_r + h64 * v_h,)
        mask_bases += (mask + b64 * mask_b + row * mask_r,)
        maxima += (tl.full([BLOCK_I], float("-inf"), tl.float32),)
        sums += (tl.zeros([BLOCK_I], tl.float32),)
        accumulators += (tl.zeros([BLOCK_I, BLOCK_D], tl.float32),)
    bias_base = bias + b64 * bias_b + h64 * bias_h

    for j_start in range(0, NK, BLOCK_J):
        j = j_start + tl.arange(0, BLOCK_J)
        if HAS_BIAS:
            bias_tile = load_bias(bias_base, bias_i, i_start, j_start, NQ, NK, BLOCK_I, BLOCK_J, EVEN_I, EVEN_J).to(
                tl.float32
            )
        new_maxima, new_sums, new_accumulators = (), (), ()
        for g in tl.static_range(ROWS):
            k_tile = load_tile(k_bases[g], k_n, j_start, NK, D, BLOCK_J, BLOCK_D, EVEN_J)
            v_tile = load_tile(v_bases[g], v_n, j_start, NK, D, BLOCK_J, BLOCK_D, EVEN_J)
            x = tl.dot(q_tiles[g], tl.trans(k_tile), input_precision=PRECISION) * scale
            if HAS_BIAS:
                x += bias_tile
            if HAS_MASK:
                keep_key = tl.load(mask_bases[g] + j, mask=j < NK, other=0) != 0
                x = tl.where(keep_key[None, :], x, float("-inf"))
            elif not EVEN_J:
                x = tl.where((j < NK)[None, :], x, float("-inf"))
            maximum = tl.maximum(maxima[g], tl.max(x, 1))
            # While no key has been seen the maximum is -inf; 0 in its place gives exp(-inf) = 0 instead of NaN.
            safe = tl.where(maximum == float("-inf"), 0.0, maximum) * LOG2E
            p = tl.exp2(x * LOG2E - safe[:, None])
            alpha = tl.exp2(maxima[g] * LOG2E - safe)
            new_maxima += (maximum,)
            new_sums += (sums[g] * alpha + tl.sum(p, 1),)
            if DROPOUT:
                row = group * ROWS + g
                p *= keep_factor(
                    tl.load(seed), threshold, inverse_keep,
                    b + b0, row + r0, h + h0, (i + i0)[:, None], (j + j0)[None, :],
                )  # fmt: skip
            acc = accumulators[g] * alpha[:, None]
            new_accumulators += (tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION),)
        maxima, sums, accumulators = new_maxima, new_sums, new_accumulators

    for g in tl.static_range(ROWS):
        row = group * ROWS + g
        row64 = row.to(tl.int64)
        total = tl.where(sums[g] == 0.0, 1.0, sums[g])
        store_tile(
            out + b64 * o_b + row64 * o_r + h64 * o_h, o_n, i_start, NQ,
            accumulators[g] / total[:, None], row < R, D, BLOCK_I, BLOCK_D,
        )  # fmt: skip
        # Without a key the maximum, and so the log-sum-exp, is -inf.
        log_sum_exp = maxima[g] + tl.log2(total) / LOG2E
        tl.store(lse + ((b64 * R + row64) * H + h64) * NQ + i, log_sum_exp, mask=(i < NQ) & (row < R))


def launch_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    offsets: list[int],
    config: dict | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; arguments as `megafold.evoflash3d.api.evoflash3d` checks them.

    Args:
        config: launch configuration instead of the table's: block_i, block_j, rows, num_warps, num_stages.

    Returns:
        out [B, R, H, Nq, D] in the dtype and memory order of q, lse [B, R, H, Nq] fp32.
    """
    out = output_like(q)
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device=q.device)
    if out.numel() == 0 or k.shape[3] == 0:
        return torch.zeros_like(q), lse.fill_(float("-inf"))
    problem = Problem(q, k, v, bias, mask, seed, scale, dropout_p, offsets)
    config = problem.config("forward") if config is None else config
    programs = triton.cdiv(problem.NQ, config["block_i"]) * triton.cdiv(problem.R, config["rows"])
    with triton_support.device_guard(q.device):
        forward_kernel[(programs * problem.B * problem.H,)](
            **problem.inputs(), out=out, lse=lse, **problem.strides("o", out), **problem.sizes(),
            **problem.constants(config), ROWS=config["rows"],
            **options(config),
        )  # fmt: skip
    return as_like(out, q), lse
