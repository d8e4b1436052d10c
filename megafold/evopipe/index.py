"""The index of a cache: which entries there are, in which shard and where in it. One HDF5 file, replaced as a whole.

The rows are sorted by name and lie in blocks of 256; `blocks` names the first entry, the place and the checksum of
each. A reader keeps `blocks` (some 30 bytes and a name for 256 entries) and reads one block to find an entry, so that
opening and looking up do not grow with the number of entries.
"""

from __future__ import annotations

import hashlib
import io
import os
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from pathlib import Path

import h5py
import numpy as np

from megafold.errors import InputError
from megafold.evopipe import codec, safe_hdf5
from megafold.evopipe.layout import SCHEMA_VERSION
from megafold.evopipe.shards import MAX_NAME, folder_of, row_type, write_file

BLOCK_ROWS = 256
KEPT_BLOCKS = 64
NUMBERS = ("schema", "msa_depth", "name_width", "entries")


def _block_type(width: int) -> np.dtype:
    return np.dtype([("first", f"S{width}"), ("offset", "<u8"), ("size", "<u4"), ("sum", "u1", (codec.DIGEST_BYTES,))])


def _digest(numbers: dict[str, int], shards: np.ndarray, blocks: np.ndarray) -> bytes:
    head = "|".join(f"{name}={numbers[name]}" for name in NUMBERS)
    return hashlib.sha256(head.encode() + shards.tobytes() + blocks.tobytes()).digest()


