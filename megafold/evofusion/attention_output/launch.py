"""Host side of what follows an attention."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion import rows as row_kernels
from megafold.evofusion.attention_output import kernels
from megafold.evofusion.launch import ceil_div, configuration, options, shared_strides
from megafold.evofusion.weight_gradient import product_over_rows
from megafold.evofusion.weights import prepared
from megafold.replay import launch_kernel


def forward(
    attended: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    dropped: Tensor | None,
    residual: Tensor | None,
    dtype: torch.dtype,
) -> Tensor:
    """[..., C] in the dtype of the residual, or of products without one."""
    attended, gate, dropped, residual = (
        None if t is None else t.contiguous() for t in (attended, gate, dropped, residual)
    )
    shape = (*attended.shape[:-1], weight.shape[0])
    out = attended.new_empty(shape, dtype=dtype if residual is None else residual.dtype)
    sizes, constants = _constants("attention_output", attended, gate, weight, dropped, dtype)
    with triton_support.device_guard(attended.device):
        launch_kernel(
            kernels.output_kernel, sizes[-1:],
            attended, attended if gate is None else gate, *prepared(dtype, weight),
            attended if dropped is None else dropped, attended if residual is None else residual, out,
            *shared_strides(dropped), *sizes, RESIDUAL=residual is not None, **constants,
        )  # fmt: skip
    return out


def backward(
    grad_out: Tensor,
    attended: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    dropped: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of attended, gate (without elements where there is none) and weight."""
    attended, gate, dropped = (None if t is None else t.contiguous() for t in (attended, gate, dropped))
    grad_out, (w,) = grad_out.contiguous(), prepared(dtype, weight)
    none = attended.new_empty(0)
    grad_attended = torch.empty_like(attended)
    grad_gate = none if gate is None else torch.empty_like(gate)
    gated = attended.to(dtype) if gate is None else torch.empty_like(attended, dtype=dtype)
    copies = dropped is not None or grad_out.dtype != dtype
    scaled = torch.empty_like(grad_out, dtype=dtype) if copies else grad_out
    sizes, constants = _constants("attention_output_gradient", attended, gate, weight, dropped, dtype)
    with triton_support.device_guard(attended.device):
        launch_kernel(
            kernels.gradient_kernel, sizes[-1:],
            grad_out, attended, attended if gate is None else gate, w, attended if dropped is None else dropped,
            grad_attended, grad_attended if gate is None else grad_gate, gated, scaled, *shared_strides(dropped),
            *sizes, COPY=copies, **constants,
        )  # fmt: skip
        grad_weight = product_over_rows(scaled.view(-1, weight.shape[0]), gated.view(-1, weight.shape[1]))
    return grad_attended, grad_gate, grad_weight.to(weight.dtype)


def gated(value: Tensor, gate: Tensor) -> Tensor:
    """value * sigmoid(gate)."""
    rows = (t.contiguous().view(-1, value.shape[-1]) for t in (value, gate))
    with triton_support.device_guard(value.device):
        out = row_kernels.gated(*rows, out_dtype=torch.promote_types(value.dtype, gate.dtype))
    return out.view(value.shape)


def gated_gradient(grad_out: Tensor, value: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of value and gate, contiguous."""
    rows = (t.contiguous().view(-1, value.shape[-1]) for t in (grad_out, value, gate))
    with triton_support.device_guard(value.device):
        grad_value, grad_gate = row_kernels.gated_gradient(*rows)
    return grad_value.view(value.shape), grad_gate.view(value.shape)


def _sizes(attended: Tensor) -> tuple[int, int]:
    """Groups of rows in a structure, and rows in a group: where dropout is shared they matter."""
    if attended.dim() == 4:
        return attended.shape[1], attended.shape[2]
    return 1, attended.numel() // attended.shape[-1]


def _constants(
    kernel: str, attended: Tensor, gate: Tensor | None, weight: Tensor, dropped: Tensor | None, dtype: torch.dtype
) -> tuple[tuple[int, ...], dict[str, object]]:
    """Groups, rows in a group, tiles of rows and programs; and the compile-time arguments.

    The configuration is that of the widest numbers loaded: tiles of fp32 under autocast, with products in 16 bit, take
    twice the shared memory.
    """
    widest = max((dtype, attended.dtype, attended.dtype if gate is None else gate.dtype), key=lambda d: d.itemsize)
    config = configuration(kernel, widest, attended.device)
    width, inner = weight.shape
    groups, length = _sizes(attended)
    tiles = attended.numel() // (groups * length * inner) * groups * ceil_div(length, config["block_l"])
    programs = min(tiles, config.get("programs", 4) * triton_support.multiprocessors(attended.device))
    constants = {
        "C": width,
        "INNER": inner,
        "BLOCK_L": config["block_l"],
        "STAGES": config["num_stages"],
        "GATED": gate is not None,
        "HAS_DROPPED": dropped is not None,
        "FAST": triton_support.takes_ptx(attended.device),
        "PRECISION": triton_support.float32_precision(),
    }
    return (groups, length, tiles, programs), constants | options(config)
