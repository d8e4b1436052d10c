"""The cache: an index (`NAME.h5`), and beside it a folder of immutable shards (`NAME.h5.shards/*.h5`). docs/cache.md
describes both.

Whatever is read is checked first: the index has a checksum, which covers those of its blocks, which cover the place and
the checksum of each entry's table, which covers those of each block of its arrays. Nothing is ever unpickled, and
reading an entry does not involve the HDF5 library. A reader may be sent to forked and spawned workers.
"""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from megafold.errors import InputError
from megafold.evopipe import codec, table
from megafold.evopipe.index import Index, write_index
from megafold.evopipe.inflate import inflate
from megafold.evopipe.layout import ARRAYS, SCHEMA_VERSION, SHORTCUTS, Entry
from megafold.evopipe.report import Finding
from megafold.evopipe.shards import folder_of, row_type

PACKAGES = ("alphafold3-pytorch", "rdkit", "biotite", "gemmi", "numpy")
OPEN_SHARDS = 32
MAX_META = 1 << 28  # bytes
LAZY = ("msa", *table.SPARSE)  # read by columns and rows, the rest as a whole
WHOLE = tuple(name for name in table.STORED if name not in LAZY)
MAX_GAP, MAX_SPAN = 1 << 12, 1 << 22  # bytes between blocks that one pread takes, and of all that it takes


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
        self._last: tuple[np.void | None, bytes, dict[str, codec.Table]] = (None, b"", {})  # the last entry

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

    def _corrupt(self, row: np.void, what: str, problem: object) -> InputError:
        return InputError(self.path, row["name"].decode(), f"corrupt entry ({what}: {problem})")

    def _pread(self, row: np.void, offset: int, size: int, what: str) -> bytes:
        try:
            return os.pread(self.shard_handle(row), size, offset)
        except (OSError, OverflowError, ValueError) as error:
            raise self._corrupt(row, what, error) from error

    def meta(self, name: str) -> dict[str, Any]:
        """What is known of an entry besides its arrays: chains, resolution, sources, versions, notes, findings."""
        row, text, _ = self._described(name)
        try:
            return json.loads(text)
        except ValueError as error:
            raise self._corrupt(row, "meta", error) from error

    def tables(self, name: str) -> dict[str, codec.Table]:
        """Where the blocks of each stored array of an entry lie in its shard."""
        return self._described(name)[2]

    def forget(self) -> None:
        """Keep nothing of the entry that was read last; a measurement starts with this."""
        self._last_name = ""

    def _described(self, name: str) -> tuple[np.void, bytes, dict[str, codec.Table]]:
        if self._last_name == name:
            return self._last
        row = self.row(name)
        data = self._pread(row, int(row["meta_offset"]), int(row["meta_bytes"]), "meta")
        if codec.checksum(data) != row["meta_sum"].tobytes():
            raise self._corrupt(row, "meta", "checksum")
        try:
            text = inflate(data, min(MAX_META, len(data) * codec.MAX_RATIO))
            tables, end = table.unpack_tables(text)
            _check_sizes(tables, row)
        except codec.BadBlock as error:
            raise self._corrupt(row, "meta", error) from error
        self._last_name, self._last = name, (row, text[end:], tables)
        return self._last

    def _blocks(self, name: str, wanted: list[tuple[codec.Table, tuple, tuple]]) -> Iterator[tuple]:
        """(table, corner, block) of some blocks (table, corner, place) in the order in which they lie in the file.

        Blocks that lie together are read together.
        """
        row = self._described(name)[0]
        wanted = sorted(wanted, key=lambda one: one[2][0])
        first = 0
        while first < len(wanted):
            start, last = wanted[first][2][0], first
            end = start + wanted[first][2][1]
            while last + 1 < len(wanted):
                offset, size, _ = wanted[last + 1][2]
                if offset < end or offset - end > MAX_GAP or offset + size - start > MAX_SPAN:
                    break
                last, end = last + 1, offset + size
            data = memoryview(self._pread(row, start, end - start, f"dataset {wanted[first][0].name}"))
            for one, corner, (offset, size, digest) in wanted[first : last + 1]:
                piece = data[offset - start : offset - start + size]
                if codec.checksum(piece) != digest:
                    raise self._corrupt(row, f"dataset {one.name}", "checksum")
                try:
                    yield one, corner, codec.unpack(piece, one.dtype, one.block)
                except codec.BadBlock as error:
                    raise self._corrupt(row, f"dataset {one.name}", error) from error
            first = last + 1

    def _arrays(self, name: str, names: Iterable[str]) -> dict[str, np.ndarray]:
        """Some stored arrays of an entry, whole."""
        tables, found, wanted = self.tables(name), {}, []
        for array in names:
            one = tables[array]
            if one.block != one.shape or not one.places:
                found[array] = np.zeros(one.shape, one.dtype)
            wanted += [(one, *place) for place in one.chosen()]
        for one, corner, block in self._blocks(name, wanted):
            if one.name not in found:
                found[one.name] = block
                continue
            target = found[one.name][tuple(slice(first, first + step) for first, step in zip(corner, one.block))]
            target[...] = block[tuple(slice(0, size) for size in target.shape)]
        return found

    def _window(self, name: str, columns: np.ndarray, rows: np.ndarray) -> np.ndarray:
        """Columns and rows (ascending indices) of the alignment, [columns, rows]; one block at a time is inflated."""
        one = self.tables(name)["msa"]
        out = np.zeros((len(columns), len(rows)), one.dtype)
        wanted = [(one, *place) for place in one.chosen(columns, (int(rows[0]), int(rows[-1])))]
        for _, (left, first), block in self._blocks(name, wanted):
            across = slice(*columns.searchsorted((left, left + one.block[0])))
            mine = columns[across] - left
            if len(rows) == block.shape[1] == one.shape[1]:
                block.take(mine, axis=0, out=out[across], mode="clip")  # other modes copy twice
                continue
            down = slice(*rows.searchsorted((first, first + one.block[1])))
            out[across, down] = block.take(mine, axis=0).take(rows[down] - first, axis=1)
        return out

    def _deletions(self, name: str, arrays, columns: np.ndarray, rows: np.ndarray, dtype: str) -> np.ndarray:
        row, _, tables = self._described(name)
        try:
            return codec.dense_deletions(arrays, columns, rows, tables["msa"].shape[1], dtype)
        except codec.BadBlock as error:
            raise self._corrupt(row, "deletions", error) from error

    def _entry(self, name: str, arrays: dict[str, np.ndarray]) -> Entry:
        meta = self.meta(name)
        try:
            return Entry(
                name=name,
                arrays={array: arrays[array] for array in ARRAYS},
                chains=tuple(meta["chains"]),
                resolution=meta["resolution"],
                released=meta["released"],
                smiles=meta["smiles"],
                sources=meta["sources"],
                notes=tuple(meta["notes"]),
                findings=tuple(Finding.from_json(one) for one in meta["findings"]),
                shortcuts={array: arrays[array] for array in SHORTCUTS},
            )
        except (KeyError, TypeError, AttributeError) as error:
            raise self._corrupt(self.row(name), "meta", error) from error

    def problems(self, name: str) -> list[str]:
        """Checks of one entry that fail, one line each; [] for a sound entry."""
        found = []
        try:
            self.meta(name)
            tables = self.tables(name)
        except InputError as error:
            return [str(error)]
        for array in tables:
            try:
                self._arrays(name, [array])
            except InputError as error:
                found.append(str(error))
        return found

    def read(self, name: str) -> Entry:
        """One entry with all its arrays, checked."""
        arrays = self._arrays(name, codec.STORED)
        columns, rows = arrays["msa"].shape
        dense = self._deletions(name, arrays, np.arange(columns), np.arange(rows), "<u2")
        whole = {"msa": np.ascontiguousarray(arrays["msa"].T), "deletions": np.ascontiguousarray(dense.T)}
        return self._entry(name, arrays | whole)

    def read_structure(self, name: str) -> Entry:
        """One entry without its alignment (`msa` and `deletions` have no rows)."""
        arrays = self._arrays(name, WHOLE)
        n = len(arrays["tokens"])
        return self._entry(name, arrays | {array: np.zeros((0, n), ARRAYS[array]) for array in ("msa", "deletions")})

    def msa_depth(self, name: str) -> int:
        """Alignment rows of an entry."""
        return int(self.row(name)["msa_rows"])

    def read_alignment(self, name: str, rows: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows (ascending indices) and columns (bool [N]) of `msa` and `deletions`: two arrays [rows, kept].

        Both have their columns first in memory. The deletions are uint8 where every code of the entry fits, as in
        almost every one; else uint16.
        """
        columns = keep.nonzero()[0]
        sparse = self._arrays(name, codec.SPARSE)
        small = int(sparse["deletion_codes"].max(initial=0)) < 256
        deletions = self._deletions(name, sparse, columns, rows, "u1" if small else "<u2")
        return self._window(name, columns, rows).T, deletions.T

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


def _check_sizes(tables: dict[str, codec.Table], row: np.void) -> None:
    """The arrays must have the sizes that the index names."""
    tokens, atoms, depth = int(row["tokens"]), int(row["atoms"]), int(row["msa_rows"])
    expected = {"tokens": (tokens,), "atoms": (atoms,), "msa": (tokens, depth), "deletion_starts": (tokens + 1,)}
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
        real = int(cache._arrays(name, ["template_mask"])["template_mask"].sum())
    except InputError as error:
        return [f"{name:<24} unreadable: {error}"]
    for package, version in meta.get("versions", {}).items():
        found.setdefault(package, set()).add(version)
    shape = [int(row["tokens"]), int(row["atoms"]), len(meta["chains"]), int(row["msa_rows"]), real]
    line = "{:<24} {:>7} {:>8} {:>7} {:>7} {:>9} {:>9.1f}".format(name, *shape, int(row["bytes"]) / 1e3)
    return [line, *(f"{'':<24} note: {note}" for note in meta["notes"])]
