"""Host side of triangle multiplication: kernels around the vendor's batched product."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.launch import EPS, ceil_div, configuration, in_dtype, options, round_up, shared_strides
from megafold.evofusion.triangle_multiplication import kernels
from megafold.evofusion.weight_gradient import Operand, Rows, by_rows, through_norm


class _Call:
    """Sizes, grid and weights in the dtype of products, shared by the kernels of one call."""

    def __init__(self, x, in_weight, gate_weight, out_weight, mask, dropped, dtype) -> None:
        self.x, self.dtype = x.contiguous(), dtype
        self.batch, self.size, _, self.width = x.shape
        self.padded = round_up(self.size)
        self.w_in, self.w_gate, self.w_out = in_dtype(dtype, in_weight, gate_weight, out_weight)
        self.mask = None if mask is None else mask.contiguous().view(torch.uint8)
        self.dropped = None if dropped is None else dropped.contiguous()
        self.strides = shared_strides(self.dropped)

    def common(self, kernel: str) -> tuple[tuple[int], dict]:
        """Grid and the keyword arguments of every kernel."""
        config = configuration(f"triangle_{kernel}", self.dtype, self.x.device)
        grid = self.batch * self.padded * ceil_div(self.padded, config["block_l"])
        keywords = {
            "C": self.width,
            "BLOCK_L": config["block_l"],
            "BLOCK_O": min(config["block_o"], self.width),
            "PRECISION": triton_support.float32_precision(),
        }
        return (grid,), keywords | options(config)

    def project(self, gamma: Tensor, beta: Tensor, operands: Tensor, first: int = 0) -> None:
        """Write the left and right operands to 2 C channels of [B, channels, P, P], from channel `first`."""
        grid, keywords = self.common("project")
        kernels.project_kernel[grid](
            self.x, gamma, beta, self.w_in, self.x if self.mask is None else self.mask, operands, first,
            operands.shape[1], self.size, self.padded, EPS, HAS_MASK=self.mask is not None, **keywords,
        )  # fmt: skip

    def new(self, *leading: int) -> Tensor:
        """Uninitialised [*leading, P, P] in the dtype of products."""
        return torch.empty((*leading, self.padded, self.padded), device=self.x.device, dtype=self.dtype)


def forward(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    in_weight: Tensor,
    gate_weight: Tensor,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor,
    out_weight: Tensor,
    mask: Tensor | None,
    dropped: Tensor | None,
    outgoing: bool,
    residual: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """The output [B, N, N, C] and the product [B, C, P, P] that the backward needs."""
    call = _Call(x, in_weight, gate_weight, out_weight, mask, dropped, dtype)
    with triton_support.device_guard(x.device):
        operands = call.new(call.batch, 2 * call.width)
        call.project(norm_weight, norm_bias, operands)
        product = call.new(call.batch, call.width)
        for item, result in zip(operands, product):
            left, right = item.chunk(2)
            torch.bmm(*((left, right.mT) if outgoing else (right.mT, left)), out=result)
        del operands
        out = torch.empty_like(call.x, dtype=x.dtype if residual else dtype)
        grid, keywords = call.common("output")
        kernels.output_kernel[grid](
            call.x, norm_weight, norm_bias, call.w_gate, product, out_norm_weight, out_norm_bias, call.w_out,
            call.x if dropped is None else call.dropped, out, *call.strides, call.size, call.padded, EPS,
            HAS_DROPPED=dropped is not None, RESIDUAL=residual, **keywords,
        )  # fmt: skip
    return out, product


def backward(
    grad_out: Tensor,
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    in_weight: Tensor,
    gate_weight: Tensor,
    out_norm_weight: Tensor,
    out_norm_bias: Tensor,
    out_weight: Tensor,
    mask: Tensor | None,
    dropped: Tensor | None,
    product: Tensor,
    outgoing: bool,
    residual: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Gradients of x and of the seven parameters, in the order of the arguments."""
    call = _Call(x, in_weight, gate_weight, out_weight, mask, dropped, dtype)
    grad_out = grad_out.contiguous()
    batch, width, size, padded = call.batch, call.width, call.size, call.padded
    area = padded * padded
    with triton_support.device_guard(x.device):
        # What the weights' gradients need, in the order of the weights' rows: see the kernels. The first C channels
        # hold the gradient of the projected product until the gradients of the operands take their place, and the
        # operands, made anew, the next 2 C until the gradients of their gates do.
        grads, grad_product = call.new(batch, 5 * width), call.new(batch, width)
        grid, keywords = call.common("output_gradient")
        kernels.output_gradient_kernel[grid](
            grad_out, call.x, norm_weight, norm_bias, call.w_gate, product, out_norm_weight, out_norm_bias,
            call.w_out, call.x if dropped is None else call.dropped, grad_product, grads, *call.strides, size, padded,
            EPS, HAS_DROPPED=dropped is not None, **keywords,
        )  # fmt: skip
        columns = Operand(grads, 5 * width * area, padded, area, columns=True)
        rows = Rows(batch, size, size, width, width, x.device, dtype)
        rows.add(columns, Operand(product, width * area, padded, area, columns=True), width, norm=True)
        of_output = through_norm(*rows.finish(), (out_weight,), out_norm_weight, out_norm_bias)
        call.project(norm_weight, norm_bias, grads, first=2 * width)
        _operand_gradients(grads, grad_product, outgoing)
        del grad_product
        grad_x = torch.empty_like(call.x)
        grid, keywords = call.common("input_gradient")
        kernels.input_gradient_kernel[grid](
            grad_out, call.x, norm_weight, norm_bias, call.w_in, call.w_gate, call.x if mask is None else call.mask,
            grads, grad_x, size, padded, EPS, HAS_MASK=mask is not None, RESIDUAL=residual, **keywords,
        )  # fmt: skip
        rows = Rows(batch, size, size, 5 * width, width, x.device, dtype)
        rows.add(columns, by_rows(call.x), 5 * width, norm=True)
        of_input = through_norm(*rows.finish(), (in_weight, gate_weight), norm_weight, norm_bias)
    grad_in, grad_gate, grad_gamma, grad_beta = of_input
    grad_out_weight, grad_out_gamma, grad_out_beta = of_output
    return grad_x, grad_gamma, grad_beta, grad_in, grad_gate, grad_out_gamma, grad_out_beta, grad_out_weight


def _operand_gradients(grads: Tensor, grad_product: Tensor, outgoing: bool) -> None:
    """Gradients of the left and right operands into the first 2 C of 5 C channels; the operands are the next 2 C."""
    for item, grad in zip(grads, grad_product):
        grad_left, grad_right, left, right, _ = item.chunk(5)
        if outgoing:  # product = left right^T
            torch.bmm(grad, right, out=grad_left)
            torch.bmm(grad.mT, left, out=grad_right)
        else:  # product = right^T left
            torch.bmm(right, grad, out=grad_left)
            torch.bmm(left, grad.mT, out=grad_right)
