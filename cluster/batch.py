"""Comparisons that share a job: planned before the DAG is built, measured through the launcher, told in a manifest."""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cluster.launcher import launch
from cluster.outcome import Outcome
from cluster.site import Site, detect_vendor
from experiments.record import Record, read_record, record_path, write_json, write_record
from experiments.spec import Comparison, Point, comparison_from_dict
from megafold.errors import InputError

SETTLED = ("ok", "oom", "timeout", "unsupported")  # results; anything else is measured again
FAILING = ("error", "node_failure")  # these fail the rule


@dataclass(frozen=True)
class Layout:
    """Where things lie under results/<site>."""

    root: Path

    def records(self) -> Path:
        """Folder of all records."""
        return self.root / "records"

    def comparison(self, sweep: str, batch: str, comparison: Comparison) -> Path:
        """Input of `megafold measure`."""
        return self.root / "comparisons" / sweep / batch / f"{comparison.id}.json"

    def manifest(self, sweep: str, batch: str) -> Path:
        """What came out of a batch."""
        return self.root / "batches" / sweep / f"{batch}.json"

    def job(self, name: str) -> Path:
        """Folder of a job: job.json and logs."""
        return self.root / "jobs" / name


def plan_batches(site: Site, comparisons: Sequence[Comparison]) -> dict[str, list[dict[str, Any]]]:
    """Pack comparisons into jobs of the site: by name, the comparisons as plain dictionaries.

    A job holds at most `comparisons_per_job` of them, all for the same number of devices. The name changes with the
    content, so that a changed sweep never meets the manifest of the old one.

    Raises:
        InputError: where a comparison needs more nodes than the site gives.
    """
    by_devices: dict[int, list[Comparison]] = {}
    for comparison in comparisons:
        by_devices.setdefault(devices_of(comparison), []).append(comparison)
    batches: dict[str, list[dict[str, Any]]] = {}
    for devices, group in by_devices.items():
        site.nodes_for(devices)
        for start in range(0, len(group), site.comparisons_per_job):
            chosen = group[start : start + site.comparisons_per_job]
            digest = hashlib.sha256("\n".join(entry.id for entry in chosen).encode()).hexdigest()[:8]
            name = chosen[0].id if len(chosen) == 1 else f"{len(batches) + 1:02d}-{digest}"
            batches[name] = [entry.as_dict() for entry in chosen]
    return batches


def devices_of(comparison: Comparison) -> int:
    """Devices that its job needs; an emulated rank needs one."""
    setting = comparison.setting
    return setting.sp * setting.dp if setting.mode == "measured" else 1


def measure_batch(
    site: Site,
    layout: Layout,
    sweep: str,
    batch: str,
    contents: Sequence[Mapping[str, Any]],
    megafold: Sequence[str],
    *,
    cache: Path | None = None,
    force: bool = False,
) -> list[Record]:
    """Measure what has no result yet, in one job; write the manifest; return the records of all points.

    A job that runs into its time limit or out of memory costs the comparison it was at: its missing points get that
    status, and another job measures the rest. After a node failure the missing points are `node_failure`, after a crash
    of the command `error`. Both are measured again by the next run.

    Args:
        megafold: the command line `megafold` of this environment.

    Raises:
        InputError, Cancelled: as cluster.launcher.launch.
    """
    comparisons = [comparison_from_dict(content, f"batch {batch}") for content in contents]
    name = f"{sweep}-{batch}"
    todo = list(comparisons) if force else [entry for entry in comparisons if _missing(entry, layout, 0.0)]
    while todo:
        outcome, submitted = _run(site, layout, sweep, batch, todo, megafold, cache, force)
        if outcome.status == "cancelled" or not outcome.job_id:
            _raise_failure(outcome, name)
        left = [entry for entry in todo if _missing(entry, layout, submitted)]
        lost, todo = _lost(outcome, left)
        for comparison, status in lost:
            for point in _missing(comparison, layout, submitted):
                write_record(_record_of_loss(site, comparison, point, status, outcome), layout.records())
    records = [read_record(record_path(layout.records(), point)) for entry in comparisons for point in entry.points]
    entries = [
        {"path": str(record_path(layout.records(), r.point)), "status": r.status, "reason": r.reason} for r in records
    ]
    write_json(layout.manifest(sweep, batch), {"sweep": sweep, "batch": batch, "records": entries})
    return records


def _run(site, layout, sweep, batch, todo, megafold, cache, force) -> tuple[Outcome, float]:
    inputs = []
    for comparison in todo:
        path = layout.comparison(sweep, batch, comparison).resolve()
        write_json(path, comparison.as_dict())
        inputs.append(str(path))
    folder = layout.job(f"{sweep}-{batch}").resolve()
    options = ["--records", str(layout.records().resolve()), "--logs", str(folder / "workers")]
    options += ["--cache", str(cache.resolve())] if cache else []
    options += ["--force"] if force else []
    devices = devices_of(todo[0])
    outcome = launch(
        site,
        f"{sweep}-{batch}",
        folder,
        [*megafold, "measure", *inputs, *options],
        nodes=site.nodes_for(devices),
        tasks=devices,
    )
    return outcome, float(json.loads((folder / "job.json").read_text()).get("submitted", 0.0))


def _missing(comparison: Comparison, layout: Layout, since: float) -> list[Point]:
    """Points without a result of this comparison, and without any record written since then (seconds, epoch)."""
    missing = []
    for point in comparison.points:
        path = record_path(layout.records(), point)
        try:
            record = read_record(path)
            fresh = bool(since) and path.stat().st_mtime >= since - 1
            done = record.comparison_id == comparison.id and (record.status in SETTLED or fresh)
        except InputError:
            done = False
        if not done:
            missing.append(point)
    return missing


def _lost(outcome: Outcome, left: list[Comparison]) -> tuple[list[tuple[Comparison, str]], list[Comparison]]:
    """What a job that ended like this cost, with the status of its points; and what another job can still measure."""
    if outcome.status in ("timeout", "oom"):
        return [(entry, outcome.status) for entry in left[:1]], left[1:]
    status = "node_failure" if outcome.status == "node_failure" else "error"
    return [(entry, status) for entry in left], []


def _record_of_loss(site: Site, comparison: Comparison, point: Point, status: str, outcome: Outcome) -> Record:
    told = outcome.reason or "the command ended without a record of this point"
    return Record(
        point=point,
        comparison_id=comparison.id,
        status=status,
        vendor=detect_vendor(site),
        evidence="emulated" if point.setting.mode == "emulated" else "measured",
        reason=f"job {outcome.job_id}: {told}; log: {outcome.log}",
        provenance={
            "site": site.name,
            "device": site.gpu,
            "slurm_job_id": outcome.job_id if site.executor == "slurm" else None,
            "started": outcome.started,
            "ended": outcome.ended,
            "hosts": 1,
            "command": shlex.join(["megafold", "measure", f"{comparison.id}.json"]),
        },
    )


class BatchFailed(Exception):
    """The batch's job was never run, or was cancelled from outside: no point was lost, and none is recorded."""

    def __init__(self, line: str, code: int) -> None:
        super().__init__(line)
        self.code = code


def _raise_failure(outcome: Outcome, name: str) -> None:
    raise BatchFailed(f"{name}: {outcome.line}", outcome.code)
