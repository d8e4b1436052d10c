"""Batches: how comparisons are packed into jobs, and what a job that is lost leaves behind."""

from __future__ import annotations

import dataclasses
import json
import time

import pytest

from cluster import batch as subject
from cluster.batch import BatchFailed, Layout, measure_batch, plan_batches
from cluster.outcome import Outcome
from cluster.site import load_site
from experiments.record import Record, read_json, read_record, record_path, write_record
from experiments.spec import comparison_from_dict, load_sweep
from megafold.errors import InputError

SITE = dataclasses.replace(load_site("slurm-test"), comparisons_per_job=3)
SIZES = "n_tokens=[32,64,96,128]"


def comparisons(*settings: str):
    return load_sweep("iteration", size="demo", settings=("data=synthetic", SIZES, *settings)).comparisons


class Jobs:
    """In the launcher's place: each job writes records of its first `done` comparisons and ends as `status` says."""

    def __init__(self, *ends: tuple[int, str], reason: str = "why"):
        self.ends, self.commands, self.kwargs, self.reason = list(ends), [], [], reason

    def __call__(self, site, name, folder, command, **kwargs) -> Outcome:
        self.commands.append(command)
        self.kwargs.append(kwargs)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "job.json").write_text(json.dumps({"submitted": time.time()}))
        done, status = self.ends.pop(0)
        records = folder.parents[1] / "records"
        for path in command[2 : 2 + done]:
            comparison = comparison_from_dict(read_json(path), path)
            for point in comparison.points:
                write_record(Record(point, comparison.id, "ok", "cpu"), records)
        job_id = "" if status == "refused" else "7"
        status = "failed" if status == "refused" else status
        return Outcome("b", job_id, status, self.reason if status != "ok" else "", "the.log")


@pytest.fixture
def measured(tmp_path, monkeypatch):
    """Measures three comparisons with the given jobs; returns the statuses by number of tokens."""
    chosen = comparisons()[:3]

    def act(jobs: Jobs, **kwargs):
        monkeypatch.setattr(subject, "launch", jobs)
        contents = [entry.as_dict() for entry in chosen]
        layout = Layout(tmp_path / "site")
        records = measure_batch(SITE, layout, "iteration", "b", contents, ["megafold"], **kwargs)
        manifest = json.loads(layout.manifest("iteration", "b").read_text())
        assert [entry["status"] for entry in manifest["records"]] == [record.status for record in records]
        assert all(read_record(entry["path"]) for entry in manifest["records"])
        return {record.point.setting.size("n_tokens"): record.status for record in records}

    return act


def test_packing_respects_the_site_and_is_stable():
    batches = plan_batches(SITE, comparisons())
    assert [len(batch) for batch in batches.values()] == [3, 1]
    assert plan_batches(SITE, comparisons()) == batches
    last = list(batches)[1]
    assert last.startswith("core-n128-synthetic"), "a job of one comparison carries its name"


def test_a_changed_sweep_never_meets_the_manifest_of_the_old_one():
    before, after = plan_batches(SITE, comparisons()), plan_batches(SITE, comparisons("seed=1"))
    assert not set(before) & set(after)


def test_jobs_hold_comparisons_of_one_number_of_devices():
    site = dataclasses.replace(SITE, gpus_per_node=4, max_nodes=2, comparisons_per_job=16)
    batches = plan_batches(site, comparisons("sp=[1,8]"))
    assert [{entry["sp"] for entry in batch} for batch in batches.values()] == [{1}, {8}]
    with pytest.raises(InputError, match="max_nodes"):
        plan_batches(dataclasses.replace(site, max_nodes=1), comparisons("sp=[8]"))


def test_an_emulated_rank_needs_one_device():
    assert subject.devices_of(comparisons("sp=[32]", "mode=emulated")[0]) == 1


def test_what_was_measured_is_not_measured_again(measured):
    jobs = Jobs((3, "ok"))
    assert set(measured(jobs).values()) == {"ok"}
    again = Jobs()
    assert set(measured(again).values()) == {"ok"} and not again.commands


def test_force_measures_again(measured):
    measured(Jobs((3, "ok")))
    jobs = Jobs((3, "ok"))
    measured(jobs, force=True)
    assert "--force" in jobs.commands[0]


@pytest.mark.parametrize("status", ["timeout", "oom"])
def test_a_limit_costs_one_comparison_and_another_job_measures_the_rest(measured, status):
    jobs = Jobs((1, status), (1, "ok"))
    assert measured(jobs) == {32: "ok", 64: status, 96: "ok"}
    assert [sum(word.endswith(".json") for word in command) for command in jobs.commands] == [3, 1]


def test_every_job_at_its_limit_comes_to_an_end(measured):
    jobs = Jobs((0, "timeout"), (0, "timeout"), (0, "timeout"))
    assert set(measured(jobs).values()) == {"timeout"} and len(jobs.commands) == 3


def test_a_node_failure_is_recorded_and_measured_by_the_next_run(measured):
    assert measured(Jobs((1, "node_failure"))) == {32: "ok", 64: "node_failure", 96: "node_failure"}
    jobs = Jobs((2, "ok"))
    assert set(measured(jobs).values()) == {"ok"}
    assert sum(word.endswith(".json") for word in jobs.commands[0]) == 2


def test_a_crash_is_an_error_with_reason_and_log(measured, tmp_path):
    assert measured(Jobs((1, "failed"), reason="boom")) == {32: "ok", 64: "error", 96: "error"}
    record = read_record(record_path(tmp_path / "site" / "records", comparisons()[1].points[0]))
    assert record.reason == "job 7: boom; log: the.log"
    assert record.provenance["slurm_job_id"] == "7" and record.vendor == "cpu"


def test_a_command_that_leaves_nothing_behind_is_an_error(measured):
    assert measured(Jobs((2, "ok"))) == {32: "ok", 64: "ok", 96: "error"}


@pytest.mark.parametrize("status", ["refused", "cancelled"])
def test_a_job_that_never_ran_records_nothing(measured, tmp_path, status):
    with pytest.raises(BatchFailed, match=r"iteration-b: .*why"):
        measured(Jobs((0, status)))
    assert not (tmp_path / "site" / "records").exists()


def test_a_measurement_with_other_contenders_does_not_count(measured, tmp_path):
    """The same point beside other contenders is another measurement."""
    entry = comparisons()[0]
    for point in entry.points:
        write_record(Record(point, "another-comparison", "ok", "cpu"), tmp_path / "site" / "records")
    jobs = Jobs((3, "ok"))
    measured(jobs)
    assert sum(word.endswith(".json") for word in jobs.commands[0]) == 3
