"""Host side of pair-weighted averaging: kernels around the vendor's product of each head."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.launch import EPS, block, ceil_div, configuration, options, shared_strides
from megafold.evofusion.msa import kernels
from megafold.evofusion.vendor_product import multiply
from megafold.evofusion.weight_finish import gradients
from megafold.evofusion.weight_gradient import Operand, Rows, by_rows
from megafold.evofusion.weights import prepared
from megafold.replay import launch_kernel


class Call:
    """Sizes and what the kernels of one call share."""

    def __init__(self, msa: Tensor, weights: Tensor, out_weight: Tensor, dropped: Tensor | None, dtype: torch.dtype):
        self.dtype, self.device = dtype, msa.device
        self.batch, self.depth, self.size, self.width = msa.shape
        self.heads, self.inner = weights.shape[1], out_weight.shape[1]
        self.dropped = None if dropped is None else dropped.contiguous()

    def run(self, name: str, *arguments: object, **constants: object) -> None:
        """Launch the kernel of a name with a program for each tile; sizes follow `arguments`."""
        kernel, (config, tiles, found) = getattr(kernels, f"{name}_kernel"), self._tiles(name)
        found |= {"FAST": triton_support.takes_ptx(self.device)} if "FAST" in kernel.arg_names else {}
        eps = (EPS,) if "eps" in kernel.arg_names else ()
        sizes = self.depth, self.size, *eps
        launch_kernel(kernel, (tiles,), *arguments, *sizes, **found, **constants, **options(config))

    def output_gradient(self, grad_out: Tensor, averaged: Tensor, gates: Tensor, w: Tensor) -> tuple[Tensor, ...]:
        """Gradients of averages, of gates and, in fp32, of the weight w [C, I]."""
        config, tiles, constants = self._tiles("output_gradient")
        grad_averaged, grad_gates = self.by_head(), self.by_token(self.inner)
        blocks = self.inner // constants["BLOCK_O"]
        resident = config.get("programs", 2) * triton_support.multiprocessors(self.device)
        programs = min(tiles, ceil_div(resident, blocks))
        partial = torch.empty((programs, self.width, self.inner), device=self.device, dtype=torch.float32)
        factor, strides, flags = self.drop(grad_out)
        launch_kernel(
            kernels.output_gradient_kernel, (programs, blocks),
            grad_out, averaged, gates, w, *factor, grad_averaged, grad_gates, partial, *strides, self.depth, self.size,
            tiles, programs, FAST=triton_support.takes_ptx(self.device), STAGES=config["num_stages"], **constants,
            **flags, **options(config),
        )  # fmt: skip
        return grad_averaged, grad_gates, partial.sum(0)

    def _tiles(self, name: str) -> tuple[dict, int, dict[str, object]]:
        """A kernel's configuration, how many tiles there are, and what it is compiled for."""
        config = configuration(f"pair_weighted_{name}", self.dtype, self.device)
        constants = {
            "BLOCK_L": config["block_l"],
            "BLOCK_O": block(config, "block_o", self.inner),
            "C": self.width,
            "HEADS": self.heads,
            "E": self.inner // self.heads,
            "PRECISION": triton_support.float32_precision(),
        }
        return config, self.batch * self.size * ceil_div(self.depth, config["block_l"]), constants

    def drop(self, beside: Tensor) -> tuple[tuple[Tensor, ...], tuple[int, int, int], dict[str, bool]]:
        """The dropout factor, or `beside` in its place; its strides; and whether it is there."""
        dropped = (beside if self.dropped is None else self.dropped,)
        return dropped, shared_strides(self.dropped), {"HAS_DROPPED": self.dropped is not None}

    def by_head(self) -> Tensor:
        """Uninitialised [B, H, N, S, E]."""
        return self._new(self.heads, self.size, self.depth, self.inner // self.heads)

    def by_token(self, width: int) -> Tensor:
        """Uninitialised [B, N, S, width]."""
        return self._new(self.size, self.depth, width)

    def _new(self, *shape: int) -> Tensor:
        return torch.empty((self.batch, *shape), device=self.device, dtype=self.dtype)


def forward(
    msa: Tensor,
    weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    values_gates_weight: Tensor,
    out_weight: Tensor,
    dropped: Tensor | None,
    residual: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """[B, S, N, C], and what the backward needs: values, gates and averages."""
    msa, weights = msa.contiguous(), weights.contiguous()
    call = Call(msa, weights, out_weight, dropped, dtype)
    with triton_support.device_guard(msa.device):
        w, w_out = prepared(dtype, values_gates_weight, out_weight)
        values, gates, averaged = call.by_head(), call.by_token(call.inner), call.by_head()
        call.run("values", msa, norm_weight, norm_bias, w, values, gates)
        multiply(weights.flatten(0, 1), values.flatten(3).flatten(0, 1), out=averaged.flatten(3).flatten(0, 1))
        out = msa.new_empty(msa.shape, dtype=msa.dtype if residual else dtype)
        factor, strides, flags = call.drop(msa)
        call.run("output", averaged, gates, w_out, *factor, msa, out, *strides, **flags, RESIDUAL=residual)
    return out, values, gates, averaged


def backward(
    grad_out: Tensor,
    msa: Tensor,
    weights: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor,
    values_gates_weight: Tensor,
    out_weight: Tensor,
    dropped: Tensor | None,
    values: Tensor,
    gates: Tensor,
    averaged: Tensor,
    residual: bool,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Gradients of the first six arguments of `forward`."""
    grad_out, msa, weights = grad_out.contiguous(), msa.contiguous(), weights.contiguous()
    call = Call(msa, weights, out_weight, dropped, dtype)
    with triton_support.device_guard(msa.device):
        w, w_out = prepared(dtype, values_gates_weight, out_weight)
        grad_averaged, grad_gates, of_weight = call.output_gradient(grad_out, averaged, gates, w_out)
        # A head: [N, S E] from [N, N] x [N, S E], and [N, N] from [N, S E] x [S E, N].
        plane, of_plane = weights.flatten(0, 1), grad_averaged.flatten(3).flatten(0, 1)
        grad_weights = weights.new_empty(weights.shape)
        multiply(of_plane, values.flatten(3).flatten(0, 1).mT, out=grad_weights.flatten(0, 1))
        grad_values = call.by_head()
        multiply(plane.mT, of_plane, out=grad_values.flatten(3).flatten(0, 1))
        del grad_averaged, of_plane
        grad_msa, x_hat = msa.new_empty(msa.shape), call.by_token(call.width)
        call.run(
            "input_gradient", grad_values, grad_gates, msa, norm_weight, w, grad_out, grad_msa, x_hat,
            RESIDUAL=residual,
        )  # fmt: skip
        rows = Rows(call.batch, 1, call.size * call.depth, 2 * call.inner, call.width, call.device, dtype)
        source = by_rows(x_hat.flatten(1, 2).unsqueeze(1))
        width = call.inner // call.heads
        per_head = Operand(grad_values, grad_values.stride(0), 0, width, side=width, apart=grad_values.stride(1))
        rows.add(per_head, source, call.inner)
        rows.add(by_rows(grad_gates.flatten(1, 2).unsqueeze(1)), source, call.inner, first=call.inner)
        found = gradients([rows.part(values_gates_weight)], norm_weight, norm_bias)
    return grad_msa, grad_weights, *found.norms, *found.weights, of_weight.to(out_weight.dtype)
