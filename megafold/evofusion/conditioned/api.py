"""`adaptive_norm`, `condition_gate` and `conditioned_transition`: argument checks, dispatch and autograd."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megafold.evofusion.conditioned import reference
from megafold.evofusion.launch import round_up
from megafold.evofusion.operator import check_rows, check_tensors, dense, is_narrow, product_dtype, refuse, uses_kernels
from megafold.evofusion.transition.api import transition
from megafold.operators import define


class Conditioning(NamedTuple):
    """A conditioning [..., D] and what every layer would make of it again: see :func:`prepare`.

    Attributes:
        cond: as it is; gradients flow to it alone.
        normed, padded: (cond - mean) / std and cond, [..., D filled up to a multiple of 16] in the dtype of products.
    """

    cond: Tensor
    normed: Tensor
    padded: Tensor


def prepare(cond: Tensor) -> Conditioning | Tensor:
    """A conditioning that several layers share, for `adaptive_norm` and `condition_gate` under the same autocast.

    The scale of their LayerNorms goes into their weights, so what is normalised is the same for all. Where no kernels
    run it stays what it is.

    Args:
        cond: [..., D], fp32, bf16 or fp16 (fp64 passes).

    Raises:
        ValueError: cond has a wrong dtype or shape.
    """
    check_rows("prepare", "cond", cond)
    if not (uses_kernels(cond) and cond.numel()):
        return cond
    dtype, plain = product_dtype(cond), cond.detach().contiguous()
    copies = plain.dtype != dtype or round_up(plain.shape[-1]) != plain.shape[-1]
    normed, padded = _prepare_op(plain, copies, dtype)
    return Conditioning(cond, normed, padded if copies else plain)


def adaptive_norm(
    x: Tensor,
    cond: Tensor | Conditioning,
    cond_norm_weight: Tensor,
    gamma_weight: Tensor,
    gamma_bias: Tensor,
    beta_weight: Tensor,
) -> Tensor:
    """AF3 algorithm 26: LN(x) * sigmoid(c gamma_weight^T + gamma_bias) + c beta_weight^T, c = LN(cond).

    Args:
        x: [..., C], fp32, bf16 or fp16 (fp64 through the reference).
        cond: [..., D] with the leading dimensions of x, or what `prepare` made of it. C, D = 16, 32, 64 or 128 run in
            one kernel; others, as 801, go through the vendor's products on padded copies.
        cond_norm_weight: [D], of the conditioning's LayerNorm, which has no bias; that of x has no parameters.
        gamma_weight, beta_weight: [C, D]. gamma_bias: [C].

    Returns:
        [..., C], contiguous, in the dtype of products.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward (kernels only).
    """
    return _adaptive_norm(x, cond, cond_norm_weight, gamma_weight, gamma_bias, beta_weight, passes=False)[0]


def adaptive_norm_and_pass(
    x: Tensor,
    cond: Tensor | Conditioning,
    cond_norm_weight: Tensor,
    gamma_weight: Tensor,
    gamma_bias: Tensor,
    beta_weight: Tensor,
) -> tuple[Tensor, Tensor, Tensor | Conditioning]:
    """`adaptive_norm`, and x and cond for what follows: what flows back to those is added in its kernels.

    Args, raises: as `adaptive_norm`. Returns: as `adaptive_norm`, then x and cond.
    """
    return _adaptive_norm(x, cond, cond_norm_weight, gamma_weight, gamma_bias, beta_weight, passes=True)


def _adaptive_norm(
    x: Tensor,
    given: Tensor | Conditioning,
    cond_norm_weight: Tensor,
    gamma_weight: Tensor,
    gamma_bias: Tensor,
    beta_weight: Tensor,
    passes: bool,
) -> tuple[Tensor, Tensor, Tensor | Conditioning]:
    name = "adaptive_norm"
    cond, normed, _ = _parts(name, given, x)
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
    if not (uses_kernels(x) and x.numel()):
        return reference.adaptive_norm(*arguments).to(product_dtype(x)), x, given
    cond_norm_weight, gamma_bias = dense(cond_norm_weight, gamma_bias)
    arguments = (x, cond, cond_norm_weight, gamma_weight, gamma_bias, beta_weight)
    if not passes:
        return _norm_op(*arguments, normed, product_dtype(x))[0], x, given
    out, x, cond = _Passing.apply(*arguments, normed, product_dtype(x))
    return out, x, given._replace(cond=cond) if isinstance(given, Conditioning) else cond


def condition_gate(
    y: Tensor, cond: Tensor | Conditioning, weight: Tensor, bias: Tensor, *, residual: Tensor | None = None
) -> Tensor:
    """The end of AF3 algorithm 25: residual + y * sigmoid(cond weight^T + bias), with cond as it is (not normalised).

    Args:
        y: [..., C], what was conditioned, fp32, bf16 or fp16 (fp64 through the reference).
        cond: [..., D] with the leading dimensions of y, or what `prepare` made of it; widths as in `adaptive_norm`.
        weight: [C, D]. bias: [C].
        residual: [..., C], or None.

    Returns:
        [..., C], contiguous, in the dtype of the residual, or of the products where there is none.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward (kernels only).
    """
    name = "condition_gate"
    cond, _, padded = _parts(name, cond, y)
    width, depth = check_rows(name, "y", y), check_rows(name, "cond", cond)
    expected = {
        "cond": (cond, (*y.shape[:-1], depth), ()),
        "weight": (weight, (width, depth), ()),
        "bias": (bias, (width,), ()),
        "residual": (residual, y.shape, ()),
    }
    check_tensors(name, y, expected)
    if uses_kernels(y) and y.numel():
        return _gate_op(y, cond, weight, *dense(bias), residual, padded, product_dtype(y))[0]
    out = reference.condition_gate(y, cond, weight, bias, residual)
    return out.to(product_dtype(y) if residual is None else residual.dtype)


def conditioned_transition(
    x: Tensor,
    cond: Tensor | Conditioning,
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
    cond = cond if isinstance(cond, Conditioning) else prepare(cond)
    weights = (cond_norm_weight, gamma_weight, gamma_bias, beta_weight)
    adapted, x, cond = adaptive_norm_and_pass(x, cond, *weights)
    y = transition(adapted, None, None, in_weight, out_weight, residual=False)
    return condition_gate(y, cond, gate_weight, gate_bias, residual=x if residual else None)


def _parts(name: str, cond: Tensor | Conditioning, x: Tensor) -> tuple[Tensor, Tensor | None, Tensor | None]:
    if not isinstance(cond, Conditioning):
        return cond, None, None
    dtype = product_dtype(x)
    for part, t in zip(("cond.normed", "cond.padded"), cond[1:]):
        if t.dtype != dtype:
            refuse(name, part, f"has dtype {t.dtype}", f"{dtype}, what was prepared under the same autocast")
        if t.device != x.device:
            refuse(name, part, f"is on {t.device}", f"the device of the first argument, {x.device}")
    return cond


def _launch():
    from megafold.evofusion.conditioned import launch

    return launch


def _prepare(*arguments):
    return _launch().prepare(*arguments)


def _fake_prepare(cond, copy, dtype):
    shape = (*cond.shape[:-1], round_up(cond.shape[-1]))
    return cond.new_empty(shape, dtype=dtype), cond.new_empty(shape if copy else (0,), dtype=dtype)


def _norm_forward(x, *arguments):
    out, pre = _launch().adaptive_norm(x, *arguments)
    return out.view(x.shape), pre


def _fake_norm(x, cond, *arguments):
    dtype = arguments[-1]
    return x.new_empty(x.shape, dtype=dtype), x.new_empty(_kept(x, cond, 2), dtype=dtype)


def _kept(x, cond, count):
    """Shape of the products that the wide backward needs."""
    width = x.shape[-1]
    return (0,) if is_narrow(width, cond.shape[-1]) else (x.numel() // width, count * width)


def _norm_gradients(grad_out, x, cond, *arguments):
    grad_x, grad_cond, *grads = _launch().adaptive_norm_backward(grad_out, x, cond, *arguments)
    return (grad_x.view(x.shape), grad_cond.view(cond.shape), *grads)


def _fake_norm_gradients(grad_out, *arguments):
    return tuple(t.new_empty(t.shape) for t in arguments[:6])


def _norm_context(ctx, inputs, output) -> None:
    *tensors, ctx.dtype = inputs
    ctx.save_for_backward(*tensors, output[1])
    ctx.set_materialize_grads(False)


def _norm_backward(ctx, grad_out, grad_pre, grad_x=None, grad_cond=None):
    if grad_out is None:
        return (grad_x, grad_cond) + (None,) * 6
    return (*_norm_backward_op(grad_out, *ctx.saved_tensors, grad_x, grad_cond, ctx.dtype), None, None)


class _Passing(torch.autograd.Function):
    """The operator with x and cond as outputs, whose gradients are arguments of the operator's backward."""

    @staticmethod
    def forward(ctx, x, cond, *arguments):
        output = _norm_op(x, cond, *arguments)
        _norm_context(ctx, (x, cond, *arguments), output)
        return output[0], x.view_as(x), cond.view_as(cond)

    @staticmethod
    def backward(ctx, grad_out, grad_x, grad_cond):
        return _norm_backward(ctx, grad_out, None, grad_x, grad_cond)


