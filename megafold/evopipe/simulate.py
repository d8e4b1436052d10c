"""Caches of very many entries, to measure what an index costs: time and memory to open it and to find entries in it.

The index is of full size: one row and one name for each entry, in the shards and in the index itself. The entries that
the rows point to are real but few: thousands of rows share each, so that a million entries take megabytes.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
import uuid
from collections.abc import Iterable
from pathlib import Path

import h5py
import numpy as np

from megafold.errors import InputError
from megafold.evopipe import cache, codec, layout, safe_hdf5, shards
from megafold.evopipe.layout import Entry
from megafold.evopipe.merge import merge

SHARD_ROWS = 20_000
KINDS = 16  # different entries
LOOKUPS = 1000
TOKENS, ROWS = 32, 8
COUNTED = ("entries", "build_s", "index_mb", "open_ms", "find_us", "read_ms", "memory_mb")


def small_entry(name: str, seed: int) -> Entry:
    """An entry of random numbers with 32 tokens: sound as storage, no structure."""
    rng, n = np.random.default_rng(seed), TOKENS
    shapes = {"msa": (ROWS, n), "deletions": (ROWS, n), "profile": (n, 33), "deletion_values": (4,), "atoms": (8 * n,)}
    shapes |= {"template_mask": (1,), "template_classes": (1, n), "template_state": (1, n)}
    shapes |= {"template_positions": (1, n, 3), "template_frames": (1, n, 3, 3)}
    arrays = {}
    for key, dtype in layout.ARRAYS.items():
        shape = shapes.get(key, (n,))
        data = rng.integers(0, 2, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
        arrays[key] = np.frombuffer(data.tobytes(), dtype).reshape(shape)
    return Entry(name, arrays, ("A",), 2.0, "2000-01-01")


def generate(path: Path, entries: int) -> None:
    """Write a cache of `entries` names, `sim_0000000-assembly1` and on.

    Raises:
        InputError: there is something at `path` already.
    """
    if path.exists() or shards.folder_of(path).exists():
        raise InputError(path, "", "exists; name a new file")
    cache.create(path, msa_depth=ROWS)
    template = _template(path.parent)
    for first in range(0, entries, SHARD_ROWS):
        _write_shard(shards.folder_of(path), template, range(first, min(first + SHARD_ROWS, entries)))
    merge(path)


def _template(folder: Path) -> tuple[bytes, np.ndarray]:
    """A shard of the entries that all others share: its bytes and its rows."""
    shard = shards.Shard(folder, ROWS)
    for seed in range(KINDS):
        name = f"sim_{seed:07}-assembly1"
        shard.add(small_entry(name, seed), codec.checksum(name.encode()).hex(), {})
    path = shard.seal()
    try:
        return path.read_bytes(), shards.read_shard(path).rows
    finally:
        path.unlink()


def _write_shard(folder: Path, template: tuple[bytes, np.ndarray], numbers: Iterable[int]) -> None:
    content, known = template
    buffer = io.BytesIO(content)
    numbers = np.fromiter(numbers, np.int64)
    rows = known[numbers % len(known)]
    # as content addresses are: different, and of no use to a compression
    rows["key"] = np.random.default_rng(int(numbers[0])).integers(0, 256, rows["key"].shape)
    rows["name"] = [f"sim_{number:07}-assembly1".encode() for number in numbers]
    with h5py.File(buffer, "r+", libver=("v110", "v110")) as file:
        del file["rows"]
        file.create_dataset("rows", data=rows)
        heads = {name: int(file.attrs[name]) for name in ("schema", "msa_depth", "name_width")}
        heads["written"] = file.attrs["written"] = time.time_ns()
        safe_hdf5.set_digest(file, shards._digest(heads, rows, file["findings"][()].tobytes()))
    shards.write_file(folder / f"{heads['written']:016x}-{uuid.uuid4().hex[:12]}{shards.SUFFIX}", buffer.getbuffer())


def measure_index(path: Path) -> dict[str, float]:
    """Open a cache, find entries and read entries, in a fresh process: milliseconds, microseconds and megabytes."""
    done = subprocess.run([sys.executable, "-c", PROBE, str(path)], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


PROBE = """
import json, sys, time
import numpy as np
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.simulate import LOOKUPS

def resident():
    for line in open("/proc/self/status"):
        if line.startswith("VmRSS"):
            return int(line.split()[1]) / 1024

path = sys.argv[1]
with StructureCache(path) as warm:  # libraries are loaded, the page cache is warm
    warm.meta(warm.names[0])
before, opened = resident(), []
for _ in range(5):
    started = time.perf_counter()
    cache = StructureCache(path)
    count = len(cache.names)
    opened.append(time.perf_counter() - started)
places = np.random.default_rng(0).integers(0, count, LOOKUPS)
wanted = [cache.names[int(place)] for place in places]
cache = StructureCache(path)
len(cache.names)
started = time.perf_counter()
assert all(name in cache.names for name in wanted)
found = (time.perf_counter() - started) / LOOKUPS
started = time.perf_counter()
for name in wanted[:200]:
    cache.read_structure(name)
read = (time.perf_counter() - started) / 200
print(json.dumps({"open_ms": min(opened) * 1e3, "find_us": found * 1e6, "read_ms": read * 1e3,
                  "memory_mb": resident() - before}))
"""


def simulate(folder: Path, sizes: Iterable[int]) -> str:
    """Generate a cache of each size in `folder` and measure it: a Markdown table.

    Raises:
        InputError: a cache of that size is in the folder already.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lines = ["| " + " | ".join(COUNTED) + " |", "|" + "---|" * len(COUNTED)]
    for entries in sizes:
        path, started = folder / f"simulated_{entries}.h5", time.perf_counter()
        generate(path, entries)
        found = {"entries": entries, "build_s": time.perf_counter() - started}
        found |= {"index_mb": os.path.getsize(path) / 1e6, **measure_index(path)}
        lines.append("| " + " | ".join(f"{found[name]:,.0f}" if name == "entries" else f"{found[name]:.3g}"
                                       for name in COUNTED) + " |")  # fmt: skip
    return "\n".join(lines)
