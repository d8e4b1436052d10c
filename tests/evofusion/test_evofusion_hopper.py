"""The kernels for sm_90 without a device: their source run with NumPy in the place of Gluon, against float64.

Two and three programs of more tiles than they have buffers: whoever waits for a barrier in a wrong order is found here.
"""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch

pytest.importorskip("triton.experimental.gluon")

from megafold import triton_support
from megafold.evofusion import launch as shared
from megafold.evofusion.hopper import (
    adaptive_norm,
    common,
    input_gradient,
    launch,
    offline,
    project,
    transition,
    transition_forward,
    triangle_both,
    triangle_operands,
    triangle_output,
    triangle_output_weights,
    triangle_result,
)
from megafold.testing import SHARED_MEMORY_CAP
from tests.gluon_emulator import Descriptor, Emulator, Pointer, Scalar

C, EPS, TILE = 128, 1e-5, 64
MODULES = (
    adaptive_norm, common, input_gradient, project, transition, transition_forward, triangle_both,
    triangle_operands, triangle_output, triangle_output_weights, triangle_result,
)  # fmt: skip
EMULATOR = Emulator(*MODULES)
OUTPUT_WEIGHTS = triangle_output_weights.triangle_output_weights_kernel_sm90
FIXED = {"C": C, "REGISTERS": 240}


@pytest.fixture
def draw():
    generator = np.random.default_rng(0)
    return lambda *shape, scale=1.0: (generator.standard_normal(shape) * scale).astype(np.float32)


def empty(*shape):
    return np.full(shape, np.nan, np.float32)


def rows(x, block=(TILE, C)):
    return Descriptor(x, x.shape, (x.shape[1], 1), block)


