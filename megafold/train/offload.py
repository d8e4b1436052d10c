"""Host copies of what lives on a device: page-locked memory, taken once; all copies are under way before one wait."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

BLOCK = 1 << 28  # bytes: torch rounds page-locked memory up to a power of two, and each request takes a while
ALIGNMENT = 512


class HostCopies:
    """Moves tensors to the host and back in place: they stay the same objects with another storage.

    Tensors are told apart by their place in the sequence, which may grow from one call to the next.

    Args:
        locks: whether the host's memory is page-locked, which needs a GPU.
    """

    def __init__(self, *, locks: bool) -> None:
        self._locks = locks
        self._copies: list[Tensor] = []

    def save(self, tensors: Sequence[Tensor]) -> None:
        """Every tensor's numbers to the host; their memory on the device is free once nothing else refers to it."""
        same = [_alike(tensor, copy) for tensor, copy in zip(tensors, self._copies)]
        known = same.index(False) if False in same else len(same)
        self._copies = self._copies[:known] + self._room(tensors[known:])
        for tensor, copy in zip(tensors, self._copies):
            copy.copy_(tensor.detach(), non_blocking=True)
        _wait(tensors)
        for tensor, copy in zip(tensors, self._copies):
            tensor.data = copy

    def restore(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        """What :meth:`save` took away, back on ``device``; the host's memory is kept for the next time."""
        for tensor in tensors:
            tensor.data = tensor.detach().to(device, non_blocking=True, copy=True)
        _wait(tensors)

    def _room(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Uninitialised tensors like these, cut from a few blocks."""
        blocks: list[list[Tensor]] = []
        filled = 0
        for tensor in tensors:
            if not blocks or filled + _size(tensor) > BLOCK:
                blocks.append([])
                filled = 0
            blocks[-1].append(tensor)
            filled += _size(tensor)
        return [piece for block in blocks for piece in self._cut(block)]

    def _cut(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        memory = torch.empty(sum(map(_size, tensors)), dtype=torch.uint8, pin_memory=self._locks)
        pieces, first = [], 0
        for tensor in tensors:
            size = tensor.numel() * tensor.element_size()
            pieces.append(memory[first : first + size].view(tensor.dtype).view(tensor.shape))
            first += _size(tensor)
        return pieces


def _alike(tensor: Tensor, copy: Tensor) -> bool:
    return tensor.shape == copy.shape and tensor.dtype == copy.dtype


def _size(tensor: Tensor) -> int:
    """Bytes in a block: the next tensor starts aligned."""
    return -(-tensor.numel() * tensor.element_size() // ALIGNMENT) * ALIGNMENT


def _wait(tensors: Sequence[Tensor]) -> None:
    for device in {tensor.device for tensor in tensors if tensor.is_cuda}:
        torch.cuda.synchronize(device)
