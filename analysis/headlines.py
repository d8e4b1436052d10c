"""The few numbers at the top of the report, chosen by rule (the largest shape, never the best value), each labelled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import pandas as pd

from analysis.captions import DATA, device_label
from analysis.quantities import length
from analysis.tables import of_sweep, sweep_table
from experiments.record import Record

SUBJECTS = {
    "iteration": ("megafold", "Training step", "MegaFold over stock alphafold3-pytorch"),
    "kernels": ("evoflash3d", "Triangle attention, forward + backward", "EvoFlash-3D over eager PyTorch"),
    "data_pipeline": ("evopipe", "Reading one training example", "EvoPipe cache over the stock pipeline"),
}
NOT_COMPARABLE = "CPU demo, not comparable with the paper"


@dataclass(frozen=True)
class Headline:
    """One card: `value` ("1.69×"), `verdict` ("faster", "slower", "less memory", ...), and under what conditions."""

    title: str
    value: str
    verdict: str
    subject: str
    conditions: str
    label: str

    @property
    def worse(self) -> bool:
        """Whether the stock side wins."""
        return self.verdict in ("slower", "more memory")


def headlines(records: Sequence[Record]) -> list[Headline]:
    """Cards for the sweeps that ran: at the longest length at which both sides have a result, on real data if any."""
    cards = []
    for sweep, (contender, title, subject) in SUBJECTS.items():
        chosen = _chosen(of_sweep(records, sweep), contender)
        if chosen is None:
            continue
        record, row = chosen
        label = NOT_COMPARABLE if record.vendor == "cpu" else record.evidence
        told = _told(record)
        if sweep == "kernels" and record.vendor == "cpu":
            subject = "EvoFlash-3D's reference for CPUs (no Triton kernel) over eager PyTorch"
        cards.append(Headline(title, *_worded(row["speedup_x"], "faster", "slower", "as fast"), subject, told, label))
        if sweep == "iteration" and not pd.isna(row["memory_ratio_x"]):
            worded = _worded(row["memory_ratio_x"], "less memory", "more memory", "the same memory")
            cards.append(Headline("Peak memory of a step", *worded, subject, told, label))
    return cards


def _chosen(records: Sequence[Record], contender: str) -> tuple[Record, pd.Series] | None:
    table = sweep_table(records)
    if table.empty:
        return None
    table = table[(table["contender"] == contender) & table["speedup_x"].notna()].set_index("point_id")
    fitting = [record for record in records if record.point.id in table.index]
    if not fitting:
        return None
    record = max(fitting, key=lambda one: (length(one), one.point.setting.data == "cache", one.point.id))
    return record, table.loc[record.point.id]


def _worded(ratio: float, better: str, worse: str, same: str) -> tuple[str, str]:
    """Within 2 % nothing is claimed; below 1 the inverse is told, as slower or more."""
    if abs(ratio - 1) < 0.02:
        return f"{ratio:.2f}×", same
    value = ratio if ratio > 1 else 1 / ratio
    return (f"{value:.2f}×" if value < 10 else f"{value:.0f}×"), better if ratio > 1 else worse


def _told(record: Record) -> str:
    setting = record.point.setting
    parts = [f"N = {length(record)}", device_label(record)]
    if setting.what == "iteration":
        parts += [f"{setting.model} model", f"{setting.workload} workload", DATA[setting.data]]
    if setting.what != "data_pipeline":
        parts.append(setting.dtype)
    return " · ".join(filter(None, parts))
