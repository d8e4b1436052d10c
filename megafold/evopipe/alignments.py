"""Alignment files: which belongs to which chain, is its query the chain's sequence, and Stockholm to A3M.

A chain's alignment is `<id>-assembly1<chain>_*.a3m` (the baseline's layout; or `.sto`, and either gzipped), or the same
without `-assembly1` or with `_` before the chain. A copy of a chain that the assembly adds (`A-2`) uses the alignment
of its original (`A`).
"""

from __future__ import annotations

import gzip
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from megafold.evopipe.listing import starting_with
from megafold.evopipe.report import EntryError

SUFFIXES = tuple(f"{end}{packed}" for end in (".a3m", ".sto", ".stockholm") for packed in ("", ".gz"))
_LOWER = str.maketrans("", "", "abcdefghijklmnopqrstuvwxyz.")


def read_text(path: Path) -> str:
    """Text of a file, gzipped or not (by content, not by name). Raises InputError when it cannot be read."""
    try:
        data = Path(path).read_bytes()
        data = gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data
    except (OSError, EOFError, zlib.error) as error:
        action = "fetch or write the file again"
        raise EntryError(path, "", f"cannot be read ({error})", action, "unreadable file") from error
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError:  # names of authors in old files
        return data.decode("latin-1")


def find(folder: Path | None, name: str, chain: str, suffixes: tuple[str, ...] = SUFFIXES) -> list[Path]:
    """Files of one chain of entry `name`, sorted by name; [] when the folder is None or holds none."""
    if folder is None:
        return []
    short = name.split("-assembly")[0]
    for one in dict.fromkeys([chain, re.sub(r"-\d+$", "", chain)]):
        for stem in dict.fromkeys([f"{name}{one}_", f"{short}{one}_", f"{short}_{one}_", f"{short}_{one}."]):
            found = [path for path in starting_with(folder, stem) if path.name.endswith(suffixes)]
            if not found and stem.endswith("."):
                found = [folder / f"{stem[:-1]}{end}" for end in suffixes if (folder / f"{stem[:-1]}{end}").is_file()]
            if found:
                return found
    return []


def records(text: str) -> Iterator[tuple[str, str]]:
    """(description, sequence) of each record of FASTA or A3M text."""
    name, parts = None, []
    for line in text.splitlines():
        line = line.strip("\0 \t")  # some programs end a block with a zero byte
        if line.startswith("#"):
            continue
        if line.startswith(">"):
            if name is not None:
                yield name, "".join(parts)
            name, parts = line[1:], []
        elif line and name is not None:
            parts.append(line)
    if name is not None:
        yield name, "".join(parts)


def _same(query: str, sequence: str) -> bool:
    """Equal but for unknown residues (files write a modified residue as X or as its parent) and T for U in RNA."""
    if len(query) != len(sequence):
        return False
    return all(a == b or "X" in (a, b) or {a, b} == {"T", "U"} for a, b in zip(query.upper(), sequence.upper()))


def fit(
    path: Path,
    chain: str,
    sequence: str,
    full: tuple[str, list[bool]] | None,
    depth: int | None,
    parts: Sequence[list[bool]] = (),
) -> str:
    """A3M text of at most `depth` rows whose columns are the residues of `sequence`.

    Args:
        path: the alignment, A3M or Stockholm, gzipped or not.
        chain: its chain id, for messages.
        sequence: the residues that the features have tokens for.
        full: the chain's full sequence and which of its residues are resolved, where `sequence` is the resolved part:
            an alignment of the full sequence keeps its columns.
        depth: rows to keep, None for all.
        parts: which residues of `sequence` an alignment may be of instead of all: the resolved ones, those of the
            polymer without free amino acids. The other columns get gaps.

    Raises:
        InputError: the query is none of these, or a row does not have the query's length.
    """
    text, field = read_text(path), f"chain {chain}"
    rows = records(as_a3m(text, path, field))
    first = next(rows, None)
    if first is None:
        raise EntryError(path, field, "holds no sequence", "remove the empty file, or search again", "empty alignment")
    query = first[1].translate(_LOWER)
    edit = _editor(query, sequence, full, parts)
    if edit is None:
        raise EntryError(
            path,
            field,
            f"the query ({len(query)} residues, {query[:12]}...) is not the chain's sequence "
            f"({len(sequence)} residues, {sequence[:12]}...)",
            "search again with the chain's full sequence, or remove the file to use the sequence alone",
            "alignment of another sequence",
        )
    out = []
    for number, (description, row) in enumerate([first, *rows] if depth is None else _head([first], rows, depth)):
        if len(row.translate(_LOWER)) != len(query):
            problem = f"row {number + 1} does not have the query's {len(query)} columns"
            raise EntryError(path, field, problem, "search again: the file is damaged", "ragged alignment")
        out.append(f">{description}\n{edit(row, number)}\n")
    return "".join(out)


def _editor(query: str, sequence: str, full, parts) -> Callable[[str, int], str] | None:
    """(A3M row, its number) -> the row with the columns of `sequence`; None where the query is of something else."""
    if _same(query, sequence):
        return lambda row, _: row.replace(".", "")
    if full is not None and _same(query, full[0]):
        kept = full[1]
        if _same("".join(letter for letter, have in zip(*full) if have), sequence):
            return lambda row, _: _select(row, kept)
    for part in parts:
        if _same(query, "".join(letter for letter, have in zip(sequence, part) if have)):
            others = "-" * len(sequence)
            return lambda row, number, part=part: _spread(row, part, others if number else sequence)
    return None


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


def _spread(row: str, places: list[bool], others: str) -> str:
    """An A3M row whose columns are the True `places`, with the letters of `others` in the False ones."""
    out, column = [], 0
    for letter in row.replace(".", ""):
        if not letter.islower():
            while not places[column]:
                out.append(others[column])
                column += 1
            column += 1
        out.append(letter)
    return "".join(out) + others[column:]


def as_a3m(text: str, path: Path, field: str) -> str:
    """A3M text of an A3M or Stockholm file. Raises InputError for Stockholm rows of different lengths."""
    if not text.lstrip().startswith("# STOCKHOLM"):
        return text
    try:
        return stockholm_to_a3m(text)
    except ValueError as error:
        raise EntryError(path, field, str(error), "search again: the file is damaged", "ragged alignment") from error


def stockholm_to_a3m(text: str) -> str:
    """Stockholm alignment -> A3M: columns where the first sequence has a gap become insertions (lower case).

    Raises ValueError when rows have different lengths.
    """
    rows: dict[str, list[str]] = {}
    for line in text.splitlines():
        if line.strip() and not line.startswith(("#", "//")):
            name, letters = line.split()[:2]
            rows.setdefault(name, []).append(letters.replace(".", "-"))
    if not rows:
        return ""
    joined = {name: "".join(parts) for name, parts in rows.items()}
    query = next(iter(joined.values()))
    uneven = [name for name, row in joined.items() if len(row) != len(query)]
    if uneven:
        raise ValueError(f"row {uneven[0]} does not have the first row's {len(query)} columns")
    out = []
    for name, row in joined.items():
        pairs = zip(query, row)
        out.append(f">{name}\n" + "".join(b.upper() if a != "-" else b.lower().strip("-") for a, b in pairs) + "\n")
    return "".join(out)
