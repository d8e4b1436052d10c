"""The vendor's product: what cuBLAS is told of matrices in every order, and on a device the numbers it gives."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from megafold.evofusion import vendor_product

PADDED = 5
"""Columns behind those of a matrix that no product may read or write."""


def halves(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(address)).view(np.float16)


def columns(address, operation, rows, across, leading, stride, count):
    """[count, rows, across], as cuBLAS sees it: by columns, or the transpose of what lies by columns."""
    shape, pitches = (count, rows, across), (stride, 1, leading)
    if operation == vendor_product.TRANSPOSED:
        pitches = (stride, leading, 1)
    last = sum((size - 1) * pitch for size, pitch in zip(shape, pitches))
    flat = halves(address, last + 1)
    return np.lib.stride_tricks.as_strided(flat, shape, [2 * pitch for pitch in pitches])


def gemm(
    handle, op_a, op_b, m, n, k, alpha, a, a_type, lda, stride_a, b, b_type, ldb, stride_b, beta, c, c_type, ldc,
    stride_c, count, compute, algorithm,
):  # fmt: skip
    """cublasGemmStridedBatchedEx on a CPU, in fp16, as its documentation has it."""
    assert {a_type, b_type, c_type} == {vendor_product.TYPES[torch.float16]} and compute == 68
    assert alpha._obj.value == 1 and beta._obj.value == 0
    found = columns(a, op_a, m, k, lda, stride_a, count).astype(np.float32)
    found = found @ columns(b, op_b, k, n, ldb, stride_b, count).astype(np.float32)
    columns(c, vendor_product.PLAIN, m, n, ldc, stride_c, count)[...] = found
    return 0


def matrix(rows: int, across: int, turned: bool, device: str, dtype: torch.dtype) -> torch.Tensor:
    """[3, rows, across] in rows that are longer than they need be, or the transpose of such."""
    rows, across = (across, rows) if turned else (rows, across)
    x = torch.randn(3, rows, across + PADDED, dtype=torch.float32).to(device, dtype)[..., :across]
    return x.mT if turned else x


@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_what_cublas_is_told(turned, monkeypatch):
    torch.manual_seed(0)
    a, b = matrix(6, 7, turned[0], "cpu", torch.float16), matrix(7, 4, turned[1], "cpu", torch.float16)
    whole = torch.full((3, 6, 4 + PADDED), torch.nan, dtype=torch.float16)
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    work = vendor_product.product(gemm, lambda *_: 0, a, b, whole[..., :4])
    assert work(a.data_ptr(), b.data_ptr(), whole.data_ptr()) == 0
    assert torch.allclose(whole[..., :4].float(), a.float() @ b.float(), atol=1e-2)
    assert whole[..., 4:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_cpu_and_other_dtypes_take_torch(dtype):
    a, b, out = torch.randn(2, 3, 4).to(dtype), torch.randn(2, 4, 5).to(dtype), torch.empty(2, 3, 5, dtype=dtype)
    vendor_product.multiply(a, b, out=out)
    assert torch.equal(out, torch.bmm(a, b))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("turned", [(False, False), (False, True), (True, False), (True, True)], ids=str)
def test_products_on_a_device(turned, dtype):
    torch.manual_seed(0)
    a, b = matrix(96, 72, turned[0], "cuda", dtype), matrix(72, 64, turned[1], "cuda", dtype)
    whole = torch.full((3, 96, 64 + PADDED), torch.nan, dtype=dtype, device="cuda")
    vendor_product.multiply(a, b, out=whole[..., :64])
    exact = a.double() @ b.double()
    assert (whole[..., :64].double() - exact).norm() <= 2 * torch.finfo(dtype).eps * exact.norm()
    assert whole[..., 64:].isnan().all()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="needs an NVIDIA GPU")
def test_a_graph_of_a_product_has_one_node():
    a, b, out = (torch.randn(128, 256, 256, device="cuda").bfloat16() for _ in range(3))
    vendor_product.multiply(a, b, out=out)
    assert vendor_product._cublas() is not None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        vendor_product.multiply(a, b, out=out)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        graph.replay()
        torch.cuda.synchronize()
    kernels = [event.name for event in trace.events() if event.device_type == torch.autograd.DeviceType.CUDA]
    assert len(kernels) == 1, kernels


def test_what_cublas_refuses_or_was_not_asked_for_is_multiplied_by_torch(monkeypatch):
    refused = []
    monkeypatch.setattr(vendor_product, "_serves", lambda *matrices: True)
    monkeypatch.setattr(vendor_product, "_cublas", lambda: (lambda *given: refused.append(given) or 15, lambda *_: 0))
    monkeypatch.setattr(torch.cuda, "current_blas_handle", lambda: 0)
    a, b, out = torch.randn(2, 3, 4).half(), torch.randn(2, 4, 5).half(), torch.empty(2, 3, 5).half()
    vendor_product.multiply(a, b, out=out)
    assert len(refused) == 1 and torch.equal(out, torch.bmm(a, b))
    vendor_product.multiply(a[:0], b[:0], out=out[:0])
    assert len(refused) == 1
