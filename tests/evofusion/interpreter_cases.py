"""Run EvoFusion's kernels in Triton's interpreter and print, as JSON, how each case keeps the error budget.

A script and not a test: the interpreter must be chosen before the kernels are imported, and a process that has chosen
it cannot compile. `test_evofusion_interpreter.py` runs it once in a process of its own. The operators run as on a GPU:
through PyTorch's dispatcher and autograd, with the launchers; only the device is another.
"""

import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from megafold import triton_support
from megafold.evofusion import cases, launch, weight_finish, weights
from megafold.evofusion.msa import outer_product
from megafold.evofusion.transition import launch as transition_launch
from megafold.evofusion.triangle_multiplication import joined
from megafold.testing import CheckResult, gradients_by_name

triton_support.runs_kernels = lambda device: True
# Small enough that the cases below have several chunks, the last one shorter.
outer_product.CHUNK_ELEMENTS = 2000
transition_launch.CHUNK_ELEMENTS = 3 * 64 * 20

CASES = {
    "triangle multiplication, outgoing, two blocks of a row, mask": lambda d: cases.triangle_multiplication_case(
        d, 17, 16, masked=True
    ),
    "triangle multiplication, outgoing, mask, row dropout": lambda d: cases.triangle_multiplication_case(
        d, 6, 16, masked=True, shared="row"
    ),
    "triangle multiplication, incoming, two structures, column dropout": lambda d: cases.triangle_multiplication_case(
        d, 5, 32, batch=2, mix="incoming", shared="col", residual=False
    ),
    "triangle multiplication, incoming, kept operands": lambda d: cases.triangle_multiplication_case(
        d, 3, 16, mix="incoming", masked=True, keep_operands=True
    ),
    "transition in chunks": lambda d: cases.transition_case(d, (3, 17), 32),
    "transition without norm and residual": lambda d: cases.transition_case(
        d, (19,), 16, 48, norm=False, residual=False
    ),
    "transition, width that is no multiple of 16": lambda d: cases.transition_case(d, (2, 9), 21, 42),
    "transition, wide, without norm": lambda d: cases.transition_case(d, (11,), 256, 64, norm=False),
    "projections and heads": lambda d: cases.norm_project_case(d, (2, 5, 7), 32, outputs=48, count=3, passes=True),
    "heads alone": lambda d: cases.norm_project_case(d, (1, 5, 7), 16, count=0, heads=16, norm_bias=False),
    "heads alone, x passed on": lambda d: cases.norm_project_case(d, (1, 5, 7), 16, count=0, heads=4, passes=True),
    "attention output, row dropout": lambda d: cases.attention_output_case(d, (2, 5, 7), 32, 64, shared="row"),
    "attention output, column dropout": lambda d: cases.attention_output_case(
        d, (1, 3, 18), 64, 16, shared="col", residual=False
    ),
    "attention output without gate": lambda d: cases.attention_output_case(d, (1, 2, 5), 32, 32, gated=False),
    "gate of wide rows": lambda d: cases.gated_case(d, (3, 5), 600),
    "conditioned transition": lambda d: cases.conditioned_transition_case(d, (2, 19), 32, 16),
    "conditioned transition, odd conditioning": lambda d: cases.conditioned_transition_case(d, (2, 19), 32, 33),
    "adaptive norm, odd conditioning": lambda d: cases.adaptive_norm_case(d, (2, 9), 32, 33),
    "adaptive norm": lambda d: cases.adaptive_norm_case(d, (2, 9), 16, 32),
    "condition gate without residual": lambda d: cases.condition_gate_case(d, (7,), 24, 21, residual=False),
    "windowed attention": lambda d: cases.windowed_attention_case(d, 60, heads=1, dim=32),
    "windowed attention, masks, padded head dim": lambda d: cases.windowed_attention_case(
        d, 23, batch=2, heads=1, dim=24, window=9, masked=True
    ),
    "outer product mean in chunks": lambda d: cases.outer_product_mean_case(
        d, 6, 5, width=16, hidden=16, outputs=24, masked=True
    ),
    "pair-weighted averaging": lambda d: cases.pair_weighted_averaging_case(
        d, 6, 5, width=16, pair_width=32, heads=2, inner=32
    ),
    "pair-weighted averaging, narrow heads": lambda d: cases.pair_weighted_averaging_case(
        d, 4, 5, width=16, pair_width=16, heads=2, inner=16
    ),
    "pair-weighted averaging, two structures, no mask, no dropout": lambda d: cases.pair_weighted_averaging_case(
        d, 19, 3, width=16, pair_width=16, heads=3, inner=48, batch=2, masked=False, shared=None
    ),
    "pair-weighted averaging, column dropout": lambda d: cases.pair_weighted_averaging_case(
        d, 19, 3, width=32, pair_width=16, heads=3, inner=48, shared="col", residual=False
    ),
    "smooth lDDT": lambda d: cases.smooth_lddt_case(d, 37),
    "smooth lDDT without mask": lambda d: cases.smooth_lddt_case(d, 16, masked=False),
}
# Coordinates are fp32 whatever the dtype of the model; the other takes ten seconds.
FP32_ALONE = (
    "smooth lDDT",
    "smooth lDDT without mask",
    "triangle multiplication, outgoing, two blocks of a row, mask",
    "triangle multiplication, incoming, kept operands",
)
UNDER_AUTOCAST = (
    "triangle multiplication, outgoing, mask, row dropout",
    "transition, width that is no multiple of 16",
    "attention output, row dropout",
    "conditioned transition, odd conditioning",
    "windowed attention",
)


