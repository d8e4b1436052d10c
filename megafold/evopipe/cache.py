"""The HDF5 cache: one group per structure, every dataset chunked, compressed and checksummed.

Layout of the file: attributes `schema` and `msa_depth`; group `entries/<id>` with one dataset per array of
`layout.ARRAYS` and the attribute `meta` (JSON: chains, sources, package versions, sha256 of each dataset's bytes). HDF5
checks each chunk's own checksum (Fletcher 32) whenever it is read; the sha256 of every dataset is checked the first
time a process reads the entry. Nothing is ever unpickled. Readers open the file on first use and once per process, so
a reader may be sent to forked and spawned workers.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from megafold.errors import InputError
from megafold.evopipe.layout import ARRAYS, SCHEMA_VERSION, Entry

CHUNK_ROWS, CHUNK_COLUMNS = 256, 256
COMPRESSION = {"compression": "gzip", "compression_opts": 4, "fletcher32": True}
PACKAGES = ("alphafold3-pytorch", "rdkit", "biotite", "gemmi", "numpy", "h5py")
KEPT_ENTRIES = 64  # structures without alignments that a reader keeps in memory
# what h5py raises for a damaged file, by where the damage is
HDF5_ERRORS = (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError)
LAZY = ("msa", "deletions")  # read by rows and columns, the rest as a whole


def versions() -> dict[str, str]:
    """Versions of the packages that the features depend on."""
    found = {}
    for package in PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "absent"
    return found


def digest(array: np.ndarray) -> str:
    """sha256 of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array).data if array.size else b"").hexdigest()


def create(path: Path, *, msa_depth: int | None) -> None:
    """Make an empty cache file, or check that an existing one can take entries of this depth.

    Raises:
        InputError: the file is no cache of this schema, or was built with another `msa_depth`.
    """
    if path.exists():
        with open_cache(path) as file:
            depth = int(file.attrs["msa_depth"])
        if depth != (msa_depth or 0):
            raise InputError(path, "msa_depth", f"was built with {depth or 'all'} rows, asked for {msa_depth or 'all'}")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    with h5py.File(part, "w", libver=("v110", "v110")) as file:
        file.attrs["schema"], file.attrs["msa_depth"] = SCHEMA_VERSION, msa_depth or 0
        file.create_group("entries")
    part.replace(path)


def open_cache(path: Path, mode: str = "r") -> h5py.File:
    """Open a cache file.

    Raises:
        InputError: it is missing, is not HDF5, is truncated, or has another schema.
    """
    if not Path(path).is_file():
        raise InputError(path, "cache", "no such file; `megafold cache build` makes one")
    try:
        file = h5py.File(path, mode, libver=("v110", "v110"))
        schema, complete = file.attrs.get("schema"), "entries" in file and "msa_depth" in file.attrs
    except HDF5_ERRORS as error:
        raise InputError(path, "cache", f"cannot be opened, truncated or not HDF5? ({error})") from error
    if schema != SCHEMA_VERSION or not complete:
        file.close()
        raise InputError(path, "schema", f"{schema} found, this version reads {SCHEMA_VERSION}: build the cache anew")
    return file


def write_entry(file: h5py.File, entry: Entry) -> None:
    """Write (or replace) one entry in an open file; it gets its final name only when it is complete."""
    groups, part = file["entries"], f".{entry.name}.part"
    for name in (part, entry.name):
        if name in groups:
            del groups[name]
    group = groups.create_group(part)
    for name in ARRAYS:
        array = np.ascontiguousarray(entry.arrays[name])
        options: dict[str, Any] = {}
        if array.size:
            limits = (CHUNK_ROWS, CHUNK_COLUMNS) if array.ndim == 2 else (1 << 16,)
            chunks = tuple(min(size, limit) for size, limit in zip(array.shape, limits))
            options = {"chunks": chunks, "shuffle": array.dtype.itemsize > 1, **COMPRESSION}
        group.create_dataset(name, data=array, **options)
    meta = {
        "chains": entry.chains,
        "resolution": entry.resolution,
        "released": entry.released,
        "smiles": entry.smiles,
        "sources": entry.sources,
        "notes": entry.notes,
        "versions": versions(),
        "schema": SCHEMA_VERSION,
        "sha256": {name: digest(entry.arrays[name]) for name in ARRAYS},
    }
    text = json.dumps(meta, sort_keys=True)
    group.attrs["meta"], group.attrs["meta_sha256"] = text, hashlib.sha256(text.encode()).hexdigest()
    groups.move(part, entry.name)


