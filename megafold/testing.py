"""The error budget that kernels are held to (tests, `megafold verify`, the gate before any timing), and compiling
kernels for devices that are not there."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor


@dataclass(frozen=True)
class CheckResult:
    """One line of `megafold verify`: what was checked, whether it held, and the numbers behind it."""

    name: str
    ok: bool
    detail: str


def relative_error(value: Tensor, exact: Tensor, scale: Tensor | None = None) -> float:
    """||value - exact|| / ||exact|| in float64, or / ||scale||; infinite for NaN, and for any deviation from zero."""
    difference = (value.detach().double() - exact.detach().double()).norm().item()
    size = (exact if scale is None else scale).detach().double().norm().item()
    if difference != difference:
        return float("inf")
    if size == 0.0:
        return 0.0 if difference == 0.0 else float("inf")
    return difference / size


def rounding_step(dtype: torch.dtype) -> float:
    """Relative size of one rounding to `dtype`: half the distance from 1 to the next number."""
    return torch.finfo(dtype).eps / 2


def budget(eager_error: float, dtype: torch.dtype) -> float:
    """What a kernel may be off: twice the error of eager PyTorch in the same dtype, plus one rounding step."""
    return 2.0 * eager_error + rounding_step(dtype)


VANISHING_ROUNDINGS = 8
"""Of a sum whose terms each come from some ten roundings, random ones: their square root, twice, and some."""


def check_budget(
    kernel: Mapping[str, Tensor],
    eager: Mapping[str, Tensor],
    exact: Mapping[str, Tensor],
    vanishing: Mapping[str, str] | None = None,
) -> list[CheckResult]:
    """Compare tensors by name with the error budget; all three hold the same names, `exact` in float64.

    Args:
        vanishing: names of what is zero but for rounding, also in float64, and of a sum of as many such terms that do
            not cancel. The error is relative to that, and may be VANISHING_ROUNDINGS: one noise relative to itself, or
            to twice another one, differs from processor to processor.
    """
    results = []
    for name, truth in exact.items():
        scale = exact[vanishing[name]] if vanishing and name in vanishing else None
        error, eager_error = (relative_error(found[name], truth, scale) for found in (kernel, eager))
        allowed = budget(eager_error, kernel[name].dtype)
        if scale is not None:
            allowed = max(allowed, VANISHING_ROUNDINGS * rounding_step(kernel[name].dtype))
        detail = f"error {error:.2e}, eager {eager_error:.2e}, allowed {allowed:.2e}"
        results.append(CheckResult(name, error <= allowed, detail))
    return results


def outputs_and_gradients(
    function: Callable[..., Tensor], inputs: Mapping[str, Tensor], cotangent: Tensor, **fixed: object
) -> dict[str, Tensor]:
    """Call `function(**inputs, **fixed)` and return {"out": ..., "d<name>": ...} for every input.

    Args:
        inputs: tensors to differentiate by; detached first.
        cotangent: random, of the shape of the output; cast to the output's dtype.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    out = function(**leaves, **fixed)
    grads = torch.autograd.grad(out, list(leaves.values()), cotangent.to(out.dtype))
    return {"out": out.detach(), **{f"d{name}": grad for name, grad in zip(leaves, grads)}}


def gradients_by_name(
    function: Callable[..., Tensor | Sequence[Tensor]], inputs: Mapping[str, Tensor], seed: int = 0
) -> dict[str, Tensor]:
    """As `outputs_and_gradients`, for one or several outputs ("out", or "out0", ...) and cotangents drawn from a seed.

    The cotangents depend on shapes alone, so a run in another dtype gets the same ones.
    """
    leaves = {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}
    result = function(**leaves)
    outputs = [result] if isinstance(result, Tensor) else list(result)
    generator = torch.Generator().manual_seed(seed)
    # Rounded to 8 bits, so that every dtype holds them exactly.
    drawn = [torch.randn(out.shape, generator=generator).to(torch.bfloat16) for out in outputs]
    cotangents = [g.to(out.device, out.dtype) for g, out in zip(drawn, outputs)]
    grads = torch.autograd.grad(outputs, list(leaves.values()), cotangents)
    names = ["out"] if len(outputs) == 1 else [f"out{i}" for i in range(len(outputs))]
    named = {name: out.detach() for name, out in zip(names, outputs)}
    return named | {f"d{name}": grad for name, grad in zip(leaves, grads)}


@dataclass(frozen=True)
class OfflineKernel:
    """What the compiler says about a kernel compiled for a device that need not be there.

    registers: per thread (VGPRs on AMD). spill_bytes: stack used by spilled registers. shared_bytes: shared memory or
    LDS. matrix_instructions: MFMA, MMA or WGMMA in the machine code. swap_loops: compare-and-swap instructions.
    loop_spills: loads and stores of spilled registers between the matrix instructions of the innermost loops (NVIDIA);
    the others move once a program. awaited: share of asynchronous products (HGMMA) that a wait follows at once. ptxas
    makes it 1, without a word, where it cannot follow them, such as across the end of a loop. early_releases: times
    that threads tell the copy engine that it may write, while what one of them reads there may still be on its way.
    """

    registers: int
    spill_bytes: int
    shared_bytes: int
    matrix_instructions: int
    swap_loops: int
    loop_spills: int = 0
    awaited: float = 0.0
    early_releases: int = 0


SHARED_MEMORY_CAP = {"sm_80": 163 * 1024, "sm_90": 227 * 1024, "sm_100": 227 * 1024, "gfx90a": 65536, "gfx942": 65536}
"""Bytes of shared memory (LDS) that one program can have."""


