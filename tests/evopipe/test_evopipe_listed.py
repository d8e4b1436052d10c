"""A build over a folder of all sorts: what can be is featurised, and everything else is in the report."""

from __future__ import annotations

import json
import shutil

import pytest

from megafold.evopipe.build import build_cache
from megafold.evopipe.merge import report_path
from megafold.evopipe.report import Finding
from megafold.evopipe.sources import DataSource


@pytest.fixture(scope="module")
def built(sample, tmp_path_factory):
    """The report of a build over good, broken, doubled and foreign files, and the cache."""
    root = tmp_path_factory.mktemp("mixed")
    folder = root / "mmcif"
    folder.mkdir()
    for id in ("1ubq", "4zey"):
        shutil.copy(sample.mmcif / f"{id}.cif", folder)
    (folder / "1bad.cif").write_bytes((sample.mmcif / "1kd8.cif").read_bytes()[:40_000])
    (folder / "2bad.cif").write_text("data_2bad\n_entry.id 2bad\n")
    (folder / "3bad.cif.gz").write_bytes(b"\x1f\x8b\x08\x00 no gzip")
    (folder / "1ubq.mmcif").write_text("data_1ubq\n")
    (folder / "4old.pdb").write_text("HEADER\n")
    out = root / "c.h5"
    return build_cache(DataSource("folders", folder), out, msa_depth=8, progress=False), out


def test_one_bad_file_ends_nothing(built):
    report, _ = built
    assert report.built == ["1ubq-assembly1", "4zey-assembly1"]
    assert sorted(entry for _, entry, _ in report.failed) == sorted(
        ["1bad-assembly1", "2bad-assembly1", "3bad-assembly1", "1ubq-assembly1", "4old-assembly1"]
    )


def test_every_file_that_is_not_used_is_listed_with_what_to_do(built):
    report, out = built
    lines = [Finding.from_json(json.loads(line)) for line in report_path(out).read_text().splitlines()]
    failed = {finding.file.rpartition("/")[2]: finding for finding in lines if finding.kind == "failed"}
    assert set(failed) == {"1bad.cif", "2bad.cif", "3bad.cif.gz", "1ubq.mmcif", "4old.pdb"}
    assert all(finding.entry and finding.reason and finding.action for finding in failed.values())
    assert all(f" -> {finding.action}" in str(report) for finding in failed.values())


def test_what_was_left_out_of_a_used_file_is_listed(built):
    _, out = built
    lines = [Finding.from_json(json.loads(line)) for line in report_path(out).read_text().splitlines()]
    [aids] = [finding for finding in lines if finding.code == "crystallisation aids"]
    assert aids.entry == "4zey-assembly1" and "SO4 x2" in aids.reason and aids.kind == "changed"
