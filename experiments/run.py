"""Comparisons to Records: all contenders of a shape in one job, visited A B A B, each in a process of its own.

This module and its process load neither torch nor the model; the workers do.
"""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from experiments.pool import Pool
from experiments.provenance import now, software, vendor_here
from experiments.ranks import Alone, join_ranks
from experiments.record import Metric, Record, read_record, record_path, write_record
from experiments.spec import Comparison, Contender, Point
from megafold.errors import InputError

# A record with one of these is a result and is kept; the others are measured again.
SETTLED = ("ok", "oom", "timeout", "unsupported")
# For what the driver keeps for a process that holds nothing else.
CONTEXT_BYTES = 1 << 30
# An allocator that comes near the end of the device frees and takes memory again, which shows in times.
SHARE_OF_DEVICE = 0.85


def measure(
    comparisons: Sequence[Comparison],
    records: Path,
    *,
    cache: Path | None,
    logs: Path,
    command: str,
    force: bool = False,
    device: str = "auto",
) -> list[Record]:
    """Measure what has no result yet and write one record for each point.

    A worker that runs out of memory, crashes or hangs is a record, and the next comparison gets a new one. A record is
    kept, and not measured again, when it is settled ("ok", "oom", "timeout", "unsupported") and belongs to the same
    comparison: beside other contenders the point is another measurement. Where a contender of a comparison has no
    result yet, those that have a time are measured beside it once more, so that their ratio comes from one job.

    Args:
        comparisons: in the order in which they run; workers are reused over all of them.
        records: folder results/<site>/records.
        cache: EvoPipe cache, for points on real structures.
        logs: folder for the workers' logs.
        command: the command line, for provenance.
        force: measure everything again. A worse outcome still does not replace a better record.
        device: "auto" (a GPU where there is one), "cpu" or "cuda".

    Returns:
        The outcome of every point, in order: just measured, or kept. Of several ranks (see experiments.ranks) rank 0
        writes and returns them; the others return nothing.

    Raises:
        InputError: where a point needs a cache and there is none.
    """
    _check_cache(comparisons, cache)
    ranks = join_ranks()
    missing = ranks.same([[point.id for point in _unsettled(entry, records, force)] for entry in comparisons])
    todo = [(entry, [p for p in entry.points if p.id in ids]) for entry, ids in zip(comparisons, missing)]
    static = software(command)
    results: dict[tuple[str, str], Record] = {}
    with _terminable(), Pool(Path(logs), device) as pool, _Progress(todo) as progress:
        for number, (comparison, points) in enumerate(todo):
            later = [(other.setting.what, point.contender) for other, left in todo[number:] for point in left]
            pool.keep(later)
            run = _Run(comparison, points, pool, cache, static, records, progress, ranks)
            results |= {(comparison.id, record.point.id): record for record in run.records()}
        ranks.close()
    if not ranks.leads:
        return []
    kept = [
        results.get((comparison.id, point.id)) or read_record(record_path(records, point))
        for comparison in comparisons
        for point in comparison.points
    ]
    return kept


