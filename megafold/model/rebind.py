"""The stock code with other meanings of a few names, so that what it does not have to change is not written twice."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from typing import Any


class Stand:
    """A module (torch, einx, torch.nn.functional) with some functions replaced; everything else is the module's."""

    def __init__(self, module: Any, **replaced: Callable[..., Any]) -> None:
        self._module = module
        self.__dict__.update(replaced)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def with_names(function: Callable[..., Any], **names: Any) -> types.FunctionType:
    """The function, in whose body (and those of functions inside it) global ``names`` have these values.

    It shares the code object with the original, which stays as it is for every other model of the process. Decorators
    around the original are left out.
    """
    inner = inspect.unwrap(function)
    meanings = {**inner.__globals__, **names}
    bound = types.FunctionType(inner.__code__, meanings, inner.__name__, inner.__defaults__, inner.__closure__)
    bound.__kwdefaults__, bound.__doc__, bound.__qualname__ = inner.__kwdefaults__, inner.__doc__, inner.__qualname__
    return bound
