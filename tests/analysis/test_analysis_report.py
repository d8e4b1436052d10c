"""The report: one file with everything in it, honest labels, failures and reasons, and one line for a broken record."""

from __future__ import annotations

import base64
import json
import re
import shutil
from html.parser import HTMLParser

import pytest

from analysis.headlines import headlines
from analysis.report import write_report
from experiments.record import Metric
from megafold.errors import InputError

pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def page(demo, folder_of):
    site = folder_of(demo)
    return write_report(site, site / "report.html").read_text()


class Resources(HTMLParser):
    """Collects what a browser would load, and checks that tags are closed in order."""

    VOID = ("meta", "img", "link", "br", "hr", "input")

    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        attributes = dict(attrs)
        self.loaded += [attributes[name] for name in ("src", "srcset", "data", "poster") if name in attributes]
        self.loaded += [attributes["href"]] if tag == "link" else []
        if tag in ("script", "iframe", "object", "embed"):
            self.loaded.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_everything_is_inside_the_file(page):
    parser = Resources()
    parser.feed(page)
    assert parser.open == []
    assert len(parser.loaded) == 7
    assert all(source.startswith("data:image/svg+xml;base64,") for source in parser.loaded)
    for source in parser.loaded:
        assert base64.b64decode(source.partition(",")[2]).rstrip().endswith(b"</svg>")
    assert not re.search(r"@import|url\(", page)


def test_a_cpu_demo_is_labelled(page):
    assert "<strong>CPU demo.</strong>" in page
    assert page.count("CPU demo, not comparable with the paper") == 4
    assert "not measured here" in page


def test_failures_and_reasons_are_listed(page):
    failures = page[page.index('id="failures"') :]
    assert "no C++ compiler on this host" in failures
    assert "needs a GPU" in failures


def test_sections_provenance_and_commands(page):
    for anchor in ("iteration", "ablation", "kernels", "data_pipeline", "claims", "failures", "provenance"):
        assert f'id="{anchor}"' in page and f'href="#{anchor}"' in page
    assert "0123456789abcdef" in page
    assert "Some CPU @ 2.00GHz" in page
    assert "megafold sweep data_pipeline" in page
    assert "uncommitted changes" not in page


def test_uncommitted_changes_warn(make, folder_of):
    site = folder_of(make({"eager": {"iteration_time": Metric(1.0, "s")}}, provenance={"dirty": True}))
    text = write_report(site, site / "report.html").read_text()
    assert "1 of 1 points were measured with uncommitted changes" in text


def test_text_from_records_is_escaped(make, folder_of):
    site = folder_of(make({"eager": ("error", "<script>alert(1)</script>")}))
    text = write_report(site, site / "report.html").read_text()
    assert "<script" not in text and "&lt;script&gt;" in text
    assert "No figure: no point has a result (outcomes: error)." in text


def test_correctness_checks_are_reported(demo, folder_of):
    site = folder_of(demo[:3])
    (site / "verify.json").write_text(json.dumps({"checks": [{"name": "a", "ok": True}, {"name": "b", "ok": False}]}))
    text = write_report(site, site / "report.html").read_text()
    assert "1 of 2 correctness checks failed:</strong> b." in text
    (site / "verify.json").write_text("[]")
    with pytest.raises(InputError, match=r"verify\.json: checks: is not what"):
        write_report(site, site / "report.html")


@pytest.mark.parametrize(
    "spoil, field",
    [
        (lambda content: content.pop("status"), "status"),
        (lambda content: content.update(evidence="guessed"), "evidence"),
        (lambda content: content["metrics"]["iteration_time"].pop("unit"), "metrics"),
        (lambda content: content["point"].pop("dtype"), "dtype"),
    ],
    ids=["missing status", "unknown evidence", "metric without unit", "point without dtype"],
)
def test_a_broken_record_names_file_and_field(demo, folder_of, spoil, field):
    site = folder_of(demo[:1])
    file = next((site / "records").rglob("*.json"))
    content = json.loads(file.read_text())
    spoil(content)
    file.write_text(json.dumps(content))
    with pytest.raises(InputError) as caught:
        write_report(site, site / "report.html")
    assert (caught.value.file, caught.value.field) == (str(file), field)
    assert not (site / "report.html").exists()


def test_a_truncated_record_and_an_empty_folder_are_one_line(demo, folder_of, tmp_path):
    site = folder_of(demo[:1])
    file = next((site / "records").rglob("*.json"))
    file.write_text(file.read_text()[:100])
    with pytest.raises(InputError, match="is not valid JSON"):
        write_report(site, site / "report.html")
    shutil.rmtree(site / "records")
    with pytest.raises(InputError, match="holds no record"):
        write_report(site, site / "report.html")


def pair(eager: float, ours: float) -> dict[str, dict[str, Metric]]:
    return {"eager": {"iteration_time": Metric(eager, "s")}, "megafold": {"iteration_time": Metric(ours, "s")}}


@pytest.mark.parametrize(
    "ours, value, verdict",
    [(1.0, "2.00×", "faster"), (4.0, "2.00×", "slower"), (1.99, "1.01×", "as fast"), (0.1, "20×", "faster")],
)
def test_headlines_say_slower_where_it_is_slower(make, ours, value, verdict):
    card = headlines(make(pair(2.0, ours)))[0]
    assert (card.value, card.verdict) == (value, verdict)


def test_headlines_take_the_longest_length_not_the_best_value(make):
    records = [*make(pair(9.0, 1.0), n_tokens=32), *make(pair(3.0, 2.0), n_tokens=64)]
    records += make({"eager": ("oom", "out of memory"), "megafold": pair(1, 1)["megafold"]}, n_tokens=128)
    card = headlines(records)[0]
    assert card.value == "1.50×"
    assert card.conditions.startswith("N = 64 · CPU, 2 threads · demo model · core workload")
