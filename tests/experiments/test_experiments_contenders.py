"""The kernel contenders on a CPU: conventions, the check before timing, reasons; the layers that torch.compile gets."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from experiments.contenders import floors, kernels, operators, peers, timed
from experiments.contenders.kernels import KernelSession
from experiments.contenders.operators import OperatorSession
from experiments.contenders.peers import Attention
from experiments.contenders.timed import WrongNumbers
from experiments.providers import Context, Unsupported
from experiments.spec import Contender, Point, Setting
from megafold.evoflash3d.reference import eager_attention

SHAPE = {"n_tokens": 12, "batch_size": 1, "rows": 0, "heads": 2, "head_dim": 8, "width": 128}


def context(provider: str, dtype: str = "fp32", workload: str = "triangle_attention", **shape: int) -> Context:
    sizes = tuple({**SHAPE, **shape}.items())
    setting = Setting("kernels", "kernel", workload, "", "synthetic", "", dtype, sizes)
    return Context(Point(setting, Contender(provider, provider)), None, "cpu")


def measured(session: KernelSession, steps: int = 3) -> dict:
    session.resume()
    taken = [session.step() for _ in range(steps)]
    session.suspend()
    return session.finish({name: [sample[name] for sample in taken] for name in taken[0]})


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("provider", ["eager", "sdpa", "evoflash3d"])
def test_a_contender_with_right_numbers_is_timed(provider, dtype):
    metrics = measured(KernelSession(context(provider, dtype)))
    assert metrics["forward_time"].unit == "s" and metrics["forward_time"].n == 3
    assert metrics["forward_time"].value > 0 and metrics["forward_backward_time"].value > 0
    assert set(metrics) >= {"error_out", "error_dq", "error_dk", "error_dv", "error_dbias"}
    assert not any(name.startswith("graph") for name in metrics)


def test_the_peak_counts_what_a_call_allocates_and_not_its_inputs():
    n, h, d = 24, SHAPE["heads"], SHAPE["head_dim"]
    metrics = measured(KernelSession(context("eager", n_tokens=n)), steps=1)
    scores, tensor = 4 * n * h * n * n, 4 * n * h * n * d
    # Eager attention holds its probabilities, and at least one more tensor of that size in its backward.
    assert 2 * scores < metrics["peak_memory"].value * 2**20 < 6 * scores + 8 * tensor


def test_the_peak_leaves_out_what_graphs_of_an_earlier_visit_hold(monkeypatch):
    session = KernelSession(context("eager"))
    session._device, session._work = "cuda", {"forward_backward_time": lambda: None}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda *_: 100)
    monkeypatch.setattr(timed, "graph_memory", lambda: 30)
    monkeypatch.setattr(
        session, "_probe", SimpleNamespace(reset=lambda: None, peak=lambda: SimpleNamespace(allocated=137))
    )
    assert session._peak() == 7


@pytest.mark.parametrize("what", ["output", "bias gradient", "mask", "scale"])
def test_a_contender_with_wrong_numbers_is_not_timed(what, monkeypatch):
    def wrong(q, k, v, bias, mask):
        if what == "bias gradient":
            bias = bias.detach() + 0.5 * (bias - bias.detach())
        if what == "mask":
            mask = ~mask
        out = eager_attention(q, k, v, bias, mask, scale=1.0 if what == "scale" else None)
        return out * 1.0001 if what == "output" else out

    monkeypatch.setattr(kernels, "find_attention", lambda *_: Attention(wrong))
    with pytest.raises(WrongNumbers, match="not timed, wrong at N = 17: "):
        KernelSession(context("eager"))


def heads_first(q, k, v, bias, mask):
    """[B, H, R, N, D] and True = masked out, as trifast has it."""
    assert all(tensor.is_contiguous() for tensor in (q, k, v, bias))
    q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
    return eager_attention(q, k, v, bias, ~mask).transpose(1, 2)


def heads_last(q, k, v, bias, mask):
    """[B, R, N, H, D], bias [B, 1, H, N, N] and an additive mask [B, R, 1, 1, N], as openfold3 and protenix have it."""
    assert all(tensor.is_contiguous() for tensor in (q, k, v, bias))
    q, k, v = (tensor.transpose(2, 3) for tensor in (q, k, v))
    scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5 + bias + mask
    return (scores.softmax(-1) @ v).transpose(2, 3)


def keep_wide(q, k, v, bias, mask=None):
    """Mask [B, R, 1, 1, N] with True = keep, bias [B, 1, H, N, N], as cuEquivariance has it."""
    return eager_attention(q, k, v, bias[:, 0], None if mask is None else mask[:, :, 0, 0])


@pytest.mark.parametrize(
    "attention",
    [
        Attention(heads_first, peers.HEADS_FIRST, peers._drop, needs_mask=True),
        Attention(heads_last, peers.HEADS_LAST, peers._additive, wide_bias=True, needs_mask=True),
        Attention(keep_wide, peers.OURS, peers._keep_wide, wide_bias=True),
    ],
    ids=["heads-first", "heads-last", "wide-mask"],
)
def test_each_convention_is_converted_to_right_numbers(attention, monkeypatch):
    monkeypatch.setattr(kernels, "find_attention", lambda *_: attention)
    assert measured(KernelSession(context("eager")), steps=1)["forward_backward_time"].value > 0


class BlindToStrides(torch.autograd.Function):
    """Identity whose backward reads d(out) in the order of memory, as protenix's kernels do."""

    @staticmethod
    def forward(ctx, out):
        return out.contiguous()

    @staticmethod
    def backward(ctx, grad):
        return grad.as_strided(grad.shape, torch.empty(grad.shape, device="meta").stride())


