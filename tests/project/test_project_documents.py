"""Numbers in README and docs come from records that are kept beside them."""

from __future__ import annotations

import pytest

from experiments.record import read_records


@pytest.fixture(scope="module")
def records(repository):
    """Of whole training steps on one H200."""
    found = read_records(repository / "docs" / "results" / "h200" / "records")
    found = [record for record in found if record.point.setting.what == "iteration"]
    assert {record.status for record in found} <= {"ok", "oom"}
    assert all(record.provenance["commit"] for record in found)
    return found


def _of_sweep(records, sweep):
    return [record for record in records if record.point.setting.sweep == sweep]


def _value(record, name):
    return record.metrics[name].value


def test_readme_shows_what_its_records_hold(repository, records):
    by_length: dict[int, list] = {}
    for record in _of_sweep(records, "iteration"):
        by_length.setdefault(record.point.setting.size("n_tokens"), []).append(record)
    readme = (repository / "README.md").read_text()
    assert len(by_length) > 2
    for length, group in by_length.items():
        rows = [line for line in readme.splitlines() if line.startswith(f"| {length} |")]
        assert len(rows) == len(group)
        for record in group:
            name = "stock, eager" if record.point.contender.name == "eager" else "MegaFold"
            (row,) = (row for row in rows if f"| {name} " in row)
            if record.status == "oom":
                assert "| out of memory |" in row
                continue
            time, memory = record.metrics["iteration_time"], _value(record, "peak_memory")
            spread = "" if time.n == 1 else f" ({time.p20:.3g}-{time.p80:.3g})"
            cells = [cell.strip() for cell in row.split("|")]
            assert [float(n) for n in _numbers(cells[3])] == [float(n) for n in _numbers(f"{time.value:.3g}{spread}")]
            assert cells[5] == f"{memory:.1f}"
            eager = [r for r in group if r.point.contender.name == "eager" and r.comparison_id == record.comparison_id]
            if eager and eager[0].status == "ok":
                assert cells[4] == f"{_value(eager[0], 'iteration_time') / time.value:.2f}x"
                assert cells[6] == f"{_value(eager[0], 'peak_memory') / memory:.2f}x"
            else:  # of another job, or of none: no ratio
                assert (cells[4], cells[6]) == ("", "")


def _numbers(text):
    return text.replace("(", " ").replace(")", " ").replace("-", " ").split()


def test_readme_shows_the_steps_with_confidence_labels(repository, records):
    readme = " ".join((repository / "README.md").read_text().split())
    full = _of_sweep(records, "iteration_full")
    assert full
    for record in full:
        assert f"{_value(record, 'iteration_time'):.2f} s and {_value(record, 'peak_memory'):.1f} GiB" in readme


def test_docs_show_what_each_switch_brings(repository, records):
    lines = (repository / "docs" / "iteration.md").read_text().splitlines()
    shown = [line for line in lines if line.startswith("| ")]
    ablation = _of_sweep(records, "ablation")
    switched = [r for r in ablation if r.point.contender.name not in ("eager", "megafold")]
    assert len(switched) > 9
    for record in switched:
        how, _, switch = record.point.contender.name.partition("-")
        time, above = f"{_value(record, 'iteration_time'):#.3g}", f"{_value(record, 'peak_above_persistent'):.1f}"
        cells = f"| `{switch}` | {time} | {above} |"
        if how == "without":
            (all_on,) = [
                r for r in ablation if r.comparison_id == record.comparison_id and r.point.contender.name == "megafold"
            ]
            ratio = _value(record, "iteration_time") / _value(all_on, "iteration_time")
            cells = f"| `{switch}` | {time} | {ratio:.{1 if ratio >= 1.5 else 2}f}x | {above} |"
        assert any(cells in line for line in shown), cells


OPERATORS = {
    "triangle_multiplication": "triangle multiplication",
    "transition": "transition",
    "norm_project": "LayerNorm + 5 projections",
    "conditioned_transition_atoms": "conditioned transition, atoms",
    "conditioned_transition_tokens": "conditioned transition, tokens",
    "windowed_attention": "windowed attention",
    "outer_product_mean": "outer product mean",
    "pair_weighted_averaging": "pair-weighted averaging",
}


def _jobs(repository):
    """Of EvoFusion's operators: (operator, tokens), and the metrics of each contender of one job."""
    jobs: dict[tuple[str, int], dict] = {}
    for record in read_records(repository / "docs" / "results" / "h200" / "records"):
        setting = record.point.setting
        if setting.what == "kernel" and setting.workload in OPERATORS:
            job = jobs.setdefault((setting.workload, setting.size("n_tokens")), {})
            job[record.point.contender.name] = record
    assert all(len({record.comparison_id for record in job.values()}) == 1 for job in jobs.values())
    return jobs.items()


def test_docs_show_evofusions_operators_beside_eager_and_the_best_peer(repository):
    """Device time and its ratios, then wall time and memory; also where a peer is faster."""
    lines = (repository / "docs" / "performance_evofusion.md").read_text().splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    for (workload, tokens), job in _jobs(repository):
        ours, eager, *peers = job.pop("evofusion"), job.pop("eager"), *job.values()
        peer = min(peers, key=lambda record: _value(record, "graph_forward_backward_time"), default=None)
        shape = "" if workload.startswith(("cond", "wind")) else str(tokens)
        device, wall = (row for row in rows if row[0] == OPERATORS[workload] and shape in row[1] and len(row) in (6, 9))
        for row, name, first in ((device, "graph_forward_backward_time", 4), (wall, "forward_backward_time", 2)):
            for cell, record in zip(row[first:], (eager, peer, ours)):
                assert cell == ("" if record is None else f"{1e3 * _value(record, name):#.3g}"), (row, name)
        assert device[2] == f"{1e3 * _value(ours, 'floor_forward_backward_time'):#.3g}"
        times = [_value(r, "graph_forward_backward_time") for r in (eager, peer, ours) if r is not None]
        assert device[7].split(" ")[0] == f"{times[0] / times[-1]:.1f}"
        assert device[8] == ("" if peer is None else f"{times[1] / times[-1]:.2f}")
        held = ["-" if r is None else f"{_value(r, 'peak_memory'):.0f}" for r in (eager, peer, ours)]
        assert wall[5] == ", ".join(held)
