"""`windowed_attention`: argument checks, dispatch and autograd."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megafold.evofusion.operator import REFERENCE_DTYPES, check_rows, check_tensors, product_dtype, refuse, uses_kernels
from megafold.evofusion.windowed_attention import reference
from megafold.operators import define

NAME = "windowed_attention"
WIDEST_WINDOW, WIDEST_HEAD = 64, 128


def windowed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None = None,
    windowed_mask: Tensor | None = None,
    *,
    scale: float | None = None,
) -> Tensor:
    """Attention of atoms within their window of w atoms and the one before, with a bias for each pair.

    AF3 algorithms 5 and 7 as the stock model has them (`Attend.local_attn`): softmax(scale q k^T + bias) v over the
    keys that exist and that both masks keep. Keys, values and masks are not unfolded.

    Args:
        q, k, v: [B, M, H, D], fp32, bf16 or fp16 (fp64 through the reference), of one dtype; strided views are read as
            they are. Under autocast they are cast to its dtype. Kernels run for D up to 128 and w up to 64.
        bias: [B, H, nw, w, 2 w] with nw = ceil(M / w), in any floating dtype; the first w keys are those of the window
            before.
        mask: [B, M] bool, True = atom exists. windowed_mask: [B, nw, w, 2 w] bool, True = the query sees the key.
        scale: factor of q k^T; D ** -0.5 by default.

    Returns:
        [B, M, H, D], contiguous, in the dtype of q. A query that sees no key gives 0 and zero gradients.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward (kernels only).
    """
    dim = check_rows(NAME, "q", q, 4)
    dtype = product_dtype(q)
    q, k, v = q.to(dtype), k.to(dtype), v.to(dtype)
    batch, atoms, heads, _ = q.shape
    if bias.dim() != 5 or bias.shape[4] != 2 * bias.shape[3]:
        refuse(NAME, "bias", f"has shape {list(bias.shape)}", "[B, H, nw, w, 2 w]")
    size = bias.shape[3]
    windows = -(-atoms // size)
    expected = {
        "k": (k, q.shape, (q.dtype,)),
        "v": (v, q.shape, (q.dtype,)),
        "bias": (bias, (batch, heads, windows, size, 2 * size), REFERENCE_DTYPES),
        "mask": (mask, (batch, atoms), (torch.bool,)),
        "windowed_mask": (windowed_mask, (batch, windows, size, 2 * size), (torch.bool,)),
    }
    check_tensors(NAME, q, expected)
    scale = dim**-0.5 if scale is None else float(scale)
    if not math.isfinite(scale):
        refuse(NAME, "scale", f"is {scale}", "a finite number")
    if uses_kernels(q) and dim <= WIDEST_HEAD and size <= WIDEST_WINDOW and q.numel():
        return _forward_op(q, k, v, bias, mask, windowed_mask, scale)[0]
    return reference.windowed_attention(q, k, v, bias, mask, windowed_mask, scale)


def _forward(*arguments):
    from megafold.evofusion.windowed_attention import launch

    return launch.forward(*arguments)


def _fake_forward(q, k, v, bias, mask, windowed_mask, scale):
    batch, atoms, heads, _ = q.shape
    return q.new_empty(q.shape), q.new_empty((batch, heads, atoms), dtype=torch.float32)


def _gradients(*arguments):
    from megafold.evofusion.windowed_attention import launch

    return launch.backward(*arguments)


def _fake_gradients(grad_out, q, k, v, bias, *rest):
    return tuple(t.new_empty(t.shape) for t in (q, k, v, bias))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.scale = inputs
    ctx.save_for_backward(*tensors, *output)
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_out, grad_lse):
    if grad_out is None:
        return (None,) * 7
    return (*_backward_op(grad_out, *ctx.saved_tensors, ctx.scale), None, None, None)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor bias, Tensor? mask, Tensor? windowed_mask"
_backward_op = define(
    f"{NAME}_backward",
    f"(Tensor grad_out, {_INPUTS}, Tensor out, Tensor lse, float scale) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
_forward_op = define(
    NAME, f"({_INPUTS}, float scale) -> (Tensor, Tensor)", _forward, _fake_forward, _backward, _setup_context
)
