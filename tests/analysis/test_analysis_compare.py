"""Records of two sites: the same points side by side."""

from __future__ import annotations

from dataclasses import replace

from analysis.compare import compare_records, compare_table
from experiments.record import Metric, Record
from experiments.spec import Contender, Point, Setting

SETTING = Setting("iteration", "iteration", "core", "demo", "synthetic", "", "fp32", (("n_tokens", 64),))


def _record(name: str, seconds: float, status: str = "ok") -> Record:
    metrics = {"iteration_time": Metric(seconds, "s")} if status == "ok" else {}
    return Record(Point(SETTING, Contender(name, name)), "c", status, "cpu", metrics=metrics)


def test_ratio_of_the_same_point():
    table = compare_table([_record("eager", 3.0)], [_record("eager", 2.0)], ("here", "there"))
    (row,) = table.to_dict("records")
    assert (row["here"], row["there"], row["ratio"]) == (3.0, 2.0, 1.5)


def test_a_point_without_a_time_shows_its_status_and_no_ratio():
    second = [_record("eager", 0, status="oom"), _record("megafold", 1.0)]
    table = compare_table([_record("eager", 3.0)], second, ("here", "there")).set_index("point")
    eager, megafold = (Point(SETTING, Contender(name, name)).id for name in ("eager", "megafold"))
    assert table.loc[eager, "there"] == "oom"
    assert table.loc[megafold, "here"] == "absent"
    assert table["ratio"].isna().all()


def test_other_lengths_do_not_match():
    other = replace(
        _record("eager", 2.0), point=Point(replace(SETTING, shape=(("n_tokens", 32),)), Contender("eager", "eager"))
    )
    assert compare_table([_record("eager", 3.0)], [other], ("here", "there"))["ratio"].isna().all()


def test_nothing_to_compare_is_a_sentence():
    assert "no point" in compare_records([], [], ("here", "there"))
