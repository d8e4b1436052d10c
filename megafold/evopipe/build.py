"""Build a cache: featurise every structure of a source, skip what is unchanged, list what failed.

Each process writes its entries to shards of its own (`megafold.evopipe.shards`); the index is written at the end. A
build that is killed at any moment leaves the cache as it was, with its finished shards beside it for the next build.
Several builds, on several machines, may share the work: each takes its part of the structures, and the last step,
`merge`, writes the index of what all of them made.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from megafold.errors import InputError
from megafold.evopipe import cache, shards
from megafold.evopipe.index import Index
from megafold.evopipe.maker import Made
from megafold.evopipe.merge import merge
from megafold.evopipe.report import Finding, counts
from megafold.evopipe.sources import DataSource, materialize
from megafold.evopipe.workers import in_process, in_workers

TIMEOUT = 600.0  # seconds for one structure
LINE_EVERY = 10.0  # seconds between lines of progress, where there are many structures
FEW = 200
MANY = 200  # findings that are told one by one; the report of the cache has all of them


@dataclass
class BuildReport:
    """What a build did.

    Args:
        path: the cache.
        built, skipped: ids of entries written, and of entries that were there with the same inputs.
        failed: (file, entry, reason) of each structure that could not be used.
        notes: (entry, note) of the entries that were built.
        findings: all that there is to say about the inputs, with what to do.
        seconds: wall time.
        workers: processes.
        busy: seconds that they spent on structures.
        memory: largest resident memory of a process, MiB; 0 where nothing was made.
    """

    path: Path
    built: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)
    failed: list[tuple[str, str, str]] = field(default_factory=list)
    notes: list[tuple[str, str]] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    seconds: float = 0.0
    workers: int = 1
    busy: float = 0.0
    memory: float = 0.0

    @property
    def efficiency(self) -> float:
        """Share of the processes' time that was spent on structures (the rest: start, waiting for the last one)."""
        return self.busy / (self.workers * self.seconds) if self.seconds else 0.0

    def __str__(self) -> str:
        done = f"{len(self.built)} built, {len(self.skipped)} unchanged, {len(self.failed)} failed"
        lines = [f"{self.path}: {done} in {self.seconds:.1f} s"]
        if self.built or self.failed:
            rate = (len(self.built) + len(self.failed)) / max(self.busy, 1e-9)
            processes = (
                f"{self.workers} process{'es' * (self.workers > 1)}, {100 * self.efficiency:.0f} % of their time"
            )
            each = f"{rate:.2f} structures a second each, at most {self.memory:.0f} MiB in one"
            lines.append(f"  {processes} at work, {each}")
        told = [finding for finding in self.findings if finding.kind != "failed"]
        if len(told) > MANY:
            lines += [f"  {kind}: {code}: {number} entries" for (kind, code), number in counts(told).items()]
        else:
            lines += [f"  {finding}" for finding in told]
        said = {finding.entry for finding in self.findings}
        lines += [f"  {entry}: {note}" for entry, note in self.notes if entry not in said]
        actions = {finding.entry: finding.action for finding in self.findings if finding.kind == "failed"}
        for file, entry, reason in self.failed:
            action = actions.get(entry)
            lines.append(f"  failed: {file}: {entry}: {reason}" + (f" -> {action}" if action else ""))
        return "\n".join(lines)