class FakesAgree(TorchDispatchMode):
    """Compares each operator's fake outputs (what torch.compile plans with) with the real ones."""

    def __init__(self) -> None:
        super().__init__()
        self.seen, self.differ = 0, []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        if func.namespace == "megafold":
            with FakeTensorMode() as mode:
                planned = func(*tree_map_only(Tensor, mode.from_tensor, args))
            self.seen += 1
            for real, fake in zip(tree_leaves(out), tree_leaves(planned), strict=True):
                if (real.shape, real.stride(), real.dtype) != (fake.shape, fake.stride(), fake.dtype):
                    self.differ.append(f"{func}: {real.shape} {real.stride()} and {fake.shape} {fake.stride()}")
        return out


def in_budget(case: cases.Case) -> list[CheckResult]:
    """The error budget, and that fakes and kernels agree about shapes, strides and dtypes."""
    with FakesAgree() as fakes:
        results = case.check(repeat=False)
    return [*results, CheckResult("fakes", fakes.seen > 0 and not fakes.differ, "; ".join(fakes.differ))]


def under_autocast(case: cases.Case) -> list[CheckResult]:
    """fp32 inputs and parameters, products in fp16: dtypes as in eager PyTorch, and its error budget."""

    def autocast(function):
        def call(**inputs):
            with torch.autocast("cpu", torch.float16):
                return function(**inputs)

        return call

    found = gradients_by_name(autocast(case.operator), case.inputs)
    eager = gradients_by_name(autocast(case.reference), case.inputs)
    dtypes = [name for name, t in eager.items() if found[name].dtype != t.dtype]
    # The step that the budget adds is that of fp16, which products are rounded to.
    halves = {name: t.half() for name, t in found.items()}
    results = case.judge(halves, eager, case.run(reference=True, double=True))
    return [*results, CheckResult("dtypes", not dtypes, f"differ: {dtypes}")]


