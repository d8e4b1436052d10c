"""Tables: golden text, ratios inside one comparison only, outcomes kept with their reasons."""

from __future__ import annotations

import math
from dataclasses import replace

import pandas as pd
import pytest

from analysis.tables import print_table, readable_table, sweep_table, write_tables
from experiments.record import Metric

pytestmark = pytest.mark.timeout(120)


def seconds(value: float) -> dict[str, Metric]:
    return {"iteration_time": Metric(value, "s", p20=value * 0.9, p80=value * 1.1, n=4)}


def by_contender(records) -> pd.DataFrame:
    return sweep_table(records).set_index("contender")


def test_a_row_a_point_with_units_in_the_column_names(demo):
    table = sweep_table(record for record in demo if record.point.setting.sweep == "iteration")
    assert len(table) == 12
    row = table[(table["contender"] == "eager") & (table["n_tokens"] == 64) & (table["data"] == "cache")].iloc[0]
    assert row["iteration_time_s"] == 5.4
    assert row["iteration_time_p20_s"] == pytest.approx(5.13)
    assert row["iteration_time_p80_s"] == pytest.approx(5.67)
    assert row["iteration_time_n"] == 4
    assert row["peak_memory_GiB"] == 1.9
    assert (row["status"], row["evidence"], row["device"]) == ("ok", "measured", "CPU, 2 threads")
    assert row["commit"] == "0123456789"
    assert row["point_id"].startswith("core-n64-cache-fp32-eager-")


@pytest.mark.parametrize(
    "unit, value, column, shown",
    [
        ("s", 0.002, "forward_backward_time_ms", 2.0),
        ("us", 2000.0, "forward_backward_time_ms", 2.0),
        ("GiB", 1.0, "peak_memory_MiB", 1024.0),
        ("B", 2**21, "peak_memory_MiB", 2.0),
        ("fraction", 0.25, "mfu_percent", 25.0),
        ("%", 25.0, "mfu_percent", 25.0),
        ("1", 3.5, "loss", 3.5),
    ],
)
def test_units_are_converted(make, unit, value, column, shown):
    name = {"ms": "forward_backward_time", "MiB": "peak_memory", "percent": "mfu"}.get(column.split("_")[-1], "loss")
    records = make({"eager": {name: Metric(value, unit)}}, what="kernel")
    assert sweep_table(records).iloc[0][column] == pytest.approx(shown)


def test_speed_up_and_memory_ratio_divide_the_baseline_by_the_contender(make):
    base = {**seconds(6.0), "peak_memory": Metric(3.0, "GiB")}
    ours = {**seconds(2.0), "peak_memory": Metric(4.0, "GiB")}
    table = by_contender(make({"eager": base, "megafold": ours}))
    assert table.loc["megafold", "speedup_x"] == pytest.approx(3.0)
    assert table.loc["megafold", "memory_ratio_x"] == pytest.approx(0.75)
    assert table.loc["eager", "speedup_x"] == 1.0


def test_the_baseline_of_the_data_pipeline_is_stock(make):
    rivals = {"stock": {"example_time": Metric(2.0, "s")}, "evopipe": {"example_time": Metric(40.0, "ms")}}
    assert by_contender(make(rivals, what="data_pipeline")).loc["evopipe", "speedup_x"] == pytest.approx(50.0)


def test_kernels_have_a_forward_ratio_of_their_own(make):
    def times(forward, both):
        return {"forward_time": Metric(forward, "ms"), "forward_backward_time": Metric(both, "ms")}

    table = by_contender(make({"eager": times(2.0, 9.0), "evoflash3d": times(1.0, 3.0)}, what="kernel"))
    assert table.loc["evoflash3d", "forward_speedup_x"] == pytest.approx(2.0)
    assert table.loc["evoflash3d", "speedup_x"] == pytest.approx(3.0)


@pytest.mark.parametrize("vendor, ratio", [("nvidia", 4.0), ("cpu", None)])
def test_resident_memory_of_a_kernel_gives_no_ratio(make, vendor, ratio):
    def used(mib):
        return {"forward_backward_time": Metric(1.0, "ms"), "peak_memory": Metric(mib, "MiB")}

    records = make({"eager": used(8.0), "evoflash3d": used(2.0)}, what="kernel", vendor=vendor)
    found = by_contender(records).loc["evoflash3d", "memory_ratio_x"]
    assert pd.isna(found) if ratio is None else found == ratio
    assert ("no Triton kernel is timed" in print_table(records)) is (vendor == "cpu")


def test_memory_that_read_as_zero_gives_no_ratio(make):
    base = {**seconds(1.0), "peak_memory": Metric(0.0, "GiB")}
    table = by_contender(make({"eager": base, "megafold": {**seconds(1.0), "peak_memory": Metric(1.0, "GiB")}}))
    assert pd.isna(table.loc["megafold", "memory_ratio_x"])


def test_no_ratio_across_comparisons(make):
    short, long = make({"eager": seconds(1.0)}, n_tokens=32), make({"megafold": seconds(1.0)}, n_tokens=64)
    table = by_contender([*short, *long])
    assert math.isnan(table.loc["megafold", "speedup_x"])
    assert table.loc["megafold", "ratio_note"] == "this comparison has no baseline eager"


