"""`train`: learning, exact resume, orderly ends and what a run leaves, with the smallest stock model on random data."""

from __future__ import annotations

import gc
import json
import os
import signal
import statistics

import pytest
import torch

from megafold.errors import InputError
from megafold.train import checkpoint
from megafold.train.config import config_from_mapping
from megafold.train.log import Progress, read_steps
from megafold.train.loop import train
from megafold.train.trainer import Trainer

STEPS = 6
KEYS = {"step", "loss", "breakdown", "lr", "grad_norm", "seconds", "loader_wait", "tokens", "entry", "skipped"}


def _config(output, **changes):
    mapping = {
        "output": str(output),
        "steps": STEPS,
        "model": {"preset": "tiny"},
        "data": {"synthetic": {"n_tokens": 10, "structures": 2, "atoms_per_token": 4}, "msa_depth": 3},
        "optimizer": {"learning_rate": 0.003, "warmup_steps": 2},
        "plan": "none",
        "checkpoint": {"every": 4, "keep": 2},
        "device": "cpu",
    }
    return config_from_mapping(mapping | changes, "run.yaml")


def _signal_after(monkeypatch, step, number=signal.SIGTERM):
    """Send the process a real signal when step ``step`` has been logged."""
    original = Progress.step

    def step_and_signal(self, done, **values):
        original(self, done, **values)
        if done == step:
            os.kill(os.getpid(), number)

    monkeypatch.setattr(Progress, "step", step_and_signal)


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A run that nothing stopped."""
    return train(_config(tmp_path_factory.mktemp("whole")))


def test_a_collection_amidst_a_step_leaves_out_what_was_there_before(tmp_path, monkeypatch):
    step, left_out, before = Trainer.step, [], gc.get_freeze_count()
    monkeypatch.setattr(Trainer, "step", lambda *a: left_out.append(gc.get_freeze_count()) or step(*a))
    train(_config(tmp_path, steps=1))
    assert left_out[0] > 100_000
    assert gc.get_freeze_count() <= before


def test_log_has_one_json_object_a_step(whole):
    lines = [json.loads(line) for line in whole.log.read_text().splitlines()]
    steps = [line for line in lines if "event" not in line]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert all(set(line) >= KEYS for line in steps)
    assert {line["tokens"] for line in steps} == {10}
    assert [line["event"] for line in lines if "event" in line] == ["start", "checkpoint", "checkpoint", "stop"]
    assert steps[0]["breakdown"]["total_loss"] == steps[0]["loss"]


def test_checkpoints_are_written_on_the_way_and_at_the_end(whole):
    names = [path.name for path in checkpoint.checkpoints(whole.checkpoint.parent)]
    assert names == ["step-00000004.pt", "step-00000006.pt"]
    assert (whole.step, whole.stopped_by) == (STEPS, None)


@pytest.mark.parametrize(
    ("stop_after", "number"),
    [(3, signal.SIGTERM), (2, signal.SIGUSR1), (5, signal.SIGINT)],
    ids=["time-limit-mid-epoch", "requeue-at-epoch-end", "ctrl-c-after-checkpoint"],
)
def test_resumed_run_equals_the_uninterrupted_one_bit_by_bit(whole, tmp_path, monkeypatch, stop_after, number):
    handlers = [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)]
    _signal_after(monkeypatch, stop_after, number)
    first = train(_config(tmp_path))
    assert (first.step, first.stopped_by) == (stop_after, signal.Signals(number).name)
    assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)] == handlers
    torch.manual_seed(999)  # a new process has another random state
    second = train(_config(tmp_path))
    assert (second.step, second.stopped_by) == (STEPS, None)
    resumed, expected = read_steps(second.log), read_steps(whole.log)
    for key in ("loss", "grad_norm", "breakdown", "lr", "tokens", "epoch"):
        assert [line[key] for line in resumed] == [line[key] for line in expected], key
    left = checkpoint.load(second.checkpoint)["model"]["state_dict"]
    right = checkpoint.load(whole.checkpoint)["model"]["state_dict"]
    assert all(torch.equal(left[name], right[name]) for name in right)


def test_finished_run_has_nothing_left_to_do(whole):
    again = train(_config(whole.log.parent))
    assert (again.step, again.loss) == (STEPS, None)
    assert len(read_steps(whole.log)) == STEPS


def test_checkpoint_of_an_optimised_model_loads_into_the_stock_model(tmp_path):
    from alphafold3_pytorch import Alphafold3

    report = train(_config(tmp_path, steps=1, plan={"shared_conditioning": True, "sdpa": True}))
    stock = Alphafold3.init_and_load(report.checkpoint)
    saved = checkpoint.load(report.checkpoint)["model"]["state_dict"]
    assert stock.state_dict().keys() == saved.keys()
    assert all(torch.equal(value, saved[name]) for name, value in stock.state_dict().items())


def test_resume_under_another_configuration_names_the_setting(whole):
    changed = _config(whole.log.parent, optimizer={"learning_rate": 0.5, "warmup_steps": 2}, steps=9)
    with pytest.raises(InputError, match=r"run.yaml: optimizer.learning_rate: is 0.5, but .*0.003"):
        train(changed)


def test_damaged_last_checkpoint_falls_back_to_the_one_before(whole, tmp_path, capsys):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    for path in checkpoint.checkpoints(whole.checkpoint.parent):
        (folder / path.name).write_bytes(path.read_bytes())
    newest = checkpoint.checkpoints(folder)[-1]
    newest.write_bytes(newest.read_bytes()[:1000])
    report = train(_config(tmp_path))
    assert "left out" in capsys.readouterr().out
    assert [line["loss"] for line in read_steps(report.log)] == [line["loss"] for line in read_steps(whole.log)][4:]


def test_out_of_memory_is_one_clear_line_and_loses_no_step(whole, tmp_path, monkeypatch):
    original = Trainer.step

    def failing(self, batch):
        if self.steps == 2:
            torch.rand(100)  # a step that fails has drawn numbers
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB")
        return original(self, batch)

    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "step", failing)
        with pytest.raises(
            InputError, match=r"run.yaml: data.crop_size: out of memory .* 10 tokens, 40 atoms"
        ) as caught:
            train(_config(tmp_path))
    assert "\n" not in str(caught.value)
    report = train(_config(tmp_path))
    assert [line["loss"] for line in read_steps(report.log)] == [line["loss"] for line in read_steps(whole.log)]


def test_run_without_finite_gradients_ends_with_an_error_and_says_so_in_the_log(tmp_path, monkeypatch, capsys):
    from megafold.train import synthetic

    original = synthetic.synthetic_batch

    def poisoned(*arguments, **keywords):
        batch = original(*arguments, **keywords)
        return batch | {"atom_inputs": batch["atom_inputs"] * float("nan")}

    monkeypatch.setattr(synthetic, "synthetic_batch", poisoned)
    with pytest.raises(InputError, match="2 steps in a row gave no finite gradient"):
        train(_config(tmp_path, max_skipped_in_a_row=2))
    steps = read_steps(tmp_path / "log.jsonl")
    assert [line["skipped"] for line in steps] == [True, True]
    assert steps[0]["loss"] is None
    assert "SKIPPED" in capsys.readouterr().out


def test_unknown_model_option_is_told_by_field(tmp_path):
    with pytest.raises(InputError, match=r"run.yaml: model.overrides.dim_pear"):
        train(_config(tmp_path, model={"preset": "tiny", "overrides": {"dim_pear": 3}}))


def test_one_rollout_under_a_plan_that_cannot_is_told(tmp_path):
    with pytest.raises(InputError, match=r"run.yaml: workload: full_one_rollout: .*rollouts"):
        train(_config(tmp_path, workload="full_one_rollout"))


def test_half_precision_on_a_cpu_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"run.yaml: dtype"):
        train(_config(tmp_path, dtype="bf16"))


def test_log_with_a_line_cut_short_stays_readable(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    from megafold.train.log import StepLog

    log = StepLog(path)
    log.write(event="resume", step=1)
    log.write(step=2, loss=float("inf"))
    log.close()
    assert read_steps(path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}]


def test_loss_goes_down_on_structures_that_it_has_seen(tmp_path, improvement):
    config = _config(tmp_path, steps=18, optimizer={"learning_rate": 0.01, "warmup_steps": 5})
    ratios = improvement(config, train(config))
    assert max(ratios["distogram"]) < 0.85
    assert statistics.fmean(ratios["diffusion_mse"]) < 0.92
    assert sum(ratio < 1 for ratio in ratios["diffusion_mse"]) >= 8
