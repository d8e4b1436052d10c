"""The triangle update (AF3 algorithms 12 and 13) on a block of rows, EvoFusion's kernels around the product.

As :func:`megafold.evosp3d.triangle.triangle_multiplication`, with the same volume, LayerNorm, dropout and residual
included: rows are projected to operands, operands go to a sharding over channels and their product comes back. Channels
travel in pieces, so that one piece is multiplied while the next is on its way, in both directions and in the backward,
where the gradients of the output's weights are taken under the first message. The first piece there and the last one
back have nothing to run under, so long structures travel in more pieces than two. Operands are kept as they were
received: the backward sends gradients only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.operator import dense, product_dtype
from megafold.evofusion.vendor_product import multiply
from megafold.evosp3d.collectives import Exchange, Landing

if TYPE_CHECKING:
    from megafold.evofusion.triangle_multiplication.launch import Call
    from megafold.evosp3d.mesh import Shards

NAME = "triangle_multiplication"
LEAST_PIECES = 2
# Of operands that a rank sends at once: smaller messages waste the link (between two H200 38 MB take 155 microseconds,
# half of that 92). Of channels that it multiplies at once: eight products of N = 1536 fill a device 4.4 times.
PIECE_BYTES, PIECE_CHANNELS = 96 << 20, 8


def triangle_update(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    in_weight: Tensor,
    gate_weight: Tensor,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor,
    out_weight: Tensor,
    *,
    outgoing: bool,
    mask: Tensor | None,
    dropped: Tensor | None,
    shards: Shards,
) -> Tensor:
    """Rows x [b, n, N, C] plus their update, for a width and a device that kernels take.

    Args:
        mask: [b, n, N] bool. dropped: the drawn factor, [b, 1, N, C] or [b, n, 1, C]. The weights are those of
            :func:`megafold.evofusion.triangle_multiplication.api.triangle_multiplication`.
    """
    norm_weight, norm_bias, out_norm_weight, out_norm_bias = dense(
        norm_weight, norm_bias, out_norm_weight, out_norm_bias
    )
    weights = (norm_weight, norm_bias, in_weight, gate_weight, out_norm_weight, out_norm_bias, out_weight)
    return _Update.apply(x, *weights, mask, dropped, outgoing, shards, product_dtype(x))


class _Update(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, *arguments: Any) -> Tensor:
        *weights, mask, dropped, outgoing, shards, dtype = arguments
        norm_weight, norm_bias, _, _, out_norm_weight, out_norm_bias, _ = weights
        call = _call(x, weights, mask, dropped, dtype)
        with triton_support.device_guard(x.device):
            operands = call.new(2 * call.width)
            if x.numel():
                call.project(norm_weight, norm_bias, operands)
            halves = operands.unflatten(1, (2, -1))
            pieces = _pieces(operands, call.size, shards)
            flights = [
                _send(Exchange(2, length, 3, call.size), halves[:, :, first : first + length], shards)
                for first, length in pieces
            ]
            del operands, halves
            received, backs = [], []
            for flight, (_, length) in zip(flights, pieces):
                received.append(flight())
                product = _product(received[-1], call.size, outgoing)
                backs.append(_send(Exchange(2, call.size, 1, length), product, shards))
            product = call.new(call.width)
            for back, (first, length) in zip(backs, pieces):
                back(into=product[:, first : first + length])
            out = torch.empty_like(x)
            if x.numel():
                out = call.output(norm_weight, norm_bias, product, out_norm_weight, out_norm_bias, residual=True)
        ctx.save_for_backward(x, *weights, mask, dropped, product, *received)
        ctx.outgoing, ctx.shards, ctx.dtype, ctx.pieces = outgoing, shards, dtype, pieces
        return out

    @staticmethod
    def backward(ctx: Any, grad_out: Tensor) -> tuple[Tensor | None, ...]:
        tensors = ctx.saved_tensors  # once: under checkpointing they cannot be unpacked again
        shards, pieces = ctx.shards, ctx.pieces
        (x, *weights, mask, dropped, product), received = tensors[:11], tensors[11:]
        norm_weight, norm_bias, _, _, out_norm_weight, out_norm_bias, out_weight = weights
        call, grad_out = _call(x, weights, mask, dropped, ctx.dtype), grad_out.contiguous()
        with triton_support.device_guard(x.device):
            if x.numel():
                of_norms = (norm_weight, norm_bias, product, out_norm_weight, out_norm_bias)
                grads, grad_product = call.output_gradient(grad_out, *of_norms)
            else:
                grads, grad_product = call.new(5 * call.width), call.new(call.width)
            flights = [
                _send(Exchange(1, length, 2, call.size), grad_product[:, first : first + length], shards)
                for first, length in pieces
            ]
            del grad_product
            of_output = _zeros(out_weight, out_norm_weight, out_norm_bias)
            if x.numel():
                of_output = call.of_output_weights(grads, product, out_norm_weight, out_norm_bias)
            backs = []
            for flight, both, (_, length) in zip(flights, received, pieces):
                of_both = _operand_gradients(flight(), both, call.size, ctx.outgoing)
                backs.append(_send(Exchange(3, call.size, 2, length), of_both, shards))
            of_operands = grads[:, : 2 * call.width].unflatten(1, (2, -1))
            for back, (first, length) in zip(backs, pieces):
                back(into=of_operands[:, :, first : first + length])
            grad_x, of_input = torch.empty_like(x), _zeros(*weights[2:4], norm_weight, norm_bias)
            if x.numel():
                grad_x, of_input = call.input_gradient(grad_out, norm_weight, norm_bias, grads, residual=True)
        grad_in, grad_gate, *of_norm = of_input
        grad_out_weight, *of_out_norm = of_output
        return grad_x, *of_norm, grad_in, grad_gate, *of_out_norm, grad_out_weight, *(None,) * 5


def _call(x: Tensor, weights: Any, mask: Tensor | None, dropped: Tensor | None, dtype: torch.dtype) -> Call:
    from megafold.evofusion.triangle_multiplication.launch import Call

    return Call(x, weights[2], weights[3], weights[6], mask, dropped, dtype, block=True)


def _zeros(*weights: Tensor) -> tuple[Tensor, ...]:
    """Gradients on a rank without rows."""
    return tuple(torch.zeros_like(weight) for weight in weights)


def _pieces(operands: Tensor, total: int, shards: Shards) -> list[tuple[int, int]]:
    """First channel and number of channels of what travels at once, of operands [b, 2 C, n, P] of N rows in all.

    The same on all ranks, of which the first has the most rows.
    """
    batch, width = operands.shape[0], operands.shape[1] // 2
    rows, ranks = shards.block(total, 0)[1], shards.size
    sent = 2 * batch * width * rows * total * operands.element_size() * (ranks - 1) // ranks
    count = LEAST_PIECES
    while sent > count * PIECE_BYTES and width // (2 * count * ranks) >= PIECE_CHANNELS:
        count *= 2
    step = -(-width // count)
    return [(first, min(step, width - first)) for first in range(0, width, step)]


def _send(what: Exchange, x: Tensor, shards: Shards) -> Landing:
    def stay(into: Tensor | None = None) -> Tensor:
        return x if into is None else into.copy_(x)

    return stay if shards.size == 1 else what.launch(x, shards, NAME)


def _product(both: Tensor, size: int, outgoing: bool) -> Tensor:
    """Left and right operand [b, 2, h, N, P] of some channels, 0 beyond N columns -> product [b, h, N, P], likewise."""
    out = torch.empty_like(both[:, 0], memory_format=torch.contiguous_format)
    for (left, right), result in zip(both, out):
        if outgoing:  # sum over k of l[i, k] r[j, k]
            multiply(left, right.mT, out=result[..., :size])
        else:  # sum over k of l[k, j] r[k, i]
            multiply(right[..., :size].mT, left, out=result)
    out[..., size:] = 0
    return out


def _operand_gradients(grad: Tensor, both: Tensor, size: int, outgoing: bool) -> Tensor:
    """Of the product's gradient [b, h, N, P] and the operands [b, 2, h, N, P]: the operands' gradients, like these."""
    out = torch.empty_like(both, memory_format=torch.contiguous_format)
    for upstream, (left, right), (of_left, of_right) in zip(grad, both, out):
        inner = upstream[..., :size]
        if outgoing:
            multiply(inner, right, out=of_left)
            multiply(inner.mT, left, out=of_right)
        else:
            multiply(right[..., :size], upstream, out=of_left)
            multiply(left[..., :size], inner.mT, out=of_right[..., :size])
    if not outgoing:
        out[..., size:] = 0
    return out
