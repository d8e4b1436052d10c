"""Dry runs work anywhere and load nothing heavy; mistakes are one line and exit code 2."""

from __future__ import annotations

import subprocess
import sys

import pytest

from cluster.plan import plan_workflow, profile_config, profile_names
from experiments.spec import sweep_names
from megafold.errors import InputError


@pytest.mark.parametrize("site", profile_names())
def test_dry_run_of_every_profile_without_a_scheduler(workflow, site, monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    ran = workflow.snakemake(site, "-n")
    assert ran.code == 0, ran.text
    assert "rule measure_iteration" in ran.text and f"results/{site}/report.html" in ran.text
    assert not (workflow.folder / "results").exists()


def test_several_jobs_share_the_work_of_the_cache(workflow):
    sharing = workflow.snakemake("local", "-n", "--config", "cache_tasks=3", "sweeps=[data_pipeline]")
    assert sharing.code == 0, sharing.text
    parts = [f"sample.h5.parts/{part}-of-3" for part in (1, 2, 3)]
    assert all(part in sharing.text for part in parts) and "build_cache_part" in sharing.text


def test_a_real_run_wants_the_account(workflow, monkeypatch):
    monkeypatch.delenv("SBATCH_ACCOUNT", raising=False)
    ran = workflow.snakemake("frontier")
    assert ran.code == 2
    last = ran.text.splitlines()[-1]
    assert last.startswith("error: ") and "cluster/frontier/site.yaml: account: is not set; write yours" in last
    assert not (workflow.folder / "results").exists() and "Traceback" not in ran.text


def test_parsing_loads_neither_torch_nor_the_model(workflow):
    code = (
        "import sys\nfrom snakemake.cli import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end.code\n"
        "print('loaded:', sorted({'torch', 'alphafold3_pytorch', 'pandas', 'matplotlib'} & {*sys.modules}))"
    )
    command = workflow.command("local", "-n", "--quiet")[1:]
    done = subprocess.run([sys.executable, "-c", code, *command], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: []"


@pytest.mark.parametrize(
    ("config", "line"),
    [
        ("site=nowhere", "error: --config: site: is 'nowhere'; there are delta, frontier, local"),
        ("sweeps=[kernles]", "config.sweeps: unknown sweep 'kernles'; there are ablation"),
        ("settings=[n_tokns=64]", "error: --set: n_tokns: unknown key; allowed: n_tokens"),
    ],
    ids=["site", "sweep", "setting"],
)
def test_a_mistake_is_the_last_line(workflow, config, line):
    ran = workflow.snakemake("local", "-n", "--config", config)
    assert ran.code == 2 and "Traceback" not in ran.text
    assert ran.text.splitlines()[-1].startswith("error: ") and line in ran.text.splitlines()[-1]


def test_an_unknown_field_of_a_profile_is_named(workflow, tmp_path):
    profile = tmp_path / "profile"
    profile.mkdir()
    text = (workflow.repository / "cluster" / "local" / "config.yaml").read_text()
    (profile / "config.yaml").write_text(f"nodes: 4\n{text}")
    command = [*workflow.command("local", "-n")]
    command[2] = str(profile)
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == "snakemake: error: unrecognized arguments: --nodes=4"


def profile(tmp_path, text: str) -> list[str]:
    (tmp_path / "config.yaml").write_text(f"executor: local\nconfig:\n  site: local\n  sweeps: [iteration]\n{text}")
    return ["snakemake", "--profile", str(tmp_path), "-n"]


@pytest.mark.parametrize(
    ("text", "field", "problem"),
    [
        ("  sizes: demo\n", "config.sizes", "unknown key; allowed: site, sweeps, size"),
        ("  size: [demo]\n", "config.size", "is ['demo']; wanted: text"),
        ("  force: 1\n", "config.force", "is 1; wanted: true or false"),
        ("  msa_depth: 0\n", "config.msa_depth", "must be at least 1"),
        ("  data: nowhere.yaml\n", "config.data", "no such file; wanted: sample, or a YAML file"),
    ],
    ids=["unknown-key", "wrong-kind", "wrong-flag", "zero", "missing-file"],
)
def test_config_of_a_profile_is_checked(tmp_path, text, field, problem):
    with pytest.raises(InputError) as caught:
        plan_workflow({}, profile(tmp_path, text))
    assert str(caught.value).startswith(f"{tmp_path}/config.yaml: {field}: ") and problem in str(caught.value)


def test_command_line_config_adds_to_the_profiles(tmp_path):
    arguments = profile(tmp_path, "  size: demo\n")
    plan = plan_workflow({"force": "true", "settings": ["n_tokens=[32]", "kernels.heads=2"]}, arguments)
    assert plan.site.name == "local" and plan.config["size"] == "demo" and plan.config["force"] is True
    sizes = {entry["shape"]["n_tokens"] for batch in plan.batches["iteration"].values() for entry in batch}
    assert sizes == {32}


def test_a_profile_is_found_however_it_is_named(tmp_path, monkeypatch):
    arguments = profile(tmp_path, "")
    assert profile_config(["snakemake", f"--profile={tmp_path}"]) == profile_config(arguments)
    monkeypatch.setenv("SNAKEMAKE_PROFILE", str(tmp_path))
    assert profile_config(["snakemake"]) == profile_config(arguments)
    monkeypatch.delenv("SNAKEMAKE_PROFILE")
    with pytest.raises(InputError, match=r"--config: config.site: is missing; use --profile"):
        plan_workflow({}, ["snakemake"])


@pytest.mark.parametrize("sweep", sweep_names())
def test_every_shipped_sweep_can_be_planned_at_frontier(sweep):
    plan = plan_workflow({"site": "frontier", "sweeps": [sweep]})
    jobs = plan.batches[sweep]
    assert jobs and len(jobs) < plan.site.max_queued_jobs
