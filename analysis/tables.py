"""Tables from records: one tidy row a Point, with ratios against the baseline of the same comparison and job."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from tabulate import tabulate

from analysis.captions import DATA, caption, command, device_label, short_commit
from analysis.quantities import (
    BASELINES,
    FURTHER_TIMES,
    LEADING_TIME,
    Quantity,
    is_baseline,
    leading_memory,
    length,
    shown,
)
from experiments.record import Record

# Contenders in the order in which tables and figures show them; others follow by name, ours come last.
ORDER = (
    *("eager", "stock", "compile", "sdpa", "trifast", "cuequivariance", "openfold3", "protenix"),
    *("evopipe", "evoflash3d", "megafold"),
)
OURS = ("evopipe", "evoflash3d", "megafold")
EMPTY = "–"


def sweep_table(records: Iterable[Record]) -> pd.DataFrame:
    """One row a Point: what was measured, its outcome, every metric with p20, p80 and n, and ratios.

    Units are in the column names. `speedup_x` is the baseline's leading time over the contender's (above 1: faster),
    `memory_ratio_x` the baseline's peak memory over the contender's (above 1: smaller). Both compare only points of one
    comparison id that were measured in one job on one device; where there is no such baseline, they are empty and
    `ratio_note` says why. Points without a result keep their row, with status and reason.
    """
    records = sorted(records, key=_position)
    rows = [_row(record) for record in records]
    for row, record in zip(rows, records):
        row.update(_ratios(record, records))
    frame = pd.DataFrame(rows)
    tail = [name for name in _PROVENANCE if name in frame.columns]
    ratios = [name for name in frame.columns if name.endswith("_x")] + ["ratio_note"]
    head = [name for name in frame.columns if name not in {*tail, *ratios}]
    return frame[[*head, *ratios, *tail]] if rows else frame


def write_tables(records: Iterable[Record], sweep: str, folder: Path) -> list[Path]:
    """Write <sweep>.csv (every column, full precision) and <sweep>.md (readable, with a caption) into `folder`."""
    chosen = of_sweep(records, sweep)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    csv, markdown = folder / f"{sweep}.csv", folder / f"{sweep}.md"
    sweep_table(chosen).to_csv(csv, index=False, lineterminator="\n")
    markdown.write_text(_markdown(chosen, sweep))
    return [csv, markdown]


def print_table(records: Iterable[Record]) -> str:
    """The readable table of each sweep in `records`, for a terminal."""
    records = list(records)
    parts = []
    for sweep in dict.fromkeys(record.point.setting.sweep for record in records):
        chosen = of_sweep(records, sweep)
        heading = f"{sweep}: {caption(chosen)}"
        table = readable_table(chosen)
        aligned = ["right" if name in NUMERIC else "left" for name in table.columns]
        body = tabulate(table.values.tolist(), [*table.columns], "simple", colalign=aligned, disable_numparse=True)
        parts.append("\n".join([heading, "", body, *(f"  {note}" for note in notes(chosen))]))
    return "\n\n".join(parts) if parts else "no records"


def of_sweep(records: Iterable[Record], sweep: str) -> list[Record]:
    """The records of one sweep, in the order of its table, whatever order they come in."""
    return sorted((record for record in records if record.point.setting.sweep == sweep), key=_position)


CPU_KERNEL_NOTES = (
    "On a CPU EvoFlash-3D is its chunked reference in PyTorch: no Triton kernel is timed.",
    "On a CPU memory is the growth of the process's resident memory, too coarse at these sizes for a ratio.",
)
NUMERIC = {"N", "Speed-up", "Memory ratio"}


def readable_table(records: Sequence[Record]) -> pd.DataFrame:
    """The table people read: rounded, median with its p20-p80 range, only columns that say something."""
    frame = sweep_table(records)
    if frame.empty:
        return pd.DataFrame(columns=["N", "Contender"])
    quantities = _readable_quantities(records)
    columns: dict[str, list[str]] = {}
    for name, title in _VARIED.items():
        if name in frame.columns and frame[name].astype(str).nunique() > 1:
            columns[title] = [DATA.get(value, str(value)) or EMPTY for value in frame[name]]
    columns["N"] = [str(value) for value in frame["n_tokens" if "n_tokens" in frame.columns else "crop_size"]]
    columns["Contender"] = list(frame["contender"])
    if (frame["status"] != "ok").any():
        columns["Outcome"] = list(frame["status"])
    what = records[0].point.setting.what
    for found in quantities:
        columns[f"{found.label} ({'%' if found.unit == 'percent' else found.unit})"] = [
            _with_range(row, found) for _, row in frame.iterrows()
        ]
        ratio = {LEADING_TIME[what]: "speedup_x", **{name: _further(name) for name in FURTHER_TIMES[what]}}.get(
            found.name
        )
        if ratio in frame.columns:
            title = "Speed-up" if ratio == "speedup_x" else f"{found.label} speed-up"
            columns[title] = [_times(value) for value in frame[ratio]]
        if found.name == leading_memory({one.name for one in quantities}) and frame["memory_ratio_x"].notna().any():
            columns["Memory ratio"] = [_times(value) for value in frame["memory_ratio_x"]]
    if (frame["evidence"] != "measured").any():
        columns["Evidence"] = list(frame["evidence"])
    return pd.DataFrame(columns)


def notes(records: Sequence[Record]) -> list[str]:
    """What a reader must know beneath a table: what ratios are, why a point has no result and why one has no ratio."""
    frame = sweep_table(records)
    if frame.empty:
        return []
    baseline = BASELINES[records[0].point.setting.what]
    frame["length"] = frame["n_tokens" if "n_tokens" in frame.columns else "crop_size"]
    lines = [
        f"Median (p20-p80). Ratios: {baseline} / contender, both measured in the same job on the same device;"
        " above 1 is faster, or smaller."
    ]
    if any(coarse_memory(record) for record in records):
        lines += CPU_KERNEL_NOTES[: 2 if "peak_memory_MiB" in frame.columns else 1]
    failed = frame[frame["status"] != "ok"]
    for (status, reason), rows in failed.groupby(["status", "reason"], sort=False):
        where = ", ".join(dict.fromkeys(str(value) for value in rows["length"]))
        who = ", ".join(dict.fromkeys(rows["contender"]))
        lines.append(f"{who} at N = {where}: {status}{f' ({reason})' if reason else ''}.")
    for note in dict.fromkeys(note for note in frame["ratio_note"] if note):
        who = dict.fromkeys(frame.loc[frame["ratio_note"] == note, "contender"])
        lines.append(f"No ratio for {', '.join(who)}: {note}.")
    return lines


def _markdown(records: Sequence[Record], sweep: str) -> str:
    if not records:
        return f"# {sweep}\n\nNo records.\n"
    table = readable_table(records)
    escaped = [[str(cell).replace("|", "\\|") for cell in row] for row in table.values.tolist()]
    aligned = ["right" if name in NUMERIC else "left" for name in table.columns]
    body = tabulate(escaped, [*table.columns], "pipe", colalign=aligned, disable_numparse=True)
    lines = [f"# {sweep}", f"**{caption(records)}.** Reproduce with `{command(records)}`.", body]
    return "\n\n".join([*lines, *notes(records)]) + "\n"


_VARIED = {
    "device": "Device",
    "workload": "Workload",
    "model": "Model",
    "data": "Data",
    "variant": "Variant",
    "dtype": "Dtype",
    **{name: name.replace("_", " ") for name in ("atoms_per_token", "msa_depth", "templates", "batch_size", "rows")},
    **{name: name.replace("_", " ") for name in ("heads", "head_dim", "width", "examples", "sp", "dp", "seed", "mode")},
}
_PROVENANCE = ("vendor", "device", "hosts", "slurm_job_id", "commit", "dirty", "started", "comparison_id", "point_id")


def _position(record: Record) -> tuple[Any, ...]:
    setting, contender = record.point.setting, record.point.contender
    rank = ORDER.index(contender.name) if contender.name in ORDER else len(ORDER)
    switches = sum(value for _, value in contender.plan)
    order = (not is_baseline(record), contender.name in OURS, switches, rank, contender.name)
    place = (setting.sweep, setting.workload, setting.model, setting.variant, setting.data, setting.dtype, setting.mode)
    return (*place, setting.sp * setting.dp, length(record), str(setting.shape), setting.seed, session(record), *order)


def session(record: Record) -> tuple[str, ...]:
    """What two records must share for a ratio: comparison, device, job, start, commit and evidence."""
    keys = ("device", "hosts", "slurm_job_id", "started", "commit")
    shared = [json.dumps(record.provenance.get(key), sort_keys=True, default=str) for key in keys]
    return (record.comparison_id, record.vendor, record.evidence, *shared)


def _row(record: Record) -> dict[str, Any]:
    setting, contender = record.point.setting, record.point.contender
    row: dict[str, Any] = {
        "sweep": setting.sweep, "what": setting.what, "workload": setting.workload, "model": setting.model,
        "data": setting.data, "variant": setting.variant, "dtype": setting.dtype, **dict(setting.shape),
        "sp": setting.sp, "dp": setting.dp, "seed": setting.seed, "mode": setting.mode,
        "contender": contender.name, "provider": contender.provider,
        "plan": " ".join(f"{'+' if on else '-'}{name}" for name, on in contender.plan),
        "status": record.status, "reason": record.reason, "evidence": record.evidence,
    }  # fmt: skip
    for found, metric in shown(record).items():
        row[found.column] = metric.value
        if metric.p20 is not None and metric.p80 is not None:
            row |= {found.bound("p20"): metric.p20, found.bound("p80"): metric.p80, f"{found.name}_n": metric.n}
    provenance = record.provenance
    hosts = provenance.get("hosts", "")
    return row | {
        "vendor": record.vendor, "device": device_label(record),
        "hosts": " ".join(map(str, hosts)) if isinstance(hosts, list) else hosts,
        "slurm_job_id": provenance.get("slurm_job_id") or "", "commit": short_commit(record),
        "dirty": provenance.get("dirty", ""), "started": provenance.get("started", ""),
        "comparison_id": record.comparison_id, "point_id": record.point.id,
    }  # fmt: skip


def _ratios(record: Record, records: Sequence[Record]) -> dict[str, Any]:
    what = record.point.setting.what
    found: dict[str, Any] = {"speedup_x": None, "memory_ratio_x": None, "ratio_note": ""}
    found |= {_further(name): None for name in FURTHER_TIMES[what]}
    if record.status != "ok":
        return found
    rivals = [other for other in records if other.comparison_id == record.comparison_id and is_baseline(other)]
    same = [other for other in rivals if session(other) == session(record)]
    if not same or same[0].status != "ok":
        return found | {"ratio_note": _why_no_ratio(rivals, same, BASELINES[what])}
    own, base = _values(record), _values(same[0])
    times = {"speedup_x": LEADING_TIME[what], **{_further(name): name for name in FURTHER_TIMES[what]}}
    memory = None if coarse_memory(record) else leading_memory(set(own) & set(base))
    for column, name in {**times, "memory_ratio_x": memory}.items():
        if own.get(name, 0) > 0 and base.get(name, 0) > 0:
            found[column] = base[name] / own[name]
    return found


def coarse_memory(record: Record) -> bool:
    """Whether memory is too coarse to divide or draw: a kernel's on a CPU, where only the process is seen."""
    return record.vendor == "cpu" and record.point.setting.what == "kernel"