RESIDENT = {
    "projections with weights in shared memory": lambda d: cases.norm_project_case(
        d, (2, 5, 7), 16, outputs=32, count=2, heads=3
    ),
    "transition with weights in shared memory": lambda d: cases.transition_case(d, (37,), 16, 32),
    "transition in chunks, sums together": lambda d: cases.transition_case(d, (3, 17), 32, norm=False),
    "triangle multiplication, small kernels joined": lambda d: cases.triangle_multiplication_case(
        d, 5, 16, batch=2, mix="incoming", masked=True
    ),
}
STRIDED = {
    "projections": lambda d: cases.norm_project_case(d, (1, 3, 7), 16, outputs=16, count=2, heads=3),
    "transition": lambda d: cases.transition_case(d, (19,), 16, 32),
    "adaptive norm": lambda d: cases.adaptive_norm_case(d, (1, 9), 16, 32),
    "condition gate": lambda d: cases.condition_gate_case(d, (7,), 16, 32),
    "triangle multiplication": lambda d: cases.triangle_multiplication_case(d, 3, 16),
}
COMPILED = (
    "transition without norm and residual",
    "heads alone",
    "attention output without gate",
    "conditioned transition, odd conditioning",
    "windowed attention, masks, padded head dim",
)


def strided(case: cases.Case) -> cases.Case:
    """The same numbers, each parameter and input beside others: a vector a column, a matrix the left half of one."""

    def beside(t: Tensor) -> Tensor:
        place = t.new_full((*t.shape, 2), 7.0)[..., 0] if t.dim() == 1 else torch.cat([t, t], -1)[..., : t.shape[-1]]
        return place.copy_(t)

    case.inputs = {name: beside(t) for name, t in case.inputs.items()}
    return case


def under_compile(case: cases.Case) -> list[CheckResult]:
    """One graph under torch.compile, with the values and strides of the plain call."""
    torch._dynamo.reset()
    compiled = torch.compile(case.operator, fullgraph=True, backend="aot_eager")
    found, plain = gradients_by_name(compiled, case.inputs), case.run()
    return [
        CheckResult(
            name, torch.equal(found[name], t) and found[name].stride() == t.stride(), "as without torch.compile"
        )
        for name, t in plain.items()
    ]


def folded_weights() -> list[CheckResult]:
    """Weights of a triangle multiplication with their LayerNorms' scales, in the orders the Hopper kernels want."""
    draw = cases.Draw(torch.float32, "cpu")
    weights, norms = [draw.normal(rows * 32, 32) for rows in (4, 1, 1)], [draw.normal(32) for _ in range(4)]
    folded, shift = joined.fold_all(weights, norms, torch.float32)
    w, dealt, transposed = joined.split(folded)
    plain = torch.cat([torch.cat(weights[:2]) * norms[0], weights[2] * norms[2]])
    beside = torch.cat([torch.cat(weights[:2]) @ norms[1], weights[2] @ norms[3]])
    exact = {"w": (w, plain), "dealt": (dealt, deal(plain)), "transposed": (transposed, deal(plain[160:].mT))}
    results = [CheckResult(name, torch.equal(found, to), "") for name, (found, to) in exact.items()]
    return [*results, CheckResult("shift", torch.allclose(shift, beside, atol=1e-5), "")]


def deal(t: Tensor) -> Tensor:
    """Columns in the order in which the Hopper kernels want them."""
    return t.unflatten(1, (-1, 4, 4, 2)).transpose(2, 3).flatten(1)


def prepared_weights() -> list[CheckResult]:
    """Weights of odd sizes in one launch: another dtype, transposed, dealt to a given place; one that is left alone."""
    draw = cases.Draw(torch.float32, "cpu")
    plain, turned, dealt = draw.normal(37, 70), draw.normal(33, 5), draw.normal(64, 40)
    ready, place = draw.normal(3, 16).half(), torch.empty(2, 40, 64, dtype=torch.half)
    wanted = plain, (turned, weights.TRANSPOSED), ready, (dealt, weights.DEALT, place[1])
    found = weights.prepared(torch.half, *wanted)
    exact = plain.half(), turned.half().mT, ready, deal(dealt.half().mT)
    results = [CheckResult(f"{at}", torch.equal(a, b), "") for at, (a, b) in enumerate(zip(found, exact))]
    results += [CheckResult("contiguous", all(t.is_contiguous() for t in found), "")]
    same = found[2] is ready and found[3].data_ptr() == place[1].data_ptr()
    return [*results, CheckResult("places", same, "")]


