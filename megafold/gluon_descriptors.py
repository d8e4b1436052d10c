"""What Gluon kernels tell the copy engine of a tensor."""

from __future__ import annotations

import functools

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

TYPES = {torch.bfloat16: gl.bfloat16, torch.float16: gl.float16, torch.float32: gl.float32}


def descriptor(
    tensor: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...]
) -> TensorDescriptor:
    """Of a tensor, at a multiple of 16 bytes, seen with this shape and these strides in elements; block: of a copy."""
    # The stride of an axis of size 1 may be anything in PyTorch; the copy engine wants a multiple of 16 bytes.
    strides = (*(16 if size == 1 else stride for size, stride in zip(shape[:-1], strides)), 1)
    # A copy, by hand: copy.copy makes this three times as long.
    found = object.__new__(TensorDescriptor)
    found.__dict__.update(checked(shape, strides, block, tensor.dtype).__dict__, base=tensor)
    return found


@functools.lru_cache(maxsize=1024)
def checked(
    shape: tuple[int, ...], strides: tuple[int, ...], block: tuple[int, ...], dtype: torch.dtype
) -> TensorDescriptor:
    """A descriptor without a tensor: Triton's checks and the choice of a layout cost more host time than a launch."""
    layout = gl.NVMMASharedLayout.get_default_for(list(block), TYPES[dtype])
    anything = torch.empty(8, dtype=dtype, device="cpu")
    found = TensorDescriptor(anything, list(shape), list(strides), list(block), layout)
    found.base = None
    return found
