"""The index from the shards that are there: what ends a build, and what puts a damaged cache right.

Merging reads the shards' own tables and writes the index and the report; no entry is touched. Of two entries with one
name the one that was written last counts. Nobody needs a lock: whoever merges looks again afterwards, so the last of
several that finish at once has everything.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from megafold.errors import InputError
from megafold.evopipe import shards
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.index import Index, write_index
from megafold.evopipe.report import Finding
from megafold.evopipe.shards import SUFFIX, Shard, ShardTable, folder_of, read_shard, row_type

DAMAGED = ".damaged"
SMALL = shards.SHARD_BYTES // 4  # repair packs shards below this together


@dataclass
class MergeReport:
    """`entries` in the index, `shards` that hold them, findings by entry, and `problems` with shards, one line each."""

    path: Path
    entries: int = 0
    shards: int = 0
    findings: dict[str, list[Finding]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        return "\n".join([f"{self.path}: {self.entries} entries in {self.shards} shards", *self.problems])


def report_path(cache: Path) -> Path:
    """Where a cache's findings are listed, one JSON object a line."""
    return Path(cache).with_name(f"{Path(cache).name}.report.jsonl")


def merge(path: Path, msa_depth: int | None = None, others: Sequence[Finding] = ()) -> MergeReport:
    """Write the index of all finished shards, and the report.

    Args:
        path: the cache.
        msa_depth: its alignment rows (0: all); by default what its index, or the first readable shard, says.
        others: findings about files that no entry was made of, for the report.

    Raises:
        InputError: there is neither an index nor a shard. StorageError: the index cannot be written.
    """
    path = Path(path)
    folder, seen, report = folder_of(path), None, MergeReport(path)
    if msa_depth is None:
        msa_depth = _depth(path)
    while True:
        found = sorted(entry.name for entry in folder.glob(f"*{SUFFIX}"))
        if found == seen:
            return report
        seen, report, tables = found, MergeReport(path), []
        for name in found:
            try:
                tables.append(read_shard(folder / name, msa_depth))
            except InputError as error:
                report.problems.append(str(error))
        rows, used = newest(tables)
        write_index(path, rows, used, msa_depth)
        report.entries, report.shards, report.findings = len(rows), len(used), findings(tables)
        told = [one for name in sorted(report.findings) for one in report.findings[name]]
        lines = (json.dumps(one.to_json()) + "\n" for one in [*told, *others])
        shards.write_file(report_path(path), "".join(lines).encode())


def _depth(path: Path) -> int:
    with suppress(InputError):
        index = Index(path)
        index.close()
        return index.msa_depth
    from megafold.evopipe import safe_hdf5

    for shard in sorted(folder_of(path).glob(f"*{SUFFIX}")):
        with suppress(InputError), safe_hdf5.opened(shard) as file:
            depth = safe_hdf5.number(file, "msa_depth")
            if depth is not None:
                return depth
    raise InputError(path, "cache", "no such cache: neither an index nor a shard can be read")


def newest(tables: list[ShardTable]) -> tuple[np.ndarray, list[str]]:
    """Rows of all entries, sorted by name, each from the last shard that has it; and the shards that they are in."""
    tables = [table for table in sorted(tables, key=lambda table: table.path.name) if len(table.rows)]
    width = max([1, *(table.rows.dtype["name"].itemsize for table in tables)])
    rows = np.concatenate([np.zeros(0, row_type(width)), *(table.rows.astype(row_type(width)) for table in tables)])
    rows["shard"] = np.repeat(np.arange(len(tables)), [len(table.rows) for table in tables])
    rows = rows[np.lexsort((rows["shard"], rows["name"]))]
    last = np.append(rows["name"][1:] != rows["name"][:-1], [True])[: len(rows)]
    rows = rows[last]
    used, number = np.unique(rows["shard"], return_inverse=True)
    rows["shard"] = number
    return rows, [tables[i].path.name for i in used]


