"""`triangle_multiplication`: argument checks, dispatch and autograd."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megafold.evofusion.operator import (
    check_dropped,
    check_rows,
    check_tensors,
    dense,
    is_narrow,
    product_dtype,
    refuse,
    uses_kernels,
)
from megafold.evofusion.triangle_multiplication import reference
from megafold.operators import define

NAME = "triangle_multiplication"

KEPT_ELEMENTS = 1 << 26
"""Of pairs (N = 724 of width 128) up to which the operands stay for the backward by default, four tensors of pairs in
the dtype of products: a checkpoint runs a block's forward again right before its backward."""


def triangle_multiplication(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    in_weight: Tensor,
    gate_weight: Tensor,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor,
    out_weight: Tensor,
    *,
    mix: Literal["outgoing", "incoming"],
    mask: Tensor | None = None,
    dropped: Tensor | None = None,
    residual: bool = True,
    keep_operands: bool | None = None,
) -> Tensor:
    """AF3 algorithms 12 ("outgoing") and 13 ("incoming") on a residual stream.

    left, right = mask * glu(LN(x) in_weight^T); y = (LN(left o right) out_weight^T) * dropped * sigmoid(LN(x)
    gate_weight^T), where the product sums over the third point of the triangle; the result is x + y.

    Args:
        x: [B, N, N, C], fp32, bf16 or fp16 (fp64 through the reference). C = 16, 32, 64 or 128 runs in kernels.
        norm_weight, norm_bias, out_norm_weight, out_norm_bias: [C], of the two LayerNorms (eps 1e-5).
        in_weight: [4 C, C]: left and right values, then left and right gates (the stock `left_right_proj`).
        gate_weight, out_weight: [C, C].
        mix: which triangle.
        mask: [B, N] or [B, N, N] bool, True = keep; a pair is kept where both tokens are.
        dropped: the drawn factor of a row- or column-shared dropout, 0 or 1 / (1 - p): [B, 1, N, C] or [B, N, 1, C].
        residual: add x. Without, the result has the dtype of the products.
        keep_operands: kernels keep left and right for the backward, [B, 2 C, N, N] in the dtype of products, instead of
            making them again. By default up to KEPT_ELEMENTS elements of x.

    Returns:
        [B, N, N, C], contiguous.

    Raises:
        ValueError: an argument has a wrong shape, dtype, device or value; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward (kernels only).
    """
    width = check_rows(NAME, "x", x, 4)
    batch, size = x.shape[:2]
    if x.shape[2] != size:
        refuse(NAME, "x", f"has shape {list(x.shape)}", "[B, N, N, C]")
    if mix not in ("outgoing", "incoming"):
        refuse(NAME, "mix", f"is {mix!r}", "'outgoing' or 'incoming'")
    vectors = {
        "norm_weight": norm_weight,
        "norm_bias": norm_bias,
        "out_norm_weight": out_norm_weight,
        "out_norm_bias": out_norm_bias,
    }
    check_tensors(
        NAME,
        x,
        {
            **{name: (vector, (width,), ()) for name, vector in vectors.items()},
            "in_weight": (in_weight, (4 * width, width), ()),
            "gate_weight": (gate_weight, (width, width), ()),
            "out_weight": (out_weight, (width, width), ()),
        },
    )
    if mask is not None:
        if mask.shape == (batch, size) and mask.dtype == torch.bool:
            mask = mask[:, :, None] & mask[:, None, :]
        check_tensors(NAME, x, {"mask": (mask, (batch, size, size), (torch.bool,))})
    check_dropped(NAME, dropped, x.shape, x.device)
    norm_weight, norm_bias, out_norm_weight, out_norm_bias = dense(*vectors.values())
    parameters = (norm_weight, norm_bias, in_weight, gate_weight, out_norm_weight, out_norm_bias, out_weight)
    outgoing = mix == "outgoing"
    if uses_kernels(x) and is_narrow(width) and x.numel():
        kept = x.numel() <= KEPT_ELEMENTS if keep_operands is None else keep_operands
        keep = kept and torch.is_grad_enabled()
        return _forward_op(x, *parameters, mask, dropped, outgoing, residual, keep, product_dtype(x))[0]
    return reference.triangle_multiplication(x, *parameters, outgoing, mask, dropped, residual)


def _forward(*arguments):
    from megafold.evofusion.triangle_multiplication import launch

    return launch.forward(*arguments)


def _fake_forward(x, *arguments):
    residual, keep, dtype = arguments[-3:]
    batch, size, _, width = x.shape
    padded = (size + 15) // 16 * 16
    out = x.new_empty(x.shape, dtype=x.dtype if residual else dtype)
    operands = x.new_empty((batch, 2 * width, padded, padded) if keep else (0,), dtype=dtype)
    product = x.new_empty((batch, width, padded, padded), dtype=dtype)
    folded = x.new_empty((13 * width, width), dtype=dtype), x.new_empty(6 * width, dtype=torch.float32)
    return out, product, operands, *folded


def _gradients(*arguments):
    from megafold.evofusion.triangle_multiplication import launch

    return launch.backward(*arguments)


def _fake_gradients(grad_out, *arguments):
    return tuple(t.new_empty(t.shape) for t in arguments[:8])


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.outgoing, ctx.residual, _, ctx.dtype = inputs
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, *_):
    if grad_out is None:
        return (None,) * 14
    grads = _backward_op(grad_out, *ctx.saved_tensors, ctx.outgoing, ctx.residual, ctx.dtype)
    return (*grads, *(None,) * 6)


_PARAMETERS = (
    "Tensor x, Tensor norm_weight, Tensor norm_bias, Tensor in_weight, Tensor gate_weight, Tensor out_norm_weight, "
    "Tensor out_norm_bias, Tensor out_weight, Tensor? mask, Tensor? dropped"
)
_OPTIONS = "bool outgoing, bool residual"
_backward_op = define(
    f"{NAME}_backward",
    f"(Tensor grad_out, {_PARAMETERS}, Tensor product, Tensor operands, Tensor folded, Tensor shift, {_OPTIONS}, "
    "ScalarType dtype) "
    f"-> ({', '.join(['Tensor'] * 8)})",
    _gradients,
    _fake_gradients,
)
_forward_op = define(
    NAME,
    f"({_PARAMETERS}, {_OPTIONS}, bool keep, ScalarType dtype) -> ({', '.join(['Tensor'] * 5)})",
    _forward,
    _fake_forward,
    _backward,
    _setup_context,
)
