"""Contenders by name: who can be measured, and what a measurement asks of them. This module does not load torch.

A provider is a function that turns a `Context` into a `Session`; it is registered by the decorator `provider` and
imports what it needs inside. Modules named in the environment variable MEGAFOLD_PROVIDERS (separated by commas) are
imported before a look-up, so a contender can live outside this project.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from experiments.record import Metric
from experiments.spec import Point


class Unsupported(Exception):
    """This contender cannot run this point on this device; the message is the reason, in one line."""


@dataclass(frozen=True)
class Context:
    """What a provider is given: the point, the EvoPipe cache (or None) and the device, "cpu" or "cuda".

    `meeting` names the store's part where the ranks of a point meet, if there are several. `contenders` is how many are
    set up side by side, this one included.
    """

    point: Point
    cache: Path | None
    device: str
    meeting: str = ""
    contenders: int = 1


class Session(Protocol):
    """A contender that is set up for one point. It is visited several times; between visits it leaves the device.

    It may have `notes`, lines that a reader of its record has to know; they go into the provenance. It may have `stay`,
    which ends a visit in place of `suspend` where nobody needs the memory that it keeps, and with it `memory`: "peak",
    "held" by one who stays, and "device", in bytes, or None where that is not known.
    """

    def resume(self) -> None:
        """Take the device and start from the first example, with the point's seed."""

    def step(self) -> Mapping[str, float]:
        """One repetition: numbers by name, in the units that `finish` gives them."""

    def suspend(self) -> None:
        """Leave the device to the next contender."""

    def finish(self, samples: Mapping[str, Sequence[float]]) -> Mapping[str, Metric]:
        """The metrics, from the timed repetitions of all visits."""


@dataclass(frozen=True)
class Provider:
    """A registered contender: `open` builds the session, `preload` names modules whose import takes long.

    `environment` is set in its process before those are imported, where the user has not set it.
    """

    what: str
    name: str
    open: Callable[[Context], Session]
    preload: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()


_REGISTRY: dict[tuple[str, str], Provider] = {}


def provider(
    what: str,
    name: str,
    *,
    preload: tuple[str, ...] = ("torch",),
    environment: tuple[tuple[str, str], ...] = (),
) -> Callable:
    """Register the decorated function as the contender `name` of measurements of kind `what`."""

    def register(function: Callable[[Context], Session]) -> Callable[[Context], Session]:
        _REGISTRY[what, name] = Provider(what, name, function, preload, environment)
        return function

    return register


def provider_names(what: str) -> tuple[str, ...]:
    """The contenders of a kind of measurement, in the order in which they were registered."""
    _import_plugins()
    return tuple(name for kind, name in _REGISTRY if kind == what)


def find_provider(what: str, name: str) -> Provider:
    """The registered contender; Unsupported where there is none of that name."""
    _import_plugins()
    if (what, name) not in _REGISTRY:
        raise Unsupported(f"no provider {name!r} for {what}; there are {', '.join(provider_names(what))}")
    return _REGISTRY[what, name]


def _import_plugins() -> None:
    for module in filter(None, os.environ.get("MEGAFOLD_PROVIDERS", "").split(",")):
        importlib.import_module(module.strip())


STOCK = ("torch", "alphafold3_pytorch")
# Whole steps on one device, all contenders alike: memory that is free in pieces counts as free. The stock step at
# N = 512 held 122 of 140 GiB, asked for 6 more, and 14 were free in pieces. Not for ranks: NCCL registers memory.
WHOLE = (("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),)


@provider("iteration", "eager", preload=STOCK, environment=WHOLE)
def iteration_eager(context: Context) -> Session:
    """alphafold3-pytorch as it is."""
    from experiments.contenders.iteration import IterationSession

    return IterationSession(context)


@provider("iteration", "compile", preload=STOCK, environment=WHOLE)
def iteration_compile(context: Context) -> Session:
    """alphafold3-pytorch with torch.compile on the layers of its large stacks."""
    from experiments.contenders.compiled import compile_stacks
    from experiments.contenders.iteration import IterationSession

    return IterationSession(context, compile_stacks)


@provider("iteration", "megafold", preload=STOCK, environment=WHOLE)
def iteration_megafold(context: Context) -> Session:
    """The stock model with MegaFold's computation, as the contender's plan says (empty: the default plan)."""
    from experiments.contenders.iteration import IterationSession, megafold_preparation

    return IterationSession(context, megafold_preparation(context.point.contender, context.point.setting.workload))


@provider("iteration", "sequence_parallel", preload=STOCK)
def iteration_sequence_parallel(context: Context) -> Session:
    """MegaFold with EvoSP-3D over the point's sp x dp ranks; `mode: emulated` runs one of them on one device."""
    from experiments.contenders.sequence_parallel import SequenceParallelSession

    return SequenceParallelSession(context)


@provider("data_pipeline", "stock", preload=STOCK)
def data_stock(context: Context) -> Session:
    """alphafold3-pytorch's own path: parse mmCIF and alignments, crop and featurise, for each example anew."""
    from experiments.contenders.data_pipeline import DataSession

    return DataSession(context, way="stock")


@provider("data_pipeline", "evopipe", preload=STOCK)
def data_evopipe(context: Context) -> Session:
    """The HDF5 cache: read, crop, subsample."""
    from experiments.contenders.data_pipeline import DataSession

    return DataSession(context, way="evopipe")


def _bare(way: str) -> None:
    @provider("data_pipeline", way)
    def open_bare(context: Context) -> Session:
        from experiments.contenders.data_pipeline import DataSession

        return DataSession(context, way=way)


for _way in ("bare_read", "hdf5_read"):  # what reading the same crops costs where nothing is made of them
    _bare(_way)


def _kernel(name: str) -> None:
    @provider("kernel", name)
    def open_kernel(context: Context) -> Session:
        if context.point.setting.workload.startswith("triangle_attention"):
            from experiments.contenders.kernels import KernelSession

            return KernelSession(context)
        from experiments.contenders.operators import OperatorSession

        return OperatorSession(context)


_ATTENTIONS = ("eager", "sdpa", "compile", "evoflash3d", "trifast", "cuequivariance", "openfold3", "protenix")
for _name in (*_ATTENTIONS, "evofusion", "liger"):
    _kernel(_name)
