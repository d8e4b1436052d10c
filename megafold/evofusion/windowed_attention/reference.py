"""Eager definition of windowed attention: windows unfolded, all logits in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def windowed_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    windowed_mask: Tensor | None,
    scale: float,
) -> Tensor:
    """Arguments as in `api.windowed_attention`; a query that sees no key gives 0."""
    atoms, size = q.shape[1], bias.shape[-2]
    queries = _windows(q, size)
    keys, values = (_with_previous(_windows(t, size)) for t in (k, v))
    seen = q.new_ones(q.shape[:2], dtype=torch.bool) if mask is None else mask
    seen = _with_previous(_windows(seen.unsqueeze(-1).unsqueeze(-1), size)).squeeze(-1).squeeze(-1).unsqueeze(2)
    if windowed_mask is not None:
        seen = seen & windowed_mask
    scores = torch.einsum("bnihd,bnjhd->bhnij", queries * scale, keys) + bias
    seen = seen.unsqueeze(1).expand(scores.shape)
    empty = ~seen.any(-1, keepdim=True)
    scores = scores.masked_fill(~seen, float("-inf")).masked_fill(empty, 0.0)
    weights = scores.softmax(-1).masked_fill(empty, 0.0).to(v.dtype)
    return torch.einsum("bhnij,bnjhd->bnihd", weights, values).flatten(1, 2)[:, :atoms]


def _windows(t: Tensor, size: int) -> Tensor:
    """[B, M, X, Y] -> [B, nw, size, X, Y]; what is missing in the last window is 0 (False)."""
    return F.pad(t, (0, 0, 0, 0, 0, -t.shape[1] % size)).unflatten(1, (-1, size))


def _with_previous(t: Tensor) -> Tensor:
    """Each window behind the one before it: [B, nw, w, X, Y] -> [B, nw, 2 w, X, Y]; before the first comes 0."""
    return torch.cat((F.pad(t[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0)), t), dim=2)
