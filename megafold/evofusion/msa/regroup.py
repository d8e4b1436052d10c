"""Values of an MSA by head and token in place of sequence and token, copied 16 bytes at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from megafold.operators import define


def regroup(x: Tensor) -> Tensor:
    """x [B, S, N, H, E] -> [B, H, N, S, E], contiguous; the same function leads back."""
    return _operator(x)


def in_chunks(x: Tensor, first: int, second: int) -> Tensor:
    """x with two dimensions but the last exchanged, contiguous, copied 16 bytes at a time where its rows have them."""
    x = x.contiguous()
    if x.shape[-1] * x.itemsize % 16 == 0 and x.storage_offset() * x.itemsize % 16 == 0:
        return x.view(torch.complex128).transpose(first, second).contiguous().view(x.dtype)
    return x.transpose(first, second).contiguous()


def _regroup(x: Tensor) -> Tensor:
    return in_chunks(x, 1, 3)


def _fake(x: Tensor) -> Tensor:
    batch, depth, size, heads, width = x.shape
    return x.new_empty((batch, heads, size, depth, width))


def _setup_context(ctx: object, inputs: tuple[Tensor], output: Tensor) -> None:
    """Nothing is kept."""


def _backward(ctx: object, grad: Tensor) -> Tensor:
    return regroup(grad)


_operator = define("regroup", "(Tensor x) -> Tensor", _regroup, _fake, _backward, _setup_context)
