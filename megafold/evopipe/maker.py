"""Making entries, one after another, into a shard of one's own: what every process of a build does."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megafold.errors import InputError
from megafold.evopipe import cache, identity, shards
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.report import Finding, failed
from megafold.evopipe.shards import Shard, StorageError
from megafold.evopipe.sources import DataSource

# A shard is written when it is large enough, or when this much work would be lost with it: at least 15 s, and a tenth
# of what has been done, so that a long build does not end in a multitude of small files.
SEAL_SECONDS, SEAL_SHARE = 15.0, 0.1
PREPARING, READY = "preparing", "ready"


@dataclass
class Made:
    """What became of one entry.

    Args:
        status: `built`, `unchanged` or `failed`.
        findings: of this build (none where it is unchanged).
        seconds: that it took.
        sealed: is everything up to here on the disk?
        error: the exception behind `failed`, where there is one.
    """

    name: str
    status: str
    findings: tuple[Finding, ...] = ()
    seconds: float = 0.0
    sealed: bool = False
    error: InputError | None = field(default=None, compare=False)


class Maker:
    """Featurises structures of a source into shards of a cache.

    Args:
        source: with its files present.
        out: the cache; its index and the shards that are not in it yet say what need not be made.
        msa_depth: alignment rows kept, None for all.
        known: entry -> content address, of finished shards that the index does not list.
        tell: is told PREPARING and READY, before and after what a process does once, before its first structure.
    """

    def __init__(
        self,
        source: DataSource,
        out: Path,
        msa_depth: int | None,
        known: dict[str, str],
        tell: Callable[[str], None] = lambda _: None,
    ) -> None:
        self.source, self.msa_depth, self.known, self.tell = source, msa_depth, known, tell
        self.cache = StructureCache(out)
        self.shard = Shard(shards.folder_of(out), msa_depth or 0)
        self.began = time.monotonic()
        self._ready = False

    def make(self, name: str, path: Path) -> Made:
        """Make one entry, or find that it is there and sound. Only a StorageError is raised."""
        started = time.monotonic()
        try:
            made = self._make(name, path)
        except StorageError:
            raise
        except Exception as error:  # whatever the parsers raise for one structure must not end the build of the others
            bad = error if isinstance(error, InputError) else InputError(path, "", f"{type(error).__name__}: {error}")
            made = Made(name, "failed", (failed(name, path, error),), error=bad)
            self.shard.findings += made.findings
        made.seconds = time.monotonic() - started
        age = time.monotonic() - self.shard.started
        limit = max(SEAL_SECONDS, SEAL_SHARE * (time.monotonic() - self.began))
        if self.shard.size >= shards.SHARD_BYTES or age >= limit:
            self.shard.seal()
            made.sealed = True
        return made

    def finish(self) -> None:
        """Write what is not on the disk yet."""
        self.shard.seal()
        self.cache.close()

    def _make(self, name: str, path: Path) -> Made:
        from megafold.evopipe.featurize import digests, featurize, inputs_of, options_of

        options = options_of(self.source)
        key = identity.content_key(name, digests(inputs_of(self.source, name, path)), self.msa_depth, options)
        if self._is_there(name, key):
            return Made(name, "unchanged")
        if not self._ready:
            self.tell(PREPARING)
            prepare(self.source)
            self._ready = True
            self.tell(READY)
        entry = featurize(self.source, name, path, msa_depth=self.msa_depth)
        # the files may have changed since they were digested: the entry's own digests are those of what it was made of
        key = identity.content_key(name, entry.sources, self.msa_depth, options)
        self.shard.add(entry, key, {"versions": cache.versions(), "code": identity.code_version()})
        return Made(name, "built", entry.findings)

    def _is_there(self, name: str, key: str) -> bool:
        if self.known.get(name) == key:
            return True
        row = self.cache.index.find(name)
        return row is not None and row["key"].tobytes().hex() == key and not self.cache.problems(name)


def prepare(source: DataSource) -> None:
    """Load the baseline and its component table (some 15 seconds in a fresh process)."""
    from megafold.stock import load_stock

    load_stock()
    from megafold.evopipe import ccd

    ccd.install(source.components)
    from alphafold3_pytorch.inputs import CCD_COMPONENTS_SMILES

    assert "ALA" in CCD_COMPONENTS_SMILES  # reads the dictionary now


def peak_memory() -> float:
    """Largest resident memory of this process so far, MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