def test_the_gradient_of_the_check_is_contiguous_in_the_layout_of_the_contender(monkeypatch):
    def blind(*args):
        return BlindToStrides.apply(heads_last(*args))

    attention = Attention(blind, peers.HEADS_LAST, peers._additive, wide_bias=True, needs_mask=True)
    monkeypatch.setattr(kernels, "find_attention", lambda *_: attention)
    assert KernelSession(context("eager")).errors["dq"] < 1e-5


def test_a_contender_that_takes_no_fp32_bias_is_timed_with_its_conversion():
    ours = context("sdpa", "bf16", workload=kernels.FP32_BIAS)
    session = KernelSession(ours)
    assert session.notes == ["takes a bias in bf16 alone: converting it, and its gradient, is in the time"]
    _, leaves = session._prepare()
    assert leaves[3].dtype == torch.float32 and leaves[0].dtype == torch.bfloat16
    assert measured(session, steps=1)["forward_backward_time"].value > 0
    assert KernelSession(context("sdpa", "bf16")).notes == []


@pytest.mark.parametrize("name", ["trifast", "cuequivariance", "openfold3", "protenix"])
def test_a_peer_without_kernels_for_this_device_says_so(name):
    with pytest.raises(Unsupported, match=f"{name} has no kernels for a CPU"):
        peers.find_attention(name, "cpu", 128)


def test_a_peer_that_cannot_be_imported_says_why():
    with pytest.raises(Unsupported, match="no_such_peer cannot be imported: ModuleNotFoundError: No module"):
        peers.need_module("no_such_peer")


def test_compiled_layers_have_no_graph_breaks_and_the_stock_loss():
    # With the backend "eager": the graphs are traced and checked, and not handed to a compiler.
    from torch._dynamo.utils import counters

    from experiments.contenders.compiled import compile_stacks
    from megafold.model.build import build_model
    from megafold.model.presets import preset
    from megafold.train.synthetic import synthetic_batch

    batch = synthetic_batch(10, msa_depth=4, model_kwargs=preset("tiny"))
    losses = []
    for compiled in (False, True):
        torch.manual_seed(0)
        model = build_model("tiny")
        names = list(model.state_dict())
        if compiled:
            torch._dynamo.reset()
            counters.clear()
            compile_stacks(model, "cuda", backend="eager")
        torch.manual_seed(1)
        loss = model(**batch, num_recycling_steps=1)
        loss.backward()
        losses.append(loss.item())
        assert list(model.state_dict()) == names
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert not counters["graph_break"]
    # Pair block, single attention and transition; three parts of an MSA layer and its pair block; template block; two
    # parts of a token transformer layer: each is one graph.
    assert counters["stats"]["unique_graphs"] >= 8


