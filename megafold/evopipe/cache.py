"""The cache: an index (`NAME.h5`), and beside it a folder of immutable shards (`NAME.h5.shards/*.h5`). docs/cache.md
describes both.

Whatever is read is checked first: the index has a checksum, which covers those of its blocks, which cover the place and
the checksum of each entry's table, which covers those of each block of its arrays. Nothing is ever unpickled, and
reading an entry does not involve the HDF5 library. A reader may be sent to forked and spawned workers.
"""

from __future__ import annotations

import itertools
import json
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from megafold.errors import InputError
from megafold.evopipe import codec
from megafold.evopipe.index import Index, write_index
from megafold.evopipe.layout import ARRAYS, SCHEMA_VERSION, Entry
from megafold.evopipe.report import Finding
from megafold.evopipe.shards import folder_of, row_type

PACKAGES = ("alphafold3-pytorch", "rdkit", "biotite", "gemmi", "numpy")
OPEN_SHARDS = 32
MAX_META = 1 << 28  # bytes
MAX_RUNS = 48  # of columns in a block of 256 that are copied run by run
LAZY = ("msa", *codec.SPARSE)  # read by rows and columns, the rest as a whole


def versions() -> dict[str, str]:
    """Versions of the packages that the features depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def create(path: Path, *, msa_depth: int | None) -> None:
    """Make an empty cache, or check that an existing one can take entries of this depth.

    Raises:
        InputError: the file is no cache of this schema, or was built with another `msa_depth`.
    """
    path = Path(path)
    if path.exists():
        index = Index(path)
        depth = index.msa_depth
        index.close()
        if depth != (msa_depth or 0):
            raise InputError(path, "msa_depth", f"was built with {depth or 'all'} rows, asked for {msa_depth or 'all'}")
    else:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_index(path, np.zeros(0, row_type(1)), [], msa_depth or 0)
    folder_of(path).mkdir(exist_ok=True)


class StructureCache:
    """Reads a cache. Opens files lazily, once per process; can be pickled. Keeps no entry in memory.

    Args:
        path: the index.

    Raises:
        InputError: from every method, naming the file and the entry, for a missing file, another schema, an unknown
            entry, or data that fails a checksum. Such data is never returned.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._reset()
        self.path = Path(path)
        self._expected = b""  # checksum of the index that the process had open from which this reader was sent

    def _reset(self) -> None:
        self._index: Index | None = None
        self._shards: OrderedDict[int, int] = OrderedDict()
        self._last_name = ""
        self._last: tuple[np.void | None, dict[str, Any], dict[str, codec.Table]] = (None, {}, {})  # the last entry

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "expected": self._index.digest if self._index is not None else self._expected}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self._reset()
        self.path, self._expected = state["path"], state["expected"]

    def __enter__(self) -> StructureCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the files; the next read opens them again. A fork may close its own copies."""
        if self._index is not None:
            self._index.close()
        for handle in self._shards.values():
            os.close(handle)
        self._reset()

    def __del__(self) -> None:
        self.close()

    @property
    def index(self) -> Index:
        """The index. Reads at given places, so that a fork can share it with its parent."""
        if self._index is None:
            index = Index(self.path)
            if self._expected not in (b"", index.digest):
                index.close()
                raise InputError(self.path, "cache", "was changed by a build since this run opened it; run again")
            self._index = index
        return self._index

    def entries(self) -> list[str]:
        """Sorted ids of the entries: all of them in memory. `names` reads them when they are asked for."""
        return [name.decode() for rows in self.index.rows() for name in rows["name"].tolist()]

    @property
    def names(self) -> Names:
        """The same as a sequence that holds none of them."""
        return Names(self)

    def row(self, name: str) -> np.void:
        """What the index says of an entry (`shards.row_type`): sizes, without opening its shard."""
        row = self.index.find(name)
        if row is None:
            raise InputError(self.path, name, "no such entry in the cache")
        return row

    def shard_handle(self, row: np.void) -> int:
        """The open file (its descriptor) that holds the entry of a row."""
        number = int(row["shard"])
        if number not in self._shards:
            path = self.index.shard_path(row)
            if len(self._shards) >= OPEN_SHARDS:
                os.close(self._shards.popitem(last=False)[1])
            try:
                self._shards[number] = os.open(path, os.O_RDONLY)
            except OSError as error:
                problem = f"its shard {path} cannot be opened ({os.strerror(error.errno or 0)}); copy the folder with "
                problem += "the cache, or run megafold cache repair"
                raise InputError(self.path, row["name"].decode(), problem) from error
        return self._shards[number]

    def _pread(self, row: np.void, offset: int, size: int, digest: bytes, what: str) -> bytes:
        name = row["name"].decode()
        try:
            data = os.pread(self.shard_handle(row), size, offset)
        except (OSError, OverflowError, ValueError) as error:
            raise InputError(self.path, name, f"corrupt entry ({what}: {error})") from error
        if codec.checksum(data) != digest:
            raise InputError(self.path, name, f"corrupt entry ({what}: checksum)")
        return data

    def meta(self, name: str) -> dict[str, Any]:
        """What is known of an entry besides its arrays: chains, resolution, sources, versions, notes, findings."""
        return self._described(name)[1]

    def tables(self, name: str) -> dict[str, codec.Table]:
        """Where the blocks of each stored array of an entry lie in its shard."""
        return self._described(name)[2]

    def _described(self, name: str) -> tuple[np.void, dict[str, Any], dict[str, codec.Table]]:
        if self._last_name == name:
            return self._last
        row = self.row(name)
        data = self._pread(row, int(row["meta_offset"]), int(row["meta_bytes"]), row["meta_sum"].tobytes(), "meta")
        try:
            size = min(MAX_META, len(data) * codec.MAX_RATIO)
            meta = json.loads(_inflate(data, size))
            places = meta.pop("arrays")
            tables = {array: codec.Table(array, places[array]) for array in codec.STORED}
            _check_sizes(tables, row)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(self.path, name, f"corrupt entry (meta: {error})") from error
        self._last_name, self._last = name, (row, meta, tables)
        return self._last

    def _block(self, name: str, array: str, place: tuple[int, int, bytes]) -> np.ndarray:
        row, _, tables = self._described(name)
        table = tables[array]
        try:
            return codec.unpack(self._pread(row, *place, f"dataset {array}"), table.dtype, table.block)
        except codec.BadBlock as error:
            raise InputError(self.path, name, f"corrupt entry (dataset {array}: {error})") from error

    def _array(self, name: str, array: str) -> np.ndarray:
        table = self.tables(name)[array]
        if table.block == table.shape and table.places:
            return self._block(name, array, table.places[0])
        out = np.zeros(table.shape, table.dtype)
        for corner, place in table.chosen():
            target = out[tuple(slice(first, first + step) for first, step in zip(corner, table.block))]
            target[...] = self._block(name, array, place)[tuple(slice(0, size) for size in target.shape)]
        return out

    def _window(self, name: str, array: str, rows: np.ndarray, columns: np.ndarray) -> np.ndarray:
        """Rows and columns (ascending indices) of a two-dimensional array; one block at a time is in memory."""
        table = self.tables(name)[array]
        out = np.zeros((len(rows), len(columns)), table.dtype)
        for (first, left), place in table.chosen((int(rows[0]), int(rows[-1])), columns):
            down = slice(*np.searchsorted(rows, (first, first + table.block[0])))
            across = slice(*np.searchsorted(columns, (left, left + table.block[1])))
            if down.start == down.stop:
                continue
            block = self._block(name, array, place)
            if down.stop - down.start < len(block):
                block = block[rows[down] - first]
            _copy_columns(block, columns[across] - left, out[down, across])
        return out

    def _entry(self, name: str, arrays: dict[str, np.ndarray]) -> Entry:
        meta = self.meta(name)
        kept = ("resolution", "released", "smiles", "sources")
        return Entry(
            name=name,
            arrays=arrays,
            chains=tuple(meta["chains"]),
            notes=tuple(meta["notes"]),
            findings=tuple(Finding.from_json(one) for one in meta["findings"]),
            touching=tuple((int(one), int(other)) for one, other in meta["touching"]),
            **{field: meta[field] for field in kept},
        )

    def problems(self, name: str) -> list[str]:
        """Checks of one entry that fail, one line each; [] for a sound entry."""
        try:
            tables = self.tables(name)
        except InputError as error:
            return [str(error)]
        found = []
        for array in tables:
            try:
                self._array(name, array)
            except InputError as error:
                found.append(str(error))
        return found

    def read(self, name: str) -> Entry:
        """One entry with all its arrays, checked."""
        arrays = {array: self._array(name, array) for array in codec.STORED}
        rows, columns = arrays["msa"].shape
        dense = codec.dense_deletions(arrays, np.arange(rows), np.arange(columns), columns)
        return self._entry(name, {array: arrays[array] for array in ARRAYS if array in arrays} | {"deletions": dense})

    def read_structure(self, name: str) -> Entry:
        """One entry without its alignment (`msa` and `deletions` have no rows)."""
        arrays = {array: self._array(name, array) for array in ARRAYS if array in codec.STORED and array not in LAZY}
        n = len(arrays["tokens"])
        return self._entry(name, arrays | {array: np.zeros((0, n), ARRAYS[array]) for array in ("msa", "deletions")})

    def msa_depth(self, name: str) -> int:
        """Alignment rows of an entry."""
        return int(self.row(name)["msa_rows"])

    def read_alignment(self, name: str, rows: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows (ascending indices) and columns (bool [N]) of `msa` and `deletions`: two arrays [rows, kept].

        The deletions are uint8 where every code of the entry fits, as in almost every one; else uint16.
        """
        columns = np.flatnonzero(keep)
        sparse = {array: self._array(name, array) for array in codec.SPARSE}
        small = int(sparse["deletion_codes"].max(initial=0)) < 256
        deletions = codec.dense_deletions(sparse, rows, columns, len(keep), "u1" if small else "<u2")
        return self._window(name, "msa", rows, columns), deletions

    def verify(self) -> Iterator[str]:
        """Every check of every entry that fails, one line each."""
        for rows in self.index.rows():
            for name in rows["name"].tolist():
                yield from self.problems(name.decode())


