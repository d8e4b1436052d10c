"""Training on real structures: through the cache and the loader, learning, resuming in the middle of an epoch."""

from __future__ import annotations

import shutil
import statistics
import subprocess
import time

import psutil
import pytest
import torch

from megafold.errors import InputError
from megafold.train import checkpoint
from megafold.train.config import config_from_mapping, load_config
from megafold.train.log import Progress, read_steps
from megafold.train.loop import train

STRUCTURES = ("1kd8", "1psm", "1ubq")


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """Three small entries of the sample set."""
    from megafold.evopipe.build import build_cache
    from megafold.evopipe.sample_data import fetch_sample
    from megafold.evopipe.sources import DataSource, data_folder

    try:
        sample = fetch_sample(data_folder() / "sample")
    except InputError as error:
        pytest.skip(f"the sample set cannot be fetched here: {error}")
    folder = tmp_path_factory.mktemp("sample")
    for name in STRUCTURES:
        shutil.copy(sample.mmcif / f"{name}.cif", folder)
    report = build_cache(DataSource("folders", folder), folder / "sample.h5", progress=False)
    assert len(report.built) == len(STRUCTURES)
    return report.path


def _config(output, cache, **changes):
    mapping = {
        "output": str(output),
        "steps": 5,
        "model": {"preset": "tiny"},
        "data": {"cache": str(cache), "crop_size": 20, "msa_depth": 4},
        "optimizer": {"learning_rate": 0.01, "warmup_steps": 5},
        "checkpoint": {"every": 100, "keep": 1},
        "device": "cpu",
    }
    return config_from_mapping(mapping | changes, "run.yaml")


def test_loss_goes_down_on_the_sample_structures(cache, tmp_path, improvement):
    config = _config(tmp_path, cache, steps=18)
    report = train(config)
    ratios = improvement(config, report)
    assert max(ratios["distogram"]) < 0.85
    assert statistics.fmean(ratios["diffusion_mse"]) < 0.92
    assert sum(ratio < 1 for ratio in ratios["diffusion_mse"]) >= 8
    names = [line["entry"][0] for line in read_steps(report.log)]
    epochs = [tuple(names[start : start + 3]) for start in range(0, 18, 3)]
    assert {tuple(sorted(epoch)) for epoch in epochs} == {tuple(f"{name}-assembly1" for name in STRUCTURES)}
    assert len(set(epochs)) > 1, "never shuffled"


@pytest.mark.parametrize("workers", [0, 1])
def test_run_stopped_in_the_middle_of_an_epoch_continues_bit_by_bit(cache, tmp_path, monkeypatch, workers):
    """The signal goes to the workers of the loader too, as SLURM sends it."""
    data = {"cache": str(cache), "crop_size": 20, "msa_depth": 4, "workers": workers}
    whole = train(_config(tmp_path / "whole", cache, data=data))
    original = Progress.step
    others = set(psutil.Process().children())  # of other tests in this process

    def stop_after_four(self, done, **values):
        original(self, done, **values)
        if done == 4:
            processes = [*(set(psutil.Process().children()) - others), psutil.Process()]
            # From another process: a loader's worker takes a signal of its parent for an orderly end.
            subprocess.run(["kill", "-TERM", *(str(process.pid) for process in processes)], check=True)
            time.sleep(0.5)  # the death of a worker would be noticed now

    with monkeypatch.context() as patch:
        patch.setattr(Progress, "step", stop_after_four)
        assert train(_config(tmp_path / "cut", cache, data=data)).step == 4
    torch.manual_seed(1)
    resumed = train(_config(tmp_path / "cut", cache, data=data))
    for key in ("entry", "loss", "grad_norm"):
        assert [x[key] for x in read_steps(resumed.log)] == [x[key] for x in read_steps(whole.log)], key
    left, right = (checkpoint.load(run.checkpoint)["model"]["state_dict"] for run in (resumed, whole))
    assert all(torch.equal(left[name], right[name]) for name in right)


@pytest.mark.parametrize(("workload", "confidence"), [("core", False), ("full", True)])
def test_confidence_head_is_trained_only_where_the_workload_has_it(cache, tmp_path, workload, confidence):
    """Real structures with labels; the stock model, without MegaFold's plan."""
    (step,) = read_steps(train(_config(tmp_path, cache, workload=workload, steps=1, plan="none")).log)
    assert (step["breakdown"]["confidence"] > 0) == confidence


def test_missing_cache_and_unknown_entry_are_bad_input(cache, tmp_path):
    with pytest.raises(InputError, match=r"none.h5"):
        train(_config(tmp_path, tmp_path / "none.h5"))
    with pytest.raises(InputError, match=r"9zzz"):
        train(_config(tmp_path, cache, data={"cache": str(cache), "entries": ["9zzz"]}))


def test_shipped_demo_configuration_is_valid(repository):
    config = load_config(repository / "megafold" / "train" / "demo.yaml")
    assert config.model.preset == "demo"
    assert config.data.cache is not None
