"""Every kernel and launch configuration that ships, as cases for compiling without a device."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from megafold import triton_support
from megafold.evofusion.launch import options
from megafold.testing import OfflineKernel, compile_offline


@dataclass(frozen=True)
class Kernel:
    """How a table's kernel is compiled by itself.

    Attributes:
        module, name: where the kernel is, below megafold.evofusion.
        pointers: arguments that are pointers to the dtype of products. constants: compile-time arguments besides the
            blocks; "width" stands for the width of rows, "twice" and "head" for twice and half of it; those the kernel
            lacks do not count.
        others: Triton type of other arguments that are not 32-bit integers.
        matrix: whether it multiplies matrices. resident: name of the kernel that runs in its place where a
            configuration says so, with all weights in shared memory.
    """

    module: str
    name: str
    pointers: tuple[str, ...]
    constants: dict[str, object]
    others: dict[str, str] = field(default_factory=dict)
    matrix: bool = True
    resident: str = ""


TRIANGLE = (
    "x",
    "x_hat",
    "product",
    "w",
    "w_gate",
    "w_out",
    "dropped",
    "out",
    "grad_out",
    "grads",
    "grad_x",
    "operands",
)
PROJECT = ("x", "gamma", "beta", "w", "bias", "w_heads", *(f"{kind}{p}" for kind in ("out", "grad") for p in range(4)))
TRANSITION = ("x", "gamma", "beta", "w_in", "w_out", "out", "grad_out", "hidden", "grads", "upstream")
OUTPUT = ("attended", "gate", "w", "dropped", "residual", "out", "grad_out", "grad_attended", "grad_gate", "gated")
CONDITIONED = ("x", "y", "cond", "cond_gamma", "w", "bias", "w_gamma", "gamma_bias", "w_beta", "residual", "out")
CONDITIONED_GRADIENTS = (
    *CONDITIONED,
    *("other_x", "other_cond", "grad_out", "grad_x", "grad_y", "grad_cond", "grad_gate"),
)
AVERAGED = (
    *("msa", "gamma", "beta", "w", "values", "gates", "averaged", "dropped", "out", "x_hats"),
    *("grad_out", "grad_averaged", "grad_gates", "grad_values", "grad_msa"),
)
WINDOWED = ("q", "k", "v", "bias", "out", "grad_out", "dq", "dk", "dv", "dbias")
SHARED = {"C": "width", "HAS_MASK": True, "HAS_DROPPED": True, "RESIDUAL": True}
HEADS = {"BLOCK_H": 16, "COUNT": 4, "HEADS": 4, "HAS_BETA": True, "BIASED": 512, "C": "width", "OUTPUTS": "width"}
WINDOWS = {
    "W": 27,
    "D": "head",
    "BLOCK_Q": 32,
    "BLOCK_K": 64,
    "BLOCK_D": "head",
    "HAS_MASK": True,
    "HAS_WINDOWED": True,
}
PAIRS = dict.fromkeys(("pred", "true", "sums", "scale", "grad"), "*fp32:16") | {
    "nucleotide": "*u8:16",
    "counts": "*i32:16",
    "nucleic_acid_cutoff": "fp32",
    "other_cutoff": "fp32",
}
KERNELS = {
    "weight_gradient": Kernel(
        "weight_gradient",
        "weight_gradient_kernel",
        ("a0", "a1", "a2", "a3", "x"),
        {"BLOCK_C": "width", "EVEN_O": True, "NORM": True, "A_COLUMNS": False, "X_COLUMNS": False}
        | {"COUNT": 1, "FLAT": False, "SUMS": True, "A_SIDE": 0},
        {"partial": "*fp32:16"},
    ),
    **{
        f"triangle_{name}": Kernel(
            "triangle_multiplication.kernels",
            f"{name}_kernel",
            (*TRIANGLE, "grad_product"),
            {**SHARED, "NORM": True},
            dict.fromkeys(("shift", "gate_shift", "out_shift", "rstd"), "*fp32:16"),
        )
        for name in (
            "project",
            "output",
            "output_gradient",
            "product_gradient",
            "gate_gradient",
            "input_gradient",
        )
    },
    "norm_project": Kernel(
        "norm_project.kernels", "project_kernel", (*PROJECT, "heads"), HEADS, resident="resident_project_kernel"
    ),
    "norm_project_gradient": Kernel(
        "norm_project.kernels",
        "gradient_kernel",
        (*PROJECT, "grad_heads", "other", "grad_x", "x_hats"),
        {**HEADS, "OTHER": True, "WIDE": "width"},
        resident="resident_gradient_kernel",
    ),
    **{
        f"pair_weighted_{name}": Kernel(
            "msa.kernels",
            f"{name}_kernel",
            AVERAGED,
            {"C": "head", "HEADS": 8, "E": 32, "HAS_DROPPED": True, "RESIDUAL": True},
            {"partial": "*fp32:16"},
        )
        for name in ("values", "output", "output_gradient", "input_gradient")
    },
    "transition": Kernel("transition.kernels", "transition_kernel", TRANSITION, {**SHARED, "NORM": True}),
    "transition_gradient": Kernel(
        "transition.kernels",
        "gradient_kernel",
        TRANSITION,
        {"C": "width", "INNER": "twice", "NORM": True, "COPY": True},
        resident="resident_gradient_kernel",
    ),
    "attention_output": Kernel(
        "attention_output.kernels", "output_kernel", OUTPUT, {**SHARED, "INNER": "width", "GATED": True}
    ),
    "attention_output_gradient": Kernel(
        "attention_output.kernels",
        "gradient_kernel",
        (*OUTPUT, "scaled"),
        {**SHARED, "INNER": "width", "GATED": True, "COPY": True},
    ),
    "adaptive_norm": Kernel("conditioned.kernels", "adaptive_norm_kernel", CONDITIONED, {**SHARED, "D": "width"}),
    "adaptive_norm_gradient": Kernel(
        "conditioned.kernels",
        "adaptive_norm_gradient_kernel",
        CONDITIONED_GRADIENTS,
        {**SHARED, "D": "width", "OTHERS": True},
    ),
    "condition_gate": Kernel("conditioned.kernels", "condition_gate_kernel", CONDITIONED, {**SHARED, "D": "width"}),
    "condition_gate_gradient": Kernel(
        "conditioned.kernels", "condition_gate_gradient_kernel", CONDITIONED_GRADIENTS, {**SHARED, "D": "width"}
    ),
    "windowed_attention": Kernel(
        "windowed_attention.kernels",
        "forward_kernel",
        WINDOWED,
        WINDOWS,
        {"lse": "*fp32:16", "windowed_mask": "*u8:16", "scale": "fp32"},
    ),
    "windowed_attention_gradient": Kernel(
        "windowed_attention.kernels",
        "gradient_kernel",
        WINDOWED,
        WINDOWS,
        {"lse": "*fp32:16", "windowed_mask": "*u8:16", "scale": "fp32"},
    ),
    "smooth_lddt": Kernel("smooth_lddt.kernels", "score_kernel", (), SHARED, PAIRS, matrix=False),
    "smooth_lddt_gradient": Kernel("smooth_lddt.kernels", "gradient_kernel", (), SHARED, PAIRS, matrix=False),
}
ROWS = ("x", "out", "copy", "grad", "other", "pre", "hidden", "gamma_bias", "bias", "grad_x", "grad_pre", "y", "grad_y")
ROWS += ("w0", "w1", "gamma")
FLAGS = {"COPY": True, "ONES": True, "SCALE": True, "OTHER": 1, "RESIDUAL": True, "HAS_BETA": True, "HAS_BIAS": True}
FINISHED = ("weight0", "weight1", "gamma", "beta", "grad0", "grad1", "bias")
SHARES = dict.fromkeys((f"{kind}{p}" for kind in ("products", "sums", "shares") for p in range(2)), "*fp32:16")
NORMS = {"NORM0": True, "NORM1": True, "HAS_BETA": True, "HAS_BIAS": True, "TURNED0": False, "TURNED1": False}
PREPARED = tuple(f"{kind}{p}" for kind in ("w", "out") for p in range(4))
TRIANGLE_NORMS = {
    "triangle_fold": ("fold", ("w0", "w1", "gamma", "beta", "w"), {}),
    "triangle_normalize": ("normalize", ("x", "x_hat"), {"block_l": 32}),
    "triangle_normalize_product": ("normalize_product", ("product", "grads"), {"block_l": 32}),
}
JOINED = ("w_in", "w_gate", "w_out", "gamma", "beta", "out_gamma", "out_beta", "w", "dealt", "transposed")
JOINED += tuple(f"grad_{name}" for name in ("in", "gate", "out", "gamma", "beta", "out_gamma", "out_beta"))
PRODUCTS = ("products", "sums", "out_products", "out_sums", "shift")
FIXED = {
    # Kernels with one configuration everywhere: over whole rows of 801 elements, or over blocks of them.
    **{
        kernel: (
            Kernel(
                "triangle_multiplication.kernels",
                f"{name}_kernel",
                pointers,
                {**SHARED, "BLOCK": 16},
                {"shift": "*fp32:16", "rstd": "*fp32:16"},
                matrix=False,
            ),
            config,
        )
        for kernel, (name, pointers, config) in TRIANGLE_NORMS.items()
    },
    **{
        f"triangle_{name}": (
            Kernel(
                "triangle_multiplication.joined",
                f"{name}_kernel",
                JOINED,
                {"C": "width", "BLOCK": block},
                dict.fromkeys(PRODUCTS, "*fp32:16"),
                matrix=False,
            ),
            {},
        )
        for name, block in (("fold_all", 16), ("finish", 8))
    },
    **{
        name: (
            Kernel(
                "weight_gradient",
                "weight_gradient_kernel",
                ("a0", "a1", "a2", "a3", "x"),
                {"BLOCK_C": 64, "EVEN_O": True, "NORM": False, "A_COLUMNS": False, "X_COLUMNS": False}
                | {"COUNT": 1, "FLAT": flat, "SUMS": True, "A_SIDE": 32},
                {"partial": "*fp32:16"},
            ),
            {"block_l": 64, "block_o": 64, "num_warps": 4, "num_stages": 3},
        )
        for name, flat in (("weight_gradient_by_head", True), ("weight_gradients_by_head", False))
    },
    **{
        name: (
            Kernel("weight_finish", "finish_kernel", FINISHED, {**NORMS, **flags, **blocks}, SHARES, matrix=False),
            {"block_o": block_o, "num_warps": num_warps},
        )
        for name, flags, blocks, block_o, num_warps in (
            ("finish", {"PARTS": 2}, {"BLOCK_S": 32, "BLOCK_C": 32}, 2, 8),
            ("finish_many", {"PARTS": 2}, {"BLOCK_S": 64, "BLOCK_C": 32}, 2, 16),
            ("finish_whole", {"PARTS": 1}, {"BLOCK_S": 1, "BLOCK_C": 128}, 32, 8),
        )
    },
    "two_weight_gradients": (
        Kernel(
            "weight_gradient",
            "two_weight_gradients_kernel",
            ("a0", "a1", "a2", "a3", "x", "other_a", "other_x"),
            {"COUNT": 4, "OTHER_BLOCK_O": 64, "BLOCK_C": "width", "EVEN_O": True, "OTHER_EVEN_O": False, "FLAT": True}
            | {"OTHER_FLAT": True, "SUMS": True, "OTHER_SUMS": True, "OTHER_A_COLUMNS": True},
            {"partial": "*fp32:16", "other_partial": "*fp32:16"},
        ),
        {"block_l": 64, "block_o": 64},
    ),
    "finish_norm": (
        Kernel(
            "weight_finish",
            "finish_norm_kernel",
            ("grad_gamma", "grad_beta"),
            {"BLOCK_S": 128, "BLOCK_C": 8},
            {"shares": "*fp32:16"},
            matrix=False,
        ),
        {},
    ),
    "prepare": (
        Kernel(
            "weights",
            "prepare_kernel",
            PREPARED,
            {"COUNT": 4, "KIND0": 0, "KIND1": 1, "KIND2": 2, "KIND3": 1, "BLOCK": 32},
            matrix=False,
        ),
        {},
    ),
    **{
        name: (Kernel("rows", f"{name}_kernel", (*ROWS, "residual"), {**FLAGS, "BLOCK_C": 1024}, matrix=False), config)
        for name, config in (
            ("normalize", {"block_l": 2}),
            ("fold", {"block_l": 2}),
            ("normalize_gradient", {"block_l": 2}),
            ("scale_shift", {"block_l": 2}),
            ("scale_shift_gradient", {"block_l": 2}),
            ("swiglu", {"block_l": 2}),
            ("swiglu_gradient", {"block_l": 2}),
            ("gate", {"block_l": 2}),
            ("gate_gradient", {"block_l": 2}),
        )
    },
}
RESIDENT = {"block_l": 64, "block_o": 64, "num_warps": 8, "num_stages": 1, "resident": 1}
"""Configuration of kernels with all weights in shared memory, which no table asks for yet: they have to be measured."""


@dataclass(frozen=True)
class Case:
    """One kernel to compile: architecture, name in the tables, dtype ("bf16", "fp16", "fp32"), width, configuration."""

    arch: str
    kernel: str
    dtype: str
    width: int
    config: dict = field(hash=False)

    def __str__(self) -> str:
        name = f"{self.arch}-{self.kernel}-{self.dtype}-C{self.width}"
        return f"{name}-resident" if self.config.get("resident") else name

    def compile(self) -> OfflineKernel:
        """Compile at sizes that are multiples of 16, as the shapes of training are."""
        entry = KERNELS[self.kernel] if self.kernel in KERNELS else FIXED[self.kernel][0]
        name = entry.resident if self.config.get("resident") else entry.name
        kernel = getattr(importlib.import_module(f"megafold.evofusion.{entry.module}"), name)
        sizes = {"width": self.width, "twice": 2 * self.width, "head": max(16, self.width // 2)}
        constants = {name: sizes.get(value, value) for name, value in entry.constants.items()}
        constants |= {
            "BLOCK_L": self.config.get("block_l"),
            "BLOCK_O": min(self.config.get("block_o", 16), self.width),
            "STAGES": self.config["num_stages"],
            "FAST": self.arch.startswith("sm"),
            "PRECISION": "tf32" if self.arch.startswith("sm") else "ieee",
        }
        constants = {name: value for name, value in constants.items() if name in kernel.arg_names}
        signature = {"eps": "fp32", "mask": "*u8:16", **entry.others}
        signature |= dict.fromkeys(entry.pointers, f"*{self.dtype}:16")
        for name in kernel.arg_names:
            signature.setdefault(name, "i32:16" if name.islower() or name in ("R", "N", "T", "P", "L") else "i32")
        return compile_offline(kernel, signature, constants, self.arch, options(self.config))


def cases(full: bool = False) -> Iterator[Case]:
    """Cases of the shipped tables: each kernel in bf16 at the width of pairs, on the oldest architecture of each vendor
    also in fp32, and what has one configuration everywhere; with `full` all dtypes and narrower widths too."""
    for arch in triton_support.ARCHITECTURES:
        for kernel, by_bits in triton_support.shipped_table("evofusion", arch)["configs"].items():
            for bits, config in by_bits.items():
                quick = bits == "16" or arch in ("sm_80", "gfx90a")
                if not full and not quick:
                    continue
                dtypes = ("fp32",) if bits == "32" else ("bf16", "fp16") if full else ("bf16",)
                for dtype in dtypes:
                    for width in (16, 64, 128) if full else (128,):
                        yield Case(arch, kernel, dtype, width, config)
        if arch == "sm_90":
            config = triton_support.shipped_table("evofusion", arch)["configs"]["weight_gradient"]["16"]
            yield Case(arch, "two_weight_gradients", "bf16", 128, config)
            for kernel in (name for name, entry in KERNELS.items() if entry.resident):
                yield Case(arch, kernel, "bf16", 128, RESIDENT)
        if full or arch in ("sm_80", "gfx90a"):
            for kernel, (_, config) in FIXED.items():
                yield Case(arch, kernel, "bf16", 128, {"num_warps": 4, "num_stages": 1, **config})


def problems(case: Case, compiled: OfflineKernel, shared_cap: int) -> list[str]:
    """What keeps a compiled kernel from shipping; empty when nothing does."""
    found = []
    if compiled.spill_bytes:
        found.append(f"spills {compiled.spill_bytes} bytes")
    if compiled.shared_bytes > shared_cap:
        found.append(f"needs {compiled.shared_bytes} bytes of shared memory, the cap is {shared_cap}")
    if case.kernel in KERNELS and KERNELS[case.kernel].matrix and not compiled.matrix_instructions:
        found.append("has no matrix instruction")
    if compiled.swap_loops:
        found.append("has a compare-and-swap loop")
    return found
