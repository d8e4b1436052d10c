"""Attention with a bias that several rows share: one signature, several ways to compute it.

Triangle attention (rows: the rows of the pair representation), the single attention (one row) and the token transformer
(rows: the augmentations of a structure) all are

    softmax(q k^T / sqrt(D) + bias) v,    q [G, R, H, Nq, D]    k, v [G, R, H, Nk, D]    bias [G, H, Nq, Nk]

with a mask [G, 1 or Nq, Nk], True where a key may be seen. Another way to compute it is one more function here, and one
more case in :func:`megafold.model.replacements._attend_for`.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

# The backward of SDPA allocates the gradient of a shared bias once a row. Rows go in chunks that keep it below this.
BIAS_GRADIENT_BYTES = 2 << 30


class Attend(Protocol):
    """Shapes as in the module's docstring; returns [G, R, H, Nq, D] in the dtype of ``v``.

    ``dropout_p`` drops attention probabilities.
    """

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, *, dropout_p: float = 0.0
    ) -> Tensor: ...


def attend_eager(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    *,
    dropout_p: float = 0.0,
    softclamp: float | None = None,
    softmax_dtype: torch.dtype | None = None,
) -> Tensor:
    """The definition, with all logits in memory; ``softclamp`` bounds them smoothly before the mask is applied."""
    logits = (q * q.shape[-1] ** -0.5) @ k.transpose(-1, -2)
    if bias is not None:
        logits = logits + bias.unsqueeze(1)
    if softclamp is not None:
        logits = torch.tanh(logits / softclamp) * softclamp
    if mask is not None:
        # The lowest finite number, as in the stock model: a row without any key averages all of them.
        logits = logits.masked_fill(~mask[:, None, None], torch.finfo(logits.dtype).min)
    probabilities = logits.softmax(dim=-1, dtype=softmax_dtype).to(v.dtype)
    return F.dropout(probabilities, dropout_p) @ v


def attend_sdpa(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, *, dropout_p: float = 0.0
) -> Tensor:
    """Through ``scaled_dot_product_attention``; the mask goes into the bias, which is never repeated over the rows.

    A row without any key averages all of them, as in the stock model (not in fp16, whose lowest number is too high).
    """
    groups, rows, heads = q.shape[:3]
    bias = _with_mask(bias, mask, q)
    if rows == 1:
        return F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0], bias, dropout_p).unsqueeze(1)
    # Structures are folded into the heads, so that the batch is the rows and the bias broadcasts over all of it.
    q, k, v = (t.transpose(0, 1).flatten(1, 2) for t in (q, k, v))
    if bias is not None:
        bias = bias.expand(groups, heads, -1, -1).flatten(0, 1).unsqueeze(0)
    chunks = [
        F.scaled_dot_product_attention(q_part, k_part, v_part, bias, dropout_p)
        for q_part, k_part, v_part in zip(*(t.split(_rows_a_chunk(rows, bias)) for t in (q, k, v)))
    ]
    out = chunks[0] if len(chunks) == 1 else torch.cat(chunks)
    return out.unflatten(1, (groups, heads)).transpose(0, 1)


def attend_evoflash3d(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, *, dropout_p: float = 0.0
) -> Tensor:
    """Through EvoFlash-3D (on a CPU: its chunked reference); the mask must be one row of keys a structure."""
    from megafold.evoflash3d.api import evoflash3d

    if mask is not None:
        mask = mask.expand(-1, q.shape[1], -1)
    return evoflash3d(q, k, v, bias, mask, dropout_p=dropout_p)


def attend_by_device(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, *, dropout_p: float = 0.0
) -> Tensor:
    """Through EvoFlash-3D where its kernels run on q's device and dtype, else through SDPA."""
    from megafold.evoflash3d.api import uses_kernels

    way = attend_evoflash3d if uses_kernels(q.device, q.dtype) else attend_sdpa
    return way(q, k, v, bias, mask, dropout_p=dropout_p)


def _with_mask(bias: Tensor | None, mask: Tensor | None, q: Tensor) -> Tensor | None:
    """Bias and mask as one additive term [G, 1 or H, 1 or Nq, Nk] of q's dtype, dense in its last dimension."""
    if bias is None and mask is None:
        return None
    # Cast first: the lowest fp32 number is -inf in bf16, and a row of -inf gives NaN.
    device, dtype = q.device.type, q.dtype
    if dtype == torch.float32 and torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
    bias = torch.zeros((), dtype=dtype, device=q.device) if bias is None else bias.to(dtype)
    if mask is not None:
        bias = bias.masked_fill(~mask.unsqueeze(1), torch.finfo(dtype).min)
    return bias.contiguous()


def _rows_a_chunk(rows: int, bias: Tensor | None) -> int:
    if bias is None or not bias.requires_grad or not torch.is_grad_enabled():
        return rows
    return max(1, min(rows, BIAS_GRADIENT_BYTES // (bias.numel() * bias.element_size())))
