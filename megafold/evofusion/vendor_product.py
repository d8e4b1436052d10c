"""The vendor's batched product in 16 bit, on NVIDIA without its workspace.

With a workspace cuBLAS picks kernels whose programs take tiles from a counter, and clears that counter before each
product: a launch more and 3 to 5 us in which nothing runs, where the product takes 11 us (N = 256) to
34 us (N = 384). Without one it picks the same kernels with tiles dealt out ahead, which are as fast (on an H200).
PyTorch sets the workspace of its handle before each call of its own and has no switch for one product, so cuBLAS is
called here, with PyTorch's handle.
"""

from __future__ import annotations

import ctypes
import functools
import os
from collections.abc import Callable

import torch
from torch import Tensor

from megafold.replay import note

TYPES = {torch.bfloat16: 14, torch.float16: 2}
"""cudaDataType_t."""

COMPUTE_32F, DEFAULT_ALGORITHM, PLAIN, TRANSPOSED = 68, -1, 0, 1
"""cublasComputeType_t, cublasGemmAlgo_t and cublasOperation_t."""


def multiply(a: Tensor, b: Tensor, *, out: Tensor) -> None:
    """out[n] = a[n] b[n] of [B, M, K] and [B, K, N], sums in fp32.

    Strides are those that `torch.bmm` takes without a copy: one of the last two is 1; of ``out`` the last one.
    """
    if not (_serves(a, b, out) and _without_workspace(a, b, out)):
        torch.bmm(a, b, out=out)


def _serves(a: Tensor, b: Tensor, out: Tensor) -> bool:
    on_nvidia = a.is_cuda and not torch.version.hip
    # With one element along an axis strides do not say which one is contiguous.
    return on_nvidia and a.dtype == b.dtype == out.dtype and a.dtype in TYPES and min(*a.shape[1:], b.shape[2]) > 1


def _without_workspace(a: Tensor, b: Tensor, out: Tensor) -> bool:
    """Whether cuBLAS took the product. It does not promise to without a workspace: some routines then fail."""
    if not len(a):
        return False
    if (cublas := _cublas()) is None:
        return False
    work = product(*cublas, a, b, out)
    if work(a.data_ptr(), b.data_ptr(), out.data_ptr()):
        return False

    def again(*addresses: int) -> None:
        if status := work(*addresses):
            raise RuntimeError(f"cuBLAS gave status {status} for a product that it took before (see cublasStatus_t)")

    note(again, a, b, out)
    return True


def product(gemm: Callable, set_workspace: Callable, a: Tensor, b: Tensor, out: Tensor) -> Callable[..., int]:
    """A function that multiplies such matrices at three addresses and returns cuBLAS's status, 0 for success.

    It works on columns: out^T = b^T a^T, and a matrix whose rows are contiguous is its transpose there.

    Args:
        gemm, set_workspace: cublasGemmStridedBatchedEx and cublasSetWorkspace.
    """
    (count, rows, inner), columns = a.shape, b.shape[2]
    (first, *of_first), (second, *of_second) = _seen(b), _seen(a)
    sizes = first, second, columns, rows, inner, ctypes.byref(_ONE)
    kind, zero = TYPES[out.dtype], ctypes.byref(_ZERO)
    behind = kind, out.stride(1), out.stride(0), count, COMPUTE_32F, DEFAULT_ALGORITHM

    def work(at_a: int, at_b: int, at_out: int) -> int:
        handle = torch.cuda.current_blas_handle()
        matrices = at_b, kind, *of_first, at_a, kind, *of_second, zero, at_out, *behind
        return set_workspace(handle, None, 0) or gemm(handle, *sizes, *matrices)

    return work


def _seen(x: Tensor) -> tuple[int, int, int]:
    """Operation, leading dimension and stride of a batch, of x^T by columns."""
    batch, row, column = x.stride()
    return (PLAIN, row, batch) if column == 1 else (TRANSPOSED, column, batch)


_ONE, _ZERO = ctypes.c_float(1.0), ctypes.c_float(0.0)


@functools.cache
def _cublas() -> tuple[Callable, Callable] | None:
    """cublasGemmStridedBatchedEx and cublasSetWorkspace of the cuBLAS that PyTorch has loaded, or None.

    No other one is loaded: the handle is PyTorch's.
    """
    try:
        library = ctypes.CDLL(f"libcublas.so.{torch.version.cuda.split('.')[0]}", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        gemm, set_workspace = library.cublasGemmStridedBatchedEx, library.cublasSetWorkspace_v2
    except (OSError, AttributeError):
        return None
    pointer, integer = ctypes.c_void_p, ctypes.c_int
    matrix = pointer, integer, integer, ctypes.c_longlong
    gemm.argtypes = pointer, *(integer,) * 5, pointer, *matrix, *matrix, pointer, *matrix, *(integer,) * 3
    set_workspace.argtypes = pointer, pointer, ctypes.c_size_t
    return gemm, set_workspace
