"""EvoFlash-3D kernels on a GPU: error budget over dtypes, lengths and head dims, and how they live with PyTorch."""

from __future__ import annotations

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megafold.evoflash3d.api import evoflash3d, uses_kernels
from megafold.evoflash3d.dropout import PHILOX_ROUNDS
from megafold.evoflash3d.reference import eager_attention
from megafold.testing import budget, check_budget, outputs_and_gradients, relative_error
from tests.evoflash3d.gpu_cases import BF16, FP16, FP32, ON_A_GPU, assert_in_budget, draw, poisoned_memory  # noqa: F401

pytestmark = ON_A_GPU


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


@pytest.mark.parametrize("masked", [False, True], ids=["no mask", "mask"])
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=["bf16", "fp16"])
@pytest.mark.parametrize("n_keys", [2, 3, 5, 9, 16, 17])
def test_few_keys_whose_gradients_cancel(dtype, n_keys, masked):
    """With few keys d(out) . v and d(out) . out are close: delta from an output of 16 bits would be seen."""
    for seed in range(3):
        assert_in_budget((1, 4, 2, 65, n_keys, 64), dtype, bias_dtype=FP32, seed=seed, masked=masked)


def test_kernels_are_what_ran():
    assert uses_kernels(torch.device("cuda", 0), BF16) and not uses_kernels(torch.device("cuda", 0), torch.float64)
    assert PHILOX_ROUNDS == 7  # as in tiles.keep_factor
