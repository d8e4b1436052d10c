"""Rows of a table by bin: the numbers of an embedding, and gradients that are summed in one order and in fp32."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from megafold.model import bins as module
from megafold.model.bins import embed_bins

LABELS, WIDTH = 9, 20


def case(dtype=torch.float32, shape=(2, 7, 11)):
    random = torch.Generator().manual_seed(3)
    labels = torch.randint(0, LABELS - 1, shape, generator=random)  # the last row is not used
    table = torch.randn(LABELS, WIDTH, generator=random, dtype=dtype).requires_grad_()
    cotangent = torch.randn(*shape, WIDTH, generator=random, dtype=dtype)
    return labels, table, cotangent


@pytest.mark.parametrize("rows", [1, 33, 10**6], ids=["a-row", "chunks", "whole"])
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
def test_rows_and_gradients_are_those_of_an_embedding(rows, autocast, monkeypatch):
    monkeypatch.setattr(module, "CHUNK_ELEMENTS", rows * LABELS)
    labels, table, cotangent = case()
    exact = table.detach().double().requires_grad_()
    (expected,) = torch.autograd.grad(F.embedding(labels, exact), exact, cotangent.double())
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        found = embed_bins(labels, table)
        (gradient,) = torch.autograd.grad(found, table, cotangent)
    assert torch.equal(found, F.embedding(labels, table)) and gradient.dtype == torch.float32
    torch.testing.assert_close(gradient.double(), expected, rtol=1e-5, atol=1e-5)
    assert gradient[-1].abs().max() == 0 and expected[:-1].abs().min() > 0


def test_gradients_in_double_precision_are_those_of_finite_differences():
    labels, table, _ = case(torch.float64, (3, 4))
    assert torch.autograd.gradcheck(lambda weight: embed_bins(labels, weight), table)


def test_the_two_parts_of_a_gradient_survive_products_with_11_bits():
    values = torch.randn(4000, generator=torch.Generator().manual_seed(5)) * 10.0 ** torch.arange(-20, 20).repeat(100)
    high, low = module.in_two_parts(values)
    assert torch.equal(high + low, values)
    assert (high.view(torch.int32) & 0x1FFF).abs().max() == 0
    rounded = (low.view(torch.int32) + 0x1000 & ~0x1FFF).view(torch.float32)
    assert ((high + rounded.double() - values).abs() / values.abs()).max() < 2**-21


@pytest.mark.parametrize("shape", [(5,), (0, 4), (2, 3, 4, 5)], ids=["one-dimension", "empty", "four-dimensions"])
def test_labels_may_have_any_shape(shape):
    labels, table, cotangent = case(torch.float64, shape)
    (expected,) = torch.autograd.grad(F.embedding(labels, table), table, cotangent)
    (found,) = torch.autograd.grad(embed_bins(labels, table), table, cotangent)
    torch.testing.assert_close(found, expected)


def test_no_gradient_is_made_for_a_frozen_table():
    labels, table, _ = case()
    assert not embed_bins(labels, table.detach()).requires_grad


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_two_runs_give_the_same_bits_and_tf32_does_not_round_them(monkeypatch):
    monkeypatch.setattr(torch.backends.cuda.matmul, "allow_tf32", True)
    labels, table, cotangent = (tensor.detach().cuda() for tensor in case(shape=(1, 300, 301)))
    exact = table.double().requires_grad_()
    (expected,) = torch.autograd.grad(F.embedding(labels, exact), exact, cotangent.double())
    table.requires_grad_()
    found = [torch.autograd.grad(embed_bins(labels, table), table, cotangent)[0] for _ in range(5)]
    assert all(torch.equal(found[0], other) for other in found)
    assert (found[0] - expected).norm() < 1e-5 * expected.norm()
