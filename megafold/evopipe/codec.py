"""Arrays of an entry <-> compressed blocks, in the form that HDF5's own shuffle and deflate filters give.

The blocks are made here, not by the HDF5 library, so that the place, the size and a digest of each are known when it is
written. A reader then needs one `pread` for many blocks, decompresses no more than the array can hold, and asks the
HDF5 library for nothing; any other program reads the same datasets with the library.

An entry is stored as it is but for `msa`, which has its columns first, [N, S], because a crop takes columns; and for
`deletions`, 99 % of which are zero: three arrays name the others, column by column. What can be looked up is added to
it (`megafold.evopipe.shortcuts`).
"""

from __future__ import annotations

import hashlib
import math
import zlib

import numpy as np

from megafold.evopipe import shortcuts
from megafold.evopipe.inflate import inflate
from megafold.evopipe.layout import ARRAYS, Entry
from megafold.evopipe.table import DIGEST_BYTES, MAX_RATIO, SPARSE, STORED, BadBlock, Table, corners

__all__ = ["DIGEST_BYTES", "MAX_RATIO", "SPARSE", "STORED", "BadBlock", "Table", "corners"]
LEVEL = 6  # of deflate; docs/cache.md holds the measurement behind this and the shape of the blocks
MSA_BLOCK = (64, 16384)  # columns, rows: a crop reads the columns that it needs
BLOCK_BYTES = 1 << 22  # of any other array
SMALL_BLOCK, WORTH_IT = 256, 0.9  # bytes up to which, and share of them from which, a block is stored as it is


def checksum(data: bytes | memoryview) -> bytes:
    """16 bytes of the sha256 of stored bytes."""
    return hashlib.sha256(data).digest()[:DIGEST_BYTES]


def stored(entry: Entry) -> dict[str, np.ndarray]:
    """The arrays of an entry in the form in which they are stored."""
    arrays = {name: np.ascontiguousarray(entry.arrays[name]) for name in ARRAYS if name != "deletions"}
    deletions = entry.arrays["deletions"].T
    columns, rows = np.nonzero(deletions)
    starts = np.searchsorted(columns, np.arange(len(deletions) + 1))
    sparse = {
        "deletion_starts": starts.astype("<u4"),
        "deletion_rows": rows.astype("<u4"),
        "deletion_codes": deletions[columns, rows].astype("<u2"),
    }
    known = shortcuts.compute(arrays["tokens"]) if entry.shortcuts is None else entry.shortcuts
    return arrays | {"msa": np.ascontiguousarray(arrays["msa"].T)} | sparse | known


def dense_deletions(
    arrays: dict[str, np.ndarray], columns: np.ndarray, rows: np.ndarray, depth: int, dtype: str = "<u2"
) -> np.ndarray:
    """`deletions` at some columns and rows (ascending indices) of `depth`: [columns, rows] of `dtype`.

    Raises:
        BadBlock: the three arrays contradict each other.
    """
    starts, out = arrays["deletion_starts"].astype(np.int64), np.zeros((len(columns), len(rows)), dtype)
    first = starts[columns]
    counts = starts[columns + 1] - first
    ends = counts.cumsum()
    if not len(ends) or not counts.any():
        return out
    listed = arrays["deletion_rows"]
    if counts.min() < 0 or ends[-1] > len(listed) or len(listed) != len(arrays["deletion_codes"]):
        raise BadBlock("the deletions of the columns are not those that are listed")
    place = (first - ends + counts).repeat(counts) + np.arange(ends[-1])
    row = listed.take(place, mode="clip")
    if int(row.max()) >= depth:
        raise BadBlock("a deletion in a row that there is not")
    target, codes = (np.arange(len(columns)) * len(rows)).repeat(counts), arrays["deletion_codes"][place]
    if len(rows) < depth:
        new = np.full(depth, -1)
        new[rows] = np.arange(len(rows))
        row = new[row]
        kept = (row >= 0).nonzero()[0]
        target, row, codes = target[kept], row[kept], codes[kept]
    out.reshape(-1)[target + row] = codes
    return out


def block_shape(name: str, array: np.ndarray) -> tuple[int, ...]:
    """Shape of the blocks of an array; () for one without elements or of zeros only: it has none, as HDF5 allows."""
    if not array.size or not array.view(np.uint8).any():
        return ()
    if name == "msa":
        return even_block(array.shape, MSA_BLOCK)
    row = array.nbytes // len(array)
    return (max(1, min(len(array), BLOCK_BYTES // max(row, 1))), *array.shape[1:])


def even_block(shape: tuple[int, ...], limit: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of as many blocks as `limit` asks for, of equal sizes: what fills the last one up is inflated, too."""
    return tuple(-(-size // -(-size // most)) for size, most in zip(shape, limit))


def pack(array: np.ndarray, corner: tuple[int, ...], block: tuple[int, ...], level: int = LEVEL) -> bytes:
    """One block, filled up with zeros at the array's end, shuffled (types of several bytes) and deflated.

    One that is small, or that deflate does not make much smaller, is left as it is: it has as many bytes as its block.
    """
    part = array[tuple(slice(first, first + size) for first, size in zip(corner, block))]
    if part.shape != block:
        whole = np.zeros(block, array.dtype)
        whole[tuple(slice(0, size) for size in part.shape)] = part
        part = whole
    plain = data = np.ascontiguousarray(part).tobytes()
    if array.dtype.itemsize > 1:
        data = np.frombuffer(data, np.uint8).reshape(-1, array.dtype.itemsize).T.tobytes()
    packed = zlib.compress(data, level) if len(plain) > SMALL_BLOCK else plain
    return packed if len(packed) < WORTH_IT * len(plain) else plain


def filter_mask(data: bytes, dtype: np.dtype, block: tuple[int, ...]) -> int:
    """Which of HDF5's filters (shuffle for types of several bytes, then deflate) a block was made without: bits."""
    if len(data) < math.prod(block) * dtype.itemsize:
        return 0
    return 0b11 if dtype.itemsize > 1 else 0b1


def unpack(data: bytes | memoryview, dtype: np.dtype, block: tuple[int, ...]) -> np.ndarray:
    """The opposite of `pack`. Raises BadBlock; never makes more than the block's own size."""
    size = math.prod(block) * dtype.itemsize
    if len(data) == size:
        return np.frombuffer(data, dtype).reshape(block)
    raw = inflate(data, size)
    if len(raw) != size:
        raise BadBlock("it does not have its size")
    if dtype.itemsize == 1:
        return np.frombuffer(raw, dtype).reshape(block)
    planes = np.frombuffer(raw, np.uint8).reshape(dtype.itemsize, -1)
    out = np.empty(planes.shape[::-1], np.uint8)
    for column, plane in zip(out.T, planes):  # several times faster than copying the transpose
        column[...] = plane
    return out.reshape(-1).view(dtype).reshape(block)
