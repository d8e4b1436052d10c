"""What pair-weighted averaging does to an MSA, from the weights on, as an operator that PyTorch differentiates."""

from __future__ import annotations

from torch import Tensor

from megafold.evofusion.operator import dense, is_narrow, product_dtype, uses_kernels
from megafold.operators import define

WIDTHS = (16, 32, 64)
"""Of a head's values, that kernels take."""


def average(
    msa: Tensor,
    weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    values_gates_weight: Tensor,
    out_weight: Tensor,
    dropped: Tensor | None,
    residual: bool,
) -> Tensor:
    """Arguments as of `api.pair_weighted_averaging`, and weights [B, H, N, N]; see `serves`."""
    dtype, vectors = product_dtype(msa), dense(norm_weight, norm_bias)
    tensors = msa, weights.to(dtype), *vectors, values_gates_weight, out_weight, dropped
    return _forward_op(*tensors, residual, dtype)[0]


def serves(msa: Tensor, heads: int, inner: int) -> bool:
    """Whether kernels take an MSA [B, S, N, C] and so many heads with `inner` columns in all."""
    narrow = is_narrow(msa.shape[-1]) and inner // heads in WIDTHS
    return uses_kernels(msa) and narrow and msa.numel() > 0


def _forward(*arguments):
    from megafold.evofusion.msa import launch

    return launch.forward(*arguments)


def _gradients(*arguments):
    from megafold.evofusion.msa import launch

    return launch.backward(*arguments)


def _fake_forward(msa, weights, norm_weight, norm_bias, values_gates_weight, out_weight, dropped, residual, dtype):
    (batch, depth, size, _), heads, inner = msa.shape, weights.shape[1], out_weight.shape[1]
    out = msa.new_empty(msa.shape, dtype=msa.dtype if residual else dtype)
    by_head = (batch, heads, size, depth, inner // heads)
    gates = msa.new_empty((batch, size, depth, inner), dtype=dtype)
    return out, msa.new_empty(by_head, dtype=dtype), gates, msa.new_empty(by_head, dtype=dtype)


def _fake_gradients(grad_out, *arguments):
    return tuple(t.new_empty(t.shape) for t in arguments[:6])


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.residual, ctx.dtype = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, *_):
    if grad_out is None:
        return (None,) * 9
    return *_backward_op(grad_out, *ctx.saved_tensors, ctx.residual, ctx.dtype), None, None, None


_PARAMETERS = (
    "Tensor msa, Tensor weights, Tensor norm_weight, Tensor norm_bias, Tensor values_gates_weight, Tensor out_weight, "
    "Tensor? dropped"
)
_OPTIONS = "bool residual, ScalarType dtype"
_backward_op = define(
    "pair_weighted_averaging_backward",
    f"(Tensor grad_out, {_PARAMETERS}, Tensor values, Tensor gates, Tensor averaged, {_OPTIONS}) "
    f"-> ({', '.join(['Tensor'] * 6)})",
    _gradients,
    _fake_gradients,
)
_forward_op = define(
    "pair_weighted_averaging",
    f"({_PARAMETERS}, {_OPTIONS}) -> (Tensor, Tensor, Tensor, Tensor)",
    _forward,
    _fake_forward,
    _backward,
    _setup_context,
)