def write_index(path: Path, rows: np.ndarray, shards: Sequence[str], msa_depth: int) -> None:
    """Replace the index.

    Args:
        rows: of `row_type`, sorted by name, no name twice; `shard` indexes `shards`.
        shards: file names in the folder of shards.
        msa_depth: alignment rows an entry may have, 0 for all.

    Raises:
        StorageError: it cannot be written; the old one is left.
    """
    width = rows.dtype["name"].itemsize
    numbers = dict(zip(NUMBERS, (SCHEMA_VERSION, msa_depth, width, len(rows))))
    names = np.array([name.encode() for name in shards], f"S{max([1, *map(len, shards)])}")
    blocks = np.zeros(-(-len(rows) // BLOCK_ROWS), _block_type(width))
    buffer = io.BytesIO()
    with h5py.File(buffer, "w", libver=("v110", "v110")) as file:
        options = {"compression": "gzip", "compression_opts": codec.LEVEL, "shuffle": True} if len(rows) else {}
        if len(rows):
            options["chunks"] = (min(BLOCK_ROWS, len(rows)),)
        dataset = file.create_dataset("rows", shape=(len(rows),), dtype=rows.dtype, **options)
        for i in range(len(blocks)):
            corner = (i * BLOCK_ROWS,)
            data = codec.pack(rows, corner, options["chunks"])
            dataset.id.write_direct_chunk(corner, data, codec.filter_mask(data, rows.dtype, options["chunks"]))
            info = dataset.id.get_chunk_info_by_coord(corner)
            sums = np.frombuffer(codec.checksum(data), np.uint8)
            blocks[i] = (rows["name"][corner[0]], info.byte_offset, info.size, sums)
        file.create_dataset("shards", data=names)
        file.create_dataset("blocks", data=blocks)
        for name, value in numbers.items():
            file.attrs[name] = value
        safe_hdf5.set_digest(file, _digest(numbers, names, blocks))
    write_file(path, buffer.getbuffer())


class Index:
    """Reads an index. The file that was opened stays the one that is read, also when a build replaces it.

    Raises:
        InputError: from every method, for a file that is missing, of another schema, or fails a checksum.
    """

    def __init__(self, path: Path) -> None:
        self.path, self._handle = Path(path), -1
        self._handle = self._kept_open()
        self._kept: OrderedDict[int, np.ndarray] = OrderedDict()

    def _kept_open(self) -> int:
        """Read the tables; the open file that they are of, also when a build replaces it at this moment."""
        while True:
            try:
                handle = os.open(self.path, os.O_RDONLY)
            except OSError:
                handle = -1  # told by what opens it next
            try:
                with safe_hdf5.opened(self.path) as file:
                    if handle >= 0 and os.path.samestat(os.fstat(handle), os.stat(self.path)):
                        self._read_tables(file)
                        return handle
            except BaseException:
                if handle >= 0:
                    os.close(handle)
                raise
            if handle >= 0:
                os.close(handle)

    def _read_tables(self, file: h5py.File) -> None:
        numbers = {name: safe_hdf5.number(file, name) for name in NUMBERS}
        if numbers["schema"] != SCHEMA_VERSION:
            problem = f"{numbers['schema']} found, this version reads {SCHEMA_VERSION}: build the cache anew, in "
            problem += "another place or after removing this file and its folder of shards"
            raise InputError(self.path, "schema", problem)
        if None in numbers.values() or not 0 < numbers["name_width"] <= MAX_NAME or numbers["entries"] < 0:
            raise InputError(self.path, "cache", "corrupt index (header)")
        self.dtype = row_type(numbers["name_width"])
        names = safe_hdf5.check_dataset(file, "shards")
        shards = safe_hdf5.table(file, "shards", np.dtype(f"S{names.dtype.itemsize}"))
        self._blocks = safe_hdf5.table(file, "blocks", _block_type(numbers["name_width"]))
        self.digest = safe_hdf5.digest(file)
        if self.digest != _digest(numbers, shards, self._blocks):
            raise InputError(self.path, "cache", "corrupt index (checksum)")
        self.msa_depth, self._count = numbers["msa_depth"], numbers["entries"]
        self.shards = [name.decode() for name in shards.tolist()]
        wrong = [name for name in self.shards if os.path.basename(name) != name or name in ("", ".", "..")]
        if wrong or len(self._blocks) != -(-self._count // BLOCK_ROWS):
            raise InputError(self.path, "cache", f"corrupt index ({'a shard elsewhere' if wrong else 'blocks'})")

    def close(self) -> None:
        """Close the file."""
        if self._handle >= 0:
            os.close(self._handle)
        self._handle = -1

    def __del__(self) -> None:
        self.close()

    def __len__(self) -> int:
        return self._count

    def shard_path(self, row: np.void) -> Path:
        """The file that holds the entry of a row."""
        if int(row["shard"]) >= len(self.shards):
            raise InputError(self.path, row["name"].decode(), "corrupt index (shard)")
        return folder_of(self.path) / self.shards[int(row["shard"])]

    def _block(self, number: int) -> np.ndarray:
        if number in self._kept:
            self._kept.move_to_end(number)
            return self._kept[number]
        _, offset, size, sums = self._blocks[number]
        try:
            data = os.pread(self._handle, int(size), int(offset))
            if codec.checksum(data) != sums.tobytes():
                raise codec.BadBlock("checksum")
            rows = codec.unpack(data, self.dtype, (min(BLOCK_ROWS, self._count),))[: self._count - number * BLOCK_ROWS]
        except (OSError, codec.BadBlock) as error:
            raise InputError(self.path, self._blocks[number]["first"].decode(), f"corrupt index ({error})") from error
        self._kept[number] = rows
        if len(self._kept) > KEPT_BLOCKS:
            self._kept.popitem(last=False)
        return rows

    def find(self, name: str) -> np.void | None:
        """The row of an entry; None where there is none."""
        wanted = name.encode()
        number = int(np.searchsorted(self._blocks["first"], wanted, side="right")) - 1
        if number < 0 or len(wanted) > self.dtype["name"].itemsize:
            return None
        rows = self._block(number)
        place = int(np.searchsorted(rows["name"], wanted))
        return rows[place] if place < len(rows) and rows["name"][place] == wanted else None

    def row(self, place: int) -> np.void:
        """The row at a place in the order of names."""
        if not 0 <= place < self._count:
            raise IndexError(place)
        return self._block(place // BLOCK_ROWS)[place % BLOCK_ROWS]

    def rows(self) -> Iterator[np.ndarray]:
        """All rows, block by block."""
        for number in range(len(self._blocks)):
            yield self._block(number)
