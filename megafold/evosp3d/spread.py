"""The four functions of einx that the stock code applies to pairs, for ranks that hold no row as well.

einx cannot solve for an axis of length 0, and brings a plain number to the device by a copy that the host waits for;
elsewhere it is used as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import einx
import torch
from torch import Tensor

from megafold.model.rebind import Stand

_OPERATIONS = {"add": operator.add, "multiply": operator.mul, "divide": operator.truediv, "where": torch.where}


def einx_of_rows(**replaced: Callable[..., Any]) -> Stand:
    """``einx`` whose add, multiply, divide and where take numbers and empty tensors; ``replaced`` as given."""

    def safe(name: str) -> Callable[..., Tensor]:
        def call(pattern: str, *values: Any) -> Tensor:
            if not all(torch.is_tensor(value) and value.numel() for value in values):
                return _OPERATIONS[name](*spread(pattern, *values))
            return getattr(einx, name)(pattern, *values)

        return call

    return Stand(einx, **{name: safe(name) for name in _OPERATIONS} | replaced)


def spread(pattern: str, *values: Any) -> list[Any]:
    """Values of ``"a b, b c -> a b c"`` with their axes where the output has them, ready to broadcast."""
    inputs, _, output = pattern.partition("->")
    axes_of = [part.split() for part in inputs.split(",")]
    if not output.strip():  # the longest input is the output
        output = " ".join(max(axes_of, key=len))
    names: list[str] = []
    for axes, value in zip(axes_of, values):
        if "..." in axes:
            names = [f".{i}" for i in range(value.ndim - len(axes) + 1)]
            axes[axes.index("...") : axes.index("...") + 1] = names
    order = [axis for part in output.split() for axis in (names if part == "..." else [part])]
    found = []
    for axes, value in zip(axes_of, values):
        if torch.is_tensor(value) and axes:
            value = value.permute([axes.index(axis) for axis in order if axis in axes])
            for place, axis in enumerate(order):
                value = value if axis in axes else value.unsqueeze(place)
        found.append(value)
    return found
