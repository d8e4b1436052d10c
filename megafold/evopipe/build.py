"""Build a cache: featurise every structure of a source, skip what is unchanged, list what failed.

Each entry is first written as a shard, a file of its own. At the end old entries and shards are copied to a new file
that replaces the cache: the cache is never open for writing, and a build that is killed at any moment leaves it as it
was, with its finished shards beside it for the next build. A structure on which RDKit does not come back costs one
worker, which is stopped and replaced.
"""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import os
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from megafold.errors import InputError
from megafold.evopipe import cache
from megafold.evopipe.sources import DataSource, materialize

TIMEOUT = 600.0  # seconds for one structure
READY = "ready"


@dataclass
class BuildReport:
    """What a build did.

    Args:
        path: the cache.
        built, skipped: ids of entries written, and of entries that were there with the same inputs.
        failed: (file, entry, reason) of each structure that could not be used.
        notes: (entry, note).
        seconds: wall time.
    """

    path: Path
    built: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        counts = f"{len(self.built)} built, {len(self.skipped)} unchanged, {len(self.failed)} failed"
        lines = [f"{self.path}: {counts} in {self.seconds:.1f} s"]
        lines += [f"  {entry}: {note}" for entry, note in self.notes]
        lines += [f"  failed: {file}: {entry}: {reason}" for file, entry, reason in self.failed]
        return "\n".join(lines)


def build_cache(
    source: DataSource,
    out: Path,
    *,
    workers: int = 1,
    msa_depth: int | None = 16384,
    progress: bool = True,
    timeout: float = TIMEOUT,
) -> BuildReport:
    """Featurise a source into the cache file `out`. Run it again to resume it or to add new structures.

    Args:
        workers: processes; with 1 the work is done in this process (and `timeout` is not enforced). A script that asks
            for more must be importable, as always with `multiprocessing` (`if __name__ == "__main__":`).
        msa_depth: alignment rows kept per entry (AF3 uses 16384); part of the cache, so it cannot change later.
        progress: a bar on a terminal, plain lines elsewhere.
        timeout: seconds for one structure with several workers.

    Raises:
        InputError: the source's folders, an existing cache with another schema or depth, or (when `source.mmcif` is
            one file) that file. Problems of single structures in a folder are listed in the report.
    """
    started, out = time.monotonic(), Path(out)
    source = materialize(source)
    files = source.files()
    cache.create(out, msa_depth=msa_depth)
    report = BuildReport(out)
    shards = out.with_name(f".{out.name}.shards")
    shards.mkdir(exist_ok=True)
    work = {}
    for name, path in files.items():
        if _unchanged(source, out, name, path, msa_depth):
            report.skipped.append(name)
        elif _unchanged(source, shards / f"{name}.h5", name, path, msa_depth):  # a build that was killed made it
            report.built.append(name)
        else:
            work[name] = path
    run = _in_process if workers <= 1 else _in_workers
    try:
        for name, problem in _shown(run(source, work, shards, msa_depth, workers, timeout), len(work), progress):
            if problem is None:
                report.built.append(name)
            elif source.mmcif.is_file():
                raise problem
            else:
                report.failed.append((problem.file or str(files[name]), name, _reason(problem)))
    finally:  # also when interrupted: what is done is kept
        report.built.sort()
        report.failed.sort()
        _merge(out, shards, report.built, msa_depth)
    with cache.StructureCache(out, check=False) as reader:
        report.notes = [(name, note) for name in report.built for note in reader.meta(name)["notes"]]
    report.seconds = time.monotonic() - started
    return report


def _reason(problem: InputError) -> str:
    return f"{problem.field}: {problem.problem}" if problem.field else problem.problem


def _unchanged(source: DataSource, file: Path, name: str, path: Path, msa_depth: int | None) -> bool:
    """Does a file hold the entry, sound, made by these package versions, of exactly these input files?"""
    from megafold.evopipe.featurize import digests, inputs_of

    if not file.exists():
        return False
    try:
        cache.create(file, msa_depth=msa_depth)  # only checks: the file exists
        with cache.StructureCache(file) as reader:
            if name not in reader.entries() or reader.problems(name):
                return False
            meta = reader.meta(name)
        return meta["sources"] == digests(inputs_of(source, name, path)) and meta["versions"] == cache.versions()
    except InputError:
        return False


def _make_shard(source: DataSource, name: str, path: Path, shard: Path, msa_depth: int | None) -> InputError | None:
    """Featurise one structure into a file of its own; the problem, if there is one, as an InputError."""
    from megafold.evopipe.featurize import featurize

    part = shard.with_suffix(".part")
    try:
        entry = featurize(source, name, path, msa_depth=msa_depth)
        part.unlink(missing_ok=True)
        cache.create(part, msa_depth=msa_depth)
        with cache.open_cache(part, "r+") as file:
            cache.write_entry(file, entry)
        part.replace(shard)
    except InputError as error:
        return error
    except Exception as error:  # whatever the parsers raise for one structure must not end the build of the others
        return InputError(path, "", f"{type(error).__name__}: {error}")
    return None


