"""Atoms in windows (AF3 section 3.2): w atoms attend to themselves and to the w atoms before them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def in_windows(t: Tensor, size: int) -> Tensor:
    """[B, M, ...] -> [B, ceil(M / size), size, ...]; what is missing in the last window is 0 (False)."""
    missing = -t.shape[1] % size
    if missing:
        t = F.pad(t, (0, 0) * (t.ndim - 2) + (0, missing))
    return t.unflatten(1, (-1, size))


def with_previous(t: Tensor) -> Tensor:
    """Each window behind the one before it: [B, nw, w, ...] -> [B, nw, 2w, ...]; before the first comes 0 (False)."""
    before = F.pad(t[:, :-1], (0, 0) * (t.ndim - 2) + (1, 0))
    return torch.cat((before, t), dim=2)
