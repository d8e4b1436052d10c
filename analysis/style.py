"""How figures look: one fixed, colour-blind-safe colour and marker a contender, type, and byte-for-byte equal files."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import matplotlib
import seaborn
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID = "#1f2430", "#5d6675", "#e3e6ea"
# Okabe and Ito's palette, its yellow darkened to be legible on white. Baselines are grey.
COLOURS = {
    "eager": "#7a828e",
    "stock": "#7a828e",
    "megafold": "#0072b2",
    "evoflash3d": "#0072b2",
    "evopipe": "#0072b2",
    "compile": "#e69f00",
    "sdpa": "#009e73",
    "trifast": "#cc79a7",
    "cuequivariance": "#d55e00",
    "openfold3": "#56b4e9",
    "protenix": "#a8961f",
}
# Contenders of the ablation: one switch alone, all but one.
ABLATIONS = {"only": "#56b4e9", "without": "#e69f00"}
OTHERS = ("#6a3d9a", "#b15928", "#1b7837", "#c51b7d", "#35978f", "#8c510a")
MARKERS = {"eager": "s", "stock": "s", "compile": "^", "sdpa": "D", "trifast": "v", "cuequivariance": "P"}
MARKERS |= {"openfold3": "X", "protenix": "<"}
NAMES = {
    "eager": "stock (eager PyTorch)",
    "compile": "torch.compile",
    "megafold": "MegaFold",
    "evoflash3d": "EvoFlash-3D",
    "evopipe": "EvoPipe cache",
    "stock": "stock pipeline",
    "sdpa": "PyTorch SDPA",
    "cuequivariance": "cuEquivariance",
    "openfold3": "OpenFold3 Triton",
    "protenix": "Protenix Triton",
}
RC = {
    "font.family": "DejaVu Sans",
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.titlepad": 8,
    "axes.labelcolor": MUTED,
    "axes.edgecolor": "#b8bec8",
    "axes.linewidth": 0.8,
    "axes.axisbelow": True,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    "axes.titlecolor": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "xtick.labelsize": 8.5,
    "ytick.labelsize": 8.5,
    "hatch.linewidth": 0.8,
    "svg.hashsalt": "megafold",
    "svg.fonttype": "path",
    "figure.dpi": 100,
}


def colour(contender: str) -> str:
    """The contender's colour, the same in every figure."""
    kind = contender.partition("-")[0]
    return COLOURS.get(contender) or ABLATIONS.get(kind) or OTHERS[zlib.crc32(contender.encode()) % len(OTHERS)]


def marker(contender: str) -> str:
    """The contender's marker, so that lines can be told apart without colour."""
    return MARKERS.get(contender, "o")


def display(contender: str) -> str:
    """The contender's name in figures."""
    kind, _, switch = contender.partition("-")
    return f"{kind} {switch.replace('_', ' ')}" if kind in ABLATIONS else NAMES.get(contender, contender)


@contextmanager
def styled() -> Iterator[None]:
    """The project's look, whatever the user's own matplotlib settings are."""
    with matplotlib.rc_context():
        matplotlib.rcdefaults()
        matplotlib.rcParams.update({**seaborn.axes_style("whitegrid"), **RC})
        yield


def canvas(
    rows: int,
    columns: int,
    *,
    title: str,
    subtitle: str,
    panel: tuple[float, float] = (4.2, 2.7),
    entries: tuple[Sequence, Sequence[str]] | None = None,
    headed: bool = True,
    labelled: bool = True,
    left: float = 0.78,
    gap: tuple[float, float] = (0.72, 0.85),
    footnotes: Sequence[str] = (),
    minimum_width: float = 6.6,
) -> tuple[Figure, list[Axes]]:
    """A figure of `rows` x `columns` panels, sizes in inches; title, subtitle and footnotes are wrapped to its width.

    `entries` are the handles and labels of one legend for all panels, `headed` and `labelled` leave room
    for panel titles and x-axis labels.
    """
    width = max(minimum_width, left + columns * panel[0] + (columns - 1) * gap[0] + 0.25)
    subtitle, small = _wrapped(subtitle, width, 8.5), [line for line in _lines(" ".join(footnotes), width, 8) if line]
    rank = _legend_columns(entries[1], width) if entries else 1
    legend_height = 0.12 + 0.22 * -(-len(entries[1]) // rank) if entries else 0.06
    top = 0.52 + 0.17 * (subtitle.count("\n") + 1) + legend_height + (0.3 if headed else 0.08)
    bottom = (0.56 if labelled else 0.36) + 0.15 * len(small) + (0.08 if small else 0)
    height = top + rows * panel[1] + (rows - 1) * gap[1] + bottom
    figure = Figure(figsize=(width, height))
    grid = figure.add_gridspec(
        rows, columns,
        left=left / width, right=1 - 0.25 / width, top=1 - top / height, bottom=bottom / height,
        wspace=gap[0] / ((width - left - 0.25 - (columns - 1) * gap[0]) / columns), hspace=gap[1] / panel[1],
    )  # fmt: skip
    axes = [figure.add_subplot(grid[row, column]) for row in range(rows) for column in range(columns)]
    figure.text(
        0.14 / width,
        1 - 0.14 / height,
        title,
        fontsize=min(13, 100 * (width - 0.3) / len(title)),
        fontweight="bold",
        va="top",
        color=INK,
    )
    figure.text(0.14 / width, 1 - 0.45 / height, subtitle, fontsize=8.5, va="top", color=MUTED, linespacing=1.35)
    if small:
        figure.text(0.14 / width, 0.1 / height, "\n".join(small), fontsize=8, va="bottom", color=MUTED, linespacing=1.4)
    if entries:
        under = 0.5 + 0.17 * (subtitle.count("\n") + 1)
        figure.legend(
            *entries, loc="upper left", bbox_to_anchor=(0.14 / width, 1 - under / height), ncols=rank,
            fontsize=9, frameon=False, borderaxespad=0, borderpad=0.1, handlelength=1.4, columnspacing=1.5,
            handletextpad=0.5,
        )  # fmt: skip
    return figure, axes


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """As many columns as fit side by side: an entry is its text and about 0.55 inches."""
    widest = 0.55 + max(map(len, labels)) * 0.58 * 9 / 72
    whole = sum(0.55 + len(label) * 0.58 * 9 / 72 for label in labels)
    return len(labels) if whole <= width - 0.3 else max(1, int((width - 0.3) / widest))


def save(figure: Figure, stem: Path) -> list[Path]:
    """Write STEM.png (200 dpi) and STEM.svg; equal input gives equal bytes (no date, fixed ids)."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    png, svg = stem.with_name(f"{stem.name}.png"), stem.with_name(f"{stem.name}.svg")
    figure.savefig(png, dpi=200, metadata={"Software": None})
    figure.savefig(svg, metadata={"Date": None, "Creator": None})
    return [png, svg]


def _wrapped(text: str, width: float, size: float) -> str:
    return "\n".join(_lines(text, width, size))


def _lines(text: str, width: float, size: float) -> list[str]:
    """Break at spaces; a character of DejaVu Sans is about 0.58 em wide."""
    limit, lines = int((width - 0.3) * 72 / (0.58 * size)), [""]
    for word in text.split(" "):
        if lines[-1] and len(lines[-1]) + 1 + len(word) > limit:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return lines
