"""The workflow on this machine through submitit's local executor; a stand-in measures, everything else is real."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time

import pytest

from experiments.record import read_records

CONFIG = ["sweeps=[iteration]", "settings=data=synthetic n_tokens=[32,64]"]


def config(workflow, *more: str) -> list[str]:
    """--config of these tests; targets go before it."""
    return ["--config", *CONFIG, f"megafold={workflow.program}", *more]


@pytest.fixture
def two_jobs(workflow):
    """One comparison a job: points at a profile whose site packs one."""
    return [f"settings=data=synthetic n_tokens=[{','.join(str(32 * n) for n in range(1, 18))}]"]


def manifests(workflow) -> list[dict]:
    folder = workflow.folder / "results" / "local" / "batches" / "iteration"
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.json"))]


def test_one_sweep_by_name_then_only_what_is_new(workflow):
    ran = workflow.snakemake("local", "iteration", *config(workflow))
    assert ran.code == 0, ran.text
    results = workflow.folder / "results" / "local"
    for path in ("verify.json", "tables/iteration.csv", "tables/iteration.md", "figures/iteration.txt"):
        assert (results / path).is_file(), path
    (manifest,) = manifests(workflow)
    assert manifest["sweep"] == "iteration" and {entry["status"] for entry in manifest["records"]} == {"ok"}
    assert len(manifest["records"]) == len(read_records(results / "records"))
    inputs = list((results / "comparisons" / "iteration" / manifest["batch"]).glob("*.json"))
    assert len(inputs) == 2
    assert "starting" in ran.text, "long work shows its progress"
    assert workflow.starts("measure") == workflow.starts("verify") == 1

    more = "settings=data=synthetic n_tokens=[32,64,96]"  # another batch, of which two thirds are measured already
    for arguments, measured in ((config(workflow), 1), (config(workflow, more), 2)):
        again = workflow.snakemake("local", "iteration", "--until", "measure_iteration", *arguments)
        assert again.code == 0 and workflow.starts("measure") == measured, again.text
    sizes = {record.point.setting.size("n_tokens") for record in read_records(results / "records")}
    assert sizes == {32, 64, 96}


def test_an_error_fails_its_rule_the_other_jobs_go_on_and_a_rerun_repeats_only_it(workflow, two_jobs):
    """17 comparisons are two jobs at this site; the one with 544 tokens fails."""
    ran = workflow.snakemake("local", "iteration", *config(workflow, *two_jobs), steer="error=544")
    assert ran.code == 1
    assert "error: core-n544-synthetic" in ran.text and "made up" in ran.text
    assert len(manifests(workflow)) == 1, "the other batch has its manifest"
    assert "What has been measured so far" in ran.text
    assert (workflow.folder / "results/local/report_partial.html").is_file()

    ran = workflow.snakemake("local", "iteration", "--until", "measure_iteration", *config(workflow, *two_jobs))
    assert ran.code == 0, ran.text
    assert workflow.starts("measure") == 3 and len(manifests(workflow)) == 2


def test_nothing_is_measured_where_verification_fails(workflow):
    broken = workflow.program.read_text().replace('write_json(given.out, {"checks": []})\n        return 0', "return 1")
    workflow.program.write_text(broken)
    ran = workflow.snakemake("local", "iteration", *config(workflow))
    assert ran.code == 1 and "verify_kernels" in ran.text
    assert workflow.starts("verify") == 1 and workflow.starts("measure") == 0


def test_ctrl_c_ends_the_job_too(workflow):
    command = workflow.command("local", "iteration", *config(workflow))
    environment = workflow.environment("hang=32")
    process = subprocess.Popen(
        command, cwd=workflow.repository, env=environment, start_new_session=True, stderr=subprocess.PIPE, text=True
    )
    end = time.time() + 60
    while not workflow.starts("measure"):
        assert time.time() < end and process.poll() is None
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    _, text = process.communicate(timeout=60)
    assert process.returncode != 0 and "cancelling job" in text
    left = subprocess.run(["pgrep", "-f", str(workflow.program)], capture_output=True, text=True).stdout
    assert left == "", "the measuring process outlived the driver"
