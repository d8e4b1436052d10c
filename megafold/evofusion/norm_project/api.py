"""`norm_project`: argument checks, dispatch and autograd."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from megafold.evofusion.norm_project import reference
from megafold.evofusion.operator import check_rows, check_tensors, dense, is_narrow, product_dtype, refuse, uses_kernels
from megafold.operators import define

NAME = "norm_project"
MOST_PROJECTIONS, MOST_HEADS = 4, 64


def norm_project(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weights: Sequence[Tensor] = (),
    biases: Sequence[Tensor | None] | None = None,
    head_weight: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None]:
    """LayerNorm, then several projections of it that read x once; the normalised tensor is never stored.

    The prologue of triangle attention (queries, keys, values, gate, and the bias as heads) and of attention with pair
    bias (heads alone).

    Args:
        x: [B, ..., C], fp32, bf16 or fp16 (fp64 through the reference). C = 16, 32, 64 or 128 runs in kernels.
        norm_weight, norm_bias: [C], of the LayerNorm (eps 1e-5); norm_bias may be None.
        weights: up to 4 of one shape [O, C], O a multiple of 16 (in kernels).
        biases: None, or one [O] or None for each weight.
        head_weight: [H, C], for values that their consumer wants as [B, H, ...], such as attention biases.

    Returns:
        A list with [B, ..., O] for each weight, contiguous, and [B, H, ...], contiguous, or None. In the dtype of
        products.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward (kernels only).
    """
    return _project(x, norm_weight, norm_bias, weights, biases, head_weight, passes=False)[:2]


def norm_project_and_pass(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weights: Sequence[Tensor] = (),
    biases: Sequence[Tensor | None] | None = None,
    head_weight: Tensor | None = None,
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    """`norm_project`, and x for what follows, as its residual: what flows back to that is added in the same kernel.

    Args, raises: as `norm_project`. Returns: as `norm_project`, then x.
    """
    return _project(x, norm_weight, norm_bias, weights, biases, head_weight, passes=True)


def _project(
    x: Tensor,
    norm_weight: Tensor,
    norm_bias: Tensor | None,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None] | None,
    head_weight: Tensor | None,
    passes: bool,
) -> tuple[list[Tensor], Tensor | None, Tensor]:
    width = check_rows(NAME, "x", x)
    weights = list(weights)
    if not weights and head_weight is None:
        refuse(NAME, "weights", "is empty", "at least one weight, or a head_weight")
    if len(weights) > MOST_PROJECTIONS:
        refuse(NAME, "weights", f"has {len(weights)} entries", f"at most {MOST_PROJECTIONS}")
    if biases is not None and len(biases) != len(weights):
        refuse(NAME, "biases", f"has {len(biases)} entries", f"one for each of the {len(weights)} weights")
    outputs = weights[0].shape[0] if weights else 0
    heads = 0 if head_weight is None else head_weight.shape[0]
    if heads > MOST_HEADS:
        refuse(NAME, "head_weight", f"has {heads} heads", f"at most {MOST_HEADS}")
    expected = {"norm_weight": (norm_weight, (width,), ()), "norm_bias": (norm_bias, (width,), ())}
    expected |= {f"weights[{i}]": (weight, (outputs, width), ()) for i, weight in enumerate(weights)}
    expected |= {f"biases[{i}]": (bias, (outputs,), ()) for i, bias in enumerate(biases or ())}
    expected["head_weight"] = (head_weight, (heads, width), ())
    check_tensors(NAME, x, expected)

    weight = torch.cat(weights) if len(weights) > 1 else weights[0] if weights else None
    by_kernels = uses_kernels(x) and is_narrow(width) and outputs % 16 == 0 and x.numel() > 0
    bias = _joined(weights, biases, whole=not by_kernels)
    arguments = (x, norm_weight, norm_bias, weight, bias, head_weight, len(weights))
    if by_kernels:
        arguments = (x, *dense(norm_weight, norm_bias), *arguments[3:])
        if passes:
            *rows, by_head, x = _Passing.apply(*arguments, product_dtype(x))
        else:
            *rows, by_head = _forward_op(*arguments, product_dtype(x))
        return rows[: len(weights)], by_head if heads else None, x
    return *reference.norm_project(*arguments), x


def _joined(weights: list[Tensor], biases: Sequence[Tensor | None] | None, whole: bool) -> Tensor | None:
    """The biases one after another, zeros where there is none; None where there is none at all.

    Without `whole` they end with the last one: of four projections often the first alone has a bias, left as it is.
    """
    if biases is None or all(bias is None for bias in biases):
        return None
    last = max(p for p, bias in enumerate(biases) if bias is not None)
    parts = [w.new_zeros(w.shape[0]) if bias is None else bias for w, bias in zip(weights, biases[: last + 1])]
    behind = sum(w.shape[0] for w in weights[last + 1 :])
    parts += [weights[0].new_zeros(behind)] if behind and whole else []
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _forward(*arguments):
    from megafold.evofusion.norm_project import launch

    return launch.forward(*arguments)


def _fake_forward(x, norm_weight, norm_bias, weight, bias, head_weight, count, dtype):
    outputs = 0 if weight is None else weight.shape[0] // count
    rows = [x.new_empty((*x.shape[:-1], outputs) if p < count else (0,), dtype=dtype) for p in range(MOST_PROJECTIONS)]
    if head_weight is None:
        return (*rows, x.new_empty((0,), dtype=dtype))
    return (*rows, x.new_empty((x.shape[0], head_weight.shape[0], *x.shape[1:-1]), dtype=dtype))


def _gradients(*arguments):
    from megafold.evofusion.norm_project import launch

    return launch.backward(list(arguments[:5]), *arguments[5:])


def _fake_gradients(*arguments):
    x, *parameters = arguments[5:11]
    return tuple(x.new_empty(0) if t is None else t.new_empty(t.shape) for t in (x, *parameters))


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.count, ctx.dtype = inputs
    ctx.save_for_backward(*tensors)
    ctx.set_materialize_grads(False)


def _backward(ctx, *grads, other=None):
    if all(grad is None for grad in grads):
        return (other,) + (None,) * 7
    tensors = ctx.saved_tensors  # once: under checkpointing they cannot be unpacked again
    given = _backward_op(*grads, *tensors, other, ctx.count, ctx.dtype)
    return (*(None if t is None else grad for t, grad in zip(tensors, given)), None, None)


class _Passing(torch.autograd.Function):
    """The operator with x as its last output, whose gradient is one of the operator's backward's arguments."""

    @staticmethod
    def forward(ctx, x, *arguments):
        output = _forward_op(x, *arguments)
        _setup_context(ctx, (x, *arguments), output)
        return (*output, x.view_as(x))

    @staticmethod
    def backward(ctx, *grads):
        return _backward(ctx, *grads[:-1], other=grads[-1])


_PARAMETERS = "Tensor x, Tensor norm_weight, Tensor? norm_bias, Tensor? weight, Tensor? bias, Tensor? head_weight"
_OPTIONS = "int count, ScalarType dtype"
_backward_op = define(
    f"{NAME}_backward",
    f"({', '.join(f'Tensor? grad{i}' for i in range(5))}, {_PARAMETERS}, Tensor? other, {_OPTIONS}) "
    f"-> ({', '.join(['Tensor'] * 6)})",
    _gradients,
    _fake_gradients,
)
_forward_op = define(
    NAME,
    f"({_PARAMETERS}, {_OPTIONS}) -> ({', '.join(['Tensor'] * 5)})",
    _forward,
    _fake_forward,
    _backward,
    _setup_context,
)
