"""Measure launch configurations on the device at hand and write its table, for `megafold tune`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tqdm import tqdm

from megafold import triton_support
from megafold.evoflash3d import gradients
from megafold.evoflash3d.forward import launch_forward
from megafold.evoflash3d.launch import Problem

LENGTHS = {"128": 128, "256": 256, "512": 512, "1024": 768, "longer": 1536}
"""Length that stands for each bucket."""

HEADS = 4
NO_OFFSETS = [0, 0, 0, 0, 0]


def candidates(kernel: str, bits: str, arch: str) -> Iterator[dict]:
    """Configurations worth measuring for one kernel and word size."""
    nvidia = arch.startswith("sm_")
    tiles = ((64, 64, 4), (128, 64, 4), (64, 128, 4), (64, 32, 4), (32, 64, 4), (128, 64, 8)) if bits == "16" else (
        (64, 32, 4), (32, 64, 4), (32, 32, 4), (64, 64, 8)
    )  # fmt: skip
    stages = (2, 3) if nvidia else (1, 2)
    limits = (None, 128) if nvidia else (None,)
    # Where there is a copy engine it won every comparison; tensors that it cannot read run the same tiles without.
    tma = bits == "16" and nvidia and int(arch.removeprefix("sm_")) >= 90
    for (block_i, block_j, warps), stage, limit in itertools.product(tiles, stages, limits):
        config = {"block_i": block_i, "block_j": block_j, "num_warps": warps, "num_stages": stage}
        if limit:
            config["maxnreg"] = limit
        if tma:
            config["tma"] = True
        if kernel == "bias":
            config["programs_per_sm"] = 2
        yield config


def hopper_candidates(kernel: str, bits: str, head_dim: int, arch: str) -> Iterator[dict]:
    """Configurations of the Hopper kernels worth measuring: the "gluon" part of an entry.

    rows: rows that share a tile of the bias. parts, warps: groups of warps for one row, and their size. block: keys
    (`keys`: queries) of a tile. step: how many of them go through a product at once. stages: tiles under way.
    registers: of a thread that multiplies. shares: `forward` adds up rows at the end.
    """
    if arch != "sm_90" or bits != "16" or head_dim > 64 or not triton_support.has_gluon():
        return
    roomy = {"rows": 1, "parts": 2, "warps": 4, "block": 64, "step": 64, "registers": 232, "programs_per_sm": 1}
    shared = {**roomy, "rows": 2, "registers": 112}
    yield {**roomy, "stages": 4 if head_dim == 32 else 3}
    if kernel == "forward":
        yield {**shared, "stages": 6 if head_dim == 32 else 3}
        yield {**shared, "stages": 6 if head_dim == 32 else 3, "shares": True}
    elif head_dim == 32:
        for stages in (4, 6 if kernel == "bias" else 5):
            yield {**shared, "block": 128 if kernel == "bias" else 64, "step": 32, "stages": stages}
    if head_dim == 32 and kernel != "bias":
        step = 64 if kernel == "forward" else 32
        yield {**shared, "parts": 1, "warps": 8, "block": 128, "step": step, "stages": 2}


def tune(out: Path | None = None, *, head_dims: tuple[int, ...] = (32, 64), progress: bool = True) -> Path:
    """Time every candidate for bf16 and fp32, each head dim and each length bucket, and write the fastest.

    Compiling takes most of it: some 300 kernels at 1-3 s for the two default head dims.

    Args:
        out: directory; the table goes to OUT/evoflash3d/<architecture>.json, used where `MEGAFOLD_TABLES` names
            OUT. None: it takes the place of the shipped one.
        head_dims: 32, 64 and 128 are what tables distinguish; head dims left out keep the shipped configuration.

    Returns:
        Path of the table.

    Raises:
        RuntimeError: there is no device that Triton kernels run on.
    """
    device, table = triton_support.table_to_tune("evoflash3d")
    arch = triton_support.architecture(device.index)
    work = list(itertools.product((("16", torch.bfloat16), ("32", torch.float32)), head_dims, LENGTHS))
    for (bits, dtype), head_dim, bucket in tqdm(work, disable=not progress, desc="evoflash3d"):
        for kernel, run in _runners(LENGTHS[bucket], head_dim, dtype, device).items():
            old = table["configs"][kernel][bits][f"D{head_dim}"][bucket]
            plain = {name: value for name, value in old.items() if name != "gluon"}
            best = _fastest(run, [plain, *candidates(kernel, bits, arch)])
            # The Hopper kernels come on top: what they cannot compute runs the best of the others.
            # What a kernel does for its neighbours is not seen when it runs alone, and stays as it is.
            kept = {name: value for name, value in old.get("gluon", {}).items() if name in ("overlap", "own_delta")}
            hopper = [{**best, "gluon": gluon | kept} for gluon in hopper_candidates(kernel, bits, head_dim, arch)]
            table["configs"][kernel][bits][f"D{head_dim}"][bucket] = _fastest(run, [best, *hopper])
    return triton_support.write_table(table, "evoflash3d", out)


def _runners(
    length: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> dict[str, Callable[[dict], object]]:
    """Each kernel as a function of its configuration, on random inputs of triangle attention."""
    rows = min(length, 256)  # enough programs to fill a device; more only makes tuning slower

    def draw() -> torch.Tensor:
        return torch.randn(1, rows, length, HEADS, head_dim, device=device, dtype=dtype).transpose(2, 3)

    q, k, v, g = (draw() for _ in range(4))
    bias = torch.randn(1, HEADS, length, length, device=device, dtype=dtype)
    arguments = (q, k, v, bias, None, None, head_dim**-0.5, 0.0, NO_OFFSETS)
    out, lse = launch_forward(*arguments, natural_lse=False)
    problem = Problem(*arguments)
    shared = gradients.statistics(problem, g, None, out, lse, natural_lse=False)
    return {
        "forward": lambda config: launch_forward(*arguments, natural_lse=False, config=config),
        "queries": lambda config: gradients.query_gradient(problem, shared, q, config),
        "keys": lambda config: gradients.key_gradients(problem, shared, k, v, config),
        "bias": lambda config: gradients.bias_gradient(problem, shared, bias, config),
    }


def _fastest(run: Callable[[dict], object], configs: list[dict]) -> dict:
    return min(configs, key=lambda config: _time(run, config))


def _time(run: Callable[[dict], object], config: dict) -> float:
    """Median time of one call in ms; infinite when the configuration does not fit the device."""
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.testing import do_bench

    try:
        return do_bench(lambda: run(config), warmup=5, rep=20, return_mode="median")
    except (OutOfResources, PTXASError):
        return math.inf
