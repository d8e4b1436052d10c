"""Files that somebody else made: nothing is unpickled, nothing outside the cache is followed, no claim is believed."""

from __future__ import annotations

import gzip
import json
import pickle
import zlib

import h5py
import numpy as np
import pytest

from megafold.errors import InputError
from megafold.evopipe import cache, codec, crop, index, safe_hdf5, shards, table
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.merge import merge
from megafold.evopipe.shards import Shard, folder_of


class Bomb:
    """Leaves a file behind when it is unpickled."""

    def __init__(self, trace):
        self.trace = trace

    def __reduce__(self):
        return open, (self.trace, "w")


@pytest.mark.parametrize("form", ["npy.gz", "npy", "pkl", "pt"])
def test_pickle_is_refused_and_not_run(tmp_path, form):
    """The published MegaFold caches are `.npy.gz` files that hold pickled objects."""
    trace, path = tmp_path / "ran", tmp_path / f"entry.{form}"
    array = np.array([Bomb(str(trace))], dtype=object)
    if form == "npy.gz":
        with gzip.open(path, "wb") as stream:
            np.save(stream, array, allow_pickle=True)
        with gzip.open(path) as stream:  # it is what it claims to be
            np.load(stream, allow_pickle=True)
        assert trace.exists()
        trace.unlink()
    elif form == "npy":
        with path.open("wb") as stream:
            np.save(stream, array, allow_pickle=True)
    elif form == "pkl":
        path.write_bytes(pickle.dumps(Bomb(str(trace))))
    else:
        import torch

        torch.save(Bomb(str(trace)), path)
    for use in (
        cache.verify,
        cache.describe,
        lambda one: cache.create(one, msa_depth=1),
        lambda one: StructureCache(one).entries(),
    ):
        with pytest.raises(InputError, match=r"not HDF5.*never does") as caught:
            use(path)
        assert "\n" not in str(caught.value) and str(path) in str(caught.value)
    assert not trace.exists()


@pytest.fixture
def small(tmp_path, make_entry):
    path = tmp_path / "c.h5"
    cache.create(path, msa_depth=10)
    shard = Shard(folder_of(path), 10)
    shard.add(make_entry("1abc-assembly1", rows=10), "0" * 32, {})
    shard.seal()
    merge(path)
    return path


def external_link(file, name, elsewhere):
    file[name] = h5py.ExternalLink(str(elsewhere), "secret")


def soft_link(file, name, elsewhere):
    file[name] = h5py.SoftLink("/other")


def virtual_dataset(file, name, elsewhere):
    layout = h5py.VirtualLayout((4,), "u1")
    layout[:] = h5py.VirtualSource(str(elsewhere), "secret", (4,))
    file.create_virtual_dataset(name, layout)


def external_file(file, name, elsewhere):
    file.create_dataset(name, shape=(4,), dtype="u1", external=[(str(elsewhere), 0, 4)])


def object_references(file, name, elsewhere):
    file.create_dataset(name, shape=(2,), dtype=h5py.ref_dtype)


def variable_strings(file, name, elsewhere):
    file.create_dataset(name, data=["a", "b"])


def absurd_size(file, name, elsewhere):
    file.create_dataset(name, shape=(1 << 50,), dtype="u1", chunks=(1 << 16,))


def absurd_compression(file, name, elsewhere):
    dataset = file.create_dataset(name, shape=(1 << 36,), dtype="u1", chunks=(1 << 20,), compression="gzip")
    dataset.id.write_direct_chunk((0,), zlib.compress(b"\0" * (1 << 20)))


def other_type(file, name, elsewhere):
    file[name] = np.zeros(4, "<f8")


def group(file, name, elsewhere):
    file.create_group(name)


ATTACKS = [
    external_link, soft_link, virtual_dataset, external_file, object_references, variable_strings, absurd_size,
    absurd_compression, other_type, group,
]  # fmt: skip


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
@pytest.mark.parametrize("where", ["index", "shard"])
def test_hdf5_file_that_points_elsewhere_or_lies_is_refused(small, tmp_path, attack, where):
    elsewhere = tmp_path / "elsewhere.h5"
    with h5py.File(elsewhere, "w") as file:
        file["secret"] = np.arange(4, dtype="u1")
    [shard] = folder_of(small).glob("*.h5")
    target, names = (small, ("shards", "blocks")) if where == "index" else (shard, ("rows", "findings"))
    for name in names:
        content = target.read_bytes()
        with h5py.File(target, "r+") as file:
            if attack is soft_link:
                file.move(name, "other")
            else:
                del file[name]
            attack(file, name, elsewhere)
        with pytest.raises(InputError, match=f"{target.name}: {name}: ") as caught:
            StructureCache(small).entries() if where == "index" else shards.read_shard(shard)
        assert "\n" not in str(caught.value)
        if where == "shard":
            assert merge(small).problems == [str(caught.value)]
        target.write_bytes(content)


def table_of(shape, block, places, name="msa") -> codec.Table:
    """A table that is not checked when it is made."""
    made = object.__new__(codec.Table)
    made.name, made.dtype, made.shape, made.block, made.places = name, codec.STORED[name], shape, block, places
    return made


PLACE = (0, 100, b"\0" * 16)


