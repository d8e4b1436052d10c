"""Sweeps resolve to comparisons and points: what is accepted, what is refused and how, and ids that never change."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import asdict, fields, replace
from pathlib import Path

import pytest

from experiments.providers import provider_names
from experiments.spec import (
    Comparison,
    Contender,
    Point,
    Protocol,
    Setting,
    comparison_from_dict,
    load_sweep,
    point_from_dict,
    sweep_names,
)
from megafold.errors import InputError
from megafold.model.plan import Plan

SWEEP = """
what: iteration
workload: core
model: tiny
dtype: fp32
data: [cache, synthetic]
cache_max_tokens: 64
shape: {n_tokens: [32, 64, 96], msa_depth: 16}
contenders:
  eager: {}
  megafold: {}
  half: {provider: megafold, plan: {sdpa: false}}
protocol: {visits: 3, warmup: 0, repeats: 1}
sizes:
  demo: {shape: {n_tokens: 16}, contenders: {eager: {}}, protocol: {visits: 1}}
"""
SETTING = Setting(
    sweep="iteration",
    what="iteration",
    workload="core",
    model="demo",
    data="synthetic",
    variant="",
    dtype="fp32",
    shape=(("n_tokens", 64), ("atoms_per_token", 8), ("msa_depth", 32), ("templates", 1), ("batch_size", 1)),
    protocol=Protocol(visits=2, warmup=1, repeats=2, timeout_s=300),
)
EAGER = Contender("eager", "eager")


def planned(name: str, **switches: bool) -> Contender:
    """A contender of MegaFold's: its plan states every switch."""
    return Contender(name, "megafold", tuple(sorted(Plan(**switches).as_dict().items())))


HALF = planned("half", sdpa=False)


@pytest.fixture
def sweep_file(tmp_path) -> Path:
    path = tmp_path / "mine.yaml"
    path.write_text(SWEEP)
    return path


def test_axes_multiply_and_the_cache_is_used_up_to_its_length(sweep_file):
    sweep = load_sweep(str(sweep_file))
    cells = [(c.setting.data, c.setting.size("n_tokens")) for c in sweep.comparisons]
    assert cells == [("cache", 32), ("cache", 64), ("synthetic", 32), ("synthetic", 64), ("synthetic", 96)]
    assert sweep.name == "mine" and sweep.needs_cache
    assert sweep.comparisons[0].setting.protocol == Protocol(visits=3, warmup=0, repeats=1)


def test_contenders_default_to_the_provider_of_their_name(sweep_file):
    contenders = load_sweep(str(sweep_file)).comparisons[0].contenders
    assert contenders == (EAGER, planned("megafold"), HALF)


def test_a_size_replaces_shape_and_protocol_by_key_and_contenders_as_a_whole(sweep_file):
    (first, second) = load_sweep(str(sweep_file), size="demo").comparisons
    assert (first.setting.size("n_tokens"), first.setting.size("msa_depth")) == (16, 16)
    assert first.setting.protocol == Protocol(visits=1, warmup=0, repeats=1)
    assert first.contenders == (EAGER,)
    assert (first.setting.data, second.setting.data) == ("cache", "synthetic")


