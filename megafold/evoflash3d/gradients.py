"""Host side of the backward: which kernels run, in which order, and how d(bias) is split over rows."""

from __future__ import annotations

import functools

import torch
import triton
from torch import Tensor

from megafold import triton_support
from megafold.evoflash3d.backward import (
    bias_kernel,
    delta_kernel,
    few_keys_delta_kernel,
    keys_kernel,
    queries_kernel,
    sum_kernel,
)
from megafold.evoflash3d.launch import Problem, as_like, block_d, hopper_kernels, last_contiguous, options, output_like
from megafold.evoflash3d.statistics import FEW_KEYS, statistics_pitch
from megafold.replay import launch_kernel

MAX_CHUNKS = 8
"""Most partial sums of d(bias); each takes H N^2 numbers in fp32."""

MOST_LOST = 0.2
"""Largest `lost_share` at which whole rows are expected to be faster than dq, and dk with dv, one after the other."""


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
    natural_lse: bool,
    needs_rows: bool,
    needs_bias: bool,
    configs: dict[str, dict] | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, d(bias); those not needed come back with no element.

    d(bias), dq, and dk with dv do not depend on one another, so on Hopper each may start while the one before it ends.
    Nothing that one of them uses is freed before the next is launched; a sum of chunks in between is waited for.

    Args:
        lse: as `launch_forward` gives it with the same `natural_lse`.
        configs: {"queries": ..., "keys": ..., "bias": ...} instead of the table's launch configurations; with "rows",
            dq, dk and dv come from one kernel where that serves the call.
    """
    none = [q.new_empty(0) for _ in range(4)]
    if out.numel() == 0 or k.shape[3] == 0:
        rows = [torch.zeros_like(t) for t in (q, k, v)] if needs_rows else none[:3]
        return (*rows, torch.zeros_like(bias) if needs_bias else none[3])
    problem = Problem(q, k, v, bias, mask, seed, scale, dropout_p, offsets)
    if configs is None:
        configs = {kernel: problem.config(kernel) for kernel in ("queries", "keys", "bias")}
        configs["rows"] = problem.rows_config()
    with triton_support.device_guard(q.device):
        grad_out = last_contiguous(grad_out)
        # A natural log-sum-exp was asked for, so it may have a gradient, and `delta_kernel` is needed for its base.
        whole_rows = needs_rows and serves_whole_rows(problem, configs.get("rows", {}), grad_out)
        own_delta = (
            needs_rows
            and not (natural_lse or whole_rows)
            and queries_make_delta(problem, configs["queries"], grad_out, out)
        )
        if own_delta:
            gradients = {"grad_out": grad_out, "out": out, "lse2": lse, "delta": torch.empty_like(lse)}
            dq = query_gradient(problem, gradients, q, configs["queries"])
        else:
            gradients = statistics(problem, grad_out, grad_lse, out, lse, natural_lse)
        # d(bias) before the keys: its partial sums are gone before the larger gradients are allocated.
        dbias = bias_gradient(problem, gradients, bias, configs["bias"]) if needs_bias else none[3]
        if not needs_rows:
            return (*none[:3], dbias)
        beside = needs_bias and row_chunks(problem, gradients, configs["bias"])[0] == 1 and not fills_memory()
        if whole_rows:
            return (*row_gradients(problem, gradients, q, k, v, configs["rows"], beside), dbias)
        if not own_delta:
            dq = query_gradient(problem, gradients, q, configs["queries"], beside)
            beside = not fills_memory()
        dk, dv = key_gradients(problem, gradients, k, v, configs["keys"], beside)
    return dq, dk, dv, dbias


def fills_memory() -> bool:
    """Whether PyTorch fills fresh memory: launches between kernels, so that none may start before the fill is seen."""
    return torch.are_deterministic_algorithms_enabled() and torch.utils.deterministic.fill_uninitialized_memory


def queries_make_delta(problem: Problem, config: dict, grad_out: Tensor, out: Tensor) -> bool:
    """Whether the kernel of dq also makes delta, so that d(out) and the output are not read once more."""
    own = config.get("gluon", {}).get("own_delta", False) and not has_few_keys(problem)
    return (
        own
        and problem.copy_engine_serves({"out": out})
        and bool(hopper_kernels(problem, config, {"grad_out": grad_out}))
    )


def serves_whole_rows(problem: Problem, config: dict, grad_out: Tensor) -> bool:
    """Whether one kernel makes dq, dk and dv: a program holds a whole row, so there must be enough of them."""
    hopper = hopper_kernels(problem, config, {"grad_out": grad_out})
    return (
        hopper is not None
        and lost_share(hopper.row_items(problem), triton_support.multiprocessors(problem.q.device)) <= MOST_LOST
    )


def lost_share(items: int, slots: int) -> float:
    """Share of the device's time that is lost when `items` of equal length run on `slots` at a time."""
    return 1.0 - items / (triton.cdiv(items, slots) * slots)


