"""Host side of LayerNorm and several projections."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold import triton_support
from megafold.evofusion.launch import EPS, aligned, block, ceil_div, configuration, hopper_kernels, options
from megafold.evofusion.norm_project import kernels
from megafold.evofusion.weight_finish import Part, gradients
from megafold.evofusion.weight_gradient import Operand, Rows, Term, add_together, by_rows, runs_together
from megafold.evofusion.weights import PLAIN, TRANSPOSED, prepared
from megafold.replay import launch_kernel

RESIDENT_BYTES = 1 << 17
"""Largest weights that a program keeps in shared memory."""

MOST = 4
"""Projections by rows that one call may have."""


def forward(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    head_weight: Tensor | None,
    count: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Four projections [..., O] and the heads [B, H, ...]; what was not asked for has no element.

    weight: [count O, C]; bias: of the first of its rows, or of all.
    """
    x, (batch, length, width) = x.contiguous(), _sizes(x)
    outputs = 0 if weight is None else weight.shape[0] // count
    number = 0 if head_weight is None else head_weight.shape[0]
    rows = [x.new_empty((*x.shape[:-1], outputs) if p < count else (0,), dtype=dtype) for p in range(MOST)]
    heads = x.new_empty((batch, number, *x.shape[1:-1]) if number else (0,), dtype=dtype)
    with triton_support.device_guard(x.device):
        w, w_heads = _weights(weight, head_weight, dtype)
    config = configuration("norm_project", dtype, x.device)
    arguments = (
        x,
        norm_weight,
        x if norm_bias is None else norm_bias,
        w,
        x if bias is None else bias.contiguous(),
        w_heads,
    )
    tiles = batch * ceil_div(length, config["block_l"])
    flags = {"HAS_BETA": norm_bias is not None, "BIASED": 0 if bias is None else len(bias)}
    constants = _constants(config, width, outputs, count, number) | flags | options(config)
    hopper = hopper_kernels(config, x, dtype, w, w_heads) if count and outputs == width else None
    with triton_support.device_guard(x.device):
        if hopper and hopper.has_heads(batch, length, number):
            flat = [t.view(-1, width) for t in (x, *rows[:count])]
            hopper.project(
                flat[0], norm_weight, norm_bias, w, bias, w_heads, flat[1:], heads, number, length, **config["gluon"]
            )
        elif _is_resident(config, w, count):
            programs = min(tiles, triton_support.multiprocessors(x.device))
            constants |= {"STAGES": config["num_stages"]}
            del constants["BLOCK_O"]
            launch_kernel(
                kernels.resident_project_kernel, (programs,),
                *arguments, *rows, heads, length, tiles, programs, EPS, **constants,
            )  # fmt: skip
        else:
            launch_kernel(kernels.project_kernel, (tiles,), *arguments, *rows, heads, length, EPS, **constants)
    return (*rows, heads)


def backward(
    grads: list[Tensor | None],
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    head_weight: Tensor | None,
    other: Tensor | None,
    count: int,
    dtype: torch.dtype,
) -> tuple[Tensor, ...]:
    """Gradients of x, plus ``other``, and of the parameters; without elements for those that are not there."""
    x, (batch, length, width) = x.contiguous(), _sizes(x)
    other = None if other is None else other.contiguous()
    outputs = 0 if weight is None else weight.shape[0] // count
    number = 0 if head_weight is None else head_weight.shape[0]
    rows = [x.new_zeros((*x.shape[:-1], outputs), dtype=dtype) if g is None else aligned(g) for g in grads[:count]]
    heads = x
    if number:
        shape = (batch, number, *x.shape[1:-1])
        heads = x.new_zeros(shape, dtype=dtype) if grads[MOST] is None else grads[MOST].contiguous()
    config = configuration("norm_project_gradient", dtype, x.device)
    grad_x, normed = torch.empty_like(x), torch.empty_like(x, dtype=dtype)
    hopper = hopper_kernels(config, x, dtype) if count == MOST and outputs == width else None
    by_hopper = hopper and hopper.has_heads(batch, length, number)
    with triton_support.device_guard(x.device):
        w, w_heads = _weights(weight, head_weight, dtype, TRANSPOSED if by_hopper else PLAIN)
        if by_hopper:
            flat = [t.view(-1, width) for t in (x, grad_x, normed, *rows)]
            flat_other = None if other is None else other.view(-1, width)
            hopper.input_gradient(
                flat[3:], flat[0], norm_weight, w, heads, w_heads, flat_other, *flat[1:3], number, length,
                **config["gluon"],
            )  # fmt: skip
        else:
            added = x if other is None else other
            pointers = (x, norm_weight, w, w_heads, *rows, *[x] * (MOST - count), heads, added, grad_x, normed)
            constants = _constants(config, width, outputs, count, number) | {"OTHER": other is not None}
            _launch_gradient(pointers, batch, length, config, constants)
        parts = _sums(rows, heads, normed, weight, head_weight, (batch, length, outputs, number), dtype)
        found = gradients(parts, norm_weight, norm_bias, bias)
    none = x.new_empty(0)
    return (
        grad_x,
        found.norms[0],
        none if norm_bias is None else found.norms[1],
        none if weight is None else found.weights[0],
        none if bias is None else found.bias,
        found.weights[-1] if number else none,
    )


