"""A training step's session on a CPU: what it holds and when, the profiled step, the weights that it starts from."""

from __future__ import annotations

import gc
import math
import weakref
from dataclasses import replace

import pytest
import torch

from experiments.contenders import iteration
from experiments.contenders.iteration import IterationSession, loads_kernels, megafold_preparation
from experiments.providers import Context
from experiments.spec import load_sweep
from megafold.metrics.activity import Activity

SIZES = ["model=tiny", "dtype=fp32", "data=synthetic", "n_tokens=12", "msa_depth=3", "atoms_per_token=3"]


def context_of(contender: str = "eager", **protocol: int) -> Context:
    counts = [f"{name}={value}" for name, value in {"visits": 1, "warmup": 0, "repeats": 1, **protocol}.items()]
    (comparison,) = load_sweep("iteration", settings=[*SIZES, *counts]).comparisons
    point = next(point for point in comparison.points if point.contender.name == contender)
    return Context(point, None, "cpu")


def session(contender: str = "eager", **protocol: int) -> IterationSession:
    context = context_of(contender, **protocol)
    prepare = megafold_preparation(context.point.contender, "core") if contender == "megafold" else None
    return IterationSession(context, prepare)


def test_a_model_is_held_from_the_first_visit_to_the_last_alone():
    one = session(visits=2)
    one.suspend()  # as a worker does that has set a point up
    assert one._trainer is None
    samples = []
    for visit in range(2):
        one.resume()
        samples.append(one.step())
        model = weakref.ref(one._trainer.model)
        one.suspend()
        gc.collect()
        assert (model() is None) == (visit == 1)
    metrics = one.finish({name: [sample[name] for sample in samples] for name in samples[0]})
    assert metrics["iteration_time"].n == 2 and metrics["parameters"].value > 1e4
    assert one.memory() is None


@pytest.mark.parametrize("leave", ["suspend", "stay"])
def test_between_visits_training_goes_on_from_the_same_weights(leave):
    one = session(visits=3)
    one.resume()
    one.step()
    before = [parameter.detach().clone() for parameter in one._trainer.parameters]
    getattr(one, leave)()
    assert all(parameter.grad is None for parameter in one._trainer.parameters)
    one.resume()
    assert all(map(torch.equal, before, one._trainer.parameters))
    assert one._trainer.steps == 1


def test_all_contenders_start_from_the_same_weights():
    found = []
    for name in ("eager", "megafold"):
        one = session(name)
        torch.rand(3 if name == "eager" else 5)
        one.resume()
        found.append(one._trainer.model.state_dict())
    stock, ours = found
    assert list(stock) == list(ours)
    assert all(torch.equal(stock[name], ours[name]) for name in stock)


@pytest.mark.parametrize(
    ("protocol", "expected"),
    [
        ({"visits": 2, "repeats": 2}, [None, Activity(7, 3, 1)]),  # nothing is timed after a profile
        ({"visits": 1, "repeats": 1}, [Activity(7, 3, 1)]),
    ],
    ids=["last-of-two", "one"],
)
def test_a_step_is_profiled_once_after_the_last_visit(protocol, expected, monkeypatch):
    monkeypatch.setattr(iteration, "count_activity", lambda step: step() and Activity(7, 3, 1))
    monkeypatch.setattr(iteration, "SECONDS_TO_PROFILE", math.inf)
    one, found = session(**protocol), []
    one._profiles = True
    for _ in range(protocol["visits"]):
        one.resume()
        sample = one.step()
        one.suspend()
        found.append(one._activity)
    assert found == expected
    assert one.finish({name: [value] for name, value in sample.items()})["host_launches"].value == 7


@pytest.mark.parametrize(
    ("contender", "device", "contenders", "expected"),
    [
        ("megafold", "cuda", 11, True),
        ("eager", "cuda", 4, True),
        ("eager", "cuda", 3, False),
        ("compile", "cuda", 11, False),
        ("megafold", "cpu", 11, False),
    ],
)
def test_kernels_are_loaded_ahead_where_many_are_set_up_at_once(contender, device, contenders, expected):
    assert loads_kernels(replace(context_of(contender), device=device, contenders=contenders)) == expected


def test_nothing_is_kept_of_the_short_step_that_loads_kernels(monkeypatch):
    monkeypatch.setattr(iteration, "SHORT", {"n_tokens": 8, "msa_depth": 2})
    plain, one, made = session(), session(), []
    build = one._build

    def seen():
        trainer = build()
        made.append(weakref.ref(trainer.model))
        return trainer

    monkeypatch.setattr(one, "_build", seen)
    one._load_kernels()
    assert len(made) == 1 and made[0]() is None and one._trainer is None and one._visits == 0
    for each in (plain, one):
        each.resume()
    assert one._trainer.steps == 0
    assert all(map(torch.equal, plain._trainer.parameters, one._trainer.parameters))


def test_a_short_step_that_fails_is_told_and_no_failure(monkeypatch, capfd):
    def fail():
        raise torch.OutOfMemoryError("no room beside the others")

    one = session()
    monkeypatch.setattr(one, "_build", fail)
    one._load_kernels()
    assert "no short step: OutOfMemoryError: no room" in capfd.readouterr().out


def test_one_long_step_is_not_done_again_for_its_profile(monkeypatch):
    monkeypatch.setattr(iteration, "count_activity", lambda step: pytest.fail("profiled"))
    monkeypatch.setattr(iteration, "SECONDS_TO_PROFILE", 0.0)
    one = session()
    one._profiles = True
    one.resume()
    one.step()
    one.suspend()


def run_out(step):
    raise torch.OutOfMemoryError("no room for events")


def give_up(step):
    raise RuntimeError("CUPTI is\n  busy")


@pytest.mark.parametrize(
    ("count", "reason"),
    [
        (run_out, "out of memory under the profiler"),
        (give_up, "the profiler failed: CUPTI is busy"),
        (lambda step: Activity(0, 0, 2), "no launch was traced"),
    ],
    ids=["out-of-memory", "fails", "nothing-traced"],
)
def test_a_profile_that_fails_costs_its_counts_alone(count, reason, monkeypatch):
    monkeypatch.setattr(iteration, "count_activity", count)
    monkeypatch.setattr(iteration, "SECONDS_TO_PROFILE", math.inf)
    one = session()
    one._profiles = True
    one.resume()
    sample = one.step()
    one.suspend()
    metrics = one.finish({name: [value] for name, value in sample.items()})
    assert "host_launches" not in metrics and one.notes == [f"launches and waits were not counted: {reason}"]
