"""Shards: HDF5 files of whole entries, each written by one process, never changed once they have their name.

A shard grows in memory and reaches the disk as one sequential write, an fsync and a rename. So a writer that is killed,
or a disk that is full, at any moment leaves finished shards and at most one `.part` file; and no two processes ever
write to one file, which needs no lock. What one shard holds is in its own table, `rows`, and `findings`.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import os
import time
import uuid
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from megafold.errors import InputError
from megafold.evopipe import codec, safe_hdf5, table
from megafold.evopipe.layout import SCHEMA_VERSION, Entry
from megafold.evopipe.report import Finding

SHARD_BYTES = 64 << 20  # a shard that has grown to this is written
MAX_NAME = 200
SUFFIX, PART = ".h5", ".part"
# Several builds may write to one folder; what a killed one left is removed when it is older than this.
ABANDONED = 24 * 3600.0


class StorageError(InputError):
    """The cache's folder cannot be written: a full disk, a quota, a limit. What was finished before is kept."""


def row_type(width: int) -> np.dtype:
    """What a table says of an entry whose name has at most `width` bytes."""
    return np.dtype(
        [
            ("name", f"S{width}"),
            ("key", "u1", (codec.DIGEST_BYTES,)),  # content address: the group's name, in hex
            ("tokens", "<u4"),
            ("atoms", "<u4"),
            ("msa_rows", "<u4"),
            ("bytes", "<u4"),  # stored, of its arrays
            ("shard", "<u4"),  # index into the list of shards; 0 in a shard's own table
            ("meta_bytes", "<u4"),
            ("meta_offset", "<u8"),
            ("meta_sum", "u1", (codec.DIGEST_BYTES,)),
        ]
    )


@dataclass(frozen=True)
class ShardTable:
    """What a shard holds: `rows` of `row_type`, findings (of entries that failed, too), when it was written (ns)."""

    path: Path
    rows: np.ndarray
    findings: list[Finding]
    written: int


def folder_of(cache: Path) -> Path:
    """The folder of a cache's shards."""
    return Path(cache).with_name(f"{Path(cache).name}.shards")


class Shard:
    """Entries on their way to one file of `folder`.

    Args:
        folder: of the cache's shards.
        msa_depth: the cache's, 0 for all rows.
    """

    def __init__(self, folder: Path, msa_depth: int) -> None:
        self.folder, self.msa_depth = folder, msa_depth
        self._start()

    def _start(self) -> None:
        self._buffer = io.BytesIO()
        self._file = h5py.File(self._buffer, "w", libver=("v110", "v110"))
        self._file.create_group("entries")
        self._rows: dict[str, tuple] = {}
        self.findings: list[Finding] = []
        self.started = time.monotonic()

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def size(self) -> int:
        """Bytes so far."""
        return self._buffer.getbuffer().nbytes

    def add(self, entry: Entry, key: str, extra: dict[str, Any]) -> None:
        """Take an entry in, under its content address (32 hex digits); `extra` is kept in its `meta`.

        Raises:
            InputError: a name that is too long.
        """
        if not 0 < len(entry.name.encode()) <= MAX_NAME:
            raise InputError(self.folder, entry.name, f"a name has 1 to {MAX_NAME} bytes")
        path = f"entries/{key}"
        if path in self._file:
            del self._file[path]
        group, arrays = self._file.create_group(path), codec.stored(entry)
        tables = {name: _write(group, name, arrays[name]) for name in codec.STORED}
        total = sum(size for one in tables.values() for _, size, _ in one.places)
        meta = {
            "name": entry.name,
            "key": key,
            "schema": SCHEMA_VERSION,
            "chains": entry.chains,
            "resolution": entry.resolution,
            "released": entry.released,
            "smiles": entry.smiles,
            "sources": entry.sources,
            "notes": entry.notes,
            "findings": [finding.to_json() for finding in entry.findings],
            **extra,
        }
        text = json.dumps(meta, sort_keys=True, separators=(",", ":")).encode()
        blob = zlib.compress(table.pack_tables(tables) + text, codec.LEVEL)
        offset = group.create_dataset("meta", data=np.frombuffer(blob, np.uint8)).id.get_offset()
        sizes = entry.n_tokens, entry.n_atoms, entry.msa_depth, total
        sums = np.frombuffer(codec.checksum(blob), np.uint8)
        row = (entry.name.encode(), np.frombuffer(bytes.fromhex(key), np.uint8), *sizes, 0, len(blob), offset, sums)
        self._rows[entry.name] = row
        self.findings += entry.findings

    def seal(self) -> Path | None:
        """Write the file and start the next one; None where there is nothing to write.

        Raises:
            StorageError: it cannot be written; nothing of it is left, and what it held is lost.
        """
        if not self._rows and not self.findings:
            self.started = time.monotonic()
            return None
        width = max((len(row[0]) for row in self._rows.values()), default=1)
        rows = np.array(list(self._rows.values()), row_type(width))
        rows.sort(order="name")
        findings = zlib.compress("".join(json.dumps(one.to_json()) + "\n" for one in self.findings).encode())
        self._file.create_dataset("rows", data=rows)
        self._file.create_dataset("findings", data=np.frombuffer(findings, np.uint8))
        numbers = {"schema": SCHEMA_VERSION, "msa_depth": self.msa_depth, "name_width": width}
        numbers["written"] = time.time_ns()
        for name, value in numbers.items():
            self._file.attrs[name] = value
        safe_hdf5.set_digest(self._file, _digest(numbers, rows, findings))
        self._file.close()
        path = self.folder / f"{numbers['written']:016x}-{uuid.uuid4().hex[:12]}{SUFFIX}"
        data = self._buffer.getbuffer()
        try:
            write_file(path, data)
        finally:
            data.release()
            self._start()
        return path


