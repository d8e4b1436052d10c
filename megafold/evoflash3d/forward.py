"""Forward kernel: online softmax over blocks of keys."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafold import triton_support
from megafold.evoflash3d.launch import Problem, as_like, hopper_kernels, options, output_like
from megafold.evoflash3d.statistics import statistics_pitch
from megafold.evoflash3d.tiles import LN2, LOG2E, exp_wide, keep_factor, load_bias, load_tile, store_tile
from megafold.replay import launch_kernel


@triton.jit
def forward_kernel(
    q, k, v, bias, mask, seed, out, lse,
    q_b, q_r, q_h, q_n, k_b, k_r, k_h, k_n, v_b, v_r, v_h, v_n, o_b, o_r, o_h, o_n,
    mask_b, mask_r, BIAS_ROWS, BIAS_COLUMNS, pitch,
    R, H, NQ, NK, scale, threshold, inverse_keep, b0, r0, h0, i0, j0,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr,
    HAS_BIAS: tl.constexpr, HAS_MASK: tl.constexpr, DROPOUT: tl.constexpr,
    EVEN_I: tl.constexpr, EVEN_J: tl.constexpr, PRECISION: tl.constexpr, TMA: tl.constexpr, WIDE: tl.constexpr,
    NATURAL: tl.constexpr,
):  # fmt: skip
    """One program: one row, one head, BLOCK_I queries. Blocks of queries are neighbours, so that they share K and V in
    the L2 cache; the bias is small enough to stay there."""
    pid = tl.program_id(0)
    n_i = tl.cdiv(NQ, BLOCK_I)
    i_start = (pid % n_i) * BLOCK_I
    r = (pid // n_i) % R
    h = (pid // (n_i * R)) % H
    b = pid // (n_i * R * H)
    i = i_start + tl.arange(0, BLOCK_I)
    q_tile = load_tile(q, b, r, h, i_start, q_b, q_r, q_h, q_n, NQ, D, BLOCK_I, BLOCK_D, EVEN_I, TMA)
    maximum = tl.full([BLOCK_I], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_I], tl.float32)
    acc = tl.zeros([BLOCK_I, BLOCK_D], tl.float32)
    for j_start in range(0, NK, BLOCK_J):
        j = j_start + tl.arange(0, BLOCK_J)
        k_tile = load_tile(k, b, r, h, j_start, k_b, k_r, k_h, k_n, NK, D, BLOCK_J, BLOCK_D, EVEN_J, TMA)
        v_tile = load_tile(v, b, r, h, j_start, v_b, v_r, v_h, v_n, NK, D, BLOCK_J, BLOCK_D, EVEN_J, TMA)
        x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION) * scale
        if HAS_BIAS:
            bias_row = (b * H + h) * BIAS_ROWS + i_start
            x += load_bias(bias, bias_row, j_start, BIAS_COLUMNS, BLOCK_I, BLOCK_J, TMA).to(tl.float32)
        if HAS_MASK:
            keep_key = tl.load(mask + b.to(tl.int64) * mask_b + r.to(tl.int64) * mask_r + j, mask=j < NK, other=0) != 0
            x = tl.where(keep_key[None, :], x, float("-inf"))
        elif not EVEN_J and not HAS_BIAS:  # a padded bias has -inf there
            x = tl.where((j < NK)[None, :], x, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(x, 1))
        # While no key has been seen the maximum is -inf; 0 in its place gives exp(-inf) = 0 instead of NaN.
        safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        if WIDE:
            p = exp_wide(x - safe[:, None])
            alpha = exp_wide(maximum - safe)
        else:
            safe *= LOG2E
            p = tl.exp2(x * LOG2E - safe[:, None])
            alpha = tl.exp2(maximum * LOG2E - safe)
        total = total * alpha + tl.sum(p, 1)
        maximum = new_maximum
        if DROPOUT:
            p *= keep_factor(
                seed, threshold, inverse_keep, b + b0, r + r0, h + h0, (i + i0)[:, None], (j + j0)[None, :]
            )
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
    total = tl.where(total == 0.0, 1.0, total)
    store_tile(out, b, r, h, i_start, o_b, o_r, o_h, o_n, NQ, acc / total[:, None], D, BLOCK_I, BLOCK_D)
    item = (b.to(tl.int64) * R + r) * H + h
    if NATURAL or WIDE:
        # Times log(2), not over log2(e): a division in Triton is off by two units in the last place.
        value = maximum + tl.log2(total) * LN2
    else:
        value = maximum * LOG2E + tl.log2(total)
    if not NATURAL:
        # Without a key it is -inf, as the maximum is; +inf gives the backward exp(-inf) = 0 instead of NaN.
        value = tl.where(value == float("-inf"), float("inf"), value)
    tl.store(lse + item * pitch + i, value, mask=i < NQ)


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
    natural_lse: bool = True,
    config: dict | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and its log-sum-exp; arguments as `megafold.evoflash3d.api.evoflash3d` checks them.

    Args:
        natural_lse: False: the log-sum-exp as the backward kernels read it, so that they need no copy of it.
        config: launch configuration instead of the table's: block_i, block_j, num_warps, num_stages, ...

    Returns:
        out [B, R, H, Nq, D] in the dtype and memory order of q, and in fp32 the natural lse [B, R, H, Nq], -inf without
        a key; or [B, R, H, pitch >= Nq] in base 2 (base e for fp32 inputs), +inf without a key.
    """
    out = output_like(q)
    pitch = q.shape[3] if natural_lse else statistics_pitch(q.shape[3])
    lse = torch.empty((*q.shape[:3], pitch), dtype=torch.float32, device=q.device)
    if out.numel() == 0 or k.shape[3] == 0:
        return torch.zeros_like(q), lse.fill_(float("-inf") if natural_lse else float("inf"))
    problem = Problem(q, k, v, bias, mask, seed, scale, dropout_p, offsets)
    config = problem.config("forward") if config is None else config
    with triton_support.device_guard(q.device):
        if hopper := hopper_kernels(problem, config):
            hopper.launch_forward(problem, out, lse, natural_lse, config["gluon"])
        else:
            programs = triton.cdiv(problem.NQ, config["block_i"]) * problem.R * problem.H * problem.B
            launch_kernel(
                forward_kernel, (programs,),
                **problem.arguments(config), out=out, lse=lse, pitch=pitch, NATURAL=natural_lse,
                **problem.strides("o", out), **options(config),
            )  # fmt: skip
    return as_like(out, q), lse
