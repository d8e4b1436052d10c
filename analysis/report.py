"""One self-contained HTML page of a site's results: what was measured where, tables, figures, claims, what failed."""

from __future__ import annotations

import base64
import re
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from analysis.captions import command, conditions, device_label, is_demo
from analysis.figures import why_no_figure, write_figures
from analysis.headlines import headlines
from analysis.paper import claims_table, claims_words, paper_table, paper_words
from analysis.quantities import LABELS, shown
from analysis.tables import NUMERIC, notes, of_sweep, readable_table
from experiments.record import Record, read_json, read_records
from experiments.spec import SWEEPS, read_yaml
from megafold.errors import InputError

TEMPLATES = Path(__file__).parent / "templates"
TITLES = {
    "iteration": "Training step by length",
    "iteration_full": "Training step with the confidence head, by length",
    "ablation": "What each part brings",
    "kernels": "Triangle-attention kernels",
    "data_pipeline": "Reading training examples",
    "max_length": "Longest trainable sequence",
    "sequence_parallel": "Sequence parallelism",
    "model_size": "Model size",
}
REPOSITORY = Path(__file__).resolve().parents[1]
# Columns whose cells may wrap.
WORDY = ("Reason", "Where", "Conditions", "Conditions here", "Claim")
FAILED = ("oom", "timeout", "unsupported", "node_failure", "error")


@dataclass(frozen=True)
class Section:
    """One sweep on the page."""

    name: str
    title: str
    about: str
    conditions: str
    figures: list[dict[str, str]]
    no_figure: str
    table: Markup
    notes: list[str]
    definitions: list[tuple[str, str]]
    commands: list[str]


def write_report(site_folder: Path, out: Path) -> Path:
    """Write the page for results/<site> (its `records` folder, and `verify.json` where there is one) to `out`.

    Everything is inside the file: images, style, no script, nothing is loaded from elsewhere.

    Raises:
        InputError: where a record is broken, or the folder holds none.
    """
    site_folder, out = Path(site_folder), Path(out)
    records = read_records(site_folder / "records")
    if not records:
        raise InputError(site_folder / "records", "", "holds no record (*.json)")
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    page = environment.get_template("report.html").render(_content(records, site_folder))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(page)
    return out


def _content(records: Sequence[Record], site_folder: Path) -> dict[str, Any]:
    site = site_folder.resolve().name
    sweeps = dict.fromkeys(record.point.setting.sweep for record in records)
    ordered = [name for name in TITLES if name in sweeps] + [name for name in sweeps if name not in TITLES]
    compared = paper_words(paper_table(records))
    return {
        "site": site,
        "demo": is_demo(records),
        "cards": headlines(records),
        "facts": _facts(records),
        "warnings": _warnings(records),
        "checks": _checks(site_folder / "verify.json"),
        "counts": _counts(records),
        "sections": [_section(of_sweep(records, name), site) for name in ordered],
        "claims": _table(claims_words(claims_table(records))),
        "compared": _table(compared) if not compared.empty else "",
        "failures": _table(failures(records)) if any(record.status in FAILED for record in records) else "",
        "css": Markup((TEMPLATES / "report.css").read_text()),
        "notebooks": sorted(path.name for path in (site_folder / "notebooks").glob("*.ipynb")),
        "tables": sorted(path.name for path in (site_folder / "tables").glob("*.csv")),
    }


def failures(records: Iterable[Record]) -> pd.DataFrame:
    """Points without a result, with outcome and reason; equal ones at several lengths share a row."""
    groups: dict[tuple[str, ...], list[str]] = {}
    for record in records:
        if record.status in FAILED:
            setting, contender = record.point.setting, record.point.contender.name
            key = (setting.sweep, contender, record.status, record.reason or "no reason given")
            groups.setdefault(key, []).append(setting.label)
    rows = [
        {
            "Sweep": sweep,
            "Contender": contender,
            "Outcome": status,
            "Where": ", ".join(dict.fromkeys(where)),
            "Reason": why,
        }
        for (sweep, contender, status, why), where in groups.items()
    ]
    return pd.DataFrame(rows, columns=["Sweep", "Contender", "Outcome", "Where", "Reason"])


def _section(records: Sequence[Record], site: str) -> Section:
    name = records[0].point.setting.sweep
    with tempfile.TemporaryDirectory() as folder:
        paths = [path for path in write_figures(records, name, Path(folder)) if path.suffix == ".svg"]
        pictures = [
            {"source": _embedded(path), "alt": path.stem.replace("_", " "), "width": _width(path)} for path in paths
        ]
    commands = [f"snakemake --profile cluster/{site} {name}"] if (REPOSITORY / "cluster" / site).is_dir() else []
    return Section(
        name=name,
        title=TITLES.get(name, name.replace("_", " ").capitalize()),
        about=_description(name),
        conditions=conditions(records),
        figures=pictures,
        no_figure=""
        if pictures
        else f"No figure: {why_no_figure(records) or 'nothing in these records can be drawn'}.",
        table=_table(readable_table(records)),
        notes=notes(records),
        definitions=_definitions(records),
        commands=[*commands, command(records)],
    )


