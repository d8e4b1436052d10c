"""Training configurations: what is read, and how a mistake is told."""

from __future__ import annotations

import pytest
import yaml

from megafold.errors import InputError
from megafold.model.plan import Plan
from megafold.train.config import config_from_mapping, load_config

MINIMAL = {"output": "run", "steps": 3, "data": {"synthetic": {"n_tokens": 16}}}


def _write(path, mapping):
    path.write_text(yaml.safe_dump(mapping))
    return path


def test_what_is_left_out_has_its_default(tmp_path):
    config = load_config(_write(tmp_path / "c.yaml", MINIMAL))
    assert (config.workload, config.plan, config.model.preset, config.checkpoint.keep) == ("core", Plan(), "demo", 3)
    assert config.data.synthetic.atoms_per_token == 8


def test_plan_none_is_the_stock_model_and_a_mapping_switches_parts():
    assert config_from_mapping({**MINIMAL, "plan": "none"}).plan == Plan.none()
    assert config_from_mapping({**MINIMAL, "plan": {"sdpa": False}}).plan == Plan(sdpa=False)


def test_exponent_without_a_dot_is_a_number(tmp_path):
    path = tmp_path / "c.yaml"
    path.write_text("output: x\nsteps: 1\ndata: {synthetic: {}}\noptimizer: {learning_rate: 1e-3}\n")
    assert load_config(path).optimizer.learning_rate == 1e-3


@pytest.mark.parametrize(
    ("change", "field", "problem"),
    [
        ({"steps": -1}, "steps", "at least 1"),
        ({"steps": 1.5}, "steps", "whole number"),
        ({"steps": True}, "steps", "whole number"),
        ({"step": 3}, "step", "unknown setting"),
        ({"file": "x"}, "file", "unknown setting"),
        ({"optimizer": {"lr": 1}}, "optimizer.lr", "unknown setting"),
        ({"optimizer": {"learning_rate": 0}}, "optimizer.learning_rate", "more than 0"),
        ({"optimizer": {"learning_rate": float("nan")}}, "optimizer.learning_rate", "finite"),
        ({"optimizer": {"beta2": 1.0}}, "optimizer.beta2", "at most"),
        ({"optimizer": [1]}, "optimizer", "mapping"),
        ({"model": {"preset": "huge"}}, "model.preset", "one of paper, paper-0.9b, paper-1.8b, demo, tiny"),
        ({"workload": "half"}, "workload", "one of core, full, full_one_rollout, as_published"),
        ({"confidence_every": -1}, "confidence_every", "at least 0"),
        ({"plan": {"fast": True}}, "plan.fast", "unknown switch"),
        ({"plan": {"sdpa": 1}}, "plan.sdpa", "true or false"),
        ({"data": {"cache": 3}}, "data.cache", "path"),
        ({"data": {"synthetic": {"n_tokens": "two"}}}, "data.synthetic.n_tokens", "whole number"),
        ({"data": {"cache": "c.h5", "entries": "1ubq"}}, "data.entries", "list of texts"),
        ({"data": {}}, "data", "either cache"),
        ({"data": {"cache": "c.h5", "synthetic": {}}}, "data", "either cache"),
        ({"checkpoint": {"every": 0}}, "checkpoint.every", "at least 1"),
        ({"device": "tpu"}, "device", "one of auto, cpu, cuda"),
    ],
)
def test_mistake_names_file_and_field(tmp_path, change, field, problem):
    path = _write(tmp_path / "bad.yaml", {**MINIMAL, **change})
    with pytest.raises(InputError) as caught:
        load_config(path)
    assert (caught.value.file, caught.value.field) == (str(path), field)
    assert problem in caught.value.problem


def test_missing_setting_is_named():
    with pytest.raises(InputError, match="config: steps: missing"):
        config_from_mapping({"output": "run"})


@pytest.mark.parametrize("text", ["[1, 2", "- a\n- b\n", ""], ids=["broken", "list", "empty"])
def test_file_that_is_no_mapping_is_refused(tmp_path, text):
    path = tmp_path / "c.yaml"
    path.write_text(text)
    with pytest.raises(InputError, match=str(path)):
        load_config(path)


def test_missing_file_is_bad_input(tmp_path):
    with pytest.raises(InputError, match="No such file"):
        load_config(tmp_path / "none.yaml")


def test_digest_sees_what_changes_the_training_and_nothing_else():
    base = config_from_mapping(MINIMAL).digest()
    for same in ({"steps": 9}, {"output": "else"}, {"checkpoint": {"every": 1}}):
        assert config_from_mapping({**MINIMAL, **same}).digest() == base
    for other in (
        {"seed": 1},
        {"optimizer": {"eps": 1e-6}},
        {"plan": "none"},
        {"workload": "full"},
        {"confidence_every": 3},
    ):
        assert config_from_mapping({**MINIMAL, **other}).digest() != base
