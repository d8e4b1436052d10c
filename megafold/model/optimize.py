"""``optimize(model, plan)``: a stock model computes through MegaFold; ``restore(model)``: it is stock again.

Only methods of single modules are replaced, on the instance; parameters, buffers, their names, hooks and other models
stay as they are. What replaces what is listed in :mod:`megafold.model.replacements`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from types import MethodType
from typing import Any

from alphafold3_pytorch import alphafold3 as stock
from torch.nn import Module

from megafold.model.plan import Plan
from megafold.model.replacements import replacements

_STATE = "_megafold_replaced"


@dataclass
class OptimizeReport:
    """What :func:`optimize` did.

    Attributes:
        replaced: how many methods were replaced, by "kind (how)".
        not_replaced: (path of the module, "switch: reason") for what a switch is for but does not reach.
        notes: what runs in another way than the switches' names say, and where, in one line each.
    """

    replaced: dict[str, int] = field(default_factory=Counter)
    not_replaced: list[tuple[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "replaced": dict(self.replaced)}


def optimize(model: stock.Alphafold3, plan: Plan | None = None, *, rollouts: int | None = None) -> OptimizeReport:
    """Make ``model`` compute as ``plan`` says (default: ``Plan()``), whatever plan it had before.

    Calling it twice with one plan is as calling it once; another plan takes the place of the first. With dropout off
    the loss and every gradient equal the stock model's up to rounding, and random numbers are drawn in the same order;
    with dropout on, the single attention and the confidence head draw other numbers of the same distribution.

    Args:
        rollouts: structures that are rolled out for the confidence head, of each in the batch. None: as many as there
            are augmentations, as in the stock model; 1: as AF3 does. Another number is another workload.

    Raises:
        TypeError: when ``model`` is not an ``Alphafold3`` (of a wrapper pass what is inside).
        ValueError: for ``rollouts`` below 1, or where the plan or the model leaves the stock forward in place.
    """
    if not isinstance(model, stock.Alphafold3):
        raise TypeError(f"optimize takes an alphafold3_pytorch.Alphafold3, not {type(model).__name__}")
    plan = plan or Plan()
    restore(model)
    report = OptimizeReport()
    for path, name, value, kind in replacements(model, plan, report.not_replaced, report.notes, rollouts):
        module = model.get_submodule(path)
        model.__dict__.setdefault(_STATE, []).append((path, name, module.__dict__.get(name)))
        module.__dict__[name] = MethodType(value, module) if callable(value) else value
        report.replaced[kind] += 1
    return report


def restore(model: Module) -> None:
    """Undo :func:`optimize`: the model computes as before it, bit for bit. Does nothing to a model that is stock."""
    for path, name, before in reversed(model.__dict__.pop(_STATE, [])):
        attributes = model.get_submodule(path).__dict__
        if before is None:
            del attributes[name]
        else:
            attributes[name] = before
