"""`adaptive_norm`, `condition_gate` and `conditioned_transition`: argument checks, dispatch and autograd."""

from __future__ import annotations

from torch import Tensor

from megafold.evofusion.conditioned import reference
from megafold.evofusion.operator import check_rows, check_tensors, define, product_dtype, uses_kernels
from megafold.evofusion.transition.api import transition


def adaptive_norm(
    x: Tensor,
    cond: Tensor,
    cond_norm_weight: Tensor,
    gamma_weight: Tensor,
    gamma_bias: Tensor,
    beta_weight: Tensor,
) -> Tensor:
    """AF3 algorithm 26: LN(x) * sigmoid(c gamma_weight^T + gamma_bias) + c beta_weight^T, c = LN(cond).

    Args:
        x: [..., C], fp32, bf16 or fp16 (fp64 through the reference).
        cond: [..., D] with the leading dimensions of x. C, D = 16, 32, 64 or 128 run in one kernel; others, as 801, go
            through the vendor's products on padded copies.
        cond_norm_weight: [D], of the conditioning's LayerNorm, which has no bias; that of x has no parameters.
        gamma_weight, beta_weight: [C, D]. gamma_bias: [C].

    Returns:
        [..., C], contiguous, in the dtype of products.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward (kernels only).
    """
    name = "adaptive_norm"
    width, depth = check_rows(name, "x", x), check_rows(name, "cond", cond)
    expected = {
        "cond": (cond, (*x.shape[:-1], depth), ()),
        "cond_norm_weight": (cond_norm_weight, (depth,), ()),
        "gamma_weight": (gamma_weight, (width, depth), ()),
        "gamma_bias": (gamma_bias, (width,), ()),
        "beta_weight": (beta_weight, (width, depth), ()),
    }
    check_tensors(name, x, expected)
    arguments = (x, cond, cond_norm_weight, gamma_weight, gamma_bias, beta_weight)
    if uses_kernels(x) and x.numel():
        return _norm_op(*arguments, product_dtype(x))
    return reference.adaptive_norm(*arguments).to(product_dtype(x))


def condition_gate(y: Tensor, cond: Tensor, weight: Tensor, bias: Tensor, *, residual: Tensor | None = None) -> Tensor:
    """The end of AF3 algorithm 25: residual + y * sigmoid(cond weight^T + bias), with cond as it is (not normalised).

    Args:
        y: [..., C], what was conditioned, fp32, bf16 or fp16 (fp64 through the reference).
        cond: [..., D] with the leading dimensions of y; widths as in `adaptive_norm`.
        weight: [C, D]. bias: [C].
        residual: [..., C], or None.

    Returns:
        [..., C], contiguous, in the dtype of the residual, or of the products where there is none.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward (kernels only).
    """
    name = "condition_gate"
    width, depth = check_rows(name, "y", y), check_rows(name, "cond", cond)
    expected = {
        "cond": (cond, (*y.shape[:-1], depth), ()),
        "weight": (weight, (width, depth), ()),
        "bias": (bias, (width,), ()),
        "residual": (residual, y.shape, ()),
    }
    check_tensors(name, y, expected)
    if uses_kernels(y) and y.numel():
        return _gate_op(y, cond, weight, bias, residual, product_dtype(y))
    out = reference.condition_gate(y, cond, weight, bias, residual)
    return out.to(product_dtype(y) if residual is None else residual.dtype)


def conditioned_transition(
    x: Tensor,
    cond: Tensor,
    cond_norm_weight: Tensor,
    gamma_weight: Tensor,
    gamma_bias: Tensor,
    beta_weight: Tensor,
    in_weight: Tensor,
    out_weight: Tensor,
    gate_weight: Tensor,
    gate_bias: Tensor,
    *,
    residual: bool = True,
) -> Tensor:
    """AF3 algorithm 25 around the transition (ConditionWrapper(Transition)) and its residual: three operators.

    Args:
        x: [..., C]; cond: [..., D]. The others as in `adaptive_norm`, `transition` and `condition_gate`.

    Returns:
        [..., C]; x plus the update with `residual`.
    """
    adapted = adaptive_norm(x, cond, cond_norm_weight, gamma_weight, gamma_bias, beta_weight)
    y = transition(adapted, None, None, in_weight, out_weight, residual=False)
    return condition_gate(y, cond, gate_weight, gate_bias, residual=x if residual else None)


def _launch():
    from megafold.evofusion.conditioned import launch

    return launch


def _norm_forward(x, *arguments):
    return _launch().adaptive_norm(x, *arguments).view(x.shape)


def _fake_norm(x, *arguments):
    return x.new_empty(x.shape, dtype=arguments[-1])


def _norm_gradients(grad_out, x, cond, *arguments):
    grad_x, grad_cond, *grads = _launch().adaptive_norm_backward(grad_out, x, cond, *arguments)
    return (grad_x.view(x.shape), grad_cond.view(cond.shape), *grads)


def _fake_norm_gradients(grad_out, *arguments):
    return tuple(t.new_empty(t.shape) for t in arguments[:6])


def _norm_context(ctx, inputs, output) -> None:
    *tensors, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)


def _norm_backward(ctx, grad_out):
    return (*_norm_backward_op(grad_out, *ctx.saved_tensors, ctx.dtype), None)


def _gate_forward(y, *arguments):
    return _launch().condition_gate(y, *arguments).view(y.shape)


def _fake_gate(y, cond, weight, bias, residual, dtype):
    return y.new_empty(y.shape, dtype=dtype if residual is None else residual.dtype)


def _gate_gradients(grad_out, y, cond, *arguments):
    grad_y, grad_cond, *grads = _launch().condition_gate_backward(grad_out, y, cond, *arguments)
    return (grad_y.view(y.shape), grad_cond.view(cond.shape), *grads)


def _fake_gate_gradients(grad_out, *arguments):
    return tuple(t.new_empty(t.shape) for t in arguments[:4])


def _gate_context(ctx, inputs, output) -> None:
    *tensors, residual, ctx.dtype = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(*tensors)


def _gate_backward(ctx, grad_out):
    grads = _gate_backward_op(grad_out, *ctx.saved_tensors, ctx.dtype)
    return (*grads, grad_out if ctx.has_residual else None, None)


_NORM = (
    "Tensor x, Tensor cond, Tensor cond_norm_weight, Tensor gamma_weight, Tensor gamma_bias, Tensor beta_weight, "
    "ScalarType dtype"
)
_GATE = "Tensor y, Tensor cond, Tensor weight, Tensor bias"
_norm_backward_op = define(
    "adaptive_norm_backward",
    f"(Tensor grad_out, {_NORM}) -> ({', '.join(['Tensor'] * 6)})",
    _norm_gradients,
    _fake_norm_gradients,
)
_norm_op = define("adaptive_norm", f"({_NORM}) -> Tensor", _norm_forward, _fake_norm, _norm_backward, _norm_context)
_gate_backward_op = define(
    "condition_gate_backward",
    f"(Tensor grad_out, {_GATE}, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    _gate_gradients,
    _fake_gate_gradients,
)
_gate_op = define(
    "condition_gate",
    f"({_GATE}, Tensor? residual, ScalarType dtype) -> Tensor",
    _gate_forward,
    _fake_gate,
    _gate_backward,
    _gate_context,
)
