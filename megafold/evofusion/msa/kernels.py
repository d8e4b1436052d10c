"""Averages of values by head with the weights of pairs: a product over tokens whose columns are those of BLOCK_S
sequences at once, so that values stay as projections have them, [B, S, N, H, E], and so do averages."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.launch import ceil_div
from megafold.replay import launch_kernel

MEAN = {"BLOCK_I": 128, "BLOCK_S": 4, "BLOCK_J": 64, "num_warps": 8, "num_stages": 3}
WEIGHTS = {"BLOCK_I": 128, "BLOCK_J": 128, "BLOCK_S": 2, "num_warps": 8, "num_stages": 3}
INTERPRETED = {"BLOCK_I": 16, "BLOCK_J": 16, "BLOCK_S": 2, "num_warps": 4, "num_stages": 1}
PROGRAMS_EACH = 2
"""Programs for each multiprocessor that the sums over sequences are split for."""


@triton.jit
def _columns(s, S, token, N, h, HEADS, E: tl.constexpr, BLOCK_S: tl.constexpr):
    """Offsets [tokens, BLOCK_S * E] of a head of sequences from s in [S, N, HEADS, E], and which of them exist."""
    column = tl.arange(0, BLOCK_S * E)
    sequence = s + column // E
    offsets = (sequence.to(tl.int64)[None, :] * N + token[:, None]) * (HEADS * E) + h * E + (column % E)[None, :]
    return offsets, (sequence < S)[None, :] & (token < N)[:, None]


@triton.jit
def average_kernel(
    weights, values, out, S, N, HEADS,
    E: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_J: tl.constexpr, TRANSPOSED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: out[b, s.., i.., h] = sum over j of weights[b, h, i, j] values[b, s.., j, h].

    TRANSPOSED: weights[b, h, j, i]."""
    i = tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)
    s = tl.program_id(1) * BLOCK_S
    b, h = tl.program_id(2) // HEADS, tl.program_id(2) % HEADS
    plane = weights + tl.program_id(2).to(tl.int64) * N * N
    structure = b.to(tl.int64) * S * N * HEADS * E
    acc = tl.zeros([BLOCK_I, BLOCK_S * E], tl.float32)
    for start in range(0, N, BLOCK_J):
        j = start + tl.arange(0, BLOCK_J)
        if TRANSPOSED:
            w = tl.trans(
                tl.load(plane + j[:, None] * N + i[None, :], mask=(j < N)[:, None] & (i < N)[None, :], other=0.0)
            )
        else:
            w = tl.load(plane + i[:, None] * N + j[None, :], mask=(i < N)[:, None] & (j < N)[None, :], other=0.0)
        offsets, exists = _columns(s, S, j, N, h, HEADS, E, BLOCK_S)
        v = tl.load(values + structure + offsets, mask=exists, other=0.0)
        acc = tl.dot(w, v, acc, input_precision=PRECISION)
    offsets, exists = _columns(s, S, i, N, h, HEADS, E, BLOCK_S)
    tl.store(out + structure + offsets, acc.to(out.dtype.element_ty), mask=exists)


@triton.jit
def average_weights_kernel(
    grad, values, partial, S, N, HEADS, each,
    E: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_S: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One program: a tile of partial[split, b, h]: grad[b, s, i, h] values[b, s, j, h] summed over `each` sequences."""
    blocks = tl.cdiv(N, BLOCK_J)
    i = tl.program_id(0) // blocks * BLOCK_I + tl.arange(0, BLOCK_I)
    j = tl.program_id(0) % blocks * BLOCK_J + tl.arange(0, BLOCK_J)
    b, h = tl.program_id(1) // HEADS, tl.program_id(1) % HEADS
    first = tl.program_id(2) * each
    structure = b.to(tl.int64) * S * N * HEADS * E
    acc = tl.zeros([BLOCK_I, BLOCK_J], tl.float32)
    for s in range(first, tl.minimum(first + each, S), BLOCK_S):
        offsets, exists = _columns(s, S, i, N, h, HEADS, E, BLOCK_S)
        g = tl.load(grad + structure + offsets, mask=exists, other=0.0)
        offsets, exists = _columns(s, S, j, N, h, HEADS, E, BLOCK_S)
        v = tl.load(values + structure + offsets, mask=exists, other=0.0)
        acc = tl.dot(g, tl.trans(v), acc, input_precision=PRECISION)
    plane = partial + (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)).to(tl.int64) * N * N
    tl.store(plane + i[:, None] * N + j[None, :], acc, mask=(i < N)[:, None] & (j < N)[None, :])


def mean(weights: Tensor, values: Tensor) -> Tensor:
    """[B, S, N, H, E]: values averaged with weights [B, H, N, N]."""
    return _mean(weights.contiguous(), values.contiguous(), transposed=False)


def gradients(grad: Tensor, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """Of weights and values."""
    grad, weights, values = grad.contiguous(), weights.contiguous(), values.contiguous()
    batch, depth, size, heads, width = values.shape
    config = _config(WEIGHTS, values)
    tiles = ceil_div(size, config["BLOCK_I"]) * ceil_div(size, config["BLOCK_J"])
    programs = PROGRAMS_EACH * triton_support.multiprocessors(values.device)
    splits = max(1, min(ceil_div(programs, tiles * batch * heads), depth // (4 * config["BLOCK_S"])))
    each = ceil_div(ceil_div(depth, splits), config["BLOCK_S"]) * config["BLOCK_S"]
    splits = ceil_div(depth, each)
    partial = weights.new_empty((splits, *weights.shape), dtype=torch.float32)
    with triton_support.device_guard(values.device):
        launch_kernel(
            average_weights_kernel, (tiles, batch * heads, splits),
            grad, values, partial, depth, size, heads, each, E=width, PRECISION=triton_support.float32_precision(),
            **config,
        )  # fmt: skip
    total = partial[0] if splits == 1 else partial.sum(0)
    return total.to(weights.dtype), _mean(weights, grad, transposed=True)


def _mean(weights: Tensor, values: Tensor, transposed: bool) -> Tensor:
    batch, depth, size, heads, width = values.shape
    out, config = values.new_empty(values.shape), _config(MEAN, values)
    grid = ceil_div(size, config["BLOCK_I"]), ceil_div(depth, config["BLOCK_S"]), batch * heads
    with triton_support.device_guard(values.device):
        launch_kernel(
            average_kernel, grid,
            weights, values, out, depth, size, heads, E=width, TRANSPOSED=transposed,
            PRECISION=triton_support.float32_precision(), **config,
        )  # fmt: skip
    return out


def _config(config: dict[str, int], values: Tensor) -> dict[str, int]:
    """For tiles as wide as heads of 32 in 16 bits make them."""
    if values.device.type == "cpu":
        return INTERPRETED
    sequences = max(1, config["BLOCK_S"] * 32 // values.shape[-1])
    if values.dtype != torch.float32:
        return config | {"BLOCK_S": sequences}
    return config | {"BLOCK_S": max(1, sequences // 2), "BLOCK_I": 64, "BLOCK_J": 32, "num_stages": 2}
