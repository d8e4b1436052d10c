"""`transition`: argument checks, dispatch and autograd."""

from __future__ import annotations

from torch import Tensor

from megafold.evofusion.operator import check_rows, check_tensors, dense, product_dtype, refuse, uses_kernels
from megafold.evofusion.transition import reference
from megafold.operators import define

NAME = "transition"


def transition(
    x: Tensor,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    in_weight: Tensor,
    out_weight: Tensor,
    *,
    residual: bool = True,
) -> Tensor:
    """AF3 algorithm 11 on a residual stream: x + (silu(gates) values) out_weight^T.

    values, gates = LN(x) in_weight^T. At C = 16, 32, 64 or 128 the wide intermediate never reaches device memory in the
    forward; other widths go through the vendor's products on padded copies.

    Args:
        x: [..., C], fp32, bf16 or fp16 (fp64 through the reference).
        norm_weight, norm_bias: [C], of the LayerNorm (eps 1e-5), or both None: x is taken as it is.
        in_weight: [2 I, C]: values, then gates, as in the stock model. out_weight: [C, I].
        residual: add x. Without, the result has the dtype of the products.

    Returns:
        [..., C], contiguous.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward (kernels only).
    """
    width = check_rows(NAME, "x", x)
    if (norm_weight is None) != (norm_bias is None):
        refuse(NAME, "norm_bias", "is given without norm_weight, or the reverse", "both or neither")
    inner = out_weight.shape[-1]
    expected = {
        "norm_weight": (norm_weight, (width,), ()),
        "norm_bias": (norm_bias, (width,), ()),
        "in_weight": (in_weight, (2 * inner, width), ()),
        "out_weight": (out_weight, (width, inner), ()),
    }
    check_tensors(NAME, x, expected)
    if uses_kernels(x) and x.numel():
        arguments = (x, *dense(norm_weight, norm_bias), in_weight, out_weight)
        return _forward_op(*arguments, residual, product_dtype(x))[0]
    return reference.transition(x, norm_weight, norm_bias, in_weight, out_weight, residual)


def _forward(*arguments):
    from megafold.evofusion.transition import launch

    return launch.forward(*arguments)


def _fake_forward(x, norm_weight, norm_bias, in_weight, out_weight, residual, dtype):
    from megafold.evofusion.transition import launch

    out = x.new_empty(x.shape, dtype=x.dtype if residual else dtype)
    if not launch.is_wide(x, in_weight):
        return out, x.new_empty(0, dtype=dtype)
    inner = (out_weight.shape[1] + 15) // 16 * 16
    return out, x.new_empty((x.numel() // x.shape[-1], 2 * inner), dtype=dtype)


def _gradients(*arguments):
    from megafold.evofusion.transition import launch

    return launch.backward(*arguments)


def _fake_gradients(grad_out, x, norm_weight, norm_bias, in_weight, out_weight, pre, residual, dtype):
    parameters = (x, norm_weight, norm_bias, in_weight, out_weight)
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in parameters)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.residual, ctx.dtype = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_pre):
    if grad_out is None:
        return (None,) * 7
    *tensors, pre = ctx.saved_tensors
    grads = _backward_op(grad_out, *tensors, pre, ctx.residual, ctx.dtype)
    return (*(None if t is None else grad for t, grad in zip(tensors, grads)), None, None)


_PARAMETERS = "Tensor x, Tensor? norm_weight, Tensor? norm_bias, Tensor in_weight, Tensor out_weight"
_OPTIONS = "bool residual, ScalarType dtype"
_backward_op = define(
    f"{NAME}_backward",
    f"(Tensor grad_out, {_PARAMETERS}, Tensor pre, {_OPTIONS}) -> ({', '.join(['Tensor'] * 5)})",
    _gradients,
    _fake_gradients,
)
_forward_op = define(
    NAME, f"({_PARAMETERS}, {_OPTIONS}) -> (Tensor, Tensor)", _forward, _fake_forward, _backward, _setup_context
)
