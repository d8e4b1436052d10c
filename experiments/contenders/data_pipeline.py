"""Seconds an example, from a structure to the model's input: the stock path against the EvoPipe cache.

Two more rows say what reading alone takes: the stored blocks of the same crops, read and decompressed by the shortest
way, and the same datasets whole, as any program reads them with the HDF5 library. Neither makes an example.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch

from experiments.providers import Context, Unsupported
from experiments.record import Metric
from megafold.evopipe.expand import expand
from megafold.evopipe.loader import CachedStructures
from megafold.evopipe.measure import (
    blocks_of,
    processor_seconds,
    read_blocks,
    read_cached_example,
    read_stock_example,
    read_with_hdf5,
    stage_for_stock,
)
from megafold.evopipe.source_file import read_source
from megafold.metrics.timing import summarize

MIB = 2**20
DISK = {
    True: "compressed datasets of the entries measured, mean",
    False: "uncompressed mmCIF and A3M files of the entries measured, mean",
}
MEMORY = {False: "tensors of one example before collation", True: "what was decompressed"}


class DataSession:
    """Reads the same crops of the same entries, in turn, in one of four ways.

    The cache's example is what leaves a loader's worker: compact. What the device then does with it, and what no reader
    could do without, are timed apart, after it.

    Args:
        way: `stock`; `evopipe`; `bare_read` or `hdf5_read`, which read what evopipe reads and make nothing of it.

    Raises:
        Unsupported: none of the cache's entries has its files any more (stock path).
    """

    def __init__(self, context: Context, *, way: str) -> None:
        setting = context.point.setting
        self._cache, self._way, self._seed = context.cache, way, setting.seed
        self._crop_size, self._msa_depth = setting.size("crop_size"), setting.size("msa_depth")
        self._device = torch.device(context.device)
        self._dataset = CachedStructures(
            context.cache, crop_size=self._crop_size, msa_depth=self._msa_depth, seed=setting.seed
        )
        self._source = read_source(context.cache)
        # Both paths need the files here, so that both leave out the same entries.
        files = self._source.files()
        self._entries = [name for name in self._dataset.entries if name in files][: setting.size("examples")]
        if not self._entries:
            raise Unsupported(f"none of the cache's entries is among the files in {self._source.name}")
        self._disk = self._bytes_on_disk()
        self._ways: dict[str, Callable[[str], Any]] = {
            "stock": lambda entry: read_stock_example(
                self._source, entry, self._crop_size, self._msa_depth, self._seed
            ),
            "evopipe": lambda entry: read_cached_example(self._dataset, entry),
            "bare_read": lambda _: read_blocks(self._blocks),
            "hdf5_read": lambda entry: read_with_hdf5(self._dataset, entry),
        }
        self._turn: Iterator[str] = iter(())

    def resume(self) -> None:
        """Start from the first entry."""
        self._turn = itertools.cycle(self._entries)

    def step(self) -> dict[str, float]:
        """One example: seconds, and bytes of its tensors."""
        entry = next(self._turn)
        self._blocks = blocks_of(self._dataset, entry) if self._way in ("evopipe", "bare_read") else []
        started = time.perf_counter()
        example = self._ways[self._way](entry)
        sample = {"example_time": time.perf_counter() - started, "bytes": float(_bytes(example))}
        return sample | self._around(entry, example) if self._way == "evopipe" else sample

    def _around(self, entry: str, example: dict[str, Any]) -> dict[str, float]:
        whole, bare_cpu, own_cpu = processor_seconds(self._dataset, entry)
        bare, _ = _timed(lambda: read_blocks(self._blocks))
        library, _ = _timed(lambda: read_with_hdf5(self._dataset, entry))
        batch = {name: _batched(value, self._device) for name, value in example.items()}
        self._wait()
        expanding, expanded = _timed(lambda: (expand(batch), self._wait())[0])
        size = float(_bytes(expanded))
        processor = {"example_cpu": whole, "bare_cpu": bare_cpu, "own_cpu": own_cpu}
        processor |= {"over_bare": whole / max(bare_cpu, 1e-9), "over_own": whole / max(own_cpu, 1e-9)}
        return processor | {"bare_read": bare, "hdf5_read": library, "expand": expanding, "expanded_bytes": size}

    def suspend(self) -> None:
        """Nothing is kept between examples."""

    def finish(self, samples: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
        """Time (s) and bytes (MiB) an example; for the cache also what surrounds it."""
        text = f"crop of {self._crop_size} tokens, {self._msa_depth} alignment rows; entries in turn, page cache warm"
        in_memory = MEMORY[self._way.endswith("_read")]
        found = {
            "example_time": _metric(samples["example_time"], "s", text),
            "example_memory": _metric(samples["bytes"], "MiB", in_memory, 1 / MIB),
            "disk_per_example": Metric(self._disk / MIB, "MiB", definition=DISK[self._way != "stock"]),
        }
        if self._way == "evopipe":
            device = f"one-hot and pair features of one example on the device ({self._device.type})"
            found["bare_read_time"] = _metric(
                samples["bare_read"], "s", "pread and inflate (zlib) of the same blocks alone"
            )
            text = "of the process, for one example, all threads"
            found["example_processor_time"] = _metric(samples["example_cpu"], "s", text)
            for key, name, library in (("bare", "bare_read", "zlib"), ("own", "own_read", "the reader's library")):
                text = f"of the process, for pread and inflate of the same blocks alone, with {library}"
                found[f"{name}_processor_time"] = _metric(samples[f"{key}_cpu"], "s", text)
                text = f"example_processor_time by {name}_processor_time, one example at a time"
                found[f"processor_time_over_{name}"] = _metric(samples[f"over_{key}"], "x", text)
            found["hdf5_read_time"] = _metric(samples["hdf5_read"], "s", "the same datasets through the HDF5 library")
            found["expand_time"] = _metric(samples["expand"], "s", device)
            found["expanded_memory"] = _metric(samples["expanded_bytes"], "MiB", "the example expanded", 1 / MIB)
        return found

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _bytes_on_disk(self) -> float:
        if self._way != "stock":
            stored = [int(self._dataset.cache.row(entry)["bytes"]) for entry in self._entries]
            return sum(stored) / len(stored)
        root = stage_for_stock(self._source)
        files = [path for path in root.rglob("*") if path.is_file()]
        wanted = [path for path in files if any(path.name.startswith(entry) for entry in self._entries)]
        return sum(path.stat().st_size for path in wanted) / len(self._entries)


def _timed(action: Callable[[], Any]) -> tuple[float, Any]:
    started = time.perf_counter()
    result = action()
    return time.perf_counter() - started, result


def _metric(values: Sequence[float], unit: str, definition: str, factor: float = 1.0) -> Metric:
    found = summarize([value * factor for value in values])
    return Metric(found.median, unit, found.p20, found.p80, found.n, definition)


def _batched(value: Any, device: torch.device) -> Any:
    return value[None].to(device) if torch.is_tensor(value) else value


def _bytes(example: Any) -> int:
    """Of the tensors or arrays of an example; a reader that keeps nothing has counted them."""
    if isinstance(example, int):
        return example
    fields = example if isinstance(example, dict) else getattr(example, "__dict__", {})
    return sum(value.nbytes for value in fields.values() if hasattr(value, "nbytes"))
