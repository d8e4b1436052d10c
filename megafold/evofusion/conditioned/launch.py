"""Host side of the conditioned blocks: one kernel for narrow rows, else the vendor's products on padded copies."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion import rows as row_kernels
from megafold.evofusion.conditioned import kernels
from megafold.evofusion.launch import EPS, aligned, ceil_div, configuration, hopper_kernels, options, round_up
from megafold.evofusion.operator import is_narrow
from megafold.evofusion.rows import folded, normalized, normalized_gradient, whole_rows
from megafold.evofusion.weight_finish import Part, gradients
from megafold.evofusion.weight_gradient import Rows, by_rows, product_over_rows
from megafold.evofusion.weights import DEALT, prepared
from megafold.replay import launch_kernel


def prepare(cond: Tensor, copy: bool, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cond - mean) / std and with ``copy`` cond (else no element), [..., D'] in the dtype of products.

    D' is D filled up to a multiple of 16; the first column of the padding, if there is any, holds ones.
    """
    shape = (*cond.shape[:-1], round_up(cond.shape[-1]))
    with triton_support.device_guard(cond.device):
        normed, padded = normalized(_flat(cond), dtype, copy=copy, ones=True)
    return normed.view(shape), padded.view(shape) if copy else normed.new_empty(0)


def adaptive_norm(
    x: Tensor,
    cond: Tensor,
    cond_norm_weight: Tensor,
    gamma_weight: Tensor,
    gamma_bias: Tensor,
    beta_weight: Tensor,
    normed: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """[M, C] in the dtype of products; for the wide backward what scales and shifts [M, 2 C] (no element otherwise)."""
    x, cond = _flat(x), _flat(cond)
    out = torch.empty_like(x, dtype=dtype)
    rows, width = x.shape
    with triton_support.device_guard(x.device):
        if is_narrow(width, cond.shape[1]):
            config, constants = _narrow("adaptive_norm", x, cond, dtype)
            launch_kernel(
                kernels.adaptive_norm_kernel, (ceil_div(rows, config["block_l"]),),
                x, cond, cond_norm_weight, *_between(gamma_weight, gamma_bias, beta_weight, dtype), out, rows, EPS,
                BLOCK_O=min(config["block_o"], width), **constants, **options(config),
            )  # fmt: skip
            return out, x.new_empty(0, dtype=dtype)
        pre = _normed(cond, normed, dtype) @ folded((gamma_weight, beta_weight), cond_norm_weight, dtype).mT
        block_l, block_c = whole_rows(width)
        launch_kernel(
            row_kernels.scale_shift_kernel, (ceil_div(rows, block_l),),
            x, pre, gamma_bias, out, rows, width, EPS, BLOCK_L=block_l, BLOCK_C=block_c, num_warps=4,
        )  # fmt: skip
    return out, pre


def adaptive_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    cond: Tensor,
    cond_norm_weight: Tensor,
    gamma_weight: Tensor,
    gamma_bias: Tensor,
    beta_weight: Tensor,
    normed: Tensor | None,
    pre: Tensor,
    other_x: Tensor | None,
    other_cond: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Gradients of x, cond and the four parameters; `other_x` and `other_cond` are added to the first two."""
    grad_out, x, cond = _flat(grad_out), _flat(x), _flat(cond)
    other_x, other_cond = (None if t is None else _flat(t) for t in (other_x, other_cond))
    width = x.shape[1]
    run = _narrow_backward if is_narrow(width, cond.shape[1]) else _wide_backward
    weights = (cond_norm_weight, gamma_weight, gamma_bias, beta_weight)
    with triton_support.device_guard(x.device):
        grad_x, grad_cond, parts = run(grad_out, x, cond, *weights, normed, pre, other_x, other_cond, dtype)
        # The LayerNorm has no shift, so that only the bias wants sums: those of gamma.
        found = gradients(parts, cond_norm_weight, None, gamma_bias)
    return grad_x, grad_cond, found.norms[0], found.weights[0], found.bias, found.weights[1]


def _narrow_backward(
    grad_out, x, cond, cond_norm_weight, gamma_weight, gamma_bias, beta_weight, normed, pre, other_x, other_cond, dtype
):
    rows, width = x.shape
    grad_x, grad_cond, grad_gate = torch.empty_like(x), torch.empty_like(cond), torch.empty_like(x, dtype=dtype)
    both = other_x is not None and other_cond is not None
    config, constants = _narrow("adaptive_norm_gradient", x, cond, dtype)
    fits = cond.shape == x.shape and grad_out.dtype == dtype
    hopper = hopper_kernels(config, x, dtype, cond, grad_out, gamma_weight) if fits else None
    if hopper:
        others = (other_x, other_cond) if both else (None, None)
        turned = x.new_empty((2 * width, width), dtype=dtype)
        above, below = turned.split(width)
        w_gamma, *_ = prepared(dtype, gamma_weight, (beta_weight, DEALT, above), (gamma_weight, DEALT, below))
        inputs = grad_out, x, cond, cond_norm_weight, w_gamma, gamma_bias, turned, *others
        hopper.adaptive_norm_gradient(*inputs, grad_x, grad_cond, grad_gate, **config["gluon"])
    else:
        launch_kernel(
            kernels.adaptive_norm_gradient_kernel, (ceil_div(rows, config["block_l"]),),
            grad_out, x, cond, cond_norm_weight, *_between(gamma_weight, gamma_bias, beta_weight, dtype),
            *((other_x, other_cond) if both else (x, cond)), grad_x, grad_cond, grad_gate, rows, EPS,
            BLOCK_O=min(config["block_o"], width), OTHERS=both, **constants, **options(config),
        )  # fmt: skip
    if not both:
        for grad, other in ((grad_x, other_x), (grad_cond, other_cond)):
            if other is not None:
                grad += other
    sums = Rows(1, 1, rows, 2 * width, cond.shape[1], x.device, dtype)
    source = by_rows(cond if normed is None else _flat(normed))
    operands = [by_rows(grad_gate), by_rows(aligned(grad_out.to(dtype)))]
    sums.add(operands, source, width, norm=normed is None)
    return grad_x, grad_cond, [sums.part(gamma_weight), sums.part(beta_weight, width)]


def _wide_backward(
    grad_out, x, cond, cond_norm_weight, gamma_weight, gamma_bias, beta_weight, normed, pre, other_x, other_cond, dtype
):
    rows, width = x.shape
    grad_x, grad_pre = torch.empty_like(x), torch.empty_like(pre)
    block_l, block_c = whole_rows(width)
    launch_kernel(
        row_kernels.scale_shift_gradient_kernel, (ceil_div(rows, block_l),),
        grad_out, x, pre, gamma_bias, x if other_x is None else other_x, grad_x, grad_pre, rows, width, EPS,
        BLOCK_L=block_l, BLOCK_C=block_c, OTHER=other_x is not None, num_warps=4,
    )  # fmt: skip
    weights = folded((gamma_weight, beta_weight), cond_norm_weight, dtype)
    grad_cond = normalized_gradient(cond, grad_pre @ weights, other_cond)
    products, sums = _over_rows(grad_pre, _normed(cond, normed, dtype), cond.shape[1], width)
    halves = zip((gamma_weight, beta_weight), products.split(width))
    return grad_x, grad_cond, [Part(weight, half[None], sums[None, :, 0]) for weight, half in halves]


def condition_gate(
    y: Tensor,
    cond: Tensor,
    weight: Tensor,
    bias: Tensor,
    residual: Tensor | None,
    padded: Tensor | None,
    dtype: torch.dtype,
) -> tuple[Tensor, Tensor]:
    """[M, C] in the dtype of the residual, or of products without one; for the wide backward the gate [M, C] before its
    bias and sigmoid (no element otherwise)."""
    y, cond = _flat(y), _flat(cond)
    residual = None if residual is None else _flat(residual)
    out_dtype = dtype if residual is None else residual.dtype
    rows, width = y.shape
    with triton_support.device_guard(y.device):
        if is_narrow(width, cond.shape[1]):
            out = torch.empty_like(y, dtype=out_dtype)
            config, constants = _narrow("condition_gate", y, cond, dtype)
            launch_kernel(
                kernels.condition_gate_kernel, (ceil_div(rows, config["block_l"]),),
                y, cond, *prepared(dtype, weight), bias, y if residual is None else residual, out, rows,
                BLOCK_O=min(config["block_o"], width), RESIDUAL=residual is not None, **constants, **options(config),
            )  # fmt: skip
            return out, y.new_empty(0, dtype=dtype)
        pre = _padded(cond, padded, dtype) @ folded((weight,), None, dtype).mT
        return row_kernels.gated(y, pre, bias, residual, out_dtype=out_dtype), pre


def condition_gate_backward(
    grad_out: Tensor,
    y: Tensor,
    cond: Tensor,
    weight: Tensor,
    bias: Tensor,
    padded: Tensor | None,
    pre: Tensor,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Gradients of y, cond, weight and bias."""
    grad_out, y, cond = _flat(grad_out), _flat(y), _flat(cond)
    rows, width = y.shape
    depth = cond.shape[1]
    with triton_support.device_guard(y.device):
        if is_narrow(width, depth):
            grad_y, grad_gate = torch.empty_like(y), torch.empty_like(y, dtype=dtype)
            grad_cond = torch.empty_like(cond)
            config, constants = _narrow("condition_gate_gradient", y, cond, dtype)
            launch_kernel(
                kernels.condition_gate_gradient_kernel, (ceil_div(rows, config["block_l"]),),
                grad_out, y, cond, *prepared(dtype, weight), bias, grad_y, grad_cond, grad_gate, rows,
                BLOCK_O=min(config["block_o"], width), **constants, **options(config),
            )  # fmt: skip
            sums = Rows(1, 1, rows, width, depth, y.device, dtype)
            source = cond.to(dtype) if padded is None else _flat(padded)
            sums.add(by_rows(grad_gate), by_rows(source), width, norm=False)
            found = gradients([sums.part(weight, normed=False)], bias=bias)
        else:
            grad_y, grad_gate = row_kernels.gated_gradient(grad_out, y, pre, bias)
            w = folded((weight,), None, dtype)
            grad_cond = (grad_gate @ w)[:, :depth].to(cond.dtype).contiguous()
            products, totals = _over_rows(grad_gate, _padded(cond, padded, dtype), depth, width)
            found = gradients([Part(weight, products[None], totals[None, :, 0], normed=False)], bias=bias)
    return grad_y, grad_cond, *found.weights, found.bias


def _over_rows(grads: Tensor, source: Tensor, depth: int, summed: int) -> tuple[Tensor, Tensor]:
    """grads^T source [O, depth] in fp32, and sums over the rows of the first `summed` columns of grads, [summed, 1].

    Where `source` is padded its first column of padding holds ones: the sums are a column of a product of 16-bit rows
    that is summed and given in fp32.
    """
    found = product_over_rows(grads, source)
    products = found.float()
    if source.shape[1] > depth and found.dtype != grads.dtype:
        return products[:, :depth], products[:summed, depth : depth + 1]
    return products[:, :depth], grads[:, :summed].sum(0, dtype=torch.float32).unsqueeze(1)


def _normed(cond: Tensor, normed: Tensor | None, dtype: torch.dtype) -> Tensor:
    return normalized(cond, dtype, ones=True)[0] if normed is None else _flat(normed)


def _padded(cond: Tensor, padded: Tensor | None, dtype: torch.dtype) -> Tensor:
    """[M, D'] in the dtype of products, with ones behind."""
    if padded is not None:
        return _flat(padded)
    rows, depth = cond.shape
    if depth == round_up(depth):
        return cond.to(dtype)
    out = cond.new_zeros((rows, round_up(depth)), dtype=dtype)
    out[:, :depth] = cond
    out[:, depth] = 1.0
    return out


def _flat(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _between(gamma_weight: Tensor, gamma_bias: Tensor, beta_weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    w_gamma, w_beta = prepared(dtype, gamma_weight, beta_weight)
    return w_gamma, gamma_bias, w_beta


def _narrow(kernel: str, x: Tensor, cond: Tensor, dtype: torch.dtype) -> tuple[dict, dict]:
    config = configuration(kernel, dtype, x.device)
    constants = {
        "C": x.shape[1],
        "D": cond.shape[1],
        "BLOCK_L": config["block_l"],
        "FAST": triton_support.takes_ptx(x.device),
        "PRECISION": triton_support.float32_precision(),
    }
    return config, constants
