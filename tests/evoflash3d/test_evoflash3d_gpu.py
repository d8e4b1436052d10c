"""EvoFlash-3D kernels on a GPU: error budget over dtypes, lengths and head dims, and how they live with PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megafold.evoflash3d import gradients
from megafold.evoflash3d.api import evoflash3d, uses_kernels
from megafold.evoflash3d.dropout import PHILOX_ROUNDS
from megafold.evoflash3d.launch import Problem
from megafold.evoflash3d.reference import eager_attention
from megafold.testing import budget, check_budget, outputs_and_gradients, relative_error

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


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


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("length", [17, 97, 200, 384])
@pytest.mark.parametrize(
    ("dtype", "bias_dtype"),
    [(BF16, BF16), (BF16, FP32), (FP16, FP16), (FP16, FP32), (FP32, FP32)],
    ids=["bf16", "bf16 with fp32 bias", "fp16", "fp16 with fp32 bias", "fp32"],
)
def test_error_budget(dtype, bias_dtype, length, masked):
    assert_in_budget((1, 9, 4, length, length, 32), dtype, bias_dtype=bias_dtype, masked=masked)


@pytest.mark.parametrize("layout", ["contiguous", "columns", "slice"])
@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
def test_strided_views(dtype, layout):
    assert_in_budget((2, 5, 4, 128, 128, 32), dtype, layout=layout, bias_dtype=dtype, masked=True)


@pytest.mark.parametrize("dim", [8, 16, 24, 40, 48, 64, 128])
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
def test_head_dims(dtype, dim):
    assert_in_budget((1, 3, 2, 128, 128, dim), dtype, bias_dtype=dtype)
    assert_in_budget((1, 3, 2, 65, 70, dim), dtype, bias_dtype=dtype, masked=True)


@pytest.mark.parametrize(
    "shape",
    [(1, 1, 16, 384, 384, 64), (1, 48, 16, 96, 96, 64), (1, 5, 4, 48, 200, 32), (1, 4, 4, 200, 64, 32)],
    ids=["single attention", "augmentations", "shard of queries", "shard of keys"],
)
@pytest.mark.parametrize("bias_dtype", [None, BF16], ids=["no bias", "bias"])
def test_other_shapes(shape, bias_dtype):
    assert_in_budget(shape, BF16, bias_dtype=bias_dtype)


def test_tf32_is_as_good_as_eager_with_tf32():
    torch.backends.cuda.matmul.allow_tf32 = True
    inputs = draw((1, 8, 4, 200, 200, 32), FP32) | {"bias": torch.randn(1, 4, 200, 200, device="cuda")}
    cotangent = torch.randn_like(inputs["q"])
    kernel = outputs_and_gradients(evoflash3d, inputs, cotangent)
    exact = outputs_and_gradients(eager_attention, {n: t.double() for n, t in inputs.items()}, cotangent)
    # An operand in TF32 keeps 10 bits of mantissa, as fp16 does.
    assert all(relative_error(kernel[n], exact[n]) < budget(2 * 2**-11, FP16) for n in exact)


def test_large_scores_stay_finite():
    inputs = {n: 40 * t for n, t in draw((1, 2, 2, 70, 70, 32), BF16).items()}
    results = outputs_and_gradients(evoflash3d, inputs, torch.randn_like(inputs["q"]))
    assert all(t.isfinite().all() for t in results.values())


def test_one_query_and_one_key():
    inputs = draw((1, 2, 2, 1, 1, 32), FP32)
    results = outputs_and_gradients(evoflash3d, inputs, torch.ones_like(inputs["q"]))
    torch.testing.assert_close(results["out"], inputs["v"])
    torch.testing.assert_close(results["dv"], torch.ones_like(inputs["v"]))
    assert results["dq"].abs().max() < 1e-5 and results["dk"].abs().max() < 1e-5


def test_two_runs_are_bit_identical():
    inputs = draw((1, 200, 4, 200, 200, 32), BF16) | {"bias": torch.randn(1, 4, 200, 200, device="cuda").to(BF16)}
    cotangent = torch.randn_like(inputs["q"])
    first, second = (outputs_and_gradients(evoflash3d, inputs, cotangent) for _ in range(2))
    assert all(torch.equal(first[n], second[n]) for n in first)


def test_dropout_agrees_with_the_reference_bit_for_bit_in_what_it_keeps():
    shape = (2, 3, 4, 80, 100, 32)
    inputs = draw(shape, BF16) | {"bias": torch.randn(2, 4, 80, 100, device="cuda").to(BF16)}
    offsets, seed = (1, 2, 3, 4, 5), 987654321987654321
    cotangent = torch.randn_like(inputs["q"])
    kernel = outputs_and_gradients(evoflash3d, inputs, cotangent, dropout_p=0.25, seed=seed, offsets=offsets)
    wide = {n: t.double() for n, t in inputs.items()}
    exact = outputs_and_gradients(evoflash3d, wide, cotangent.double(), dropout_p=0.25, seed=seed, offsets=offsets)
    assert all(relative_error(kernel[n], exact[n]) < 8e-3 for n in exact)


def test_log_sum_exp_and_its_gradient():
    inputs = draw((1, 3, 4, 97, 97, 32), BF16)
    mask = torch.rand(1, 3, 97, device="cuda") > 0.3
    mask[0, 0] = False

    def lse_only(**tensors):
        return evoflash3d(**tensors, mask=mask, return_lse=True)[1][:, 1:]

    cotangent = torch.randn(1, 2, 4, 97, device="cuda")
    kernel = outputs_and_gradients(lse_only, {n: inputs[n] for n in "qk"} | {"v": inputs["v"]}, cotangent)
    exact = outputs_and_gradients(lse_only, {n: inputs[n].double() for n in "qkv"}, cotangent.double())
    assert relative_error(kernel["out"], exact["out"]) < 1e-4
    assert all(relative_error(kernel[n], exact[n]) < 8e-3 for n in ("dq", "dk"))
    assert evoflash3d(**inputs, mask=mask, return_lse=True)[1][0, 0].eq(float("-inf")).all()


def test_non_contiguous_incoming_gradient():
    inputs = draw((1, 4, 4, 64, 64, 32), BF16)
    cotangent = torch.randn(1, 4, 4, 32, 64, device="cuda").to(BF16).transpose(3, 4)
    strided = outputs_and_gradients(evoflash3d, inputs, cotangent)
    dense = outputs_and_gradients(evoflash3d, inputs, cotangent.contiguous())
    assert all(torch.equal(strided[n], dense[n]) for n in strided)


def test_compile_makes_one_graph_with_real_strides():
    inputs = draw((1, 4, 4, 64, 64, 32), BF16)
    leaves = [t.detach().requires_grad_() for t in inputs.values()]
    out = torch.compile(evoflash3d, fullgraph=True, backend="aot_eager")(*leaves)
    assert out.stride() == evoflash3d(*leaves).stride() == leaves[0].stride()
    out.sum().backward()
    assert [t.grad.stride() for t in leaves] == [t.stride() for t in leaves]


def test_autocast_and_checkpointed_dropout():
    inputs = draw((1, 4, 4, 64, 64, 32), FP32)

    def gradients(recompute):
        leaves = [t.detach().requires_grad_() for t in inputs.values()]
        torch.manual_seed(0)
        with torch.autocast("cuda", dtype=BF16):

            def block(*args):
                return evoflash3d(*args, dropout_p=0.25)

            out = checkpoint(block, *leaves, use_reentrant=False) if recompute else block(*leaves)
        assert out.dtype == BF16
        out.float().square().sum().backward()
        return [t.grad for t in leaves]

    assert all(map(torch.equal, gradients(True), gradients(False)))


def test_graph_capture_replays_on_new_data():
    torch.use_deterministic_algorithms(False)
    inputs = draw((1, 8, 4, 64, 64, 32), BF16) | {"bias": torch.randn(1, 4, 64, 64, device="cuda").to(BF16)}
    leaves = {n: t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for n, t in inputs.items()}
    cotangent = torch.randn_like(inputs["q"])

    def step():
        return torch.autograd.grad(evoflash3d(**leaves), list(leaves.values()), cotangent)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for leaf in leaves.values():
            leaf.copy_(torch.randn_like(leaf))
    graph.replay()
    assert all(map(torch.equal, captured, step()))


@pytest.mark.parametrize("length", [200, 256, 384, 512])
def test_memory_is_outputs_gradients_and_two_numbers_a_query(length):
    """Alive at the peak beside the inputs: out, dq, dk, dv, d(bias); one log-sum-exp and delta; the bias padded, where
    it must be, and on other devices than Hopper transposed."""
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = False
    q, k, v, cotangent = (torch.randn(1, length, 4, length, 32, device="cuda").to(BF16) for _ in range(4))
    bias = torch.randn(1, 4, length, length, device="cuda").to(BF16)
    leaves = [t.requires_grad_() for t in (q, k, v, bias)]
    torch.autograd.grad(evoflash3d(*leaves), leaves, cotangent)  # compiles
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_stats()["requested_bytes.all.current"]
    torch.autograd.grad(evoflash3d(*leaves), leaves, cotangent)
    peak = torch.cuda.memory_stats()["requested_bytes.all.peak"] - before
    padded = -(-length // 128) * 128
    copies = (padded > length) + (torch.cuda.get_device_capability() != (9, 0))
    two_numbers = 2 * 4 * (4 * length**2)  # fp32, 4 heads
    assert peak <= 4 * q.nbytes + bias.nbytes + two_numbers + copies * 2 * 4 * padded**2


def test_more_than_two_to_the_31_elements():
    torch.use_deterministic_algorithms(False)
    rows, heads, length, dim = 4100, 4, 4096, 32
    free, _ = torch.cuda.mem_get_info()
    if free < 60 * 2**30:
        pytest.skip("needs 60 GiB of GPU memory")
    q, k, v, g = (torch.randn(1, rows, length, heads, dim, device="cuda", dtype=BF16).transpose(2, 3) for _ in range(4))
    assert q.numel() > 2**31
    bias = torch.randn(1, heads, length, length, device="cuda", dtype=BF16)
    leaves = [t.requires_grad_() for t in (q, k, v)]
    out = evoflash3d(*leaves, bias)
    grads = torch.autograd.grad(out, leaves, g)
    last = {n: t[:, -1:].detach() for n, t in zip("qkv", leaves)}
    eager = outputs_and_gradients(lambda **t: eager_attention(**t, bias=bias), last, g[:, -1:])
    wide = {n: t.double() for n, t in last.items()}
    exact = outputs_and_gradients(lambda **t: eager_attention(**t, bias=bias.double()), wide, g[:, -1:])
    kernel = dict(zip(exact, (t[:, -1:] for t in (out.detach(), *grads))))
    assert all(r.ok for r in check_budget(kernel, eager, exact))


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
    return names


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


@pytest.fixture(params=[False, True], ids=["tile by tile", "pairs of tiles"])
def whole_rows(monkeypatch, request):
    """dq, dk and dv from one kernel, however few rows there are."""
    table = Problem.rows_config

    def rows_config(problem):
        found = table(problem)
        return {"gluon": found["gluon"] | {"pairs": request.param}} if found else found

    monkeypatch.setattr(Problem, "rows_config", rows_config)
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


@pytest.mark.parametrize("chunks", [1, 3])
@pytest.mark.parametrize("shape", [(2, 6, 2, 130, 130, 32), (1, 10, 4, 384, 300, 32), (1, 7, 4, 64, 64, 32)], ids=str)
def test_gradient_of_the_bias_two_rows_at_a_time(hopper_launches, monkeypatch, shape, chunks):
    """Where every chunk has an even number of rows; one at a time otherwise."""
    two_rows = {"parts": 2, "warps": 4, "block": 64, "step": 64, "registers": 232, "stages": 6, "pairs": True}
    table = Problem.config

    def config(problem, kernel):
        found = table(problem, kernel)
        return found | {"gluon": found["gluon"] | two_rows} if kernel == "bias" else found

    monkeypatch.setattr(Problem, "config", config)
    monkeypatch.setattr(gradients, "chunk_count", lambda *sizes: chunks)
    assert_in_budget(shape, BF16, layout="contiguous", bias_dtype=BF16)
    assert "bias" in hopper_launches


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


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("n_keys", [2, 3, 5, 9, 16, 17])
def test_few_keys_whose_gradients_cancel(dtype, n_keys, masked):
    """With few keys d(out) . v and d(out) . out are close: delta from an output of 16 bits would be seen."""
    for seed in range(3):
        assert_in_budget((1, 4, 2, 65, n_keys, 64), dtype, bias_dtype=FP32, seed=seed, masked=masked)


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


def test_kernels_are_what_ran():
    assert uses_kernels(torch.device("cuda", 0), BF16) and not uses_kernels(torch.device("cuda", 0), torch.float64)
    assert PHILOX_ROUNDS == 7  # as in tiles.keep_factor