@pytest.mark.parametrize("workload", floors.OPERATORS)
def test_an_operator_is_checked_and_timed_beside_its_floor(workload, monkeypatch):
    monkeypatch.setitem(operators.CHECK_TOKENS, "cpu", 2)
    monkeypatch.setattr(operators, "COPIES", 1)
    setting = Setting("kernels", "kernel", workload, "", "synthetic", "", "fp32", (("n_tokens", 3),))
    session = OperatorSession(Context(Point(setting, Contender("evofusion", "evofusion")), None, "cpu"))
    metrics = measured(session, steps=1)
    assert metrics["forward_backward_time"].value > metrics["floor_forward_backward_time"].value > 0
    assert metrics["floor_forward_backward_time"].value > metrics["floor_forward_time"].value
    assert any(name.startswith("error_d") for name in metrics)
    assert session.notes == ["CPU: the PyTorch references of EvoFusion, not its kernels"]


@pytest.mark.parametrize(
    ("provider", "workload", "reason"),
    [
        ("sdpa", "transition", "sdpa has no transition"),
        ("liger", "transition", "liger has no kernels for a CPU"),
        ("cuequivariance", "triangle_multiplication", "cuequivariance has no kernels for a CPU"),
    ],
)
def test_an_operator_that_a_contender_lacks_is_unsupported(provider, workload, reason, monkeypatch):
    monkeypatch.setitem(operators.CHECK_TOKENS, "cpu", 2)
    setting = Setting("kernels", "kernel", workload, "", "synthetic", "", "fp32", (("n_tokens", 3),))
    with pytest.raises(Unsupported, match=reason):
        OperatorSession(Context(Point(setting, Contender(provider, provider)), None, "cpu"))


def test_an_operator_with_wrong_numbers_is_not_timed(monkeypatch):
    monkeypatch.setitem(
        operators._CONTENDERS, ("wrong", ""), lambda case, device: lambda **t: case.operator(**t) * 1.01
    )
    setting = Setting("kernels", "kernel", "transition", "", "synthetic", "", "fp32", (("n_tokens", 3),))
    with pytest.raises(WrongNumbers, match="not timed, wrong at N = 13: out: "):
        OperatorSession(Context(Point(setting, Contender("wrong", "wrong")), None, "cpu"))


def test_floors_are_those_of_the_counts():
    triangle = floors.operator_floor("triangle_multiplication", 1024)
    assert triangle.forward.flops == pytest.approx(2 * 1024**3 * 128 + 6 * 2 * 1024**2 * 128**2)
    assert triangle.both.seconds == pytest.approx(max(27 * 2**20 * 256 / 4.2e12, triangle.both.flops / 717e12))
    attention = floors.attention_floor(1, 1024, 4, 1024, 32)
    assert attention.forward.seconds == pytest.approx(4 * 1024**3 / 4.2e12)  # exponentials


def test_the_kernels_sweep_measures_each_contender_on_what_it_has():
    from experiments.spec import load_sweep

    sweep = load_sweep("kernels", settings=["n_tokens=1024"])
    found = {c.setting.workload: {contender.name for contender in c.contenders} for c in sweep.comparisons}
    assert set(found) == {"triangle_attention", "triangle_attention_fp32_bias", *floors.OPERATORS}
    assert found["transition"] == {"eager", "compile", "evofusion", "liger"}
    assert found["triangle_multiplication"] == {"eager", "compile", "evofusion", "cuequivariance"}
    assert "evofusion" not in found["triangle_attention"] and "protenix" in found["triangle_attention"]
