"""The mean outer product of two projections of an MSA, projected to pairs, in chunks of rows i.

The [N, N, H * H] tensor exists for a chunk at a time only; the backward makes it anew. The vendor's matrix products do
the work: at S = 512 they are all of it.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megafold.evofusion.msa.regroup import in_chunks
from megafold.operators import define

CHUNK_ELEMENTS = 1 << 25
"""Most elements of the outer product at once: 64 MiB in 16-bit."""


def outer_product(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """bias[p] + sum over s of a[s, i, d] b[s, j, e] weight[p, (d, e)], for all rows i of pairs or a block of them.

    a [B, S, R, H], b [B, S, N, H], weight [P, H * H], bias [P] -> [B, R, N, P].
    """
    return _forward_op(a, b, weight, bias)


def _chunks(a: Tensor, b: Tensor) -> Iterator[slice]:
    (rows, hidden), size = a.shape[2:], b.shape[2]
    step = max(1, CHUNK_ELEMENTS // max(1, size * hidden * hidden))
    return (slice(start, min(start + step, rows)) for start in range(0, rows, step))


def _outer(a: Tensor, b: Tensor) -> Tensor:
    """a [S, I, H], b [S, N, H] -> [I * N, H * H]."""
    (_, rows, hidden), columns = a.shape, b.shape[1]
    product = a.flatten(1).mT @ b.flatten(1)
    return in_chunks(product.view(rows, hidden, columns, hidden), -3, -2).view(rows * columns, hidden * hidden)


def _summed_rows(x: Tensor) -> Tensor:
    """The sum [P] of rows [M, P], in fp32 or the wider dtype of x."""
    if x.is_cuda and not torch.version.hip and x.dtype in (torch.float16, torch.bfloat16):
        # A product with ones reads rows as they lie; a reduction over the first dimension is several times slower.
        return torch.mm(x.mT, x.new_ones(x.shape[0], 8), out_dtype=torch.float32)[:, 0]
    return x.sum(0, dtype=torch.float64 if x.dtype == torch.float64 else torch.float32)


def _forward(a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    (batch, _, rows, _), w = a.shape, weight.to(a.dtype)
    shift = a.new_zeros(w.shape[0]) if bias is None else bias.to(a.dtype)
    out = a.new_empty((batch, rows, b.shape[2], weight.shape[0]))
    for left, right, result in zip(a, b, out):
        for part in _chunks(a, b):
            torch.addmm(shift, _outer(left[:, part], right), w.mT, out=result[part].view(-1, w.shape[0]))
    return out


def _gradients(grad_out: Tensor, a: Tensor, b: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, ...]:
    (batch, depth, size, hidden), w = b.shape, weight.to(a.dtype)
    grad_out = grad_out.contiguous()
    wide = torch.float64 if a.dtype == torch.float64 else torch.float32
    grad_a = torch.empty(a.shape, dtype=a.dtype, device=a.device)
    grad_b = torch.zeros((batch, depth, size * hidden), dtype=wide, device=a.device)
    grad_weight = torch.zeros(weight.shape, dtype=wide, device=a.device)
    for item in range(batch):
        right = b[item].flatten(1)
        for part in _chunks(a, b):
            left = a[item][:, part]
            upstream = grad_out[item, part].flatten(0, 1)
            grad_weight += upstream.mT @ _outer(left, b[item])
            rows = part.stop - part.start
            grad = in_chunks((upstream @ w).view(rows, size, hidden, hidden), -3, -2).view(rows * hidden, -1)
            grad_a[item, :, part] = (right @ grad.mT).view(depth, rows, hidden)
            grad_b[item] += left.flatten(1) @ grad
    grad_bias = a.new_empty(0) if bias is None else _summed_rows(grad_out.flatten(0, 2)).to(bias.dtype)
    return grad_a, grad_b.view(b.shape).to(b.dtype), grad_weight.to(weight.dtype), grad_bias


def _fake_forward(a, b, weight, bias):
    return a.new_empty((a.shape[0], a.shape[2], b.shape[2], weight.shape[0]))


def _fake_gradients(grad_out, a, *others):
    return tuple(a.new_empty(0) if t is None else t.new_empty(t.shape) for t in (a, *others))


def _setup_context(ctx, inputs, output) -> None:
    ctx.save_for_backward(*inputs)


def _backward(ctx, grad_out):
    *tensors, bias = ctx.saved_tensors
    *grads, grad_bias = _backward_op(grad_out, *tensors, bias)
    return (*grads, None if bias is None else grad_bias)


_backward_op = define(
    "outer_product_mean_backward",
    "(Tensor grad_out, Tensor a, Tensor b, Tensor weight, Tensor? bias) -> (Tensor, Tensor, Tensor, Tensor)",
    _gradients,
    _fake_gradients,
)
_forward_op = define(
    "outer_product_mean",
    "(Tensor a, Tensor b, Tensor weight, Tensor? bias) -> Tensor",
    _forward,
    _fake_forward,
    _backward,
    _setup_context,
)
