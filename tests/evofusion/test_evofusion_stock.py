"""The references are the stock modules: same parameters, same numbers and gradients, in fp32."""

from __future__ import annotations

import sys

import pytest
import torch
from torch import nn

from megafold.evofusion.attention_output.reference import attention_output
from megafold.evofusion.conditioned.api import conditioned_transition
from megafold.evofusion.msa.api import outer_product_mean, pair_weighted_averaging
from megafold.evofusion.norm_project.api import norm_project
from megafold.evofusion.smooth_lddt.api import smooth_lddt_loss
from megafold.evofusion.transition.api import transition
from megafold.evofusion.triangle_multiplication.api import triangle_multiplication
from megafold.evofusion.windowed_attention.api import windowed_attention


@pytest.fixture(scope="module")
def stock():
    from megafold.stock import load_stock

    load_stock()
    return sys.modules["alphafold3_pytorch.alphafold3"]


def randomized(module: nn.Module) -> nn.Module:
    """What starts at zero would hide everything before it."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.2)
    return module


def assert_same(module: nn.Module, inputs: list[torch.Tensor], stock_call, own_call) -> None:
    """Outputs and the gradients of inputs and parameters agree."""
    results = []
    for call in (stock_call, own_call):
        leaves = [t.detach().clone().requires_grad_() for t in inputs]
        torch.manual_seed(1)  # of the dropout
        out = call(*leaves)
        generator = torch.Generator().manual_seed(2)
        cotangent = torch.randn(out.shape, generator=generator)
        grads = torch.autograd.grad(out, [*leaves, *module.parameters()], cotangent, allow_unused=True)
        results.append([out, *grads])
    for name, theirs, ours in zip(("out", *["gradient"] * 99), *results):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5, msg=lambda m, name=name: f"{name}: {m}")


def drawn(dropout: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """The factor that the stock's shared dropout draws for x."""
    batch, rows, columns, width = x.shape
    shape = (batch, 1, columns, width) if dropout.dropout_type == "row" else (batch, rows, 1, width)
    return dropout.dropout(x.new_ones(shape))


@pytest.mark.parametrize(("mix", "shared"), [("outgoing", "row"), ("incoming", "col")])
def test_triangle_multiplication(stock, mix, shared):
    inner = stock.TriangleMultiplication(dim=16, mix=mix, dropout=0.25, dropout_type=shared)
    module = randomized(stock.PreLayerNorm(inner, dim=16)).train()
    mask = torch.rand(2, 7) > 0.2

    def ours(x):
        return triangle_multiplication(
            x, module.norm.weight, module.norm.bias, inner.left_right_proj[0].weight, inner.out_gate.weight,
            inner.to_out_norm.weight, inner.to_out_norm.bias, inner.to_out[0].weight, mix=mix, mask=mask,
            dropped=drawn(inner.to_out[1], x),
        )  # fmt: skip

    assert_same(module, [torch.randn(2, 7, 7, 16)], lambda x: module(x, mask=mask) + x, ours)


def test_transition(stock):
    module = randomized(stock.PreLayerNorm(stock.Transition(dim=16), dim=16))
    ff = module.fn.ff

    def ours(x):
        return transition(x, module.norm.weight, module.norm.bias, ff[0].weight, ff[2].weight)

    assert_same(module, [torch.randn(2, 7, 16)], lambda x: module(x) + x, ours)


def test_conditioned_transition(stock):
    module = randomized(stock.ConditionWrapper(stock.Transition(dim=16), dim=16, dim_cond=24))
    norm, ff, gate = module.adaptive_norm, module.fn.ff, module.to_adaln_zero_gamma[0]

    def ours(x, cond):
        return conditioned_transition(
            x, cond, norm.norm_cond.weight, norm.to_gamma[0].weight, norm.to_gamma[0].bias, norm.to_beta.weight,
            ff[0].weight, ff[2].weight, gate.weight, gate.bias,
        )  # fmt: skip

    inputs = [torch.randn(2, 7, 16), torch.randn(2, 7, 24)]
    assert_same(module, inputs, lambda x, cond: module(x, cond=cond) + x, ours)


