"""What one Snakemake run will do, resolved and validated before the DAG is built. Loads neither torch nor the model."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from cluster.batch import BatchFailed, Layout, plan_batches
from cluster.driver import Cancelled
from cluster.launcher import launch
from cluster.site import FOLDER, Site, load_site, shown
from experiments.spec import load_sweep, read_yaml, sweep_names
from megafold.errors import EXIT_BAD_INPUT, InputError

# Keys of `config:` in a profile and of --config, with their defaults (None: must be given).
CONFIG = {
    "site": None,  # a folder of cluster/
    "sweeps": None,  # names of shipped sweeps
    "size": "full",  # or a size that the sweeps name
    "settings": [],  # a list, or text with blanks: key=value for all sweeps, sweep.key=value for one
    "data": "sample",  # or a YAML file with a `data:` section
    "download": "data",  # folder for what is downloaded
    "msa_depth": 1024,  # alignment rows kept in the cache
    "cache_tasks": 1,  # jobs that share the work of building the cache
    "results": "results",  # folder of all results
    "force": False,  # measure again what has a result
    "megafold": "",  # another megafold program than the one of this environment
}


@dataclass(frozen=True)
class Plan:
    """`batches`: by sweep and batch name, the comparisons of a job; `cached`: the sweeps that read the cache."""

    site: Site
    config: Mapping[str, Any]
    batches: Mapping[str, Mapping[str, list[dict[str, Any]]]]
    cached: tuple[str, ...]

    @property
    def root(self) -> str:
        """Folder of the site's results."""
        return f"{self.config['results']}/{self.site.name}"

    @property
    def cache(self) -> str:
        """The EvoPipe cache."""
        data = self.config["data"]
        return f"{self.root}/cache/{'sample' if data == 'sample' else Path(data).stem}.h5"

    def manifests(self, sweep: str) -> list[str]:
        """Manifests of all batches of a sweep."""
        return [str(Layout(Path(self.root)).manifest(sweep, batch)) for batch in self.batches[sweep]]


def plan_workflow(config: Mapping[str, Any], arguments: Sequence[str] = ()) -> Plan:
    """Resolve the configuration of a run.

    Args:
        config: Snakemake's. `--config` on the command line replaces the profile's `config:` as a whole, so what it
            does not name is taken from the profile here.
        arguments: Snakemake's command line, which names the profile.

    Raises:
        InputError: for an unknown key, site, sweep, size or setting, a missing data file, or a value of the wrong kind.
    """
    file, defaults = profile_config(arguments)
    merged = {**CONFIG, **defaults, **{key: _parsed(value) for key, value in config.items()}}
    for key in merged:
        if key not in CONFIG:
            raise InputError(file, f"config.{key}", f"unknown key; allowed: {', '.join(CONFIG)}")
    for key, default in CONFIG.items():
        if merged[key] is None:
            raise InputError(file, f"config.{key}", "is missing; use --profile cluster/<site>")
        wanted = {"sweeps": list, "settings": list, "site": str}.get(key, type(default))
        merged[key] = _as(file, f"config.{key}", merged[key], wanted)
    site = load_site(merged["site"])
    if merged["data"] != "sample" and not Path(merged["data"]).is_file():
        problem = f"is {merged['data']!r}: no such file; wanted: sample, or a YAML file with a `data:` section"
        raise InputError(file, "config.data", problem)
    for key in ("msa_depth", "cache_tasks"):
        if merged[key] < 1:
            raise InputError(file, f"config.{key}", "must be at least 1")
    sweeps = {}
    for name in merged["sweeps"]:
        if name not in sweep_names():
            raise InputError(file, "config.sweeps", f"unknown sweep {name!r}; there are {', '.join(sweep_names())}")
        sweeps[name] = load_sweep(name, size=merged["size"], settings=_settings(merged, name))
    batches = {name: plan_batches(site, sweep.comparisons) for name, sweep in sweeps.items()}
    return Plan(site, merged, batches, tuple(name for name, sweep in sweeps.items() if sweep.needs_cache))


def profile_config(arguments: Sequence[str]) -> tuple[str, dict[str, Any]]:
    """The profile's file, as a user typed it, and its `config:`; "--config" where there is no profile."""
    name = os.environ.get("SNAKEMAKE_PROFILE", "")
    for index, argument in enumerate(arguments):
        if argument == "--profile" and index + 1 < len(arguments):
            name = arguments[index + 1]
        elif argument.startswith("--profile="):
            name = argument.partition("=")[2]
    # Snakemake may have changed the working directory (--directory) since it read the profile
    places = [Path(start, name, "config.yaml") for start in (".", os.environ.get("PWD", "."), FOLDER.parent)]
    path = next((place for place in places if name and place.is_file()), None)
    if path is None:
        return "--config", {}
    content = read_yaml(path).get("config") or {}
    if not isinstance(content, dict):
        raise InputError(shown(path), "config", "is no mapping of keys")
    return shown(path), content


def profile_names() -> tuple[str, ...]:
    """The shipped profiles."""
    return tuple(sorted(path.parent.name for path in FOLDER.glob("*/config.yaml")))


@contextmanager
def telling() -> Iterator[None]:
    """End the process with one line and the right exit code where the user, or a job, is at fault."""
    try:
        yield
    except InputError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        sys.exit(EXIT_BAD_INPUT)
    except BatchFailed as failed:
        print(f"error: {failed}", file=sys.stderr, flush=True)
        sys.exit(failed.code)
    except Cancelled as cancelled:
        sys.exit(128 + cancelled.number)


def megafold_command(config: Mapping[str, Any]) -> list[str]:
    """The command line of this environment, or the one that the configuration names."""
    return [str(config["megafold"] or Path(sys.executable).parent / "megafold")]


def run_megafold(config: Mapping[str, Any], name: str, arguments: Sequence[str | Path | int]) -> None:
    """Run one `megafold` command as a job of the site, in results/<site>/jobs/<name>; ends the process if it fails."""
    site = load_site(config["site"])
    folder = Layout(Path(config["results"], site.name)).job(name)
    outcome = launch(site, name, folder, [*megafold_command(config), *map(str, arguments)])
    if outcome.status != "ok":
        sys.exit(outcome.code)


def _settings(merged: Mapping[str, Any], sweep: str) -> list[str]:
    chosen = []
    for setting in merged["settings"]:
        name, dot, rest = str(setting).partition(".")
        if dot and name in sweep_names():
            chosen += [rest] if name == sweep else []
        else:
            chosen.append(str(setting))
    return chosen


def _parsed(value: Any) -> Any:
    """Snakemake hands over text where --config gives true or a number."""
    if not isinstance(value, str):
        return value
    try:
        parsed = yaml.safe_load(value)
    except yaml.YAMLError:
        return value
    return parsed if isinstance(parsed, bool | int | list) else value


def _as(file: str, field: str, value: Any, wanted: type) -> Any:
    if wanted is list and isinstance(value, str):  # --config "settings=n_tokens=[64,128] kernels.heads=2"
        return value.split()
    if type(value) is not wanted:
        names = {list: "a list", str: "text", bool: "true or false", int: "a whole number"}
        raise InputError(file, field, f"is {value!r}; wanted: {names[wanted]}")
    return value
