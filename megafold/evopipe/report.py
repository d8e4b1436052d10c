"""What a build has to say about its inputs: nothing is dropped, replaced or skipped without a `Finding`. Light import.

A finding is one line for a reader and one JSON object for a program. `failed`: the entry is not in the cache.
`changed`: it is, but something of its file was removed or replaced (a clashing chain, a conformer). `note`: to know.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megafold.errors import InputError

KINDS = ("failed", "changed", "note")
REPORT_FILE = "correct or remove the file, then build again: only this entry is made anew"


@dataclass(frozen=True)
class Finding:
    """One thing that happened to one input.

    Args:
        kind: `failed`, `changed` or `note`.
        code: what happened, in a word or two that do not change between entries (`clashing chains`): to count by.
        file: the input file.
        entry: the entry's id.
        reason: what was found, in one line.
        action: what a user can do; "" when nothing is to be done.
    """

    kind: str
    code: str
    file: str
    entry: str
    reason: str
    action: str = ""

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"kind must be one of {', '.join(KINDS)}, not {self.kind!r}")

    def __str__(self) -> str:
        line = f"{self.kind}: {self.file}: {self.entry}: {self.reason}"
        return f"{line} -> {self.action}" if self.action else line

    def to_json(self) -> dict[str, str]:
        """A flat object of strings."""
        return asdict(self)

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Finding:
        """The opposite of `to_json`. Raises TypeError or ValueError for anything else."""
        return cls(**{key: str(value) for key, value in content.items()})


class EntryError(InputError):
    """An InputError about one entry that also says what to do.

    Args:
        file, field, problem: as in InputError.
        action: what a user can do.
        code: what happened, in a word or two, to count by.
    """

    def __init__(self, file, field: str, problem: str, action: str = REPORT_FILE, code: str = "unusable file") -> None:
        super().__init__(file, field, problem)
        self.action, self.code = action, code

    def __reduce__(self):
        return type(self), (self.file, self.field, self.problem, self.action, self.code)


def failed(entry: str, file: str | Path, error: Exception) -> Finding:
    """The finding of an entry that could not be used, whatever the error was."""
    if isinstance(error, InputError):
        reason = f"{error.field}: {error.problem}" if error.field else error.problem
        action, code = getattr(error, "action", REPORT_FILE), getattr(error, "code", "unusable file")
        return Finding("failed", code, error.file or str(file), entry, reason, action)
    reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
    action = "no file should do this: please report it with the file; the other entries are not affected"
    return Finding("failed", "unexpected error", str(file), entry, reason, action)


def counts(findings: Iterable[Finding]) -> dict[tuple[str, str], int]:
    """(kind, code) -> number of entries, the most frequent first: the summary of a report that may be long."""
    seen = Counter((kind, code) for kind, code, _ in {(one.kind, one.code, one.entry) for one in findings})
    return dict(seen.most_common())


class Log:
    """Findings of one entry, collected where they happen.

    Args:
        file: the input file.
        entry: the entry's id.
    """

    def __init__(self, file: str | Path, entry: str) -> None:
        self.file, self.entry = str(file), entry
        self.findings: list[Finding] = []

    def changed(self, code: str, reason: str, action: str = "") -> None:
        """Something of the file was removed or replaced."""
        self.findings.append(Finding("changed", code, self.file, self.entry, reason, action))

    def note(self, code: str, reason: str, action: str = "", file: str | Path | None = None) -> None:
        """Something worth knowing."""
        self.findings.append(Finding("note", code, str(file or self.file), self.entry, reason, action))


def listed(names: Iterable[str], most: int = 8) -> str:
    """`SO4 x2, GOL`: names with their numbers, in order; the rest of a long list is counted."""
    seen = Counter(names)
    parts = [name if number == 1 else f"{name} x{number}" for name, number in sorted(seen.items())]
    return ", ".join(parts[:most]) + (f" and {len(parts) - most} more" if len(parts) > most else "")