def _write(group: h5py.Group, name: str, array: np.ndarray) -> codec.Table:
    """Write one array; where its blocks are."""
    block = codec.block_shape(name, array)
    if not block:
        group.create_dataset(name, shape=array.shape, dtype=array.dtype)
        return codec.Table(name, array.shape, (), [])
    options = {"compression": "gzip", "compression_opts": codec.LEVEL, "shuffle": array.dtype.itemsize > 1}
    dataset = group.create_dataset(name, shape=array.shape, dtype=array.dtype, chunks=block, **options)
    places = []
    for corner in codec.corners(array.shape, block):
        data = codec.pack(array, corner, block)
        dataset.id.write_direct_chunk(corner, data, filter_mask=codec.filter_mask(data, array.dtype, block))
        info = dataset.id.get_chunk_info_by_coord(corner)
        places.append((info.byte_offset, info.size, codec.checksum(data)))
    return codec.Table(name, array.shape, block, places)


def _digest(numbers: dict[str, int], rows: np.ndarray, findings: bytes) -> bytes:
    head = "|".join(f"{name}={numbers[name]}" for name in ("schema", "msa_depth", "name_width", "written"))
    return hashlib.sha256(head.encode() + rows.tobytes() + findings).digest()


def write_file(path: Path, data: Any) -> None:
    """Make `path` hold `data`: all of it, on the disk, or the file as it was before.

    Raises:
        StorageError: it cannot be written.
    """
    part = path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}{PART}")  # process ids repeat from machine to machine
    try:
        with part.open("wb") as stream:
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        part.replace(path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            with suppress(OSError):  # not every filesystem can
                os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as error:
        with suppress(OSError):
            part.unlink(missing_ok=True)
        reason = f"{os.strerror(error.errno or 0)}; {memoryview(data).nbytes} bytes were to be written"
        problem = f"cannot be written ({reason}). The cache is sound and holds what was finished: build again to go on"
        raise StorageError(path.parent, "", problem) from error


def read_shard(path: Path, msa_depth: int | None = None) -> ShardTable:
    """What a shard holds, from its own table.

    Raises:
        InputError: no shard of this schema (and of this depth), or a table that fails its checksum.
    """
    with safe_hdf5.opened(path) as file:
        names = ("schema", "msa_depth", "name_width", "written")
        numbers = {name: safe_hdf5.number(file, name) for name in names}
        if numbers["schema"] != SCHEMA_VERSION:
            raise InputError(path, "schema", f"{numbers['schema']} found, this version reads {SCHEMA_VERSION}")
        if None in numbers.values() or not 0 < numbers["name_width"] <= MAX_NAME:
            raise InputError(path, "rows", "corrupt shard (header)")
        if msa_depth is not None and numbers["msa_depth"] != msa_depth:
            problem = f"was built with {numbers['msa_depth'] or 'all'} rows, the cache with {msa_depth or 'all'}"
            raise InputError(path, "msa_depth", problem)
        rows = safe_hdf5.table(file, "rows", row_type(numbers["name_width"]))
        packed = safe_hdf5.table(file, "findings", np.dtype("u1")).tobytes()
        if safe_hdf5.digest(file) != _digest(numbers, rows, packed):
            raise InputError(path, "rows", "corrupt shard (checksum of its table)")
    lines = zlib.decompress(packed).decode().splitlines()  # its checksum is right: this program wrote it
    return ShardTable(path, rows, [Finding.from_json(json.loads(line)) for line in lines], numbers["written"])


def remove_parts(folder: Path, older_than: float = ABANDONED, of: str = "") -> int:
    """Remove what killed writers left unfinished (of files whose names start with `of`); how many files."""
    removed = 0
    for path in folder.glob(f".{glob.escape(of)}*{PART}"):
        with suppress(OSError):
            if time.time() - path.stat().st_mtime >= older_than:
                path.unlink()
                removed += 1
    return removed
