"""Loss curves: what is close, what is within the band, what fails, and the curves that were measured."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from megafold.train import curves
from megafold.train.curves import CLOSE, FIRST, OURS, RUNS, STOCK, judge, losses, read_curves, relative_differences

STEPS = 8


@pytest.fixture(scope="module")
def measured(repository):
    """Of an H200, 200 steps each."""
    found, dtype = read_curves(repository / "docs" / "results" / "h200" / "loss_curves")
    assert dtype == "bfloat16"
    return found


def test_measured_curves_pass_and_what_lies_outside_the_range_of_three_is_told(measured):
    passes, lines = judge(measured, "bfloat16")
    assert passes and len(lines) == 12
    assert sum("outside their range" in line for line in lines) == 3
    assert lines[-1] == "0 of 10 windows outside the band, allowed 1"


def test_another_seed_is_not_close(measured):
    passes, lines = judge(measured | {OURS: measured["stock-1"]}, "bfloat16")
    assert not passes and lines[0].endswith("FAILS")


@pytest.mark.parametrize(("windows", "expected"), [(1, True), (2, False)], ids=["one-window", "two-windows"])
def test_curves_that_leave_the_band_fail(windows, expected, measured):
    ours = measured[OURS]
    away = [*ours[: -20 * windows], *(3 * loss for loss in ours[-20 * windows :])]
    passes, lines = judge(measured | {OURS: away}, "bfloat16")
    assert passes is expected
    assert sum(" OUTSIDE" in line for line in lines) == windows


def test_a_loss_that_is_not_finite_fails(measured):
    assert not judge(measured | {OURS: [*measured[OURS][:10], float("nan"), *measured[OURS][11:]]}, "bfloat16")[0]


def test_twice_the_measured_difference_is_close_and_three_times_is_not(measured):
    """The limit is near what was measured: twice the difference still passes, three times does not."""
    stock = measured["stock-0"]
    for factor, expected in ((2, True), (3, False)):
        ours = [s + factor * (o - s) for o, s in zip(measured[OURS], stock)]
        assert judge(measured | {OURS: ours}, "bfloat16")[0] is expected


def test_curves_of_other_lengths_are_refused(measured):
    with pytest.raises(ValueError, match=r"curves of \[199, 200\] steps"):
        judge(measured | {"stock-1": measured["stock-1"][:-1]}, "bfloat16")
    with pytest.raises(ValueError, match=f"at least {FIRST}"):
        judge({name: curve[:20] for name, curve in measured.items()}, "bfloat16")


@pytest.fixture(scope="module")
def batches():
    from megafold.model.build import model_kwargs
    from megafold.train.synthetic import synthetic_batch

    kwargs = model_kwargs("tiny", **curves.DEEP)
    return [synthetic_batch(16, atoms_per_token=4, msa_depth=4, seed=seed, model_kwargs=kwargs) for seed in range(2)]


def _one_percent_wrong(model):
    """A hundredth of each gradient's neighbour is added to it: no factor, which Adam would not notice."""
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_hook(lambda gradient: gradient + 0.01 * gradient.flatten().roll(1).view_as(gradient))


def test_megafold_is_close_to_the_stock_model_of_the_same_seed_and_a_wrong_gradient_is_not(batches):
    plan, seed = RUNS[OURS]
    stock = list(losses(batches, STEPS, plan=None, seed=seed))
    ours = list(losses(batches, STEPS, plan=plan, seed=seed))
    wrong = list(losses(batches, STEPS, plan=None, seed=seed, change=_one_percent_wrong))
    assert len(set(stock)) == STEPS
    assert statistics.fmean(relative_differences(ours, stock)) <= CLOSE["float32"]
    assert statistics.fmean(relative_differences(wrong, stock)) > CLOSE["float32"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_megafold_is_close_to_the_stock_model_on_a_gpu(batches):
    (ours, seed), stock = RUNS[OURS], RUNS["stock-0"][0]
    found = [list(losses(batches, FIRST, plan=plan, seed=seed, device="cuda")) for plan in (ours, stock)]
    assert statistics.fmean(relative_differences(*found)) <= CLOSE["bfloat16"]


def _run(*arguments, capsys):
    code = curves.main([str(argument) for argument in arguments])
    return code, capsys.readouterr().out.splitlines()


def test_the_command_runs_what_is_asked_for_and_judges_when_all_are_there(tmp_path, monkeypatch, capsys):
    from megafold.evopipe import loader

    monkeypatch.setattr(loader, "make_loader", lambda *args, **kwargs: [{}])

    def quick(batches, steps, *, plan, seed, device):
        yield from (1.0 + 0.1 * seed + 0.01 * step for step in range(steps))

    monkeypatch.setattr(curves, "losses", quick)
    common = ["--cache", "a.h5", "--out", tmp_path, "--steps", 40, "--device", "cpu"]
    assert _run(*common, "--runs", OURS, "stock-1", capsys=capsys)[0] == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"{OURS}.json", "stock-1.json"]
    code, lines = _run("--out", tmp_path, capsys=capsys)
    assert code == 2 and lines[-1].startswith(f"{tmp_path / 'stock-0.json'}: losses: is no curve of this command")
    code, lines = _run(*common, capsys=capsys)
    assert (code, lines[-1]) == (0, "passes")
    content = json.loads((tmp_path / f"{OURS}.json").read_text())
    content["losses"] = [2 * loss for loss in content["losses"]]
    (tmp_path / f"{OURS}.json").write_text(json.dumps(content))
    assert _run("--out", tmp_path, capsys=capsys)[0] == 1
    (tmp_path / f"{STOCK[0]}.json").write_text(json.dumps(content | {"dtype": "bfloat16"}))
    code, lines = _run("--out", tmp_path, capsys=capsys)
    assert code == 2 and "dtype: is bfloat16, float32" in lines[-1]


def test_too_few_steps_are_refused_before_any_is_taken(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        curves.main(["--cache", "a.h5", "--out", str(tmp_path), "--steps", str(FIRST - 1)])
    assert f"--steps {FIRST - 1}: at least {FIRST} are judged" in capsys.readouterr().err