def _gate_forward(y, *arguments):
    out, pre = _launch().condition_gate(y, *arguments)
    return out.view(y.shape), pre


def _fake_gate(y, cond, weight, bias, residual, padded, dtype):
    out = y.new_empty(y.shape, dtype=dtype if residual is None else residual.dtype)
    return out, y.new_empty(_kept(y, cond, 1), dtype=dtype)


def _gate_gradients(grad_out, y, cond, *arguments):
    grad_y, grad_cond, *grads = _launch().condition_gate_backward(grad_out, y, cond, *arguments)
    return (grad_y.view(y.shape), grad_cond.view(cond.shape), *grads)


def _fake_gate_gradients(grad_out, *arguments):
    return tuple(t.new_empty(t.shape) for t in arguments[:4])


def _gate_context(ctx, inputs, output) -> None:
    *tensors, residual, padded, ctx.dtype = inputs
    ctx.has_residual = residual is not None
    ctx.save_for_backward(*tensors, padded, output[1])
    ctx.set_materialize_grads(False)


def _gate_backward(ctx, grad_out, grad_pre):
    if grad_out is None:
        return (None,) * 7
    grads = _gate_backward_op(grad_out, *ctx.saved_tensors, ctx.dtype)
    return (*grads, grad_out if ctx.has_residual else None, None, None)


