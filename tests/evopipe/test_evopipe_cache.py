"""The HDF5 cache: what is written is read, what is damaged is named and never served."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import h5py
import numpy as np
import pytest

from megafold.errors import InputError
from megafold.evopipe import cache, codec, layout
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.merge import merge
from megafold.evopipe.shards import Shard, folder_of

NAMES = ("1abc-assembly1", "2xyz-assembly1")


@pytest.fixture
def file(tmp_path, make_entry):
    path = tmp_path / "cache.h5"
    cache.create(path, msa_depth=40)
    add(path, *(make_entry(name, seed=seed) for seed, name in enumerate(NAMES)))
    return path


def add(path, *entries) -> None:
    """One more shard with these entries, and the index."""
    shard = Shard(folder_of(path), 40)
    for entry in entries:
        shard.add(entry, codec.checksum(entry.name.encode()).hex(), {"versions": cache.versions()})
    shard.seal()
    merge(path)


def shard_of(path):
    [shard] = folder_of(path).glob("*.h5")
    return shard


def flip(path, offset: int) -> None:
    with path.open("r+b") as handle:
        handle.seek(offset)
        byte = handle.read(1)[0]
        handle.seek(offset)
        handle.write(bytes([byte ^ 0xFF]))


def same(entry, other) -> bool:
    return all(np.array_equal(entry.arrays[key], other.arrays[key]) for key in layout.ARRAYS)


def test_entry_comes_back_as_it_was(file, make_entry):
    with StructureCache(file) as reader:
        assert reader.entries() == ["1abc-assembly1", "2xyz-assembly1"]
        entry = reader.read("2xyz-assembly1")
    written = make_entry("2xyz-assembly1", seed=1)
    assert same(entry, written)
    assert (entry.chains, entry.resolution, entry.released) == (written.chains, written.resolution, written.released)
    assert (entry.smiles, entry.sources, entry.notes) == (written.smiles, written.sources, written.notes)
    assert cache.verify(file) == []


def group_name(path, name) -> str:
    with StructureCache(path) as reader:
        return f"entries/{reader.row(name)['key'].tobytes().hex()}"


def test_shard_is_an_hdf5_file_that_any_program_reads(file, make_entry):
    """The library's own filters give what was written: our reader is a short cut, not another format."""
    expected = codec.stored(make_entry("2xyz-assembly1", seed=1))
    keys = group_name(file, "2xyz-assembly1")
    with h5py.File(shard_of(file)) as handle:
        group = handle[keys]
        assert set(group) == {*codec.STORED, "meta"}
        for name, array in expected.items():
            dataset = group[name]
            assert dataset.dtype == array.dtype and dataset.shape == array.shape
            assert np.array_equal(dataset[()], array)
            assert not array.view("u1").any() or (dataset.chunks and dataset.compression == "gzip")


@pytest.mark.parametrize("rows", [[0, 3, 17, 39], range(40), [12]], ids=["some rows", "all rows", "one row"])
@pytest.mark.parametrize("blocks", [codec.MSA_BLOCK, (32, 16)], ids=["blocks as shipped", "small blocks"])
def test_alignment_window_equals_the_whole(tmp_path, make_entry, monkeypatch, rows, blocks):
    monkeypatch.setattr(codec, "MSA_BLOCK", blocks)
    file = tmp_path / "cache.h5"
    cache.create(file, msa_depth=40)
    add(file, make_entry("1abc-assembly1"))
    rows, keep = np.array(rows), np.zeros(300, bool)
    keep[[5, 6, 7, 200, 290]] = True
    with StructureCache(file) as reader:
        whole = reader.read("1abc-assembly1").arrays
        msa, deletions = reader.read_alignment("1abc-assembly1", rows, keep)
    assert np.array_equal(msa, whole["msa"][rows][:, keep])
    assert np.array_equal(deletions, whole["deletions"][rows][:, keep])


