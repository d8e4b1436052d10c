"""What makes the host wait for the device in a rank's forward: nothing once the chains are known."""

from __future__ import annotations

import sys
import traceback

import einx
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megafold.evosp3d.spread import einx_of_rows


@pytest.mark.parametrize(
    ("pattern", "shapes", "number"),
    [("b n, b n c, -> b n c", ((2, 3), (2, 3, 4)), 0.5), ("... i, j -> ... i j", ((2, 3), (4,)), None)],
)
def test_numbers_take_no_way_through_einx(pattern, shapes, number, monkeypatch):
    draw = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=draw) for shape in shapes]
    name = "add" if number is None else "where"
    values = values if number is None else [values[0] > 0, values[1], number]
    expected = getattr(einx, name)(pattern, *values)
    if number is not None:  # it makes a tensor on the device of them, by a copy that is waited for
        monkeypatch.setattr(einx, name, None)
    found = getattr(einx_of_rows(), name)(pattern, *values)
    assert torch.equal(found, expected)


class _Reads(TorchDispatchMode):
    """Which functions, from the inside out, read a number of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_by: list[list[str]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function is torch.ops.aten._local_scalar_dense.default:
            frames = traceback.walk_stack(sys._getframe(1))
            self.asked_by.append([frame.f_code.co_qualname for frame, _ in frames])
        return function(*args, **(kwargs or {}))


def _ready_forward(helpers, make_model):
    from megafold.evosp3d.parallelize import parallelize
    from megafold.model.optimize import optimize
    from megafold.model.plan import Plan

    model, batch = make_model().float(), helpers._batch(7)
    batch["additional_molecule_feats"][..., 2] = 0  # one chain: several are searched
    optimize(model, Plan())
    parallelize(model, None, Plan())
    return lambda: model(**batch)


def test_a_forward_reads_numbers_of_the_chains_on_the_host_alone(helpers, make_model):
    forward = _ready_forward(helpers, make_model)
    with _Reads() as reads:
        forward()
    # The ids of chains were copied to the host before the trunk; on a CPU these reads look like any other.
    assert [names[:4] for names in reads.asked_by if "Chains.is_one" not in names] == []
    assert reads.asked_by


def test_a_forward_gives_einx_no_numbers(helpers, make_model, monkeypatch):
    """It makes a tensor of them on the host and copies it to the device: a copy that waits for the whole trunk."""
    forward = _ready_forward(helpers, make_model)
    numbers = []

    def watched(function):
        def call(pattern, *values, **kwargs):
            numbers.extend(pattern for value in values if not torch.is_tensor(value))
            return function(pattern, *values, **kwargs)

        return call

    for name in ("where", "add", "multiply", "divide", "subtract"):
        monkeypatch.setattr(einx, name, watched(getattr(einx, name)))
    forward()
    assert numbers == []
