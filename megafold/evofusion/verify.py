"""Quick correctness checks of the operators on the device at hand, for `megafold verify`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from megafold import triton_support
from megafold.evofusion import cases
from megafold.evofusion.cases import Case, Draw
from megafold.evofusion.operator import DTYPES
from megafold.testing import CheckResult

CASES: dict[str, Callable[[Draw], Case]] = {
    "triangle multiplication outgoing": lambda draw: cases.triangle_multiplication_case(
        draw, 97, masked=True, shared="row"
    ),
    "triangle multiplication incoming": lambda draw: cases.triangle_multiplication_case(
        draw, 40, batch=2, mix="incoming", keep_operands=True, shared="col"
    ),
    "transition": lambda draw: cases.transition_case(draw, (97, 41)),
    "transition of width 801": lambda draw: cases.transition_case(draw, (201,), 801, 1602),
    "projections": lambda draw: cases.norm_project_case(draw, (2, 33, 41), passes=True),
    "attention output": lambda draw: cases.attention_output_case(draw, (2, 33, 41), shared="row"),
    "conditioned transition": lambda draw: cases.conditioned_transition_case(draw, (3, 203)),
    "conditioned transition, conditioning of 801": lambda draw: cases.conditioned_transition_case(
        draw, (2, 101), 768, 801
    ),
    "gate of wide rows": lambda draw: cases.gated_case(draw, (3, 203), 1024),
    "windowed attention": lambda draw: cases.windowed_attention_case(draw, 200, batch=3, masked=True),
    "outer product mean": lambda draw: cases.outer_product_mean_case(draw, 33, 41, masked=True),
    "pair-weighted averaging": lambda draw: cases.pair_weighted_averaging_case(draw, 33, 41),
    "smooth lDDT": lambda draw: cases.smooth_lddt_case(draw, 301),
}
SMALL: dict[str, Callable[[Draw], Case]] = {
    "triangle multiplication": lambda draw: cases.triangle_multiplication_case(draw, 17, 32, masked=True, shared="row"),
    "smooth lDDT": lambda draw: cases.smooth_lddt_case(draw, 101),
    "outer product mean": lambda draw: cases.outer_product_mean_case(draw, 17, 13, masked=True),
    "pair-weighted averaging": lambda draw: cases.pair_weighted_averaging_case(draw, 17, 13),
}
"""Where references run: what is still computed another way than its reference, and one that is not."""

COORDINATES = "smooth lDDT"


def verify(device: torch.device | str) -> list[CheckResult]:
    """Compare outputs and gradients with float64 under the error budget, and three runs with each other.

    Args:
        device: where to run; on a CPU, or without a supported Triton, the references run and fewer cases are checked.

    Returns:
        One result per case, dtype and quantity, in the order in which they ran.
    """
    device = torch.device(device)
    kernels = triton_support.runs_kernels(device)
    results = [CheckResult("evofusion backend", True, triton_support.why_not(device) or "Triton kernels")]
    for name, make in (CASES if kernels else SMALL).items():
        for dtype in DTYPES if kernels and name != COORDINATES else (torch.float32,):
            label = f"evofusion {name} {str(dtype).removeprefix('torch.')}"
            results += [replace(result, name=f"{label} {result.name}") for result in make(Draw(dtype, device)).check()]
    return results
