"""The Hopper kernels on a GPU: which of them run, their error budget, and that their order changes no bit."""

from __future__ import annotations

import pytest
import torch

from megafold.evoflash3d import gradients
from megafold.evoflash3d.api import evoflash3d
from megafold.evoflash3d.launch import Problem
from megafold.evoflash3d.reference import eager_attention
from megafold.replay import ordinary
from megafold.testing import budget, check_budget, outputs_and_gradients, relative_error
from tests.evoflash3d.gpu_cases import BF16, FP32, ON_A_GPU, assert_in_budget, draw, poisoned_memory  # noqa: F401

pytestmark = ON_A_GPU


@pytest.fixture
def hopper_launches(monkeypatch):
    """Names of the Hopper kernels that were launched, in order; skips on other devices."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels for sm_90")
    from megafold.evoflash3d.hopper import launch

    names = []
    for kernel in ("forward", "queries", "keys", "bias", "rows"):
        original = getattr(launch, f"launch_{kernel}")

        def recorded(*args, kernel=kernel, original=original):
            names.append(kernel)
            return original(*args)

        monkeypatch.setattr(launch, f"launch_{kernel}", recorded)
    with ordinary():  # a repeated call does not come by here
        yield names


@pytest.mark.parametrize("layout", ["contiguous", "projection", "columns"])
@pytest.mark.parametrize("bias_dtype", [BF16, FP32], ids=["bf16 bias", "fp32 bias"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 2, 130, 130, 32), (1, 9, 4, 384, 384, 32), (1, 1, 4, 17, 17, 32), (1, 5, 4, 48, 200, 32),
        (1, 4, 4, 200, 64, 32), (1, 3, 4, 640, 600, 32), (2, 3, 4, 200, 200, 64), (1, 2, 2, 33, 2, 64),
    ],
    ids=str,
)  # fmt: skip
def test_hopper_kernels_error_budget(hopper_launches, shape, bias_dtype, layout):
    assert_in_budget(shape, BF16, layout=layout, bias_dtype=bias_dtype)
    forward = ["forward"] if shape[-1] == 32 else []  # at 64 the table has the Triton forward
    assert sorted(hopper_launches) == ["bias", *forward, "keys", "queries"]


@pytest.fixture
def whole_rows(monkeypatch):
    """dq, dk and dv from one kernel, however few rows there are."""
    monkeypatch.setattr(gradients, "MOST_LOST", 1.0)


@pytest.mark.parametrize("layout", ["contiguous", "projection", "columns"])
@pytest.mark.parametrize("bias_dtype", [BF16, FP32], ids=["bf16 bias", "fp32 bias"])
@pytest.mark.parametrize(
    "shape",
    [
        (2, 3, 2, 130, 130, 32), (1, 9, 4, 384, 384, 32), (1, 1, 4, 17, 17, 32), (1, 5, 4, 48, 200, 32),
        (1, 4, 4, 200, 64, 32), (1, 3, 4, 640, 600, 32), (1, 40, 4, 1024, 1024, 32), (1, 2, 4, 1000, 3, 32),
        (1, 2, 4, 7, 1000, 32),
    ],
    ids=str,
)  # fmt: skip
def test_gradients_of_whole_rows_error_budget(hopper_launches, whole_rows, shape, bias_dtype, layout):
    assert_in_budget(shape, BF16, layout=layout, bias_dtype=bias_dtype)
    assert sorted(hopper_launches) == ["bias", "forward", "rows"]


@pytest.mark.parametrize(
    "shape", [(1, 100, 4, 384, 384, 32), (2, 70, 4, 200, 130, 32), (1, 67, 4, 1024, 1024, 32)], ids=str
)
def test_gradients_of_whole_rows_are_the_same_in_every_run(hopper_launches, whole_rows, shape):
    """Also with several rows to a program, launched and captured."""
    inputs = draw(shape, BF16) | {"bias": torch.randn(*shape[:1], shape[2], *shape[3:5], device="cuda").to(BF16)}
    leaves = [t.detach().requires_grad_() for t in inputs.values()]
    cotangent = draw(shape, BF16, seed=1)["q"]

    def step():
        return torch.autograd.grad(evoflash3d(*leaves), leaves, cotangent)

    first = step()
    assert hopper_launches == ["forward", "bias", "rows"]
    for _ in range(10):
        assert all(map(torch.equal, step(), first))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(10):
        graph.replay()
        assert all(map(torch.equal, captured, first))


def test_whole_rows_beyond_2_31_elements(hopper_launches):
    """A last row whose address does not fit in 32 bits has the gradients that it has alone."""
    rows, length = 2**31 // (4 * 256 * 32) + 3, 256
    q, k, v, g = (torch.randn(1, rows, 4, length, 32, device="cuda", dtype=BF16) for _ in range(4))
    bias = torch.randn(1, 4, length, length, device="cuda", dtype=BF16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    found = torch.autograd.grad(evoflash3d(*leaves, bias), leaves, g)
    assert hopper_launches == ["forward", "rows"]
    last = [t[:, -132:].detach().requires_grad_() for t in leaves]
    alone = torch.autograd.grad(evoflash3d(*last, bias), last, g[:, -132:])
    assert hopper_launches[2:] == ["forward", "rows"]
    assert all(torch.equal(a[:, -132:], b) for a, b in zip(found, alone))


@pytest.mark.parametrize("dim", [32, 64])
@pytest.mark.parametrize("bias_dtype", [BF16, FP32], ids=["bf16 bias", "fp32 bias"])
def test_hopper_kernels_with_one_key(hopper_launches, bias_dtype, dim):
    """The one probability is 1, so d(scores) = d(out) . v - d(out) . out is exactly 0: a relative error has no meaning.

    What is left is rounding of the two products, fp32 sums of the same `dim` terms in two orders: at most dim units in
    the last place of the sum of their absolute values. dq, dk and d(bias) are held against that.
    """
    shape = (1, 3, 2, 33, 1, dim)
    inputs = draw(shape, BF16) | {"bias": torch.randn(1, 2, 33, 1, device="cuda").to(bias_dtype)}
    cotangent = draw(shape, BF16, seed=1)["q"]
    found = outputs_and_gradients(evoflash3d, inputs, cotangent)
    assert sorted(hopper_launches) == ["bias", *(["forward"] if dim == 32 else []), "keys", "queries"]
    q, k, v, g = (t.double() for t in (*(inputs[n] for n in "qkv"), cotangent))
    assert torch.equal(found["out"].double(), v.expand_as(q))
    assert relative_error(found["dv"], g.sum(3, keepdim=True)) < budget(2**-9, BF16)
    left = dim * 2.0**-23 * (g * v).abs().sum(-1, keepdim=True)  # [B, R, H, Nq, 1]
    scale, rounded = dim**-0.5, 1 + 2**-7
    assert (found["dq"].double().abs() <= rounded * scale * left * k.abs()).all()
    assert (found["dk"].double().abs() <= rounded * scale * (left * q.abs()).sum(3, keepdim=True)).all()
    assert (found["dbias"].double().abs() <= rounded * left.sum(1)).all()


@pytest.mark.parametrize("layout", ["contiguous", "projection", "columns"])
@pytest.mark.parametrize(
    "shape",
    [(2, 3, 2, 130, 130, 32), (1, 9, 4, 384, 384, 32), (1, 3, 4, 130, 600, 32), (2, 3, 4, 70, 200, 64)],
    ids=str,
)
def test_the_hopper_kernel_of_dq_makes_delta(hopper_launches, monkeypatch, shape, layout):
    table = Problem.config

    def own_delta(problem, kernel):
        config = table(problem, kernel)
        return config | {"gluon": config["gluon"] | {"own_delta": True}} if kernel == "queries" else config

    monkeypatch.setattr(Problem, "config", own_delta)
    monkeypatch.setattr(gradients, "statistics", None)  # its kernel must not be launched
    assert_in_budget(shape, BF16, layout=layout, bias_dtype=BF16)
    assert hopper_launches[-3:] == ["queries", "bias", "keys"]


@pytest.mark.parametrize("captured", [False, True], ids=["launched", "graph"])
@pytest.mark.parametrize("own_delta", [False, True], ids=["delta kernel", "own delta"])
@pytest.mark.parametrize(
    "shape", [(1, 9, 4, 384, 384, 32), (1, 400, 4, 512, 512, 32), (2, 3, 4, 200, 130, 64)], ids=str
)
def test_kernels_of_the_backward_beside_one_another_give_the_same_bits(
    hopper_launches, monkeypatch, shape, own_delta, captured
):
    """Also what runs afterwards sees all of them done: each result is copied at once."""
    torch.use_deterministic_algorithms(False)
    if shape[1] > 3:
        monkeypatch.setattr(gradients, "chunk_count", lambda *sizes: 1)  # no sum between d(bias) and dq
    inputs = draw(shape, BF16) | {"bias": torch.randn(*shape[:1], shape[2], *shape[3:5], device="cuda").to(BF16)}
    leaves = {n: t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for n, t in inputs.items()}
    cotangent = draw(shape, BF16, seed=1)["q"]
    table, rows_table = Problem.config, Problem.rows_config

    def step(overlap):
        def config(problem, kernel):
            found = table(problem, kernel)
            if "gluon" not in found:
                return found
            return found | {"gluon": found["gluon"] | {"overlap": overlap, "own_delta": own_delta}}

        def rows_config(problem):
            found = rows_table(problem)
            return {"gluon": found["gluon"] | {"overlap": overlap}} if found else found

        monkeypatch.setattr(Problem, "config", config)
        monkeypatch.setattr(Problem, "rows_config", rows_config)
        grads = torch.autograd.grad(evoflash3d(**leaves), list(leaves.values()), cotangent)
        return [t.clone() for t in grads]

    one_by_one = step(False)
    if captured:
        step(True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            beside = step(True)
        for _ in range(20):
            for tensor in beside:
                tensor.zero_()
            graph.replay()
            assert all(map(torch.equal, beside, one_by_one))
    else:
        assert all(all(map(torch.equal, step(True), one_by_one)) for _ in range(20))
    assert hopper_launches


def test_hopper_kernels_with_a_mask_that_all_rows_share(hopper_launches):
    inputs = draw((2, 3, 4, 97, 97, 32), BF16) | {"bias": torch.randn(2, 4, 97, 97, device="cuda").to(BF16)}
    mask = torch.rand(2, 1, 97, device="cuda") > 0.3
    mask[1] = False
    mask = mask.expand(2, 3, 97)
    cotangent = torch.randn_like(inputs["q"])
    kernel = outputs_and_gradients(evoflash3d, inputs, cotangent, mask=mask)
    eager = outputs_and_gradients(eager_attention, inputs, cotangent, mask=mask)
    wide = {n: t.double() for n, t in inputs.items()}
    exact = outputs_and_gradients(eager_attention, wide, cotangent, mask=mask)
    assert all(r.ok for r in check_budget(kernel, eager, exact))
    assert not any(kernel[n][1].any() for n in ("out", "dq", "dk", "dv"))
    assert len(hopper_launches) == 4


@pytest.mark.parametrize("part", ["q", "bias", "cotangent"])
def test_what_the_copy_engine_cannot_read_is_computed_all_the_same(hopper_launches, part):
    inputs = draw((1, 3, 4, 128, 128, 32), BF16) | {"bias": torch.randn(1, 4, 128, 128, device="cuda").to(BF16)}
    cotangent = torch.randn_like(inputs["q"]).contiguous()

    def shifted(tensor):
        """The same numbers at an address that is not a multiple of 16 bytes."""
        return torch.cat([tensor.new_zeros(1), tensor.flatten()])[1:].view(tensor.shape)

    if part == "cotangent":
        cotangent = shifted(cotangent)
    else:
        inputs[part] = shifted(inputs[part])
    leaves = {n: t.detach().requires_grad_() for n, t in inputs.items()}
    out = evoflash3d(**leaves)
    found = dict(zip(leaves, torch.autograd.grad(out, list(leaves.values()), cotangent)))
    exact = outputs_and_gradients(eager_attention, {n: t.double() for n, t in inputs.items()}, cotangent)
    assert all(relative_error(found[n], exact[f"d{n}"]) < 8e-3 for n in found)
    assert len(hopper_launches) == {"q": 0, "bias": 4, "cotangent": 1}[part]


def test_hopper_kernels_compile_to_one_graph(hopper_launches):
    inputs = draw((1, 4, 4, 64, 64, 32), BF16) | {"bias": torch.randn(1, 4, 64, 64, device="cuda").to(BF16)}
    leaves = [t.detach().requires_grad_() for t in inputs.values()]
    out = torch.compile(evoflash3d, fullgraph=True, backend="aot_eager")(*leaves)
    found = torch.autograd.grad(out, leaves, torch.ones_like(out))
    plain = torch.autograd.grad(evoflash3d(*leaves), leaves, torch.ones_like(out))
    assert all(map(torch.equal, found, plain)) and len(hopper_launches) == 8
