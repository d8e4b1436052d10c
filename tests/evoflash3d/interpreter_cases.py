"""Run the Triton kernels in the interpreter and print, as JSON, how each case keeps the error budget.

A script and not a test: the interpreter must be chosen before the kernels are imported, and a process that has chosen
it cannot compile. `test_evoflash3d_interpreter.py` runs it once in a process of its own.
"""

import json
import math
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch

from megafold.evoflash3d import reference
from megafold.evoflash3d.forward import launch_forward
from megafold.evoflash3d.gradients import launch_backward, statistics, sum_of_chunks
from megafold.evoflash3d.launch import Problem, last_contiguous
from megafold.testing import check_budget

FP32, FP16 = torch.float32, torch.float16
CASES = {
    # name: batch, rows, heads, queries, keys, head dim, dtype, bias dtype, mask, dropout, gradient of lse, block i, j
    "odd lengths, padded head dim": (1, 3, 2, 20, 37, 24, FP32, FP32, False, 0.0, False, 16, 32),
    "mask with an empty row, dropout, shard offsets, lse": (2, 2, 2, 17, 33, 16, FP32, FP32, True, 0.3, True, 32, 32),
    "no bias, odd lengths": (1, 2, 2, 19, 35, 32, FP32, None, False, 0.0, False, 32, 32),
    "no bias, mask": (1, 2, 1, 32, 35, 8, FP32, None, True, 0.0, True, 32, 32),
    "one mask for all rows, an empty one": (2, 2, 2, 17, 33, 16, FP32, FP32, "shared", 0.0, True, 32, 32),
    "fp16": (1, 2, 2, 32, 64, 32, FP16, FP16, True, 0.0, True, 32, 32),
    "fp16 with fp32 bias": (1, 2, 1, 33, 32, 64, FP16, FP32, False, 0.0, False, 32, 32),
    "single query": (1, 1, 1, 1, 3, 8, FP32, FP32, False, 0.0, False, 16, 16),
    "few keys in fp16": (1, 2, 2, 33, 2, 64, FP16, FP32, False, 0.0, False, 32, 32),
    "few keys in fp16, mask, dropout, lse": (1, 2, 2, 18, 5, 32, FP16, FP16, True, 0.3, True, 16, 16),
    "one live key of 2, fp16": (1, 3, 2, 18, 2, 64, FP16, FP32, "one", 0.0, False, 16, 32),
    "one live key of 5, no bias": (1, 2, 2, 33, 5, 32, FP16, None, "one", 0.3, False, 32, 16),
    "one live key, fp32, shared mask": (1, 2, 1, 17, 9, 16, FP32, FP32, "one for all", 0.0, False, 16, 16),
    "few keys in fp32, lse": (1, 2, 1, 17, 3, 16, FP32, None, False, 0.0, True, 16, 16),
    "fp16, odd length, an empty row": (1, 2, 2, 18, 33, 32, FP16, FP16, True, 0.0, False, 32, 32),
}

SUMS = {"sum of chunks in fp32": FP32, "sum of chunks in fp16": FP16}


