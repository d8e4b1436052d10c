"""Eager definition of what follows an attention, in the dtype of its inputs or under autocast."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor


def attention_output(
    attended: Tensor, gate: Tensor | None, weight: Tensor, dropped: Tensor | None, residual: Tensor | None
) -> Tensor:
    """Arguments as in `api.attention_output`."""
    out = F.linear(attended if gate is None else attended * gate.sigmoid(), weight)
    if dropped is not None:
        out = out * dropped.to(out.dtype)
    return out if residual is None else residual + out
