"""Figures of each sweep from its records, PNG and SVG: one a quantity and device, the conditions in the subtitle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from analysis import draw
from analysis.captions import DATA, conditions, short_commit, slug
from analysis.quantities import LEADING_TIME, Quantity, is_baseline, leading_memory, length, shown
from analysis.style import canvas, colour, display, save, styled
from analysis.tables import CPU_KERNEL_NOTES, by_device, coarse_memory, of_sweep, rounded, sweep_table
from experiments.record import Record

COLUMNS = 3
# With so many contenders the bars of three lengths are too thin for their numbers.
MANY = 3
# Inches: of lines by length, and of bars.
PANEL, SHORT = (4.2, 2.7), (4.2, 2.1)


def write_figures(records: Iterable[Record], sweep: str, folder: Path) -> list[Path]:
    """Draw what the records of `sweep` hold into `folder`: <sweep>_<quantity>[_<device>].png and .svg.

    Devices are never mixed in one figure. Without a result to draw nothing is written and the list is empty
    (`why_no_figure` tells).
    """
    groups = by_device(of_sweep(records, sweep))
    written: list[Path] = []
    with styled():
        for device, group in groups.items():
            if why_no_figure(group):
                continue
            suffix = f"_{slug(device)}" if len(groups) > 1 else ""
            for name, figure in _figures(group).items():
                written += save(figure, Path(folder) / f"{sweep}_{name}{suffix}")
    return written


def why_no_figure(records: Sequence[Record]) -> str:
    """Why there is nothing to draw, in one line; "" where there is something."""
    if not records:
        return "no records"
    if any(record.status == "ok" and record.metrics for record in records):
        return ""
    outcomes = dict.fromkeys(record.status for record in records)
    return f"no point has a result (outcomes: {', '.join(outcomes)})"


def _figures(records: Sequence[Record]) -> dict[str, Figure]:
    what, sweep = records[0].point.setting.what, records[0].point.setting.sweep
    if what == "data_pipeline":
        return _data_pipeline(records)
    if sweep == "ablation":
        return _ablation(records)
    return _kernels(records) if what == "kernel" else _iteration(records)


def _iteration(records: Sequence[Record]) -> dict[str, Figure]:
    found = _quantities(records)
    memory = found.get(leading_memory(set(found)) or "")
    titles = {"time": "Time of one training step", "memory": "Peak memory of one training step"}
    figures = {}
    for name, wanted in {"time": found.get("iteration_time"), "memory": memory, "mfu": found.get("mfu")}.items():
        if wanted is None:
            continue
        title = titles.get(name, "Model FLOPs utilisation (MFU)")
        if name == "memory" and records[0].vendor == "cpu":
            title += " (process, on the host)"
        figures[name] = _by_length(records, wanted, title)
    speedup = _speedup(records, "Training step", {"speedup_x": ""})
    return figures | ({"speedup": speedup} if speedup else {})


def _by_length(records: Sequence[Record], wanted: Quantity, title: str) -> Figure:
    parts = _facets(records)
    contenders = _drawn(records, wanted)
    shape = _grid(len(parts))
    lines = any(len({length(record) for record in part}) >= draw.LINE_LENGTHS for part in parts.values())
    figure, axes = canvas(
        *shape, title=title, subtitle=conditions(records), footnotes=_footnotes(records, lines),
        entries=draw.handles(contenders, lines=lines), headed=any(parts), labelled=lines,
        panel=PANEL if lines else SHORT,
    )  # fmt: skip
    for panel, (name, part) in zip(axes, parts.items()):
        frame = _frame(part)
        frame = frame[frame["contender"].isin(contenders)]
        draw.by_length(panel, frame, wanted, lines=lines, log=wanted.kind == "time")
        panel.set_title(name)
        panel.set_ylabel(draw.unit_label(wanted))
    _hide(axes[len(parts) :])
    return figure


def _speedup(records: Sequence[Record], subject: str, columns: Mapping[str, str]) -> Figure | None:
    """Bars of the ratio columns (column -> panel title) by facet; None where no contender has a ratio."""
    baselines = {record.point.contender.name for record in records if is_baseline(record)}
    drawn: dict[str, tuple[pd.DataFrame, str]] = {}
    for name, part in _facets(records).items():
        frame = _frame(part)
        for column, title in columns.items():
            rows = frame[~frame["contender"].isin(baselines) & frame[column].notna()]
            if not rows.empty:
                drawn[", ".join(filter(None, (title, name)))] = rows, column
    if not drawn:
        return None
    contenders = list(dict.fromkeys(name for frame, _ in drawn.values() for name in frame["contender"]))
    baseline = display(next(iter(baselines)))
    lines = len(contenders) >= MANY and any(
        frame["length"].nunique() >= draw.LINE_LENGTHS for frame, _ in drawn.values()
    )
    shape = _grid(len(drawn)) if len(columns) == 1 else (-(-len(drawn) // len(columns)), min(len(drawn), len(columns)))
    figure, axes = canvas(
        *shape, title=f"{subject}: speed-up over {baseline}", subtitle=conditions(records), panel=SHORT,
        entries=draw.handles(contenders, lines=lines), headed=any(drawn), labelled=lines,
        footnotes=[f"{baseline} = 1, measured in the same run on the same device.", *_footnotes(records, None)],
    )  # fmt: skip
    for panel, (name, (frame, column)) in zip(axes, drawn.items()):
        draw.speedups(panel, frame, column, lines=lines)
        panel.set_title(name)
        panel.set_ylabel("speed-up (×)")
    _hide(axes[len(drawn) :])
    return figure


def _ablation(records: Sequence[Record]) -> dict[str, Figure]:
    parts = {
        f"{name}{', ' if name else ''}N = {size}": [record for record in part if length(record) == size]
        for name, part in _facets(records).items()
        for size in sorted({length(record) for record in part})
    }
    frames = {name: _frame(part) for name, part in parts.items()}
    frames = {name: frame[frame["speedup_x"].notna()] for name, frame in frames.items()}
    frames = {name: frame for name, frame in frames.items() if len(frame) > 1}
    if not frames:
        return {}
    tallest = max(map(len, frames.values()))
    memory = any(frame["memory_ratio_x"].notna().any() for frame in frames.values())
    figure, axes = canvas(
        len(frames), 1 + memory, title="What each switch brings", subtitle=conditions(records), left=2.3,
        panel=(3.6, 0.4 * tallest + 0.15), gap=(0.3, 0.95), labelled=False,
        footnotes=["Ratios to the stock model, measured in the same run on one device.", *_footnotes(records, None)],
    )  # fmt: skip
    for row, (name, frame) in enumerate(frames.items()):
        own = axes[row * (1 + memory) : (row + 1) * (1 + memory)]
        for panel, column, title in zip(
            own, ("speedup_x", "memory_ratio_x"), ("speed-up", "memory, stock / contender")
        ):
            _ratio_bars(panel, frame, column)
            panel.set_title(f"{name}: {title}" if panel is own[0] else title.capitalize())
        for panel in own[1:]:
            panel.set_yticklabels([])
    return {"speedup": figure}


def _ratio_bars(panel: Axes, frame: pd.DataFrame, column: str) -> None:
    names = list(frame["contender"])
    values = [0.0 if pd.isna(value) else float(value) for value in frame[column]]
    told = [f"{value:.2f}×" if value else "–" for value in values]
    labels = [display(name) for name in names]
    draw.horizontal(panel, labels, values, [colour(name) for name in names], told, reference=1)


def _kernels(records: Sequence[Record]) -> dict[str, Figure]:
    found = _quantities(records)
    times = [found[name] for name in ("forward_time", "forward_backward_time") if name in found]
    figures = {}
    if times:
        figures["time"] = _kernel_panels(records, times, "Triangle attention: time")
    memory = found.get(leading_memory(set(found)) or "")
    if memory is not None and not coarse_memory(records[0]):
        figures["memory"] = _kernel_panels(records, [memory], "Triangle attention: peak memory")
    speedup = _speedup(
        records, "Triangle attention", {"forward_speedup_x": "Forward", "speedup_x": "Forward + backward"}
    )
    return figures | ({"speedup": speedup} if speedup else {})


def _kernel_panels(records: Sequence[Record], wanted: Sequence[Quantity], title: str) -> Figure:
    parts = _facets(records)
    contenders = list(dict.fromkeys(name for one in wanted for name in _drawn(records, one)))
    lines = any(len({length(record) for record in part}) >= draw.LINE_LENGTHS for part in parts.values())
    figure, axes = canvas(
        len(parts), len(wanted), title=title, subtitle=conditions(records), footnotes=_footnotes(records, lines),
        entries=draw.handles(contenders, lines=lines), labelled=lines, panel=PANEL if lines else SHORT,
        headed=len(wanted) > 1 or any(parts),
    )  # fmt: skip
    pairs = [(name, part, one) for name, part in parts.items() for one in wanted]
    for panel, (name, part, one) in zip(axes, pairs):
        frame = _frame(part)
        draw.by_length(panel, frame[frame["contender"].isin(contenders)], one, lines=lines, log=True)
        panel.set_title(", ".join(filter(None, [one.label if len(wanted) > 1 else "", name])))
        panel.set_ylabel(draw.unit_label(one))
    return figure


def _data_pipeline(records: Sequence[Record]) -> dict[str, Figure]:
    wanted = _quantities(records).get(LEADING_TIME["data_pipeline"])
    if wanted is None:
        return {}
    parts = {
        f"{name}{', ' if name else ''}crop of {size} tokens": [record for record in part if length(record) == size]
        for name, part in _facets(records).items()
        for size in sorted({length(record) for record in part})
    }
    frames = {name: _frame(part) for name, part in parts.items()}
    frames = {name: frame[(frame["status"] == "ok") & frame[wanted.column].notna()] for name, frame in frames.items()}
    frames = {name: frame for name, frame in frames.items() if not frame.empty}
    tallest = max(map(len, frames.values()))
    figure, axes = canvas(
        len(frames), 1, title="Time to read one training example", subtitle=conditions(records), left=1.5,
        panel=(4.9, 0.5 * tallest + 0.2), gap=(0.3, 0.95), footnotes=_footnotes(records, False),
    )  # fmt: skip
    for panel, (name, frame) in zip(axes, frames.items()):
        names, values = list(frame["contender"]), [float(value) for value in frame[wanted.column]]
        told = [
            f"{rounded(value)} s" + ("" if pd.isna(ratio) or who == "stock" else f"   {ratio:.3g}× the speed of stock")
            for who, value, ratio in zip(names, values, frame["speedup_x"])
        ]
        labels, hues = [display(who) for who in names], [colour(who) for who in names]
        ranges = _ranges(frame, wanted)
        draw.horizontal(panel, labels, values, hues, told, log=True, ranges=ranges)
        panel.set_title(name[:1].upper() + name[1:])
        panel.set_xlabel("seconds an example (log scale)")
    return {"time": figure}


def _ranges(frame: pd.DataFrame, wanted: Quantity) -> list[tuple[float, float] | None]:
    if wanted.bound("p20") not in frame.columns:
        return [None] * len(frame)
    pairs = zip(frame[wanted.bound("p20")], frame[wanted.bound("p80")])
    return [None if pd.isna(low) or pd.isna(high) else (float(low), float(high)) for low, high in pairs]


def _facets(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records by what may not share a panel, named by what differs between the panels."""
    keys: dict[str, Callable[[Record], str]] = {
        "data": lambda record: DATA[record.point.setting.data].capitalize(),
        "workload": lambda record: record.point.setting.workload,
        "model": lambda record: record.point.setting.model and f"{record.point.setting.model} model",
        "variant": lambda record: record.point.setting.variant,
        "dtype": lambda record: record.point.setting.dtype,
        "ranks": lambda record: f"SP {record.point.setting.sp} DP {record.point.setting.dp}",
        "evidence": lambda record: record.evidence,
        "shape": lambda record: ", ".join(
            f"{key.replace('_', ' ')} {value}" for key, value in record.point.setting.shape if key != _axis(record)
        ),
    }
    # A contender that failed has no evidence of its own: it goes with those it was measured beside.
    varied = [key for key, get in keys.items() if len({get(record) for record in records}) > 1]
    parts: dict[str, list[Record]] = {}
    for record in records:
        parts.setdefault(", ".join(filter(None, (keys[key](record) for key in varied))), []).append(record)
    return {name: part for name, part in parts.items() if any(record.status == "ok" for record in part)}