class Names(Sequence):
    """The ids of a cache's entries, sorted, read when they are asked for."""

    def __init__(self, cache: StructureCache) -> None:
        self.cache = cache

    def __len__(self) -> int:
        return len(self.cache.index)

    def __getitem__(self, place: int) -> str:
        return self.cache.index.row(place + len(self) if place < 0 else place)["name"].decode()

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self.cache.index.find(name) is not None


def _copy_columns(block: np.ndarray, columns: np.ndarray, out: np.ndarray) -> None:
    """out[...] = block[:, columns] of ascending columns. A crop is made of runs, which are copied as such."""
    starts = np.flatnonzero(np.diff(columns, prepend=-2) != 1)
    if len(starts) > MAX_RUNS:
        block.take(columns, axis=1, out=out) if out.flags.c_contiguous else np.copyto(out, block.take(columns, axis=1))
        return
    for first, last in itertools.pairwise([*starts.tolist(), len(columns)]):
        out[:, first:last] = block[:, columns[first] : columns[first] + last - first]


def _inflate(data: bytes, limit: int) -> bytes:
    import zlib

    inflate = zlib.decompressobj()
    try:
        text = inflate.decompress(data, limit)
    except zlib.error as error:
        raise codec.BadBlock(str(error)) from error
    if not inflate.eof:
        raise codec.BadBlock(f"more than {limit} bytes")
    return text