def row_gradients(
    problem: Problem,
    gradients: dict[str, Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    config: dict,
    beside: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv [B, R, H, N, D] from one pass over the scores. beside: as for `query_gradient`."""
    found = [output_like(t) for t in (q, k, v)]
    hopper_kernels(problem, config, gradients).launch_rows(problem, gradients, *found, config["gluon"], beside)
    dq, dk, dv = (as_like(gradient, t) for gradient, t in zip(found, (q, k, v)))
    return dq, dk, dv


def statistics(
    problem: Problem, grad_out: Tensor, grad_lse: Tensor | None, out: Tensor, lse: Tensor, natural_lse: bool
) -> dict[str, Tensor]:
    """grad_out with what the backward kernels need for each query: lse2 and delta [B, R, H, pitch >= NQ], fp32."""
    delta = lse.new_empty((*lse.shape[:-1], statistics_pitch(problem.NQ)))
    lse2 = torch.empty_like(delta) if natural_lse else lse
    block = 128 if problem.D <= 64 else 64
    out = last_contiguous(out)
    launch_kernel(
        delta_kernel, (triton.cdiv(problem.NQ, block) * problem.B * problem.R * problem.H,),
        out=out, grad_out=grad_out, lse=lse, grad_lse=lse if grad_lse is None else grad_lse.contiguous(),
        delta=delta, lse2=lse2, **problem.strides("o", out), **problem.strides("g", grad_out),
        R=problem.R, H=problem.H, NQ=problem.NQ, pitch=delta.shape[-1], D=problem.D,
        BLOCK_D=block_d(problem.D), BLOCK=block,
        HAS_GRAD_LSE=grad_lse is not None, NATURAL=natural_lse, WIDE=problem.wide, num_warps=4,
    )  # fmt: skip
    found = {"grad_out": grad_out, "lse2": lse2, "delta": delta}
    if problem.NK <= FEW_KEYS:
        found["minus_grad_lse"] = torch.zeros_like(delta)
        if grad_lse is not None:
            found["minus_grad_lse"][..., : problem.NQ] = -grad_lse
    if has_few_keys(problem):
        config = {"block_i": 32, "block_j": FEW_KEYS, "num_warps": 4, "num_stages": 1}
        launch_kernel(
            few_keys_delta_kernel, (triton.cdiv(problem.NQ, 32) * problem.B * problem.R * problem.H,),
            **problem.arguments(config, found, tiled_statistics=False),
            grad_lse=lse if grad_lse is None else grad_lse.contiguous(), HAS_GRAD_LSE=grad_lse is not None,
            **options(config),
        )  # fmt: skip
    return found


def few_keys(gradients: dict[str, Tensor]) -> dict[str, Tensor]:
    """`gradients` as the Triton kernels take them: with few keys they make delta themselves."""
    return gradients | {"delta": gradients.get("minus_grad_lse", gradients["delta"])}


def has_few_keys(problem: Problem) -> bool:
    """Whether the rounding of the output, in 16 bits, would be seen in the gradients."""
    return not problem.wide and problem.NK <= FEW_KEYS


def query_gradient(
    problem: Problem, gradients: dict[str, Tensor], q: Tensor, config: dict, beside: bool = False
) -> Tensor:
    """dq [B, R, H, NQ, D]. beside: it does not depend on the kernel launched before, and may start before that ends."""
    dq = output_like(q)
    if hopper := hopper_kernels(problem, config, gradients):
        hopper.launch_queries(problem, gradients, dq, config["gluon"], beside)
        return as_like(dq, q)
    programs = triton.cdiv(problem.NQ, config["block_i"]) * problem.R * problem.H * problem.B
    launch_kernel(
        queries_kernel, (programs,),
        **problem.arguments(config, few_keys(gradients), tiled_statistics=False), FEW=problem.NK <= FEW_KEYS, dq=dq,
        **problem.strides("dq", dq), **options(config),
    )  # fmt: skip
    return as_like(dq, q)


def key_gradients(
    problem: Problem, gradients: dict[str, Tensor], k: Tensor, v: Tensor, config: dict, beside: bool = False
) -> tuple[Tensor, Tensor]:
    """dk and dv [B, R, H, NK, D]. beside: as for `query_gradient`."""
    dk, dv = output_like(k), output_like(v)
    if hopper := hopper_kernels(problem, config, gradients):
        hopper.launch_keys(problem, gradients, dk, dv, config["gluon"], beside)
        return as_like(dk, k), as_like(dv, v)
    programs = triton.cdiv(problem.NK, config["block_j"]) * problem.R * problem.H * problem.B
    launch_kernel(
        keys_kernel, (programs,),
        **problem.arguments(config, few_keys(gradients), transposed_bias=True), FEW=problem.NK <= FEW_KEYS,
        dk=dk, dv=dv, **problem.strides("dk", dk), **problem.strides("dv", dv), **options(config),
    )  # fmt: skip
    return as_like(dk, k), as_like(dv, v)


def bias_gradient(problem: Problem, gradients: dict[str, Tensor], bias: Tensor, config: dict) -> Tensor:
    """d(bias) [B, H, NQ, NK] in the dtype of the bias."""
    chunks, rows_per_chunk = row_chunks(problem, gradients, config)
    shape = (problem.B, problem.H, problem.NQ, problem.NK)
    partial = bias.new_empty((chunks, *shape), dtype=torch.float32 if chunks > 1 else bias.dtype)
    if hopper := hopper_kernels(problem, config, gradients):
        hopper.launch_bias(problem, gradients, partial, rows_per_chunk, config["gluon"])
    else:
        launch_kernel(
            bias_kernel, (_bias_tiles(problem, config) * chunks,),
            **problem.arguments(config, few_keys(gradients), tiled_statistics=False), FEW=problem.NK <= FEW_KEYS,
            dbias=partial, B=problem.B, rows_per_chunk=rows_per_chunk, **options(config),
        )  # fmt: skip
    return as_like(sum_of_chunks(partial, bias.dtype) if chunks > 1 else partial[0], bias)


def sum_of_chunks(partial: Tensor, dtype: torch.dtype) -> Tensor:
    """[B, H, NQ, NK] in `dtype`: partial [chunks, B, H, NQ, NK], fp32, added up in order."""
    total = partial.new_empty(partial.shape[1:], dtype=dtype)
    block = 1024
    launch_kernel(
        sum_kernel, (triton.cdiv(total.numel(), block),),
        partial=partial, total=total, size=total.numel(), CHUNKS=partial.shape[0], BLOCK=block, num_warps=4,
    )  # fmt: skip
    return total


def row_chunks(problem: Problem, gradients: dict[str, Tensor], config: dict) -> tuple[int, int]:
    """Number of chunks of rows whose sums of d(bias) are made apart, and rows in each but the last."""
    if hopper := hopper_kernels(problem, config, gradients):
        config = config["gluon"]
        tiles = hopper.bias_tiles(problem, config)
    else:
        tiles = _bias_tiles(problem, config)
    slots = config["programs_per_sm"] * triton_support.multiprocessors(problem.q.device)
    rows_per_chunk = triton.cdiv(problem.R, chunk_count(tiles, slots, problem.R))
    return triton.cdiv(problem.R, rows_per_chunk), rows_per_chunk


def _bias_tiles(problem: Problem, config: dict) -> int:
    tiles = triton.cdiv(problem.NQ, config["block_i"]) * triton.cdiv(problem.NK, config["block_j"])
    return tiles * problem.B * problem.H


@functools.lru_cache(maxsize=1024)
def chunk_count(tiles: int, slots: int, rows: int) -> int:
    """Number of chunks of rows that loses least time to a part-filled last wave of programs; fewer when equal.

    Args:
        tiles: tiles of d(bias). slots: programs that the device runs at once. rows: R.
    """

    def cost(chunks: int) -> float:
        return round(triton.cdiv(tiles * chunks, slots) * triton.cdiv(rows, chunks) * slots / (tiles * rows), 2)

    return min(range(1, min(MAX_CHUNKS, rows) + 1), key=lambda chunks: (cost(chunks), chunks))
