"""The configuration of `megafold train`: one YAML file, read strictly and without importing torch."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import yaml

from megafold.errors import InputError
from megafold.model.plan import Plan
from megafold.model.presets import PRESETS
from megafold.train.optimizer import OptimizerSettings
from megafold.train.settings import limited, parse
from megafold.train.workload import WORKLOADS


@dataclass(frozen=True)
class ModelConfig:
    """A preset of `megafold.model.presets` and constructor arguments laid over it (nested mappings are merged)."""

    preset: str = limited("demo", choices=tuple(PRESETS))
    overrides: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class SyntheticConfig:
    """Sizes of random structures, for a run without a cache (see `megafold.train.synthetic`)."""

    n_tokens: int = limited(64, least=4)
    atoms_per_token: int = limited(8, least=3)
    templates: int = limited(1, least=0)
    structures: int = limited(4, least=1)


@dataclass(frozen=True)
class DataConfig:
    """Where the examples come from: an EvoPipe cache, or random structures; exactly one of them.

    Attributes:
        cache: HDF5 file that `megafold cache build` wrote; relative to the working directory.
        crop_size: tokens kept of a larger structure.
        msa_depth: alignment rows drawn for a step.
        entries: names of cached entries to use; all of them when left out.
        clusters: tables of clusters (CSV, see `megafold.evopipe.clusters`) that weight entries, chains and interfaces.
    """

    cache: Path | None = None
    synthetic: SyntheticConfig | None = None
    crop_size: int = limited(384, least=4)
    msa_depth: int = limited(512, least=1)
    batch_size: int = limited(1, least=1)
    workers: int = limited(0, least=0)
    entries: tuple[str, ...] | None = None
    clusters: tuple[str, ...] | None = None
    shuffle: bool = True


@dataclass(frozen=True)
class CheckpointConfig:
    """Save every ``every`` steps (and when the run is told to stop), and keep the last ``keep`` files."""

    every: int = limited(500, least=1)
    keep: int = limited(3, least=1)


@dataclass(frozen=True)
class ParallelConfig:
    """How the ranks that the run was started with work together.

    Attributes:
        sp: ranks that share a structure (sequence parallel); the others are data-parallel replicas, each with a batch
            of its own, so that the global batch is ``data.batch_size`` times ranks / sp.
        timeout_s: a collective that takes longer ends the run.
    """

    sp: int = limited(1, least=1)
    timeout_s: int = limited(600, least=1)


@dataclass(frozen=True)
class TrainConfig:
    """Everything that a run depends on.

    Attributes:
        output: folder for checkpoints and the log; a run resumes from what it finds there.
        steps: optimizer steps of the whole run, those before a resume included.
        workload: see `megafold.train.workload`.
        confidence_every: the confidence head is trained at each so-manieth step; 0: as often as the workload says.
        plan: which parts MegaFold computes (see `megafold.model.plan`); ``none`` for the stock model.
        device: ``auto`` takes a GPU if there is one.
        dtype: of autocast; ``auto`` is bf16 on a GPU and fp32 on a CPU.
        tf32: fp32 matrix products of a GPU may round their inputs to tf32.
        max_skipped_in_a_row: the run ends with an error after so many steps in a row without a finite gradient.
        file: where the configuration was read, for errors.
    """

    output: Path
    steps: int = limited(least=1)
    data: DataConfig = field(default_factory=DataConfig)
    model: ModelConfig = field(default_factory=ModelConfig)
    workload: str = limited("core", choices=WORKLOADS)
    confidence_every: int = limited(0, least=0)
    plan: Plan = field(default_factory=Plan)
    optimizer: OptimizerSettings = field(default_factory=OptimizerSettings)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    seed: int = limited(0, least=0, most=2**32 - 1)
    device: str = limited("auto", choices=("auto", "cpu", "cuda"))
    dtype: str = limited("auto", choices=("auto", "bf16", "fp32"))
    tf32: bool = True
    max_skipped_in_a_row: int = limited(10, least=1)
    file: str = field(default="", metadata={"internal": True})

    def trajectory(self) -> dict[str, Any]:
        """What decides the weights after a given number of steps, as plain values; a resume must not change it."""
        free = ("output", "steps", "checkpoint", "parallel", "file", "max_skipped_in_a_row")
        chosen = {name: value for name, value in asdict(self).items() if name not in free}
        chosen["data"].pop("workers")
        if self.data.clusters is None:
            chosen["data"].pop("clusters")
        if not self.confidence_every:  # runs from before it could be set go on
            chosen.pop("confidence_every")
        return json.loads(json.dumps(chosen, default=str))

    def digest(self) -> str:
        """SHA-256 of :meth:`trajectory`."""
        return hashlib.sha256(json.dumps(self.trajectory(), sort_keys=True).encode()).hexdigest()


def load_config(path: Path | str) -> TrainConfig:
    """Read a configuration.

    Raises:
        InputError: for a file that is missing or no YAML, an unknown setting, a wrong type, an impossible value.
    """
    path = Path(path)
    try:
        mapping = yaml.safe_load(path.read_text())
    except OSError as error:
        raise InputError(path, "", error.strerror or str(error)) from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise InputError(path, "", f"not YAML: {error}") from None
    return config_from_mapping(mapping, str(path))


def config_from_mapping(mapping: Any, file: str = "config") -> TrainConfig:
    """A configuration from the content of a file; errors name ``file``.

    Raises:
        InputError: as :func:`load_config`.
    """
    if not isinstance(mapping, dict):
        raise InputError(file, "", "expected a mapping of settings")
    mapping = dict(mapping)
    given = mapping.pop("plan", None)
    plan = Plan.none() if given == "none" else _plan(given, file)
    config = replace(parse(TrainConfig, mapping, file), plan=plan, file=file)
    if (config.data.cache is None) == (config.data.synthetic is None):
        raise InputError(file, "data", "expected either cache (an HDF5 file) or synthetic (sizes), one of them")
    return config


def _plan(given: Any, file: str) -> Plan:
    try:
        return Plan.from_mapping(given, file)
    except InputError as error:
        raise InputError(file, f"plan.{error.field}" if error.field else "plan", error.problem) from None