@pytest.mark.parametrize(
    "other",
    [{"started": "2026-02-02T00:00:00+00:00"}, {"slurm_job_id": "77"}, {"device": "Another CPU"}, {"commit": "f" * 16}],
    ids=["later run", "other job", "other device", "other commit"],
)
def test_no_ratio_across_runs_of_one_comparison(make, other):
    eager, megafold = make({"eager": seconds(2.0), "megafold": seconds(1.0)})
    moved = replace(megafold, provenance={**megafold.provenance, **other})
    assert by_contender([eager, megafold]).loc["megafold", "speedup_x"] == 2.0
    table = by_contender([eager, moved])
    assert pd.isna(table.loc["megafold", "speedup_x"])
    assert "another run" in table.loc["megafold", "ratio_note"]


def test_no_ratio_between_measured_and_projected(make):
    eager, megafold = make({"eager": seconds(2.0), "megafold": seconds(1.0)})
    assert pd.isna(by_contender([eager, replace(megafold, evidence="projected")]).loc["megafold", "speedup_x"])


def test_a_baseline_without_memory_leaves_the_ratio_empty_and_says_so(make):
    records = make({"eager": ("oom", "out of memory"), "megafold": seconds(1.0)})
    table = by_contender(records)
    assert pd.isna(table.loc["megafold", "speedup_x"])
    assert table.loc["megafold", "ratio_note"] == "the baseline eager ran out of memory at this shape"
    assert (table.loc["eager", "status"], table.loc["eager", "reason"]) == ("oom", "out of memory")
    printed = print_table(records)
    assert "eager at N = 64: oom (out of memory)." in printed
    assert "No ratio for megafold: the baseline eager ran out of memory at this shape." in printed


def test_ours_comes_last_and_the_baseline_first(demo):
    table = readable_table([record for record in demo if record.point.setting.sweep == "ablation"])
    assert list(table["Contender"]) == ["eager", "only-sdpa", "only-shared_conditioning", "megafold"]


def test_golden_markdown(make, tmp_path):
    step = {**seconds(5.4), "peak_memory": Metric(1.9, "GiB"), "loader_wait": Metric(0.0123, "s")}
    ours = {**seconds(3.176), "peak_memory": Metric(1.4, "GiB"), "loader_wait": Metric(0.011, "s")}
    rivals = {"eager": step, "compile": ("unsupported", "no compiler | none"), "megafold": ours}
    csv, markdown = write_tables(make(rivals, sweep="unshipped", data="cache"), "unshipped", tmp_path)
    text = markdown.read_text()
    assert text.startswith(
        "# unshipped\n\n**CPU demo: 2 threads · demo model · core workload · real crops · fp32 · measured"
        " · commit 0123456789.** Reproduce with `megafold sweep unshipped --set workload=core "
    )
    assert text.split("\n\n")[2] == (
        "|   N | Contender   | Outcome     | Training step (s)   |   Speed-up | Peak memory (GiB)   |   Memory ratio |"
        " Loader wait (s)   |\n"
        "|----:|:------------|:------------|:--------------------|-----------:|:--------------------|---------------:|"
        ":------------------|\n"
        "|  64 | eager       | ok          | 5.40 (4.86-5.94)    |      1.00× | 1.90                |          1.00× |"
        " 0.0123            |\n"
        "|  64 | compile     | unsupported | –                   |          – | –                   |              – |"
        " –                 |\n"
        "|  64 | megafold    | ok          | 3.18 (2.86-3.49)    |      1.70× | 1.40                |          1.36× |"
        " 0.0110            |"
    )
    assert "compile at N = 64: unsupported (no compiler | none)." in text
    table = pd.read_csv(csv)
    assert table["iteration_time_s"].dropna().tolist() == [5.4, 3.176]
    assert table.loc[table["contender"] == "compile", "reason"].item() == "no compiler | none"


def test_a_shipped_size_is_reproduced_by_its_name(tmp_path):
    from experiments.record import Record
    from experiments.spec import load_sweep

    comparison = load_sweep("iteration", size="demo").comparisons[0]
    record = Record(comparison.points[0], comparison.id, "timeout", "cpu", reason="no sign of life")
    text = write_tables([record], "iteration", tmp_path)[1].read_text()
    assert "`megafold sweep iteration --size demo --out results/again`" in text


def test_uncommitted_changes_are_told(make):
    records = make({"eager": seconds(1.0)}, provenance={"dirty": True})
    assert "commit 0123456789 with uncommitted changes" in print_table(records)


def test_evidence_is_shown_where_it_is_not_measured(make):
    table = readable_table(make({"eager": seconds(1.0)}, evidence="emulated", mode="emulated"))
    assert table["Evidence"].tolist() == ["emulated"]


def test_no_records_is_a_sentence(tmp_path):
    assert print_table([]) == "no records"
    assert write_tables([], "kernels", tmp_path)[1].read_text() == "# kernels\n\nNo records.\n"