def _why_no_ratio(rivals: Sequence[Record], same: Sequence[Record], baseline: str) -> str:
    if same:
        outcome = {"oom": "ran out of memory", "timeout": "timed out"}.get(same[0].status, f"is {same[0].status}")
        return f"the baseline {baseline} {outcome} at this shape"
    if rivals:
        return f"the baseline {baseline} of this comparison was measured in another run or on another device"
    return f"this comparison has no baseline {baseline}"


def _values(record: Record) -> dict[str, float]:
    return {found.name: metric.value for found, metric in shown(record).items()}


def _further(name: str) -> str:
    return f"{name.removesuffix('_time')}_speedup_x"


def _readable_quantities(records: Sequence[Record]) -> list[Quantity]:
    seen: dict[str, Quantity] = {}
    for record in records:
        seen |= {found.name: found for found in shown(record)}
    what = records[0].point.setting.what
    memory = leading_memory(set(seen))
    wanted = [*FURTHER_TIMES[what], LEADING_TIME[what], memory, "mfu", "hfu", "loader_wait"]
    return [seen[name] for name in wanted if name in seen]


def _with_range(row: pd.Series, found: Quantity) -> str:
    value = row.get(found.column)
    if value is None or pd.isna(value):
        return EMPTY
    low, high = row.get(found.bound("p20")), row.get(found.bound("p80"))
    if low is None or pd.isna(low) or found.kind != "time":
        return rounded(value)
    return f"{rounded(value)} ({rounded(low)}-{rounded(high)})"


def rounded(value: float) -> str:
    """Three significant digits, without an exponent."""
    if value == 0 or value != value:
        return "0" if value == 0 else EMPTY
    digits = 0
    while digits < 6 and abs(value) * 10**digits < 99.95:
        digits += 1
    return f"{value:,.{digits}f}"


def _times(value: float | None) -> str:
    return EMPTY if value is None or pd.isna(value) else f"{value:.2f}×"


def by_device(records: Iterable[Record]) -> dict[str, list[Record]]:
    """Records grouped by device label, in order of first appearance: figures never mix devices.

    A contender that could not run may not know its device: it goes with the others of its comparison.
    """
    records = list(records)
    known = {record.comparison_id: device_label(record) for record in records if device_label(record)}
    groups: dict[str, list[Record]] = defaultdict(list)
    for record in records:
        groups[device_label(record) or known.get(record.comparison_id, "unknown device")].append(record)
    return dict(groups)
