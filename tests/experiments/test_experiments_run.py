"""Measuring with fake contenders in real worker processes: order, failures, resuming, ending."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial

import pytest

from experiments.providers import find_provider, provider_names
from experiments.record import Metric, Record, read_record, record_path, write_record
from experiments.run import measure
from megafold.errors import InputError


def run(comparisons, folder, **options) -> list[Record]:
    return measure(comparisons, folder / "records", cache=None, logs=folder / "logs", command="test", **options)


def visits_in(trace) -> list[str]:
    return [line.split()[1] for line in trace.read_text().splitlines() if line.startswith("visit")]


def test_contenders_are_visited_in_turn_and_their_samples_pooled(fakes, fake_comparison, tmp_path):
    records = run([fake_comparison("good", "better", visits=3)], tmp_path)
    assert visits_in(fakes) == ["good", "better"] * 3
    # One warm-up and two timed steps in each of three visits; the fake reports the number of its visit.
    assert [record.metrics["visits"] for record in records] == [Metric(2.0, "1", 1.0, 3.0, 6)] * 2
    assert len({record.comparison_id for record in records}) == 1


def test_a_contender_leaves_the_device_before_the_next_is_visited(fakes, fake_comparison, tmp_path):
    run([fake_comparison("good", "better")], tmp_path)
    steps = [" ".join(line.split()[:2]) for line in fakes.read_text().splitlines()]
    set_up = [[step for step in steps[:4] if step.endswith(f" {name}")] for name in ("good", "better")]
    assert set_up == [["open good", "suspend good"], ["open better", "suspend better"]]
    assert steps[4:] == ["visit good", "suspend good", "visit better", "suspend better"] * 2


def ends_of_visits(trace, name: str) -> list[str]:
    lines = [line.split() for line in trace.read_text().splitlines()]
    return [what for what, who, _ in lines if who == name and what in ("stay", "suspend")][1:]  # the first: set up


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["small"], [["stay", "stay", "suspend"]]),  # nobody else needs the device
        (["small", "medium"], [["suspend", "stay", "suspend"]] * 2),  # 70 + 5 + 1 of 85 GiB, and 1 for each driver
        (["small", "large"], [["suspend", "suspend", "suspend"]] * 2),  # 80 + 5 + 2
        (["small", "good"], [["suspend", "suspend", "suspend"]] * 2),  # one does not tell what it takes
        (["good"], [["suspend", "suspend", "suspend"]]),
    ],
    ids=["alone", "fit", "do-not-fit", "unknown", "cannot-stay"],
)
def test_memory_stays_on_the_device_where_the_measured_peaks_fit_beside_it(
    names, expected, fakes, fake_comparison, tmp_path
):
    records = run([fake_comparison(*names, visits=3)], tmp_path)
    assert [record.status for record in records] == ["ok"] * len(names)
    assert [ends_of_visits(fakes, name) for name in names] == expected


def test_an_outcome_is_written_after_the_last_visit_and_not_with_that_of_the_others(fakes, fake_comparison, tmp_path):
    comparison = fake_comparison("good", "hang", visits=1, timeout_s=600)
    path = record_path(tmp_path / "records", comparison.points[0])
    process = start(comparison, tmp_path)
    wait_for(lambda: fakes.exists() and "visit hang" in fakes.read_text())
    early = read_record(path)
    process.terminate()
    process.communicate(timeout=30)
    assert (early.status, early.comparison_id) == ("ok", comparison.id)
    assert not record_path(tmp_path / "records", comparison.points[1]).exists()


def test_times_of_two_jobs_are_no_result(fakes, fake_comparison, tmp_path):
    comparison = fake_comparison("good", "better", "refuse")
    good, _, refused = run([comparison], tmp_path)
    # As a job leaves it that measured again and was ended amidst.
    write_record(replace(good, provenance={**good.provenance, "started": "later"}), tmp_path / "records")
    fakes.unlink()
    again = run([comparison], tmp_path)
    assert visits_in(fakes) == ["good", "better"] * 2 and again[2] == refused
    assert again[0].provenance["started"] == again[1].provenance["started"] != "later"


@pytest.mark.parametrize("own", [None, "of-the-user"], ids=["left-alone", "set-by-the-user"])
def test_a_library_finds_the_environment_of_its_contender(own, fakes, fake_comparison, tmp_path, monkeypatch):
    if own is not None:
        monkeypatch.setenv("FAKE_SETTING", own)
    run([fake_comparison("settled")], tmp_path)
    assert f"setting {own or 'of-the-contender'}" in fakes.read_text().splitlines()
    assert os.environ.get("FAKE_SETTING") == own


def test_whole_steps_on_one_device_share_one_setting_of_the_allocator():
    """Memory and its pieces are compared: nobody may have another allocator, and ranks' graphs none of this kind."""
    found = {name: dict(find_provider("iteration", name).environment) for name in provider_names("iteration")}
    one = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    assert found == {"eager": one, "compile": one, "megafold": one, "sequence_parallel": {}}


