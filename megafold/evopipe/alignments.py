"""Alignment files: which belongs to which chain, is its query the chain's sequence, and Stockholm to A3M.

A chain's alignment is `<id>-assembly1<chain>_*.a3m[.gz]` (the baseline's layout), or the same without `-assembly1` or
with `_` before the chain. A copy of a chain that the assembly adds (`A-2`) uses the alignment of its original (`A`).
"""

from __future__ import annotations

import glob
import gzip
import re
import zlib
from collections.abc import Iterator
from pathlib import Path

from megafold.errors import InputError

_LOWER = str.maketrans("", "", "abcdefghijklmnopqrstuvwxyz.")


def read_text(path: Path) -> str:
    """Text of a file, gzipped or not (by content, not by name). Raises InputError when it cannot be read."""
    try:
        data = Path(path).read_bytes()
        return (gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data).decode()
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise InputError(path, "", f"cannot be read ({error})") from error


def find(folder: Path | None, name: str, chain: str, suffixes: tuple[str, ...] = (".a3m", ".a3m.gz")) -> list[Path]:
    """Files of one chain of entry `name`, sorted by name; [] when the folder is None or holds none."""
    if folder is None:
        return []
    short = name.split("-assembly")[0]
    for one in dict.fromkeys([chain, re.sub(r"-\d+$", "", chain)]):
        for stem in dict.fromkeys([f"{name}{one}_", f"{short}{one}_", f"{short}_{one}_", f"{short}_{one}."]):
            found = [path for path in sorted(folder.glob(glob.escape(stem) + "*")) if path.name.endswith(suffixes)]
            if not found and stem.endswith("."):
                found = [folder / f"{stem[:-1]}{end}" for end in suffixes if (folder / f"{stem[:-1]}{end}").is_file()]
            if found:
                return found
    return []


def records(text: str) -> Iterator[tuple[str, str]]:
    """(description, sequence) of each record of FASTA or A3M text."""
    name, parts = None, []
    for line in text.splitlines():
        line = line.strip()
        if line.startswith(">"):
            if name is not None:
                yield name, "".join(parts)
            name, parts = line[1:], []
        elif line and name is not None:
            parts.append(line)
    if name is not None:
        yield name, "".join(parts)


def _same(query: str, sequence: str) -> bool:
    """Equal but for unknown residues: files write a modified residue as X or as its parent."""
    return len(query) == len(sequence) and all(a == b or "X" in (a, b) for a, b in zip(query.upper(), sequence.upper()))


def fit(path: Path, chain: str, sequence: str, full: tuple[str, list[bool]] | None, depth: int | None) -> str:
    """A3M text of at most `depth` rows whose columns are the residues of `sequence`.

    Args:
        path: the alignment.
        chain: its chain id, for messages.
        sequence: the chain's residues that have coordinates.
        full: the chain's full sequence and which of its residues have coordinates. An alignment of the full sequence
            (searched before the structure was looked at) keeps the columns of the resolved residues.
        depth: rows to keep, None for all.

    Raises:
        InputError: the query is neither sequence, or a row does not have the query's length.
    """
    rows = records(read_text(path))
    field, kept = f"chain {chain}", None
    first = next(rows, None)
    if first is None:
        raise InputError(path, field, "holds no sequence")
    query = first[1].translate(_LOWER)
    if not _same(query, sequence):
        kept = full[1] if full is not None and _same(query, full[0]) else None
        if kept is None:
            raise InputError(
                path,
                field,
                f"the query ({len(query)} residues, {query[:12]}...) is not the chain's sequence "
                f"({len(sequence)} residues, {sequence[:12]}...)",
            )
    out = []
    for number, (description, row) in enumerate([first, *rows] if depth is None else _head([first], rows, depth)):
        if len(row.translate(_LOWER)) != len(query):
            raise InputError(path, field, f"row {number + 1} does not have the query's {len(query)} columns")
        out.append(f">{description}\n{row if kept is None else _select(row, kept)}\n")
    return "".join(out)


def _head(first: list, rest: Iterator, count: int) -> Iterator:
    yield from first
    for _, row in zip(range(count - 1), rest):
        yield row


def _select(row: str, kept: list[bool]) -> str:
    """Columns `kept` of an A3M row; insertions stay in front of the next kept column."""
    out, column = [], 0
    for letter in row:
        if letter.islower():
            out.append(letter)
        elif letter != ".":
            if kept[column]:
                out.append(letter)
            column += 1
    return "".join(out)


def stockholm_to_a3m(text: str) -> str:
    """Stockholm alignment -> A3M: columns where the first sequence has a gap become insertions (lower case)."""
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith(("#", "//")):
            name, letters = line.split()[:2]
            rows.setdefault(name, []).append(letters.replace(".", "-"))
    if not rows:
        return ""
    joined = {name: "".join(parts) for name, parts in rows.items()}
    query = next(iter(joined.values()))
    out = []
    for name, row in joined.items():
        pairs = zip(query, row)
        out.append(f">{name}\n" + "".join(b.upper() if a != "-" else b.lower().strip("-") for a, b in pairs) + "\n")
    return "".join(out)
