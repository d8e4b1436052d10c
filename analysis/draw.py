"""Panels of figures: a quantity by length as lines or, for one or two lengths, as bars; and horizontal bars."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd
import seaborn
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from analysis.quantities import Quantity
from analysis.style import GRID, INK, MUTED, colour, display, marker
from analysis.tables import rounded

# With fewer lengths than this a line says nothing: bars.
LINE_LENGTHS = 3
FAILURES = {"oom": "OOM", "timeout": "time-out", "node_failure": "node failed", "error": "error"}
UNITS = {"percent": "%"}
# Behind numbers, so that grid lines do not cross them.
HALO = {"facecolor": "white", "alpha": 0.85, "linewidth": 0, "pad": 0.6}


def by_length(axes: Axes, frame: pd.DataFrame, found: Quantity, *, lines: bool, log: bool = False) -> None:
    """Draw `found` by `length` for each contender of `frame` (columns: length, contender, status, and its values).

    `lines` with a p20-p80 band (for LINE_LENGTHS or more), or bars with p20-p80 whiskers. A contender that ran out of
    memory or timed out at a length is marked there.
    """
    lengths = sorted(frame["length"].unique())
    if lines:
        _lines(axes, frame, found, lengths, log)
    else:
        _bars(axes, frame, found, lengths)
    seaborn.despine(ax=axes)


def speedups(axes: Axes, frame: pd.DataFrame, column: str, *, lines: bool) -> None:
    """A ratio by length, the baseline being the line at 1: bars, or lines where bars would be many."""
    lengths = sorted(frame["length"].unique())
    ratio = Quantity(column.removesuffix("_x"), "ratio", "x")
    if lines:
        _lines(axes, frame, ratio, lengths, log=False)
    else:
        _bars(axes, frame, ratio, lengths, times=True)
    axes.axhline(1, color=INK, linewidth=1, zorder=2.5)
    seaborn.despine(ax=axes)


def horizontal(
    axes: Axes, labels: Sequence[str], values: Sequence[float], colours: Sequence[str], notes: Sequence[str], *,
    log: bool = False, reference: float | None = None, ranges: Sequence[tuple[float, float] | None] = (),
) -> None:  # fmt: skip
    """Horizontal bars, the first on top, each with its note at the end; `reference` draws a vertical line."""
    places = range(len(values))
    left = min(values) / 4 if log else 0
    axes.barh(places, [value - left for value in values], left=left, color=colours, height=0.62, zorder=2)
    ends = list(values)
    for place, bounds in zip(places, ranges):
        if bounds is not None:
            axes.plot(bounds, [place, place], color=INK, linewidth=1.1, zorder=4, solid_capstyle="butt")
            ends[place] = max(values[place], bounds[1])
    for place, end, note in zip(places, ends, notes):
        axes.annotate(
            note, (end, place), (6, 0), textcoords="offset points", va="center", fontsize=8.5, color=INK, bbox=HALO
        )
    axes.set_yticks(list(places), labels)
    axes.tick_params(axis="y", labelcolor=INK, labelsize=9)
    axes.set_ylim(len(values) - 0.5, -0.5)
    if log:
        axes.set_xscale("log")
        axes.set_xlim(left, max(ends) * (max(ends) / left) ** 0.25)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    else:
        axes.set_xlim(0, max(ends) * 1.3)
        axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.grid(axis="y", visible=False)
    if reference is not None:
        axes.axvline(reference, color=INK, linewidth=1, zorder=3)
    seaborn.despine(ax=axes, left=True)


def handles(contenders: Sequence[str], *, lines: bool) -> tuple[list, list[str]]:
    """Legend entries of the contenders, as `by_length` draws them."""
    drawn = [
        Line2D([], [], color=colour(name), marker=marker(name), markersize=5, linewidth=1.8)
        if lines
        else Patch(facecolor=colour(name))
        for name in contenders
    ]
    return drawn, [display(name) for name in contenders]


def _lines(axes: Axes, frame: pd.DataFrame, found: Quantity, lengths: Sequence[int], log: bool) -> None:
    failed: dict[int, int] = {}
    for name in dict.fromkeys(frame["contender"]):
        rows = frame[frame["contender"] == name].sort_values("length")
        good = rows[(rows["status"] == "ok") & rows[found.column].notna()]
        good = good[good[found.column] > 0] if log else good
        if found.bound("p20") in good.columns and good[found.bound("p20")].notna().any():
            band = (good[found.bound("p20")].astype(float), good[found.bound("p80")].astype(float))
            axes.fill_between(good["length"].astype(float), *band, color=colour(name), alpha=0.18, linewidth=0)
        axes.plot(
            good["length"], good[found.column], color=colour(name), marker=marker(name), markersize=5, linewidth=1.8,
            markeredgecolor="white", markeredgewidth=0.7, zorder=4 if name in ("megafold", "evoflash3d") else 3,
        )  # fmt: skip
        for length in rows.loc[rows["status"].isin(FAILURES), "length"]:
            failed[length] = failed.get(length, 0) + 1
            text = FAILURES[rows.loc[rows["length"] == length, "status"].iloc[0]]
            axes.annotate(
                f"× {text}", (length, 1), (0, -10 * failed[length] + 6), xycoords=("data", "axes fraction"),
                textcoords="offset points", ha="center", va="top", fontsize=8, fontweight="bold", color=colour(name),
            )  # fmt: skip
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(FixedLocator(lengths))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.set_xlim(lengths[0] / 1.12, lengths[-1] * 1.12)
    if log:
        axes.set_yscale("log")
        _plain_log(axes)
    else:
        axes.set_ylim(bottom=0)
    low, high = axes.get_ylim()
    if failed:
        rise = 0.06 + 0.05 * max(failed.values())
        axes.set_ylim(low, high * (high / low) ** rise if log else high * (1 + rise))
    axes.set_xlabel("tokens N")


def _plain_log(axes: Axes) -> None:
    """Plain numbers on a log axis; 2 and 5 are labelled too where it spans less than about two decades."""
    low, high = axes.get_ylim()
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    labelled = ("2", "5") if high / low < 60 else ()
    axes.yaxis.set_minor_formatter(FuncFormatter(lambda value, _: f"{value:g}" if f"{value:e}"[0] in labelled else ""))
    axes.tick_params(axis="y", which="minor", labelsize=8, labelcolor=MUTED)
    axes.grid(axis="y", which="minor", color=GRID, linewidth=0.4)


def _bars(axes: Axes, frame: pd.DataFrame, found: Quantity, lengths: Sequence[int], *, times: bool = False) -> None:
    contenders = list(dict.fromkeys(frame["contender"]))
    width = min(0.8 / len(contenders), 0.36)
    top = frame.loc[frame["status"] == "ok", found.column].max()
    high = frame[found.bound("p80")].max() if found.bound("p80") in frame.columns else top
    top = max(value for value in (top, high, 1 if times else None) if not pd.isna(value))
    for _, row in frame.iterrows():
        offset = (contenders.index(row["contender"]) - (len(contenders) - 1) / 2) * width
        place, hue = lengths.index(row["length"]) + offset, colour(row["contender"])
        value = row[found.column]
        if row["status"] != "ok" or pd.isna(value):
            text = FAILURES.get(row["status"])
            if text:
                axes.bar(
                    place,
                    top * 0.04,
                    width * 0.86,
                    facecolor="none",
                    edgecolor=hue,
                    hatch="////",
                    linewidth=0.8,
                    zorder=2,
                )
                _above(axes, place, top * 0.04, text, hue)
            continue
        axes.bar(place, value, width * 0.86, color=hue, zorder=2)
        low, high = row.get(found.bound("p20")), row.get(found.bound("p80"))
        if low is not None and not pd.isna(low):
            axes.plot([place, place], [low, high], color=INK, linewidth=1.1, zorder=4, solid_capstyle="butt")
            value = max(value, high)
        number = f"{row[found.column]:.2f}×" if times else rounded(row[found.column])
        _above(axes, place, value, number, INK)
    axes.set_xticks(range(len(lengths)), [f"N = {length}" for length in lengths])
    axes.tick_params(axis="x", labelcolor=INK, labelsize=9)
    axes.set_xlim(-0.62, len(lengths) - 0.38)
    axes.set_ylim(0, top * 1.16)
    axes.grid(axis="x", visible=False)


def _above(axes: Axes, place: float, value: float, text: str, hue: str) -> None:
    axes.annotate(
        text, (place, value), (0, 3), textcoords="offset points", ha="center", fontsize=8, color=hue, bbox=HALO
    )


def unit_label(found: Quantity) -> str:
    """Axis label: the quantity and its unit."""
    return f"{found.label} ({UNITS.get(found.unit, found.unit)})"
