"""The error budget that kernels are held to, for tests, for `megafold verify` and as the gate before any timing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class CheckResult:
    """One line of `megafold verify`: what was checked, whether it held, and the numbers behind it."""

    name: str
    ok: bool
    detail: str


def relative_error(value: Tensor, exact: Tensor) -> float:
    """||value - exact|| / ||exact|| in float64; infinite for NaN, and for any deviation from an exact zero."""
    difference = (value.detach().double() - exact.detach().double()).norm().item()
    size = exact.detach().double().norm().item()
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


def check_budget(
    kernel: Mapping[str, Tensor], eager: Mapping[str, Tensor], exact: Mapping[str, Tensor]
) -> list[CheckResult]:
    """Compare tensors by name with the error budget; all three hold the same names, `exact` in float64."""
    results = []
    for name, truth in exact.items():
        error, eager_error = relative_error(kernel[name], truth), relative_error(eager[name], truth)
        allowed = budget(eager_error, kernel[name].dtype)
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