def strided(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """[B, R, H, N, D] as a view of [B, R, N, H, D + 8]: what a fused projection gives."""
    batch, rows, heads, length, dim = shape
    return torch.randn(batch, rows, length, heads, dim + 8, dtype=dtype)[..., :dim].transpose(2, 3)


def run(batch, rows, heads, queries, keys, dim, dtype, bias_dtype, masked, dropout_p, with_lse, block_i, block_j):
    q, g = (strided(batch, rows, heads, queries, dim, dtype=dtype) for _ in range(2))
    k, v = (strided(batch, rows, heads, keys, dim, dtype=dtype) for _ in range(2))
    bias = None if bias_dtype is None else torch.randn(batch, heads, queries, keys, dtype=bias_dtype)
    mask, alone = None, masked in ("one", "one for all")
    if masked:
        mask = torch.rand(batch, rows if masked in (True, "one") else 1, keys) > 0.3
        if alone:
            mask = torch.arange(keys) == 1
            mask = mask.expand(batch, rows if masked == "one" else 1, keys).clone()
        if masked != "one for all":
            mask[0, 0] = False
        mask = mask.expand(batch, rows, keys)
    seed, offsets, scale = torch.tensor([1234567890123456789]), [1, 2, 3, 4, 5], 0.3
    grad_lse = torch.randn(batch, rows, heads, queries) if with_lse else None
    options = (seed, scale, dropout_p, offsets)
    config = {"block_i": block_i, "block_j": block_j, "num_warps": 4, "num_stages": 1, "programs_per_sm": 2}
    configs = dict.fromkeys(("queries", "keys", "bias"), config)

    out, lse = launch_forward(q, k, v, bias, mask, *options, with_lse, config=config)
    grads = launch_backward(
        g,
        grad_lse,
        q,
        k,
        v,
        bias,
        mask,
        seed,
        out,
        lse,
        *options[1:],
        with_lse,
        True,
        bias is not None,
        configs=configs,
    )
    eager_out, _ = reference.chunked_forward(q, k, v, bias, mask, *options)
    eager_grads = reference.chunked_backward(g, grad_lse, q, k, v, bias, mask, seed, eager_out, *options[1:])
    wide = [None if t is None else t.double() for t in (q, k, v, bias)]
    exact_out, exact_lse = reference.chunked_forward(*wide, mask, *options)
    wide_lse = None if grad_lse is None else grad_lse.double()
    exact_grads = reference.chunked_backward(g.double(), wide_lse, *wide, mask, seed, exact_out, *options[1:])

    names = ["out", "dq", "dk", "dv"] + ["dbias"] * (bias is not None)
    triples = [dict(zip(names, values)) for values in ((out, *grads), (eager_out, *eager_grads))]
    exact = dict(zip(names, (exact_out, *exact_grads)))
    results = [[r.name, r.ok, r.detail] for r in check_budget(*triples, exact)]
    finite = torch.isfinite(exact_lse)
    problem = Problem(q, k, v, bias, mask, *options)
    if not with_lse:
        held = statistics(problem, last_contiguous(g), None, out, lse, natural_lse=False)["lse2"]
        results.append(["log-sum-exp", held is lse and lse.shape[-1] % 4 == 0, "held once, rows of 16 bytes"])
        lse = lse[..., :queries] * (1.0 if dtype == FP32 else math.log(2.0))
        lse = lse.masked_fill(lse == math.inf, -math.inf)
    close = torch.allclose(lse[finite].double(), exact_lse[finite], rtol=1e-5, atol=1e-5)
    results.append(["lse", close and bool((torch.isfinite(lse) == finite).all()), f"{int((~finite).sum())} empty"])
    if alone:
        zero = not any(bool(t.any()) for t in (grads[0], grads[1], *grads[3:]))
        results.append(["no gradient of scores", zero, "one probability is 1, the others 0"])
    if masked in ("shared", "one for all"):
        results.append(["mask in the bias", problem.mask is None, "kernels read no mask"])
    if masked and masked != "one for all":
        empty = all(bool((t[0, 0] == 0).all()) for t in (out, *grads[:3]))
        results.append(["row without keys", empty, "output and gradients 0"])
    return results


def sums(dtype):
    """Two to eight chunks of d(bias), of more numbers than a block; one of a single number."""
    results = []
    for chunks, length in ((2, 25), (3, 25), (5, 25), (8, 25), (2, 1)):
        partial = torch.randn(chunks, 1, 1, length, 2 * length - 1)
        expected = partial[0]
        for part in partial[1:]:
            expected = expected + part
        same = torch.equal(sum_of_chunks(partial, dtype), expected.to(dtype))
        results.append([f"{chunks} chunks", same, "added in order, rounded once"])
    return results


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    # Whatever the kernels leave unwritten shows up as NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    results = {name: run(*case) for name, case in CASES.items()}
    json.dump(results | {name: sums(dtype) for name, dtype in SUMS.items()}, sys.stdout)
