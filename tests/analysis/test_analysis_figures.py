"""Figures: written for each sweep, equal bytes for equal records, failures marked, nothing drawn from nothing."""

from __future__ import annotations

import re
import struct

import pytest

from analysis.figures import why_no_figure, write_figures
from analysis.style import COLOURS, colour
from experiments.record import Metric

pytestmark = pytest.mark.timeout(120)

EXPECTED = {
    "iteration": {"iteration_time", "iteration_memory", "iteration_speedup"},
    "ablation": {"ablation_speedup"},
    "kernels": {"kernels_time", "kernels_speedup"},
    "data_pipeline": {"data_pipeline_time"},
}


@pytest.fixture(scope="module")
def drawn(demo, tmp_path_factory):
    folder = tmp_path_factory.mktemp("figures")
    return {sweep: write_figures(demo, sweep, folder) for sweep in EXPECTED}


@pytest.mark.parametrize("sweep", EXPECTED)
def test_each_sweep_gives_its_figures_as_png_and_svg(drawn, sweep):
    assert {path.stem for path in drawn[sweep]} == EXPECTED[sweep]
    assert {path.suffix for path in drawn[sweep]} == {".png", ".svg"}
    for path in drawn[sweep]:
        if path.suffix == ".png":
            assert path.read_bytes().startswith(b"\x89PNG")
            width, height = struct.unpack(">II", path.read_bytes()[16:24])
            assert width >= 1200 and height >= 350
        else:
            assert path.stat().st_size > 10_000


def test_equal_records_give_equal_bytes(demo, drawn, tmp_path):
    again = write_figures(list(reversed(demo)), "iteration", tmp_path)
    for first, second in zip(drawn["iteration"], again):
        assert first.read_bytes() == second.read_bytes(), first.name


def test_files_hold_no_date(drawn):
    for path in (path for paths in drawn.values() for path in paths if path.suffix == ".svg"):
        assert not re.search(r"<dc:date>|20\d\d-\d\d-\d\d", path.read_text())


@pytest.mark.parametrize("lengths", [(64,), (32, 64), (256, 384, 512)], ids=["one", "two", "three"])
def test_out_of_memory_is_marked_at_its_length(make, tmp_path, monkeypatch, lengths):
    said: list[str] = []
    from matplotlib.axes import Axes

    original = Axes.annotate
    monkeypatch.setattr(
        Axes,
        "annotate",
        lambda self, text, *args, **kwargs: (said.append(text), original(self, text, *args, **kwargs))[1],
    )
    records = []
    for length in lengths:
        last = length == lengths[-1]
        eager = ("oom", "out of memory") if last else {"iteration_time": Metric(2.0, "s")}
        ours = {"iteration_time": Metric(1.0, "s"), "mfu": Metric(20.0, "%")}
        records += make({"eager": eager, "megafold": ours}, n_tokens=length, vendor="nvidia")
    written = {path.stem for path in write_figures(records, "iteration", tmp_path)}
    assert {"iteration_time", "iteration_mfu"} <= written
    assert [text for text in said if "OOM" in text] == ["× OOM" if len(lengths) > 2 else "OOM"] * 2


def test_nothing_to_draw_gives_no_file_and_a_reason(make, tmp_path):
    records = make({"eager": ("oom", "out of memory"), "compile": ("unsupported", "no compiler")})
    assert write_figures(records, "iteration", tmp_path) == []
    assert list(tmp_path.iterdir()) == []
    assert why_no_figure(records) == "no point has a result (outcomes: oom, unsupported)"
    assert write_figures(records, "kernels", tmp_path) == []
    assert why_no_figure([]) == "no records"


def test_devices_are_never_mixed_in_one_figure(make, tmp_path):
    rivals = {"eager": {"iteration_time": Metric(2.0, "s")}}
    records = [*make(rivals), *make(rivals, vendor="nvidia")]
    stems = {path.stem for path in write_figures(records, "iteration", tmp_path)}
    assert stems == {"iteration_time_cpu_2_threads", "iteration_time_nvidia_h200"}


def test_memory_of_kernels_is_drawn_on_a_gpu_only(make, tmp_path):
    metrics = {"forward_backward_time": Metric(2.0, "ms"), "peak_memory": Metric(4.0, "MiB")}
    for vendor, drawn in (("nvidia", True), ("cpu", False)):
        stems = {
            path.stem
            for path in write_figures(make({"eager": metrics}, what="kernel", vendor=vendor), "kernels", tmp_path)
        }
        assert ("kernels_memory" in stems) is drawn


def test_titles_state_device_and_evidence(make, tmp_path, monkeypatch):
    from matplotlib.figure import Figure

    said: list[str] = []
    original = Figure.text
    monkeypatch.setattr(
        Figure, "text", lambda self, x, y, text, **kwargs: (said.append(text), original(self, x, y, text, **kwargs))[1]
    )
    rivals = {"eager": {"iteration_time": Metric(2.0, "s")}}
    write_figures(make(rivals, evidence="emulated"), "iteration", tmp_path)
    assert any("CPU demo: 2 threads" in text and "emulated" in text for text in said)


def test_colours_are_distinct_where_contenders_meet():
    together = ("eager", "sdpa", "compile", "evoflash3d", "trifast", "cuequivariance", "openfold3", "protenix")
    assert len({colour(name) for name in together}) == len(together)
    assert colour("some new peer") == colour("some new peer")
    assert colour("eager") == COLOURS["stock"]