def _check_sizes(tables: dict[str, codec.Table], row: np.void) -> None:
    """The arrays must have the sizes that the index names."""
    tokens, atoms, depth = int(row["tokens"]), int(row["atoms"]), int(row["msa_rows"])
    expected = {"tokens": (tokens,), "atoms": (atoms,), "msa": (depth, tokens), "deletion_starts": (depth + 1,)}
    for name, shape in expected.items():
        if tables[name].shape != shape:
            raise codec.BadBlock(f"{name} has the shape {tables[name].shape}, the index says {shape}")


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Problems of a cache, one line each; [] when it is sound. Raises InputError when it cannot be opened."""
    with StructureCache(path) as cache:
        return list(cache.verify())


def describe(path: str | os.PathLike[str], limit: int = 1000) -> str:
    """What a cache holds, as a plain table of at most `limit` entries. Raises InputError when it cannot be opened."""
    with StructureCache(path) as cache:
        lines = [f"{'entry':<24} {'tokens':>7} {'atoms':>8} {'chains':>7} {'rows':>7} {'templates':>9} {'kB':>9}"]
        found: dict[str, set[str]] = {}
        stored, count = 0, len(cache.index)
        for rows in cache.index.rows():
            stored += int(rows["bytes"].sum())
            for row in rows[: max(0, limit - (len(lines) - 1))]:
                lines += _described(cache, row, found)
        depth = cache.index.msa_depth
        shards = len(cache.index.shards)
    if count > limit:
        lines.append(f"... the first {limit} of {count} entries")
    packages = ", ".join(f"{package} {'/'.join(sorted(known))}" for package, known in sorted(found.items()))
    lines.append(f"{count} entries in {shards} shards, {stored / 1e6:.2f} MB of arrays, index "
                 f"{Path(path).stat().st_size / 1e6:.2f} MB, schema {SCHEMA_VERSION}, "
                 f"at most {depth or 'all'} alignment rows")  # fmt: skip
    return "\n".join([*lines, f"built with {packages}"] if packages else lines)


def _described(cache: StructureCache, row: np.void, found: dict[str, set[str]]) -> list[str]:
    name = row["name"].decode()
    try:
        meta = cache.meta(name)
        real = int(cache._array(name, "template_mask").sum())
    except InputError as error:
        return [f"{name:<24} unreadable: {error}"]
    for package, version in meta.get("versions", {}).items():
        found.setdefault(package, set()).add(version)
    shape = [int(row["tokens"]), int(row["atoms"]), len(meta["chains"]), int(row["msa_rows"]), real]
    line = "{:<24} {:>7} {:>8} {:>7} {:>7} {:>9} {:>9.1f}".format(name, *shape, int(row["bytes"]) / 1e3)
    return [line, *(f"{'':<24} note: {note}" for note in meta["notes"])]
