"""EvoFusion's operators and their contenders by themselves: right numbers first, then times, as for the attention."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments.contenders.floors import COPIES, operator_floor
from experiments.contenders.peers import need_gpu, need_module
from experiments.contenders.timed import TimedSession, relative_errors
from experiments.providers import Context, Unsupported
from megafold.evofusion import cases
from megafold.evofusion.cases import Case, Draw
from megafold.testing import gradients_by_name

Function = Callable[..., Tensor | Sequence[Tensor]]
CHECK_TOKENS = {"cpu": 13, "cuda": 128}
CHECK_COPIES = 2

WORKLOADS: dict[str, Callable[[Draw, int, int], Case]] = {
    # Inputs from a Draw, n tokens (8 n atoms) and a number of augmentations.
    "triangle_multiplication": lambda draw, n, copies: cases.triangle_multiplication_case(draw, n, keep_operands=None),
    "transition": lambda draw, n, copies: cases.transition_case(draw, (1, n, n)),
    "norm_project": lambda draw, n, copies: cases.norm_project_case(draw, (1, n, n)),
    "attention_output": lambda draw, n, copies: cases.attention_output_case(draw, (1, n, n)),
    "conditioned_transition_atoms": lambda draw, n, copies: cases.conditioned_transition_case(draw, (copies, 8 * n)),
    "conditioned_transition_tokens": lambda draw, n, copies: cases.conditioned_transition_case(
        draw, (copies, n), 768, 801
    ),
    "windowed_attention": lambda draw, n, copies: cases.windowed_attention_case(draw, 8 * n, batch=copies),
    "outer_product_mean": lambda draw, n, copies: cases.outer_product_mean_case(draw, 512, n),
    "pair_weighted_averaging": lambda draw, n, copies: cases.pair_weighted_averaging_case(draw, 512, n),
    "smooth_lddt": lambda draw, n, copies: cases.smooth_lddt_case(draw, 8 * n, batch=copies),
}


class OperatorSession(TimedSession):
    """One contender's operator at one length.

    Raises:
        Unsupported: the contender does not have the operator, or cannot run here.
        WrongNumbers: an output or a gradient is off by more than the error budget.
    """

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        setting, provider = context.point.setting, context.point.contender.provider
        self._workload, self._n = setting.workload, setting.size("n_tokens")
        self._find = _CONTENDERS.get((provider, self._workload)) or _CONTENDERS.get((provider, ""))
        if self._find is None:
            raise Unsupported(f"{provider} has no {self._workload}")
        if self._device == "cpu" and provider == "evofusion":
            self.notes.append("CPU: the PyTorch references of EvoFusion, not its kernels")
        tokens = CHECK_TOKENS[self._device]
        self.checked = f"N = {tokens}"
        case = self._case(tokens, CHECK_COPIES)
        exact = case.run(reference=True, double=True)
        found = gradients_by_name(self._find(case, self._device), case.inputs, case.seed)
        self._accept(case.judge(found, case.run(reference=True), exact))
        self.errors = relative_errors(found, exact)
        self.floor = operator_floor(self._workload, self._n, self._dtype.itemsize)

    def _case(self, tokens: int, copies: int) -> Case:
        return WORKLOADS[self._workload](Draw(self._dtype, self._device, self._seed), tokens, copies)

    def _prepare(self) -> tuple[Callable[[], Tensor | Sequence[Tensor]], list[Tensor]]:
        case = self._case(self._n, COPIES)
        leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}
        function = self._find(case, self._device)
        return lambda: function(**leaves), list(leaves.values())


def _eager(case: Case, device: str) -> Function:
    return case.reference


def _compile(case: Case, device: str) -> Function:
    return torch.compile(case.reference, dynamic=False)


def _evofusion(case: Case, device: str) -> Function:
    return case.operator


def _cuequivariance_triangle(case: Case, device: str) -> Function:
    need_gpu("cuequivariance", device, "nvidia")
    module = need_module("cuequivariance_torch")
    need_module("cuequivariance_ops_torch")

    def call(x: Tensor, in_weight: Tensor, **t: Tensor) -> Tensor:
        values, gates = in_weight.chunk(2)
        update = module.triangle_multiplicative_update(
            x,
            direction="outgoing",
            norm_in_weight=t["norm_weight"],
            norm_in_bias=t["norm_bias"],
            p_in_weight=values,
            g_in_weight=gates,
            norm_out_weight=t["out_norm_weight"],
            norm_out_bias=t["out_norm_bias"],
            p_out_weight=t["out_weight"],
            g_out_weight=t["gate_weight"],
        )
        return x + update

    return call


def _liger(device: str) -> Any:
    need_gpu("liger", device)
    return need_module("liger_kernel.transformers.functional")


def _liger_transition(case: Case, device: str) -> Function:
    module = _liger(device)

    def call(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, in_weight: Tensor, out_weight: Tensor) -> Tensor:
        normed = module.liger_layer_norm(x, norm_weight, norm_bias, 1e-5)
        values, gates = functional.linear(normed, in_weight).chunk(2, dim=-1)
        return x + functional.linear(module.liger_swiglu(gates, values), out_weight)

    return call


def _liger_norm_project(case: Case, device: str) -> Function:
    module = _liger(device)

    def call(x: Tensor, norm_weight: Tensor, norm_bias: Tensor, bias0: Tensor, **t: Tensor) -> list[Tensor]:
        normed = module.liger_layer_norm(x, norm_weight, norm_bias, 1e-5)
        head_weight = t.pop("head_weight")
        joined = torch.cat((*t.values(), head_weight))
        bias = torch.cat((bias0, bias0.new_zeros(joined.shape[0] - bias0.shape[0])))
        *rows, heads = functional.linear(normed, joined, bias).split([*map(len, t.values()), len(head_weight)], dim=-1)
        return [*rows, heads.movedim(-1, 1).contiguous()]

    return call


_CONTENDERS: dict[tuple[str, str], Callable[[Case, str], Function]] = {
    # By provider and workload; "" is every workload.
    ("eager", ""): _eager,
    ("compile", ""): _compile,
    ("evofusion", ""): _evofusion,
    ("cuequivariance", "triangle_multiplication"): _cuequivariance_triangle,
    ("liger", "transition"): _liger_transition,
    ("liger", "norm_project"): _liger_norm_project,
}