@pytest.mark.parametrize("dataset", [*(name for name in codec.STORED if not name.startswith("template_")), "meta"])
def test_flipped_byte_of_a_dataset_names_the_entry(file, dataset):
    with StructureCache(file) as reader:
        row, tables = reader.row("1abc-assembly1"), reader.tables("1abc-assembly1")
    place = (int(row["meta_offset"]), int(row["meta_bytes"]))
    offset, size = place if dataset == "meta" else tables[dataset].places[0][:2]
    flip(shard_of(file), offset + size // 2)
    alignment = dataset in cache.LAZY
    with StructureCache(file) as reader:
        for read in (reader.read, *([] if alignment else [reader.read_structure])):
            with pytest.raises(InputError, match=r"cache\.h5: 1abc-assembly1: corrupt entry") as caught:
                read("1abc-assembly1")
            assert "\n" not in str(caught.value) and dataset in str(caught.value)
        if alignment or dataset == "meta":
            with pytest.raises(InputError, match="1abc-assembly1"):
                reader.read_alignment("1abc-assembly1", np.arange(40), np.ones(300, bool))
        assert reader.read("2xyz-assembly1").n_tokens == 300
    problems = cache.verify(file)
    assert len(problems) == 1 and "1abc-assembly1" in problems[0]


@pytest.mark.parametrize("value", [1, 37])
def test_rewrite_through_the_library_is_never_served(file, make_entry, value):
    """HDF5 finds nothing wrong then. It writes the block in its place, or elsewhere: the old one is read, or none."""
    with h5py.File(shard_of(file), "r+") as handle:
        handle[group_name(file, "1abc-assembly1")]["msa"][3, :] ^= value
    try:
        with StructureCache(file) as reader:
            assert same(reader.read("1abc-assembly1"), make_entry("1abc-assembly1"))
    except InputError as error:
        assert "1abc-assembly1: corrupt entry" in str(error)


SWEEP = """
import sys
import numpy as np
from megafold.errors import InputError
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.layout import ARRAYS
path, target, names = *sys.argv[1:], ["1abc-assembly1", "2xyz-assembly1"]
def read():
    out = {}
    with StructureCache(path) as reader:
        for name in names:
            try:
                out[name] = reader.read(name)
            except InputError as error:
                assert "\\n" not in str(error), error
                out[name] = None
    return out
good = read()
data = bytearray(open(target, "rb").read())
refused = 0
for offset in np.random.default_rng(0).integers(0, len(data), 150):
    data[offset] ^= 0xFF
    open(target, "wb").write(data)
    now = read()
    data[offset] ^= 0xFF
    for name in names:
        if now[name] is None:
            refused += 1
        elif any(not np.array_equal(now[name].arrays[key], good[name].arrays[key]) for key in ARRAYS):
            sys.exit(f"served damaged data: offset {offset}, {name}")
print(refused)
"""


@pytest.mark.parametrize("which", ["index", "shard"])
def test_no_flipped_byte_of_the_file_is_served(file, which):
    """In a process of its own: a broken HDF5 file must not take the test run down."""
    target = file if which == "index" else shard_of(file)
    command = [sys.executable, "-c", SWEEP, str(file), str(target)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert int(done.stdout) > 50  # most bytes matter


@pytest.mark.parametrize("keep", [0, 100, 0.5, 0.999], ids=["empty", "100 bytes", "half", "almost all"])
def test_truncated_file_is_one_clear_line(file, keep):
    data = file.read_bytes()
    file.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    with pytest.raises(InputError, match=r"cache\.h5: cache: cannot be opened"):
        StructureCache(file).entries()


@pytest.mark.parametrize("problem", ["missing", "text", "schema"])
def test_file_that_is_no_cache_is_one_clear_line(file, problem):
    if problem == "missing":
        file.unlink()
    elif problem == "text":
        file.write_text("not a cache")
    else:
        with h5py.File(file, "r+") as handle:
            handle.attrs["schema"] = 99
    expected = {"missing": "no such file", "text": "cannot be opened", "schema": "schema: 99 found"}[problem]
    for use in (lambda: StructureCache(file).entries(), lambda: cache.verify(file), lambda: cache.describe(file)):
        with pytest.raises(InputError, match=expected) as caught:
            use()
        assert str(file) in str(caught.value)


def test_unknown_entry_is_named(file):
    with StructureCache(file) as reader, pytest.raises(InputError, match="9zzz-assembly1: no such entry"):
        reader.read("9zzz-assembly1")


def test_entry_written_last_counts(file, make_entry):
    add(file, make_entry("1abc-assembly1", seed=7))
    with StructureCache(file) as reader:
        assert reader.entries() == list(NAMES)
        assert same(reader.read("1abc-assembly1"), make_entry("1abc-assembly1", seed=7))
        assert same(reader.read("2xyz-assembly1"), make_entry("2xyz-assembly1", seed=1))


def test_reader_keeps_its_cache_while_a_build_replaces_it(file, make_entry):
    with StructureCache(file) as reader:
        assert len(reader.names) == 2
        add(file, make_entry("3new-assembly1", seed=3))
        assert list(reader.names) == list(NAMES) and same(reader.read(NAMES[0]), make_entry(NAMES[0]))
    with StructureCache(file) as reader:
        assert list(reader.names) == [*NAMES, "3new-assembly1"]


def test_another_depth_is_refused(file):
    with pytest.raises(InputError, match="msa_depth: was built with 40 rows, asked for 41"):
        cache.create(file, msa_depth=41)


@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_open_reader_works_in_child_processes(file, method):
    context = multiprocessing.get_context(method)
    with StructureCache(file) as reader:
        expected = reader.read("1abc-assembly1")  # the file is open in the parent
        with ProcessPoolExecutor(2, mp_context=context) as pool:
            futures = [pool.submit(StructureCache.read, reader, "1abc-assembly1") for _ in range(2)]
            assert all(same(future.result(timeout=60), expected) for future in futures)
        assert same(reader.read("1abc-assembly1"), expected)


def test_pickled_reader_carries_no_handle(file):
    with StructureCache(file) as reader:
        reader.read("1abc-assembly1")
        assert len(pickle.dumps(reader)) < 1000


def test_description_names_entries_sizes_and_versions(file):
    text = cache.describe(file)
    for expected in ("1abc-assembly1", "2xyz-assembly1", "300", "2400", "2 entries", "rdkit", "note: a note"):
        assert expected in text
    assert "... the first 1 of 2 entries" in cache.describe(file, limit=1)


MEMORY = """
import sys, numpy as np
from megafold.evopipe.cache import StructureCache

def peak():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")) / 1024

with StructureCache(sys.argv[1]) as reader:
    keep = np.zeros(reader.row("deep")["tokens"], bool)
    keep[::3] = True
    reader.read_structure("small")
    before = peak()
    rows = np.sort(np.random.default_rng(0).choice(reader.msa_depth("deep"), 256, replace=False))
    for _ in range(3):
        reader.read_structure("deep")
        msa, deletions = reader.read_alignment("deep", rows, keep)
    print(peak() - before)
"""


def test_memory_of_a_reader_does_not_grow_with_the_depth_of_an_alignment(tmp_path, make_entry):
    """A window is cut out of one block after the other: the whole alignment, 48 MB here, is never in memory."""
    path = tmp_path / "deep.h5"
    cache.create(path, msa_depth=40)
    deep = make_entry("deep", n=3000, rows=1)
    deep.arrays["msa"] = np.tile(np.arange(3000, dtype="u1") % 32, (16000, 1))
    deep.arrays["deletions"] = np.zeros((16000, 3000), "<u2")
    deep.arrays["deletions"][::100, ::10] = 3
    add(path, make_entry("small"), deep)
    done = subprocess.run([sys.executable, "-c", MEMORY, str(path)], capture_output=True, text=True, timeout=120)
    assert float(done.stdout) < 24, done.stdout + done.stderr


def test_readers_that_are_dropped_close_their_files(file):
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(50):
        StructureCache(file).read("1abc-assembly1")
    assert len(os.listdir("/proc/self/fd")) <= before + 2