def dealt(x, length, columns=C):
    pitch = x.shape[1]
    strides = (32 * pitch, 2 * pitch, 8 * pitch, pitch, 1)
    return Descriptor(x, (len(x) // 32, 4, 4, 2, pitch), strides, (length // 32, 4, 4, 2, columns))


def pointer(*arrays):
    return [Pointer(array.reshape(-1)) for array in arrays]


def deal(w):
    """Columns of weights in the order in which a product leaves them in registers."""
    return np.ascontiguousarray(w.reshape(-1, 4, 4, 4, 2).swapaxes(2, 3).reshape(w.shape))


def wide(*arrays):
    return [torch.from_numpy(array).double().requires_grad_() for array in arrays]


def norm(x, gamma=None, beta=None):
    return torch.nn.functional.layer_norm(x, x.shape[-1:], gamma, beta, EPS)


def check(**pairs):
    for name, (found, exact) in pairs.items():
        exact = exact.detach().numpy()
        assert np.linalg.norm(found - exact) <= 2e-6 * np.linalg.norm(exact), name


@pytest.mark.parametrize("programs", [2, 3])
@pytest.mark.parametrize("slots", [1, 2])
def test_transition(draw, slots, programs):
    x, gamma, beta, w_in, w_out = draw(340, C), draw(C), draw(C), draw(512, C, scale=0.1), draw(C, 256, scale=0.1)
    out = empty(340, C)
    EMULATOR.launch(
        transition_forward.transition_kernel_sm90, programs, rows(x), rows(w_in), dealt(w_out, C, TILE),
        *pointer(gamma, beta, x, out), 340, 6, EPS, PARTS=4, STEP=64, NORM=True, RESIDUAL=True, SLOTS=slots, **FIXED,
    )  # fmt: skip
    x_, gamma_, beta_, w_in_, w_out_ = wide(x, gamma, beta, w_in, w_out)
    values, gates = (norm(x_, gamma_, beta_) @ w_in_.T).chunk(2, -1)
    check(out=(out, x_ + (values * torch.nn.functional.silu(gates)) @ w_out_.T))


@pytest.mark.parametrize("programs", [2, 3])
@pytest.mark.parametrize("slots", [1, 2])
def test_transition_gradient(draw, slots, programs):
    x, gamma, beta, w_in, w_out = draw(340, C), draw(C), draw(C), draw(512, C, scale=0.1), draw(C, 256, scale=0.1)
    grad_out, hidden, grads, upstream = draw(340, C), empty(340, 256), empty(340, 512), empty(340, C)
    EMULATOR.launch(
        transition.transition_gradient_kernel_sm90, programs, rows(x), rows(grad_out), dealt(w_in, TILE),
        dealt(np.ascontiguousarray(w_out.T), TILE), *pointer(gamma, beta, hidden, grads, upstream), 340, 6, EPS,
        INNER=256, STEP=64, NORM=True, COPY=True, SLOTS=slots, **FIXED,
    )  # fmt: skip
    x_, gamma_, beta_, w_in_, w_out_, grad_ = wide(x, gamma, beta, w_in, w_out, grad_out)
    pre = norm(x_, gamma_, beta_) @ w_in_.T
    made = pre[:, :256] * torch.nn.functional.silu(pre[:, 256:])
    (of_pre,) = torch.autograd.grad((made @ w_out_.T * grad_).sum(), pre)
    check(hidden=(hidden, made), grads=(grads, of_pre), upstream=(upstream, grad_))


@pytest.mark.parametrize("stages", [2, 4])
def test_projections(draw, stages):
    x, gamma, beta, w, bias, w_heads = draw(640, C), draw(C), draw(C), draw(512, C), draw(256), draw(4, C)
    outs, heads = [empty(640, C) for _ in range(4)], empty(2, 4, 320)
    EMULATOR.launch(
        project.project_kernel_sm90, 3, rows(x), dealt(w, TILE), rows(w_heads, (16, C)),
        *pointer(gamma, beta, bias, *outs, heads), 640, 320, 10, EPS, COUNT=4, STEP=64, STAGES=stages, HEADS=4,
        HAS_BETA=True, BIASED=256, **FIXED,
    )  # fmt: skip
    x_, gamma_, beta_, w_, bias_, w_heads_ = wide(x, gamma, beta, w, bias, w_heads)
    normed = norm(x_, gamma_, beta_)
    check(outs=(np.concatenate(outs, 1), normed @ w_.T + torch.nn.functional.pad(bias_, (0, 256))))
    check(heads=(heads, (normed @ w_heads_.T).view(2, 320, 4).mT))


@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("heads", [0, 4])
def test_input_gradient(draw, heads, held):
    """Of four projections and heads, or of one projection of as many columns."""
    x, gamma, w, other = draw(640, C), draw(C), draw(512, C, scale=0.1), draw(640, C)
    grads, grad_heads, w_heads = draw(640, 512), draw(2, 4, 320), draw(4, C)
    grad_x, x_hat = empty(640, C), empty(640, C)
    parts = [np.ascontiguousarray(part) for part in np.split(grads, 4, 1)] if heads else [grads] * 4
    EMULATOR.launch(
        input_gradient.input_gradient_kernel_sm90, 3, rows(x), dealt(np.ascontiguousarray(w.T), C),
        *[rows(part) for part in parts], *pointer(gamma, other, grad_heads, w_heads, grad_x, x_hat), 640, 320, 10, EPS,
        COUNT=4, WIDTH=C, STEP=0 if heads else C, HELD=held, HEADS=heads, OTHER=True, **FIXED,
    )  # fmt: skip
    x_, gamma_, w_, other_, grads_, grad_heads_, w_heads_ = wide(x, gamma, w, other, grads, grad_heads, w_heads)
    normed = norm(x_, gamma_)
    total = (normed @ w_.T * grads_).sum()
    if heads:
        total = total + ((normed @ w_heads_.T).view(2, 320, 4).mT * grad_heads_).sum()
    check(grad_x=(grad_x, torch.autograd.grad(total, x_)[0] + other_), x_hat=(x_hat, norm(x_)))


@pytest.mark.parametrize("held", [1, 2])
@pytest.mark.parametrize("others", [False, True], ids=["alone", "others"])
def test_adaptive_norm_gradient(draw, others, held):
    x, cond, grad_out, other_x, other_cond = (draw(340, C) for _ in range(5))
    gamma, w_gamma, bias, w_beta = draw(C), draw(C, C, scale=0.1), draw(C), draw(C, C, scale=0.1)
    grad_x, grad_cond, grad_gate = empty(340, C), empty(340, C), empty(340, C)
    transposed = deal(np.concatenate([w_beta.T, w_gamma.T]))
    EMULATOR.launch(
        adaptive_norm.adaptive_norm_gradient_kernel_sm90, 2, rows(x, (TILE, 32)), rows(cond),
        rows(grad_out, (TILE, 32)), dealt(w_gamma, 32), dealt(transposed, C, 32),
        *pointer(gamma, bias, other_x, other_cond, grad_x, grad_cond, grad_gate), 340, 6, EPS, STEP=32, HELD=held,
        OTHERS=others, **FIXED,
    )  # fmt: skip
    x_, cond_, grad_, gamma_, w_gamma_, bias_, w_beta_ = wide(x, cond, grad_out, gamma, w_gamma, bias, w_beta)
    normed = norm(cond_) * gamma_
    gate = normed @ w_gamma_.T + bias_
    total = ((norm(x_) * gate.sigmoid() + normed @ w_beta_.T) * grad_).sum()
    of_x, of_cond, of_gate = torch.autograd.grad(total, (x_, cond_, gate))
    if others:
        of_x, of_cond = of_x + torch.from_numpy(other_x), of_cond + torch.from_numpy(other_cond)
    check(grad_x=(grad_x, of_x), grad_cond=(grad_cond, of_cond), grad_gate=(grad_gate, of_gate))


def padded_rows(x):
    return np.concatenate([x, np.ones_like(x[:, :1]), np.zeros_like(x[:, :7])], 1)


@pytest.mark.parametrize("stages", [2, 3])
@pytest.mark.parametrize("normed", [False, True], ids=["x", "normed"])
def test_triangle_operands(draw, normed, stages):
    x, w, shift, found = draw(1024, C), draw(640, C, scale=0.1), draw(640), empty(256, 1024)
    mask = (draw(1024) > -0.8).astype(np.uint8)
    x_, w_, shift_ = wide(x, w, shift)
    source = padded_rows(norm(x_).detach().float().numpy()) if normed else x
    EMULATOR.launch(
        triangle_operands.triangle_operands_kernel_sm90, 3, dealt(source, 128), rows(w), *pointer(shift), Pointer(mask),
        *pointer(found), 1024, 8, EPS, PAIRS=128, STAGES=stages, NORM=not normed, HAS_MASK=True, **FIXED,
    )  # fmt: skip
    pre = norm(x_) @ w_[:512].T + shift_[:512]
    check(operands=(found, (pre[:, :256] * pre[:, 256:].sigmoid() * torch.from_numpy(mask).double()[:, None]).T))


@pytest.mark.parametrize("programs", [3, 4])
@pytest.mark.parametrize(("step", "stages"), [(64, 2), (64, 3), (32, 6)])
def test_triangle_both(draw, step, stages, programs):
    """22 tiles: programs with as many for both groups, and with one more for the first."""
    pairs = 1408
    x, w, shift, grads, grad_out = draw(pairs, C), draw(640, C, scale=0.1), draw(640), draw(640, pairs), draw(pairs, C)
    mask, grad_x = (draw(pairs) > -0.8).astype(np.uint8), empty(pairs, C)
    x_, w_, shift_, grads_, grad_ = wide(x, w, shift, grads, grad_out)
    rstd = (1 / np.sqrt(x.var(1) + EPS)).astype(np.float32)
    hat = norm(x_)
    planes = Descriptor(grads, grads.shape, (pairs, 1), (step, TILE))
    EMULATOR.launch(
        triangle_both.triangle_both_kernel_sm90, programs, *pointer(padded_rows(hat.detach().float().numpy())), planes,
        rows(deal(w), (step, C)), *pointer(shift), Pointer(mask), *pointer(rstd, grad_out, grad_x), pairs // TILE,
        STEP=step, STAGES=stages, HAS_MASK=True, RESIDUAL=True, **FIXED,
    )  # fmt: skip
    pre = hat @ w_.T + shift_
    operands = pre[:, :256] * pre[:, 256:512].sigmoid() * torch.from_numpy(mask).double()[:, None]
    total = (operands * grads_[:256].T).sum() + (pre[:, 512:] * grads_[512:].T).sum()
    of_x, of_pre = torch.autograd.grad(total, (x_, pre))
    check(grad_x=(grad_x, of_x + grad_), grads=(grads, of_pre.T))


@pytest.mark.parametrize("held", [2, 4])
@pytest.mark.parametrize("axis", ["row", "column"])
def test_triangle_result(draw, axis, held):
    """16 rows of 32 pairs."""
    x, product, out = draw(512, C), draw(C, 512), empty(512, C)
    w_gate, w_out, gate_shift, out_shift = draw(C, C, scale=0.1), draw(C, C, scale=0.1), draw(C), draw(C)
    dropped, strides = (draw(32, C), (0, C)) if axis == "row" else (draw(16, C), (C, 0))
    EMULATOR.launch(
        triangle_result.triangle_result_kernel_sm90, 3, rows(x), rows(product, (C, TILE)), dealt(w_gate, TILE),
        dealt(w_out, TILE), *pointer(x, dropped, gate_shift, out_shift, out), *strides, 32, 8, EPS, STEP=64, HELD=held,
        HAS_DROPPED=True, RESIDUAL=True, **FIXED,
    )  # fmt: skip
    x_, product_, w_gate_, w_out_, gate_, out_ = wide(x, product, w_gate, w_out, gate_shift, out_shift)
    factor = np.tile(dropped, (16, 1)) if axis == "row" else np.repeat(dropped, 32, 0)
    value = norm(product_.T) @ w_out_.T + out_
    value = value * (norm(x_) @ w_gate_.T + gate_).sigmoid() * torch.from_numpy(factor).double()
    check(out=(out, x_ + value))


@pytest.mark.parametrize("held", [1, 2, "weights"])
@pytest.mark.parametrize("axis", ["row", "column"])
def test_triangle_output(draw, axis, held):
    """20 rows of 32 pairs, one program with four tiles and two with three."""
    pairs, alone = 640, held in (1, 2)
    x, product, grad_out = draw(pairs, C), draw(C, pairs), draw(pairs, C)
    w_gate, w_out, gate_shift, out_shift = draw(C, C, scale=0.1), draw(C, C, scale=0.1), draw(C), draw(C)
    dropped, strides = (draw(32, C), (0, C)) if axis == "row" else (draw(20, C), (C, 0))
    x_hat, p_hat, rstd, upstream = empty(pairs, C + 8), empty(pairs, C + 8), empty(pairs), empty(pairs, C)
    grad_gate, grad_product, partial = empty(C, pairs), empty(C, pairs), empty(3, C, C + 8)
    shifts = (gate_shift, out_shift) if alone else (np.concatenate([gate_shift, out_shift]),)
    transposed = [dealt(deal(np.ascontiguousarray(w_out.T)), C, 32)] * alone
    of_weights = {"EPS": EPS, "OF_WEIGHTS": 168}
    EMULATOR.launch(
        triangle_output.triangle_output_kernel_sm90 if alone else OUTPUT_WEIGHTS, 3, rows(x), dealt(product, C, TILE),
        dealt(deal(np.concatenate([w_gate, w_out])), 32), *transposed,
        *pointer(grad_out, dropped, *shifts, x_hat, rstd, *((p_hat, upstream) if alone else (partial,))),
        dealt(grad_gate, 32, TILE), dealt(grad_product, C, TILE), *strides, 32, 10, *((EPS,) if alone else ()),
        STEP=32, HAS_DROPPED=True, **({"HELD": held} if alone else of_weights), **FIXED,
    )  # fmt: skip
    x_, product_, w_gate_, w_out_, gate_, out_, grad_ = wide(x, product, w_gate, w_out, gate_shift, out_shift, grad_out)
    factor = np.tile(dropped, (20, 1)) if axis == "row" else np.repeat(dropped, 32, 0)
    gate, value = norm(x_) @ w_gate_.T + gate_, norm(product_.T) @ w_out_.T + out_
    total = (value * gate.sigmoid() * torch.from_numpy(factor).double() * grad_).sum()
    of_product, of_gate, of_value = torch.autograd.grad(total, (product_, gate, value))
    check(grad_product=(grad_product, of_product), grad_gate=(grad_gate, of_gate.T), x_hat=(x_hat[:, :C], norm(x_)))
    assert np.allclose(rstd, 1 / np.sqrt(x.var(1) + EPS), rtol=1e-5)
    assert all((hat[:, C] == 1).all() and not hat[:, C + 1 :].any() for hat in (x_hat, p_hat)[: 1 + alone])
    if alone:
        check(upstream=(upstream, of_value), p_hat=(p_hat[:, :C], norm(product_.T)))
    else:
        check(products=(partial[:, :, :C].sum(0), of_value.T @ norm(product_.T)))
        check(sums=(partial[:, :, C].sum(0), of_value.sum(0)))


@pytest.mark.parametrize("tile", [0, 1, 2**18 - 1], ids=["first", "second", "last"])
def test_prefetched_rows_of_a_long_tensor_lie_in_it(tile):
    """2^24 pairs of width 136: more elements than 31 bits count."""
    length, pitch = 2**24, C + 8
    source = Pointer(np.broadcast_to(np.float32(0), (length * pitch,)))
    EMULATOR.functions[common.prefetch_rows.fn](source, Scalar(tile * TILE), Scalar(length), pitch, 1)


def test_a_configuration_without_them_or_another_width_runs_the_other_kernels():
    x = torch.empty(2, 3, C)
    assert shared.hopper_kernels({"block_l": 64}, x, torch.bfloat16) is None
    wanted = {"gluon": {"registers": 240}}
    assert shared.hopper_kernels(wanted, x, torch.bfloat16) is not None
    assert shared.hopper_kernels(wanted, x, torch.float16) is None
    assert shared.hopper_kernels(wanted, x[..., :64], torch.bfloat16) is None
    assert shared.hopper_kernels(wanted, x[:0], torch.bfloat16) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_what_the_copy_engine_cannot_read_runs_the_other_kernels(dtype):
    x, wanted = torch.empty(3, C, dtype=dtype), {"gluon": {"registers": 240}}
    shifted = torch.empty(3 * C + 1, dtype=dtype)[1:].view(3, C)
    assert shared.hopper_kernels(wanted, x, torch.bfloat16, x) is not None
    assert shared.hopper_kernels(wanted, shifted, torch.bfloat16) is None
    assert shared.hopper_kernels(wanted, x, torch.bfloat16, x, shifted) is None
    assert shared.hopper_kernels(wanted, x, torch.bfloat16, x.double()) is None


def test_the_stride_of_a_single_row_may_be_anything():
    row = torch.empty(C, dtype=torch.bfloat16).as_strided((1, C), (5, 1))
    assert launch._rows(row).strides == [16, 1]


@pytest.mark.gate
@pytest.mark.parametrize("case", list(offline.cases(full=os.environ.get("MEGAFOLD_GATE") == "full")), ids=str)
def test_kernels_compile_and_fit(case):
    compiled = case.compile()
    assert compiled.shared_bytes <= SHARED_MEMORY_CAP["sm_90"]
    assert not compiled.spill_bytes and compiled.matrix_instructions and not compiled.early_releases


def test_the_gate_compiles_what_the_table_ships():
    table = triton_support.shipped_table("evofusion", "sm_90")["configs"]
    shipped = {name: by_bits["16"]["gluon"] for name, by_bits in table.items() if "gluon" in by_bits.get("16", {})}
    names = {"norm_project": "project", "norm_project_gradient": "input_gradient"}
    names |= {"triangle_output_gradient": "triangle_output_weights", "triangle_input_gradient": "triangle_both"}
    # What runs in place of the kernel that multiplies for the output's weights has its registers from the launcher.
    assert {names.get(name, name) for name in shipped} == offline.KERNELS.keys() - {"triangle_output_gradient"}
    for name, config in shipped.items():
        constants = {"REGISTERS": 240} | offline.KERNELS[names.get(name, name)][2]
        assert config == {option: constants[option.upper()] for option in config}, name
