"""`smooth_lddt_loss`: argument checks, dispatch and autograd."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from megafold.evofusion.operator import DTYPES, check_rows, check_tensors, refuse, uses_kernels
from megafold.evofusion.smooth_lddt import chunked
from megafold.operators import define

NAME = "smooth_lddt_loss"


def smooth_lddt_loss(
    pred: Tensor,
    true: Tensor,
    is_dna: Tensor,
    is_rna: Tensor,
    mask: Tensor | None = None,
    *,
    reduction: Literal["mean", "none"] = "mean",
    nucleic_acid_cutoff: float = 30.0,
    other_cutoff: float = 15.0,
) -> Tensor:
    """AF3 algorithm 27: 1 - smooth lDDT, without a tensor of all pairs in the forward or the backward.

    Args:
        pred: [B, M, 3] predicted coordinates in angstrom; computed in fp32 (fp64 for fp64).
        true: [B, M, 3] true coordinates; no gradient is computed for them.
        is_dna, is_rna: [B, M] bool: pairs of two nucleotide atoms count up to `nucleic_acid_cutoff`, others up to
            `other_cutoff` (angstrom, in truth).
        mask: [B, M] bool, True = atom counts.
        reduction: "mean" over B, or "none".

    Returns:
        A scalar, or [B]; 1 for a structure without a pair.

    Raises:
        ValueError: an argument has a wrong shape, dtype or device; it names the argument and what is allowed.
        NotImplementedError: in a backward of the backward.
    """
    check_rows(NAME, "pred", pred, 3)
    batch, atoms, _ = pred.shape
    expected = {
        "pred": (pred, (batch, atoms, 3), ()),
        "true": (true, (batch, atoms, 3), ()),
        "is_dna": (is_dna, (batch, atoms), (torch.bool,)),
        "is_rna": (is_rna, (batch, atoms), (torch.bool,)),
        "mask": (mask, (batch, atoms), (torch.bool,)),
    }
    check_tensors(NAME, pred, expected)
    if reduction not in ("mean", "none"):
        refuse(NAME, "reduction", f"is {reduction!r}", "'mean' or 'none'")
    pred, true = (t.float() if t.dtype in DTYPES else t for t in (pred, true))
    cutoffs = (float(nucleic_acid_cutoff), float(other_cutoff))
    return _loss_op(pred, true.to(pred.dtype).detach(), is_dna | is_rna, mask, *cutoffs, reduction == "mean")[0]


def _implementation(pred: Tensor):
    if uses_kernels(pred) and pred.numel():
        from megafold.evofusion.smooth_lddt import launch

        return launch
    return chunked


def _loss(pred, true, is_nucleotide, mask, nucleic_acid_cutoff, other_cutoff, mean):
    total, count = _implementation(pred).sums(pred, true, is_nucleotide, mask, nucleic_acid_cutoff, other_cutoff)
    slope = -1.0 / count.clamp(min=1).to(pred.dtype)
    loss = 1.0 + total * slope
    return (loss.mean(), slope / len(slope)) if mean else (loss, slope)


def _fake_loss(pred, true, is_nucleotide, mask, nucleic_acid_cutoff, other_cutoff, mean):
    return pred.new_empty(() if mean else pred.shape[0]), pred.new_empty(pred.shape[0])


def _gradient(grad_loss, slope, pred, *arguments):
    return _implementation(pred).gradient(grad_loss * slope, pred, *arguments)


def _fake_gradient(grad_loss, slope, pred, *arguments):
    return pred.new_empty(pred.shape)


def _setup_context(ctx, inputs, output) -> None:
    *tensors, ctx.nucleic_acid_cutoff, ctx.other_cutoff, _ = inputs
    ctx.save_for_backward(output[1], *tensors)
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_loss, grad_slope):
    if grad_loss is None:
        return (None,) * 7
    grad = _gradient_op(grad_loss, *ctx.saved_tensors, ctx.nucleic_acid_cutoff, ctx.other_cutoff)
    return (grad, *(None,) * 6)


_INPUTS = "Tensor pred, Tensor true, Tensor is_nucleotide, Tensor? mask, float nucleic_acid_cutoff, float other_cutoff"
_gradient_op = define(
    "smooth_lddt_backward", f"(Tensor grad_loss, Tensor slope, {_INPUTS}) -> Tensor", _gradient, _fake_gradient
)
_loss_op = define(
    "smooth_lddt", f"({_INPUTS}, bool mean) -> (Tensor, Tensor)", _loss, _fake_loss, _backward, _setup_context
)