def build_cache(
    source: DataSource,
    out: Path,
    *,
    workers: int = 1,
    msa_depth: int | None = 16384,
    progress: bool = True,
    timeout: float = TIMEOUT,
    part: tuple[int, int] | None = None,
) -> BuildReport:
    """Featurise a source into the cache `out`. Run it again to resume it or to add new structures.

    Args:
        workers: processes; with 1 the work is done in this process (and `timeout` is not enforced). A script that asks
            for more must be importable, as always with `multiprocessing` (`if __name__ == "__main__":`).
        msa_depth: alignment rows kept per entry (AF3 uses 16384); part of the cache, so it cannot change later.
        progress: a bar on a terminal, plain lines elsewhere.
        timeout: seconds for one structure with several workers.
        part: (i, n) makes the i-th of n parts of the structures, i from 1, and leaves the index to `merge`.

    Raises:
        InputError: the source's folders, an existing cache with another schema or depth, or (when `source.mmcif` is
            one file) that file. Problems of single structures in a folder are listed in the report.
        StorageError: the cache cannot be written (a full disk); what was finished is kept, and the cache is valid.
    """
    started, out = time.monotonic(), Path(out)
    source = materialize(source)
    files = source.files()
    work = list(files.items())
    if part is not None:
        if not 1 <= part[0] <= part[1]:
            raise ValueError(f"part must be (i, n) with 1 <= i <= n, not {part}")
        work = work[part[0] - 1 :: part[1]]
    prepare_cache(out, msa_depth)
    report, memory = BuildReport(out, workers=max(1, min(workers, len(work)))), []
    others = source.passed_over() if part is None or part[0] == 1 else []
    report.findings += others
    report.failed += [(finding.file, finding.entry, finding.reason) for finding in others]
    job = source, out, msa_depth, _not_indexed(out, msa_depth or 0), work, memory
    results = in_process(*job) if workers <= 1 else in_workers(*job, workers=workers, timeout=timeout)
    notes: dict[str, tuple[Finding, ...]] = {}
    try:
        with _sigterm_raises():
            for made in _shown(results, len(work), progress):
                report.busy += made.seconds
                _take(report, made, files)
                notes[made.name] = made.findings
                if made.error is not None and source.mmcif.is_file():
                    raise made.error
    finally:  # also when interrupted: what is done is kept
        results.close()
        report.built.sort(), report.skipped.sort(), report.failed.sort()
        if part is None:
            merge(out, msa_depth or 0, others)
    report.seconds, report.memory = time.monotonic() - started, max(memory, default=0.0)
    if part is None and report.built:
        with cache.StructureCache(out) as reader:
            report.notes = [(name, note) for name in report.built for note in reader.meta(name)["notes"]]
    return report


def prepare_cache(out: Path, msa_depth: int | None) -> None:
    """An empty cache where there is none; whatever killed builds left long ago is removed."""
    cache.create(out, msa_depth=msa_depth)
    shards.remove_parts(shards.folder_of(out))
    shards.remove_parts(out.parent, of=out.name)


def _not_indexed(out: Path, msa_depth: int) -> dict[str, str]:
    """Entry -> content address, of the shards that a build finished before it was killed."""
    index = Index(out)
    listed, known = set(index.shards), {}
    index.close()
    for path in sorted(shards.folder_of(out).glob(f"*{shards.SUFFIX}")):
        if path.name not in listed:
            try:
                rows = shards.read_shard(path, msa_depth).rows
            except InputError as error:
                print(f"left out: {error}", file=sys.stderr)
                continue
            known |= {row["name"].decode(): row["key"].tobytes().hex() for row in rows}
    return known


def _take(report: BuildReport, made: Made, files: dict[str, Path]) -> None:
    report.findings += made.findings
    if made.status == "built":
        report.built.append(made.name)
    elif made.status == "unchanged":
        report.skipped.append(made.name)
    else:
        error = made.error
        reason = f"{error.field}: {error.problem}" if error.field else error.problem
        report.failed.append((error.file or str(files[made.name]), made.name, reason))


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Inside, SIGTERM (a job's time limit) ends the build as Ctrl-C does: what is done is kept."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(*_) -> None:
        raise SystemExit(128 + signal.SIGTERM)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _shown(results: Iterable[Made], total: int, progress: bool) -> Iterator[Made]:
    if not progress or not total:
        yield from results
        return
    if sys.stderr.isatty():
        from tqdm import tqdm

        yield from tqdm(results, total=total, desc="featurise", unit="structure")
        return
    started, last = time.monotonic(), -LINE_EVERY
    for count, made in enumerate(results, 1):
        now = time.monotonic() - started
        if total <= FEW or made.error is not None or count == total or now - last >= LINE_EVERY:
            last = now
            left = f", {_clock(now / count * (total - count))} left" if count < total else ""
            line = f"[{count}/{total}] {made.name}: {made.error or STATUS[made.status]}{left}"
            print(line, file=sys.stderr, flush=True)
        yield made


STATUS = {"built": "ok", "unchanged": "unchanged"}


def _clock(seconds: float) -> str:
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def default_workers() -> int:
    """CPU cores that this process may use."""
    return len(os.sched_getaffinity(0))
