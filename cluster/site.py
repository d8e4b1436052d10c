"""Facts of one machine room, read from cluster/<site>/site.yaml; nothing else in the project knows them."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from pathlib import Path
from typing import Any

import yaml

from megafold.errors import InputError

FOLDER = Path(__file__).parent
EXECUTORS = ("local", "slurm")
VENDORS = ("nvidia", "amd", "cpu", "auto")
GPU_REQUESTS = ("none", "per_node", "per_task")
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True)
class Site:
    """One site.

    In the YAML, times are text as SLURM writes them ("02:00:00", "1-00:00:00"), sizes and intervals carry their unit
    ("480GB", "10s"); here they are numbers: minutes, GB (10^9 bytes) and seconds.

    `account`, `partition`, `qos`, `constraint`: None where the user has to fill it in, "" where the site wants none.
    `gpu_request`: how sbatch is asked for GPUs ("none" where whole nodes are given out and srun binds them).
    `gpus_per_task`: GPUs a task sees, passed to srun with `gpu_bind`; 0 passes neither.
    `node_local`: environment variables that name folders on the node's own disk, created by every task.
    `setup`: shell lines run once, on the first node, after the modules are loaded.
    """

    name: str
    executor: str
    vendor: str
    gpu: str
    gpus_per_node: int
    cpus_per_task: int
    time_limit: float
    comparisons_per_job: int
    description: str = ""
    gpu_request: str = "none"
    gpus_per_task: int = 0
    gpu_bind: str = ""
    memory: float | None = None
    max_nodes: int = 1
    account: str | None = ""
    partition: str | None = ""
    qos: str | None = ""
    constraint: str | None = ""
    max_queued_jobs: int = 100
    submit_attempts: int = 6
    submit_wait: float = 30.0
    poll: float = 10.0
    srun_args: tuple[str, ...] = ()
    sbatch: Mapping[str, str] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    setup: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    network: Mapping[str, str] = field(default_factory=dict)
    node_local: Mapping[str, str] = field(default_factory=dict)

    @property
    def file(self) -> Path:
        """The file it was read from."""
        return FOLDER / self.name / "site.yaml"

    def check_complete(self) -> None:
        """Raise InputError where a field that each user has to fill in is still empty; dry runs do not ask."""
        for key in ("account", "partition", "qos", "constraint"):
            if getattr(self, key) is None and not os.environ.get(f"SBATCH_{key.upper()}"):
                problem = f"is not set; write yours there, or export SBATCH_{key.upper()}"
                raise InputError(shown(self.file), key, problem)

    def nodes_for(self, devices: int) -> int:
        """Nodes that hold `devices` devices; InputError where the site's limit is smaller."""
        nodes = 1 if self.executor == "local" else -(-devices // max(1, self.gpus_per_node))
        if nodes > self.max_nodes:
            raise InputError(
                shown(self.file), "max_nodes", f"is {self.max_nodes}; {devices} devices need {nodes} nodes"
            )
        return nodes


def site_names() -> tuple[str, ...]:
    """The sites that the project ships."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/site.yaml")))


def load_site(name: str, folder: Path = FOLDER) -> Site:
    """Read and validate one site.

    Raises:
        InputError: naming the file and the field that is unknown, missing, or of the wrong kind or unit.
    """
    path = folder / str(name) / "site.yaml"
    if not path.is_file():
        raise InputError("--config", "site", f"is {name!r}; there are {', '.join(site_names())} (folders of cluster/)")
    try:
        content = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InputError(shown(path), "", f"is not valid YAML: {error}") from error
    if not isinstance(content, dict):
        raise InputError(shown(path), "", "is no mapping of fields")
    known = {entry.name: entry for entry in fields(Site)}
    for key in content:
        if key not in known:
            raise InputError(shown(path), str(key), f"unknown field; allowed: {', '.join(known)}")
    for key, entry in known.items():
        if key not in content and entry.default is MISSING and entry.default_factory is MISSING:
            raise InputError(shown(path), key, "is missing")
    site = Site(**{key: READERS[key](shown(path), key, value) for key, value in content.items()})
    if site.name != name:
        raise InputError(shown(path), "name", f"is {site.name!r}; wanted: the folder's name, {name!r}")
    if site.vendor in ("nvidia", "amd") and site.gpus_per_node < 1:
        raise InputError(shown(path), "gpus_per_node", f"is 0 at a site of vendor {site.vendor}")
    return site


def shown(path: Path) -> str:
    """The path as a user of a checkout types it."""
    return os.path.relpath(path) if path.is_relative_to(Path.cwd()) else str(path)


def detect_vendor(site: Site) -> str:
    """The site's vendor; for "auto" the one whose driver this machine has."""
    if site.vendor != "auto":
        return site.vendor
    return "nvidia" if Path("/dev/nvidiactl").exists() else "amd" if Path("/dev/kfd").exists() else "cpu"


def minutes(file: str, key: str, value: Any) -> float:
    """Minutes of a SLURM time, [D-]HH:MM:SS. (YAML reads an unquoted 02:00:00 as the integer 7200, hence the hint.)"""
    match = re.fullmatch(r"(?:(\d+)-)?(\d+):([0-5]\d):([0-5]\d)", value) if isinstance(value, str) else None
    if not match:
        raise InputError(file, key, f'is {value!r}; wanted: a quoted time "HH:MM:SS" or "D-HH:MM:SS"')
    days, hours, mins, seconds = (int(part or 0) for part in match.groups())
    total = days * 1440 + hours * 60 + mins + seconds / 60
    if not total:
        raise InputError(file, key, "is zero")
    return total


def _measure(units: Mapping[str, float], example: str):
    def read(file: str, key: str, value: Any) -> float:
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)", value) if isinstance(value, str) else None
        if not match or match[2] not in units or not float(match[1]):
            raise InputError(
                file, key, f"is {value!r}; wanted: a number with its unit ({', '.join(units)}), as {example}"
            )
        return float(match[1]) * units[match[2]]

    return read