def _axis(record: Record) -> str:
    return "crop_size" if record.point.setting.what == "data_pipeline" else "n_tokens"


def _frame(records: Sequence[Record]) -> pd.DataFrame:
    frame = sweep_table(records)
    return frame.assign(length=frame["n_tokens" if "n_tokens" in frame.columns else "crop_size"])


def _quantities(records: Sequence[Record]) -> dict[str, Quantity]:
    return {found.name: found for record in records for found in shown(record)}


def _drawn(records: Sequence[Record], wanted: Quantity) -> list[str]:
    """Contenders with a value or a failure to mark, in the order of the tables."""
    frame = _frame(records)
    keep = (frame["status"] == "ok") & frame[wanted.column].notna() | frame["status"].isin(draw.FAILURES)
    return list(dict.fromkeys(frame.loc[keep, "contender"]))


def _footnotes(records: Sequence[Record], lines: bool | None) -> list[str]:
    notes = []
    if lines is not None:
        notes.append(f"Median; {'bands' if lines else 'whiskers'} are the 20th to 80th percentile, where there is one.")
    if any(coarse_memory(record) and record.point.contender.name == "evoflash3d" for record in records):
        notes.append(CPU_KERNEL_NOTES[0])
    absent: dict[str, list[str]] = {}
    for record in records:
        if record.status == "unsupported":
            absent.setdefault(record.reason or "unsupported", []).append(display(record.point.contender.name))
    notes += [f"Not drawn: {', '.join(dict.fromkeys(names))} ({reason})." for reason, names in absent.items()]
    commits = ", ".join(dict.fromkeys(filter(None, map(short_commit, records))))
    return [*notes, f"Commit {commits}."] if commits else notes


def _grid(panels: int) -> tuple[int, int]:
    columns = min(COLUMNS, panels)
    return -(-panels // columns), columns


def _hide(axes: Sequence[Axes]) -> None:
    for panel in axes:
        panel.set_visible(False)