class StructureCache:
    """Reads a cache. Opens the file lazily, once per process; can be pickled.

    Args:
        path: the HDF5 file.
        check: compare every dataset with its sha256 the first time this process reads an entry.

    Raises:
        InputError: from every method, naming the file and the entry, for a missing file, another schema, an unknown
            entry, or data that fails a checksum. Such data is never returned.
    """

    def __init__(self, path: str | os.PathLike[str], *, check: bool = True) -> None:
        self.path, self.check = Path(path), check
        self._reset()

    def _reset(self) -> None:
        self._file, self._process = None, None
        self._small: dict[str, Entry] = {}
        self._last: tuple[str, dict[str, np.ndarray]] = ("", {})  # the alignment that was checked last

    def __getstate__(self) -> dict[str, Any]:
        return {"path": self.path, "check": self.check}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.path, self.check = state["path"], state["check"]
        self._reset()

    def __enter__(self) -> StructureCache:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the file; the next read opens it again."""
        if self._file is not None and self._process == os.getpid():
            self._file.close()
        self._reset()

    def _open(self) -> h5py.File:
        if self._file is None or self._process != os.getpid():  # a forked worker must not use its parent's handle
            self._reset()
            self._file, self._process = open_cache(self.path), os.getpid()
        return self._file

    @contextmanager
    def _reading(self, name: str, what: str) -> Iterator[None]:
        """Whatever HDF5 raises inside becomes an InputError that names the file and the entry."""
        try:
            yield
        except InputError:
            raise
        except HDF5_ERRORS as error:
            raise InputError(self.path, name, f"corrupt entry ({what}: {error})") from error

    def entries(self) -> list[str]:
        """Sorted ids of the complete entries."""
        with self._reading("entries", "index"):
            return sorted(name for name in self._open()["entries"] if not name.startswith("."))

    def _group(self, name: str) -> h5py.Group:
        with self._reading(name, "index"):
            groups = self._open()["entries"]
            if name not in groups:
                raise InputError(self.path, name, "no such entry in the cache")
            return groups[name]

    def meta(self, name: str) -> dict[str, Any]:
        """What is known of an entry besides its arrays: chains, resolution, sources, versions, notes."""
        with self._reading(name, "meta"):
            attributes = self._group(name).attrs
            text = attributes["meta"]
            if hashlib.sha256(text.encode()).hexdigest() != attributes["meta_sha256"]:
                raise InputError(self.path, name, "corrupt entry (meta: checksum)")
            return json.loads(text)

    def _array(self, group: h5py.Group, name: str, dataset: str, selection: Any = ()) -> np.ndarray:
        with self._reading(name, f"dataset {dataset}"):
            return group[dataset][selection]

    def _load(self, name: str, problems: list[str] | None = None) -> Entry:
        """Read and check a whole entry; problems are collected in the list when there is one, else raised."""
        group, meta = self._group(name), self.meta(name)
        arrays = {}
        for dataset, dtype in ARRAYS.items():
            try:
                array = arrays[dataset] = self._array(group, name, dataset)
                if array.dtype != dtype:
                    raise InputError(self.path, name, f"corrupt entry (dataset {dataset} has type {array.dtype})")
                if (self.check or problems is not None) and digest(array) != meta["sha256"].get(dataset):
                    raise InputError(self.path, name, f"corrupt entry (dataset {dataset}: checksum)")
            except InputError as error:
                if problems is None:
                    raise
                problems.append(str(error))
        if problems:
            raise InputError(self.path, name, "corrupt entry")
        kept = ("resolution", "released", "smiles", "sources")
        return Entry(
            name=name,
            arrays=arrays,
            chains=tuple(meta["chains"]),
            notes=tuple(meta["notes"]),
            **{field: meta[field] for field in kept},
        )

    def problems(self, name: str) -> list[str]:
        """Checks of one entry that fail, one line each; [] for a sound entry."""
        found: list[str] = []
        try:
            self._load(name, found)
        except InputError as error:
            return found or [str(error)]
        return found

    def read(self, name: str) -> Entry:
        """One entry with all its arrays, checked."""
        return self._load(name)

    def read_structure(self, name: str) -> Entry:
        """One entry without its alignment (`msa` and `deletions` have no rows); kept in memory of this process."""
        self._open()
        if name not in self._small:
            entry = self._load(name)
            self._last = name, {dataset: entry.arrays[dataset] for dataset in LAZY}
            empty = {dataset: np.zeros((0, entry.n_tokens), ARRAYS[dataset]) for dataset in LAZY}
            if len(self._small) >= KEPT_ENTRIES:
                self._small.pop(next(iter(self._small)))
            self._small[name] = replace(entry, arrays=entry.arrays | empty)
        return self._small[name]

    def msa_depth(self, name: str) -> int:
        """Alignment rows of an entry."""
        with self._reading(name, "dataset msa"):
            return len(self._group(name)["msa"])

    def read_alignment(self, name: str, rows: np.ndarray, keep: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Rows (ascending indices) and columns (bool [N]) of `msa` and `deletions`: two arrays [rows, kept]."""
        self.read_structure(name)  # checks the entry
        columns = np.flatnonzero(keep)
        if self._last[0] == name:
            parts, left = [self._last[1][dataset] for dataset in LAZY], 0
        else:
            group, left = self._group(name), int(columns[0])
            window = (slice(0, int(rows[-1]) + 1), slice(left, int(columns[-1]) + 1))
            parts = [self._array(group, name, dataset, window) for dataset in LAZY]
        return tuple(part[rows[:, None], columns[None, :] - left] for part in parts)

    def verify(self) -> list[str]:
        """Every check of every entry that fails, one line each."""
        return [problem for name in self.entries() for problem in self.problems(name)]


