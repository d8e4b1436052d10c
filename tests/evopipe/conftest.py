"""The sample structures (downloaded once a session) and their cache."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from megafold.errors import InputError
from megafold.evopipe import layout, sample_data
from megafold.evopipe.layout import Entry
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
    """Makes an entry of random numbers: sound as storage, no structure."""

    def make(name: str, n: int = 300, rows: int = 40, seed: int = 0) -> Entry:
        rng = np.random.default_rng(seed)
        sizes = {
            "tokens": (n,), "residues": (n,), "atoms": (8 * n,), "bonds": (5,), "links": (2,), "link_tokens": (7,),
            "msa": (rows, n), "deletions": (rows, n), "deletion_values": (9,), "profile": (n, 33),
            "template_mask": (1,), "template_classes": (1, n), "template_state": (1, n),
            "template_positions": (1, n, 3), "template_frames": (1, n, 3, 3),
        }  # fmt: skip
        arrays = {}
        for key, dtype in layout.ARRAYS.items():
            if key == "components":
                arrays[key] = np.array([b"ALA", b"GLY", b"DA", b"ATP"], dtype)
            else:
                size = int(np.prod(sizes[key])) * dtype.itemsize
                data = rng.integers(0, 2, size, dtype=np.uint8)
                arrays[key] = np.frombuffer(data.tobytes(), dtype).reshape(sizes[key]).copy()
        return Entry(name, arrays, ("A", "B"), 1.8, "1987-04-16", {"ATP": "CCO"}, {"x.cif": "0" * 64}, ("a note",))

    return make
