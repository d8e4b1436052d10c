"""Opening HDF5 files that somebody else may have made: what cannot be in a cache is refused before it is followed.

Refused, each with one line: pickles (the published MegaFold caches) and other files that are not HDF5; soft and
external links; virtual datasets and datasets with external files; object and region references; and claims of more
elements than the stored bytes can hold. Files are opened without POSIX locks, which not every parallel filesystem has.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import h5py
import numpy as np

from megafold.errors import InputError
from megafold.evopipe.table import MAX_RATIO

# what h5py raises for a damaged file, by where the damage is
HDF5_ERRORS = (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError, MemoryError)
MAGIC = b"\x89HDF\r\n\x1a\n"
MAX_TABLE = 1 << 32  # bytes of a table that is read as a whole
PICKLES = {
    b"\x1f\x8b": "a gzipped file",
    b"\x80": "a pickle",
    b"\x93NUMPY": "a NumPy file",
    b"PK": "a zip file (.npz, .pt)",
}
REFUSED = (
    "{kind}, not HDF5. Published MegaFold caches are gzipped pickles, and a pickle runs code when it is loaded: this "
    "version never does. Build the cache from the mmCIF files: megafold cache build"
)


@contextmanager
def opened(path: Path) -> Iterator[h5py.File]:
    """A file for reading, without locks.

    Raises:
        InputError: it is missing, is no HDF5 file, is truncated; and whatever HDF5 raises inside the `with`.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(path, "cache", "no such file; `megafold cache build` makes one")
    try:
        with path.open("rb") as stream:
            head = stream.read(8)
    except OSError as error:
        raise InputError(path, "cache", f"cannot be opened ({os.strerror(error.errno or 0)})") from error
    if head != MAGIC:
        kind = next((name for start, name in PICKLES.items() if head.startswith(start)), None)
        problem = REFUSED.format(kind=kind) if kind else "cannot be opened, truncated or not HDF5? (no HDF5 signature)"
        raise InputError(path, "cache", problem)
    try:
        with h5py.File(path, "r", locking=False, rdcc_nbytes=0) as file:
            yield file
    except InputError:
        raise
    except HDF5_ERRORS as error:
        raise InputError(path, "cache", f"cannot be opened, truncated or not HDF5? ({error})") from error


def table(file: h5py.File, name: str, dtype: np.dtype) -> np.ndarray:
    """A one-dimensional dataset of the file's root, as a whole.

    Raises:
        InputError: it is not there, is more than data of this file, or has another type.
    """
    dataset = check_dataset(file, name)
    if dataset.ndim != 1 or dataset.dtype != dtype:
        raise InputError(file.filename, name, f"has the type {dataset.dtype} {dataset.shape}, not {dtype} [rows]")
    return dataset[()]


def check_dataset(file: h5py.File, name: str) -> h5py.Dataset:
    """The dataset `name`, when it is nothing but data inside this file; InputError otherwise."""

    def refuse(problem: str) -> InputError:
        return InputError(file.filename, name, f"refused: {problem}")

    parent, steps = file, name.split("/")
    for step in steps:
        link = parent.get(step, getlink=True)
        if link is None:
            raise InputError(file.filename, name, "missing")
        if not isinstance(link, h5py.HardLink):
            raise refuse("a link to another place; a cache holds its own data")
        parent = parent[step]
    if not isinstance(parent, h5py.Dataset):
        raise refuse("not a dataset")
    plist = parent.id.get_create_plist()
    if plist.get_layout() == h5py.h5d.VIRTUAL:
        raise refuse("a virtual dataset, whose data are in other files")
    if plist.get_external_count():
        raise refuse("data in an external file")
    if has_references(parent.id.get_type()):
        raise refuse("object references or data of variable length")
    claimed = parent.id.get_type().get_size()
    for size in parent.shape or ():
        claimed *= int(size)
    if claimed > min(MAX_TABLE, parent.id.get_storage_size() * MAX_RATIO):
        raise refuse(f"claims {claimed} bytes in {parent.id.get_storage_size()}, more than any compression gives")
    return parent


def has_references(kind: h5py.h5t.TypeID) -> bool:
    """Does a type contain object or region references, or data of variable length?"""
    number = kind.get_class()
    if number in (h5py.h5t.REFERENCE, h5py.h5t.VLEN) or (number == h5py.h5t.STRING and kind.is_variable_str()):
        return True
    if number == h5py.h5t.COMPOUND:
        return any(has_references(kind.get_member_type(i)) for i in range(kind.get_nmembers()))
    return number == h5py.h5t.ARRAY and has_references(kind.get_super())


def number(file: h5py.File, name: str) -> int | None:
    """An integer attribute of the root; None where it is missing or something else."""
    if not h5py.h5a.exists(file.id, name.encode()):
        return None
    attribute = h5py.h5a.open(file.id, name.encode())
    if attribute.get_type().get_class() != h5py.h5t.INTEGER or attribute.shape != ():
        return None
    return int(file.attrs[name])


def digest(file: h5py.File, name: str = "sha256") -> bytes:
    """The attribute with a file's checksum, uint8 [32]; b"" where there is none."""
    if not h5py.h5a.exists(file.id, name.encode()):
        return b""
    attribute = h5py.h5a.open(file.id, name.encode())
    if attribute.get_type().get_class() != h5py.h5t.INTEGER or attribute.shape != (32,):
        return b""
    return file.attrs[name].astype(np.uint8).tobytes()


def set_digest(file: h5py.File, value: bytes, name: str = "sha256") -> None:
    """Write the attribute that `digest` reads."""
    file.attrs[name] = np.frombuffer(value, np.uint8)
