"""Content addresses: an entry is named by a digest of all it is made of, so that a build makes only what changed.

What it is made of: the bytes of its input files, the alignment rows kept, the schema, the versions of the packages that
compute features, and the code of the featuriser (every module of EvoPipe that `featurize` reaches, without comments and
docstrings, so that a corrected sentence does not make a whole database anew).
"""

from __future__ import annotations

import ast
import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path

from megafold.evopipe import codec
from megafold.evopipe.cache import versions
from megafold.evopipe.layout import SCHEMA_VERSION

PACKAGE = "megafold.evopipe"
START = "featurize"


@lru_cache(maxsize=1)
def code_version() -> str:
    """Digest of the featuriser's code."""
    return code_digest(Path(__file__).parent)


def code_digest(folder: Path, start: str = START) -> str:
    """Digest of module `start` in `folder` and of all that it imports from there."""
    waiting, seen = [start], {}
    while waiting:
        module = waiting.pop()
        if module in seen or not (folder / f"{module}.py").is_file():
            continue
        tree = ast.parse((folder / f"{module}.py").read_text())
        waiting += _imported(tree)
        seen[module] = ast.unparse(_without_docstrings(tree))
    text = "".join(f"{name}\n{code}\n" for name, code in sorted(seen.items()))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _imported(tree: ast.AST) -> list[str]:
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == PACKAGE:
            found += [name.name for name in node.names]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(f"{PACKAGE}."):
            found.append(node.module.removeprefix(f"{PACKAGE}."))
    return found


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            node.body = [one for one in node.body if not _is_text(one)] or [ast.Pass()]
    return tree


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def content_key(
    name: str, sources: Mapping[str, str], msa_depth: int | None, options: Mapping[str, int] | None = None
) -> str:
    """The content address of an entry, 32 hex digits.

    Args:
        name: the entry's id.
        sources: input file -> sha256.
        msa_depth: alignment rows kept, None for all.
        options: of the source, by name.
    """
    given = sorted((options or {}).items())
    content = [SCHEMA_VERSION, name, sorted(sources.items()), msa_depth or 0, given, versions(), code_version()]
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return codec.checksum(text.encode()).hex()
