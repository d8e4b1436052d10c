"""Inputs and checks that the tests of EvoFlash-3D's kernels on a GPU share."""

from __future__ import annotations

import pytest
import torch

from megafold.evoflash3d.api import evoflash3d
from megafold.evoflash3d.reference import eager_attention
from megafold.testing import check_budget, outputs_and_gradients

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ON_A_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory is NaN, so that an element that no kernel writes cannot pass; products in full fp32."""
    tf32 = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)
    torch.backends.cuda.matmul.allow_tf32 = tf32


def draw(shape, dtype, layout="projection", seed=0):
    """q, k, v, bias-free inputs [B, R, H, N, D]: contiguous, a projection's view, the other triangle's, or a slice."""
    batch, rows, heads, n_queries, n_keys, dim = shape
    generator = torch.Generator("cuda").manual_seed(seed)

    def one(length):
        sizes = {
            "contiguous": (batch, rows, heads, length, dim),
            "projection": (batch, rows, length, heads, dim),
            "columns": (batch, length, rows, heads, dim),
            "slice": (batch, rows, length, heads, dim + 3),
        }[layout]
        tensor = torch.randn(sizes, generator=generator, device="cuda").to(dtype)
        if layout == "columns":
            return tensor.permute(0, 2, 3, 1, 4)
        return tensor if layout == "contiguous" else tensor[..., :dim].transpose(2, 3)

    return {"q": one(n_queries), "k": one(n_keys), "v": one(n_keys)}


def assert_in_budget(shape, dtype, *, layout="projection", bias_dtype=None, masked=False, seed=0):
    inputs = draw(shape, dtype, layout, seed)
    batch, rows, heads, n_queries, n_keys, _ = shape
    if bias_dtype is not None:
        inputs["bias"] = torch.randn(batch, heads, n_queries, n_keys, device="cuda").to(bias_dtype)
    mask = None
    if masked:
        mask = torch.rand(batch, rows, n_keys, device="cuda") > 0.3
        mask[-1, -1] = False
    cotangent = draw(shape, dtype, layout, seed + 1)["q"]
    kernel = outputs_and_gradients(evoflash3d, inputs, cotangent, mask=mask)
    eager = outputs_and_gradients(eager_attention, inputs, cotangent, mask=mask)
    wide = {n: t.double() for n, t in inputs.items()}
    exact = outputs_and_gradients(eager_attention, wide, cotangent, mask=mask)
    failed = [r for r in check_budget(kernel, eager, exact) if not r.ok]
    assert not failed
    if masked:
        assert not any(kernel[n][-1, -1].any() for n in ("out", "dq", "dk", "dv"))
    return kernel
