"""Host side of windowed attention."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.launch import configuration, options
from megafold.evofusion.windowed_attention import kernels
from megafold.replay import launch_kernel


def forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None, windowed_mask: Tensor | None, scale: float
) -> tuple[Tensor, Tensor]:
    """The output [B, M, H, D] and the log-sum-exp [B, H, M] in fp32."""
    q, k, v = (_last_contiguous(t) for t in (q, k, v))
    batch, atoms, heads, _ = q.shape
    out = torch.empty(q.shape, device=q.device, dtype=q.dtype)
    lse = torch.empty((batch, heads, atoms), device=q.device, dtype=torch.float32)
    grid, inputs, sizes, keywords = _arguments("windowed_attention", q, k, v, bias, mask, windowed_mask, scale)
    with triton_support.device_guard(q.device):
        launch_kernel(kernels.forward_kernel, grid, *inputs, out, lse, *sizes, **keywords)
    return out, lse


def backward(
    grad_out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    windowed_mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous, and d(bias)."""
    q, k, v = (_last_contiguous(t) for t in (q, k, v))
    dq, dk, dv = (torch.empty_like(out) for _ in range(3))
    dbias = torch.empty(bias.shape, device=q.device, dtype=bias.dtype)
    grid, inputs, sizes, keywords = _arguments("windowed_attention_gradient", q, k, v, bias, mask, windowed_mask, scale)
    with triton_support.device_guard(q.device):
        launch_kernel(
            kernels.gradient_kernel, grid,
            grad_out.contiguous(), *inputs, out, lse, dq, dk, dv, dbias, *sizes, **keywords
        )  # fmt: skip
    return dq, dk, dv, dbias


def _last_contiguous(t: Tensor) -> Tensor:
    return t if t.stride(-1) == 1 else t.contiguous()


def _arguments(kernel, q, k, v, bias, mask, windowed_mask, scale):
    """Grid, tensors, numbers and keyword arguments of a kernel."""
    batch, atoms, heads, dim = q.shape
    windows, size = bias.shape[2:4]
    config = configuration(kernel, q.dtype, q.device)
    inputs = (
        q, k, v, bias.contiguous(), q if mask is None else mask.contiguous().view(torch.uint8),
        q if windowed_mask is None else windowed_mask.contiguous().view(torch.uint8),
    )  # fmt: skip
    mask_stride = 0 if windowed_mask is None else windows * size * 2 * size
    sizes = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], mask_stride, atoms, heads, windows, scale)
    keywords = {
        "W": size,
        "D": dim,
        "BLOCK_Q": max(16, 1 << (size - 1).bit_length()),
        "BLOCK_K": max(16, 1 << (2 * size - 1).bit_length()),
        "BLOCK_D": max(16, 1 << (dim - 1).bit_length()),
        "HAS_MASK": mask is not None,
        "HAS_WINDOWED": windowed_mask is not None,
        "PRECISION": triton_support.float32_precision(),
    }
    return (batch * windows * heads,), inputs, sizes, keywords | options(config)
