"""Steps of two replicas whose structures do not train the same weights, against one process with both structures."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from megafold.train.optimizer import OptimizerSettings
from megafold.train.trainer import Trainer

SETTINGS = OptimizerSettings(learning_rate=0.1, warmup_steps=1, weight_decay=0.3, clip_grad_norm=0.5)


class Terms(NamedTuple):
    squares: torch.Tensor


class Parts(nn.Module):
    """Layers that all structures, that one structure, and that none trains."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all, self.one, self.none = (nn.Linear(3, 3, dtype=torch.float64) for _ in range(3))

    def forward(self, *, x, is_one, return_loss_breakdown):
        losses = []
        for structure, one in zip(x, is_one.tolist()):
            y = self.all(structure)
            losses.append((self.one(y) if one else y).square().mean())
        loss = torch.stack(losses).mean()
        return loss, Terms(loss)


def _batches(broken_step=None):
    x = torch.randn(3, 2, 4, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if broken_step is not None:
        x[broken_step, 1] = torch.nan
    return [{"x": step, "is_one": torch.tensor([False, True])} for step in x]


class _Replicas:
    """What the trainer asks of ranks, for a model that is on each of them."""

    def __init__(self, model) -> None:
        from megafold.evosp3d.reduce import GradientReducer

        self._reducer = GradientReducer(model.parameters(), dp=2, bucket_bytes=64)

    def local(self, batch):
        rank = torch.distributed.get_rank()
        return {name: value[rank : rank + 1] for name, value in batch.items()}

    def reduce(self):
        return self._reducer.sum()

    def mean(self, loss, terms):
        loss = loss.clone()
        torch.distributed.all_reduce(loss)
        return loss / 2, terms


def _train(parallel, broken_step):
    model = Parts()
    trainer = Trainer(model, SETTINGS, parallel=_Replicas(model) if parallel else None)
    skipped = [trainer.step(batch).skipped for batch in _batches(broken_step)]
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return skipped, weights, {name for name, parameter in model.named_parameters() if parameter.grad is not None}


@pytest.mark.parametrize("broken_step", [None, 1], ids=["", "one step is skipped"])
def test_weights_that_one_replica_trains_and_weights_that_none_trains(run_ranks, broken_step):
    skipped, weights, _ = _train(False, broken_step)
    before = dict(Parts().named_parameters())
    assert skipped == [False, broken_step is not None, False]
    for found in run_ranks(2, _train, True, broken_step):
        assert found[0] == skipped
        for name, value in weights.items():
            torch.testing.assert_close(found[1][name], value, rtol=1e-12, atol=1e-14)
            assert torch.equal(value, before[name]) == name.startswith("none."), name
        assert found[2] == {name for name in weights if not name.startswith("none.")}
