"""Host side of the kernels over rows for sm_90: which calls they serve, and how they are launched."""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from megafold import triton_support
from megafold.evofusion.hopper.adaptive_norm import adaptive_norm_gradient_kernel_sm90
from megafold.evofusion.hopper.input_gradient import input_gradient_kernel_sm90
from megafold.evofusion.hopper.project import project_kernel_sm90
from megafold.evofusion.hopper.transition import transition_gradient_kernel_sm90
from megafold.evofusion.hopper.transition_forward import transition_kernel_sm90
from megafold.evofusion.hopper.triangle_both import triangle_both_kernel_sm90
from megafold.evofusion.hopper.triangle_operands import triangle_operands_kernel_sm90
from megafold.evofusion.hopper.triangle_output import triangle_output_kernel_sm90
from megafold.evofusion.hopper.triangle_output_weights import triangle_output_weights_kernel_sm90
from megafold.evofusion.hopper.triangle_result import triangle_result_kernel_sm90
from megafold.evofusion.launch import EPS
from megafold.gluon_descriptors import TYPES, descriptor
from megafold.replay import launch_kernel

WIDTH, TILE, STEP = 128, 64, 64
MOST_HEADS = 16


def project(
    x: Tensor, gamma: Tensor, beta: Tensor | None, w: Tensor, bias: Tensor | None, w_heads: Tensor, outs: list[Tensor],
    heads: Tensor, number: int, length: int, registers: int,
) -> None:  # fmt: skip
    """Fill up to four outputs [M, 128] and the heads [M / length, number, length] from rows x [M, 128].

    w [outputs 128, 128] and w_heads [number, 128] in the dtype of products; bias: of the first outputs.
    """
    tiles, grid = _work(x)
    constants = {"HAS_BETA": beta is not None, "BIASED": 0 if bias is None else len(bias), "REGISTERS": registers}
    launch_kernel(
        project_kernel_sm90, grid,
        _rows(x), _dealt(w, STEP), _matrix(w_heads, MOST_HEADS), gamma, gamma if beta is None else beta,
        gamma if bias is None else bias.contiguous(), *outs, *[outs[0]] * (4 - len(outs)), heads if number else outs[0],
        len(x), length, tiles, EPS, C=WIDTH, COUNT=len(outs), STEP=STEP, STAGES=8 // x.element_size(), HEADS=number,
        num_warps=4, **constants,
    )  # fmt: skip


