"""The index: what it finds, what a look-up costs, parts of a build, and what makes an entry another one."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from megafold.errors import InputError
from megafold.evopipe import identity, index, parts, simulate
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.index import BLOCK_ROWS, Index, write_index
from megafold.evopipe.shards import row_type


def rows_of(names) -> np.ndarray:
    rows = np.zeros(len(names), row_type(max(map(len, names))))
    rows["name"] = sorted(name.encode() for name in names)
    rows["tokens"] = np.arange(len(names))
    return rows


@pytest.mark.parametrize("count", [1, BLOCK_ROWS - 1, BLOCK_ROWS, BLOCK_ROWS + 1, 5 * BLOCK_ROWS + 3])
def test_every_name_is_found_and_no_other(tmp_path, count):
    names = [f"{number:05}-assembly1" for number in range(0, 2 * count, 2)]
    write_index(tmp_path / "c.h5", rows_of(names), ["x.h5"], 0)
    found = Index(tmp_path / "c.h5")
    assert len(found) == count
    assert all(int(found.find(name)["tokens"]) == place for place, name in enumerate(names))
    others = [f"{number:05}-assembly1" for number in range(1, 2 * count, 2)] + ["", "zz", "0", names[0] + "x", "é"]
    assert all(found.find(name) is None for name in others)
    assert [found.row(place)["name"].decode() for place in range(count)] == names
    found.close()


def test_look_up_costs_one_block_however_many_entries_there_are(tmp_path, monkeypatch):
    """Bytes and calls are counted, not seconds; `megafold cache simulate` measures those, up to a million entries."""
    read, kept = {}, {}
    pread = os.pread
    for entries in (2_000, 20_000):
        path = tmp_path / f"{entries}.h5"
        simulate.generate(path, entries)
        cache = StructureCache(path)
        assert len(cache.names) == entries
        calls = []
        monkeypatch.setattr(os, "pread", lambda *a, calls=calls: calls.append(a[1]) or pread(*a))
        rng = np.random.default_rng(0)
        for place in rng.integers(0, entries, 300):
            name = cache.names[int(place)]
            assert name in cache.names and cache.msa_depth(name) == simulate.ROWS
        monkeypatch.undo()
        read[entries], kept[entries] = (len(calls), max(calls)), len(cache.index._kept)
        assert cache.read(name).n_tokens == simulate.TOKENS
        assert "x" not in cache.names
    assert all(calls <= 300 and largest < 20_000 for calls, largest in read.values())
    assert max(kept.values()) <= index.KEPT_BLOCKS


def test_simulation_measures_a_cache(tmp_path):
    table = simulate.simulate(tmp_path, [500]).splitlines()
    assert len(table) == 3 and table[2].startswith("| 500 |")
    assert all(float(cell) > 0 for cell in table[2].replace(",", "").strip("| ").split(" | ")[:6])
    with pytest.raises(InputError, match="exists"):
        simulate.simulate(tmp_path, [500])


SLURM_ARRAY = {"SLURM_ARRAY_TASK_ID": "7", "SLURM_ARRAY_TASK_MIN": "5", "SLURM_ARRAY_TASK_COUNT": "4"}
SLURM_STEP = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8"}


@pytest.mark.parametrize(
    ("text", "environment", "part"),
    [
        ("1/1", {}, (1, 1)),
        ("8/8", SLURM_STEP, (8, 8)),
        ("task", SLURM_STEP, (1, 8)),
        ("task", SLURM_ARRAY, (3, 4)),
        ("task", SLURM_ARRAY | SLURM_STEP, (3, 4)),
    ],
)
def test_part_of_a_task(text, environment, part):
    assert parts.parse_part(text, environment) == part


@pytest.mark.parametrize("text", ["0/4", "5/4", "1", "1/0", "a/b", "-1/4", "task"])
def test_part_that_is_none_is_one_clear_line(text):
    with pytest.raises(InputError, match="--shard"):
        parts.parse_part(text, {})


def test_sparse_array_is_refused():
    with pytest.raises(InputError, match="contiguous"):
        parts.parse_part("task", SLURM_ARRAY | {"SLURM_ARRAY_TASK_ID": "20"})


@pytest.fixture
def code(tmp_path):
    folder = tmp_path / "evopipe"
    shutil.copytree(os.path.dirname(identity.__file__), folder, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.fixture(scope="module")
def known() -> str:
    """Of the code as it is."""
    return identity.code_digest(Path(identity.__file__).parent)


def edit(path, before, after):
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after, 1))


def test_comments_and_docstrings_do_not_make_entries_anew(code, known):
    edit(code / "templates.py", '"""Template features', '"""Features of templates')
    edit(code / "templates.py", "UNKNOWN_CLASS = 20", "# the class of X\nUNKNOWN_CLASS   =  20")
    (code / "loader.py").write_text("no part of the featuriser")
    assert identity.code_digest(code) == known


@pytest.mark.parametrize("module", ["featurize", "structure", "templates", "alignments", "layout", "molecules"])
def test_code_of_the_featuriser_makes_entries_anew(code, known, module):
    with (code / f"{module}.py").open("a") as stream:
        stream.write("\nCHANGED = 1\n")
    assert identity.code_digest(code) != known


def test_key_depends_on_all_that_an_entry_is_made_of(monkeypatch):
    def key(name="a", sources=(("x.cif", "00"),), depth=10):
        return identity.content_key(name, dict(sources), depth)

    keys = [key(), key(name="b"), key(sources=[("x.cif", "01")]), key(sources=[("y.cif", "00")]), key(depth=None)]
    monkeypatch.setattr(identity, "versions", lambda: {"rdkit": "1"})
    keys.append(key())
    monkeypatch.setattr(identity, "code_version", lambda: "other")
    keys.append(key())
    assert len(set(keys)) == len(keys) and all(len(one) == 32 for one in keys)
