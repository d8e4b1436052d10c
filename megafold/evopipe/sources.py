"""Where structures come from: the `data:` section of a configuration file. Imports nothing heavy.

data: {sample: true}                                  entries of the PDB inside a pinned Python wheel
data: {mmcif: DIR, msa: DIR, templates: DIR}          your own folders (msa and templates are optional)
data: {pdb_ids: [1ubq, 4hhb], folder: DIR}            downloaded from the Protein Data Bank
"""

from __future__ import annotations

import os
import re
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from megafold.errors import InputError
from megafold.evopipe.report import Finding

DOWNLOAD_URL = "https://files.rcsb.org/download/{id}.cif.gz"
KEYS = ("sample", "mmcif", "msa", "templates", "pdb_ids", "folder", "components", "kalign", "max_chains")
MMCIF_SUFFIXES = (".cif", ".cif.gz", ".mmcif", ".mmcif.gz")
OTHER_SUFFIXES = (".pdb", ".pdb.gz", ".ent", ".ent.gz", ".bcif", ".bcif.gz", ".pdbx", ".mmtf")


@dataclass(frozen=True)
class DataSource:
    """Input files of a cache.

    Args:
        name: `sample`, `folders` or `pdb_ids`.
        mmcif: a folder of mmCIF files (searched recursively), or one file.
        msa: folder of A3M files, `<id>-assembly1<chain>_*.a3m[.gz]`; None: each chain's own sequence only.
        templates: folder of template hits, `<id>-assembly1<chain>_<type>_*.m8[.gz]`; needs `kalign`.
        pdb_ids: entries to download into `mmcif`, or () for every file that is there.
        components: the wwPDB's `components.cif`; None for the copy bundled with biotite.
        kalign: the Kalign 3 program, which aligns templates; None: template features stay empty, as in the baseline.
        max_chains: of a larger assembly so many chains are kept (AF3 supplement 2.5.4).
    """

    name: str
    mmcif: Path
    msa: Path | None = None
    templates: Path | None = None
    pdb_ids: tuple[str, ...] = ()
    components: Path | None = None
    kalign: Path | None = None
    max_chains: int = 20

    def files(self) -> dict[str, Path]:
        """Entry id -> mmCIF file, sorted by id; of several files of one entry the first by name.

        Raises:
            InputError: the folder is missing or holds no mmCIF file.
        """
        if self.mmcif.is_file():
            return {entry_id(self.mmcif): self.mmcif}
        if not self.mmcif.is_dir():
            raise InputError(self.mmcif, "data.mmcif", "no such folder")
        found: dict[str, Path] = {}
        for path in self._paths(MMCIF_SUFFIXES):
            found.setdefault(entry_id(path), path)
        if self.pdb_ids:
            found = {name: path for name, path in found.items() if name.split("-assembly")[0] in self.pdb_ids}
        if not found:
            raise InputError(self.mmcif, "data.mmcif", f"holds no {', '.join(MMCIF_SUFFIXES)} file")
        return dict(sorted(found.items()))

    def passed_over(self) -> list[Finding]:
        """Structure files of the folder that no entry is made of: second files of an entry, and other formats."""
        if not self.mmcif.is_dir() or self.pdb_ids:
            return []
        used, findings = self.files(), []
        for path in self._paths(MMCIF_SUFFIXES):
            name = entry_id(path)
            if used[name] != path:
                action = "remove one of the two, or rename it if it is another structure"
                reason = f"has the same id as {used[name]}, which is used"
                findings.append(Finding("failed", "second file of an entry", str(path), name, reason, action))
        for path in self._paths(OTHER_SUFFIXES):
            reason, action = "a format that is not read", "give the mmCIF file of the entry"
            findings.append(Finding("failed", "other format", str(path), entry_id(path), reason, action))
        return findings

    def _paths(self, suffixes: tuple[str, ...]) -> list[Path]:
        return [path for path in sorted(self.mmcif.rglob("*")) if path.name.endswith(suffixes) and path.is_file()]


def entry_id(path: Path) -> str:
    """`.../2q2k.cif.gz` -> `2q2k-assembly1`: every entry is an assembly, as its file is or after expanding it."""
    stem = path.name.removesuffix(".gz")
    for suffix in (*MMCIF_SUFFIXES, *OTHER_SUFFIXES):
        stem = stem.removesuffix(suffix)
    return stem if "-assembly" in stem else f"{stem}-assembly1"


def data_folder() -> Path:
    """Where sample data and downloads go unless the configuration names a `folder`."""
    base = os.environ.get("MEGAFOLD_DATA") or os.path.join(
        os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "megafold"
    )
    return Path(base)