def input_gradient(
    grads: list[Tensor], x: Tensor, gamma: Tensor, w: Tensor, grad_heads: Tensor, w_heads: Tensor,
    other: Tensor | None, grad_x: Tensor, normed: Tensor, number: int, length: int, registers: int,
) -> None:  # fmt: skip
    """Fill grad_x and normed [M, 128]: from gradients of 4 x 128 columns, in as many tensors or in one, and of heads.

    w [128, 512], transposed; grad_heads [M / length, number, length]; all but x, `other` and grad_x in the dtype of
    products.
    """
    tiles, grid = _work(x)
    step = WIDTH if len(grads) == 1 else 0
    blocks = [_rows(grad) for grad in grads] * (4 // len(grads))
    launch_kernel(
        input_gradient_kernel_sm90, grid,
        _rows(x), _dealt(w, WIDTH), *blocks, gamma, x if other is None else other, grad_heads, w_heads,
        grad_x, normed, len(x), length, tiles, EPS, C=WIDTH, COUNT=len(blocks), WIDTH=WIDTH, STEP=step,
        HELD=4 // x.element_size(), HEADS=number, OTHER=other is not None, REGISTERS=registers, num_warps=4,
    )  # fmt: skip


def transition(
    x: Tensor, gamma: Tensor, beta: Tensor, w_in: Tensor, w_out: Tensor, out: Tensor, norm: bool, residual: bool,
    registers: int,
) -> None:  # fmt: skip
    """Fill out [M, 128] from rows x [M, 128]; gamma and beta are read with `norm`.

    w_in [512, 128], w_out [128, 256].
    """
    tiles, grid = _work(x)
    launch_kernel(
        transition_kernel_sm90, grid,
        _rows(x), _matrix(w_in, STEP), _dealt(w_out, WIDTH, STEP), gamma, beta, x, out, len(x), tiles, EPS, C=WIDTH,
        PARTS=2 * WIDTH // STEP, STEP=STEP, NORM=norm, RESIDUAL=residual, SLOTS=4 // x.element_size(),
        REGISTERS=registers, num_warps=4,
    )  # fmt: skip


def transition_gradient(
    grad_out: Tensor, x: Tensor, gamma: Tensor, beta: Tensor, w_in: Tensor, w_out: Tensor, hidden: Tensor,
    grads: Tensor, upstream: Tensor, norm: bool, copies: bool, registers: int,
) -> None:  # fmt: skip
    """Fill hidden [M, 256], grads [M, 512] and, with `copies`, upstream [M, 128]; gamma and beta are read with `norm`.

    w_in [512, 128]; w_out [256, 128], transposed. grad_out and x have the same dtype.
    """
    tiles, grid = _work(x)
    launch_kernel(
        transition_gradient_kernel_sm90, grid,
        _rows(x), _rows(grad_out), _dealt(w_in, STEP), _dealt(w_out, STEP), gamma, beta, hidden, grads,
        upstream, len(x), tiles, EPS, C=WIDTH, INNER=2 * WIDTH, STEP=STEP, NORM=norm, COPY=copies,
        SLOTS=4 // x.element_size(), REGISTERS=registers, num_warps=4,
    )  # fmt: skip


def triangle_operands(
    x: Tensor, norm: bool, w: Tensor, shift: Tensor, mask: Tensor | None, operands: Tensor, registers: int, stages: int
) -> None:
    """Fill operands [256, M].

    Args:
        x: [M, 128 or more], of which the first 128 are taken; with `norm` not yet normalised. w: [512, 128] or more.
        shift: [512], fp32. mask: [M] uint8.
    """
    pairs = 128
    count = len(x)
    tiles = triton.cdiv(count, pairs)
    launch_kernel(
        triangle_operands_kernel_sm90, (min(tiles, triton_support.multiprocessors(x.device)),),
        _dealt(x, pairs), _matrix(w, TILE), shift, shift if mask is None else mask, operands, count, tiles, EPS,
        C=WIDTH, PAIRS=pairs, STAGES=stages, NORM=norm, HAS_MASK=mask is not None, REGISTERS=registers, num_warps=4,
    )  # fmt: skip


def triangle_result(
    x: Tensor, product: Tensor, w_gate: Tensor, gate_shift: Tensor, w_out: Tensor, out_shift: Tensor,
    dropped: Tensor | None, strides: tuple[int, int], size: int, out: Tensor, residual: bool, registers: int,
) -> None:  # fmt: skip
    """Fill out [M, 128]; arguments as for `triangle_output`."""
    tiles, grid = _work(x)
    planes = descriptor(product, tuple(product.shape), tuple(product.stride()), (WIDTH, TILE))
    launch_kernel(
        triangle_result_kernel_sm90, grid,
        _rows(x), planes, _dealt(w_gate, STEP), _dealt(w_out, STEP), x, x if dropped is None else dropped, gate_shift,
        out_shift, out, *strides, size, tiles, EPS, C=WIDTH, STEP=STEP, HELD=8 // x.element_size(),
        HAS_DROPPED=dropped is not None, RESIDUAL=residual, REGISTERS=registers, num_warps=4,
    )  # fmt: skip


def triangle_output(
    x: Tensor, product: Tensor, w_gate: Tensor, gate_shift: Tensor, w_out: Tensor, out_shift: Tensor, grad_out: Tensor,
    dropped: Tensor | None, strides: tuple[int, int], size: int, x_hat: Tensor, rstd: Tensor, p_hat: Tensor,
    upstream: Tensor, grad_gate: Tensor, grad_product: Tensor, dealt: tuple[Tensor, Tensor] | None, registers: int,
) -> None:  # fmt: skip
    """Fill what stands behind `size`, from x [M, 128] and product [128, M] of M = rows x size pairs.

    Args:
        w_gate, w_out: [128, 128]. gate_shift, out_shift: [128], fp32. grad_out: [M, 128]. strides: of `dropped`, for
            rows of pairs and pairs in a row.
        x_hat, p_hat: [M, 136], ones behind. rstd: [M], of x. upstream: [M, 128]. grad_gate, grad_product: [128, M].
        dealt: both weights, one below the other, and w_out transposed, with dealt columns; else made here.
    """
    step = 32
    both, transposed = dealt or (_with_dealt_columns(w_gate, w_out), _with_dealt_columns(w_out.mT))
    tiles, grid = _work(x)
    launch_kernel(
        triangle_output_kernel_sm90, grid,
        _rows(x), _planes(product, WIDTH), _dealt(both, step), _dealt(transposed, WIDTH, step), grad_out,
        grad_out if dropped is None else dropped, gate_shift, out_shift, x_hat, rstd, p_hat, upstream,
        _planes(grad_gate, step), _planes(grad_product, WIDTH), *strides, size, tiles, EPS, C=WIDTH, STEP=step,
        HELD=4 // x.element_size(), HAS_DROPPED=dropped is not None, REGISTERS=registers, num_warps=4,
    )  # fmt: skip


def triangle_output_weights(
    x: Tensor, product: Tensor, dealt: Tensor, shift: Tensor, grad_out: Tensor, dropped: Tensor | None,
    strides: tuple[int, int], size: int, x_hat: Tensor, rstd: Tensor, grad_gate: Tensor, grad_product: Tensor,
    registers: int, of_weights: int,
) -> Tensor:  # fmt: skip
    """As `triangle_output`, for x in the dtype of products; dealt [256, 128]: both weights one below the other, with
    dealt columns; shift [256]: of the gate and of the output.

    Returns:
        [programs, 128, 136], fp32: shares of the products over the pairs with the normalised product, and in column 128
        of the sums. The rest of the columns hold anything.
    """
    step = 32
    tiles, grid = _work(x)
    partial = torch.empty((*grid, WIDTH, WIDTH + 8), device=x.device, dtype=torch.float32)
    launch_kernel(
        triangle_output_weights_kernel_sm90, grid,
        _rows(x), _planes(product, WIDTH), _dealt(dealt, step), grad_out, grad_out if dropped is None else dropped,
        shift, x_hat, rstd, partial, _planes(grad_gate, step), _planes(grad_product, WIDTH), *strides, size, tiles,
        C=WIDTH, STEP=step, HAS_DROPPED=dropped is not None, EPS=EPS, REGISTERS=registers, OF_WEIGHTS=of_weights,
        num_warps=4,
    )  # fmt: skip
    return partial


def _planes(planes: Tensor, channels: int) -> TensorDescriptor:
    """[channels, 64] of [channels, M] at once, channels dealt."""
    return _dealt(planes, channels, TILE)


def triangle_both(
    grads: Tensor, w: Tensor, dealt: Tensor | None, shift: Tensor, mask: Tensor | None, x_hat: Tensor, rstd: Tensor,
    grad_out: Tensor, grad_x: Tensor, residual: bool, registers: int, stages: int, step: int,
) -> None:  # fmt: skip
    """Turn the gradients of the operands in grads [640, M] into those of values and gates, and fill grad_x [M, 128].

    Args:
        grads: first 256 channels: of the operands, and then of the values; the next 256 are written for the gates; the
            last 128 are read. w: [640, 128]; dealt: the same with dealt columns, else made here. shift: [640], fp32.
        mask: [M] uint8. x_hat: [M, 136]. rstd: [M]. grad_out: [M, 128].
    """
    dealt = _with_dealt_columns(*w.split(WIDTH)) if dealt is None else dealt
    tiles, grid = _work(x_hat)
    planes = descriptor(grads, tuple(grads.shape), tuple(grads.stride()), (step, TILE))
    launch_kernel(
        triangle_both_kernel_sm90, grid,
        x_hat, planes, _matrix(dealt, step), shift, shift if mask is None else mask, rstd, grad_out, grad_x,
        tiles, C=WIDTH, STEP=step, STAGES=stages, HAS_MASK=mask is not None, RESIDUAL=residual,
        REGISTERS=registers, num_warps=4,
    )  # fmt: skip


def serves(x: Tensor, dtype: torch.dtype, *others: Tensor) -> bool:
    """Whether these kernels take rows x [.., 128] with products in `dtype`, and the copy engine reads `others` too."""
    fits = dtype == torch.bfloat16 and x.shape[-1] == WIDTH and x.numel() > 0
    return fits and all(tensor.dtype in TYPES and tensor.data_ptr() % 16 == 0 for tensor in (x, *others))


def has_heads(batch: int, length: int, number: int) -> bool:
    """Whether heads [batch, number, length] can be had: few enough, and no tile with rows of two structures."""
    return number <= MOST_HEADS and (batch == 1 or length % TILE == 0 or not number)


def adaptive_norm_gradient(
    grad_out: Tensor, x: Tensor, cond: Tensor, cond_gamma: Tensor, w_gamma: Tensor, gamma_bias: Tensor, both: Tensor,
    other_x: Tensor | None, other_cond: Tensor | None, grad_x: Tensor, grad_cond: Tensor, grad_gate: Tensor,
    registers: int,
) -> None:  # fmt: skip
    """Fill grad_x, grad_cond and grad_gate, all rows of 128 as x and cond are; w_gamma [128, 128].

    both [256, 128]: the weights of beta and of gamma, each transposed and its columns dealt (`weights.DEALT`).
    grad_out, the weights and grad_gate in the dtype of products; other_x and other_cond both or neither.
    """
    step, others = 32, other_x is not None
    tiles, grid = _work(x)
    launch_kernel(
        adaptive_norm_gradient_kernel_sm90, grid,
        _part(x, step), _rows(cond), _part(grad_out, step), _dealt(w_gamma, step),
        _dealt(both, WIDTH, step), cond_gamma, gamma_bias, other_x if others else x,
        other_cond if others else cond, grad_x, grad_cond, grad_gate, len(x), tiles, EPS, C=WIDTH, STEP=step,
        HELD=4 // max(x.element_size(), cond.element_size()), OTHERS=others, REGISTERS=registers, num_warps=4,
    )  # fmt: skip


def _with_dealt_columns(*weights: Tensor) -> Tensor:
    """Weights [128, 128] one below the other, columns in the order in which a product leaves them in registers."""
    out = weights[0].new_empty((len(weights) * WIDTH, WIDTH))
    for place, weight in zip(out.split(WIDTH), weights):
        place.view(WIDTH, 4, 4, 4, 2).copy_(weight.unflatten(1, (4, 4, 4, 2)).transpose(2, 3))
    return out


def _part(x: Tensor, columns: int) -> TensorDescriptor:
    return descriptor(x, tuple(x.shape), tuple(x.stride()), (TILE, columns))


def _work(x: Tensor) -> tuple[int, tuple[int]]:
    tiles = triton.cdiv(len(x), TILE)
    return tiles, (min(tiles, triton_support.multiprocessors(x.device)),)


def _rows(x: Tensor) -> TensorDescriptor:
    return descriptor(x, tuple(x.shape), tuple(x.stride()), (TILE, WIDTH))


def _matrix(x: Tensor, rows: int) -> TensorDescriptor:
    return descriptor(x, tuple(x.shape), tuple(x.stride()), (rows, WIDTH))


def _dealt(w: Tensor, rows: int, columns: int = WIDTH) -> TensorDescriptor:
    """[rows, columns] of a weight at once; row 32 a + 8 b + 2 c + d of it is brought to place 32 a + 8 c + 2 b + d."""
    length, pitch = len(w), w.stride(0)
    strides = (32 * pitch, 2 * pitch, 8 * pitch, pitch, 1)
    return descriptor(w, (length // 32, 4, 4, 2, w.shape[1]), strides, (rows // 32, 4, 4, 2, columns))