@pytest.mark.parametrize(
    ("name", "change", "expected"),
    [
        ("msa", ((1 << 40, 10), (128, 10), []), "claims"),
        ("msa", ((300, 10), (1 << 40, 10), [PLACE]), "claims"),
        ("msa", ((1 << 63, 1 << 63), (1 << 63, 1 << 63), [PLACE]), "claims"),
        ("msa", ((300, 10), (0, 10), [PLACE]), "impossible shape"),
        ("msa", ((300, 10), (128, 10), [PLACE]), "1 blocks|claims"),
        ("tokens", ((300, 5), (300,), [PLACE]), "table of tokens"),
        ("tokens", ((1,), (1,), [PLACE]), "the index says"),
        ("atoms", ((2400,), (2400,), [(1 << 62, 40000, b"\0" * 16)]), "dataset atoms"),
        ("atoms", ((2400,), (2400,), [((1 << 64) - 5, 40000, b"\0" * 16)]), "dataset atoms"),
        (None, b"", "the table is not one"),
        (None, b"\xff" * 40, "the table of 4294967295 arrays"),
        (None, len(codec.STORED).to_bytes(4, "little") + (1 << 31).to_bytes(4, "little"), "the table of"),
        ("short", None, "the table of"),
        ("no json", None, "meta"),
    ],
)
def test_table_of_an_entry_that_lies_is_refused(small, make_entry, name, change, expected):
    """The checksums are right here, as whoever wrote the file can make them."""
    with StructureCache(small) as reader:
        row, tables = reader.row("1abc-assembly1").copy(), dict(reader.tables("1abc-assembly1"))
        path = reader.index.shard_path(row)
        text = json.dumps(reader.meta("1abc-assembly1")).encode()
    if name in tables:
        tables[name] = table_of(*change, name)
    raw = change if name is None else table.pack_tables(tables) + text
    raw = {"short": raw[:1000], "no json": raw[: -len(text) // 2]}.get(name, raw)
    blob = zlib.compress(raw)
    row["meta_offset"], row["meta_bytes"] = path.stat().st_size, len(blob)
    row["meta_sum"] = np.frombuffer(codec.checksum(blob), np.uint8)
    with path.open("ab") as stream:
        stream.write(blob)
    index.write_index(small, np.array([row]), [path.name], 10)
    with StructureCache(small) as reader, pytest.raises(InputError, match=f"1abc-assembly1: .*({expected})") as caught:
        reader.read("1abc-assembly1")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("name", "value"),
    [("deletion_starts", 0xFFFFFFFF), ("deletion_rows", 10), ("deletion_starts", 1)],
    ids=["billions of them", "a row that is not there", "out of order"],
)
def test_deletions_that_lie_are_refused(tmp_path, make_entry, monkeypatch, name, value):
    """Arrays that are sound as blocks, and would have a reader make others of any size."""
    stored = codec.stored

    def lying(entry):
        arrays = stored(entry)
        arrays[name] = arrays[name].copy()
        arrays[name][100 if value > 1 else 200] = value
        return arrays

    monkeypatch.setattr(codec, "stored", lying)
    path = tmp_path / "c.h5"
    cache.create(path, msa_depth=10)
    shard = Shard(folder_of(path), 10)
    shard.add(make_entry("1abc-assembly1", rows=10), "0" * 32, {})
    shard.seal()
    merge(path)
    with StructureCache(path) as reader:
        for read in (reader.read, lambda one: reader.read_alignment(one, np.arange(10), np.ones(300, bool))):
            with pytest.raises(InputError, match=r"1abc-assembly1: corrupt entry \(deletions: "):
                read("1abc-assembly1")


def test_residues_that_name_billions_of_atoms_are_refused(sample_cache):
    entry = StructureCache(sample_cache).read("1psm-assembly1")
    entry.arrays["residues"] = entry.arrays["residues"].copy()
    entry.arrays["residues"]["atoms"] = 1 << 30
    with pytest.raises(InputError, match="1psm-assembly1: residues: corrupt entry"):
        crop.structure_features(entry, np.ones(entry.n_tokens, bool))


@pytest.mark.parametrize("name", ["../elsewhere.h5", "/etc/passwd", "..", ""])
def test_shard_outside_the_folder_is_refused(small, name):
    with StructureCache(small) as reader:
        rows = np.concatenate(list(reader.index.rows()))
    index.write_index(small, rows, [name], 10)
    with pytest.raises(InputError, match="a shard elsewhere"):
        StructureCache(small).entries()


@pytest.mark.parametrize("size", [10, 1000, 100_000])
def test_block_that_grows_beyond_its_size_is_refused_before_it_does(size):
    bomb = zlib.compress(b"\0" * (50 << 20))
    with pytest.raises(codec.BadBlock, match="does not have its size"):
        codec.unpack(bomb, np.dtype("u1"), (size,))


@pytest.mark.parametrize("schema", [1, 2])
def test_old_schema_is_refused_with_what_to_do(tmp_path, schema):
    path = tmp_path / "old.h5"
    with h5py.File(path, "w") as file:  # as versions 1 and 2 began
        file.attrs["schema"], file.attrs["msa_depth"] = schema, 16
        file.create_group("entries")
    for use in (cache.verify, cache.describe, lambda one: cache.create(one, msa_depth=16)):
        with pytest.raises(InputError, match=rf"schema: {schema} found, this version reads 3: build the cache anew"):
            use(path)


def test_references_are_found_inside_compound_types():
    hidden = np.dtype([("a", "<i4"), ("b", np.dtype([("c", h5py.ref_dtype)]), (3,))])
    assert safe_hdf5.has_references(h5py.h5t.py_create(hidden, logical=True))
    assert not safe_hdf5.has_references(h5py.h5t.py_create(shards.row_type(8), logical=True))
