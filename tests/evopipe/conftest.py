"""The sample structures (downloaded once a session) and their cache."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest

from megafold.errors import InputError
from megafold.evopipe import sample_data
from megafold.evopipe.sources import DataSource

DEPTH = 64


@pytest.fixture(scope="session")
def sample(tmp_path_factory) -> DataSource:
    """The sample set, downloaded with pip."""
    try:
        return sample_data.fetch_sample(tmp_path_factory.mktemp("sample"))
    except InputError as error:
        pytest.skip(f"the sample data cannot be downloaded: {error}")


@pytest.fixture(scope="session")
def sample_cache(sample, tmp_path_factory) -> Path:
    """The cache of the sample set, 64 alignment rows."""
    from megafold.evopipe.build import build_cache

    path = tmp_path_factory.mktemp("cache") / "sample.h5"
    report = build_cache(sample, path, msa_depth=DEPTH, progress=False)
    assert not report.failed
    assert report.built == [f"{id}-assembly1" for id in sorted(sample_data.ENTRIES)]
    return path


@pytest.fixture
def make_entry():
    """Makes an entry of random numbers."""
    return runpy.run_path(str(Path(__file__).with_name("random_entry.py")))["random_entry"]
