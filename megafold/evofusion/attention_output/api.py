"""`attention_output`: argument checks, dispatch and autograd."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold.evofusion.attention_output import reference
from megafold.evofusion.operator import check_dropped, check_rows, check_tensors, is_narrow, product_dtype, uses_kernels
from megafold.operators import define

NAME = "attention_output"


def attention_output(
    attended: Tensor,
    gate: Tensor | None,
    weight: Tensor,
    *,
    dropped: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """residual + ((attended * sigmoid(gate)) weight^T) * dropped: the end of AF3 algorithms 14, 15 and 24.

    Args:
        attended: [..., I], what the attention gave with its heads side by side (I = H D), fp32, bf16 or fp16 (fp64
            through the reference).
        gate: [..., I] before the sigmoid, for instance from `norm_project`, or None.
        weight: [C, I]. With C and I = 16, 32, 64 or 128 kernels run.
        dropped: the drawn factor of a row- or column-shared dropout, 0 or 1 / (1 - p), [B, 1, J, C] or [B, I, 1, C];
            attended is [B, I, J, H D] then, in the order of the residual: transpose the ending node's attention back.
        residual: [..., C], or None.

    Returns:
        [..., C], contiguous, in the dtype of the residual, or of the products where there is none.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward (kernels only).
    """
    inner = check_rows(NAME, "attended", attended)
    width = weight.shape[0]
    shape = (*attended.shape[:-1], width)
    expected = {
        "gate": (gate, attended.shape, ()),
        "weight": (weight, (width, inner), ()),
        "residual": (residual, shape, ()),
    }
    check_tensors(NAME, attended, expected)
    check_dropped(NAME, dropped, shape, attended.device)
    if uses_kernels(attended) and is_narrow(width, inner) and attended.numel():
        return _forward_op(attended, gate, weight, dropped, residual, product_dtype(attended))
    return reference.attention_output(attended, gate, weight, dropped, residual)


def gated(value: Tensor, gate: Tensor) -> Tensor:
    """value * sigmoid(gate) in one pass each way, for rows too wide for `attention_output`.

    Args:
        value, gate: [..., C] of one shape, fp32, bf16 or fp16 (fp64 in PyTorch).

    Returns:
        [..., C], contiguous, in the wider of the two dtypes.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward (kernels only).
    """
    check_rows("gated", "value", value)
    check_tensors("gated", value, {"gate": (gate, value.shape, ())})
    if uses_kernels(value) and value.numel():
        return _gated_op(value, gate)
    return value * gate.sigmoid()


def _forward(*arguments):
    from megafold.evofusion.attention_output import launch

    return launch.forward(*arguments)


def _gated(value, gate):
    from megafold.evofusion.attention_output import launch

    return launch.gated(value, gate)


def _fake_gated(value, gate):
    return value.new_empty(value.shape, dtype=torch.promote_types(value.dtype, gate.dtype))


def _gated_gradients(grad_out, value, gate):
    from megafold.evofusion.attention_output import launch

    return launch.gated_gradient(grad_out, value, gate)


def _fake_gated_gradients(grad_out, value, gate):
    return value.new_empty(value.shape), gate.new_empty(gate.shape)


def _gated_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _gated_backward(ctx, grad_out):
    return _gated_backward_op(grad_out, *ctx.saved_tensors)


def _fake_forward(attended, gate, weight, dropped, residual, dtype):
    shape = (*attended.shape[:-1], weight.shape[0])
    return attended.new_empty(shape, dtype=dtype if residual is None else residual.dtype)


def _gradients(*arguments):
    from megafold.evofusion.attention_output import launch

    return launch.backward(*arguments)


def _fake_gradients(grad_out, attended, gate, weight, dropped, dtype):
    none = attended.new_empty(0)
    grad_gate = none if gate is None else gate.new_empty(gate.shape)
    return attended.new_empty(attended.shape), grad_gate, weight.new_empty(weight.shape)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, residual, ctx.dtype = inputs
    ctx.residual_dtype = None if residual is None else residual.dtype
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad_out):
    attended, gate, weight, dropped = ctx.saved_tensors
    grad_attended, grad_gate, grad_weight = _backward_op(grad_out, attended, gate, weight, dropped, ctx.dtype)
    residual = None if ctx.residual_dtype is None else grad_out
    return grad_attended, None if gate is None else grad_gate, grad_weight, None, residual, None


_PARAMETERS = "Tensor attended, Tensor? gate, Tensor weight, Tensor? dropped"
_backward_op = define(
    f"{NAME}_backward",
    f"(Tensor grad_out, {_PARAMETERS}, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
_forward_op = define(
    NAME,
    f"({_PARAMETERS}, Tensor? residual, ScalarType dtype) -> Tensor",
    _forward,
    _fake_forward,
    _backward,
    _setup_context,
)
_gated_backward_op = define(
    "gated_backward", "(Tensor grad_out, Tensor value, Tensor gate) -> (Tensor, Tensor)", _gated_gradients,
    _fake_gated_gradients,
)  # fmt: skip
_gated_op = define(
    "gated", "(Tensor value, Tensor gate) -> Tensor", _gated, _fake_gated, _gated_backward, _gated_context
)
