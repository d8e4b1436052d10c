"""Arrays of an entry <-> compressed blocks, in the form that HDF5's own shuffle and deflate filters give.

The blocks are made here, not by the HDF5 library, so that the place, the size and a digest of each are known when it is
written. A reader then needs one `pread` a block, decompresses no more than the array can hold, and asks the HDF5
library for nothing; any other program reads the same datasets with the library.

An entry is stored as it is but for `deletions`, 99 % of which are zero: three arrays name the others.
"""

from __future__ import annotations

import hashlib
import itertools
import math
import zlib
from collections.abc import Iterator, Sequence

import numpy as np

from megafold.evopipe.layout import ARRAYS, Entry

LEVEL = 6  # of deflate; docs/cache.md holds the measurement behind this and the shape of the blocks
MSA_BLOCK = (1024, 256)  # rows, columns: a crop reads the columns that it needs
BLOCK_BYTES = 1 << 22  # of any other array
MAX_RATIO = 1032  # deflate cannot do better, so whoever claims more is lying
MAX_BYTES = 1 << 34  # of one array, decompressed
MAX_ZEROS = 1 << 28  # of one array that has no block, because all of it is zero
DIGEST_BYTES = 16  # of the sha256 of a block's stored bytes
SPARSE = {
    "deletion_starts": np.dtype("<u4"),  # [S + 1] first of each alignment row
    "deletion_columns": np.dtype("<u4"),
    "deletion_codes": np.dtype("<u2"),  # index into deletion_values; 0 is not listed
}
STORED = {name: dtype for name, dtype in ARRAYS.items() if name != "deletions"} | SPARSE


class BadBlock(ValueError):
    """Stored bytes that are not what their table says, or a table that says the impossible."""


def checksum(data: bytes) -> bytes:
    """16 bytes of the sha256 of stored bytes."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def stored(entry: Entry) -> dict[str, np.ndarray]:
    """The arrays of an entry in the form in which they are stored."""
    arrays = {name: np.ascontiguousarray(entry.arrays[name]) for name in ARRAYS if name != "deletions"}
    deletions = entry.arrays["deletions"]
    rows, columns = np.nonzero(deletions)
    starts = np.searchsorted(rows, np.arange(len(deletions) + 1))
    return arrays | {
        "deletion_starts": starts.astype("<u4"),
        "deletion_columns": columns.astype("<u4"),
        "deletion_codes": deletions[rows, columns].astype("<u2"),
    }


def dense_deletions(
    arrays: dict[str, np.ndarray], rows: np.ndarray, columns: np.ndarray, width: int, dtype: str = "<u2"
) -> np.ndarray:
    """`deletions` at some rows and columns (ascending indices) of `width`: [rows, columns] of `dtype`."""
    starts, out = arrays["deletion_starts"].astype(np.int64), np.zeros((len(rows), len(columns)), dtype)
    first = starts[rows]
    counts = starts[rows + 1] - first
    ends = np.cumsum(counts)
    if ends[-1] == 0:
        return out
    place = np.repeat(first - ends + counts, counts) + np.arange(ends[-1])
    new = np.full(width, -1)
    new[columns] = np.arange(len(columns))
    column = new[arrays["deletion_columns"][place]]
    kept = np.flatnonzero(column >= 0)
    target = np.repeat(np.arange(len(rows)) * len(columns), counts)[kept] + column[kept]
    out.reshape(-1)[target] = arrays["deletion_codes"][place[kept]]
    return out


def block_shape(name: str, array: np.ndarray) -> tuple[int, ...]:
    """Shape of the blocks of an array; () for one without elements or of zeros only: it has none, as HDF5 allows."""
    if not array.size or not array.view(np.uint8).any():
        return ()
    if name == "msa":
        return tuple(min(size, limit) for size, limit in zip(array.shape, MSA_BLOCK))
    row = array.nbytes // len(array)
    return (max(1, min(len(array), BLOCK_BYTES // max(row, 1))), *array.shape[1:])


def corners(shape: Sequence[int], block: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """First indices of each block, in the order in which blocks are listed."""
    return itertools.product(*(range(0, size, step) for size, step in zip(shape, block))) if block else iter(())


def pack(array: np.ndarray, corner: tuple[int, ...], block: tuple[int, ...], level: int = LEVEL) -> bytes:
    """One block, filled up with zeros at the array's end, shuffled (types of several bytes) and deflated."""
    part = array[tuple(slice(first, first + size) for first, size in zip(corner, block))]
    if part.shape != block:
        whole = np.zeros(block, array.dtype)
        whole[tuple(slice(0, size) for size in part.shape)] = part
        part = whole
    data = np.ascontiguousarray(part).tobytes()
    if array.dtype.itemsize > 1:
        data = np.frombuffer(data, np.uint8).reshape(-1, array.dtype.itemsize).T.tobytes()
    return zlib.compress(data, level)


