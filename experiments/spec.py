"""What is measured: a Sweep (one YAML file) resolves to Comparisons, and a Comparison to one Point for each contender.

A Point is a frozen, fully resolved description of one measurement. A Comparison is the set of Points of one shape,
whose contenders are measured in one job on one device, visited A B A B. This module loads neither torch nor the model.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import yaml

from megafold.errors import InputError

SWEEPS = Path(__file__).parent / "sweeps"
DTYPES = ("fp32", "bf16", "fp16")
DATA = ("synthetic", "cache")
MODES = ("measured", "emulated")

# Shape keys by kind of measurement, with their defaults (None: must be given). Counts, so positive integers; 0 is
# allowed where it means "without".
SHAPE_KEYS: dict[str, dict[str, int | None]] = {
    "iteration": {"n_tokens": None, "atoms_per_token": 8, "msa_depth": 512, "templates": 1, "batch_size": 1},
    "kernel": {"n_tokens": None, "batch_size": 1, "rows": 0, "heads": 4, "head_dim": 32, "width": 128},
    "data_pipeline": {"crop_size": None, "msa_depth": 1024, "examples": 8},
}
WORKLOADS = {
    "iteration": ("core", "full", "full_one_rollout", "as_published"),
    "kernel": (
        "triangle_attention",
        "triangle_attention_fp32_bias",
        "triangle_multiplication",
        "transition",
        "norm_project",
        "attention_output",
        "conditioned_transition_atoms",
        "conditioned_transition_tokens",
        "windowed_attention",
        "outer_product_mean",
        "pair_weighted_averaging",
        "smooth_lddt",
    ),
    "data_pipeline": ("read_example",),
}
ZERO_ALLOWED = ("rows", "templates", "msa_depth")


@dataclass(frozen=True)
class Protocol:
    """How often things are repeated.

    `visits`: times each contender is visited (A B A B for 2); `warmup` and `repeats`: steps of a visit that are not and
    that are timed; `timeout_s`: seconds after which a silent worker counts as hung.
    """

    visits: int = 2
    warmup: int = 2
    repeats: int = 5
    timeout_s: int = 1800


@dataclass(frozen=True)
class Contender:
    """One competitor: `name` in the tables, `provider` the function that builds it, `plan` the switches it gets."""

    name: str
    provider: str
    plan: tuple[tuple[str, bool], ...] = ()


@dataclass(frozen=True)
class Setting:
    """What all contenders of a comparison share: the field's terms, counts without units."""

    sweep: str
    what: str
    workload: str
    model: str
    data: str
    variant: str
    dtype: str
    shape: tuple[tuple[str, int], ...]
    sp: int = 1
    dp: int = 1
    seed: int = 0
    mode: str = "measured"
    protocol: Protocol = field(default_factory=Protocol)

    def size(self, key: str) -> int:
        """The shape's entry `key`, for instance "n_tokens"."""
        return dict(self.shape)[key]

    @property
    def label(self) -> str:
        """Readable start of the ids, for instance "core-n384-synthetic-bf16"."""
        length = dict(self.shape).get("n_tokens", dict(self.shape).get("crop_size"))
        parts = [self.workload, f"n{length}"]
        parts += [self.data] if self.what == "iteration" else []
        parts += [self.variant] if self.variant else []
        parts += [self.dtype] if self.what != "data_pipeline" else []
        parts += [f"sp{self.sp}dp{self.dp}"] if self.sp * self.dp > 1 else []
        parts += [self.mode] if self.mode != "measured" else []
        return "-".join(parts)