def verify(path: str | os.PathLike[str]) -> list[str]:
    """Problems of a cache file, one line each; [] when it is sound. Raises InputError when it cannot be opened."""
    with StructureCache(path, check=False) as cache:
        return cache.verify()


def describe(path: str | os.PathLike[str]) -> str:
    """What a cache holds, as a plain table. Raises InputError when it cannot be opened."""
    with StructureCache(path, check=False) as cache:
        lines = [f"{'entry':<24} {'tokens':>7} {'atoms':>8} {'chains':>7} {'rows':>7} {'templates':>9} {'kB':>9}"]
        found: dict[str, set[str]] = {}
        names = cache.entries()
        for name in names:
            try:
                meta = cache.meta(name)
                with cache._reading(name, "index"):
                    group = cache._group(name)
                    size = sum(group[dataset].id.get_storage_size() for dataset in ARRAYS) / 1e3
                    shape = [len(group["tokens"]), len(group["atoms"]), len(meta["chains"]), len(group["msa"])]
                    real = int(group["template_mask"][()].sum())
            except InputError as error:
                lines.append(f"{name:<24} unreadable: {error}")
                continue
            lines.append("{:<24} {:>7} {:>8} {:>7} {:>7} {:>9} {:>9.1f}".format(name, *shape, real, size))
            lines += [f"{'':<24} note: {note}" for note in meta["notes"]]
            for package, version in meta["versions"].items():
                found.setdefault(package, set()).add(version)
        depth = int(cache._open().attrs["msa_depth"])
    packages = ", ".join(f"{package} {'/'.join(sorted(known))}" for package, known in sorted(found.items()))
    lines.append(f"{len(names)} entries, {Path(path).stat().st_size / 1e6:.2f} MB, schema {SCHEMA_VERSION}, "
                 f"at most {depth or 'all'} alignment rows")  # fmt: skip
    return "\n".join([*lines, f"built with {packages}"] if packages else lines)