def unpack(data: bytes, dtype: np.dtype, block: tuple[int, ...]) -> np.ndarray:
    """The opposite of `pack`. Raises BadBlock; never makes more than the block's own size."""
    size = math.prod(block) * dtype.itemsize
    inflate = zlib.decompressobj()
    try:
        raw = inflate.decompress(data, size + 1)
    except zlib.error as error:
        raise BadBlock(str(error)) from error
    if len(raw) != size or not inflate.eof:
        raise BadBlock("a block does not have its size")
    if dtype.itemsize == 1:
        return np.frombuffer(raw, dtype).reshape(block)
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    out = np.empty(planes.shape[::-1], np.uint8)
    for number, plane in enumerate(planes):  # several times faster than copying the transpose
        out[:, number] = plane
    return out.reshape(-1).view(dtype).reshape(block)


class Table:
    """Where the blocks of one array lie.

    Args:
        name: of the array, a key of STORED.
        content: [shape, block shape, [[offset, bytes, digest in hex], ...]], as JSON gives it.

    Raises:
        BadBlock: the table does not have this form, or claims more than its bytes can hold.
    """

    def __init__(self, name: str, content: list) -> None:
        try:
            shape, block, places = content
            self.shape, self.block = tuple(int(size) for size in shape), tuple(int(size) for size in block)
            self.places = [(int(offset), int(size), bytes.fromhex(digest)) for offset, size, digest in places]
        except (TypeError, ValueError, OverflowError) as error:
            raise BadBlock(f"the table of {name} is not one ({error})") from error
        self.name, self.dtype = name, STORED[name]
        if min(self.shape, default=0) < 0 or min(self.block, default=1) < 1 or not self.shape:
            raise BadBlock(f"{name} has the impossible shape {self.shape}")
        elements = 1
        for size in self.shape:
            elements *= size
        if not self.block and not self.places and elements * self.dtype.itemsize <= MAX_ZEROS:
            return
        held = sum(size for _, size, _ in self.places)
        n_blocks, in_block = 1 if self.block else 0, 1
        for size, step in zip(self.shape, self.block):
            n_blocks, in_block = n_blocks * -(-size // step), in_block * step
        if elements * self.dtype.itemsize > min(MAX_BYTES, held * MAX_RATIO) or (
            self.block and n_blocks * in_block * self.dtype.itemsize > min(MAX_BYTES, held * MAX_RATIO)
        ):
            bytes_ = elements * self.dtype.itemsize
            raise BadBlock(f"{name} claims {bytes_} bytes in {held}, more than any compression gives")
        if (len(self.block) != len(self.shape) if elements else bool(self.places)) or n_blocks != len(self.places):
            raise BadBlock(f"{name} has {len(self.places)} blocks of shape {self.block} for the shape {self.shape}")

    def chosen(self, rows: tuple[int, int] | None = None, columns: np.ndarray | None = None) -> list[tuple]:
        """(corner, place) of the blocks that hold rows first..last and some columns (of two-dimensional arrays)."""
        if len(self.places) < 2:
            return [((0,) * len(self.shape), place) for place in self.places]
        both = zip(corners(self.shape, self.block), self.places, strict=True)
        if rows is None or columns is None:
            return list(both)
        wanted = set((columns // self.block[1] * self.block[1]).tolist())
        first = rows[0] // self.block[0] * self.block[0]
        return [(at, place) for at, place in both if first <= at[0] <= rows[1] and at[1] in wanted]
