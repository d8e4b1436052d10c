"""What came out: one Record, one JSON file, for each Point. This module loads neither torch nor the model."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from experiments.spec import Point, point_from_dict
from megafold.errors import InputError

SCHEMA = 1
# What may replace what: a result is never replaced by one of a lower rank.
STATUS_RANK = {"error": 0, "node_failure": 1, "timeout": 2, "oom": 2, "unsupported": 2, "ok": 3}
EVIDENCE = ("measured", "emulated", "projected", "quoted")
VENDORS = ("nvidia", "amd", "cpu")


@dataclass(frozen=True)
class Metric:
    """One number with its unit.

    `value` is the median where there are several samples; `p20`, `p80` the percentiles, `n` the number of samples;
    `definition` says how it was computed where the name alone does not.
    """

    value: float
    unit: str
    p20: float | None = None
    p80: float | None = None
    n: int = 1
    definition: str = ""


@dataclass(frozen=True)
class Record:
    """The outcome of one Point.

    `status` is "ok", "oom", "timeout", "unsupported" (each of them a result), "node_failure" or "error"; `reason` tells
    in one line why it is not "ok". `provenance` traces the record: commit, dirty, packages, device, driver, hosts,
    slurm_job_id, started, ended, command, tf32, deterministic.
    """

    point: Point
    comparison_id: str
    status: str
    vendor: str
    evidence: str = "measured"
    reason: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    provenance: Mapping[str, Any] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `record_from_dict` reads it back."""
        return {
            "schema": SCHEMA,
            "id": self.point.id,
            "comparison_id": self.comparison_id,
            "status": self.status,
            "reason": self.reason,
            "evidence": self.evidence,
            "vendor": self.vendor,
            "metrics": {name: asdict(metric) for name, metric in self.metrics.items()},
            "point": self.point.as_dict(),
            "provenance": dict(self.provenance),
        }


def record_from_dict(content: Mapping[str, Any], file: str | Path) -> Record:
    """Read back `Record.as_dict`.

    Raises:
        InputError: naming the file and the field that is missing, unknown, or of another schema version.
    """
    if not isinstance(content, Mapping):
        raise InputError(file, "", "is not a record (a JSON object)")
    if content.get("schema") != SCHEMA:
        raise InputError(file, "schema", f"is {content.get('schema')!r}; this version reads {SCHEMA}")
    for key in ("comparison_id", "status", "vendor", "evidence", "metrics", "point", "provenance"):
        if key not in content:
            raise InputError(file, key, "is missing")
    for key, allowed in {"status": STATUS_RANK, "evidence": EVIDENCE, "vendor": VENDORS}.items():
        if content[key] not in allowed:
            raise InputError(file, key, f"is {content[key]!r}; allowed: {', '.join(allowed)}")
    try:
        metrics = {name: Metric(**metric) for name, metric in content["metrics"].items()}
    except (AttributeError, TypeError) as error:
        raise InputError(file, "metrics", str(error)) from error
    return Record(
        point=point_from_dict(content["point"], file),
        comparison_id=content["comparison_id"],
        status=content["status"],
        vendor=content["vendor"],
        evidence=content["evidence"],
        reason=content.get("reason", ""),
        metrics=metrics,
        provenance=content["provenance"],
    )


def read_record(path: Path) -> Record:
    """One record; InputError where the file is unreadable, truncated, or not a record."""
    return record_from_dict(read_json(path), path)


def read_records(folder: Path) -> list[Record]:
    """All records below `folder` (results/<site>/records), sorted by file name."""
    return [read_record(path) for path in sorted(Path(folder).rglob("*.json"))]


def record_path(folder: Path, point: Point) -> Path:
    """Where the record of `point` lives: <folder>/<sweep>/<point id>.json, `folder` being results/<site>/records."""
    return Path(folder) / point.setting.sweep / f"{point.id}.json"


def write_record(record: Record, folder: Path) -> Path:
    """Write the record, atomically, unless a better one is there already; returns where it lies."""
    path = record_path(folder, record.point)
    if path.exists():
        try:
            present = read_record(path)
        except InputError:
            present = None
        if present is not None and STATUS_RANK[present.status] > STATUS_RANK[record.status]:
            return path
    write_json(path, record.as_dict())
    return path


def read_json(path: Path) -> Any:
    """The content of a JSON file; InputError where it is missing or truncated."""
    try:
        return json.loads(Path(path).read_text())
    except OSError as error:
        raise InputError(path, "", f"cannot be read: {error.strerror or error}") from error
    except ValueError as error:
        raise InputError(path, "", f"is not valid JSON: {error}") from error


def write_json(path: Path, content: Any) -> None:
    """Write JSON by renaming a finished temporary file, so that a reader never sees half of it."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w") as stream:
            json.dump(content, stream, indent=1)
            stream.write("\n")
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
