"""EvoFusion's public functions on a CPU: refusals, dtypes, and how the operators live with PyTorch."""

from __future__ import annotations

import pytest
import torch

from megafold.evofusion import cases, operator
from megafold.evofusion.attention_output.api import attention_output
from megafold.evofusion.cases import Draw
from megafold.evofusion.conditioned.api import Conditioning, adaptive_norm, condition_gate, prepare
from megafold.evofusion.msa.api import outer_product_mean, pair_weighted_averaging
from megafold.evofusion.msa.regroup import regroup
from megafold.evofusion.norm_project.api import norm_project
from megafold.evofusion.smooth_lddt.api import smooth_lddt_loss
from megafold.evofusion.transition.api import transition
from megafold.evofusion.triangle_multiplication.api import triangle_multiplication
from megafold.evofusion.windowed_attention.api import windowed_attention

DRAW = Draw(torch.float32, "cpu")
TRIANGLE = cases.triangle_multiplication_case(DRAW, 5, 16).inputs
WINDOWED = cases.windowed_attention_case(DRAW, 20, heads=2, dim=8, window=9).inputs
TRANSITION = cases.transition_case(DRAW, (3, 5), 16).inputs
ADAPTIVE = cases.adaptive_norm_case(DRAW, (3, 5), 16, 8).inputs
GATE = cases.condition_gate_case(DRAW, (3, 5), 16, 8).inputs
OUTER = cases.outer_product_mean_case(DRAW, 4, 5, width=16, hidden=4).inputs
AVERAGE = cases.pair_weighted_averaging_case(DRAW, 4, 5, width=16, pair_width=16, heads=2, inner=8).inputs
OUTPUT = {"attended": torch.randn(2, 3, 4, 16), "gate": torch.randn(2, 3, 4, 16), "weight": torch.randn(8, 16)}
COORDINATES = {"pred": torch.randn(2, 7, 3), "true": torch.randn(2, 7, 3)}
FLAGS = {"is_dna": torch.zeros(2, 7, dtype=torch.bool), "is_rna": torch.zeros(2, 7, dtype=torch.bool)}
REFUSALS = [
    (triangle_multiplication, TRIANGLE | {"mix": "both"}, "mix is 'both'"),
    (triangle_multiplication, TRIANGLE | {"mix": "incoming", "x": torch.randn(1, 5, 4, 16)}, r"x has shape \[1, 5, 4"),
    (triangle_multiplication, TRIANGLE | {"mix": "incoming", "x": torch.randn(5, 5, 16)}, "x has 3 dimensions"),
    (triangle_multiplication, TRIANGLE | {"mix": "incoming", "in_weight": torch.randn(16, 16)}, "in_weight has shape"),
    (triangle_multiplication, TRIANGLE | {"mix": "incoming", "mask": torch.ones(1, 1, 5).bool()}, "mask has shape"),
    (triangle_multiplication, TRIANGLE | {"mix": "incoming", "mask": torch.ones(1, 5, 5)}, "mask has dtype"),
    (triangle_multiplication, TRIANGLE | {"mix": "incoming", "dropped": torch.ones(1, 1, 1, 16)}, "dropped has shape"),
    (transition, TRANSITION | {"norm_bias": None}, "norm_bias is given without norm_weight"),
    (transition, TRANSITION | {"out_weight": torch.randn(16, 30)}, "in_weight has shape"),
    (transition, TRANSITION | {"x": torch.ones(3, 16, dtype=torch.int64)}, "x has dtype torch.int64"),
    (norm_project, {"x": torch.randn(2, 3, 16), "norm_weight": torch.ones(16), "norm_bias": None}, "weights is empty"),
    (
        norm_project,
        {
            "x": torch.randn(2, 3, 16),
            "norm_weight": torch.ones(16),
            "norm_bias": None,
            "weights": [torch.ones(8, 16)] * 5,
        },
        "weights has 5 entries",
    ),
    (attention_output, OUTPUT | {"gate": torch.randn(2, 3, 4, 8)}, "gate has shape"),
    (attention_output, OUTPUT | {"residual": torch.randn(2, 3, 4, 16)}, "residual has shape"),
    (attention_output, OUTPUT | {"dropped": torch.randn(2, 3, 1, 16)}, "dropped has shape"),
    (adaptive_norm, ADAPTIVE | {"cond": torch.randn(3, 4, 8)}, "cond has shape"),
    (condition_gate, GATE | {"bias": torch.randn(1)}, "bias has shape"),
    (windowed_attention, WINDOWED | {"bias": torch.randn(1, 2, 3, 9, 9)}, "bias has shape"),
    (windowed_attention, WINDOWED | {"k": torch.randn(1, 21, 2, 8)}, "k has shape"),
    (windowed_attention, WINDOWED | {"scale": float("nan")}, "scale is nan"),
    (windowed_attention, WINDOWED | {"windowed_mask": torch.ones(1, 1, 9, 18).bool()}, "windowed_mask has shape"),
    (outer_product_mean, OUTER | {"out_weight": torch.randn(128, 8)}, "out_weight has shape"),
    (pair_weighted_averaging, AVERAGE | {"bias_weight": torch.randn(3, 16)}, "out_weight has 8 columns"),
    (smooth_lddt_loss, COORDINATES | FLAGS | {"reduction": "sum"}, "reduction is 'sum'"),
    (smooth_lddt_loss, COORDINATES | FLAGS | {"is_rna": torch.zeros(2, 7)}, "is_rna has dtype torch.float32"),
]


