"""Numbers in the README come from records that are kept beside it."""

from __future__ import annotations

from experiments.record import read_records


def test_readme_shows_what_its_records_hold(repository):
    records = read_records(repository / "docs" / "results" / "h200" / "records")
    records = [record for record in records if record.point.setting.what == "iteration"]
    assert {record.status for record in records} <= {"ok", "oom"}
    assert all(record.provenance["commit"] for record in records)
    by_length: dict[int, list] = {}
    for record in records:
        by_length.setdefault(record.point.setting.size("n_tokens"), []).append(record)
    readme = (repository / "README.md").read_text()
    for length, group in by_length.items():
        assert len({record.comparison_id for record in group}) == 1  # one job: their ratios may be shown
        rows = [line for line in readme.splitlines() if line.startswith(f"| {length} |")]
        assert len(rows) == len(group)
        for record in group:
            name = "stock, eager" if record.point.contender.name == "eager" else "MegaFold"
            (row,) = (row for row in rows if f"| {name} |" in row)
            if record.status == "oom":
                assert "| out of memory |" in row
                continue
            time, memory = record.metrics["iteration_time"], record.metrics["peak_memory"]
            assert f"| {time.value:.2f} ({time.p20:.2f}-{time.p80:.2f}) |" in row
            assert f"| {memory.value:.1f} |" in row
            eager = next((r for r in group if r.point.contender.name == "eager" and r.status == "ok"), None)
            if eager is not None:
                assert f"| {eager.metrics['iteration_time'].value / time.value:.2f}x |" in row
                assert f"| {eager.metrics['peak_memory'].value / memory.value:.2f}x |" in row
