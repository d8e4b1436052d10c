"""Averages of values by head with the weights of pairs, as an operator that PyTorch differentiates."""

from __future__ import annotations

from torch import Tensor

from megafold.evofusion.operator import uses_kernels
from megafold.operators import define


def average(weights: Tensor, values: Tensor) -> Tensor:
    """out[b, s, i, h] = sum over j of weights[b, h, i, j] values[b, s, j, h].

    Args:
        weights: [B, H, N, N]. values: [B, S, N, H, E], in one dtype of the kernels; see `serves`.
    """
    return _average_op(weights, values)


def serves(values: Tensor) -> bool:
    """Whether kernels take values [B, S, N, H, E]."""
    width = values.shape[-1]
    return uses_kernels(values) and values.numel() > 0 and 16 <= width <= 64 and width & (width - 1) == 0


def _forward(weights: Tensor, values: Tensor) -> Tensor:
    from megafold.evofusion.msa import kernels

    return kernels.mean(weights, values)


def _gradients(grad: Tensor, weights: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    from megafold.evofusion.msa import kernels

    return kernels.gradients(grad, weights, values)


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad):
    return _average_backward_op(grad, *ctx.saved_tensors)


_average_backward_op = define(
    "head_average_backward",
    "(Tensor grad, Tensor weights, Tensor values) -> (Tensor, Tensor)",
    _gradients,
    lambda grad, weights, values: (weights.new_empty(weights.shape), values.new_empty(values.shape)),
)
_average_op = define(
    "head_average",
    "(Tensor weights, Tensor values) -> Tensor",
    _forward,
    lambda weights, values: values.new_empty(values.shape),
    _backward,
    _setup_context,
)
