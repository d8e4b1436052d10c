"""Quick correctness checks of the kernels on the device at hand, for `megafold verify`."""

from __future__ import annotations

import torch

from megafold import triton_support
from megafold.evoflash3d.api import evoflash3d, uses_kernels
from megafold.evoflash3d.reference import eager_attention
from megafold.testing import CheckResult, check_budget, outputs_and_gradients

SHAPES = {
    # name: B, R, H, N, D, whether each row has a mask of its own
    "triangle attention": (1, 24, 4, 200, 32, True),
    "triangle attention without mask": (2, 5, 4, 97, 32, False),
    "triangle attention with work for a whole device": (1, 132, 4, 97, 32, False),
    "attention with pair bias": (2, 1, 16, 97, 64, True),
    "augmentations without mask": (1, 3, 4, 200, 64, False),
    "odd length and head dim": (1, 5, 2, 17, 48, True),
}
"""Without a mask other kernels run on some devices (`launch.hopper_serves`), and yet another where there are many rows
(`gradients.serves_whole_rows`), so each is checked."""


def verify(device: torch.device | str) -> list[CheckResult]:
    """Compare outputs and gradients with float64 under the error budget, and three runs with each other.

    Args:
        device: where to run; on a CPU, or without a supported Triton, the chunked reference is what is checked.

    Returns:
        One result per shape, dtype and quantity, in the order in which they ran.
    """
    device = torch.device(device)
    dtypes = (torch.float32, torch.bfloat16, torch.float16) if uses_kernels(device, torch.float32) else (torch.float32,)
    note = triton_support.why_not(device)
    results = [CheckResult("evoflash3d backend", True, note or "Triton kernels")]
    for name, shape in SHAPES.items():
        for dtype in dtypes:
            results += _check(f"evoflash3d {name} {str(dtype).removeprefix('torch.')}", shape, dtype, device)
    return results


def _check(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[CheckResult]:
    batch, rows, heads, length, dim, masked = shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device).to(dtype)

    inputs = {n: draw(batch, rows, length, heads, dim).transpose(2, 3) for n in ("q", "k", "v")}
    inputs["bias"] = draw(batch, heads, length, length)
    mask = None
    if masked:
        mask = torch.rand((batch, rows, length), generator=generator, device=device) > 0.2
        mask[0, 0] = False
    cotangent = draw(batch, rows, heads, length, dim)
    kernel = outputs_and_gradients(evoflash3d, inputs, cotangent, mask=mask)
    # The third call is the first that repeats what was recorded: see `megafold.replay`.
    more = [outputs_and_gradients(evoflash3d, inputs, cotangent, mask=mask) for _ in range(2)]
    eager = outputs_and_gradients(eager_attention, inputs, cotangent, mask=mask)
    wide = {n: t.double() for n, t in inputs.items()}
    exact = outputs_and_gradients(eager_attention, wide, cotangent, mask=mask)
    results = [CheckResult(f"{name} {r.name}", r.ok, r.detail) for r in check_budget(kernel, eager, exact)]
    same = all(torch.equal(kernel[n], again[n]) for again in more for n in kernel)
    detail = "three runs bit-identical" if same else "three runs differ"
    return [*results, CheckResult(f"{name} repeatable", same, detail)]