def load_data_section(mapping: Mapping[str, Any], file: str | os.PathLike[str]) -> DataSource:
    """Validate a `data:` section. Relative paths count from the configuration file. Downloads nothing.

    Raises:
        InputError: an unknown key, not exactly one of sample / mmcif / pdb_ids, a missing folder, a malformed id.
    """
    if not isinstance(mapping, Mapping):
        raise InputError(file, "data", f"must be a mapping, not {mapping!r}")
    for key in mapping:
        if key not in KEYS:
            raise InputError(file, f"data.{key}", f"unknown key; allowed: {', '.join(KEYS)}")
    kinds = [key for key in ("sample", "mmcif", "pdb_ids") if mapping.get(key)]
    if len(kinds) != 1:
        raise InputError(file, "data", f"needs exactly one of sample: true, mmcif, pdb_ids; found {kinds or 'none'}")
    base = Path(file).parent

    def path(key: str, kind: str) -> Path | None:
        if mapping.get(key) is None:
            return None
        if not isinstance(mapping[key], str | os.PathLike):
            raise InputError(file, f"data.{key}", f"must be a path, not {mapping[key]!r}")
        found = base / Path(mapping[key]).expanduser()
        exists = found.is_dir() if kind == "folder" else found.is_file() if kind == "file" else found.exists()
        if not exists:
            raise InputError(file, f"data.{key}", f"no such {kind}: {found}")
        return found

    most = mapping.get("max_chains", DataSource.max_chains)
    if not isinstance(most, int) or isinstance(most, bool) or most < 1:
        raise InputError(file, "data.max_chains", f"must be a whole number from 1, not {most!r}")
    common = {"components": path("components", "file"), "kalign": path("kalign", "file"), "max_chains": most}
    folder = base / Path(mapping["folder"]).expanduser() if mapping.get("folder") else data_folder()
    if kinds == ["sample"]:
        if mapping["sample"] is not True:
            raise InputError(file, "data.sample", f"must be true, not {mapping['sample']!r}")
        root = folder / "sample"
        return DataSource("sample", root / "mmcif", root / "msa", **common)
    aligned = {"msa": path("msa", "folder"), "templates": path("templates", "folder")}
    if kinds == ["mmcif"]:
        return DataSource("folders", path("mmcif", "file or folder"), **aligned, **common)
    ids = mapping["pdb_ids"]
    if not isinstance(ids, list | tuple):
        raise InputError(file, "data.pdb_ids", f"must be a list of PDB ids, not {ids!r}")
    for id in ids:
        # YAML reads an unquoted 1e10 as a number
        if not isinstance(id, str) or not re.fullmatch(r"(pdb_[0-9a-z]{8}|[0-9][0-9a-zA-Z]{3})", id):
            raise InputError(file, "data.pdb_ids", f"{id!r} is no PDB id (four characters, quoted in YAML)")
    return DataSource("pdb_ids", folder / "pdb", **aligned, pdb_ids=tuple(id.lower() for id in ids), **common)


def materialize(source: DataSource, opener: Callable[..., Any] = urllib.request.urlopen) -> DataSource:
    """Make the files of a source exist: fetch the sample set or download PDB entries that are not there yet."""
    if source.name == "sample" and not (source.mmcif.parent / "complete").exists():
        from megafold.evopipe.sample_data import fetch_sample

        fetched = fetch_sample(source.mmcif.parent)
        return replace(source, mmcif=fetched.mmcif, msa=fetched.msa)
    if source.name == "pdb_ids":
        download_entries(source.pdb_ids, source.mmcif, opener=opener)
    return source


def download_entries(
    ids: tuple[str, ...], folder: Path, *, opener: Callable[..., Any] = urllib.request.urlopen, timeout: float = 60
) -> dict[str, Path]:
    """Download `<id>.cif.gz` of each PDB id into a folder; a file that is there is kept.

    Args:
        opener: opens a URL (`urllib.request.urlopen`, which follows the machine's proxy settings).
        timeout: seconds without an answer after which an entry fails.

    Raises:
        InputError: an entry cannot be downloaded; what came before it stays.
    """
    folder.mkdir(parents=True, exist_ok=True)
    paths = {}
    for id in ids:
        paths[id] = path = folder / f"{id}.cif.gz"
        if path.exists():
            continue
        part = path.with_name(f".{path.name}.{os.getpid()}.part")
        try:
            with opener(DOWNLOAD_URL.format(id=id), timeout=timeout) as answer, part.open("wb") as out:
                shutil.copyfileobj(answer, out)
            with part.open("rb") as check:
                if check.read(2) != b"\x1f\x8b":
                    raise InputError(DOWNLOAD_URL.format(id=id), "data.pdb_ids", f"{id}: the answer is not a gzip file")
            part.replace(path)
        except (urllib.error.URLError, OSError) as error:
            raise InputError(
                DOWNLOAD_URL.format(id=id), "data.pdb_ids", f"{id} cannot be downloaded ({error})"
            ) from error
        finally:
            part.unlink(missing_ok=True)
    return paths
