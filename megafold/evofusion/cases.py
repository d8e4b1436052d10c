"""The operators on random inputs beside their references: what tests, `megafold verify` and the kernels sweep run.

A case draws its inputs in float32 and casts them, so that every dtype sees the same numbers but for rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from megafold.evofusion.attention_output import reference as attention_output_reference
from megafold.evofusion.attention_output.api import attention_output, gated
from megafold.evofusion.conditioned import reference as conditioned_reference
from megafold.evofusion.conditioned.api import adaptive_norm, condition_gate, conditioned_transition
from megafold.evofusion.msa import reference as msa_reference
from megafold.evofusion.msa.api import outer_product_mean, pair_weighted_averaging
from megafold.evofusion.norm_project import reference as norm_project_reference
from megafold.evofusion.norm_project.api import norm_project, norm_project_and_pass
from megafold.evofusion.smooth_lddt import reference as smooth_lddt_reference
from megafold.evofusion.smooth_lddt.api import smooth_lddt_loss
from megafold.evofusion.transition import reference as transition_reference
from megafold.evofusion.transition.api import transition
from megafold.evofusion.triangle_multiplication import reference as triangle_reference
from megafold.evofusion.triangle_multiplication.api import triangle_multiplication
from megafold.evofusion.windowed_attention import reference as windowed_reference
from megafold.evofusion.windowed_attention.api import windowed_attention
from megafold.testing import CheckResult, check_budget, gradients_by_name


@dataclass
class Case:
    """One operator on one set of inputs.

    Attributes:
        operator, reference: take the inputs by name and return a tensor or several.
        inputs: tensors that gradients are taken for. seed: of the cotangents.
        vanishing: see `check_budget`.
    """

    operator: Callable[..., Tensor | Sequence[Tensor]]
    reference: Callable[..., Tensor | Sequence[Tensor]]
    inputs: dict[str, Tensor] = field(repr=False)
    seed: int = 0
    vanishing: dict[str, str] = field(default_factory=dict)

    def run(self, *, reference: bool = False, double: bool = False) -> dict[str, Tensor]:
        """Outputs and gradients by name, of the operator or its reference."""
        inputs = {name: t.double() for name, t in self.inputs.items()} if double else self.inputs
        return gradients_by_name(self.reference if reference else self.operator, inputs, self.seed)

    def judge(self, found: dict[str, Tensor], eager: dict[str, Tensor], exact: dict[str, Tensor]) -> list[CheckResult]:
        """The error budget for what several runs gave."""
        return check_budget(found, eager, exact, self.vanishing)

    def check(self, *, repeat: bool = True) -> list[CheckResult]:
        """The error budget for every output and gradient; with `repeat` three runs that must be bit-identical, too:
        the third is the first that repeats what was recorded (see `megafold.replay`)."""
        found = self.run()
        results = self.judge(found, self.run(reference=True), self.run(reference=True, double=True))
        if not repeat:
            return results
        more = [self.run() for _ in range(2)]
        same = all(torch.equal(found[name], again[name]) for again in more for name in found)
        return [*results, CheckResult("repeatable", same, "three runs bit-identical" if same else "three runs differ")]


class Draw:
    """Random tensors of one dtype and device."""

    def __init__(self, dtype: torch.dtype, device: torch.device | str, seed: int = 0) -> None:
        self.dtype, self.device = dtype, torch.device(device)
        self._generator = torch.Generator(self.device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, mean: float = 0.0) -> Tensor:
        """Normally distributed."""
        return (torch.randn(shape, generator=self._generator, device=self.device) * scale + mean).to(self.dtype)

    def weight(self, outputs: int, inputs: int) -> Tensor:
        """A projection that keeps the size of what it is given."""
        return self.normal(outputs, inputs, scale=inputs**-0.5)

    def norm(self, width: int) -> tuple[Tensor, Tensor]:
        """Weight and bias of a LayerNorm."""
        return self.normal(width, scale=0.2, mean=1.0), self.normal(width, scale=0.2)

    def keep(self, *shape: int, share: float = 0.8) -> Tensor:
        """True with the given probability."""
        return torch.rand(shape, generator=self._generator, device=self.device) < share

    def dropped(self, *shape: int) -> Tensor:
        """The factor of a dropout with p = 0.25."""
        return (self.keep(*shape, share=0.75) / 0.75).to(self.dtype)


def triangle_multiplication_case(
    draw: Draw,
    size: int,
    width: int = 128,
    *,
    batch: int = 1,
    mix: str = "outgoing",
    masked: bool = False,
    shared: str | None = None,
    residual: bool = True,
    keep_operands: bool | None = False,
) -> Case:
    """AF3 algorithms 12, 13; `shared`: "row" or "col" dropout."""
    mask = draw.keep(batch, size) if masked else None
    pair_mask = None if mask is None else mask[:, :, None] & mask[:, None, :]
    shape = {"row": (batch, 1, size, width), "col": (batch, size, 1, width)}.get(shared)
    dropped = None if shape is None else draw.dropped(*shape)
    names = ("norm_weight", "norm_bias", "out_norm_weight", "out_norm_bias")
    inputs = {"x": draw.normal(batch, size, size, width)}
    inputs |= dict(zip(names, (*draw.norm(width), *draw.norm(width))))
    inputs |= {"in_weight": draw.weight(4 * width, width)}
    inputs |= {name: draw.weight(width, width) for name in ("gate_weight", "out_weight")}
    outgoing = mix == "outgoing"
    return Case(
        lambda **t: triangle_multiplication(
            **t, mix=mix, mask=mask, dropped=dropped, residual=residual, keep_operands=keep_operands
        ),
        lambda **t: triangle_reference.triangle_multiplication(
            **t, outgoing=outgoing, mask=pair_mask, dropped=dropped, residual=residual
        ),
        inputs,
    )


def transition_case(
    draw: Draw, rows: Sequence[int], width: int = 128, inner: int = 0, *, norm: bool = True, residual: bool = True
) -> Case:
    """AF3 algorithm 11; `inner` is twice the width by default, as in the stock model."""
    inner = inner or 2 * width
    inputs = {"x": draw.normal(*rows, width)}
    inputs |= dict(zip(("norm_weight", "norm_bias"), draw.norm(width))) if norm else {}
    inputs |= {"in_weight": draw.weight(2 * inner, width), "out_weight": draw.weight(width, inner)}
    fixed = {"residual": residual} | ({} if norm else {"norm_weight": None, "norm_bias": None})
    return Case(lambda **t: transition(**t, **fixed), lambda **t: transition_reference.transition(**t, **fixed), inputs)


def norm_project_case(
    draw: Draw,
    rows: Sequence[int],
    width: int = 128,
    *,
    outputs: int = 128,
    count: int = 4,
    heads: int = 4,
    bias: bool = True,
    norm_bias: bool = True,
    passes: bool = False,
) -> Case:
    """LayerNorm, `count` projections (the first with a bias, as the stock queries), heads; with `passes` x itself."""
    gamma, beta = draw.norm(width)
    inputs = {"x": draw.normal(*rows, width), "norm_weight": gamma} | ({"norm_bias": beta} if norm_bias else {})
    inputs |= {f"weight{p}": draw.weight(outputs, width) for p in range(count)}
    inputs |= {"bias0": draw.normal(outputs)} if bias and count else {}
    inputs |= {"head_weight": draw.weight(heads, width)} if heads else {}

    def parts(t: dict[str, Tensor]) -> tuple:
        weights = [t[f"weight{p}"] for p in range(count)]
        biases = [t["bias0"], *[None] * (count - 1)] if "bias0" in t else None
        return t["x"], t["norm_weight"], t.get("norm_bias"), weights, biases, t.get("head_weight")

    def flat(result: tuple[list[Tensor], Tensor | None]) -> list[Tensor]:
        return [*result[0], *([] if result[1] is None else [result[1]])]

    def reference(**t: Tensor) -> list[Tensor]:
        x, gamma, beta, weights, biases, head_weight = parts(t)
        bias = None if biases is None else torch.cat([biases[0], *(biases[0] * 0,) * (count - 1)])
        weight = torch.cat(weights) if weights else None
        return flat(norm_project_reference.norm_project(x, gamma, beta, weight, bias, head_weight, count))

    def passing(**t: Tensor) -> list[Tensor]:
        *result, x = norm_project_and_pass(*parts(t))
        return [*flat(result), x]

    if passes:
        return Case(passing, lambda **t: [*reference(**t), t["x"].view_as(t["x"])], inputs)
    return Case(lambda **t: flat(norm_project(*parts(t))), reference, inputs)


def attention_output_case(
    draw: Draw,
    shape: Sequence[int],
    width: int = 128,
    inner: int = 128,
    *,
    gated: bool = True,
    shared: str | None = None,
    residual: bool = True,
) -> Case:
    """The end of AF3 algorithms 14, 15 on [B, I, J, inner]."""
    batch, rows, columns = shape
    inputs = {"attended": draw.normal(*shape, inner), "weight": draw.weight(width, inner)}
    inputs |= {"gate": draw.normal(*shape, inner)} if gated else {}
    inputs |= {"residual": draw.normal(*shape, width)} if residual else {}
    sizes = {"row": (batch, 1, columns, width), "col": (batch, rows, 1, width)}.get(shared)
    fixed = {"dropped": None if sizes is None else draw.dropped(*sizes)} | ({} if residual else {"residual": None})

    def operator(attended: Tensor, weight: Tensor, gate: Tensor | None = None, **t: Tensor) -> Tensor:
        return attention_output(attended, gate, weight, **t, **fixed)

    def reference(attended: Tensor, weight: Tensor, gate: Tensor | None = None, **t: Tensor) -> Tensor:
        return attention_output_reference.attention_output(attended, gate, weight, **t, **fixed)

    return Case(operator, reference, inputs)


def gated_case(draw: Draw, rows: Sequence[int], width: int) -> Case:
    """The output gate of an attention over wide rows."""
    inputs = {"value": draw.normal(*rows, width), "gate": draw.normal(*rows, width)}
    return Case(gated, lambda value, gate: value * gate.sigmoid(), inputs)


def adaptive_norm_case(draw: Draw, rows: Sequence[int], width: int = 128, depth: int = 128) -> Case:
    """AF3 algorithm 26."""
    return Case(adaptive_norm, conditioned_reference.adaptive_norm, _adaptive_inputs(draw, rows, width, depth))


def condition_gate_case(
    draw: Draw, rows: Sequence[int], width: int = 128, depth: int = 128, *, residual: bool = True
) -> Case:
    """The end of AF3 algorithm 25."""
    inputs = {
        "y": draw.normal(*rows, width),
        "cond": draw.normal(*rows, depth),
        "weight": draw.weight(width, depth),
        "bias": draw.normal(width),
    } | ({"residual": draw.normal(*rows, width)} if residual else {})
    return Case(condition_gate, conditioned_reference.condition_gate, inputs)


def conditioned_transition_case(draw: Draw, rows: Sequence[int], width: int = 128, depth: int = 128) -> Case:
    """AF3 algorithm 25 around a transition, with the residual."""
    inputs = _adaptive_inputs(draw, rows, width, depth)
    inputs |= {"in_weight": draw.weight(4 * width, width), "out_weight": draw.weight(width, 2 * width)}
    inputs |= {"gate_weight": draw.weight(width, depth), "gate_bias": draw.normal(width)}

    def reference(x, cond, in_weight, out_weight, gate_weight, gate_bias, **t):
        adapted = conditioned_reference.adaptive_norm(x, cond, **t)
        y = transition_reference.transition(adapted, None, None, in_weight, out_weight, residual=False)
        return conditioned_reference.condition_gate(y, cond, gate_weight, gate_bias, x)

    return Case(conditioned_transition, reference, inputs)


def windowed_attention_case(
    draw: Draw,
    atoms: int,
    *,
    batch: int = 1,
    heads: int = 4,
    dim: int = 64,
    window: int = 27,
    masked: bool = False,
) -> Case:
    """Atoms in their window and the one before; with `masked` both masks, and a query that sees nothing."""
    windows = -(-atoms // window)
    mask = draw.keep(batch, atoms) if masked else None
    windowed_mask = draw.keep(batch, windows, window, 2 * window, share=0.6) if masked else None
    if masked:
        windowed_mask[0, 0, 0] = False
    # Slices of one projection, as the stock keys and values are.
    joined = draw.normal(batch, atoms, heads, 3 * dim)
    inputs = dict(zip(("q", "k", "v"), joined.split(dim, dim=-1)))
    inputs |= {"bias": draw.normal(batch, heads, windows, window, 2 * window)}
    fixed = {"mask": mask, "windowed_mask": windowed_mask, "scale": dim**-0.5}
    return Case(
        lambda **t: windowed_attention(**t, **fixed),
        lambda **t: windowed_reference.windowed_attention(**t, **fixed),
        inputs,
    )


def outer_product_mean_case(
    draw: Draw, depth: int, size: int, *, width: int = 64, hidden: int = 32, outputs: int = 128, masked: bool = False
) -> Case:
    """AF3 algorithm 9."""
    gamma, beta = draw.norm(width)
    inputs = {"msa": draw.normal(1, depth, size, width), "norm_weight": gamma, "norm_bias": beta}
    inputs |= {"hidden_weight": draw.weight(2 * hidden, width), "out_weight": draw.weight(outputs, hidden * hidden)}
    inputs |= {"out_bias": draw.normal(outputs)}
    fixed = {"mask": draw.keep(1, size) if masked else None, "msa_mask": draw.keep(1, depth) if masked else None}
    return Case(
        lambda **t: outer_product_mean(**t, **fixed),
        lambda **t: msa_reference.outer_product_mean(**t, **fixed, eps=1e-5),
        inputs,
    )


def pair_weighted_averaging_case(
    draw: Draw,
    depth: int,
    size: int,
    *,
    width: int = 64,
    pair_width: int = 128,
    heads: int = 8,
    inner: int = 256,
    batch: int = 1,
    masked: bool = True,
    shared: str | None = "row",
    residual: bool = True,
) -> Case:
    """AF3 algorithm 10; `shared`: "row" or "col" dropout."""
    inputs = {"msa": draw.normal(batch, depth, size, width), "pair": draw.normal(batch, size, size, pair_width)}
    inputs |= dict(zip(("msa_norm_weight", "msa_norm_bias"), draw.norm(width)))
    inputs |= {"values_gates_weight": draw.weight(2 * inner, width)}
    inputs |= dict(zip(("pair_norm_weight", "pair_norm_bias"), draw.norm(pair_width)))
    inputs |= {"bias_weight": draw.weight(heads, pair_width), "out_weight": draw.weight(width, inner)}
    mask = draw.keep(batch, size) if masked else None
    if mask is not None:
        mask[:, 0] = True
    shape = {"row": (batch, 1, size, width), "col": (batch, depth, 1, width)}.get(shared)
    fixed = {"mask": mask, "dropped": None if shape is None else draw.dropped(*shape), "residual": residual}
    return Case(
        lambda **t: pair_weighted_averaging(**t, **fixed),
        lambda **t: msa_reference.pair_weighted_averaging(**t, **fixed),
        inputs,
        # It shifts all logits of a row alike, to which a softmax is blind.
        vanishing={"dpair_norm_bias": "dpair_norm_weight"},
    )


def smooth_lddt_case(draw: Draw, atoms: int, *, batch: int = 2, masked: bool = True) -> Case:
    """AF3 algorithm 27; coordinates spread so that some pairs are beyond each cutoff."""
    true = draw.normal(batch, atoms, 3, scale=8.0)
    is_dna, is_rna = draw.keep(batch, atoms, share=0.3), draw.keep(batch, atoms, share=0.3)
    mask = draw.keep(batch, atoms) if masked else None

    def operator(pred: Tensor) -> Tensor:
        return smooth_lddt_loss(pred, true, is_dna, is_rna, mask, reduction="none")

    def reference(pred: Tensor) -> Tensor:
        return 1.0 - smooth_lddt_reference.smooth_lddt(pred, true.to(pred.dtype), is_dna | is_rna, mask, 30.0, 15.0)

    return Case(operator, reference, {"pred": true + draw.normal(batch, atoms, 3, scale=2.0)})


def _adaptive_inputs(draw: Draw, rows: Sequence[int], width: int, depth: int) -> dict[str, Tensor]:
    return {
        "x": draw.normal(*rows, width),
        "cond": draw.normal(*rows, depth),
        "cond_norm_weight": draw.norm(depth)[0],
        "gamma_weight": draw.weight(width, depth),
        "gamma_bias": draw.normal(width),
        "beta_weight": draw.weight(width, depth),
    }
