"""Measure launch configurations on the device at hand and write its table, for `megafold tune`."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path

import torch
from tqdm import tqdm

from megafold import triton_support
from megafold.evofusion import cases
from megafold.evofusion.cases import Case, Draw
from megafold.evofusion.launch import overridden

TOKENS = 512
WORK: dict[str, Callable[[Draw], Case]] = {
    # The operator whose time decides over the kernels that have its name first.
    "weight_gradient": lambda draw: cases.norm_project_case(draw, (1, TOKENS, TOKENS)),
    "triangle": lambda draw: cases.triangle_multiplication_case(draw, TOKENS),
    "norm_project": lambda draw: cases.norm_project_case(draw, (1, TOKENS, TOKENS)),
    "transition": lambda draw: cases.transition_case(draw, (1, TOKENS, TOKENS)),
    "attention_output": lambda draw: cases.attention_output_case(draw, (1, TOKENS, TOKENS)),
    "adaptive_norm": lambda draw: cases.adaptive_norm_case(draw, (48, 8 * TOKENS)),
    "condition_gate": lambda draw: cases.condition_gate_case(draw, (48, 8 * TOKENS)),
    "windowed_attention": lambda draw: cases.windowed_attention_case(draw, 8 * TOKENS, batch=48),
    "pair_weighted": lambda draw: cases.pair_weighted_averaging_case(draw, TOKENS, TOKENS),
    "smooth_lddt": lambda draw: cases.smooth_lddt_case(draw, 8 * TOKENS, batch=4),
}


KEPT = ("gluon", "joint")
"""What is not tuned: candidates have it as the configuration does. They are timed without Gluon's kernels, whose times
say nothing about the blocks of the kernels that run where those do not."""

REPLACED = {
    "triangle_product_gradient": "triangle_output_gradient",
    "triangle_gate_gradient": "triangle_input_gradient",
}
"""Kernels in whose place a Gluon kernel runs that another configuration asks for."""


def candidates(config: dict, arch: str) -> Iterator[dict]:
    """The configuration, and its neighbours with other blocks, warps and stages."""
    stages = (1, 2, 3) if arch.startswith("sm_") else (1, 2)
    kept = {name: config[name] for name in KEPT if name in config}
    if "block_l" not in config:
        yield from ({**config, "num_warps": warps} for warps in (1, 2, 4, 8))
        return
    for block_l, block_o, warps, stage in itertools.product((32, 64, 128), (16, 32, 64, 128), (4, 8), stages):
        if block_l * block_o <= 8192:
            found = {"block_l": block_l, "block_o": block_o, "num_warps": warps, "num_stages": stage, **kept}
            if "programs" in config:
                yield from ({**found, "programs": n} for n in (1, 2, 3, 4))
            elif "resident" in config:
                yield from ({**found, "resident": n} for n in (0, 1))
            else:
                yield found


def _without_gluon(config: dict) -> dict:
    return {name: value for name, value in config.items() if name != "gluon"}


def tune(out: Path | None = None, *, kernels: tuple[str, ...] = (), progress: bool = True) -> Path:
    """Time every candidate of each kernel in bf16, inside of its operator forward and backward, and keep the fastest.

    Candidates that spill or do not fit lose by their time, or are skipped. fp32 keeps the shipped configurations.

    Args:
        out: directory; the table goes to OUT/evofusion/<architecture>.json, used where `MEGAFOLD_TABLES` names
            OUT. None: it takes the place of the shipped one.
        kernels: names in the table; all by default.

    Returns:
        Path of the table.

    Raises:
        RuntimeError: there is no device that Triton kernels run on.
    """
    device, table = triton_support.table_to_tune("evofusion")
    arch = triton_support.architecture(device.index)
    for kernel in tqdm(kernels or list(table["configs"]), disable=not progress, desc="evofusion"):
        run, replaced = _runner(kernel, device), REPLACED.get(kernel)
        beside = overridden(replaced, _without_gluon(table["configs"][replaced]["16"])) if replaced else nullcontext()
        for bits, config in table["configs"][kernel].items():
            if bits == "16" or kernel.startswith("smooth_lddt"):
                tried = [config, *candidates(config, arch)]
                with beside:
                    best = min(tried, key=lambda c, kernel=kernel, run=run: _time(kernel, run, _without_gluon(c)))
                table["configs"][kernel][bits] = best
    return triton_support.write_table(table, "evofusion", out)


def _runner(kernel: str, device: torch.device) -> Callable[[], object]:
    """The pass of the kernel's operator that it belongs to: the forward, or forward and backward."""
    make = next(make for name, make in WORK.items() if kernel.startswith(name))
    case = make(Draw(torch.bfloat16, device))
    leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
    if "gradient" not in kernel:
        return lambda: case.operator(**leaves)
    first = case.operator(**leaves)
    cotangents = [torch.randn_like(t.detach()) for t in ([first] if isinstance(first, torch.Tensor) else first)]

    def both() -> object:
        result = case.operator(**leaves)
        result = [result] if isinstance(result, torch.Tensor) else list(result)
        return torch.autograd.grad(result, list(leaves.values()), cotangents)

    return both


def _time(kernel: str, run: Callable[[], object], config: dict) -> float:
    """Median time of one call in ms; infinite when the configuration does not fit the device."""
    from triton.runtime.errors import OutOfResources, PTXASError
    from triton.testing import do_bench

    try:
        with overridden(kernel, config):
            return do_bench(run, warmup=5, rep=20, return_mode="median")
    except (OutOfResources, PTXASError):
        return math.inf
