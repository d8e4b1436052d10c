"""Host side of triangle multiplication: kernels around the vendor's batched product."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.launch import EPS, ceil_div, configuration, in_dtype, options, round_up, shared_strides
from megafold.evofusion.triangle_multiplication import kernels
from megafold.evofusion.weight_gradient import Operand, Rows, by_rows, through_norm


class Call:
    """Sizes, grid and weights in the dtype of products, shared by the kernels of one call.

    x may be R of the N rows of pairs, [B, R, N, C] (see :mod:`megafold.evosp3d.sharded_triangle`); its planes are then
    not padded with rows, since nobody multiplies them.
    """

    def __init__(self, x, in_weight, gate_weight, out_weight, mask, dropped, dtype, *, block: bool = False) -> None:
        self.x, self.dtype = x.contiguous(), dtype
        self.batch, self.rows, self.size, self.width = x.shape
        self.padded = round_up(self.size)
        self.tall = self.rows if block else self.padded
        self.weights = in_weight, gate_weight, out_weight
        self.w_in, self.w_gate, self.w_out = in_dtype(dtype, *self.weights)
        self.mask = None if mask is None else mask.contiguous().view(torch.uint8)
        self.dropped = None if dropped is None else dropped.contiguous()
        self.strides = shared_strides(self.dropped)
        self.sizes = self.rows, self.size, self.tall, self.padded

    def common(self, kernel: str) -> tuple[tuple[int], dict]:
        """Grid and the keyword arguments of every kernel."""
        config = configuration(f"triangle_{kernel}", self.dtype, self.x.device)
        grid = self.batch * self.tall * ceil_div(self.padded, config["block_l"])
        keywords = {
            "C": self.width,
            "BLOCK_L": config["block_l"],
            "BLOCK_O": min(config["block_o"], self.width),
            "PRECISION": triton_support.float32_precision(),
        }
        return (grid,), keywords | options(config)

    def new(self, channels: int) -> Tensor:
        """Uninitialised [B, channels, T, P] in the dtype of products."""
        shape = (self.batch, channels, self.tall, self.padded)
        return torch.empty(shape, device=self.x.device, dtype=self.dtype)

    def project(self, gamma: Tensor, beta: Tensor, operands: Tensor, first: int = 0) -> None:
        """Write the left and right operands to 2 C channels of [B, channels, T, P], from channel `first`."""
        grid, keywords = self.common("project")
        kernels.project_kernel[grid](
            self.x, gamma, beta, self.w_in, self.x if self.mask is None else self.mask, operands, first,
            operands.shape[1], *self.sizes, EPS, HAS_MASK=self.mask is not None, **keywords,
        )  # fmt: skip

    def output(
        self, gamma: Tensor, beta: Tensor, product: Tensor, out_gamma: Tensor, out_beta: Tensor, residual: bool
    ) -> Tensor:
        """The rows [B, R, N, C] from the product [B, C, T, P]."""
        out = torch.empty_like(self.x, dtype=self.x.dtype if residual else self.dtype)
        grid, keywords = self.common("output")
        kernels.output_kernel[grid](
            self.x, gamma, beta, self.w_gate, product, out_gamma, out_beta, self.w_out,
            self.x if self.dropped is None else self.dropped, out, *self.strides, *self.sizes, EPS,
            HAS_DROPPED=self.dropped is not None, RESIDUAL=residual, **keywords,
        )  # fmt: skip
        return out

    def output_gradient(
        self, grad_out: Tensor, gamma: Tensor, beta: Tensor, product: Tensor, out_gamma: Tensor, out_beta: Tensor
    ) -> tuple[Tensor, Tensor]:
        """[B, 5 C, T, P], in the order of the weights' rows, and the gradient of the product [B, C, T, P].

        The first C channels hold the gradient of the projected product, the last C that of the gate: see the kernels.
        """
        grads, grad_product = self.new(5 * self.width), self.new(self.width)
        grid, keywords = self.common("output_gradient")
        kernels.output_gradient_kernel[grid](
            grad_out, self.x, gamma, beta, self.w_gate, product, out_gamma, out_beta, self.w_out,
            self.x if self.dropped is None else self.dropped, grad_product, grads, *self.strides, *self.sizes, EPS,
            HAS_DROPPED=self.dropped is not None, **keywords,
        )  # fmt: skip
        return grads, grad_product

    def of_output_weights(
        self, grads: Tensor, product: Tensor, out_gamma: Tensor, out_beta: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of out_weight and of the second LayerNorm, before the first C channels are written again."""
        rows = Rows(self.batch, self.rows, self.size, self.width, self.width, self.x.device, self.dtype)
        rows.add(self._columns(grads), self._columns(product), self.width, norm=True)
        return through_norm(*rows.finish(), self.weights[2:], out_gamma, out_beta)

    def input_gradient(
        self, grad_out: Tensor, gamma: Tensor, beta: Tensor, grads: Tensor, residual: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gradient of x, and those of in_weight, gate_weight and the first LayerNorm.

        The first 2 C channels of ``grads`` hold the gradients of the operands.
        """
        grad_x = torch.empty_like(self.x)
        grid, keywords = self.common("input_gradient")
        kernels.input_gradient_kernel[grid](
            grad_out, self.x, gamma, beta, self.w_in, self.w_gate, self.x if self.mask is None else self.mask,
            grads, grad_x, *self.sizes, EPS, HAS_MASK=self.mask is not None, RESIDUAL=residual, **keywords,
        )  # fmt: skip
        rows = Rows(self.batch, self.rows, self.size, 5 * self.width, self.width, self.x.device, self.dtype)
        rows.add(self._columns(grads), by_rows(self.x), 5 * self.width, norm=True)
        return grad_x, through_norm(*rows.finish(), self.weights[:2], gamma, beta)

    def _columns(self, planes: Tensor) -> Operand:
        area = self.tall * self.padded
        return Operand(planes, planes.shape[1] * area, self.padded, area, columns=True)


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
    call = Call(x, in_weight, gate_weight, out_weight, mask, dropped, dtype)
    with triton_support.device_guard(x.device):
        operands = call.new(2 * call.width)
        call.project(norm_weight, norm_bias, operands)
        product = call.new(call.width)
        for item, result in zip(operands, product):
            left, right = item.chunk(2)
            torch.bmm(*((left, right.mT) if outgoing else (right.mT, left)), out=result)
        del operands
        out = call.output(norm_weight, norm_bias, product, out_norm_weight, out_norm_bias, residual)
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
    call = Call(x, in_weight, gate_weight, out_weight, mask, dropped, dtype)
    grad_out = grad_out.contiguous()
    with triton_support.device_guard(x.device):
        # The gradients of the operands take the place of the first C channels, and the operands, made anew, the next
        # 2 C until the gradients of their gates do.
        of_norms = norm_weight, norm_bias, product, out_norm_weight, out_norm_bias
        grads, grad_product = call.output_gradient(grad_out, *of_norms)
        of_output = call.of_output_weights(grads, product, out_norm_weight, out_norm_bias)
        call.project(norm_weight, norm_bias, grads, first=2 * call.width)
        for item, grad in zip(grads, grad_product):
            grad_left, grad_right, left, right, _ = item.chunk(5)
            operand_gradients(grad, left, right, outgoing, out=(grad_left, grad_right))
        del grad_product
        grad_x, of_input = call.input_gradient(grad_out, norm_weight, norm_bias, grads, residual)
    grad_in, grad_gate, grad_gamma, grad_beta = of_input
    grad_out_weight, grad_out_gamma, grad_out_beta = of_output
    return grad_x, grad_gamma, grad_beta, grad_in, grad_gate, grad_out_gamma, grad_out_beta, grad_out_weight


def operand_gradients(grad: Tensor, left: Tensor, right: Tensor, outgoing: bool, *, out: tuple[Tensor, Tensor]) -> None:
    """Gradients of the operands from that of their product, all [channels, N, N], into ``out``."""
    grad_left, grad_right = out
    if outgoing:  # product = left right^T
        torch.bmm(grad, right, out=grad_left)
        torch.bmm(grad.mT, left, out=grad_right)
    else:  # product = right^T left
        torch.bmm(right, grad, out=grad_left)
        torch.bmm(left, grad.mT, out=grad_right)
