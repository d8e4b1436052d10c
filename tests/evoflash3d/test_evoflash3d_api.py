"""What users meet without a GPU: refusals, the chunked reference, dropout, autograd, compile, checkpointing."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megafold.evoflash3d import reference
from megafold.evoflash3d.api import evoflash3d
from megafold.evoflash3d.dropout import philox_keep
from megafold.evoflash3d.reference import eager_attention
from megafold.testing import budget, check_budget, outputs_and_gradients, relative_error

B, R, H, N, D = 2, 3, 2, 10, 8


def inputs(dtype=torch.float64, n_keys=N, rows=R):
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)

    q, k, v = draw(B, rows, H, N, D), draw(B, rows, H, n_keys, D), draw(B, rows, H, n_keys, D)
    return {"q": q, "k": k, "v": v, "bias": draw(B, H, N, n_keys)}


WRONG = {
    "q rank": ({"q": torch.zeros(R, H, N, D)}, r"q has 4 dimensions"),
    "head dim": ({n: torch.zeros(B, R, H, N, 12) for n in "qkv"}, r"q has head dim 12; allowed: a multiple of 8"),
    "large head dim": ({n: torch.zeros(B, R, H, N, 136) for n in "qkv"}, r"head dim 136"),
    "integer": ({n: torch.zeros(B, R, H, N, D, dtype=torch.int32) for n in "qkv"}, r"q has dtype torch.int32"),
    "k rows": ({"k": torch.zeros(B, 1, H, N, D)}, r"k has shape \[2, 1, 2, 10, 8\]; allowed: \[2, 3, 2, 10, 8\]"),
    "v dtype": ({"v": torch.zeros(B, R, H, N, D, dtype=torch.float16)}, r"v has dtype torch.float16"),
    "broadcastable bias": ({"bias": torch.zeros(1, H, N, N)}, r"bias has shape \[1, 2, 10, 10\]"),
    "bias dtype": ({"bias": torch.zeros(B, H, N, N, dtype=torch.float64)}, r"bias has dtype torch.float64"),
    "broadcastable mask": ({"mask": torch.ones(B, 1, N, dtype=torch.bool)}, r"mask has shape \[2, 1, 10\]"),
    "float mask": ({"mask": torch.ones(B, R, N)}, r"mask has dtype torch.float32; allowed: torch.bool"),
    "device": ({"bias": torch.zeros(B, H, N, N, device="meta")}, r"bias is on meta; allowed: the device of q, cpu"),
    "scale": ({"scale": float("nan")}, r"scale is nan; allowed: a finite number"),
    "dropout": ({"dropout_p": 1.0}, r"dropout_p is 1.0"),
    "seed": ({"dropout_p": 0.5, "seed": 1.5}, r"seed is 1.5"),
    "seed tensor": ({"dropout_p": 0.5, "seed": torch.zeros(2, dtype=torch.int64)}, r"seed is a torch.int64 tensor"),
    "offsets": ({"offsets": (0, -1, 0, 0, 0)}, r"offsets is \(0, -1, 0, 0, 0\)"),
}


@pytest.mark.parametrize(("change", "message"), WRONG.values(), ids=WRONG.keys())
def test_wrong_argument_is_named_with_what_is_allowed(change, message):
    arguments = {n: torch.zeros(B, R, H, N, D) for n in "qkv"} | {"bias": torch.zeros(B, H, N, N)}
    with pytest.raises(ValueError, match=message):
        evoflash3d(**(arguments | change))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("n_keys", [N, 7], ids=["square", "sharded"])
def test_reference_keeps_the_error_budget_in_many_chunks(monkeypatch, dtype, n_keys):
    monkeypatch.setattr(reference, "CHUNK_ELEMENTS", 3 * n_keys * H)  # three queries of one row at a time
    wide = inputs(n_keys=n_keys)
    mask = torch.rand(B, R, n_keys, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, 1] = False
    cotangent = torch.randn(B, R, H, N, D, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    narrow = {n: t.to(dtype) for n, t in wide.items()}
    exact = outputs_and_gradients(
        eager_attention, {n: t.double() for n, t in narrow.items()}, cotangent.to(dtype).double(), mask=mask
    )
    eager = outputs_and_gradients(eager_attention, narrow, cotangent, mask=mask)
    ours = outputs_and_gradients(evoflash3d, narrow, cotangent, mask=mask)
    for name, truth in exact.items():
        assert relative_error(ours[name], truth) <= budget(relative_error(eager[name], truth), dtype), name
    assert not ours["out"][0, 1].any() and not ours["dq"][0, 1].any() and not ours["dv"][0, 1].any()


@pytest.mark.parametrize("seed", range(4))
def test_two_keys_whose_gradients_cancel_keep_the_error_budget(seed):
    """d(out) . v and d(out) . out are close: with delta from the output in bf16, half of all draws miss the budget."""
    generator = torch.Generator().manual_seed(seed)
    rows = {n: torch.randn(1, 2, 2, m, 64, generator=generator).bfloat16() for n, m in (("q", 33), ("k", 2), ("v", 2))}
    narrow = rows | {"bias": torch.randn(1, 2, 33, 2, generator=generator)}
    cotangent = torch.randn(1, 2, 2, 33, 64, generator=generator).bfloat16()
    exact = outputs_and_gradients(eager_attention, {n: t.double() for n, t in narrow.items()}, cotangent)
    eager = outputs_and_gradients(eager_attention, narrow, cotangent)
    ours = outputs_and_gradients(evoflash3d, narrow, cotangent)
    assert not [r for r in check_budget(ours, eager, exact) if not r.ok]


def test_gradients_of_output_and_log_sum_exp_with_dropout_are_the_derivative():
    tensors = [t.requires_grad_() for t in inputs(rows=2).values()]
    assert torch.autograd.gradcheck(lambda *a: evoflash3d(*a, dropout_p=0.3, seed=5, return_lse=True), tensors)


@pytest.mark.parametrize("name", ["q", "k", "v", "bias"])
def test_one_input_alone_may_require_a_gradient(name):
    tensors = inputs()
    tensors[name].requires_grad_()
    evoflash3d(**tensors).sum().backward()
    assert [n for n, t in tensors.items() if t.grad is not None] == [name]


def test_merging_shards_of_keys_by_log_sum_exp_gives_the_whole():
    tensors = inputs()
    parts = []
    for keys in (slice(0, 4), slice(4, None)):
        part = {"q": tensors["q"], "k": tensors["k"][:, :, :, keys], "v": tensors["v"][:, :, :, keys]}
        parts.append(evoflash3d(**part, bias=tensors["bias"][..., keys], return_lse=True))
    weights = torch.stack([lse for _, lse in parts]).softmax(0)
    merged = sum(w[..., None] * out for w, (out, _) in zip(weights, parts))
    torch.testing.assert_close(merged, eager_attention(**tensors))


def test_dropout_depends_on_seed_and_global_position_alone():
    tensors = inputs()
    whole = evoflash3d(**tensors, dropout_p=0.25, seed=11)
    assert torch.equal(whole, evoflash3d(**tensors, dropout_p=0.25, seed=torch.tensor(11)))
    assert not torch.equal(whole, evoflash3d(**tensors, dropout_p=0.25, seed=12))
    rows = {n: t[:, 1:] if n != "bias" else t for n, t in tensors.items()}
    torch.testing.assert_close(evoflash3d(**rows, dropout_p=0.25, seed=11, offsets=(0, 1, 0, 0, 0)), whole[:, 1:])
    queries = tensors | {"q": tensors["q"][:, :, 1:, 4:], "bias": tensors["bias"][:, 1:, 4:]}
    queries |= {n: tensors[n][:, :, 1:] for n in "kv"}
    part = evoflash3d(**queries, dropout_p=0.25, seed=11, offsets=(0, 0, 1, 4, 0))
    torch.testing.assert_close(part, whole[:, :, 1:, 4:])


@pytest.mark.parametrize("p", [0.1, 0.25, 0.9])
def test_dropout_keeps_the_right_share_independently(p):
    index = [
        torch.arange(n).view([-1 if a == axis else 1 for a in range(4)]) for axis, n in enumerate((2, 3, 300, 300))
    ]
    keep = philox_keep(torch.tensor([42]), p, torch.tensor(1), *index)
    assert keep.shape == (2, 3, 300, 300)
    sigma = (p * (1 - p) / keep.numel()) ** 0.5
    assert abs(keep.float().mean().item() - (1 - p)) < 5 * sigma
    centred = keep.float() - (1 - p)
    for axis in range(4):
        neighbours = (
            centred.narrow(axis, 0, keep.shape[axis] - 1) * centred.narrow(axis, 1, keep.shape[axis] - 1)
        ).mean()
        assert abs(neighbours.item()) < 6 * p * (1 - p) / (keep.numel() / 2) ** 0.5


def test_unseeded_dropout_follows_the_default_generator():
    tensors = inputs()
    torch.manual_seed(1)
    first, second = (evoflash3d(**tensors, dropout_p=0.5) for _ in range(2))
    torch.manual_seed(1)
    assert torch.equal(first, evoflash3d(**tensors, dropout_p=0.5)) and not torch.equal(first, second)


def test_compiles_to_one_graph_with_real_strides():
    strided = [torch.randn(B, R, N, H, D).transpose(2, 3).requires_grad_() for _ in range(3)]
    compiled = torch.compile(evoflash3d, fullgraph=True, backend="aot_eager")
    out, eager = compiled(*strided), evoflash3d(*strided)
    assert torch.equal(out, eager) and out.stride() == eager.stride() == strided[0].stride()
    out.backward(torch.randn(B, R, H, D, N).transpose(3, 4))  # a non-contiguous incoming gradient
    assert all(t.grad.stride() == t.stride() for t in strided)


def test_checkpointed_dropout_gives_the_same_gradients():
    def gradient(recompute: bool):
        tensors = [t.float().requires_grad_() for t in inputs().values()]
        torch.manual_seed(5)

        def block(*args):
            return evoflash3d(*args, dropout_p=0.25)

        out = checkpoint(block, *tensors, use_reentrant=False) if recompute else block(*tensors)
        out.square().sum().backward()
        return [t.grad for t in tensors]

    assert all(map(torch.equal, gradient(True), gradient(False)))


def test_autocast_casts_queries_keys_and_values():
    tensors = inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert evoflash3d(**tensors).dtype == torch.bfloat16


def test_double_backward_is_refused_clearly():
    q = inputs()["q"].requires_grad_()
    (grad,) = torch.autograd.grad(evoflash3d(q, q, q).sum(), q, create_graph=True)
    with pytest.raises(NotImplementedError, match="evoflash3d: double backward is not implemented"):
        grad.sum().backward()


@pytest.mark.parametrize(("rows", "n_keys"), [(0, N), (R, 0)], ids=["no rows", "no keys"])
def test_empty_shards_give_zeros(rows, n_keys):
    tensors = {n: t.requires_grad_() for n, t in inputs(torch.float32, n_keys, rows).items()}
    out = evoflash3d(**tensors)
    assert out.shape == (B, rows, H, N, D) and not out.any()
    out.sum().backward()
    assert not tensors["bias"].grad.any()
