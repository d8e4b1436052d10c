"""Host side of the smooth lDDT."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.launch import ceil_div, configuration, options
from megafold.evofusion.smooth_lddt import kernels
from megafold.replay import launch_kernel


def sums(
    pred: Tensor,
    true: Tensor,
    is_nucleotide: Tensor,
    mask: Tensor | None,
    nucleic_acid_cutoff: float,
    other_cutoff: float,
) -> tuple[Tensor, Tensor]:
    """Sum of the scores and number of the pairs, each [B]."""
    blocks, inputs, keywords = _arguments("smooth_lddt", pred, true, is_nucleotide, mask)
    totals = pred.new_empty((pred.shape[0], blocks), dtype=torch.float32)
    counts = pred.new_empty((pred.shape[0], blocks), dtype=torch.int32)
    with triton_support.device_guard(pred.device):
        launch_kernel(
            kernels.score_kernel, (totals.numel(),),
            *inputs, totals, counts, pred.shape[1], blocks, nucleic_acid_cutoff, other_cutoff, **keywords,
        )  # fmt: skip
    return totals.sum(1), counts.sum(1)


def gradient(
    scale: Tensor,
    pred: Tensor,
    true: Tensor,
    is_nucleotide: Tensor,
    mask: Tensor | None,
    nucleic_acid_cutoff: float,
    other_cutoff: float,
) -> Tensor:
    """Gradient of pred from that of the sum of the scores, `scale` [B]."""
    blocks, inputs, keywords = _arguments("smooth_lddt_gradient", pred, true, is_nucleotide, mask)
    grad = torch.empty_like(inputs[0])
    with triton_support.device_guard(pred.device):
        launch_kernel(
            kernels.gradient_kernel, (pred.shape[0] * blocks,),
            scale.contiguous(), *inputs, grad, pred.shape[1], blocks, nucleic_acid_cutoff, other_cutoff, **keywords,
        )  # fmt: skip
    return grad


def _arguments(kernel: str, pred: Tensor, true: Tensor, is_nucleotide: Tensor, mask: Tensor | None):
    """Blocks of atoms, tensors and keyword arguments of a kernel."""
    config = configuration(kernel, torch.float32, pred.device)
    pred, true = pred.contiguous(), true.contiguous()
    inputs = (pred, true, is_nucleotide.contiguous().view(torch.uint8))
    inputs += (inputs[2] if mask is None else mask.contiguous().view(torch.uint8),)
    keywords = {"HAS_MASK": mask is not None, "BLOCK_L": config["block_l"], "BLOCK_O": config["block_o"]}
    return ceil_div(pred.shape[1], config["block_l"]), inputs, keywords | options(config)