@dataclass(frozen=True)
class Point:
    """One measurement: a Setting and the Contender that is measured under it."""

    setting: Setting
    contender: Contender

    @property
    def id(self) -> str:
        """File name of the record: readable, and unique by a digest of everything but the time-out."""
        return f"{self.setting.label}-{self.contender.name}-{_digest(self.as_dict())}"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types, for Records."""
        return {**_plain(self.setting), "contender": _plain(self.contender)}


@dataclass(frozen=True)
class Comparison:
    """A Setting and all its contenders, measured in one job on one device."""

    setting: Setting
    contenders: tuple[Contender, ...]

    @property
    def id(self) -> str:
        """Readable, and unique by a digest of the setting and the contenders."""
        return f"{self.setting.label}-{_digest(self.as_dict())}"

    @property
    def points(self) -> tuple[Point, ...]:
        """One Point for each contender."""
        return tuple(Point(self.setting, contender) for contender in self.contenders)

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON types; `comparison_from_dict` reads it back."""
        return {**_plain(self.setting), "contenders": [_plain(contender) for contender in self.contenders]}


@dataclass(frozen=True)
class Sweep:
    """A named list of comparisons, in the order in which they run."""

    name: str
    description: str
    comparisons: tuple[Comparison, ...]

    @property
    def needs_cache(self) -> bool:
        """Whether some comparison reads structures from an EvoPipe cache."""
        settings = [comparison.setting for comparison in self.comparisons]
        return any(setting.data == "cache" or setting.what == "data_pipeline" for setting in settings)


def sweep_names() -> tuple[str, ...]:
    """The sweeps that the project ships, by name."""
    return tuple(sorted(path.stem for path in SWEEPS.glob("*.yaml")))


def load_sweep(name: str, *, size: str = "full", settings: Iterable[str] = (), folder: Path | None = None) -> Sweep:
    """Resolve a sweep.

    Args:
        name: a shipped sweep, or the path of a YAML file.
        size: "full", or a key under `sizes:` of the file whose entries replace those of the file.
        settings: `key=value` overrides, values in YAML; shape keys need no prefix (`n_tokens=[64,128]`), and
            `contenders=[eager,megafold]` keeps the named ones.
        folder: where named sweeps are looked up (the shipped ones by default).

    Raises:
        InputError: for an unknown sweep, key, provider, plan switch, model or size, or a value of the wrong kind.
    """
    path = Path(name) if name.endswith((".yaml", ".yml")) else (folder or SWEEPS) / f"{name}.yaml"
    if not path.is_file():
        raise InputError(path, "", f"no such sweep; there are {', '.join(sweep_names())}")
    content = read_yaml(path)
    sizes = _mapping(path, "sizes", content.pop("sizes", {}))
    if size != "full":
        if size not in sizes:
            raise InputError(path, f"sizes.{size}", f"unknown size; there are {', '.join(['full', *sizes])}")
        content = _merged(content, _mapping(path, f"sizes.{size}", sizes[size]))
    for setting in settings:
        content = _override(path, content, setting)
    return _resolve(path, content)