@pytest.mark.parametrize(
    ("setting", "found"),
    [
        ("n_tokens=[8,24]", lambda c: sorted({x.setting.size("n_tokens") for x in c}) == [8, 24]),
        ("repeats=9", lambda c: {x.setting.protocol.repeats for x in c} == {9}),
        ("data=synthetic", lambda c: {x.setting.data for x in c} == {"synthetic"}),
        ("contenders=[half,eager]", lambda c: {x.contenders for x in c} == {(HALF, EAGER)}),
        ("contenders=half", lambda c: {x.contenders for x in c} == {(HALF,)}),
        ("variant=tuned", lambda c: all("-tuned-" in x.id for x in c)),
    ],
    ids=["shape", "protocol", "axis", "contenders", "one-contender", "variant"],
)
def test_settings_from_the_command_line_override(setting, found, sweep_file):
    assert found(load_sweep(str(sweep_file), settings=[setting]).comparisons)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("dtype:", "dtpye:", "dtpye: unknown key; allowed: what, "),
        (
            "  half: {provider: megafold",
            "  half: {provider: magafold",
            "contenders.half.provider: unknown provider 'magafold'",
        ),
        ("model: tiny", "model: huge", "model: unknown preset 'huge'; known: paper"),
        (
            "workload: core",
            "workload: hard",
            "workload: is 'hard'; allowed: core, full, full_one_rollout, as_published",
        ),
        ("dtype: fp32", "dtype: fp8", "dtype: is 'fp8'; allowed: fp32, bf16, fp16"),
        ("what: iteration", "what: inference", "what: is 'inference'; allowed: iteration, kernel, data_pipeline"),
        ("msa_depth: 16", "msa_rows: 16", "shape.msa_rows: unknown key; allowed: n_tokens"),
        ("n_tokens: [32, 64, 96], ", "", "shape.n_tokens: is missing"),
        ("msa_depth: 16", "msa_depth: -1", "shape.msa_depth: is -1; wanted: a whole number of at least 0"),
        ("[32, 64, 96]", "[32, 0]", "shape.n_tokens: is 0; wanted: a whole number of at least 1"),
        ("[32, 64, 96]", "32 tokens", "shape.n_tokens: is '32 tokens'; wanted: a whole number"),
        ("sdpa: false", "sdqa: false", "contenders.half.plan: sdqa: unknown switch"),
        ("sdpa: false", "sdpa: 0", "contenders.half.plan: sdpa: found 0, expected true or false"),
        ("visits: 3", "visits: 0", "protocol.visits: is 0"),
        ("tokens: 64", "tokens: many", "cache_max_tokens: is 'many'; wanted: a whole number"),
        ("visits: 3", "vists: 3", "protocol.vists: unknown key"),
        (
            "megafold: {}",
            "megafold: {plans: {}}",
            "contenders.megafold.plans: unknown key; allowed: provider, plan, workloads",
        ),
        ("megafold: {}", "megafold: {workloads: [cores]}", "contenders.megafold.workloads: 'cores' is not a workload"),
    ],
    ids=lambda text: text[:24] if isinstance(text, str) else None,
)
def test_a_mistake_is_told_in_one_line_with_file_and_field(old, new, message, sweep_file):
    assert old in SWEEP
    sweep_file.write_text(SWEEP.replace(old, new, 1))
    with pytest.raises(InputError) as caught:
        load_sweep(str(sweep_file))
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).startswith(str(sweep_file))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (["n_tokns=3"], "--set: n_tokns: unknown key; allowed: n_tokens"),
        (["n_tokens"], "--set: n_tokens: has no '='"),
        (
            ["contenders=[eagre]"],
            "--set: contenders: 'eagre' is not a contender of mine; there are eager, megafold, half",
        ),
        (["n_tokens=[1"], "--set: n_tokens: '[1' is not valid YAML"),
        (["sweep=other"], "--set: sweep: unknown key"),
    ],
    ids=["unknown", "no-equals", "contender", "yaml", "fixed"],
)
def test_a_wrong_setting_is_told_in_one_line(settings, message, sweep_file):
    with pytest.raises(InputError) as caught:
        load_sweep(str(sweep_file), settings=settings)
    assert message in str(caught.value)


def test_an_unknown_sweep_or_size_lists_what_there_is(sweep_file):
    with pytest.raises(InputError, match="no such sweep; there are ablation, data_pipeline, iteration, "):
        load_sweep("iterations")
    with pytest.raises(InputError, match=r"sizes\.tiny: unknown size; there are full, demo"):
        load_sweep(str(sweep_file), size="tiny")


