"""A tensor that stands for equal copies of itself, so that the copies need not exist.

``Alphafold3.forward`` repeats what conditions the diffusion module once an augmentation: ``b ... -> (b a) ...``. Here
that repeat gives a :class:`Repeated`, which the modules replaced by :mod:`megafold.model.optimize` take where the stock
ones take a tensor, and which only they ever see.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from einops import repeat
from torch import Tensor

_OVER_AUGMENTATIONS = "b ... -> (b a) ..."
_COORDINATES = 3


class Repeated(NamedTuple):
    """``copies`` equal copies of every element of the batch ``once`` [b, ...]; stands for [b * copies, ...].

    A NamedTuple, so that whatever walks over arguments (FSDP, checkpointing) finds the tensor inside. With a ``memory``
    modules keep there what they make of it, for as long as the caller keeps the memory (see :func:`remembered`).
    """

    once: Tensor
    copies: int
    memory: dict[Any, Any] | None = None

    @property
    def ndim(self) -> int:
        return self.once.ndim

    @property
    def shape(self) -> torch.Size:
        return torch.Size((self.once.shape[0] * self.copies, *self.once.shape[1:]))

    @property
    def requires_grad(self) -> bool:
        return self.once.requires_grad

    def detach(self) -> Repeated:
        return Repeated(self.once.detach(), self.copies)

    def materialize(self) -> Tensor:
        """The tensor [b * copies, ...]: a view for b = 1, else a copy."""
        once = self.once.unsqueeze(1)
        return once.expand(-1, self.copies, *once.shape[2:]).flatten(0, 1)


def materialize(value: Any) -> Any:
    """``value`` as the stock code knows it: a :class:`Repeated` becomes its copies, anything else passes."""
    return value.materialize() if isinstance(value, Repeated) else value


def once_and_copies(value: Tensor | Repeated) -> tuple[Tensor, int]:
    """The distinct elements of the batch and how often each stands in it (1 for a tensor)."""
    return (value.once, value.copies) if isinstance(value, Repeated) else (value, 1)


def remembered(value: Tensor | Repeated, owner: object, make: Callable[[], Tensor]) -> Tensor:
    """``make()``, or what it gave when ``owner`` last asked it of ``value``, if that has a memory."""
    memory = value.memory if isinstance(value, Repeated) else None
    if memory is None:
        return make()
    if owner not in memory:
        memory[owner] = make()
    return memory[owner]


def on_once(function: Callable[[Tensor], Tensor], value: Tensor | Repeated) -> Tensor | Repeated:
    """``function`` (which treats every element of the batch alike) applied to the distinct elements only."""
    return Repeated(function(value.once), value.copies) if isinstance(value, Repeated) else function(value)


def _broadcast(
    operation: Callable[[Tensor, Tensor], Tensor], left: Tensor | Repeated, right: Tensor | Repeated
) -> Tensor | Repeated:
    if isinstance(left, Repeated) and isinstance(right, Repeated):
        return Repeated(operation(left.once, right.once), left.copies)
    if isinstance(left, Repeated):
        return operation(left.once.unsqueeze(1), right.unflatten(0, (-1, left.copies))).flatten(0, 1)
    if isinstance(right, Repeated):
        return operation(left.unflatten(0, (-1, right.copies)), right.once.unsqueeze(1)).flatten(0, 1)
    return operation(left, right)


def plus(left: Tensor | Repeated, right: Tensor | Repeated) -> Tensor | Repeated:
    """``left + right``; a sum is :class:`Repeated` only where both terms are (with equal ``copies``)."""
    return _broadcast(torch.add, left, right)


def scaled(left: Tensor | Repeated, right: Tensor | Repeated) -> Tensor | Repeated:
    """``left * right``, as :func:`plus`."""
    return _broadcast(torch.mul, left, right)


def repeat_lazily(tensor: Tensor, pattern: str, **axes: int) -> Tensor | Repeated:
    """``einops.repeat``, but features repeated over the augmentations stay one copy.

    Features are the floating-point tensors of three or more dimensions; coordinates [..., 3] are left out because each
    copy is moved on its own. (A model whose features have a width of 3 is still computed correctly: see ``denoise``.)
    """
    is_feature = tensor.is_floating_point() and tensor.ndim >= 3 and tensor.shape[-1] != _COORDINATES
    if pattern == _OVER_AUGMENTATIONS and set(axes) == {"a"} and is_feature:
        return Repeated(tensor, axes["a"])
    return repeat(tensor, pattern, **axes)