def test_contenders_are_set_up_side_by_side(fakes, fake_comparison, tmp_path, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(2))
    first, second = run([fake_comparison("waits_for_two", "waits_for_two_too")], tmp_path)
    assert (first.status, second.status) == ("ok", "ok")


def test_at_most_as_many_contenders_are_set_up_at_a_time_as_there_are_cpus(
    fakes, fake_comparison, tmp_path, monkeypatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(1))
    run([fake_comparison("good", "better")], tmp_path)
    steps = [" ".join(line.split()[:2]) for line in fakes.read_text().splitlines()]
    assert steps[:4] == ["open good", "suspend good", "open better", "suspend better"]


def test_a_contender_that_cannot_be_set_up_is_a_record_beside_those_that_can(fakes, fake_comparison, tmp_path):
    broken, good = run([fake_comparison("does_not_open", "good")], tmp_path)
    assert (broken.status, broken.reason, good.status) == ("unsupported", "does not open", "ok")
    assert visits_in(fakes) == ["good"] * 2


def test_each_contender_has_one_process_over_all_comparisons(fakes, fake_comparison, tmp_path):
    run([fake_comparison("good", "better", n_tokens=n) for n in (16, 32, 48)], tmp_path)
    opened = [line.split()[1:] for line in fakes.read_text().splitlines() if line.startswith("open")]
    assert len(opened) == 6
    assert len({process for _, process in opened}) == 2


@pytest.mark.parametrize(
    ("name", "status", "reason"),
    [
        ("crash", "error", "SIGSEGV"),
        ("leave", "error", "ended with code 7; last line of its log: the last words"),
        ("fail", "error", "ZeroDivisionError: divided"),
        ("fail_late", "error", "ZeroDivisionError: late"),
        ("no_import", "error", "ModuleNotFoundError: No module named 'there_is_no_such_module'"),
        ("run_out", "oom", "MemoryError: no room for 1 TiB"),
        ("wrapped_run_out", "oom", "the compiler gave up"),
        ("be_killed", "oom", "SIGKILL"),
        ("refuse", "unsupported", "has no device"),
    ],
)
def test_a_broken_contender_is_a_record_and_not_the_end(name, status, reason, fakes, fake_comparison, tmp_path):
    comparisons = [fake_comparison(name, "good", n_tokens=n) for n in (16, 32)]
    broken, good, broken_again, good_again = run(comparisons, tmp_path)
    assert (broken.status, broken_again.status, good.status, good_again.status) == (status, status, "ok", "ok")
    assert reason in broken.reason and "\n" not in broken.reason
    assert not broken.metrics
    assert read_record(record_path(tmp_path / "records", broken.point)) == broken


def test_a_hanging_contender_is_killed_with_its_process_after_the_time_out(fakes, fake_comparison, tmp_path):
    hung, good = run([fake_comparison("hang", "good", timeout_s=2)], tmp_path)
    assert (hung.status, hung.reason, good.status) == ("timeout", "no sign of life for 2 s", "ok")
    process = next(line.split()[2] for line in fakes.read_text().splitlines() if line.startswith("visit hang"))
    assert not is_running(int(process))


def test_a_slow_contender_that_gives_signs_of_life_is_not_timed_out(fakes, fake_comparison, tmp_path):
    (record,) = run([fake_comparison("dawdle", timeout_s=1)], tmp_path)  # 6 steps of 0.4 s, each a sign of life
    assert record.status == "ok"


def test_results_are_kept_and_errors_measured_again(fakes, fake_comparison, tmp_path):
    comparison = fake_comparison("good", "refuse", "run_out", "fail")
    first = run([comparison], tmp_path)
    fakes.unlink()
    second = run([comparison], tmp_path)
    assert set(visits_in(fakes)) == {"good", "fail"}  # a ratio needs both from one job
    assert second[1:3] == first[1:3]
    assert second[0].provenance["started"] == second[3].provenance["started"]


def test_what_has_a_result_is_not_measured_again(fakes, fake_comparison, tmp_path):
    comparison = fake_comparison("good", "refuse", "run_out")
    first = run([comparison], tmp_path)
    fakes.unlink()
    assert run([comparison], tmp_path) == first
    assert not fakes.exists()