def read_yaml(path: Path) -> dict[str, Any]:
    """The mapping in a YAML file; InputError where it is missing, not YAML, or no mapping."""
    try:
        content = yaml.safe_load(Path(path).read_text())
    except OSError as error:
        raise InputError(path, "", f"cannot be read: {error.strerror or error}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(path, "", f"is not valid YAML: {error}") from error
    return dict(_mapping(path, "", {} if content is None else content))


def comparison_from_dict(content: Mapping[str, Any], file: str | Path) -> Comparison:
    """Read back `Comparison.as_dict`; InputError names the field that is missing, unknown or wrong."""
    content = dict(content)
    contenders = content.pop("contenders", None)
    if not isinstance(contenders, list) or not contenders:
        raise InputError(file, "contenders", "is missing or empty")
    return Comparison(_setting(file, content), tuple(_contender(file, entry) for entry in contenders))


def point_from_dict(content: Mapping[str, Any], file: str | Path) -> Point:
    """Read back `Point.as_dict`; InputError names the field that is missing, unknown or wrong."""
    content = dict(content)
    contender = _contender(file, content.pop("contender", None))
    return Point(_setting(file, content), contender)


def _resolve(path: Path, content: dict[str, Any]) -> Sweep:
    from experiments.providers import provider_names

    what = content.pop("what", None)
    if what not in SHAPE_KEYS:
        raise InputError(path, "what", f"is {what!r}; allowed: {', '.join(SHAPE_KEYS)}")
    description = content.pop("description", "")
    shape = {**SHAPE_KEYS[what], **_mapping(path, "shape", content.pop("shape", {}))}
    for key, value in shape.items():
        if key not in SHAPE_KEYS[what]:
            raise InputError(path, f"shape.{key}", f"unknown key; allowed: {', '.join(SHAPE_KEYS[what])}")
        if value is None:
            raise InputError(path, f"shape.{key}", "is missing")
    contenders = _contenders(path, content.pop("contenders", None), provider_names(what))
    protocol = _protocol(path, content.pop("protocol", {}))
    cache_max = content.pop("cache_max_tokens", None)
    if cache_max is not None:
        _count(path, "cache_max_tokens", cache_max)
    defaults = {"workload": WORKLOADS[what][0], "model": "paper" if what == "iteration" else "", "data": "synthetic"}
    axes = {**defaults, "variant": "", "dtype": "bf16", "sp": 1, "dp": 1, "seed": 0, "mode": "measured"}
    for key in content:
        if key not in axes:
            allowed = ["what", "description", "shape", "contenders", "protocol", "cache_max_tokens", "sizes", *axes]
            raise InputError(path, str(key), f"unknown key; allowed: {', '.join(allowed)}")
    axes |= content
    names = [*axes, *shape]
    choices = [_listed(axes[key]) for key in axes] + [_listed(shape[key]) for key in shape]
    comparisons = []
    for values in itertools.product(*choices):
        chosen = dict(zip(names, values))
        sizes = {key: chosen.pop(key) for key in shape}
        entry = {"sweep": path.stem, "what": what, **chosen, "shape": sizes, "protocol": asdict(protocol)}
        setting = _setting(path, entry)
        if setting.data != "cache" or cache_max is None or sizes.get("n_tokens", 0) <= cache_max:
            present = tuple(contender for contender, only in contenders if not only or setting.workload in only)
            comparisons += [Comparison(setting, present)] if present else []
    return Sweep(path.stem, " ".join(str(description).split()), tuple(dict.fromkeys(comparisons)))


def _contenders(path: Path, content: Any, providers: Sequence[str]) -> list[tuple[Contender, list[str]]]:
    """Each contender, and the workloads that it is measured on (none: all)."""
    from megafold.model.plan import Plan

    entries = _mapping(path, "contenders", content)
    if not entries:
        raise InputError(path, "contenders", "is missing or empty")
    found = []
    for name, entry in entries.items():
        where = f"contenders.{name}"
        entry = _mapping(path, where, {} if entry is None else entry)
        unknown = set(entry) - {"provider", "plan", "workloads"}
        if unknown:
            raise InputError(path, f"{where}.{sorted(unknown)[0]}", "unknown key; allowed: provider, plan, workloads")
        provider = entry.get("provider", name)
        if provider not in providers:
            problem = f"unknown provider {provider!r}; there are {', '.join(providers)}"
            raise InputError(path, f"{where}.provider", problem)
        plan = _mapping(path, f"{where}.plan", entry.get("plan", {}))
        switches = Plan.from_mapping(plan, file=f"{path}: {where}.plan").as_dict()
        if plan or provider == "megafold":  # all of them: another default is another point, not the same one again
            plan = switches
        workloads = _listed(entry.get("workloads", []))
        for workload in workloads:
            if all(workload not in names for names in WORKLOADS.values()):
                raise InputError(path, f"{where}.workloads", f"{workload!r} is not a workload")
        found.append((Contender(str(name), provider, tuple(sorted(plan.items()))), workloads))
    return found


def _setting(file: str | Path, content: Mapping[str, Any]) -> Setting:
    from megafold.model.presets import preset

    content = dict(content)
    known = {entry.name for entry in fields(Setting)}
    for key in content:
        if key not in known:
            raise InputError(file, str(key), f"unknown key; allowed: {', '.join(sorted(known))}")
    for key in sorted(known):
        if key not in content:
            raise InputError(file, key, "is missing")
    what = content["what"]
    choices = {"what": tuple(SHAPE_KEYS), "dtype": DTYPES, "data": DATA, "mode": MODES}
    choices["workload"] = WORKLOADS.get(what, ())
    for key, allowed in choices.items():
        if content[key] not in allowed:
            raise InputError(file, key, f"is {content[key]!r}; allowed: {', '.join(allowed)}")
    if what == "iteration":
        try:
            preset(content["model"])
        except InputError as error:
            raise InputError(file, "model", error.problem) from error
    for key in ("sp", "dp"):
        _count(file, key, content[key])
    shape = _mapping(file, "shape", content["shape"])
    for key, value in shape.items():
        _count(file, f"shape.{key}", value, least=0 if key in ZERO_ALLOWED else 1)
    content["shape"] = tuple(shape.items())
    content["protocol"] = _protocol(file, content["protocol"])
    return Setting(**content)


def _contender(file: str | Path, content: Any) -> Contender:
    entry = _mapping(file, "contender", content)
    if set(entry) != {"name", "provider", "plan"}:
        raise InputError(file, "contender", f"has keys {sorted(entry)}; wanted: name, plan, provider")
    plan = _mapping(file, "contender.plan", entry["plan"])
    return Contender(entry["name"], entry["provider"], tuple(sorted(plan.items())))


def _protocol(file: str | Path, content: Any) -> Protocol:
    entries = _mapping(file, "protocol", content)
    known = [entry.name for entry in fields(Protocol)]
    for key, value in entries.items():
        if key not in known:
            raise InputError(file, f"protocol.{key}", f"unknown key; allowed: {', '.join(known)}")
        _count(file, f"protocol.{key}", value, least=0 if key == "warmup" else 1)
    return replace(Protocol(), **entries)


def _override(path: Path, content: dict[str, Any], setting: str) -> dict[str, Any]:
    key, equals, text = setting.partition("=")
    if not equals:
        raise InputError("--set", setting, "has no '='; wanted: key=value")
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InputError("--set", key, f"{text!r} is not valid YAML") from error
    if key == "contenders":
        present = _mapping(path, "contenders", content.get("contenders", {}))
        for name in _listed(value):
            if name not in present:
                problem = f"{name!r} is not a contender of {path.stem}; there are {', '.join(present)}"
                raise InputError("--set", key, problem)
        return {**content, "contenders": {name: present[name] for name in _listed(value)}}
    keys = SHAPE_KEYS.get(content.get("what", ""), {})
    nested = "shape" if key in keys else "protocol" if key in {entry.name for entry in fields(Protocol)} else ""
    if nested:
        return _merged(content, {nested: {key: value}})
    axes = [entry.name for entry in fields(Setting) if entry.name not in ("sweep", "what", "shape", "protocol")]
    if key not in axes:
        allowed = ", ".join([*keys, *axes, "contenders", *(entry.name for entry in fields(Protocol))])
        raise InputError("--set", key, f"unknown key; allowed: {allowed}")
    return {**content, key: value}


def _merged(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    nested = {"shape", "protocol"}
    both = {key: {**base.get(key, {}), **value} if key in nested else value for key, value in over.items()}
    return {**base, **both}


def _mapping(file: str | Path, where: str, content: Any) -> Mapping[str, Any]:
    if not isinstance(content, Mapping):
        raise InputError(file, where, f"is {type(content).__name__}; wanted: a mapping")
    return content


def _count(file: str | Path, where: str, value: Any, least: int = 1) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(file, where, f"is {value!r}; wanted: a whole number of at least {least}")


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]


def _plain(thing: Setting | Contender) -> dict[str, Any]:
    content = asdict(thing)
    return {key: dict(value) if key in ("shape", "plan") else value for key, value in content.items()}


def _digest(content: Mapping[str, Any]) -> str:
    content = {**content, "protocol": {key: value for key, value in content["protocol"].items() if key != "timeout_s"}}
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:8]