@pytest.mark.parametrize(("function", "arguments", "message"), REFUSALS, ids=[r[2].replace("\\", "") for r in REFUSALS])
def test_a_wrong_argument_is_named_with_what_is_allowed(function, arguments, message):
    with pytest.raises(ValueError, match=f"^[a-z_]+: {message}.*; allowed: "):
        function(**arguments)


@pytest.mark.parametrize("mask", ["of tokens", "of pairs"])
def test_triangle_multiplication_takes_both_kinds_of_mask(mask):
    tokens = torch.tensor([[True, True, False, True, False]])
    pairs = tokens[:, :, None] & tokens[:, None, :]
    given = tokens if mask == "of tokens" else pairs
    out = triangle_multiplication(**TRIANGLE, mix="outgoing", mask=given)
    zeroed = TRIANGLE | {"x": TRIANGLE["x"].clone()}
    zeroed["x"][:, :, 2] += 100.0  # what a masked token's pairs hold does not reach other pairs
    again = triangle_multiplication(**zeroed, mix="outgoing", mask=given)
    torch.testing.assert_close(again[pairs], out[pairs])
    assert not torch.equal(triangle_multiplication(**zeroed, mix="outgoing")[pairs], out[pairs])


@pytest.mark.parametrize("residual", [True, False])
def test_under_autocast_a_residual_keeps_its_dtype_and_an_update_has_that_of_products(residual):
    with torch.autocast("cpu", torch.bfloat16):
        out = transition(**TRANSITION, residual=residual)
    assert out.dtype == (torch.float32 if residual else torch.bfloat16)


def test_an_operator_without_a_second_derivative_says_so():
    pred = COORDINATES["pred"].clone().requires_grad_()
    loss = smooth_lddt_loss(pred, COORDINATES["true"], **FLAGS)
    (grad,) = torch.autograd.grad(loss, pred, create_graph=True)
    with pytest.raises(NotImplementedError, match="smooth_lddt: double backward is not implemented"):
        torch.autograd.grad(grad.sum(), pred)


def test_the_loss_of_a_structure_without_pairs_is_one_and_its_gradient_zero():
    pred = COORDINATES["pred"].clone().requires_grad_()
    nothing = torch.zeros(2, 7, dtype=torch.bool)
    loss = smooth_lddt_loss(pred, COORDINATES["true"], **FLAGS, mask=nothing)
    loss.backward()
    assert loss.item() == 1.0
    assert not pred.grad.any()