def test_triangle_attention_around_the_attention(stock):
    inner = stock.TriangleAttention(dim=16, heads=2, dim_head=8, node_type="ending", dropout=0.25, dropout_type="col")
    module = randomized(stock.PreLayerNorm(inner, dim=16)).train()
    attn = inner.attn

    def ours(x):
        weights = [attn.to_q.weight, *attn.to_kv.weight.chunk(2), attn.to_gates[0].weight]
        (q, k, v, gate), bias = norm_project(
            x, module.norm.weight, module.norm.bias, weights, [attn.to_q.bias, None, None, None],
            inner.to_attn_bias[0].weight,
        )  # fmt: skip
        q, k, v = (t.unflatten(-1, (2, 8)).transpose(1, 2).transpose(2, 3) for t in (q, k, v))  # rows: the columns
        scores = q @ k.transpose(-1, -2) * 8**-0.5 + bias.transpose(-1, -2).unsqueeze(1)
        attended = (scores.softmax(-1) @ v).transpose(2, 3).flatten(-2).transpose(1, 2)
        return attention_output(attended, gate, attn.to_out.weight, drawn(inner.dropout, x), x)

    assert_same(module, [torch.randn(2, 5, 5, 16)], lambda x: module(x) + x, ours)


def test_windowed_attention(stock):
    from alphafold3_pytorch.attention import Attend

    attend = Attend(window_size=5)
    mask, windowed_mask = torch.rand(2, 13) > 0.2, torch.rand(2, 3, 5, 10) > 0.3
    windowed_mask[..., 5:] |= torch.eye(5, dtype=torch.bool)  # every atom sees itself where it exists
    keep = mask[:, :, None, None]

    def stock_call(q, k, v, bias):
        out = attend(
            *(t.transpose(1, 2) for t in (q, k, v)), mask=mask, windowed_mask=windowed_mask, attn_bias=bias
        )  # fmt: skip
        return out.transpose(1, 2) * keep

    def ours(q, k, v, bias):
        return windowed_attention(q, k, v, bias, mask, windowed_mask) * keep

    inputs = [*(torch.randn(2, 13, 2, 8) for _ in range(3)), torch.randn(2, 2, 3, 5, 10)]
    assert_same(attend, inputs, stock_call, ours)


@pytest.mark.parametrize("masked", [True, False], ids=["masks", "no mask"])
def test_outer_product_mean(stock, masked):
    module = randomized(stock.OuterProductMean(dim_msa=16, dim_pairwise=12, dim_hidden=4))
    fixed = {"mask": torch.rand(2, 5) > 0.2, "msa_mask": torch.rand(2, 6) > 0.3} if masked else {}

    def ours(msa):
        out = module.to_pairwise_repr
        return outer_product_mean(
            msa, module.norm.weight, module.norm.bias, module.to_hidden.weight, out.weight, out.bias, **fixed
        )

    assert_same(module, [torch.randn(2, 6, 5, 16)], lambda msa: module(msa, **fixed), ours)


def test_pair_weighted_averaging(stock):
    module = stock.MSAPairWeightedAveraging(
        dim_msa=16, dim_pairwise=12, heads=2, dim_head=8, dropout=0.25, dropout_type="row"
    )
    module = randomized(module).train()
    mask = torch.tensor([[True] * 4 + [False], [True] * 5])

    def ours(msa, pair):
        norm, linear, _ = module.msa_to_values_and_gates
        pair_norm, to_bias, _ = module.pairwise_repr_to_attn
        return pair_weighted_averaging(
            msa, pair, norm.weight, norm.bias, linear.weight, pair_norm.weight, pair_norm.bias, to_bias.weight,
            module.to_out[1].weight, mask=mask, dropped=drawn(module.to_out[2], msa),
        )  # fmt: skip

    inputs = [torch.randn(2, 3, 5, 16), torch.randn(2, 5, 5, 12)]
    assert_same(module, inputs, lambda msa, pair: module(msa=msa, pairwise_repr=pair, mask=mask) + msa, ours)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_smooth_lddt_loss(stock, reduction):
    module = stock.SmoothLDDTLoss()
    true = torch.randn(2, 21, 3) * 9
    is_dna, is_rna, mask = torch.rand(2, 21) > 0.6, torch.rand(2, 21) > 0.6, torch.rand(2, 21) > 0.2

    def stock_call(pred):
        return module(pred, true, is_dna, is_rna, mask, loss_reduction=reduction)

    def ours(pred):
        return smooth_lddt_loss(pred, true, is_dna, is_rna, mask, reduction=reduction)

    assert_same(module, [true + torch.randn(2, 21, 3)], stock_call, ours)
