"""Records: the way through a file, what may replace what, and damaged files."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from experiments.record import (
    STATUS_RANK,
    Metric,
    Record,
    read_record,
    read_records,
    record_from_dict,
    record_path,
    write_record,
)
from experiments.spec import Contender, Point, Setting
from megafold.errors import InputError

SETTING = Setting("kernels", "kernel", "triangle_attention", "", "synthetic", "", "fp32", (("n_tokens", 32),))
OK = Record(
    point=Point(SETTING, Contender("eager", "eager")),
    comparison_id="triangle_attention-n32-fp32-12345678",
    status="ok",
    vendor="cpu",
    metrics={"forward_time": Metric(0.5, "s", 0.4, 0.6, 5, "eager calls"), "peak_memory": Metric(1.5, "MiB")},
    provenance={"commit": "abc", "dirty": False, "packages": {"torch": "2.13.0"}, "slurm_job_id": None},
)


def outcome(status: str) -> Record:
    return OK if status == "ok" else replace(OK, status=status, reason=f"was {status}", metrics={})


def test_a_record_survives_the_way_through_its_file(tmp_path):
    path = write_record(OK, tmp_path)
    assert path == record_path(tmp_path, OK.point) == tmp_path / "kernels" / f"{OK.point.id}.json"
    assert read_record(path) == OK
    assert json.loads(path.read_text())["id"] == OK.point.id


def test_all_records_below_a_folder_are_read_in_order_of_their_names(tmp_path):
    others = [replace(OK, point=Point(replace(SETTING, sweep=sweep), OK.point.contender)) for sweep in ("b", "a")]
    for record in others:
        write_record(record, tmp_path)
    assert [record.point.setting.sweep for record in read_records(tmp_path)] == ["a", "b"]


@pytest.mark.parametrize("after", STATUS_RANK)
@pytest.mark.parametrize("before", STATUS_RANK)
def test_a_better_record_is_never_replaced_by_a_worse_one(before, after, tmp_path):
    write_record(outcome(before), tmp_path)
    path = write_record(outcome(after), tmp_path)
    kept = before if STATUS_RANK[before] > STATUS_RANK[after] else after
    assert read_record(path) == outcome(kept)


def test_a_truncated_record_names_its_file_and_is_replaced(tmp_path):
    path = write_record(OK, tmp_path)
    path.write_text(path.read_text()[:-40])
    with pytest.raises(InputError) as caught:
        read_record(path)
    assert str(caught.value).startswith(f"{path}: is not valid JSON")
    assert read_record(write_record(outcome("error"), tmp_path)).status == "error"


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("schema", 99, "schema: is 99; this version reads 1"),
        ("status", "great", "status: is 'great'; allowed: error"),
        ("vendor", "abacus", "vendor: is 'abacus'; allowed: nvidia, amd, cpu"),
        ("evidence", "hearsay", "evidence: is 'hearsay'; allowed: measured"),
        ("metrics", {"time": {"value": 1.0, "unit": "s", "colour": "red"}}, "metrics: "),
        ("metrics", [], "metrics: "),
        ("point", {}, "contender"),
        ("provenance", None, "provenance: is missing"),
    ],
)
def test_a_wrong_field_is_named(key, value, message):
    content = OK.as_dict()
    content[key] = value
    if value is None:
        del content[key]
    with pytest.raises(InputError) as caught:
        record_from_dict(content, "some.json")
    assert str(caught.value).startswith("some.json: ") and message in str(caught.value)


def test_no_temporary_file_stays_when_a_record_cannot_be_written(tmp_path):
    broken = replace(OK, provenance={"commit": object()})
    with pytest.raises(TypeError):
        write_record(broken, tmp_path)
    assert not list(tmp_path.rglob("*.json*"))


def test_a_copy_without_git_is_traced_by_the_commit_it_is_told(monkeypatch):
    from experiments import provenance

    monkeypatch.setattr(provenance, "checkout", lambda file: (None, None))
    monkeypatch.delenv("MEGAFOLD_COMMIT", raising=False)
    assert provenance.software("c")["commit"] is None
    monkeypatch.setenv("MEGAFOLD_COMMIT", "0123abc")
    found = provenance.software("c")
    assert (found["commit"], found["dirty"]) == ("0123abc", None)