def _merge(out: Path, shards: Path, names: list[str], msa_depth: int | None) -> None:
    """Replace the cache by a copy with the named shards in it, and remove the shards."""
    if names:
        part = out.with_name(f".{out.name}.part")
        part.unlink(missing_ok=True)
        cache.create(part, msa_depth=msa_depth)
        with cache.open_cache(part, "r+") as new, cache.open_cache(out) as old:
            for name in old["entries"]:
                if name not in names:
                    _copy(old, new, name)
            for name in names:
                with cache.open_cache(shards / f"{name}.h5") as shard:
                    _copy(shard, new, name)
        part.replace(out)
    for left in shards.glob("*"):
        left.unlink()
    shards.rmdir()


def _copy(old, new, name: str) -> None:
    """Copy one entry; one that HDF5 cannot read (it would be built anew) is left out."""
    try:
        old.copy(f"entries/{name}", new["entries"], name=name)
    except cache.HDF5_ERRORS:
        if name in new["entries"]:
            del new["entries"][name]


def _prepare(source: DataSource) -> None:
    """Load the baseline and its component table."""
    from megafold.stock import load_stock

    load_stock()
    from megafold.evopipe import ccd

    ccd.install(source.components)
    from alphafold3_pytorch.inputs import CCD_COMPONENTS_SMILES

    assert "ALA" in CCD_COMPONENTS_SMILES  # reads the dictionary now


def _in_process(source, work, shards, msa_depth, workers, timeout) -> Iterator[tuple[str, InputError | None]]:
    if work:
        _prepare(source)
    for name, path in work.items():
        yield name, _make_shard(source, name, path, shards / f"{name}.h5", msa_depth)


def _work(source, msa_depth, pipe) -> None:
    import torch

    torch.set_num_threads(1)
    _prepare(source)
    pipe.send(READY)
    while (task := pipe.recv()) is not None:
        name, path, shard = task
        problem = _make_shard(source, name, path, shard, msa_depth)
        pipe.send(None if problem is None else (problem.file, problem.field, problem.problem))


class _Worker:
    """A process that featurises one structure at a time.

    It is forked from a server that has the baseline imported but has run nothing: forking this process could deadlock
    in the thread pools of the libraries (polars, OpenMP), and a fresh interpreter would take 15 seconds for each.
    """

    def __init__(self, source: DataSource, msa_depth: int | None) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megafold.evopipe.preload"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(source, msa_depth, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.task: tuple[str, Path, Path] | None = None
        self.started = math.inf  # of the task; the clock does not run while the process prepares itself
        self.ready = False

    def give(self, task: tuple[str, Path, Path]) -> None:
        self.task = task
        self.started = time.monotonic() if self.ready else math.inf
        with suppress(OSError):  # a worker that died while idle is found by the end of its pipe
            self.pipe.send(task)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def _in_workers(source, work, shards, msa_depth, workers, timeout) -> Iterator[tuple[str, InputError | None]]:
    if not work:
        return
    waiting = [(name, path, shards / f"{name}.h5") for name, path in work.items()][::-1]
    pool = [_Worker(source, msa_depth) for _ in range(min(workers, len(work)))]
    try:
        while waiting or any(worker.task for worker in pool):
            for worker in pool:
                if worker.task is None and waiting:
                    worker.give(waiting.pop())
            busy = [worker for worker in pool if worker.task]
            multiprocessing.connection.wait([worker.pipe for worker in busy], timeout=0.5)
            for worker in busy:
                (name, path, shard), problem = worker.task, None
                if worker.pipe.poll():
                    try:
                        answer = worker.pipe.recv()
                        if answer == READY:
                            worker.ready, worker.started = True, time.monotonic()
                            continue
                        problem = None if answer is None else InputError(*answer)
                        worker.task = None
                    except (EOFError, ConnectionError):
                        worker.process.join(5)
                        problem = InputError(path, "", f"the worker died (exit code {worker.process.exitcode})")
                elif time.monotonic() - worker.started > timeout:
                    problem = InputError(path, "", f"took more than {timeout:g} s")
                else:
                    continue
                if worker.task is not None:  # dead or too slow: a fresh process takes its place
                    worker.stop()
                    shard.unlink(missing_ok=True)
                    pool.remove(worker)
                    pool += [_Worker(source, msa_depth)] if waiting else []
                yield name, problem
    finally:
        for worker in pool:
            worker.stop()


def _shown(results, total: int, progress: bool):
    if progress and total and sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(results, total=total, desc="featurise", unit="structure")
        return
    for count, (name, problem) in enumerate(results, 1):
        if progress:
            print(f"[{count}/{total}] {name}: {'ok' if problem is None else problem}", file=sys.stderr, flush=True)
        yield name, problem


def default_workers() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
