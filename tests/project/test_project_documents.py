"""Numbers in the README come from records that are kept beside it."""

from __future__ import annotations

from experiments.record import read_records


def test_readme_shows_what_its_records_hold(repository):
    records = read_records(repository / "docs" / "results" / "h200" / "records")
    records = [record for record in records if record.point.setting.what == "iteration"]
    assert {record.status for record in records} == {"ok"}
    assert len({record.comparison_id for record in records}) == 1  # one job: their ratios may be shown
    assert all(record.provenance["commit"] for record in records)
    readme = (repository / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith("| 256 |")]
    assert len(rows) == len(records)
    for record in records:
        time, memory = record.metrics["iteration_time"], record.metrics["peak_memory"]
        shown = f"| {time.value:.2f} ({time.p20:.2f}-{time.p80:.2f}) |"
        assert any(shown in row and f"| {memory.value:.1f} |" in row for row in rows), record.point.contender.name