def findings(tables: list[ShardTable]) -> dict[str, list[Finding]]:
    """What the last build of each entry had to say."""
    found: dict[str, list[Finding]] = {}
    for table in sorted(tables, key=lambda table: table.path.name):
        for name in table.rows["name"].tolist():
            found.pop(name.decode(), None)
        for name in {one.entry for one in table.findings}:
            found.pop(name, None)
        for one in table.findings:
            found.setdefault(one.entry, []).append(one)
    return found


def repair(path: Path, say: Callable[[str], None] = print) -> MergeReport:
    """Put a cache right: keep every sound entry, drop the others (the next build makes them anew), write the index.

    Shards that hold damaged or outdated entries, and small ones, are packed anew. A damaged shard keeps its content
    under a name that ends in `.damaged`. No other process may write to the cache meanwhile; readers that have a shard
    open may go on reading.

    Args:
        path: the cache.
        say: gets one line for each thing that was done.

    Raises:
        InputError: nothing of the cache can be read. StorageError: no space; the cache is as it was.
    """
    path = Path(path)
    folder, depth = folder_of(path), _depth(path)
    removed = shards.remove_parts(folder, older_than=0)
    if removed:
        say(f"removed {removed} unfinished files of killed writers")
    for shard in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            read_shard(shard, depth)
        except InputError as error:
            shard.rename(shard.with_name(shard.name + DAMAGED))
            say(f"{error}: set aside as {shard.name}{DAMAGED}; the next build makes its entries anew")
    merge(path, depth)
    with StructureCache(path) as cache:
        replaced, new = _repack(cache, folder, depth, say)
    for shard, damaged in replaced.items():
        if damaged:
            shard.rename(shard.with_name(shard.name + DAMAGED))
        else:
            shard.unlink()
    if new:
        say(f"packed {len(replaced)} shards anew into {new}")
    return merge(path, depth)


def _repack(cache: StructureCache, folder: Path, depth: int, say) -> tuple[dict[Path, bool], int]:
    """Write the sound entries of shards that need it to new shards: (old shard -> was it damaged?, new shards)."""
    rows = np.concatenate([np.zeros(0, cache.index.dtype), *cache.index.rows()])
    place = {name: number for number, name in enumerate(cache.index.shards)}
    bad: dict[int, list[str]] = {}
    for row in rows:
        name = row["name"].decode()
        for problem in cache.problems(name):
            say(f"{problem}: dropped, the next build makes it anew")
            bad.setdefault(int(row["shard"]), []).append(name)
    held = {shard: len(read_shard(shard, depth).rows) for shard in sorted(folder.glob(f"*{SUFFIX}"))}
    live = {shard: int((rows["shard"] == place.get(shard.name, -1)).sum()) for shard in held}
    small = [shard for shard in held if shard.stat().st_size < SMALL]
    wanted = [
        shard
        for shard in held
        if place.get(shard.name) in bad or live[shard] < held[shard] or (shard in small and len(small) > 1)
    ]
    target, new = Shard(folder, depth), 0
    for shard in wanted:
        number = place.get(shard.name, -1)
        for row in rows[rows["shard"] == number]:
            name = row["name"].decode()
            if name in bad.get(number, ()):
                continue
            meta = cache.meta(name)
            extra = {key: meta[key] for key in ("versions", "code") if key in meta}
            target.add(cache.read(name), row["key"].tobytes().hex(), extra)
            if target.size >= shards.SHARD_BYTES:
                new += target.seal() is not None
        # what failed is said again by the shard that replaces this one
        names = {one.entry for one in read_shard(shard, depth).findings} - set(target._rows)
        target.findings += [
            one for one in read_shard(shard, depth).findings if one.entry in names and one.kind == "failed"
        ]
    new += target.seal() is not None
    return {shard: place.get(shard.name) in bad for shard in wanted}, new
