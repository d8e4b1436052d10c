"""The training step on a small stand-in model: updates, schedule, failures, moving, times."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import nn

from megafold.train import offload
from megafold.train.optimizer import OptimizerSettings
from megafold.train.trainer import Trainer

SETTINGS = OptimizerSettings(learning_rate=0.1, warmup_steps=4, clip_grad_norm=1.0, decay_every=10)


class Breakdown(NamedTuple):
    squares: torch.Tensor


class Line(nn.Module):
    """A model with the calling convention of the stock model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.line = nn.Linear(3, 1)
        self.failure: Exception | None = None

    def forward(self, *, x, y, note=None, return_loss_breakdown):
        if self.failure is not None:
            raise self.failure
        loss = (self.line(x) - y).square().mean()
        return loss, Breakdown(loss)


def _batch(scale: float = 1.0) -> dict:
    x = torch.randn(16, 3, generator=torch.Generator().manual_seed(1))
    return {"x": x, "y": scale * x.sum(-1, keepdim=True), "note": None}


def _weights(trainer: Trainer) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in trainer.model.parameters()]


def test_steps_lower_the_loss_and_report_it():
    trainer = Trainer(Line(), SETTINGS)
    results = [trainer.step(_batch()) for _ in range(40)]
    assert results[-1].loss < 0.1 * results[0].loss
    assert results[0].breakdown == {"squares": results[0].loss}
    assert trainer.steps == 40
    assert not any(result.skipped for result in results)


def test_first_update_is_adamw_on_clipped_gradients():
    trainer = Trainer(Line(), SETTINGS)
    result = trainer.step(_batch(scale=50))
    reference = Line()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=0.1 / 4, betas=(0.9, 0.95), weight_decay=0.0)
    loss, _ = reference(**_batch(scale=50), return_loss_breakdown=True)
    loss.backward()
    norm = torch.cat([p.grad.flatten() for p in reference.parameters()]).norm()
    for parameter in reference.parameters():
        parameter.grad.mul_(1.0 / norm)
    optimizer.step()
    assert norm > 1
    assert result.grad_norm == pytest.approx(float(norm), rel=1e-5)
    for left, right in zip(_weights(trainer), reference.parameters()):
        torch.testing.assert_close(left, right.detach(), rtol=1e-5, atol=1e-7)


def test_schedule_warms_up_and_decays():
    rates = [SETTINGS.rate(step) for step in (0, 3, 4, 14)]
    assert rates == pytest.approx([0.025, 0.1, 0.1, 0.095])
    trainer = Trainer(Line(), SETTINGS)
    assert [trainer.step(_batch()).learning_rate for _ in range(2)] == pytest.approx([0.025, 0.05])


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_step_without_finite_gradient_changes_nothing_and_is_counted(poison):
    trainer = Trainer(Line(), SETTINGS)
    trainer.step(_batch())
    weights, moments = _weights(trainer), [s["exp_avg"].clone() for s in trainer.optimizer.state.values()]
    assert trainer.step(_batch(scale=poison)).skipped
    assert (trainer.steps, trainer.skipped, trainer.skipped_in_a_row) == (2, 1, 1)
    assert all(map(torch.equal, weights, _weights(trainer)))
    assert all(map(torch.equal, moments, [s["exp_avg"] for s in trainer.optimizer.state.values()]))
    assert not trainer.step(_batch()).skipped
    assert (trainer.skipped, trainer.skipped_in_a_row) == (1, 0)


def test_alignment_without_solution_is_a_skipped_step():
    trainer = Trainer(Line(), SETTINGS)
    weights = _weights(trainer)
    trainer.model.failure = torch.linalg.LinAlgError("the algorithm failed to converge")
    result = trainer.step(_batch())
    assert result.skipped
    assert result.loss != result.loss
    assert all(map(torch.equal, weights, _weights(trainer)))


def test_other_failure_is_raised_and_leaves_no_gradient():
    trainer = Trainer(Line(), SETTINGS)
    trainer.step(_batch())
    trainer.model.failure = torch.OutOfMemoryError("out of memory")
    with pytest.raises(torch.OutOfMemoryError):
        trainer.step(_batch())
    assert all(parameter.grad is None for parameter in trainer.model.parameters())
    assert trainer.steps == 1


def test_times_add_up():
    result = Trainer(Line(), SETTINGS).step(_batch())
    parts = (result.forward_seconds, result.backward_seconds, result.optimizer_seconds)
    assert min(parts) > 0
    assert result.seconds == pytest.approx(sum(parts))


def test_persistent_bytes_are_weights_gradients_and_both_moments():
    trainer = Trainer(Line(), SETTINGS)
    weights = 4 * 4
    assert trainer.persistent_bytes() == 2 * weights
    trainer.step(_batch())
    counters = 2 * 4
    assert trainer.persistent_bytes() == 4 * weights + counters


def test_offload_and_onload_change_no_result():
    stays, moves = Trainer(Line(), SETTINGS), Trainer(Line(), SETTINGS)
    for _ in range(3):
        expected = stays.step(_batch()).loss
        found = moves.step(_batch()).loss
        moves.offload()
        assert all(parameter.grad is None for parameter in moves.model.parameters())
        moves.onload()
        assert found == expected


def test_what_moves_keeps_its_numbers_and_its_identity_and_the_host_memory_is_taken_once(monkeypatch):
    monkeypatch.setattr(offload, "BLOCK", 2 * offload.ALIGNMENT)
    tensors = [torch.randn(5, 7), torch.randn(300).requires_grad_(), torch.tensor(3), torch.empty(0, 4)]
    tensors += [torch.randn(6, 4).t(), torch.arange(9) > 4]
    expected, copies, later = [tensor.detach().clone() for tensor in tensors], offload.HostCopies(locks=False), []
    for turn in range(3):
        before = [tensor.data_ptr() for tensor in tensors]
        copies.save(tensors)
        places = [tensor.data_ptr() for tensor in tensors]
        assert not set(places) & set(before) - {0}
        assert turn == 0 or places[: len(later)] == later
        later = places
        copies.restore(tensors, torch.device("cpu"))
        assert not {tensor.data_ptr() for tensor in tensors} & set(places) - {0}
        for tensor, wanted in zip(tensors, expected):
            assert torch.equal(tensor, wanted) and tensor.dtype == wanted.dtype
        tensors[1].data += 1
        expected[1] += 1
        tensors.append(torch.randn(2))  # the optimizer's state comes with the first step
        expected.append(tensors[-1].clone())
    assert tensors[1].requires_grad and tensors[1].is_leaf


def test_host_memory_of_another_shape_is_taken_anew():
    copies, tensors = offload.HostCopies(locks=False), [torch.randn(3), torch.randn(4)]
    copies.save(tensors)
    tensors[0] = torch.randn(6)
    expected = tensors[0].clone()
    copies.save(tensors)
    assert torch.equal(tensors[0], expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_offload_frees_the_device_and_onload_continues():
    stays, moves = (Trainer(Line(), SETTINGS, device="cuda", dtype=torch.float32) for _ in range(2))
    for _ in range(2):
        assert moves.step(_batch()).loss == stays.step(_batch()).loss
        moves.offload()
        state = [value for entry in moves.optimizer.state.values() for value in entry.values()]
        moved = [*moves.model.parameters(), *state]
        assert {tensor.device.type for tensor in moved} == {"cpu"} and all(tensor.is_pinned() for tensor in moved)
        moves.onload()
        assert {tensor.device.type for tensor in moved} == {"cuda"}
