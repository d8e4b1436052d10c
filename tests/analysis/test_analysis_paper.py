"""The paper's numbers and ours: matched by quantity and N, compared only where hardware and workload are the same."""

from __future__ import annotations

import pandas as pd
import pytest

from analysis.paper import PAPER, claims_table, deviations, paper_table, read_paper, same_device
from experiments.record import Metric
from megafold.errors import InputError

pytestmark = pytest.mark.timeout(120)


def step(seconds: float, gib: float) -> dict[str, Metric]:
    return {"iteration_time": Metric(seconds, "s"), "peak_memory": Metric(gib, "GiB")}


PAIR = {"eager": step(14.0, 90.0), "megafold": step(7.0, 45.0)}
PAPERS_OWN = {"vendor": "nvidia", "model": "paper", "dtype": "bf16", "workload": "as_published", "data": "cache"}


def test_the_papers_conditions_give_a_ratio(make):
    table = paper_table(make(PAIR, n_tokens=512, **PAPERS_OWN))
    times = table[(table["quantity"] == "iteration_time") & table["paper_hardware"].str.contains("H200")]
    ours = times[times["system"] == "MegaFold"].iloc[0]
    assert (ours["paper"], ours["ours"]) == (8.50, 7.0)
    assert ours["ratio"] == pytest.approx(7.0 / 8.5)
    assert ours["conditions"] == "the paper's hardware and workload"
    memory = table[(table["quantity"] == "peak_memory") & (table["system"] == "PyTorch")].iloc[0]
    assert memory["ours"] == pytest.approx(90 * 2**30 / 1e9)


def test_a_cpu_demo_is_labelled_and_never_divided(make):
    table = paper_table(make(PAIR, n_tokens=128))
    assert len(table) == 4
    assert table["ratio"].isna().all()
    assert table["conditions"].str.contains("not the paper's hardware (CPU, 2 threads)", regex=False).all()
    assert table["conditions"].str.contains("workload differs: core vs as published", regex=False).all()


@pytest.mark.parametrize(
    "change, told",
    [
        ({"vendor": "amd"}, "not the paper's hardware (AMD Instinct MI250X)"),
        ({"workload": "core"}, "workload differs: core vs as published"),
        ({"model": "demo"}, "model differs: demo"),
        ({"data": "synthetic"}, "synthetic batches"),
        ({"sp": 2}, "2 ranks, the paper has 1"),
        ({"evidence": "projected"}, "projected, not measured"),
    ],
    ids=["hardware", "workload", "model", "data", "ranks", "evidence"],
)
def test_each_difference_is_told_and_empties_the_ratio(make, change, told):
    table = paper_table(make(PAIR, n_tokens=512, **{**PAPERS_OWN, **change}))
    h200 = table[table["paper_hardware"] == "1x NVIDIA H200 141GB"]
    assert not h200.empty
    assert h200["ratio"].isna().all()
    assert h200["conditions"].str.contains(told, regex=False).all()


def test_only_equal_lengths_are_matched(make):
    assert paper_table(make(PAIR, n_tokens=500, **PAPERS_OWN)).empty


def test_out_of_memory_is_set_beside_the_papers(make):
    table = paper_table(make({"eager": ("oom", "out of memory")}, n_tokens=640, **PAPERS_OWN))
    assert table[["paper", "ours"]].drop_duplicates().values.tolist() == [["OOM", "OOM"]]
    assert table["ratio"].isna().all()


@pytest.mark.parametrize(
    "device, paper, same",
    [
        ("NVIDIA H200", "NVIDIA H200 141GB", True),
        ("NVIDIA GH200 480GB", "NVIDIA H200 141GB", False),
        ("NVIDIA H200 NVL", "NVIDIA H200 141GB", False),
        ("NVIDIA H100 80GB HBM3", "NVIDIA H200 141GB", False),
        ("AMD Instinct MI250X", "AMD MI250 64GB", False),
        ("AMD Instinct MI250", "AMD MI250 64GB", True),
    ],
)
def test_cards_are_told_apart(make, device, paper, same):
    record = make({"eager": step(1, 1)}, vendor="nvidia", provenance={"device": device})[0]
    assert same_device(record, paper) is same