def _count(least: int):
    def read(file: str, key: str, value: Any) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise InputError(file, key, f"is {value!r}; wanted: a whole number of at least {least}")
        return value

    return read


def _choice(allowed: tuple[str, ...]):
    def read(file: str, key: str, value: Any) -> str:
        if value not in allowed:
            raise InputError(file, key, f"is {value!r}; allowed: {', '.join(allowed)}")
        return value

    return read


def _text(file: str, key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise InputError(file, key, f"is {value!r}; wanted: text")
    return value


def _own(file: str, key: str, value: Any) -> str | None:
    return None if value is None else _text(file, key, value)


def _lines(file: str, key: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, list):
        raise InputError(file, key, f"is {value!r}; wanted: a list of text")
    return tuple(_text(file, f"{key}[{index}]", entry) for index, entry in enumerate(value))


def _table(file: str, key: str, value: Any) -> dict[str, str]:
    if not isinstance(value, dict):
        raise InputError(file, key, f"is {value!r}; wanted: a mapping of names to text")
    return {_text(file, key, name): _text(file, f"{key}.{name}", entry) for name, entry in value.items()}


def _variables(file: str, key: str, value: Any) -> dict[str, str]:
    for name in _table(file, key, value):
        if not NAME.fullmatch(name):
            raise InputError(file, f"{key}.{name}", "is no name of an environment variable")
    return dict(value)


_size = _measure({"MB": 1e-3, "GB": 1.0, "TB": 1e3}, '"480GB"')
_interval = _measure({"s": 1.0, "min": 60.0}, '"10s"')
READERS = {
    **dict.fromkeys(("name", "description", "gpu", "gpu_bind"), _text),
    **dict.fromkeys(("account", "partition", "qos", "constraint"), _own),
    **dict.fromkeys(("cpus_per_task", "comparisons_per_job", "max_nodes"), _count(1)),
    **dict.fromkeys(("max_queued_jobs", "submit_attempts"), _count(1)),
    **dict.fromkeys(("gpus_per_node", "gpus_per_task"), _count(0)),
    **dict.fromkeys(("submit_wait", "poll"), _interval),
    **dict.fromkeys(("srun_args", "modules", "setup"), _lines),
    **dict.fromkeys(("environment", "network", "node_local"), _variables),
    "executor": _choice(EXECUTORS),
    "vendor": _choice(VENDORS),
    "gpu_request": _choice(GPU_REQUESTS),
    "time_limit": minutes,
    "memory": _size,
    "sbatch": _table,
}
