"""Seconds an example, from a structure to the model's input: the stock path against the EvoPipe cache."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from experiments.providers import Context, Unsupported
from experiments.record import Metric
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.measure import read_cached_example, read_stock_example, stage_for_stock
from megafold.evopipe.source_file import read_source
from megafold.metrics.timing import summarize

MIB = 2**20
DISK = {
    True: "compressed datasets of the entries measured, mean",
    False: "uncompressed mmCIF and A3M files of the entries measured, mean",
}


class DataSession:
    """Reads the same crops of the same entries, in turn, through one of the two paths.

    Raises:
        Unsupported: none of the cache's entries has its files any more (stock path).
    """

    def __init__(self, context: Context, *, cached: bool) -> None:
        setting = context.point.setting
        self._cache, self._cached, self._seed = context.cache, cached, setting.seed
        self._crop_size, self._msa_depth = setting.size("crop_size"), setting.size("msa_depth")
        with StructureCache(context.cache) as present:
            entries = present.entries()
        self._source = read_source(context.cache)
        # Both paths need the files here, so that both leave out the same entries.
        files = self._source.files()
        self._entries = [name for name in entries if name in files][: setting.size("examples")]
        if not self._entries:
            raise Unsupported(f"none of the cache's entries is among the files in {self._source.name}")
        self._disk = self._bytes_on_disk()
        self._turn: Iterator[str] = iter(())

    def resume(self) -> None:
        """Start from the first entry."""
        self._turn = itertools.cycle(self._entries)

    def step(self) -> dict[str, float]:
        """One example: seconds, and bytes of its tensors."""
        entry = next(self._turn)
        started = time.perf_counter()
        example = self._read(entry)
        seconds = time.perf_counter() - started
        return {"example_time": seconds, "bytes": float(_tensor_bytes(example))}

    def suspend(self) -> None:
        """Nothing is kept between examples."""

    def finish(self, samples: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
        """Time (s) and bytes (MiB) an example."""
        times, sizes = summarize(samples["example_time"]), summarize(samples["bytes"])
        text = f"crop of {self._crop_size} tokens, {self._msa_depth} alignment rows; entries in turn, page cache warm"
        in_memory = "tensors of one example before collation"
        return {
            "example_time": Metric(times.median, "s", times.p20, times.p80, times.n, text),
            "example_memory": Metric(sizes.median / MIB, "MiB", sizes.p20 / MIB, sizes.p80 / MIB, sizes.n, in_memory),
            "disk_per_example": Metric(self._disk / MIB, "MiB", definition=DISK[self._cached]),
        }

    def _read(self, entry: str) -> Any:
        if self._cached:
            return read_cached_example(self._cache, entry, self._crop_size, self._msa_depth, self._seed)
        return read_stock_example(self._source, entry, self._crop_size, self._msa_depth, self._seed)

    def _bytes_on_disk(self) -> float:
        if self._cached:
            with StructureCache(self._cache) as reader:
                stored = [int(reader.row(entry)["bytes"]) for entry in self._entries]
            return sum(stored) / len(stored)
        root = stage_for_stock(self._source)
        files = [path for path in root.rglob("*") if path.is_file()]
        wanted = [path for path in files if any(path.name.startswith(entry) for entry in self._entries)]
        return sum(path.stat().st_size for path in wanted) / len(self._entries)


def _tensor_bytes(example: Any) -> int:
    values = vars(example).values() if hasattr(example, "__dict__") else ()
    return sum(value.numel() * value.element_size() for value in values if torch.is_tensor(value))
