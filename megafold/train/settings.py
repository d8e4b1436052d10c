"""Frozen dataclasses from YAML mappings: unknown keys, wrong types and impossible values are told by file and field."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, Field, field, fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

from megafold.errors import InputError

Settings = TypeVar("Settings")
_WORDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", Path: "a path"}


def limited(
    default: Any = MISSING,
    *,
    least: float | None = None,
    above: float | None = None,
    most: float | None = None,
    choices: tuple[str, ...] = (),
) -> Any:
    """A field whose value from a file must be >= ``least``, > ``above``, <= ``most`` or one of ``choices``."""
    return field(default=default, metadata={"least": least, "above": above, "most": most, "choices": choices})


def parse(kind: type[Settings], mapping: Any, file: str, prefix: str = "") -> Settings:
    """Build dataclass ``kind`` from a mapping; nested dataclasses are nested mappings.

    What is left out has its default.

    Args:
        file, prefix: where the mapping comes from, for the error.

    Raises:
        InputError: names the file and the field (dots for nesting) and says what is allowed.
    """
    if mapping is None:
        mapping = {}
    if not isinstance(mapping, Mapping):
        raise InputError(file, prefix, f"found {mapping!r}, expected a mapping of settings")
    hints = typing.get_type_hints(kind)
    known = {item.name: item for item in fields(kind) if not item.metadata.get("internal")}
    for key in mapping:
        if key not in known:
            raise InputError(file, _join(prefix, str(key)), f"unknown setting; known: {', '.join(known)}")
    values = {}
    for name, item in known.items():
        where = _join(prefix, name)
        if name in mapping:
            values[name] = _value(hints[name], mapping[name], item, file, where)
        elif is_dataclass(hints[name]):
            values[name] = parse(hints[name], None, file, where)
        elif item.default is MISSING and item.default_factory is MISSING:
            raise InputError(file, where, "missing")
    return kind(**values)


def _value(hint: Any, value: Any, item: Field, file: str, where: str) -> Any:
    if isinstance(hint, types.UnionType):
        if value is None and type(None) in hint.__args__:
            return None
        (hint,) = (part for part in hint.__args__ if part is not type(None))
    if is_dataclass(hint):
        return parse(hint, value, file, where)
    if typing.get_origin(hint) is tuple:
        if not isinstance(value, list) or not all(isinstance(part, str) for part in value):
            raise InputError(file, where, f"found {value!r}, expected a list of texts")
        return tuple(value)
    if typing.get_origin(hint) is dict:
        if not isinstance(value, Mapping):
            raise InputError(file, where, f"found {value!r}, expected a mapping")
        return dict(value)
    converted = _scalar(hint, value)
    if converted is None:
        raise InputError(file, where, f"found {value!r}, expected {_WORDS[hint]}")
    _check_limits(converted, item, file, where)
    return converted


def _scalar(hint: type, value: Any) -> Any:
    """The value as ``hint``, or None if it is not one. YAML reads 1e-3 (without a dot) as text: taken as the number."""
    if hint is Path:
        return Path(value) if isinstance(value, str) and value else None
    if hint is float:
        if isinstance(value, str):
            try:
                value = float(value)
            except ValueError:
                return None
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    return value if type(value) is hint else None


def _check_limits(value: Any, item: Field, file: str, where: str) -> None:
    limits = item.metadata
    if limits.get("choices") and value not in limits["choices"]:
        raise InputError(file, where, f"found {value!r}, expected one of {', '.join(limits['choices'])}")
    if value != value or value in (float("inf"), float("-inf")):
        raise InputError(file, where, f"found {value!r}, expected a finite number")
    if limits.get("least") is not None and value < limits["least"]:
        raise InputError(file, where, f"found {value!r}, expected at least {limits['least']}")
    if limits.get("above") is not None and value <= limits["above"]:
        raise InputError(file, where, f"found {value!r}, expected more than {limits['above']}")
    if limits.get("most") is not None and value > limits["most"]:
        raise InputError(file, where, f"found {value!r}, expected at most {limits['most']}")


def _join(prefix: str, name: str) -> str:
    return f"{prefix}.{name}" if prefix else name
