"""What shape and compression of blocks cost: the measurement behind the constants of `megafold.evopipe.codec`.

Every combination stores the entries of a cache again, in memory, and reads one crop of each; page cache and disk are
left out. Times are processor time, the least of several, per entry.
"""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from megafold.evopipe import augment, codec
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.layout import Entry

SHAPES = ((64, 64), (64, 256), (16, 16384), (32, 16384), (64, 16384), (128, 16384), (256, 16384))  # columns, rows
LEVELS = (0, 1, 4, 6, 9)
REPEATS = 5


def best(action: Callable[[], object], repeats: int = REPEATS) -> float:
    """Least milliseconds of processor time of several runs."""
    found = []
    for _ in range(repeats):
        started = time.process_time()
        action()
        found.append(time.process_time() - started)
    return min(found) * 1e3


def measure_layout(path: Path, *, crop_size: int, msa_depth: int) -> str:
    """A Markdown table: kilobytes, and milliseconds to write and to read one crop, per entry.

    Raises:
        InputError: as `StructureCache`.
    """
    with StructureCache(path) as cache:
        names = [name for name in cache.names if cache.msa_depth(name) > 1] or list(cache.names)
        entries = [cache.read(name) for name in names]
    lines = [
        f"{len(entries)} entries, crops of {crop_size} tokens and {msa_depth} alignment rows; mean of an entry",
        "",
        "| array | block | deflate | stored, kB | write, ms | read, ms |",
        "|---|---|---|---|---|---|",
    ]
    crops = [_crop(entry, crop_size, msa_depth) for entry in entries]
    for shape in SHAPES:
        for level in LEVELS if shape == codec.MSA_BLOCK else (codec.LEVEL,):
            mark = " (used)" if (shape, level) == (codec.MSA_BLOCK, codec.LEVEL) else ""
            lines.append(_row("msa", f"{shape[0]} x {shape[1]}{mark}", level, entries, crops, shape))
    for level in LEVELS:
        mark = " (used)" if level == codec.LEVEL else ""
        lines.append(_row("all others", f"whole{mark}", level, entries, crops, None))
    lines.append(_dense(entries))
    return "\n".join(lines)


def _crop(entry: Entry, crop_size: int, msa_depth: int) -> tuple[np.ndarray, np.ndarray]:
    keep = augment.choose_crop(entry, crop_size, epoch=0, seed=0).keep
    rows = augment.choose_rows(entry.name, entry.msa_depth, msa_depth, epoch=0, seed=0)
    return np.flatnonzero(keep), rows


def _row(what: str, label: str, level: int, entries, crops, shape: tuple[int, int] | None) -> str:
    size, write, read = 0, 0.0, 0.0
    for entry, (columns, rows) in zip(entries, crops):
        arrays = codec.stored(entry)
        chosen = {"msa": arrays["msa"]} if shape else {k: v for k, v in arrays.items() if k != "msa" and v.size}
        blocks = {
            name: codec.even_block(array.shape, shape) if shape else codec.block_shape(name, array)
            for name, array in chosen.items()
        }

        def store(level=level, chosen=chosen, blocks=blocks):
            return {
                name: [
                    (at, codec.pack(array, at, blocks[name], level)) for at in codec.corners(array.shape, blocks[name])
                ]
                for name, array in chosen.items()
            }

        stored = store()
        wanted = set((columns // blocks["msa"][0] * blocks["msa"][0]).tolist()) if shape else None

        def fetch(chosen=chosen, blocks=blocks, stored=stored, wanted=wanted, last=rows[-1]):
            for name, array in chosen.items():
                out = np.empty(array.shape, array.dtype)
                for at, data in stored[name]:
                    if wanted is None or (at[0] in wanted and at[1] <= last):
                        target = out[tuple(slice(first, first + step) for first, step in zip(at, blocks[name]))]
                        block = codec.unpack(data, array.dtype, blocks[name])
                        target[...] = block[tuple(slice(0, n) for n in target.shape)]

        size += sum(len(data) for parts in stored.values() for _, data in parts)
        write, read = write + best(store, 2), read + best(fetch)
    n = len(entries)
    return f"| {what} | {label} | {level} | {size / n / 1e3:.1f} | {write / n:.2f} | {read / n:.2f} |"


def _dense(entries: list[Entry]) -> str:
    """The deletions as they were before they were sparse: one 16-bit number for each element of the alignment."""
    size, write, read = 0, 0.0, 0.0
    for entry in entries:
        raw = np.ascontiguousarray(entry.arrays["deletions"]).tobytes()
        data = zlib.compress(raw, codec.LEVEL)
        size, write = size + len(data), write + best(lambda raw=raw: zlib.compress(raw, codec.LEVEL), 2)
        read += best(lambda data=data: zlib.decompress(data))
    n = len(entries)
    return f"| deletions, dense | whole | {codec.LEVEL} | {size / n / 1e3:.1f} | {write / n:.2f} | {read / n:.2f} |"
