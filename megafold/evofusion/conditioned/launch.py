"""Host side of the conditioned blocks: one kernel for narrow rows, else the vendor's products on padded copies."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion import rows as row_kernels
from megafold.evofusion.conditioned import kernels
from megafold.evofusion.launch import EPS, ceil_div, configuration, in_dtype, options, round_up
from megafold.evofusion.operator import is_narrow
from megafold.evofusion.rows import normalized, normalized_gradient, padded, whole_rows
from megafold.evofusion.weight_gradient import Rows, by_rows, through_norm

GATE_BLOCK = {"BLOCK_L": 4, "BLOCK_C": 512}


def adaptive_norm(
    x: Tensor,
    cond: Tensor,
    cond_norm_weight: Tensor,
    gamma_weight: Tensor,
    gamma_bias: Tensor,
    beta_weight: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """[..., C] in the dtype of products."""
    x, cond = _flat(x), _flat(cond)
    out = torch.empty_like(x, dtype=dtype)
    rows, width = x.shape
    with triton_support.device_guard(x.device):
        if is_narrow(width, cond.shape[1]):
            config, constants = _narrow("adaptive_norm", x, cond, dtype)
            kernels.adaptive_norm_kernel[(ceil_div(rows, config["block_l"]),)](
                x, cond, cond_norm_weight, *_between(gamma_weight, gamma_bias, beta_weight, dtype), out, rows, EPS,
                BLOCK_O=min(config["block_o"], width), **constants, **options(config),
            )  # fmt: skip
        else:
            _, _, pre = _scales(cond, cond_norm_weight, gamma_weight, beta_weight, dtype)
            block_l, block_c = whole_rows(width)
            row_kernels.scale_shift_kernel[(ceil_div(rows, block_l),)](
                x, pre, gamma_bias, out, rows, width, EPS, BLOCK_L=block_l, BLOCK_C=block_c, num_warps=4
            )
    return out


def adaptive_norm_backward(
    grad_out: Tensor,
    x: Tensor,
    cond: Tensor,
    cond_norm_weight: Tensor,
    gamma_weight: Tensor,
    gamma_bias: Tensor,
    beta_weight: Tensor,
    dtype: torch.dtype,
    others: tuple[Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:
    """Gradients of the six arguments; `others` are added to those of x and cond."""
    grad_out, x, cond = _flat(grad_out), _flat(x), _flat(cond)
    rows, width = x.shape
    grad_x, grad_cond = torch.empty_like(x), torch.empty_like(cond)
    with triton_support.device_guard(x.device):
        if is_narrow(width, cond.shape[1]):
            grad_gate = torch.empty_like(x, dtype=dtype)
            config, constants = _narrow("adaptive_norm_gradient", x, cond, dtype)
            kernels.adaptive_norm_gradient_kernel[(ceil_div(rows, config["block_l"]),)](
                grad_out, x, cond, cond_norm_weight, *_between(gamma_weight, gamma_bias, beta_weight, dtype),
                *((x, cond) if others is None else map(_flat, others)), grad_x, grad_cond, grad_gate, rows, EPS,
                BLOCK_O=min(config["block_o"], width), OTHERS=others is not None, **constants, **options(config),
            )  # fmt: skip
            sums = Rows(1, 1, rows, 2 * width, cond.shape[1], x.device, dtype)
            sums.add(by_rows(grad_gate), by_rows(cond), width, norm=True)
            sums.add(by_rows(grad_out.to(dtype)), by_rows(cond), width, width, norm=True)
            products, totals = sums.finish()
        else:
            weights, source, pre = _scales(cond, cond_norm_weight, gamma_weight, beta_weight, dtype)
            grad_pre = torch.empty_like(pre)
            block_l, block_c = whole_rows(width)
            row_kernels.scale_shift_gradient_kernel[(ceil_div(rows, block_l),)](
                grad_out, x, pre, gamma_bias, grad_x, grad_pre, rows, width, EPS, BLOCK_L=block_l, BLOCK_C=block_c,
                num_warps=4,
            )  # fmt: skip
            if others is not None:
                grad_x += _flat(others[0])
            grad_cond = normalized_gradient(cond, grad_pre @ weights, None if others is None else _flat(others[1]))
            products = (grad_pre.mT @ source)[:, : cond.shape[1]].float()
            totals = grad_pre.sum(0, dtype=torch.float32).unsqueeze(1)
        grad_gamma_weight, grad_beta_weight, grad_cond_gamma = through_norm(
            products, totals, (gamma_weight, beta_weight), cond_norm_weight, None
        )
    grad_gamma_bias = _column(totals[:width], gamma_bias.dtype)
    return grad_x, grad_cond, grad_cond_gamma, grad_gamma_weight, grad_gamma_bias, grad_beta_weight


def condition_gate(
    y: Tensor, cond: Tensor, weight: Tensor, bias: Tensor, residual: Tensor | None, dtype: torch.dtype
) -> Tensor:
    """[M, C] in the dtype of the residual, or of products without one."""
    y, cond = _flat(y), _flat(cond)
    residual = None if residual is None else _flat(residual)
    out = torch.empty_like(y, dtype=dtype if residual is None else residual.dtype)
    rows, width = y.shape
    with triton_support.device_guard(y.device):
        if is_narrow(width, cond.shape[1]):
            config, constants = _narrow("condition_gate", y, cond, dtype)
            kernels.condition_gate_kernel[(ceil_div(rows, config["block_l"]),)](
                y, cond, *in_dtype(dtype, weight), bias, y if residual is None else residual, out, rows,
                BLOCK_O=min(config["block_o"], width), RESIDUAL=residual is not None, **constants, **options(config),
            )  # fmt: skip
        else:
            _, _, pre = _gate_product(cond, weight, dtype)
            row_kernels.gate_kernel[_grid(rows, width)](
                y, pre, bias, y if residual is None else residual, out, rows, width, RESIDUAL=residual is not None,
                **GATE_BLOCK, num_warps=4,
            )  # fmt: skip
    return out


def condition_gate_backward(
    grad_out: Tensor, y: Tensor, cond: Tensor, weight: Tensor, bias: Tensor, dtype: torch.dtype
) -> tuple[Tensor, ...]:
    """Gradients of y, cond, weight and bias."""
    grad_out, y, cond = _flat(grad_out), _flat(y), _flat(cond)
    rows, width = y.shape
    depth = cond.shape[1]
    grad_y, grad_gate = torch.empty_like(y), torch.empty_like(y, dtype=dtype)
    with triton_support.device_guard(y.device):
        if is_narrow(width, depth):
            grad_cond = torch.empty_like(cond)
            config, constants = _narrow("condition_gate_gradient", y, cond, dtype)
            kernels.condition_gate_gradient_kernel[(ceil_div(rows, config["block_l"]),)](
                grad_out, y, cond, *in_dtype(dtype, weight), bias, grad_y, grad_cond, grad_gate, rows,
                BLOCK_O=min(config["block_o"], width), **constants, **options(config),
            )  # fmt: skip
            sums = Rows(1, 1, rows, width, depth, y.device, dtype)
            sums.add(by_rows(grad_gate), by_rows(cond.to(dtype)), width, norm=False)
            products, totals = sums.finish()
        else:
            w, source, pre = _gate_product(cond, weight, dtype)
            row_kernels.gate_gradient_kernel[_grid(rows, width)](
                grad_out, y, pre, bias, grad_y, grad_gate, rows, width, **GATE_BLOCK, num_warps=4
            )
            grad_cond = (grad_gate @ w)[:, :depth].to(cond.dtype).contiguous()
            products = (grad_gate.mT @ source)[:, :depth].float()
            totals = grad_gate.sum(0, dtype=torch.float32).unsqueeze(1)
    return grad_y, grad_cond, products.to(weight.dtype).contiguous(), _column(totals, bias.dtype)


def _column(totals: Tensor, dtype: torch.dtype) -> Tensor:
    """[rows] from [rows, 1], which may be a column of a wider tensor."""
    return totals[:, 0].to(dtype).contiguous()


def _flat(x: Tensor) -> Tensor:
    return x.contiguous().view(-1, x.shape[-1])


def _between(gamma_weight: Tensor, gamma_bias: Tensor, beta_weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, ...]:
    w_gamma, w_beta = in_dtype(dtype, gamma_weight, beta_weight)
    return w_gamma, gamma_bias, w_beta


def _narrow(kernel: str, x: Tensor, cond: Tensor, dtype: torch.dtype) -> tuple[dict, dict]:
    config = configuration(kernel, dtype, x.device)
    constants = {
        "C": x.shape[1],
        "D": cond.shape[1],
        "BLOCK_L": config["block_l"],
        "PRECISION": triton_support.float32_precision(),
    }
    return config, constants


def _grid(rows: int, width: int) -> tuple[int, int]:
    return ceil_div(rows, GATE_BLOCK["BLOCK_L"]), ceil_div(width, GATE_BLOCK["BLOCK_C"])


def _scales(
    cond: Tensor, cond_norm_weight: Tensor, gamma_weight: Tensor, beta_weight: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    """Weights [2 C, D'] with the LayerNorm's scale in them, the normalised conditioning [M, D'], their product.

    The parameters stay as they are: the copies have D' = D filled up to a multiple of 16.
    """
    joined = torch.cat((gamma_weight, beta_weight)).float() * cond_norm_weight.float()
    weights = padded(joined, dtype, columns=round_up(cond.shape[1]))
    source = normalized(cond, dtype)[0]
    return weights, source, source @ weights.mT


def _gate_product(cond: Tensor, weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """The weight [C, D'] and the conditioning [M, D'], filled up to a multiple of 16, and their product."""
    columns = round_up(cond.shape[1])
    w, source = padded(weight, dtype, columns=columns), padded(cond, dtype, columns=columns)
    return w, source, source @ w.mT
