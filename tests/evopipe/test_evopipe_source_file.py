"""The files that a cache was built from are found again."""

from __future__ import annotations

import pytest

from megafold.errors import InputError
from megafold.evopipe.source_file import read_source, write_source
from megafold.evopipe.sources import DataSource


def test_source_is_read_back_with_absolute_paths(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in ("mmcif", "msa"):
        (tmp_path / folder).mkdir()
    write_source(tmp_path / "a.h5", DataSource("folders", mmcif=tmp_path / "mmcif", msa=tmp_path / "msa"))
    found = read_source(tmp_path / "a.h5")
    assert found == DataSource("folders", mmcif=tmp_path / "mmcif", msa=tmp_path / "msa")


def test_without_a_file_it_is_the_sample_set(tmp_path):
    assert read_source(tmp_path / "a.h5").name == "sample"


def test_a_broken_file_is_named(tmp_path):
    (tmp_path / "a.h5.source.json").write_text('{"name": "folders"}')
    with pytest.raises(InputError, match=r"a\.h5\.source\.json"):
        read_source(tmp_path / "a.h5")
