"""Our numbers and the paper's (experiments/paper.csv): what was measured on what, and whether they compare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

import experiments
from analysis.captions import device_label
from analysis.quantities import LEADING_MEMORY, length, shown
from analysis.tables import rounded, session
from experiments.record import Record
from megafold.errors import InputError

PAPER = Path(experiments.__file__).parent / "paper.csv"
COLUMNS = (
    "claim", "figure", "hardware", "gpus", "workload", "n_tokens", "system", "quantity", "value", "unit", "precision",
)  # fmt: skip
# The paper's name of a system -> the contender that stands for it here. DS4Sci Evoformer has none yet.
CONTENDERS = {"PyTorch": "eager", "torch.compile": "compile", "MegaFold": "megafold"}
GB = 1e9
NOT_MEASURED = "not measured here"


def read_paper(file: Path = PAPER) -> pd.DataFrame:
    """The paper's numbers, one row each; `value` is a float, or "OOM".

    Raises:
        InputError: naming the file, and the column that is missing or holds no number.
    """
    try:
        frame = pd.read_csv(file)
    except (OSError, ValueError) as error:
        raise InputError(file, "", f"cannot be read: {error}") from error
    for column in COLUMNS:
        if column not in frame.columns:
            raise InputError(file, column, "is missing")
    for row, value in enumerate(frame["value"]):
        if value != "OOM" and pd.isna(pd.to_numeric(value, errors="coerce")):
            raise InputError(file, f"value in row {row + 2}", f"is {value!r}; wanted: a number or OOM")
    return frame


def paper_table(records: Iterable[Record], file: Path = PAPER) -> pd.DataFrame:
    """The paper's times and memories beside ours at the same N, one row for each match.

    `ratio` (ours over the paper's) is filled only where device, GPU count, model, workload, data and evidence are the
    paper's; elsewhere it is empty and `conditions` says what differs.
    """
    records = [record for record in records if record.point.setting.what == "iteration"]
    rows = []
    for entry in read_paper(file).to_dict("records"):
        if entry["quantity"] not in ("iteration_time", "peak_memory"):
            continue
        for record in records:
            if record.point.contender.name != CONTENDERS.get(entry["system"]) or length(record) != entry["n_tokens"]:
                continue
            ours = _value(record, entry["quantity"])
            differences = deviations(record, entry["hardware"], int(entry["gpus"]))
            paper = None if entry["value"] == "OOM" else float(entry["value"])
            comparable = not differences and paper is not None and isinstance(ours, float)
            rows.append(
                {
                    "figure": entry["figure"],
                    "quantity": entry["quantity"],
                    "n_tokens": int(entry["n_tokens"]),
                    "system": entry["system"],
                    "unit": entry["unit"],
                    "paper": "OOM" if paper is None else paper,
                    "paper_hardware": f"{int(entry['gpus'])}x {entry['hardware']}",
                    "ours": ours,
                    "our_device": device_label(record),
                    "contender": record.point.contender.name,
                    "ratio": ours / paper if comparable else None,
                    "conditions": "; ".join(differences) or "the paper's hardware and workload",
                    "point_id": record.point.id,
                }
            )
    return pd.DataFrame(rows)


def deviations(record: Record, hardware: str, gpus: int = 1) -> list[str]:
    """In what the measurement differs from one of the paper's, in words; empty where it may be compared."""
    setting = record.point.setting
    found = []
    if not same_device(record, hardware):
        found.append(f"not the paper's hardware ({device_label(record) or 'unknown device'})")
    if setting.sp * setting.dp != gpus:
        found.append(f"{setting.sp * setting.dp} rank{'s' * (setting.sp * setting.dp > 1)}, the paper has {gpus}")
    if setting.workload != "as_published":
        found.append(f"workload differs: {setting.workload} vs as published")
    if setting.model != "paper":
        found.append(f"model differs: {setting.model} vs the paper's 457 M parameters")
    if setting.data != "cache":
        found.append("synthetic batches, the paper used real data")
    if record.evidence != "measured":
        found.append(f"{record.evidence}, not measured")
    return found


def same_device(record: Record, hardware: str) -> bool:
    """Whether the record's device is the paper's card: H200 is neither GH200 nor H200 NVL, and MI250X is not MI250."""

    def card(text: str) -> set[str]:
        return set(re.findall(r"\b(?:GH|GB|MI|H|A|B|V|L)\d{2,4}[A-Z]*\b|\bNVL\b|\bPCIe\b", text))

    return record.vendor != "cpu" and bool(card(hardware)) and card(device_label(record)) == card(hardware)


@dataclass(frozen=True)
class Claim:
    """One headline of the paper: `quantity`, `hardware`, `gpus` and N find its value in paper.csv."""

    title: str
    sweep: str
    quantity: str
    hardware: str = ""
    gpus: int = 1
    n_tokens: int | None = None
    model: str = "paper"


CLAIMS = (
    Claim("Longest trainable sequence, MegaFold / PyTorch", "max_length", "max_length_ratio", "AMD MI250 64GB", 32),
    Claim("Iteration time, PyTorch / MegaFold", "iteration", "iteration_speedup", "NVIDIA H200 141GB", 1, 512),
    Claim("Iteration time, PyTorch / MegaFold", "iteration", "iteration_speedup", "AMD MI250 64GB", 1, 384),
    Claim("Peak memory, PyTorch / MegaFold", "iteration", "peak_memory_ratio", "NVIDIA H200 141GB", 1, 512),
    Claim("Model FLOPs utilisation at 1.81e9 parameters", "model_size", "mfu_at_1.81B_parameters", model="paper-1.8b"),
)


def claims_table(records: Iterable[Record], file: Path = PAPER) -> pd.DataFrame:
    """The paper's headline claims: value, ours (or "not measured here"), and under which conditions each holds.

    Ours is the ratio of eager and megafold of one comparison in one job, at the claim's N, with the paper's model, on
    the claim's card. What another GPU gave is told in the conditions only, and what a CPU gave not at all.
    """
    records, paper = list(records), read_paper(file)
    headlines = paper[paper["claim"] == "headline"]
    rows = []
    for claim in CLAIMS:
        chosen = headlines[headlines["quantity"] == claim.quantity]
        if claim.hardware:
            chosen = chosen[chosen["hardware"] == claim.hardware]
        entry = chosen.iloc[0]
        where = f"{claim.gpus}x {claim.hardware}" if claim.hardware else ""
        where += f", N = {claim.n_tokens}" if claim.n_tokens else ""
        unit = "×" if entry["unit"] == "x" else " %"
        base = {
            "claim": claim.title,
            "paper": f"{entry['value']}{unit}",
            "paper_conditions": where,
            "sweep": claim.sweep,
        }
        found = _claimed(claim, records)
        there = [(ours, told) for ours, told, same in found if same]
        rows += [base | {"ours": ours, "conditions": told} for ours, told in there] or [
            base | {"ours": NOT_MEASURED, "conditions": _why_not(claim, records, found)}
        ]
    return pd.DataFrame(rows)


def _claimed(claim: Claim, records: Sequence[Record]) -> list[tuple[str, str, bool]]:
    found = []
    for record in records:
        setting = record.point.setting
        fits = setting.what == "iteration" and setting.model == claim.model and claim.n_tokens in (None, length(record))
        if not fits or record.point.contender.name != "megafold" or record.vendor == "cpu":
            continue
        if claim.quantity.startswith("mfu"):
            value = _value(record, "mfu")
            if isinstance(value, float):
                told = f"{device_label(record)}, N = {length(record)}, workload {setting.workload}, {setting.data} data"
                found.append((f"{value:.1f} %", told, True))  # the paper names no card for it
            continue
        quantity = {"iteration_speedup": "iteration_time", "peak_memory_ratio": "peak_memory"}.get(claim.quantity)
        rival = next(
            (one for one in records if one.point.contender.name == "eager" and session(one) == session(record)), None
        )
        if quantity is None or rival is None:
            continue
        ours, base = _value(record, quantity), _value(rival, quantity)
        if isinstance(ours, float) and isinstance(base, float):
            told = "; ".join(deviations(record, claim.hardware, claim.gpus)) or "the paper's hardware and workload"
            found.append((f"{base / ours:.2f}×", told, same_device(record, claim.hardware)))
    return found


def _why_not(claim: Claim, records: Sequence[Record], elsewhere: Sequence[tuple[str, str, bool]]) -> str:
    if elsewhere:
        return " / ".join(f"{ours} on another card: {told}" for ours, told, _ in elsewhere)
    if claim.sweep not in {record.point.setting.sweep for record in records}:
        return f"sweep {claim.sweep} was not run"
    if all(record.vendor == "cpu" for record in records):
        return "CPU demo: not the paper's hardware, model or lengths"
    return f"no pair of eager and megafold at N = {claim.n_tokens} with the paper's model"


def _value(record: Record, quantity: str) -> float | str | None:
    """Seconds, percent, or GB (1e9 bytes, the paper's unit); "OOM"; None where the record does not hold it."""
    if record.status != "ok":
        return "OOM" if record.status == "oom" else record.status
    values = {found.name: metric.value for found, metric in shown(record).items()}
    if quantity in ("iteration_time", "mfu"):
        return values.get(quantity)
    memory = next((values[name] for name in LEADING_MEMORY if name in values), None)
    return None if memory is None else memory * 2**30 / GB


def claims_words(table: pd.DataFrame) -> pd.DataFrame:
    """`claims_table` as people read it."""
    names = {"claim": "Claim", "paper": "Paper", "paper_conditions": "Measured by the paper on", "ours": "Here"}
    return table.rename(columns={**names, "conditions": "Conditions here", "sweep": "Sweep"})


def paper_words(table: pd.DataFrame) -> pd.DataFrame:
    """`paper_table` as people read it."""
    if table.empty:
        return table
    names = {"iteration_time": "Iteration time", "peak_memory": "Peak memory"}

    def number(value: object) -> str:
        return rounded(value) if isinstance(value, float) and value == value else str(value or "–")

    return pd.DataFrame(
        {
            "Quantity": [f"{names[name]} ({unit})" for name, unit in zip(table["quantity"], table["unit"])],
            "N": [str(value) for value in table["n_tokens"]],
            "System": list(table["system"]),
            "Paper": [number(value) for value in table["paper"]],
            "Paper's hardware": list(table["paper_hardware"]),
            "Here": [number(value) for value in table["ours"]],
            "Device here": list(table["our_device"]),
            "Ratio": ["–" if pd.isna(value) else f"{value:.2f}×" for value in table["ratio"]],
            "Conditions": list(table["conditions"]),
        }
    )
