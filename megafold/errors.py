"""The one error that a user of the command line is meant to read: which file, which field, what is allowed."""

from __future__ import annotations

import os

EXIT_BAD_INPUT = 2


class InputError(ValueError):
    """Bad input from a user, told in one line.

    Args:
        file: the file (or option) that holds the mistake.
        field: the key, entry, chain or column inside it; "" when the file as a whole is meant.
        problem: what was found and what is allowed.
    """

    def __init__(self, file: str | os.PathLike[str], field: str, problem: str) -> None:
        self.file, self.field, self.problem = os.fspath(file), field, " ".join(str(problem).split())
        super().__init__(": ".join(part for part in (self.file, self.field, self.problem) if part))

    def __reduce__(self):
        return type(self), (self.file, self.field, self.problem)