class _Run:
    """One comparison: contenders are set up, visited in turn and closed; an outcome is written when it is known."""

    def __init__(
        self,
        comparison: Comparison,
        points: Sequence[Point],
        pool: Pool,
        cache: Path | None,
        static: Mapping[str, Any],
        records: Path,
        progress: _Progress,
        ranks: Alone,
    ) -> None:
        self._ranks = ranks
        self._comparison, self._pool, self._cache, self._static = comparison, pool, cache, static
        self._folder, self._progress = records, progress
        self._points = {point.contender: point for point in points}
        self._live = list(self._points)
        self._hardware: dict[str, Any] = {}
        self._memory: dict[Contender, Mapping[str, int] | None] = {}
        self._written: list[Record] = []
        self._started = now()

    def records(self) -> list[Record]:
        """Measure; the records of all points that were given."""
        if not self._points:
            return []
        setting, protocol = self._comparison.setting, self._comparison.setting.protocol
        self._progress.say(f"{self._comparison.id}: starting {', '.join(c.name for c in self._live)}")
        replies = self._pool.prepare(setting.what, self._live, protocol.timeout_s)
        failed = {}
        for contender in self._live:
            reply = self._ranks.worst(replies.get(contender, {"status": "ok"}), protocol.timeout_s)
            if reply["status"] != "ok":
                failed[contender] = reply
            else:
                self._hardware = self._pool.worker(setting.what, contender).hardware or self._hardware
        for contender, reply in failed.items():
            self._settle(contender, reply)
        self._open()
        for visit in range(1, protocol.visits + 1):
            for contender in list(self._live):
                self._progress.say(f"{self._comparison.id}: {contender.name}, visit {visit} of {protocol.visits}")
                self._visit(contender, is_last=visit == protocol.visits)
                self._progress.advance()
        return self._written

    def _visit(self, contender: Contender, *, is_last: bool) -> None:
        """Warm up and time; after the last visit comes the outcome, at once: a run that is ended keeps what it has."""
        protocol = self._comparison.setting.protocol
        others = [other for other in self._live if other != contender]
        stays = not is_last and (not others or fits_together([self._memory.get(one) for one in self._live]))
        command = {"do": "visit", "warmup": protocol.warmup, "repeats": protocol.repeats, "stays": stays}
        reply = self._ask(contender, command)
        self._memory[contender] = reply.get("memory")
        if is_last and reply["status"] == "ok":
            reply = self._ask(contender, {"do": "close"})
            if reply["status"] == "ok":
                self._settle(contender, reply)

    def _open(self) -> None:
        """Set all contenders up: side by side, for none is timed yet; those that meet on several ranks in turn."""
        setting, cache = self._comparison.setting, str(self._cache) if self._cache else None
        commands = {
            contender: {
                "do": "open",
                "point": self._points[contender].as_dict(),
                "cache": cache,
                "meeting": self._ranks.meeting(),
                "contenders": len(self._live),
            }
            for contender in self._live
        }
        if self._ranks.size > 1:
            for contender, command in commands.items():
                self._ask(contender, command)
            return
        for contender, reply in self._pool.ask_all(setting.what, commands, setting.protocol.timeout_s).items():
            if reply["status"] != "ok":
                self._settle(contender, reply)

    def _ask(self, contender: Contender, command: Mapping[str, Any]) -> dict[str, Any]:
        setting = self._comparison.setting
        reply = self._pool.worker(setting.what, contender).ask(command, setting.protocol.timeout_s)
        reply = self._ranks.worst(reply, setting.protocol.timeout_s)
        if reply["status"] != "ok":
            self._settle(contender, reply)
        return reply

    def _settle(self, contender: Contender, reply: Mapping[str, Any]) -> None:
        self._live.remove(contender)
        if reply["status"] == "error" or (reply["status"] != "ok" and self._ranks.size > 1):
            # After some errors (an illegal access on a GPU) the process is of no use to the next comparison, and after
            # any on one rank the process groups of all are not.
            self._pool.discard(self._comparison.setting.what, contender)
        own = self._hardware
        found = {name: value for name, value in own.items() if name != "vendor"}
        record = Record(
            point=self._points[contender],
            comparison_id=self._comparison.id,
            status=reply["status"],
            reason=reply.get("reason", ""),
            vendor=own.get("vendor", vendor_here()),
            evidence=self._comparison.setting.mode,
            metrics={name: Metric(**metric) for name, metric in reply.get("metrics", {}).items()},
            provenance={**self._static, **found, "started": self._started, "ended": now()}
            | ({"notes": reply["notes"]} if reply.get("notes") else {}),
        )
        if self._ranks.leads:
            write_record(record, self._folder)
        self._written.append(record)
        reason = f" ({record.reason})" if record.reason else ""
        self._progress.say(f"{self._comparison.id}: {contender.name}: {record.status}{reason}")


def fits_together(memories: Sequence[Mapping[str, int] | None]) -> bool:
    """Whether each contender's peak fits the device beside what all others hold there between their visits.

    Args:
        memories: of each, as measured: "peak", "held" and "device" in bytes; None where that is not known.
    """
    if any(memory is None for memory in memories):
        return False
    held = sum(memory["held"] + CONTEXT_BYTES for memory in memories)
    return all(memory["peak"] - memory["held"] + held <= SHARE_OF_DEVICE * memory["device"] for memory in memories)


class _Progress:
    """A bar of visits on a terminal, plain lines elsewhere; both on standard error."""

    def __init__(self, todo: Sequence[tuple[Comparison, Sequence[Point]]]) -> None:
        visits = sum(len(points) * comparison.setting.protocol.visits for comparison, points in todo)
        self._bar = tqdm(total=visits, unit="visit", file=sys.stderr) if visits and sys.stderr.isatty() else None

    def __enter__(self) -> _Progress:
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.close()

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.update()

    def say(self, line: str) -> None:
        if self._bar is None:
            print(line, file=sys.stderr, flush=True)
        else:
            self._bar.set_postfix_str(line, refresh=True)


def _unsettled(comparison: Comparison, records: Path, force: bool) -> list[Point]:
    """What to measure: points without a result, and beside them those with a time, since a ratio needs one job.

    Times of several jobs, left by one that was ended amidst, are no result.
    """
    settled: dict[Point, str] = {}
    jobs = set()
    for point in comparison.points:
        with suppress(InputError):  # missing, or broken: as good as missing
            present = read_record(record_path(records, point))
            if present.status in SETTLED and present.comparison_id == comparison.id:
                settled[point] = present.status
                jobs |= {present.provenance.get("started")} if present.status == "ok" else set()
    if len(settled) == len(comparison.points) and len(jobs) <= 1 and not force:
        return []
    return [point for point in comparison.points if force or settled.get(point, "ok") == "ok"]


def _check_cache(comparisons: Sequence[Comparison], cache: Path | None) -> None:
    for comparison in comparisons:
        setting = comparison.setting
        if setting.data == "cache" or setting.what == "data_pipeline":
            if cache is None:
                raise InputError("--cache", comparison.id, "needs a cache; make one with `megafold cache build`")
            if not Path(cache).is_file():
                raise InputError(cache, "", "no such cache; make one with `megafold cache build`")


@contextmanager
def _terminable() -> Iterator[None]:
    """SIGTERM ends the block as Ctrl-C does, so that the workers are ended; only the main thread can arrange that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