def test_force_measures_again(fakes, fake_comparison, tmp_path):
    comparison = fake_comparison("good", "better")
    run([comparison], tmp_path)
    fakes.unlink()
    run([comparison], tmp_path, force=True)
    assert visits_in(fakes) == ["good", "better"] * 2


def test_a_node_failure_and_a_truncated_record_are_measured_again(fakes, fake_comparison, tmp_path):
    comparison = fake_comparison("good", "better")
    good, better = run([comparison], tmp_path)
    path = record_path(tmp_path / "records", good.point)
    path.write_text(path.read_text()[:-100])
    lost = replace(better, status="node_failure", metrics={})
    record_path(tmp_path / "records", better.point).unlink()
    write_record(lost, tmp_path / "records")
    fakes.unlink()
    assert [record.status for record in run([comparison], tmp_path)] == ["ok", "ok"]
    assert visits_in(fakes) == ["good", "better"] * 2


def test_beside_other_contenders_a_point_is_measured_again(fakes, fake_comparison, tmp_path):
    run([fake_comparison("good")], tmp_path)
    fakes.unlink()
    records = run([fake_comparison("good", "better")], tmp_path)
    assert visits_in(fakes) == ["good", "better"] * 2
    assert len({record.comparison_id for record in records}) == 1


def test_provenance_names_commit_versions_times_and_command(fakes, fake_comparison, tmp_path):
    (record,) = run([fake_comparison("good")], tmp_path)
    found = record.provenance
    assert found["command"] == "test"
    assert set(found["packages"]) >= {"torch", "triton", "alphafold3-pytorch", "rdkit", "h5py"}
    assert found["started"] <= found["ended"] and found["ended"].endswith("+00:00")
    assert found["hosts"] == 1


def test_a_point_on_real_structures_without_a_cache_is_bad_input(fakes, fake_comparison, tmp_path):
    comparison = fake_comparison("good")
    comparison = replace(comparison, setting=replace(comparison.setting, data="cache"))
    with pytest.raises(InputError, match=r"--cache: .*: needs a cache"):
        run([comparison], tmp_path)
    with pytest.raises(InputError, match=r"absent\.h5: no such cache"):
        measure([comparison], tmp_path, cache=tmp_path / "absent.h5", logs=tmp_path, command="test")


SCRIPT = """
import json, sys
from pathlib import Path
from experiments.run import measure
from experiments.spec import comparison_from_dict
folder = Path(sys.argv[1])
comparison = comparison_from_dict(json.loads(sys.argv[2]), "comparison")
measure([comparison], folder / "records", cache=None, logs=folder / "logs", command="test")
print(*sorted(name for name in ("torch", "alphafold3_pytorch", "numpy") if name in sys.modules))
"""


def start(comparison, folder) -> subprocess.Popen:
    arguments = [sys.executable, "-c", SCRIPT, str(folder), json.dumps(comparison.as_dict())]
    # A job in a shell's background hands an ignored ctrl-c on to its children.
    heard = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, preexec_fn=heard)


def test_the_measuring_process_loads_no_torch(fakes, fake_comparison, tmp_path):
    process = start(fake_comparison("good"), tmp_path)
    output, errors = process.communicate(timeout=60)
    assert (process.returncode, output.split()) == (0, []), errors


@pytest.mark.parametrize(
    "number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=["ctrl-c", "sigterm", "sigkill"]
)
def test_the_workers_end_with_the_measuring_process(number, fakes, fake_comparison, tmp_path):
    process = start(fake_comparison("good", "hang", timeout_s=600), tmp_path)
    workers = wait_for(lambda: fakes.exists() and "visit hang" in fakes.read_text() and worker_ids(fakes))
    process.send_signal(number)
    process.communicate(timeout=30)
    assert process.returncode != 0
    assert len(workers) == 2
    wait_for(lambda: not any(is_running(worker) for worker in workers))


def worker_ids(trace) -> set[int]:
    return {int(line.split()[2]) for line in trace.read_text().splitlines()}


def wait_for(condition, seconds: float = 30):
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.05)
    return value


def is_running(process: int) -> bool:
    """Whether the process exists and is not a zombie that nobody has waited for yet."""
    try:
        os.kill(process, 0)
        with open(f"/proc/{process}/stat") as stream:
            return stream.read().rpartition(")")[2].split()[0] != "Z"
    except (ProcessLookupError, FileNotFoundError):
        return False
