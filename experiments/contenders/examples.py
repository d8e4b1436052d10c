"""Examples of the iteration contenders: one random structure, or real crops through the loader; the same for all."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from experiments.providers import Unsupported
from experiments.spec import Setting
from megafold.model.presets import preset
from megafold.train.synthetic import synthetic_batch

LOADER_WORKERS = 4

Batch = Mapping[str, Any]


def examples(setting: Setting, cache: Path | None, device: str) -> tuple[Callable[[], Iterator[Batch]], list[str]]:
    """A function that starts the examples anew, always the same ones in the same order; and notes for the record."""
    if setting.data == "cache":
        return _cached(setting, cache, device)
    batch = synthetic_batch(
        setting.size("n_tokens"),
        atoms_per_token=setting.size("atoms_per_token"),
        msa_depth=setting.size("msa_depth"),
        templates=setting.size("templates"),
        workload=setting.workload,
        seed=setting.seed,
        model_kwargs=preset(setting.model),
    )

    def repeat() -> Iterator[Batch]:
        while True:
            yield batch

    return repeat, []


def _cached(setting: Setting, cache: Path, device: str) -> tuple[Callable[[], Iterator[Batch]], list[str]]:
    """Crops of exactly N tokens of structures that are long enough: one pass of the loader is one visit."""
    from megafold.evopipe.cache import StructureCache
    from megafold.evopipe.expand import expand
    from megafold.evopipe.loader import make_loader

    wanted, protocol = setting.size("n_tokens"), setting.protocol
    with StructureCache(cache) as present:
        lengths = {name: int(present.row(name)["tokens"]) for name in present.names}
        rows = {name: min(present.msa_depth(name), setting.size("msa_depth")) for name in lengths}
    # Those with the deepest alignments first: they load the MSA module as training does.
    long_enough = sorted((name for name in lengths if lengths[name] >= wanted), key=lambda name: (-rows[name], name))
    names = long_enough[: protocol.repeats * setting.size("batch_size")]
    if not names:
        longest = max(lengths.values(), default=0)
        raise Unsupported(f"no structure in the cache has {wanted} tokens; the longest has {longest}")
    steps = protocol.warmup + protocol.repeats
    loader = make_loader(
        cache,
        crop_size=wanted,
        msa_depth=setting.size("msa_depth"),
        batch_size=setting.size("batch_size"),
        # Beside a GPU the loader works ahead; on a CPU it would take the cores of what is measured.
        workers=0 if device == "cpu" else max(1, min(LOADER_WORKERS, len(os.sched_getaffinity(0)) - 1)),
        seed=setting.seed,
        entries=[names[at % len(names)] for at in range(steps * setting.size("batch_size"))],
        labels=setting.workload != "core",
        shuffle=False,
        compact=True,
    )

    def again() -> Iterator[Batch]:
        while True:
            for batch in loader:  # expanded where it is used, not by the main process's CPU
                yield expand({name: value if value is None else value.to(device) for name, value in batch.items()})

    return again, [f"structures: {', '.join(names)}"]
