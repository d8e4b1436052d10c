"""The Hopper kernels as cases of the portability gate: compiled for sm_90 without a device."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from triton.experimental.gluon import language as gl

from megafold.evofusion.hopper.adaptive_norm import adaptive_norm_gradient_kernel_sm90
from megafold.evofusion.hopper.input_gradient import input_gradient_kernel_sm90
from megafold.evofusion.hopper.project import project_kernel_sm90
from megafold.evofusion.hopper.transition import transition_gradient_kernel_sm90
from megafold.evofusion.hopper.transition_forward import transition_kernel_sm90
from megafold.evofusion.hopper.triangle_both import triangle_both_kernel_sm90
from megafold.evofusion.hopper.triangle_operands import triangle_operands_kernel_sm90
from megafold.evofusion.hopper.triangle_output import triangle_output_kernel_sm90
from megafold.evofusion.hopper.triangle_output_weights import triangle_output_weights_kernel_sm90
from megafold.evofusion.hopper.triangle_result import triangle_result_kernel_sm90
from megafold.testing import OfflineKernel, compile_offline

TYPES = {"bf16": gl.bfloat16, "fp32": gl.float32}
PART, ROWS, DEALT, HALF, MATRIX, PLANES = (
    [64, 32],
    [64, 128],
    [4, 4, 4, 2, 128],
    [2, 4, 4, 2, 128],
    [64, 128],
    [4, 4, 4, 2, 64],
)
KERNELS = {
    # kernel, descriptors but for rows of x, constants; "held": tiles of x in shared memory, of which two are 32 KB
    "project": (
        project_kernel_sm90,
        {"w": HALF, "w_heads": [16, 128]},
        {"C": 128, "COUNT": 4, "STEP": 64, "STAGES": "twice", "HEADS": 4, "HAS_BETA": True, "BIASED": 128},
    ),
    "input_gradient": (
        input_gradient_kernel_sm90,
        {"w": DEALT, **{f"grad{p}": ROWS for p in range(4)}},
        {"C": 128, "COUNT": 4, "WIDTH": 128, "STEP": 0, "HELD": "held", "HEADS": 4, "OTHER": True},
    ),
    "transition": (
        transition_kernel_sm90,
        {"w_in": MATRIX, "w_out": PLANES},
        {"C": 128, "PARTS": 4, "STEP": 64, "NORM": True, "RESIDUAL": True, "SLOTS": "held"},
    ),
    "transition_gradient": (
        transition_gradient_kernel_sm90,
        {"w_in": HALF, "w_out": HALF},
        {"C": 128, "INNER": 256, "STEP": 64, "NORM": True, "COPY": True, "SLOTS": "held"},
    ),
    "adaptive_norm_gradient": (
        adaptive_norm_gradient_kernel_sm90,
        {"grad_out": PART, "w": [1, 4, 4, 2, 128], "w_t": [4, 4, 4, 2, 32]},
        {"C": 128, "STEP": 32, "HELD": "held", "OTHERS": True},
    ),
    "triangle_project": (
        triangle_operands_kernel_sm90,
        {"x": DEALT, "w": MATRIX},
        {"C": 128, "PAIRS": 128, "STAGES": 3, "NORM": True, "HAS_MASK": True},
    ),
    "triangle_output": (
        triangle_result_kernel_sm90,
        {"product": [128, 64], "w_gate": HALF, "w_out": HALF},
        {"C": 128, "STEP": 64, "HELD": "twice", "HAS_DROPPED": True, "RESIDUAL": True},
    ),
    "triangle_output_gradient": (
        triangle_output_kernel_sm90,
        {"product": PLANES, "w": [1, 4, 4, 2, 128], "w_t": [4, 4, 4, 2, 32], "grad_product": PLANES}
        | {"grad_gate": [1, 4, 4, 2, 64]},
        {"C": 128, "STEP": 32, "HELD": "held", "HAS_DROPPED": True},
    ),
    "triangle_output_weights": (
        triangle_output_weights_kernel_sm90,
        {"product": PLANES, "w": [1, 4, 4, 2, 128], "grad_product": PLANES, "grad_gate": [1, 4, 4, 2, 64]},
        {"C": 128, "STEP": 32, "HAS_DROPPED": False, "EPS": 1e-5} | {"REGISTERS": 160, "OF_WEIGHTS": 168},
    ),
    "triangle_both": (
        triangle_both_kernel_sm90,
        {"w": MATRIX, "grads": [64, 64]},
        {"C": 128, "STEP": 64, "STAGES": 3, "HAS_MASK": True, "RESIDUAL": True},
    ),
}
VARIANTS = {
    "project": ({"BIASED": 512}, {"BIASED": 0, "HEADS": 0, "HAS_BETA": False}, {"COUNT": 1, "BIASED": 0, "HEADS": 0}),
    "input_gradient": ({"HEADS": 16}, {"HEADS": 0, "OTHER": False}, {"HEADS": 0, "STEP": 128}),
    "transition": ({"NORM": False}, {"RESIDUAL": False}),
    "transition_gradient": ({"COPY": False}, {"NORM": False, "COPY": False}),
    "adaptive_norm_gradient": ({"OTHERS": False},),
    "triangle_project": ({"NORM": False}, {"HAS_MASK": False}),
    "triangle_output": ({"HAS_DROPPED": False}, {"RESIDUAL": False}),
    "triangle_output_gradient": ({"HAS_DROPPED": False},),
    "triangle_output_weights": ({"HAS_DROPPED": True},),
    "triangle_both": ({"HAS_MASK": False}, {"RESIDUAL": False}),
}
"""What else calls may ask for: compiled by the full gate."""

ONLY_BF16 = ("triangle_project", "triangle_both", "triangle_output_weights")
"""Kernels whose descriptors are all of the dtype of products."""

STREAM = ("x", "grad_out", "other", "grad_x", "x_again", "out", "cond", "other_x", "other_cond", "grad_cond")
"""Arguments in the dtype of the residual stream, where a kernel has them."""

PRECISE = ("partial", "shift", "gate_shift", "out_shift", "rstd", "rstds")
LENGTHS = ("M", "L", "N", "d_i", "d_j")


@dataclass(frozen=True)
class HopperCase:
    """One kernel to compile: its name in the tables, the dtype of the residual stream ("bf16" or "fp32"), and what is
    not as in KERNELS."""

    kernel: str
    dtype: str
    arch: str = "sm_90"
    changes: tuple[tuple[str, object], ...] = ()

    def __str__(self) -> str:
        changes = "".join(f"-{name}={value}" for name, value in self.changes)
        return f"sm_90-hopper-{self.kernel}-{self.dtype}{changes}"

    def compile(self) -> OfflineKernel:
        """Compile for lengths that are multiples of 16. What counts as spilled is what moves in the inner loops."""
        kernel, descriptors, constants = KERNELS[self.kernel]
        constants = constants | dict(self.changes)
        held = 2 if self.dtype == "bf16" else 1
        constants = {name: {"held": held, "twice": 2 * held}.get(value, value) for name, value in constants.items()}
        constants.setdefault("REGISTERS", 240)
        signature = {name: _descriptor(block, "bf16") for name, block in descriptors.items()}
        signature |= {"tiles": "i32", "eps": "fp32", "mask": "*u8:16"} | dict.fromkeys(LENGTHS, "i32:16")
        signature |= dict.fromkeys(PRECISE, "*fp32:16")
        for name in kernel.arg_names:
            stream = self.dtype if name in STREAM else "bf16"
            tile = name in ("x", "cond") or (name == "grad_out" and self.kernel == "transition_gradient")
            block = PART if name == "x" and self.kernel == "adaptive_norm_gradient" else ROWS
            signature.setdefault(name, _descriptor(block, stream) if tile else f"*{stream}:16")
        compiled = compile_offline(kernel, signature, constants, self.arch, {"num_warps": 4})
        return replace(compiled, spill_bytes=4 * compiled.loop_spills)


def cases(full: bool = False) -> Iterator[HopperCase]:
    """Every kernel, with a residual stream in bf16 and in fp32; in all VARIANTS with `full`."""
    for kernel in KERNELS:
        for dtype in ("bf16",) if kernel in ONLY_BF16 else ("bf16", "fp32"):
            for changes in ({}, *(VARIANTS[kernel] if full else ())):
                yield HopperCase(kernel, dtype, changes=tuple(changes.items()))


def _descriptor(block: list[int], dtype: str) -> str:
    layout = gl.NVMMASharedLayout.get_default_for(block, TYPES[dtype])
    return f"tensordesc<{dtype}{block},{layout!r}>"
