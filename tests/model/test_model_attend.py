"""The ways to compute an attention with a shared bias, against the definition in float64."""

from __future__ import annotations

import pytest
import torch

from megafold.model import attend

WAYS = {"eager": attend.attend_eager, "sdpa": attend.attend_sdpa, "evoflash3d": attend.attend_evoflash3d}
# groups, rows, heads, queries, keys, head dimension
SHAPES = {
    "single": (2, 1, 3, 17, 17, 16),
    "triangle-one-structure": (1, 13, 2, 13, 13, 8),
    "triangle-two-structures": (2, 7, 2, 7, 7, 16),
    "memory-keys": (2, 3, 2, 9, 12, 8),
}


def _inputs(groups, rows, heads, queries, keys, dim):
    g = torch.Generator().manual_seed(0)
    q, k, v, out = (torch.randn(groups, rows, heads, n, dim, generator=g) for n in (queries, keys, keys, queries))
    bias = torch.randn(groups, heads, queries, keys, generator=g)
    mask = torch.rand(groups, 1, keys, generator=g) < 0.7
    mask[:, :, 0] = True
    return [q, k, v, bias], mask, out


def _run(way, inputs, mask, cotangent, dtype=torch.float32):
    leaves = [t.to(dtype).requires_grad_() for t in inputs]
    out = way(*leaves, mask)
    return [out, *torch.autograd.grad(out, leaves, cotangent.to(dtype))]


@pytest.mark.parametrize("masked", [False, True], ids=["no-mask", "mask"])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@pytest.mark.parametrize("way", WAYS)
def test_output_and_gradients_are_the_definitions(way, shape, masked):
    inputs, mask, cotangent = _inputs(*shape)
    mask = mask if masked else None
    exact = _run(attend.attend_eager, inputs, mask, cotangent, torch.float64)
    eager = _run(attend.attend_eager, inputs, mask, cotangent)
    for name, found, plain, true in zip(
        ("out", "q", "k", "v", "bias"), _run(WAYS[way], inputs, mask, cotangent), eager, exact
    ):
        allowed = 2 * (plain - true).norm() + 2.0**-24 * true.norm()
        assert (found - true).norm() <= allowed, name


def test_without_kernels_evoflash3d_leaves_the_attention_to_sdpa(monkeypatch):
    (q, k, v, bias), mask, _ = _inputs(2, 3, 2, 5, 6, 8)
    assert torch.equal(attend.attend_by_device(q, k, v, bias, mask), attend.attend_sdpa(q, k, v, bias, mask))
    monkeypatch.setattr("megafold.evoflash3d.api.uses_kernels", lambda device, dtype: dtype == torch.float32)
    monkeypatch.setattr(attend, "attend_evoflash3d", lambda *a, dropout_p: (a, dropout_p))
    assert attend.attend_by_device(q, k, v, bias, mask, dropout_p=0.5) == ((q, k, v, bias, mask), 0.5)
    assert isinstance(attend.attend_by_device(q.double(), k.double(), v.double(), bias, mask), torch.Tensor)


def test_the_definition_is_written_out_attention():
    inputs, mask, _ = _inputs(2, 3, 2, 5, 6, 4)
    q, k, v, bias = (t.double() for t in inputs)
    out = attend.attend_eager(q, k, v, bias, mask, softclamp=2.0)
    for g, r, h, i in [(0, 0, 0, 0), (1, 2, 1, 4)]:
        logits = torch.stack([q[g, r, h, i] @ k[g, r, h, j] / 2 + bias[g, h, i, j] for j in range(6)])
        weights = torch.where(mask[g, 0], (2 * torch.tanh(logits / 2)).exp(), 0)
        torch.testing.assert_close(out[g, r, h, i], weights / weights.sum() @ v[g, r, h])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_a_row_without_keys_averages_them_all_as_in_the_stock_model(way, dtype):
    (q, k, v, bias), mask, _ = _inputs(2, 3, 2, 5, 6, 8)
    mask[1] = False
    out = WAYS[way](*(t.to(dtype) for t in (q, k, v, bias)), mask)
    expected = v[1].mean(dim=-2, keepdim=True).expand_as(out[1])
    torch.testing.assert_close(out[1].float(), expected, rtol=2e-2, atol=2e-2)
    assert out.isfinite().all()


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_a_mask_may_differ_between_queries(way):
    (q, k, v, bias), _, _ = _inputs(3, 1, 2, 5, 10, 8)
    mask = torch.rand(3, 5, 10, generator=torch.Generator().manual_seed(1)) < 0.5
    mask[..., 0] = True
    torch.testing.assert_close(
        WAYS[way](q, k, v, bias, mask), WAYS[way](q, k, v, bias.masked_fill(~mask[:, None], -1e4), None)
    )


def test_rows_go_in_chunks_where_the_gradient_of_the_bias_would_be_large(monkeypatch):
    inputs, mask, cotangent = _inputs(2, 7, 2, 7, 7, 16)
    whole = _run(attend.attend_sdpa, inputs, mask, cotangent)
    calls, sdpa = [], torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(attend, "BIAS_GRADIENT_BYTES", 3 * 2 * 2 * 7 * 7 * 4)
    monkeypatch.setattr(
        attend.F, "scaled_dot_product_attention", lambda q, *rest: calls.append(len(q)) or sdpa(q, *rest)
    )
    for found, expected in zip(_run(attend.attend_sdpa, inputs, mask, cotangent), whole):
        torch.testing.assert_close(found, expected)
    assert calls == [3, 3, 1]


@pytest.mark.parametrize("way", WAYS)
def test_dropout_drops_probabilities_and_keeps_their_mean(way):
    (q, k, _, bias), _, _ = _inputs(1, 8, 2, 32, 32, 32)
    identity = torch.eye(32).expand_as(k).contiguous()  # values that make the output the probabilities
    torch.manual_seed(0)
    kept = WAYS[way](q, k, identity, bias, None, dropout_p=0.25)
    whole = WAYS[way](q, k, identity, bias, None)
    dropped = kept == 0
    assert dropped.float().mean().item() == pytest.approx(0.25, abs=0.02)
    torch.testing.assert_close(kept[~dropped], whole[~dropped] / 0.75, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("plan", ["sdpa", "evoflash3d"])
def test_the_single_attention_drops_in_training_only(plan, make_model, make_batch, monkeypatch):
    from megafold.model.optimize import optimize
    from megafold.model.plan import Plan

    seen = set()
    name = f"attend_{plan}"
    way = getattr(attend, name)
    monkeypatch.setattr(attend, name, lambda *a, dropout_p=0.0: seen.add(dropout_p) or way(*a, dropout_p=dropout_p))
    model, batch = make_model(), make_batch(7)
    for layer in model.pairformer.layers:
        layer[1].fn.attn.attend.attn_dropout.p = 0.25
    optimize(model, Plan(evoflash3d=plan == "evoflash3d", sdpa=plan == "sdpa"))
    with torch.no_grad():
        model(**batch)
        assert seen == {0.0, 0.25}
        seen.clear()
        model.eval()(**batch)
    assert seen == {0.0}