_NORM = (
    "Tensor x, Tensor cond, Tensor cond_norm_weight, Tensor gamma_weight, Tensor gamma_bias, Tensor beta_weight, "
    "Tensor? normed"
)
_GATE = "Tensor y, Tensor cond, Tensor weight, Tensor bias"
_prepare_op = define(
    "prepare_conditioning", "(Tensor cond, bool copy, ScalarType dtype) -> (Tensor, Tensor)", _prepare, _fake_prepare
)
_norm_backward_op = define(
    "adaptive_norm_backward",
    f"(Tensor grad_out, {_NORM}, Tensor pre, Tensor? other_x, Tensor? other_cond, ScalarType dtype) "
    f"-> ({', '.join(['Tensor'] * 6)})",
    _norm_gradients,
    _fake_norm_gradients,
)
_norm_op = define(
    "adaptive_norm",
    f"({_NORM}, ScalarType dtype) -> (Tensor, Tensor)",
    _norm_forward,
    _fake_norm,
    _norm_backward,
    _norm_context,
)
_gate_backward_op = define(
    "condition_gate_backward",
    f"(Tensor grad_out, {_GATE}, Tensor? padded, Tensor pre, ScalarType dtype) -> (Tensor, Tensor, Tensor, Tensor)",
    _gate_gradients,
    _fake_gate_gradients,
)
_gate_op = define(
    "condition_gate",
    f"({_GATE}, Tensor? residual, Tensor? padded, ScalarType dtype) -> (Tensor, Tensor)",
    _gate_forward,
    _fake_gate,
    _gate_backward,
    _gate_context,
)
