"""Where the blocks of an entry's arrays lie: the binary table at the start of its `meta`, and what is refused in it.

`meta`, inflated, is: two uint32 (arrays, blocks), a RECORD for each array in the order of `codec.STORED`, a PLACE for
each block in the order of the arrays, and the rest as JSON.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from megafold.evopipe.layout import ARRAYS, RANKS, SHORTCUTS

MAX_RATIO = 1032  # deflate cannot do better, so whoever claims more is lying
MAX_BYTES = 1 << 34  # of one array, decompressed
MAX_ZEROS = 1 << 28  # of one array that has no block, because all of it is zero
DIGEST_BYTES = 16  # of the sha256 of a block's stored bytes
SPARSE = {
    "deletion_starts": np.dtype("<u4"),  # [N + 1] first of each alignment column
    "deletion_rows": np.dtype("<u4"),
    "deletion_codes": np.dtype("<u2"),  # index into deletion_values; 0 is not listed
}
STORED = {name: dtype for name, dtype in ARRAYS.items() if name != "deletions"} | SPARSE | SHORTCUTS
MAX_RANK = 4
HEAD = struct.Struct("<II")
RECORD = np.dtype([("shape", "<u8", (MAX_RANK,)), ("block", "<u8", (MAX_RANK,)), ("places", "<u4")])
PLACE = np.dtype([("offset", "<u8"), ("size", "<u4"), ("sum", f"V{DIGEST_BYTES}")])


class BadBlock(ValueError):
    """Stored bytes that are not what their table says, or a table that says the impossible."""


def corners(shape: Sequence[int], block: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """First indices of each block, in the order in which blocks are listed."""
    return itertools.product(*(range(0, size, step) for size, step in zip(shape, block))) if block else iter(())


class Table:
    """Where the blocks of one array lie.

    Args:
        name: of the array, a key of STORED.
        shape: of the array.
        block: shape of its blocks; () for an array without blocks.
        places: (offset, bytes, checksum) of each block.

    Raises:
        BadBlock: it claims more than its bytes can hold, or blocks that do not make the array.
    """

    __slots__ = ("block", "dtype", "name", "places", "shape")

    def __init__(self, name: str, shape: tuple[int, ...], block: tuple[int, ...], places: list) -> None:
        self.name, self.dtype, self.shape, self.block, self.places = name, STORED[name], shape, block, places
        width = self.dtype.itemsize
        if block == shape and len(places) == 1:  # almost every array is one block
            claimed = width
            for size in shape:
                claimed *= size
            if 0 < claimed <= min(MAX_BYTES, places[0][1] * MAX_RATIO):
                return
        self._check(width)

    def _check(self, width: int) -> None:
        name, shape, block, places = self.name, self.shape, self.block, self.places
        if min(block, default=1) < 1 or not shape:
            raise BadBlock(f"{name} has the impossible shape {shape} in blocks of {block}")
        elements, n_blocks, in_block = 1, 1 if block else 0, 1
        for size in shape:
            elements *= size
        if not block and not places and elements * width <= MAX_ZEROS:
            return
        held = sum(size for _, size, _ in places)
        for size, step in zip(shape, block):
            n_blocks, in_block = n_blocks * -(-size // step), in_block * step
        limit = min(MAX_BYTES, held * MAX_RATIO)
        if elements * width > limit or (block and n_blocks * in_block * width > limit):
            raise BadBlock(f"{name} claims {elements * width} bytes in {held}, more than any compression gives")
        if (len(block) != len(shape) if elements else bool(places)) or n_blocks != len(places):
            raise BadBlock(f"{name} has {len(places)} blocks of shape {block} for the shape {shape}")

    def chosen(self, columns: np.ndarray | None = None, rows: tuple[int, int] | None = None) -> list[tuple]:
        """(corner, place) of all blocks, or of those of `msa` that hold some columns and the rows first..last."""
        if len(self.places) < 2:
            return [((0,) * len(self.shape), place) for place in self.places]
        both = zip(corners(self.shape, self.block), self.places, strict=True)
        if rows is None or columns is None:
            return list(both)
        wanted = set((columns // self.block[0]).tolist())
        wide, deep = self.block
        return [
            (at, place) for at, place in both if at[0] // wide in wanted and rows[0] < at[1] + deep and at[1] <= rows[1]
        ]


def pack_tables(tables: Mapping[str, Table]) -> bytes:
    """The table of an entry, as it starts its `meta`."""
    records, places = np.zeros(len(STORED), RECORD), []
    for record, name in zip(records, STORED):
        table = tables[name]
        record["shape"][: len(table.shape)], record["block"][: len(table.block)] = table.shape, table.block
        record["places"] = len(table.places)
        places += table.places
    return HEAD.pack(len(records), len(places)) + records.tobytes() + np.array(places, PLACE).tobytes()


def unpack_tables(data: bytes) -> tuple[dict[str, Table], int]:
    """The tables of an entry's arrays, and the bytes that they take of its `meta`. Raises BadBlock."""
    try:
        count, n_places = HEAD.unpack_from(data)
        middle = HEAD.size + count * RECORD.itemsize
        end = middle + n_places * PLACE.itemsize
        if count != len(STORED) or end > len(data):
            raise BadBlock(f"the table of {count} arrays in {n_places} blocks is not one")
        records = np.frombuffer(data, RECORD, count, HEAD.size)
        shapes, blocks, counts = (records[field].tolist() for field in ("shape", "block", "places"))
        places = np.frombuffer(data, PLACE, n_places, middle).tolist()
    except (struct.error, ValueError) as error:
        raise BadBlock(f"the table is not one ({error})") from error
    tables, first = {}, 0
    for name, shape, block, size in zip(STORED, shapes, blocks, counts):
        rank = RANKS.get(name, 1)
        found = places[first : first + size]
        if any(shape[rank:]) or any(block[rank:]) or len(found) != size:
            raise BadBlock(f"the table of {name} is not one")
        tables[name] = Table(name, tuple(shape[:rank]), tuple(block[:rank]) if any(block) else (), found)
        first += size
    return tables, end
