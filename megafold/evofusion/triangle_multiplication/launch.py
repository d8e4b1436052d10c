"""Host side of triangle multiplication: kernels around the vendor's batched product."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from types import ModuleType

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.launch import (
    EPS,
    ceil_div,
    configuration,
    hopper_kernels,
    options,
    round_up,
    shared_strides,
)
from megafold.evofusion.triangle_multiplication import joined, kernels
from megafold.evofusion.vendor_product import multiply
from megafold.evofusion.weight_gradient import product_over_rows, through_norm
from megafold.replay import launch_kernel

FOLD_ROWS, NORMALIZED_PAIRS = 16, 32
"""Rows of weights that a program of `fold_kernel` takes, and pairs that one of the normalising kernels takes."""

GATED = ("project", "output", "output_gradient", "gate_gradient")
"""Kernels with a sigmoid."""

REGISTERS_ALONE = 240
"""Of the kernel for sm_90 without a third group of warps, where a configuration for the one with it does not apply."""

PAIRS_FOR_HOPPER = 128
"""Their tiles; the pairs have to be whole ones."""

Pair = tuple[Tensor, Tensor]


class Call:
    """Sizes, grid and what the kernels of one call share.

    x may be R of the N rows of pairs, [B, R, N, C] (see :mod:`megafold.evosp3d.sharded_triangle`); its planes are then
    not padded with rows, since nobody multiplies them.
    """

    def __init__(self, x, in_weight, gate_weight, out_weight, mask, dropped, dtype, *, block: bool = False) -> None:
        self.x, self.dtype = x.contiguous(), dtype
        self.batch, self.rows, self.size, self.width = x.shape
        self.padded = round_up(self.size)
        self.tall = self.rows if block else self.padded
        self.weights = in_weight, gate_weight, out_weight
        self.mask = None if mask is None else mask.contiguous().view(torch.uint8)
        self.dropped = None if dropped is None else dropped.contiguous()
        self.strides = shared_strides(self.dropped)
        self.sizes = self.rows, self.size, self.tall, self.padded
        self._folded: dict[str, Pair] = {}
        self._normalized: Pair | None = None
        self._output_rows: Pair | None = None
        self._output_products: Tensor | None = None
        self._dealt: tuple[Tensor, Tensor, Tensor] | None = None
        self.joins = bool(configuration("triangle_input_gradient", dtype, x.device).get("joint"))

    def new(self, channels: int) -> Tensor:
        """Uninitialised [B, channels, T, P] in the dtype of products."""
        shape = (self.batch, channels, self.tall, self.padded)
        return torch.empty(shape, device=self.x.device, dtype=self.dtype)

    def _tiles(self, block_l: int) -> int:
        return self.batch * self.tall * ceil_div(self.padded, block_l)

    def _hopper(self, kernel: str) -> tuple[ModuleType | None, dict]:
        """Kernels for sm_90 where the table asks for them and no pair is padding, with their configuration."""
        config = configuration(f"triangle_{kernel}", self.dtype, self.x.device)
        whole = self.batch == 1 and self.padded == self.size and self.tall == self.rows
        whole &= self.rows * self.size % PAIRS_FOR_HOPPER == 0
        return hopper_kernels(config, self.x, self.dtype) if whole else None, config.get("gluon", {})

    def _each(self, kernel: str, channels: int) -> tuple[tuple[int], dict]:
        """Grid with a program for each tile, and keyword arguments of a kernel that makes so many channels."""
        config = configuration(f"triangle_{kernel}", self.dtype, self.x.device)
        constants = self._constants(config, channels)
        if kernel not in GATED:
            del constants["FAST"]
        return (self._tiles(config["block_l"]),), constants | options(config)

    def _resident(self, kernel: str, channels: int) -> tuple[tuple[int, int], tuple[int, ...], dict]:
        """Grid with a few programs for each multiprocessor, sizes, and keyword arguments of a kernel."""
        config = configuration(f"triangle_{kernel}", self.dtype, self.x.device)
        constants = self._constants(config, channels)
        parts, tiles = channels // constants["BLOCK_O"], self._tiles(config["block_l"])
        programs = config.get("programs", 2) * triton_support.multiprocessors(self.x.device)
        grid = min(tiles, ceil_div(programs, parts)), parts
        return grid, (*self.sizes, tiles), constants | {"STAGES": config["num_stages"]} | options(config)

    def _constants(self, config: dict, channels: int) -> dict:
        return {
            "C": self.width,
            "BLOCK_L": config["block_l"],
            "BLOCK_O": min(config["block_o"], channels),
            "FAST": triton_support.takes_ptx(self.x.device),
            "PRECISION": triton_support.float32_precision(),
        }

    def fold_all(self, *norms: Tensor) -> Pair:
        """Fold all weights in one launch, for a call that needs all of them.

        Args:
            norms: gamma and beta of x, and of the product.

        Returns:
            What `use_folded` takes, in another call too.
        """
        folded = joined.fold_all(self.weights, norms, self.dtype)
        self.use_folded(*folded)
        return folded

    def use_folded(self, folded: Tensor, shift: Tensor) -> None:
        """All weights as a call before has folded them."""
        (w, dealt, transposed), cut = joined.split(folded), 5 * self.width
        self._folded = {"in": (w[:cut], shift[:cut]), "out": (w[cut:], shift[cut:])}
        self._dealt = dealt, transposed, shift[4 * self.width :]

    def _of_input(self, gamma: Tensor, beta: Tensor) -> Pair:
        """[5 C, C] and [5 C]: the weights of all that is projected from LN(x)."""
        if "in" not in self._folded:
            self._folded["in"] = self._fold(self.weights[:2], gamma, beta)
        return self._folded["in"]

    def _of_output(self, gamma: Tensor, beta: Tensor, out_gamma: Tensor, out_beta: Tensor) -> tuple[Tensor, ...]:
        """Weights and shifts of the gate and of what is projected from the product's LayerNorm, [C, C] and [C] each."""
        if "out" not in self._folded:
            self._folded["out"] = self._fold(self.weights[2:], out_gamma, out_beta)
        w, shift = self._of_input(gamma, beta)
        return w[4 * self.width :], shift[4 * self.width :], *self._folded["out"]

    def _fold(self, weights: tuple[Tensor, ...], gamma: Tensor, beta: Tensor) -> Pair:
        rows = sum(len(w) for w in weights)
        w = torch.empty((rows, self.width), device=self.x.device, dtype=self.dtype)
        shift = torch.empty(rows, device=self.x.device, dtype=torch.float32)
        launch_kernel(
            kernels.fold_kernel, (rows // FOLD_ROWS,),
            weights[0].contiguous(), weights[-1].contiguous(), gamma, beta, w, shift, len(weights[0]), C=self.width,
            BLOCK=FOLD_ROWS, num_warps=4,
        )  # fmt: skip
        return w, shift

    def _of_x(self) -> Pair:
        """(x - mean) / std with ones behind it [B, T, P, C + 8], and 1 / std [B, T, P], for the backward."""
        if self._normalized is None:
            shape = (self.batch, self.tall, self.padded)
            x_hat = torch.empty((*shape, self.width + 8), device=self.x.device, dtype=self.dtype)
            self._normalized = x_hat, self._normalize(kernels.normalize_kernel, self.x, x_hat)
        return self._normalized

    def _normalize(self, kernel, source: Tensor, out: Tensor) -> Tensor:
        """Run one of the normalising kernels; returns 1 / std [B, T, P]."""
        rstd = torch.empty((self.batch, self.tall, self.padded), device=self.x.device, dtype=torch.float32)
        launch_kernel(
            kernel, (self._tiles(NORMALIZED_PAIRS),),
            source, out, rstd, *self.sizes, EPS, C=self.width, BLOCK_L=NORMALIZED_PAIRS, num_warps=4,
        )  # fmt: skip
        return rstd

    def project(self, gamma: Tensor, beta: Tensor, operands: Tensor, first: int = 0) -> None:
        """Write the left and right operands to 2 C channels of [B, channels, T, P], from channel `first`."""
        norm = self._normalized is None
        hopper, config = self._hopper("project")
        if hopper and not (norm and self.x.dtype != self.dtype):
            rows = (self.x if norm else self._normalized[0]).flatten(0, 2)
            mask = None if self.mask is None else self.mask.flatten()
            channels = operands[0, first : first + 2 * self.width]
            hopper.triangle_operands(rows, norm, *self._of_input(gamma, beta), mask, channels, **config)
            return
        grid, keywords = self._each("project", 2 * self.width)
        launch_kernel(
            kernels.project_kernel, grid,
            self.x if norm else self._normalized[0], *self._of_input(gamma, beta),
            self.x if self.mask is None else self.mask, operands, first, operands.shape[1], *self.sizes, EPS,
            HAS_MASK=self.mask is not None, NORM=norm, **keywords,
        )  # fmt: skip

    def output(
        self, gamma: Tensor, beta: Tensor, product: Tensor, out_gamma: Tensor, out_beta: Tensor, residual: bool
    ) -> Tensor:
        """The rows [B, R, N, C] from the product [B, C, T, P]."""
        out = torch.empty_like(self.x, dtype=self.x.dtype if residual else self.dtype)
        hopper, config = self._hopper("output")
        if hopper:
            weights = self._of_output(gamma, beta, out_gamma, out_beta)
            rows = self.x.flatten(0, 2), product[0].flatten(1), *weights, self.dropped, self.strides[1:], self.size
            hopper.triangle_result(*rows, out, residual, **config)
            return out
        grid, keywords = self._each("output", self.width)
        launch_kernel(
            kernels.output_kernel, grid,
            self.x, product, *self._of_output(gamma, beta, out_gamma, out_beta),
            self.x if self.dropped is None else self.dropped, out, *self.strides, *self.sizes, EPS,
            HAS_DROPPED=self.dropped is not None, RESIDUAL=residual, **keywords,
        )  # fmt: skip
        return out

    def output_gradient(
        self, grad_out: Tensor, gamma: Tensor, beta: Tensor, product: Tensor, out_gamma: Tensor, out_beta: Tensor
    ) -> Pair:
        """[B, 5 C, T, P], in the order of the weights' rows, and the gradient of the product [B, C, T, P].

        The first C channels hold the gradient of the projected product, the second C its LayerNorm, the last C the
        gradient of the gate: see the kernels.
        """
        grads, grad_product = self.new(5 * self.width), self.new(self.width)
        hopper, config = self._hopper("output_gradient")
        if hopper and product.dtype == self.dtype:
            pairs, width = self.rows * self.size, self.width
            x_hat = self.x.new_empty((1, self.tall, self.padded, width + 8), dtype=self.dtype)
            rstd = self.x.new_empty((1, self.tall, self.padded), dtype=torch.float32)
            self._normalized = x_hat, rstd
            if self._dealt is not None and "of_weights" in config and self.x.dtype == self.dtype:
                self._output_products = hopper.triangle_output_weights(
                    self.x.flatten(0, 2), product[0].flatten(1), self._dealt[0][4 * width :], self._dealt[2], grad_out,
                    self.dropped, self.strides[1:], self.size, x_hat, rstd, grads[0, 4 * width :].flatten(1),
                    grad_product[0].flatten(1), **config,
                ).sum(0)  # fmt: skip
                return grads, grad_product
            # Channels of the operands, whose gradients come later, have room for both.
            p_hat, upstream, _ = grads.flatten().split((pairs * (width + 8), pairs * width, pairs * (3 * width - 8)))
            self._output_rows = upstream.view(pairs, width), p_hat.view(pairs, width + 8)
            hopper.triangle_output(
                self.x.flatten(0, 2), product[0].flatten(1), *self._of_output(gamma, beta, out_gamma, out_beta),
                grad_out, self.dropped, self.strides[1:], self.size, x_hat, rstd, p_hat, upstream,
                grads[0, 4 * width :].flatten(1), grad_product[0].flatten(1),
                None if self._dealt is None else (self._dealt[0][4 * width :], self._dealt[1]),
                REGISTERS_ALONE if "of_weights" in config else config["registers"],
            )  # fmt: skip
            return grads, grad_product
        rstd = self._normalize(kernels.normalize_product_kernel, product, grads)
        of_output = self._of_output(gamma, beta, out_gamma, out_beta)
        grid, sizes, keywords = self._resident("output_gradient", self.width)
        launch_kernel(
            kernels.output_gradient_kernel, grid,
            grad_out, self._of_x()[0], *of_output, self.x if self.dropped is None else self.dropped, grads,
            *self.strides, *sizes, HAS_DROPPED=self.dropped is not None, **keywords,
        )  # fmt: skip
        grid, keywords = self._each("product_gradient", self.width)
        launch_kernel(
            kernels.product_gradient_kernel, grid, grads, rstd, of_output[2], grad_product, *self.sizes, **keywords
        )
        return grads, grad_product

    def of_output_weights(
        self, grads: Tensor, product: Tensor, out_gamma: Tensor, out_beta: Tensor
    ) -> tuple[Tensor, ...]:
        """Gradients of out_weight and of the second LayerNorm, before the first 2 C channels are written again."""
        return through_norm(*self.output_products(grads), self.weights[2:], out_gamma, out_beta)

    def output_products(self, grads: Tensor) -> Pair:
        """Products [C, C] and sums [C, 1] over the pairs that these gradients are made of."""
        if self._output_rows is not None:
            self._output_products = product_over_rows(*self._output_rows)
        if (products := self._output_products) is not None:
            return products[:, : self.width], products[:, self.width : self.width + 1]
        upstream = grads[:, : self.width]
        rows = (item[: 2 * self.width].flatten(1).mT.split(self.width, 1) for item in grads)
        products = _summed(product_over_rows(of_out, p_hat) for of_out, p_hat in rows)
        sums = upstream.sum((0, 2, 3), dtype=torch.float32).unsqueeze(1)
        return products, sums

    def input_gradient(
        self, grad_out: Tensor, gamma: Tensor, beta: Tensor, grads: Tensor, residual: bool
    ) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Gradient of x, and those of in_weight, gate_weight and the first LayerNorm.

        The first 2 C channels of ``grads`` hold the gradients of the operands.
        """
        grad_x, of_weights = self.input_products(grad_out, gamma, beta, grads, residual)
        return grad_x, through_norm(*of_weights, self.weights[:2], gamma, beta)

    def input_products(
        self, grad_out: Tensor, gamma: Tensor, beta: Tensor, grads: Tensor, residual: bool
    ) -> tuple[Tensor, Pair]:
        """Gradient of x; products [5 C, C] and sums [5 C, 1] over the pairs that those of its weights are made of."""
        (x_hat, rstd), (w, shift) = self._of_x(), self._of_input(gamma, beta)
        grad_x = torch.empty_like(self.x)
        hopper, config = self._hopper("input_gradient")
        if hopper:  # with the gradients of the gates
            mask = None if self.mask is None else self.mask.flatten()
            dealt = None if self._dealt is None else self._dealt[0][: 5 * self.width]
            flat = grads[0].flatten(1), w, dealt, shift, mask, x_hat.flatten(0, 2), rstd, grad_out, grad_x
            hopper.triangle_both(*flat, residual, **config)
        else:
            self._gate_gradient(grads, x_hat, w, shift)
            grid, keywords = self._each("input_gradient", self.width)
            launch_kernel(
                kernels.input_gradient_kernel, grid,
                grad_out, x_hat, rstd, w, grads, grad_x, *self.sizes, RESIDUAL=residual, **keywords,
            )  # fmt: skip
        # The ones behind x_hat make the sums over the rows in the same product.
        products = _summed(product_over_rows(g.flatten(1).mT, h.flatten(0, 1)) for g, h in zip(grads, x_hat))
        return grad_x, (products[:, : self.width], products[:, self.width : self.width + 1])

    def through_norms(self, of_input: Pair, of_output: Pair, *norms: Tensor) -> list[Tensor]:
        """Gradients of the three weights and of `norms`, gamma and beta of both LayerNorms, from what `input_products`
        and `output_products` gave."""
        if self.joins:
            return joined.finish(of_input, of_output, self.weights, norms)
        *of_first, grad_gamma, grad_beta = through_norm(*of_input, self.weights[:2], *norms[:2])
        of_out, *of_second = through_norm(*of_output, self.weights[2:], *norms[2:])
        return [*of_first, of_out, grad_gamma, grad_beta, *of_second]

    def _gate_gradient(self, grads: Tensor, x_hat: Tensor, w: Tensor, shift: Tensor) -> None:
        """Turn the gradients of the operands, the first 2 C channels, into those of values, gates in the next 2 C."""
        grid, sizes, keywords = self._resident("gate_gradient", 2 * self.width)
        launch_kernel(
            kernels.gate_gradient_kernel, grid,
            x_hat, w, shift, self.x if self.mask is None else self.mask, grads, *sizes,
            HAS_MASK=self.mask is not None, **keywords,
        )  # fmt: skip


def _summed(parts: Iterable[Tensor]) -> Tensor:
    """Over structures, in their order."""
    return functools.reduce(torch.add, parts)


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
    keep: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """The output [B, N, N, C], the product [B, C, P, P] that the backward needs, with ``keep`` the operands that it
    else makes again [B, 2 C, P, P] (without, no element), and what `Call.fold_all` gives."""
    call = Call(x, in_weight, gate_weight, out_weight, mask, dropped, dtype)
    with triton_support.device_guard(x.device):
        folded = call.fold_all(norm_weight, norm_bias, out_norm_weight, out_norm_bias)
        operands = call.new(2 * call.width)
        call.project(norm_weight, norm_bias, operands)
        product = call.new(call.width)
        for item, result in zip(operands, product):
            left, right = item.chunk(2)
            multiply(*((left, right.mT) if outgoing else (right.mT, left)), out=result)
        if not keep:
            operands = operands.new_empty(0)
        out = call.output(norm_weight, norm_bias, product, out_norm_weight, out_norm_bias, residual)
    return out, product, operands, *folded


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
    operands: Tensor,
    folded: Tensor,
    shift: Tensor,
    outgoing: bool,
    residual: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Gradients of x and of the seven parameters, in the order of the arguments."""
    call = Call(x, in_weight, gate_weight, out_weight, mask, dropped, dtype)
    grad_out = grad_out.contiguous()
    with triton_support.device_guard(x.device):
        # The gradients of the operands take the place of the first 2 C channels, and the operands, unless they were
        # kept, the next 2 C until the gradients of their gates do.
        call.use_folded(folded, shift)
        of_norms = norm_weight, norm_bias, product, out_norm_weight, out_norm_bias
        grads, grad_product = call.output_gradient(grad_out, *of_norms)
        of_output = call.output_products(grads)
        if not operands.numel():
            operands = grads[:, 2 * call.width : 4 * call.width]
            call.project(norm_weight, norm_bias, grads, first=2 * call.width)
        for b in range(call.batch):  # no name may hold the product's gradient after it
            (grad_left, grad_right, *_), (left, right) = grads[b].chunk(5), operands[b].chunk(2)
            operand_gradients(grad_product[b], left, right, outgoing, out=(grad_left, grad_right))
        del grad_product
        grad_x, of_input = call.input_products(grad_out, norm_weight, norm_bias, grads, residual)
        of_weights = call.through_norms(of_input, of_output, norm_weight, norm_bias, out_norm_weight, out_norm_bias)
    grad_in, grad_gate, grad_out_weight, grad_gamma, grad_beta, grad_out_gamma, grad_out_beta = of_weights
    return grad_x, grad_gamma, grad_beta, grad_in, grad_gate, grad_out_gamma, grad_out_beta, grad_out_weight


def operand_gradients(grad: Tensor, left: Tensor, right: Tensor, outgoing: bool, *, out: tuple[Tensor, Tensor]) -> None:
    """Gradients of the operands from that of their product, all [channels, N, N], into ``out``."""
    grad_left, grad_right = out
    if outgoing:  # product = left right^T
        multiply(grad, right, out=grad_left)
        multiply(grad.mT, left, out=grad_right)
    else:  # product = right^T left
        multiply(right, grad, out=grad_left)
        multiply(left, grad.mT, out=grad_right)
