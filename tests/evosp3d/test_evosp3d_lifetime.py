"""A worker that measures one point after another: nothing of a closed point stays, and the next one works."""

from __future__ import annotations

import gc
import weakref
from functools import partial

import pytest
import torch
from torch import nn

from experiments.spec import load_sweep

TINY = ["model=tiny", "dtype=fp32", "msa_depth=3", "atoms_per_token=3", "visits=1", "warmup=0", "repeats=1"]


def _sweep(*settings: str):
    return load_sweep("sequence_parallel", size="demo", settings=[*TINY, "timeout_s=200", *settings])


def test_a_reducer_ends_with_what_holds_it_and_not_with_its_parameters():
    from megafold.evosp3d.emulate import emulated_ranks
    from megafold.evosp3d.reduce import GradientReducer

    with emulated_ranks(2):
        layer = nn.Linear(3, 2)
        reducer = GradientReducer(layer.parameters(), dp=1)
        layer(torch.randn(4, 3)).sum().backward()
        reducer.finish()
        weight, held = weakref.ref(layer.weight), weakref.ref(reducer)
        del layer, reducer
        gc.collect()
        assert held() is None and weight() is None
        layer = nn.Linear(3, 2)  # one that outlives its reducer computes on
        reducer = GradientReducer(layer.parameters(), dp=1)
        del reducer
        gc.collect()
        layer(torch.randn(4, 3)).sum().backward()
        assert layer.weight.grad is not None


@pytest.fixture
def graphs_on_a_cpu(monkeypatch):
    from experiments.contenders import sequence_parallel
    from megafold.model import replacements
    from megafold.model.build import build_model
    from megafold.model.graphs import BlockGraphs, Emulated

    checkpointed = partial(build_model, checkpoint_trunk_pairformer=True)  # a condition of graphs
    monkeypatch.setattr(sequence_parallel, "build_model", checkpointed)
    monkeypatch.setattr(replacements, "BlockGraphs", lambda: BlockGraphs(Emulated()))


@pytest.mark.usefixtures("graphs_on_a_cpu")
@pytest.mark.parametrize("outcome", ["ok", "oom-in-forward", "oom-in-reduction"])
def test_nothing_of_a_closed_point_stays_in_its_worker(outcome, monkeypatch):
    from experiments.contenders.sequence_parallel import SequenceParallelSession
    from experiments.worker import Worker
    from megafold.model.graphs import GRAPHS
    from megafold.train.parallel import Parallel

    kept = []
    build = SequenceParallelSession._build

    def noting(session):
        build(session)
        model, state = session._trainer.model, session._trainer.optimizer.state
        kept.extend(weakref.ref(parameter) for parameter in model.parameters())
        kept.extend(weakref.ref(v) for values in state.values() for v in values.values())
        kept.extend(weakref.ref(part) for part in (model, session._trainer, session._parallel, session))
        kept.append(weakref.ref(model.pairformer.__dict__[GRAPHS]))
        assert model.pairformer.__dict__[GRAPHS].shapes > 0  # of the short step
        if outcome == "oom-in-forward":
            model.distogram_head.register_forward_pre_hook(_full)
        elif outcome == "oom-in-reduction":
            monkeypatch.setattr(Parallel, "reduce", _full)

    monkeypatch.setattr(SequenceParallelSession, "_build", noting)
    replies = []
    worker = Worker(replies.append)
    point = _sweep("mode=emulated", "sp=2", "n_tokens=9").comparisons[0].points[0].as_dict()
    worker.handle({"do": "open", "point": point, "cache": None})
    worker.handle({"do": "visit", "warmup": 0, "repeats": 1})
    if outcome == "ok":
        worker.handle({"do": "close"})
    assert replies[-1]["status"] == outcome[:3].rstrip("-"), replies[-1]
    assert len(kept) > 100
    assert sum(reference() is not None for reference in kept) == 0


def _full(*_):
    raise torch.OutOfMemoryError("out of memory, as a device would say it")


@pytest.mark.usefixtures("graphs_on_a_cpu")
def test_graphs_are_gone_where_weights_move():
    from experiments.contenders.sequence_parallel import SequenceParallelSession
    from experiments.providers import Context
    from megafold.model.graphs import GRAPHS

    setting = ["sp=2", "mode=emulated", "visits=2", "n_tokens=9"]
    session = SequenceParallelSession(Context(_sweep(*setting).comparisons[0].points[0], None, "cpu"))
    session.suspend()
    session.resume()
    graphs = session._trainer.model.pairformer.__dict__[GRAPHS]
    session.step()
    assert graphs.shapes > 0
    session.suspend()
    assert graphs.shapes == 0
    session.resume()
    session.step()
    session.close()


def test_what_an_earlier_point_left_on_the_device_is_told(monkeypatch):
    from experiments.contenders.sequence_parallel import _left_behind

    held = 0
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: held)
    assert _left_behind(torch.device("cuda")) == _left_behind(torch.device("cpu")) == []
    held = 7 << 30
    assert _left_behind(torch.device("cuda", 1)) == ["peaks hold 7.00 GiB that were there before the model"]
    assert _left_behind(torch.device("cpu")) == []


@pytest.mark.parametrize(("mode", "warmup", "steps"), [("measured", 0, 2), ("measured", 1, 1), ("emulated", 1, 2)])
def test_the_optimizer_has_its_state_before_a_peak_is_taken(mode, warmup, steps, monkeypatch):
    """Steps of the trainer before and with the first one: a short one comes first where nothing warms up."""
    from experiments.contenders.sequence_parallel import SequenceParallelSession
    from experiments.providers import Context

    setting = ["sp=1", f"mode={mode}", f"warmup={warmup}", "n_tokens=9"]
    session = SequenceParallelSession(Context(_sweep(*setting).comparisons[0].points[0], None, "cpu"))
    session.resume()
    session.step()
    assert session._trainer.steps == steps
    session.close()