def finished_sums() -> list[CheckResult]:
    """Gradients from 70 or 130 shares of sums, of two weights of 9 and 33 rows; the second is transposed in memory."""
    draw, results = cases.Draw(torch.float32, "cpu"), []
    gamma, beta = draw.normal(48), draw.normal(48)
    for second, bias, shares in ((True, draw.normal(9).half(), 70), (False, draw.normal(5), 130)):
        first = weight_finish.Part(draw.normal(9, 48), draw.normal(shares, 9, 64)[..., :48], draw.normal(shares, 9))
        products, sums = draw.normal(shares, 33, 48), draw.normal(shares, 33)
        w = draw.normal(48, 33)
        last = weight_finish.Part(w, products, sums, normed=second, turned=True)
        found = weight_finish.gradients([first, last], gamma, beta, bias)
        halves = [(p.products.double().sum(0), p.sums.double().sum(0)[:, None]) for p in (first, last)]
        (g, s), (other_g, other_s) = halves
        exact = {"first": g * gamma + s * beta, "bias": s[: len(bias), 0]}
        exact["last"] = (other_g * gamma + other_s * beta if second else other_g).mT
        exact["gamma"] = (first.weight * g).sum(0) + second * (w.mT * other_g).sum(0)
        exact["beta"] = (first.weight * s).sum(0) + second * (w.mT * other_s).sum(0)
        names = dict(zip(("first", "last", "bias", "gamma", "beta"), (*found.weights, found.bias, *found.norms)))
        for name, value in names.items():
            close = torch.allclose(value.double(), exact[name], rtol=1e-3 if name == "bias" else 1e-5, atol=1e-4)
            results.append(CheckResult(f"{name} {second}", close and value.dtype != torch.double, ""))
    return results


BY_THEMSELVES = {
    "folded weights": folded_weights,
    "weights in other orders": prepared_weights,
    "sums of shares": finished_sums,
}

if __name__ == "__main__":
    torch.set_num_threads(1)
    # Whatever the kernels leave unwritten shows up as NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, make in CASES.items():
        for dtype in (torch.float32, torch.float16):
            if dtype == torch.float32 or name not in FP32_ALONE:
                results = in_budget(make(cases.Draw(dtype, "cpu")))
                found[f"{name} {str(dtype).removeprefix('torch.')}"] = [[r.name, r.ok, r.detail] for r in results]
    for name in UNDER_AUTOCAST:
        results = under_autocast(CASES[name](cases.Draw(torch.float32, "cpu")))
        found[f"{name} autocast"] = [[r.name, r.ok, r.detail] for r in results]
    launch.INTERPRETED |= {"resident": 1, "joint": 1}
    for name, make in RESIDENT.items():
        results = in_budget(make(cases.Draw(torch.float16, "cpu")))
        found[f"{name} float16"] = [[r.name, r.ok, r.detail] for r in results]
    del launch.INTERPRETED["resident"], launch.INTERPRETED["joint"]
    for name, make in STRIDED.items():
        results = in_budget(strided(make(cases.Draw(torch.float16, "cpu"))))
        found[f"{name} strided"] = [[r.name, r.ok, r.detail] for r in results]
    for name, check in BY_THEMSELVES.items():
        found[f"{name} float32"] = [[r.name, r.ok, r.detail] for r in check()]
    for name in COMPILED:
        results = under_compile(CASES[name](cases.Draw(torch.float32, "cpu")))
        found[f"{name} compiled"] = [[r.name, r.ok, r.detail] for r in results]
    json.dump(found, sys.stdout)