def _sums(
    grads: list[Tensor], heads: Tensor, normed: Tensor, weight: Tensor | None, head_weight: Tensor | None,
    sizes: tuple[int, int, int, int], dtype: torch.dtype,
) -> list[Part]:  # fmt: skip
    """What the gradients of the weights follow from; `sizes`: structures, rows of each, columns of grads and heads."""
    (batch, length, outputs, number), width, device = sizes, normed.shape[-1], normed.device
    together = grads and number and runs_together(dtype, device)
    terms = []
    if grads:
        sums = Rows(1, 1, batch * length, weight.shape[0], width, device, dtype, beside=number if together else 0)
        source = by_rows(normed.view(-1, width))
        terms.append(Term(sums, [by_rows(grad.view(-1, outputs)) for grad in grads], source, outputs))
    if number:
        splits = terms[0].rows.splits if together else 0
        sums = Rows(batch, 1, length, number, width, device, dtype, splits=splits)
        columns = Operand(heads, number * length, 0, length, columns=True)
        terms.append(Term(sums, columns, by_rows(normed.view(batch, 1, length, width)), number))
    if together:
        add_together(*terms)
    else:
        for term in terms:
            term.rows.add(term.a, term.x, term.columns)
    return [term.rows.part(w) for term, w in zip(terms, [w for w in (weight, head_weight) if w is not None])]


def takes_transposed(x: Tensor, outputs: int, dtype: torch.dtype) -> bool:
    """Whether `input_gradient` for `outputs` columns wants the weight as [C, O]."""
    config = configuration("norm_project_gradient", dtype, x.device)
    return outputs == MOST * x.shape[-1] and hopper_kernels(config, x, dtype) is not None


def input_gradient(
    grad: Tensor, x: Tensor, norm_weight: Tensor, w: Tensor, transposed: bool, other: Tensor | None, grad_x: Tensor,
    normed: Tensor,
) -> None:  # fmt: skip
    """Gradient of rows x [M, C] from that of one projection [M, O], plus `other`, into `grad_x`; `normed` like it.

    All contiguous; w [O, C], or [C, O] where `takes_transposed` says so, in the dtype of products, which `grad` and
    `normed` have, too.
    """
    config = configuration("norm_project_gradient", w.dtype, x.device)
    length, width = x.shape
    if transposed:
        hopper_kernels(config, x, w.dtype).input_gradient(
            [grad], x, norm_weight, w, x, x, other, grad_x, normed, 0, length, **config["gluon"]
        )
        return
    pointers = (x, norm_weight, w, w, *[grad] * MOST, x, x if other is None else other, grad_x, normed)
    constants = _constants(config, width, w.shape[0], 1, 0) | {"OTHER": other is not None}
    _launch_gradient(pointers, 1, length, config, constants)


def _launch_gradient(pointers: tuple[Tensor, ...], batch: int, length: int, config: dict, constants: dict) -> None:
    tiles, count = batch * ceil_div(length, config["block_l"]), constants["COUNT"]
    x, w = pointers[0], pointers[2]
    constants = constants | options(config)
    if _is_resident(config, w, count):
        programs = min(tiles, triton_support.multiprocessors(x.device))
        del constants["BLOCK_O"]
        wide = constants["OUTPUTS"] if count > 1 else max(16, constants["OUTPUTS"] // MOST)
        constants |= {"STAGES": config["num_stages"], "WIDE": wide}
        launch_kernel(
            kernels.resident_gradient_kernel, (programs,), *pointers, length, tiles, programs, EPS, **constants
        )
    else:
        launch_kernel(kernels.gradient_kernel, (tiles,), *pointers, length, EPS, **constants)


def _is_resident(config: dict, w: Tensor, count: int) -> bool:
    """Whether programs keep all weights in shared memory: where a configuration asks for it and they fit."""
    if not config.get("resident") or not count:
        return False
    outputs = w.shape[0] // count
    return outputs & (outputs - 1) == 0 and w.numel() * w.element_size() <= RESIDENT_BYTES


def _sizes(x: Tensor) -> tuple[int, int, int]:
    """Structures, rows of each, and their width."""
    batch, width = x.shape[0], x.shape[-1]
    return batch, x.numel() // (batch * width), width


def _weights(
    weight: Tensor | None, head_weight: Tensor | None, dtype: torch.dtype, kind: int = PLAIN
) -> tuple[Tensor, Tensor]:
    """In the dtype of products, the first as `kind` says; one twice where the other is missing, which is not read."""
    wanted = [(weight, kind)] * (weight is not None) + [(head_weight, PLAIN)] * (head_weight is not None)
    found = prepared(dtype, *wanted)
    return found[0], found[-1]


def _constants(config: dict, width: int, outputs: int, count: int, heads: int) -> dict[str, object]:
    return {
        "C": width,
        "OUTPUTS": outputs or 16,
        "BLOCK_L": config["block_l"],
        "BLOCK_O": block(config, "block_o", outputs) if outputs else 16,
        "BLOCK_H": max(16, 1 << (heads - 1).bit_length()) if heads else 16,
        "COUNT": count,
        "HEADS": heads,
        "PRECISION": triton_support.float32_precision(),
    }
