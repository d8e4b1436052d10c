"""Words that go with every number: device, workload, evidence, and the command that measures it again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from experiments.record import Record
from experiments.spec import SWEEPS, load_sweep, read_yaml
from megafold.errors import InputError

WORKLOADS = {
    "core": "core workload (no confidence head, one recycle, dropout on)",
    "full": "full workload (rollout and confidence head)",
    "full_one_rollout": "full workload with one rollout instead of one an augmentation",
    "as_published": "as-published workload (confidence every 10 steps, 1-4 recycles)",
    "triangle_attention": "triangle attention",
    "triangle_attention_fp32_bias": "triangle attention with an fp32 bias",
    "triangle_multiplication": "triangle multiplication",
    "transition": "pair transition",
    "norm_project": "LayerNorm and the projections of triangle attention",
    "attention_output": "gate, output projection and residual of triangle attention",
    "conditioned_transition_atoms": "conditioned transition of atoms (48 copies, 8 atoms a token)",
    "conditioned_transition_tokens": "conditioned transition of tokens (48 copies, conditioning of width 801)",
    "windowed_attention": "windowed atom attention (48 copies, 8 atoms a token)",
    "outer_product_mean": "outer product mean of 512 sequences",
    "pair_weighted_averaging": "pair-weighted averaging of 512 sequences",
    "smooth_lddt": "smooth lDDT loss (48 copies, 8 atoms a token)",
    "read_example": "reading one training example",
}
DATA = {"cache": "real crops", "synthetic": "synthetic batches"}


def device_label(record: Record) -> str:
    """Where a record was measured, as people say it: "NVIDIA H200", or "CPU, 2 threads"; "" where it is not known."""
    provenance = record.provenance
    if record.vendor != "cpu":
        return str(provenance.get("device") or "")
    for key, word in (("cores", "core"), ("threads", "thread")):
        if provenance.get(key):
            return f"CPU, {provenance[key]} {word}{'s' if provenance[key] != 1 else ''}"
    return "CPU" if provenance.get("device") else ""


def is_demo(records: Iterable[Record]) -> bool:
    """Whether any of the records was measured on a CPU, which no published number was."""
    return any(record.vendor == "cpu" for record in records)


def conditions(records: Sequence[Record]) -> str:
    """One line: device, model, workload, data, dtype and evidence of all the records together."""
    if not records:
        return "nothing measured"
    settings = [record.point.setting for record in records]
    devices = [name for name in _each(map(device_label, records)) if name] or ["unknown device"]
    parts = ["; ".join(f"CPU demo: {name[5:]}" if name.startswith("CPU, ") else name for name in devices)]
    if settings[0].what == "iteration":
        parts.append(" and ".join(f"{name} model" for name in _each(setting.model for setting in settings)))
        parts.append(" and ".join(_each(setting.workload for setting in settings)) + " workload")
        parts.append(" and ".join(_each(DATA[setting.data] for setting in settings)))
    else:
        parts.append(" and ".join(_each(WORKLOADS[setting.workload] for setting in settings)))
    if settings[0].what != "data_pipeline":
        parts.append(" and ".join(_each(setting.dtype for setting in settings)))
    ranks = _each(setting.sp * setting.dp for setting in settings)
    if ranks != [1]:
        parts.append(f"{' and '.join(map(str, ranks))} ranks")
    parts.append(" and ".join(_each(record.evidence for record in records)))
    return " · ".join(parts)


def caption(records: Sequence[Record]) -> str:
    """Caption of a table: the conditions and the commit, with a warning where the tree was not clean."""
    commits = _each(short_commit(record) for record in records)
    dirty = any(record.provenance.get("dirty") for record in records)
    commit = f" · commit {', '.join(filter(None, commits))}" if any(commits) else ""
    return conditions(records) + commit + (" with uncommitted changes" if dirty else "")


def short_commit(record: Record) -> str:
    """The first ten digits of the commit that was measured, "" where it is not known."""
    return str(record.provenance.get("commit") or "")[:10]


def command(records: Sequence[Record], out: str = "results/again") -> str:
    """The command line that measures these records again on the machine at hand.

    A shipped sweep at one of its sizes is named by that size; anything else is spelled out with `--set`.
    """
    if not records:
        return ""
    sweep = records[0].point.setting.sweep
    for size in _sizes(sweep):
        resolved = load_sweep(sweep, size=size)
        if {record.comparison_id for record in records} <= {comparison.id for comparison in resolved.comparisons}:
            chosen = "" if size == "full" else f" --size {size}"
            return f"megafold sweep {sweep}{chosen} --out {out}"
    return f"megafold sweep {sweep} {' '.join(_settings(records))} --out {out}"


def slug(text: str) -> str:
    """A device label as part of a file name."""
    return re.sub(r"[^a-z0-9]+", "_", text.lower()).strip("_")


def _sizes(sweep: str) -> list[str]:
    path = SWEEPS / f"{sweep}.yaml"
    try:
        return ["full", *read_yaml(path).get("sizes", {})] if path.is_file() else []
    except InputError:
        return []


def _settings(records: Sequence[Record]) -> list[str]:
    settings = [record.point.setting for record in records]
    chosen: dict[str, list[str]] = {}
    for key in ("workload", "model", "data", "variant", "dtype", "sp", "dp", "seed", "mode"):
        chosen[key] = [str(value) for value in _each(getattr(setting, key) for setting in settings) if value != ""]
    for key, _ in settings[0].shape:
        chosen[key] = [str(value) for value in _each(dict(setting.shape)[key] for setting in settings)]
    chosen["contenders"] = [str(name) for name in _each(record.point.contender.name for record in records)]
    for key in ("visits", "warmup", "repeats", "timeout_s"):
        chosen[key] = [str(max(getattr(setting.protocol, key) for setting in settings))]
    single = {key for key, values in chosen.items() if len(values) == 1 and key != "contenders"}
    return [
        f"--set {key}={values[0] if key in single else '[' + ','.join(values) + ']'}"
        for key, values in chosen.items()
        if values
    ]


def _each(values: Iterable) -> list:
    return list(dict.fromkeys(values))
