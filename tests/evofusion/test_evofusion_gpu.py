"""EvoFusion's kernels on a GPU: error budget over dtypes and lengths, and how they live with PyTorch."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from megafold.evofusion import cases
from megafold.evofusion.cases import Case, Draw
from megafold.evofusion.launch import configuration, overridden
from megafold.evofusion.verify import CASES, COORDINATES
from megafold.testing import gradients_by_name, relative_error, rounding_step

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
DTYPES = pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=["bf16", "fp16", "fp32"])
SMALL = {
    "triangle multiplication": lambda draw: cases.triangle_multiplication_case(draw, 48, masked=True, shared="row"),
    "transition": lambda draw: cases.transition_case(draw, (100,)),
    "wide transition": lambda draw: cases.transition_case(draw, (100,), 801, 1602),
    "projections": lambda draw: cases.norm_project_case(draw, (1, 40, 40)),
    "attention output": lambda draw: cases.attention_output_case(draw, (1, 40, 40), shared="col"),
    "conditioned transition": lambda draw: cases.conditioned_transition_case(draw, (100,), 128, 128),
    "windowed attention": lambda draw: cases.windowed_attention_case(draw, 100, masked=True),
    "outer product mean": lambda draw: cases.outer_product_mean_case(draw, 16, 24, masked=True),
    "smooth lDDT": lambda draw: cases.smooth_lddt_case(draw, 100),
}
EACH = pytest.mark.parametrize("name", SMALL)


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


def assert_in_budget(case: Case) -> None:
    assert not [result for result in case.check() if not result.ok]


@DTYPES
@pytest.mark.parametrize("name", [name for name in CASES if name != COORDINATES])
def test_error_budget(name, dtype):
    assert_in_budget(CASES[name](Draw(dtype, "cuda")))


@pytest.mark.parametrize("masked", [True, False], ids=["mask", "no mask"])
def test_error_budget_of_the_loss(masked):
    assert_in_budget(cases.smooth_lddt_case(Draw(FP32, "cuda"), 1031, batch=3, masked=masked))


@pytest.mark.parametrize("shared", [None, "row", "col"], ids=["no dropout", "row", "column"])
@pytest.mark.parametrize("mix", ["outgoing", "incoming"])
@pytest.mark.parametrize("size", [1, 17, 200, 384])
def test_triangle_multiplication(size, mix, shared):
    case = cases.triangle_multiplication_case(Draw(BF16, "cuda"), size, mix=mix, masked=size > 1, shared=shared)
    assert_in_budget(case)


@pytest.mark.parametrize("width", [16, 32, 64, 128])
def test_every_narrow_width(width):
    draw = Draw(BF16, "cuda")
    for case in (
        cases.triangle_multiplication_case(draw, 33, width),
        cases.transition_case(draw, (777,), width),
        cases.norm_project_case(draw, (2, 333), width, outputs=32, count=2, heads=16),
        cases.attention_output_case(draw, (1, 9, 77), width, 64),
        cases.conditioned_transition_case(draw, (333,), width, 64),
    ):
        assert_in_budget(case)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("name", ["transition", "projections", "conditioned transition"])
def test_two_sums_in_one_launch(name, dtype):
    config = configuration("weight_gradient", dtype, torch.device("cuda", 0))
    with overridden("weight_gradient", config | {"joint": 1}):
        assert_in_budget(SMALL[name](Draw(dtype, "cuda")))
        assert_in_budget(cases.norm_project_case(Draw(dtype, "cuda"), (2, 333), 64, outputs=32, count=3, heads=16))


@pytest.mark.parametrize("width", [64, 384, 768, 801])
def test_transition_at_the_stock_widths(width):
    assert_in_budget(cases.transition_case(Draw(BF16, "cuda"), (2, 500), width))


def under_autocast(function):
    def call(**inputs):
        with torch.autocast("cuda", BF16):
            return function(**inputs)

    return call


def assert_in_budget_under_autocast(case: Case) -> None:
    found = gradients_by_name(under_autocast(case.operator), case.inputs)
    eager = gradients_by_name(under_autocast(case.reference), case.inputs)
    assert {key: t.dtype for key, t in found.items()} == {key: t.dtype for key, t in eager.items()}
    # Outputs in fp32 may hold a product's rounding to bf16: the step that the budget adds is that of bf16.
    rounded = {key: t.to(BF16) for key, t in found.items()}
    assert not [r for r in case.judge(rounded, eager, case.run(reference=True, double=True)) if not r.ok]


@EACH
def test_autocast_with_fp32_parameters(name):
    assert_in_budget_under_autocast(SMALL[name](Draw(FP32, "cuda")))


ROWS_FOR_HOPPER = {
    "transition": lambda draw: cases.transition_case(draw, (20001,)),
    "transition without norm and residual": lambda draw: cases.transition_case(
        draw, (333,), norm=False, residual=False
    ),
    "projections": lambda draw: cases.norm_project_case(draw, (2, 160, 64)),
    "projections, passing x on": lambda draw: cases.norm_project_case(draw, (1, 50, 50), heads=0, passes=True),
    "two projections": lambda draw: cases.norm_project_case(draw, (1, 33, 33), count=2, heads=7, norm_bias=False),
    "conditioned transition": lambda draw: cases.conditioned_transition_case(draw, (3, 3001), 128, 128),
    "adaptive norm": lambda draw: cases.adaptive_norm_case(draw, (77,)),
    "triangle, a tile": lambda draw: cases.triangle_multiplication_case(draw, 16, shared="col"),
    "triangle, mask and dropout": lambda draw: cases.triangle_multiplication_case(draw, 208, masked=True, shared="row"),
    "triangle, incoming, kept operands": lambda draw: cases.triangle_multiplication_case(
        draw, 96, mix="incoming", residual=False, keep_operands=True
    ),
}


LAUNCHES = ("project", "input_gradient", "transition", "transition_gradient", "adaptive_norm_gradient")
LAUNCHES += tuple(f"triangle_{name}" for name in ("operands", "result", "output", "output_weights", "both"))


@contextmanager
def all_for_hopper(step=64, weights=True):
    """All kernels for sm_90, whatever the table says: fails where none of them ran. Skips on other devices."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("kernels for sm_90")
    from megafold.evofusion.hopper import launch
    from megafold.evofusion.hopper.offline import KERNELS

    ran: set[str] = set()

    def noted(function):
        return lambda *args, **kwargs: ran.add(function.__name__) or function(*args, **kwargs)

    more = {"triangle_project": {"stages": 3}, "triangle_input_gradient": {"stages": 192 // step, "step": step}}
    if weights:
        more["triangle_output_gradient"] = {"registers": 160, "of_weights": 168}
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name in LAUNCHES:
            patch.setattr(launch, name, noted(getattr(launch, name)))
        for kernel in KERNELS.keys() - {"triangle_output_weights"}:
            name = {"input_gradient": "norm_project_gradient", "project": "norm_project"}.get(kernel, kernel)
            name = "triangle_input_gradient" if kernel == "triangle_both" else name
            config = configuration(name, BF16, torch.device("cuda", 0))
            gluon = {"registers": 240} | more.get(name, {})
            stack.enter_context(overridden(name, config | {"gluon": gluon, "joint": weights}))
        yield
    assert ran


@pytest.fixture
def hopper():
    with all_for_hopper(weights=False):
        yield


@pytest.mark.parametrize("step", [32, 64])
@pytest.mark.parametrize("name", [name for name in ROWS_FOR_HOPPER if name.startswith("triangle")])
def test_hopper_kernels_in_one_pass_behind_the_operands(name, step):
    with all_for_hopper(step=step):
        assert_in_budget(ROWS_FOR_HOPPER[name](Draw(BF16, "cuda")))


@pytest.mark.parametrize("name", [name for name in ROWS_FOR_HOPPER if name.startswith("triangle")])
def test_hopper_kernels_in_one_pass_under_autocast(name):
    with all_for_hopper():
        assert_in_budget_under_autocast(ROWS_FOR_HOPPER[name](Draw(FP32, "cuda")))


@pytest.mark.parametrize("name", ROWS_FOR_HOPPER)
def test_hopper_kernels(hopper, name):
    assert_in_budget(ROWS_FOR_HOPPER[name](Draw(BF16, "cuda")))


@pytest.mark.parametrize("name", [name for name in ROWS_FOR_HOPPER if name != "adaptive norm"])
def test_hopper_kernels_under_autocast(hopper, name):
    assert_in_budget_under_autocast(ROWS_FOR_HOPPER[name](Draw(FP32, "cuda")))


MANY_TILES = {
    "transition": lambda draw: cases.transition_case(draw, (1, 384, 384)),
    "projections": lambda draw: cases.norm_project_case(draw, (1, 384, 384)),
    "conditioned transition": lambda draw: cases.conditioned_transition_case(draw, (48, 3072), 128, 128),
    "triangle": lambda draw: cases.triangle_multiplication_case(draw, 384, masked=True, shared="row"),
}


@pytest.mark.parametrize("name", MANY_TILES)
def test_many_runs_over_many_tiles_give_the_same_bits(name):
    """A tile that is brought while another thread still reads the one before it changes a few rows of some runs."""
    case = MANY_TILES[name](Draw(BF16, "cuda"))
    first = case.run()
    for _ in range(20):
        again = case.run()
        assert not [key for key in first if not torch.equal(first[key], again[key])]


@EACH
def test_one_graph_under_torch_compile(name):
    case = SMALL[name](Draw(FP32, "cuda"))
    torch._dynamo.reset()
    compiled = Case(torch.compile(case.operator, fullgraph=True), case.reference, case.inputs)
    found, eager = compiled.run(), case.run()
    assert not [key for key in eager if not torch.equal(found[key], eager[key])]


@EACH
def test_activation_checkpointing(name):
    case = SMALL[name](Draw(FP32, "cuda"))
    names = list(case.inputs)

    def wrapped(**inputs):
        return checkpoint(lambda *t: case.operator(**dict(zip(names, t))), *inputs.values(), use_reentrant=False)

    found, plain = gradients_by_name(wrapped, case.inputs), case.run()
    assert not [key for key in plain if not torch.equal(found[key], plain[key])]


@EACH
def test_a_captured_graph_follows_its_inputs(name):
    torch.use_deterministic_algorithms(False)
    case = SMALL[name](Draw(BF16 if name != "smooth lDDT" else FP32, "cuda"))
    leaves = {key: t.clone().requires_grad_() for key, t in case.inputs.items()}

    def step():
        out = case.operator(**leaves)
        outputs = [out] if isinstance(out, torch.Tensor) else list(out)
        grads = torch.autograd.grad(outputs, list(leaves.values()), [torch.ones_like(o) for o in outputs])
        return [*outputs, *grads]

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        next(iter(leaves.values())).mul_(0.5)
    graph.replay()
    torch.cuda.synchronize()
    assert not [i for i, (a, b) in enumerate(zip(captured, step())) if not torch.equal(a, b)]


@EACH
def test_a_second_derivative_is_a_clear_error(name):
    case = SMALL[name](Draw(FP32, "cuda"))
    leaves = {key: t.clone().requires_grad_() for key, t in case.inputs.items()}
    out = case.operator(**leaves)
    out = out if isinstance(out, torch.Tensor) else out[0]
    (grad,) = torch.autograd.grad(out.sum(), next(iter(leaves.values())), create_graph=True)
    with pytest.raises(NotImplementedError, match="double backward is not implemented"):
        torch.autograd.grad(grad.sum(), next(iter(leaves.values())))


def test_inputs_that_are_not_contiguous():
    draw = Draw(BF16, "cuda")
    for case, name in (
        (cases.triangle_multiplication_case(draw, 40), "x"),
        (cases.transition_case(draw, (40, 40)), "x"),
        (cases.norm_project_case(draw, (1, 40, 40)), "x"),
        (cases.attention_output_case(draw, (1, 40, 40)), "attended"),
    ):
        strided = Case(case.operator, case.reference, dict(case.inputs))
        strided.inputs[name] = case.inputs[name].transpose(-3, -2).contiguous().transpose(-3, -2)
        found, plain = strided.run(), case.run()
        assert not [key for key in plain if not torch.equal(found[key], plain[key])]


def test_more_than_two_to_the_31_elements():
    """x has 2^31 + 2^17 elements; the last rows must be what they are in a small call."""
    rows = 2**24 + 1024
    x = torch.zeros(1, rows, 128, device="cuda", dtype=BF16)
    case = cases.transition_case(Draw(BF16, "cuda"), (1, 1024))
    x[:, -1024:] = case.inputs["x"]
    x.requires_grad_()
    small = case.run()
    out = case.operator(**(case.inputs | {"x": x}))
    assert torch.equal(out[:, -1024:], small["out"])
    grad = torch.zeros_like(out)
    drawn = torch.randn(1, 1024, 128, generator=torch.Generator().manual_seed(0)).to(BF16).to("cuda", BF16)
    grad[:, -1024:] = drawn
    (dx,) = torch.autograd.grad(out, x, grad)
    assert torch.equal(dx[:, -1024:], small["dx"])
    assert not dx[:, :-1024].any()


def test_pair_weighted_averaging_with_values_beyond_two_to_the_31():
    """[1, H, N, S, E] has more than 2^31 elements; the last sequences must be what they are without the others."""
    depth, size = 8400, 1001
    case = cases.pair_weighted_averaging_case(Draw(BF16, "cuda"), depth, size, width=16, pair_width=16)
    assert case.inputs["out_weight"].shape[1] * depth * size > 2**31
    others = {name: t.requires_grad_() for name, t in case.inputs.items() if name != "msa"}
    msa = case.inputs["msa"].requires_grad_()
    last = msa.detach()[:, -64:].clone().requires_grad_()
    out, alone = (case.operator(msa=x, **others) for x in (msa, last))
    assert relative_error(out[:, -64:].detach(), alone.detach()) < 2 * rounding_step(BF16)
    grad = torch.zeros_like(out)
    grad[:, -64:] = drawn = torch.randn_like(alone)
    # What has no gradient adds nothing: those of all parameters are those of the last sequences.
    found = dict(zip(("msa", *others), torch.autograd.grad(out, (msa, *others.values()), grad)))
    wanted = dict(zip(("msa", *others), torch.autograd.grad(alone, (last, *others.values()), drawn)))
    assert not found["msa"][:, :-64].any()
    found["msa"] = found["msa"][:, -64:]
    del found["pair_norm_bias"]  # zero but for rounding
    for name, value in found.items():
        assert relative_error(value, wanted[name]) < 4 * rounding_step(BF16), name


def test_triangle_multiplication_with_operands_beyond_two_to_the_31():
    """[1, 2 C, N, N] has more than 2^31 elements at N = 2912; compared in a corner with the reference in chunks."""
    size = 2912
    case = cases.triangle_multiplication_case(Draw(BF16, "cuda"), size)
    with torch.no_grad():
        out = case.operator(**case.inputs)[0, -8:]
    from torch.nn.functional import glu, layer_norm, linear

    t = {name: tensor.float() for name, tensor in case.inputs.items()}

    def operands(rows):
        normed = layer_norm(rows, (128,), t["norm_weight"], t["norm_bias"])
        return normed, glu(linear(normed, t["in_weight"]), dim=-1)

    normed, of_rows = operands(t["x"][0, -8:])
    left = of_rows[..., :128]
    product = torch.empty(8, size, 128, device="cuda")
    for j in range(0, size, 64):
        right = operands(t["x"][0, j : j + 64])[1][..., 128:]
        product[:, j : j + 64] = torch.einsum("ikd,jkd->ijd", left, right)
    exact = layer_norm(product, (128,), t["out_norm_weight"], t["out_norm_bias"])
    exact = linear(exact, t["out_weight"]) * linear(normed, t["gate_weight"]).sigmoid() + t["x"][0, -8:]
    assert ((out.float() - exact).norm() / exact.norm()).item() < 1e-2