def compile_offline(
    kernel, signature: Mapping[str, str], constants: Mapping[str, object], arch: str, options: Mapping[str, int]
) -> OfflineKernel:
    """Compile a Triton kernel for an architecture without having one.

    Args:
        kernel: a `triton.jit` function.
        signature: Triton type of each run-time argument ("*bf16", "i32", "fp32", ...); a trailing ":16" says that the
            value is divisible by 16, as a launch finds out by itself.
        constants: values of the compile-time arguments.
        arch: "sm_90", "gfx942", ...
        options: num_warps, num_stages, ...
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    amd = arch.startswith("gfx")
    target = GPUTarget("hip", arch, 64) if amd else GPUTarget("cuda", int(arch.removeprefix("sm_")), 32)
    types, attributes = {}, {}
    for position, name in enumerate(kernel.arg_names):
        if name in constants:
            types[name] = "constexpr"
            continue
        types[name], _, divisible = signature[name].partition(":")
        if divisible:
            attributes[(position,)] = [["tt.divisibility", int(divisible)]]
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    source = _gluon_source() if _is_gluon(kernel) else ASTSource
    compiled = triton.compile(source(kernel, types, values, attributes), target=target, options=dict(options))
    shared = compiled.metadata.shared
    if amd:
        text = compiled.asm["amdgcn"]
        return OfflineKernel(
            registers=int(re.search(r"\.vgpr_count:\s+(\d+)", text).group(1)),
            spill_bytes=4 * int(re.search(r"\.vgpr_spill_count:\s+(\d+)", text).group(1)),
            shared_bytes=shared,
            matrix_instructions=text.count("v_mfma"),
            swap_loops=text.count("cmpswap"),
        )
    tools = ("cuobjdump", "-res-usage"), ("nvdisasm", "-hex")
    usage, code = (_nvidia_tool(compiled.asm["cubin"], *tool) for tool in tools)
    return OfflineKernel(
        registers=int(re.search(r"REG:(\d+)", usage).group(1)),
        spill_bytes=int(re.search(r"STACK:(\d+)", usage).group(1)),
        shared_bytes=shared,
        matrix_instructions=len(re.findall(r"\b(?:H|UTCH|UTC\w*|Q|I)G?MMA\b|\bUTCHMMA\b", code)),
        swap_loops=len(re.findall(r"\b(?:ATOM|RED)\w*\.[\w.]*CAS", code)),
        loop_spills=_loop_spills(code),
        awaited=_awaited(code),
        early_releases=_early_releases(code),
    )


def _early_releases(code: str) -> int:
    """Barriers of a disassembled kernel (with encodings) behind which a thread arrives at an mbarrier, passed while
    shared memory is being read.

    A barrier of threads does not wait for loads that are under way: only an instruction that needs the result does, or
    a fence. Other threads' stores come later in any case; the copy engine's may not.
    """
    pattern = r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;\s+/\* 0x[0-9a-f]+ \*/\s+/\* 0x([0-9a-f]+) \*/"
    reading, at_barrier, early = set(), False, 0
    for text, encoding in re.findall(pattern, code):
        control = int(encoding, 16) >> 41  # of Volta and later: stall 4, yield 1, two scoreboards of 3, waits 6 bits
        reading -= {scoreboard for scoreboard in range(6) if control >> 11 + scoreboard & 1}
        if re.search(r"\bMEMBAR\b", text):
            reading.clear()
        elif re.search(r"\bLDS(M|\b)", text):
            # Loads end in order: 7, none of its own, is that of the next.
            reading = {control >> 5 & 7 if scoreboard == 7 else scoreboard for scoreboard in reading}
            reading.add(control >> 5 & 7)
        elif re.search(r"\bBAR\.SYNC", text):
            at_barrier = bool(reading)
        elif re.search(r"\bSYNCS\.ARRIVE\.TRANS64\.A1T0", text):
            early += at_barrier
    return early


def _awaited(code: str) -> float:
    """Share of the HGMMA of a disassembled kernel that end a group, which is what can be waited for."""
    products = re.findall(r"\bHGMMA\b.*", code)
    return sum("gsb0" in line for line in products) / max(1, len(products))


def _loop_spills(code: str) -> int:
    """Local loads and stores between the matrix instructions of the innermost loops of a disassembled kernel."""
    lines, labels, loops = [], {}, []
    for line in code.splitlines():
        if label := re.match(r"\s*(\.L_\w+):", line):
            labels[label.group(1)] = len(lines)
        elif instruction := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(.*);", line):
            lines.append(instruction.group(1))
    for end, line in enumerate(lines):
        target = re.search(r"\bBRA\b.*`\((\.L_\w+)\)", line)
        start = labels.get(target.group(1), end + 1) if target else end + 1
        products = [at for at in range(start, end + 1) if "GMMA" in lines[at]]
        if products:
            loops.append((start, end, products[0], products[-1]))
    innermost = [a for a in loops if not any(b is not a and a[0] <= b[0] and b[1] <= a[1] for b in loops)]
    tiles = [line for _, _, first, last in innermost for line in lines[first:last]]
    return sum(bool(re.search(r"\b(?:LDL|STL)\b", line)) for line in tiles)


def _is_gluon(kernel) -> bool:
    return type(kernel).__module__.startswith("triton.experimental.gluon")


def _gluon_source() -> type:
    from triton.experimental.gluon._runtime import GluonASTSource

    return GluonASTSource


def _nvidia_tool(cubin: bytes, tool: str, *arguments: str) -> str:
    """Output of one of the tools that Triton's wheel brings."""
    import triton

    path = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / tool
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([path, *arguments, file.name], capture_output=True, text=True, check=True).stdout
