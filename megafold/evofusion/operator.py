"""What the operators share on the host: when kernels run, argument checks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from megafold import triton_support

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
REFERENCE_DTYPES = (*DTYPES, torch.float64)
NARROWEST, WIDEST = 16, 128
"""Widths of rows that the fused kernels hold whole: powers of two from NARROWEST to WIDEST."""


def uses_kernels(x: Tensor) -> bool:
    """Whether Triton kernels take a tensor of this device and dtype (False: the reference computes)."""
    return x.dtype in DTYPES and triton_support.runs_kernels(x.device)


def is_narrow(*widths: int) -> bool:
    """Whether the fused kernels hold rows of these widths whole; wider ones go through the vendor's matrix products."""
    return all(NARROWEST <= width <= WIDEST and width & (width - 1) == 0 for width in widths)


def product_dtype(x: Tensor) -> torch.dtype:
    """Dtype of matrix products: autocast's where it is on, else that of `x`."""
    if x.dtype != torch.float64 and torch.is_autocast_enabled(x.device.type):
        return torch.get_autocast_dtype(x.device.type)
    return x.dtype


def dense(*vectors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Vectors of parameters as kernels read them: elements side by side, also of a column of a matrix."""
    return tuple(None if vector is None else vector.contiguous() for vector in vectors)


def refuse(operator: str, name: str, was: str, allowed: str) -> None:
    """Raise the ValueError of a wrong argument."""
    raise ValueError(f"{operator}: {name} {was}; allowed: {allowed}")


def check_tensors(
    operator: str, x: Tensor, expected: Mapping[str, tuple[Tensor | None, Sequence[int], Sequence[torch.dtype]]]
) -> None:
    """Check arguments given as {name: (tensor or None, shape, dtypes; none: any floating point)}; all on x's device."""
    for name, (tensor, shape, dtypes) in expected.items():
        if tensor is None:
            continue
        if tuple(tensor.shape) != tuple(shape):
            refuse(operator, name, f"has shape {list(tensor.shape)}", f"{list(shape)} (no broadcasting)")
        if tensor.dtype not in (dtypes or REFERENCE_DTYPES):
            refuse(operator, name, f"has dtype {tensor.dtype}", ", ".join(str(d) for d in dtypes or REFERENCE_DTYPES))
        if tensor.device != x.device:
            refuse(operator, name, f"is on {tensor.device}", f"the device of the first argument, {x.device}")


def check_rows(operator: str, name: str, x: Tensor, dims: int | None = None) -> int:
    """Check dtype and number of dimensions of [..., C] (at least 2, or exactly `dims`); returns C."""
    if x.dim() < 2 or (dims is not None and x.dim() != dims):
        wanted = "[..., C]" if dims is None else f"{dims} dimensions"
        refuse(operator, name, f"has {x.dim()} dimensions, shape {list(x.shape)}", wanted)
    if x.dtype not in REFERENCE_DTYPES:
        refuse(operator, name, f"has dtype {x.dtype}", ", ".join(str(d) for d in REFERENCE_DTYPES))
    return x.shape[-1]


def check_dropped(operator: str, dropped: Tensor | None, shape: Sequence[int], device: torch.device) -> None:
    """`dropped`: a drawn dropout factor that broadcasts to [B, I, J, C] along I or J (row, column)."""
    if dropped is None:
        return
    if len(shape) != 4:
        refuse(operator, "dropped", f"is given for {len(shape)} dimensions", "shared dropout needs [B, I, J, C]")
    batch, rows, columns, width = shape
    shapes = [[batch, 1, columns, width], [batch, rows, 1, width], [batch, rows, columns, width]]
    if list(dropped.shape) not in shapes:
        refuse(operator, "dropped", f"has shape {list(dropped.shape)}", " or ".join(map(str, shapes)))
    if dropped.dtype not in REFERENCE_DTYPES or dropped.device != device:
        refuse(operator, "dropped", f"is {dropped.dtype} on {dropped.device}", f"floating point on {device}")