def _embedded(path: Path) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _width(path: Path) -> str:
    """Width on the page, so that type is of one size in all figures: 6.1 rem an inch of the figure."""
    points = re.search(r'<svg[^>]* width="([0-9.]+)pt"', path.read_text())
    return f"{float(points.group(1)) / 72 * 6.1:.1f}rem" if points else "100%"


def _table(frame: pd.DataFrame) -> Markup:
    """A table that scrolls sideways in a narrow window; rows of the baseline are muted, ours stand out."""
    right = {name for name in frame.columns if name in NUMERIC or str(name).endswith("speed-up")}
    right |= {name for name in frame.columns if re.search(r" \((s|ms|GiB|MiB|%)\)$", str(name))}
    head = Markup("").join(
        Markup('<th scope="col"{}>{}</th>').format(Markup(' class="num"' if name in right else ""), name)
        for name in frame.columns
    )
    rows = []
    for _, row in frame.iterrows():
        kind = {"eager": "base", "stock": "base", "megafold": "ours", "evoflash3d": "ours", "evopipe": "ours"}
        own = kind.get(row.get("Contender", ""), "")
        cells = Markup("").join(
            Markup("<td{}>{}</td>").format(_cell_class(name, right), row[name]) for name in frame.columns
        )
        rows.append(Markup("<tr{}>{}</tr>").format(Markup(f' class="{own}"' if own else ""), cells))
    return Markup(
        '<div class="scroll" tabindex="0"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(head, Markup("").join(rows))


def _cell_class(name: str, right: set[str]) -> Markup:
    return Markup(' class="num"' if name in right else ' class="words"' if name in WORDY else "")


def _facts(records: Sequence[Record]) -> list[tuple[str, str]]:
    sources = [record.provenance for record in records]
    times = sorted(str(source[key]) for source in sources for key in ("started", "ended") if source.get(key))
    packages = {
        name: version for source in sources for name, version in (source.get("packages") or {}).items() if version
    }
    devices = _each(
        f"{device_label(record)} ({record.provenance['device']})" if record.vendor == "cpu" else device_label(record)
        for record in records
        if device_label(record)
    )
    commits = _each(source.get("commit") for source in sources)
    facts = {
        "Device": "; ".join(devices),
        "Driver": ", ".join(_each(source.get("driver") for source in sources)),
        "Measured": f"{times[0]} to {times[-1]}" if times else "",
        "Commit": ", ".join(commits),
        "SLURM jobs": ", ".join(_each(source.get("slurm_job_id") for source in sources)),
        "Versions": ", ".join(f"{name} {version}" for name, version in sorted(packages.items())),
        "Command": " / ".join(_each(source.get("command") for source in sources)[:4]),
        "TF32 allowed": ", ".join(_each({True: "yes", False: "no"}.get(source.get("tf32")) for source in sources)),
    }
    return [(name, text) for name, text in facts.items() if text]


def _warnings(records: Sequence[Record]) -> list[str]:
    found = []
    dirty = [record for record in records if record.provenance.get("dirty")]
    if dirty:
        found.append(
            f"{len(dirty)} of {len(records)} points were measured with uncommitted changes: the commit does not say"
            " what ran."
        )
    if any(not record.provenance.get("commit") for record in records):
        found.append("Some points do not know which commit they were measured at.")
    labelled = _each(record.evidence for record in records if record.evidence != "measured")
    if labelled:
        found.append(f"Some numbers are {' or '.join(labelled)}, not measured; their rows and figures say so.")
    return found


def _counts(records: Sequence[Record]) -> list[tuple[str, int]]:
    order = ("ok", *FAILED)
    return [(status, sum(record.status == status for record in records)) for status in order][:1] + [
        (status, number) for status in FAILED if (number := sum(record.status == status for record in records))
    ]


def _checks(path: Path) -> dict[str, Any]:
    """What `megafold verify` wrote, if it did: the number of checks and the names of those that failed."""
    if not path.is_file():
        return {}
    content = read_json(path)
    try:
        checks = content["checks"]
        return {"number": len(checks), "failed": [check["name"] for check in checks if not check["ok"]]}
    except (KeyError, TypeError) as error:
        raise InputError(path, "checks", f"is not what `megafold verify` writes ({error})") from error


def _definitions(records: Sequence[Record]) -> list[tuple[str, str]]:
    found = {
        (one.label if one.name in LABELS else one.name.replace("_", " "), metric.definition)
        for record in records
        for one, metric in shown(record).items()
        if metric.definition
    }
    return sorted(found)


def _description(sweep: str) -> str:
    path = SWEEPS / f"{sweep}.yaml"
    try:
        return " ".join(str(read_yaml(path).get("description", "")).split()) if path.is_file() else ""
    except InputError:
        return ""


def _each(values: Iterable[Any]) -> list[str]:
    return list(dict.fromkeys(str(value) for value in values if value))
