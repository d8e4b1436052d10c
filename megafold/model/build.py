"""Models of alphafold3-pytorch from a preset and changes to it."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from megafold.errors import InputError
from megafold.model.presets import preset

if TYPE_CHECKING:
    from alphafold3_pytorch import Alphafold3


def model_kwargs(name: str, **overrides: Any) -> dict[str, Any]:
    """Keyword arguments of ``Alphafold3``: the preset ``name`` with ``overrides`` laid over it.

    A mapping is laid over the preset's mapping key by key: ``pairformer_stack={"depth": 4}`` changes the depth alone.

    Raises:
        InputError: for an unknown preset.
    """
    return _laid_over(preset(name), overrides)


def build_model(name: str, **overrides: Any) -> Alphafold3:
    """A stock model of alphafold3-pytorch with fresh weights (from torch's global generator), on the CPU in fp32.

    Args:
        name: a key of :data:`megafold.model.presets.PRESETS`.
        overrides: see :func:`model_kwargs`.

    Raises:
        InputError: for an unknown preset or an argument that ``Alphafold3`` does not have.
    """
    kwargs = model_kwargs(name, **overrides)

    # Imported here: it takes 20 s and builds conformers, which no reader of a preset should pay for.
    from alphafold3_pytorch import Alphafold3

    known = inspect.signature(Alphafold3.__init__).parameters
    for key in kwargs:
        if key not in known:
            raise InputError("model", key, "alphafold3-pytorch's model has no such argument")
    return Alphafold3(**kwargs)


def _laid_over(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in changes.items():
        both_nested = isinstance(value, Mapping) and isinstance(merged.get(key), Mapping)
        merged[key] = _laid_over(merged[key], value) if both_nested else value
    return merged