def test_the_chunked_loss_holds_no_tensor_of_all_pairs(monkeypatch):
    from megafold.evofusion.smooth_lddt import chunked

    monkeypatch.setattr(chunked, "CHUNK_PAIRS", 4 * 300)
    case = cases.smooth_lddt_case(DRAW, 300, batch=1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        case.run()
    largest = max(e.nbytes() for e in profiler.profiler.kineto_results.events() if e.name() == "[memory]")
    assert largest < 4 * 300 * 300
    assert not [r for r in case.check() if not r.ok]


@pytest.mark.parametrize("width", [8, 3], ids=["16 bytes", "6 bytes"])
def test_values_are_regrouped_and_lead_back(width):
    x = torch.randn(2, 3, 4, 5, width).bfloat16().requires_grad_()
    out = regroup(x)
    assert out.is_contiguous()
    assert torch.equal(out, x.permute(0, 3, 2, 1, 4))
    assert torch.equal(regroup(out), x)
    cotangent = torch.randn(out.shape).bfloat16()
    (grad,) = torch.autograd.grad(out, x, cotangent)
    assert torch.equal(grad, cotangent.permute(0, 3, 2, 1, 4))
    torch.library.opcheck(torch.ops.megafold.regroup.default, (torch.randn(1, 2, 3, 2, width).requires_grad_(),))


@pytest.mark.parametrize("name", ["smooth_lddt", "outer_product_mean"])
def test_operators_that_run_on_a_cpu_pass_pytorchs_own_check(name):
    generator = torch.Generator().manual_seed(0)
    points = [torch.randn(2, 5, 3, generator=generator) for _ in range(2)]
    arguments = {
        "smooth_lddt": (
            *(points[0].requires_grad_(), points[1], torch.ones(2, 5, dtype=torch.bool), None),
            *(30.0, 15.0, True),
        ),
        "outer_product_mean": tuple(
            torch.randn(shape, generator=generator).requires_grad_()
            for shape in ((1, 3, 4, 2), (1, 3, 4, 2), (6, 4), (6,))
        ),
    }[name]
    torch.library.opcheck(getattr(torch.ops.megafold, name).default, arguments)


@pytest.mark.parametrize("widths", [(16,), (128, 64)])
def test_narrow_widths_are_powers_of_two_up_to_128(widths):
    assert operator.is_narrow(*widths)
    assert not any(operator.is_narrow(*widths, other) for other in (8, 48, 256, 801))


@pytest.mark.parametrize("depth", [33, 32], ids=["padded", "whole"])
def test_a_column_of_ones_sums_the_rows_in_the_product(depth, monkeypatch):
    pytest.importorskip("triton")
    from megafold.evofusion.conditioned import launch

    given = []

    def in_fp32(a, x):  # as the vendor's product of 16-bit rows on a GPU
        given.append(x)
        return a.mT.float() @ x.float()

    monkeypatch.setattr(launch, "product_over_rows", in_fp32)
    generator = torch.Generator().manual_seed(0)
    cond, grads = (torch.randn(50, width, generator=generator).bfloat16() for width in (depth, 12))
    source = launch._padded(cond, None, torch.bfloat16)
    monkeypatch.setattr(torch.Tensor, "sum", None if depth == 33 else torch.Tensor.sum)  # none but the product sums
    products, sums = launch._over_rows(grads, source, depth, 8)
    monkeypatch.undo()
    assert given[0].shape == (50, 48 if depth == 33 else 32)
    torch.testing.assert_close(products.double(), grads.double().mT @ cond.double(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(sums.double(), grads[:, :8].double().sum(0).unsqueeze(1), rtol=1e-5, atol=1e-5)


def test_a_conditioning_prepared_in_another_dtype_is_refused():
    parts = (ADAPTIVE["cond"], *(ADAPTIVE["cond"].bfloat16(),) * 2)
    with pytest.raises(
        ValueError, match=r"^adaptive_norm: cond.normed has dtype torch.bfloat16; allowed: torch.float32"
    ):
        adaptive_norm(**ADAPTIVE | {"cond": Conditioning(*parts)})


def test_without_kernels_a_conditioning_stays_what_it_is():
    assert prepare(ADAPTIVE["cond"]) is ADAPTIVE["cond"]


@pytest.mark.parametrize(
    ("size", "asked", "kept"), [(8, None, True), (9, None, False), (8, False, False), (9, True, True)], ids=str
)
def test_operands_of_small_pairs_are_kept_for_the_backward(size, asked, kept, monkeypatch):
    from megafold.evofusion.triangle_multiplication import api

    told = []
    monkeypatch.setattr(api, "KEPT_ELEMENTS", 8 * 8 * 16)
    monkeypatch.setattr(api, "uses_kernels", lambda x: True)
    monkeypatch.setattr(api, "_forward_op", lambda *arguments: told.append(arguments[-2]) or arguments)
    case = cases.triangle_multiplication_case(Draw(torch.float32, "cpu"), size, 16, keep_operands=asked)
    case.operator(**case.inputs)
    assert told == [kept]


def test_shapes_of_a_triangle_multiplication_need_no_device():
    case = cases.triangle_multiplication_case(DRAW, 5, 16)
    by_name = {name: t.to("meta") for name, t in case.inputs.items()}
    norms = [by_name[name] for name in ("norm_weight", "norm_bias", "out_norm_weight", "out_norm_bias")]
    weights = [by_name[name] for name in ("in_weight", "gate_weight", "out_weight")]
    out, product, operands, folded, shift = torch.ops.megafold.triangle_multiplication.default(
        by_name["x"], *norms[:2], *weights[:2], *norms[2:], weights[2], None, None, True, True, True, torch.bfloat16
    )
    assert out.shape == by_name["x"].shape and product.shape[1:] == (16, 16, 16) and operands.shape[1] == 32
    assert folded.shape == (13 * 16, 16) and folded.dtype == torch.bfloat16 and shift.shape == (6 * 16,)