@pytest.mark.parametrize("size", ["full", "demo"])
@pytest.mark.parametrize("name", sweep_names())
def test_every_shipped_sweep_resolves_to_distinct_points(name, size):
    comparisons = load_sweep(name, size=size).comparisons
    ids = [point.id for comparison in comparisons for point in comparison.points]
    assert len(set(ids)) == len(ids) > 0
    assert len({comparison.id for comparison in comparisons}) == len(comparisons)


def test_the_ablation_has_each_switch_alone_and_all_but_it():
    (comparison, *_) = load_sweep("ablation").comparisons
    plans = {contender.name: dict(contender.plan) for contender in comparison.contenders}
    switches = [field.name for field in fields(Plan)]
    for switch in switches:
        assert plans[f"only-{switch}"] == {name: name == switch for name in switches}
        assert plans[f"without-{switch}"] == {name: name != switch for name in switches}
    assert plans["megafold"] == Plan().as_dict()


def test_a_point_states_every_switch_so_that_another_default_is_another_point(monkeypatch):
    def point():
        (comparison, *_) = load_sweep("iteration").comparisons
        return next(point for point in comparison.points if point.contender.name == "megafold")

    before = point()
    assert dict(before.contender.plan) == Plan().as_dict()
    monkeypatch.setattr(Plan, "as_dict", lambda plan: {**asdict(plan), "sdpa": not plan.sdpa})
    assert point().id != before.id


def test_ids_are_stable():
    # Ids name the records of finished measurements: a change of these strings orphans every result that users have.
    assert Point(SETTING, EAGER).id == "core-n64-synthetic-fp32-eager-83e2b72a"
    half = Contender("half", "megafold", (("sdpa", False),))
    assert Point(SETTING, half).id == "core-n64-synthetic-fp32-half-cb398671"
    assert Comparison(SETTING, (EAGER, half)).id == "core-n64-synthetic-fp32-3e45cb9d"


def test_the_time_out_is_not_part_of_the_id_and_everything_else_is():
    patient = replace(SETTING, protocol=replace(SETTING.protocol, timeout_s=9))
    assert Point(patient, EAGER).id == Point(SETTING, EAGER).id
    changes = [
        {"model": "tiny"}, {"dtype": "bf16"}, {"seed": 1}, {"sp": 2}, {"mode": "emulated"}, {"data": "cache"},
        {"protocol": replace(SETTING.protocol, repeats=3)}, {"shape": (*SETTING.shape[:-1], ("batch_size", 2))},
    ]  # fmt: skip
    ids = {Point(replace(SETTING, **change), EAGER).id for change in changes} | {Point(SETTING, EAGER).id}
    assert len(ids) == len(changes) + 1


def test_points_and_comparisons_survive_the_way_through_json():
    comparison = Comparison(SETTING, (EAGER, HALF))
    assert comparison_from_dict(comparison.as_dict(), "file") == comparison
    assert [point_from_dict(point.as_dict(), "file") for point in comparison.points] == list(comparison.points)
    content = comparison.as_dict()
    with pytest.raises(InputError, match="file: colour: unknown key"):
        comparison_from_dict({**content, "colour": "red"}, "file")
    del content["seed"]
    with pytest.raises(InputError, match="file: seed: is missing"):
        comparison_from_dict(content, "file")


def test_contenders_from_outside_are_found_by_name(fakes):
    assert "fake_good" in provider_names("kernel")
    assert {"eager", "sdpa", "compile", "evoflash3d"} <= set(provider_names("kernel"))
    assert provider_names("iteration")[:3] == ("eager", "compile", "megafold")


def test_resolving_a_sweep_loads_neither_torch_nor_the_model():
    script = (
        "import sys, experiments.record, experiments.run\n"
        "from experiments.spec import load_sweep, sweep_names\n"
        "for name in sweep_names(): load_sweep(name)\n"
        "print(*[name for name in ('torch', 'alphafold3_pytorch', 'numpy', 'h5py') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, []), done.stderr