def test_a_cpu_is_never_the_papers_hardware(make):
    record = make({"eager": step(1, 1)}, provenance={"device": "NVIDIA H200"})[0]
    assert not same_device(record, "NVIDIA H200 141GB")
    assert deviations(record, "NVIDIA H200 141GB")[0].startswith("not the paper's hardware")


def test_claims_of_a_cpu_demo_are_not_measured(demo):
    table = claims_table(demo)
    assert table["paper"].tolist() == ["3.36×", "1.73×", "1.62×", "1.23×", "44.9 %"]
    assert set(table["ours"]) == {"not measured here"}
    assert table["conditions"].tolist()[:2] == [
        "sweep max_length was not run",
        "CPU demo: not the paper's hardware, model or lengths",
    ]


def test_claims_on_the_papers_card_say_what_still_differs(make):
    records = make(PAIR, n_tokens=512, **{**PAPERS_OWN, "workload": "core"})
    records += make({"eager": step(6.0, 9.0), "megafold": step(2.0, 8.0)}, n_tokens=384, **PAPERS_OWN)
    table = claims_table(records).set_index("paper")
    assert table.loc["1.73×", "ours"] == "2.00×"
    assert table.loc["1.73×", "conditions"] == "workload differs: core vs as published"
    assert table.loc["1.23×", "ours"] == "2.00×"
    assert table.loc["1.62×", "ours"] == "not measured here"
    assert table.loc["1.62×", "conditions"] == "3.00× on another card: not the paper's hardware (NVIDIA H200)"


def test_utilisation_at_the_papers_size_is_a_claim_of_the_deep_model_alone(make):
    mfu = {"megafold": {**step(1.0, 9.0), "mfu": Metric(41.25, "%")}}
    paper_size = make(mfu, n_tokens=384, **PAPERS_OWN)
    assert claims_table(paper_size).set_index("paper").loc["44.9 %", "ours"] == "not measured here"
    deep = make(mfu, n_tokens=384, **{**PAPERS_OWN, "model": "paper-1.8b"})
    row = claims_table([*paper_size, *deep]).set_index("paper").loc["44.9 %"]
    assert row["ours"] == "41.2 %"
    assert row["conditions"] == "NVIDIA H200, N = 384, workload as_published, cache data"


def test_a_claim_needs_both_sides_of_one_run(make):
    eager = make({"eager": step(14, 90)}, n_tokens=512, **PAPERS_OWN)
    megafold = make({"megafold": step(7, 45)}, n_tokens=512, **PAPERS_OWN)
    assert set(claims_table([*eager, *megafold])["ours"]) == {"not measured here"}


def test_headline_speed_ups_follow_from_the_papers_own_times():
    paper = read_paper()
    h200 = paper[(paper["hardware"] == "NVIDIA H200 141GB") & (paper["n_tokens"] == 512)]
    times = h200[h200["quantity"] == "iteration_time"].set_index("system")["value"].astype(float)
    assert times["PyTorch"] / times["MegaFold"] == pytest.approx(1.73, abs=0.01)


@pytest.mark.parametrize(
    "spoil, field",
    [
        (lambda frame: frame.drop(columns="precision"), "precision"),
        (lambda frame: frame.assign(value=["fast", *frame["value"][1:]]), "value in row 2"),
    ],
    ids=["missing column", "no number"],
)
def test_a_broken_table_of_the_paper_names_file_and_field(tmp_path, spoil, field):
    file = tmp_path / "paper.csv"
    spoil(pd.read_csv(PAPER, dtype=str)).to_csv(file, index=False)
    with pytest.raises(InputError) as caught:
        read_paper(file)
    assert (caught.value.file, caught.value.field) == (str(file), field)
