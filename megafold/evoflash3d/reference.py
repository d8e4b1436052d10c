"""Eager definition of the attention, whole (`eager_attention`) and in chunks that need no O(R N^2) memory.

AF3 algorithms 14 and 15 (triangle attention), 24 (attention with pair bias): softmax(scale q k^T + bias) v, with the
bias shared by all rows. A query whose keys are all masked (or all at minus infinity) gives 0 and a log-sum-exp of
minus infinity. The chunked functions are what runs on a CPU and on a device without a supported Triton.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from megafold.evoflash3d.dropout import philox_keep
from megafold.evoflash3d.statistics import FEW_KEYS

CHUNK_ELEMENTS = 1 << 24
"""Largest number of scores held at once: 64 MiB in fp32."""


def eager_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, mask: Tensor | None = None, scale: float | None = None
) -> Tensor:
    """The plain definition in the dtype of its inputs, holding all scores: what an error budget is measured against.

    Args:
        q: [B, R, H, Nq, D]; k, v: [B, R, H, Nk, D]; bias: [B, H, Nq, Nk]; mask: [B, R, Nk] bool, True = keep.
        scale: factor of q k^T, D ** -0.5 by default.

    Returns:
        [B, R, H, Nq, D] in the dtype of v.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    scores = (q @ k.transpose(-1, -2)) * scale
    if bias is not None:
        scores = scores + bias[:, None]
    if mask is not None:
        scores = scores.masked_fill(~mask[:, :, None, None, :], float("-inf"))
        empty = ~mask.any(-1)[:, :, None, None, None]
        scores = scores.masked_fill(empty, 0.0)
        return (scores.softmax(-1).to(v.dtype) @ v).masked_fill(empty, 0.0)
    return scores.softmax(-1).to(v.dtype) @ v


def chunked_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    scale: float,
    dropout_p: float,
    offsets: list[int],
) -> tuple[Tensor, Tensor]:
    """Attention over chunks of rows and queries, computed in fp32 (fp64 for fp64 inputs).

    Returns:
        out [B, R, H, Nq, D] in the dtype of q, and the natural log-sum-exp [B, R, H, Nq] in fp32 (or fp64).
    """
    wide = _wide(q)
    out = torch.empty_like(q)
    lse = torch.empty(q.shape[:-1], dtype=wide, device=q.device)
    for b, rows, queries in _chunks(q, k):
        probabilities, chunk_lse = _probabilities(q, k, bias, mask, scale, b, rows, queries)
        if dropout_p:
            probabilities = probabilities * _keep_factor(seed, dropout_p, q, k, offsets, b, rows, queries)
        out[b, rows, :, queries] = (probabilities @ v[b, rows].to(wide)).to(q.dtype)
        lse[b, rows, :, queries] = chunk_lse
    return out, lse


def chunked_backward(
    grad_out: Tensor,
    grad_lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    scale: float,
    dropout_p: float,
    offsets: list[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of `chunked_forward`, recomputing the probabilities of one chunk at a time.

    Returns:
        dq, dk, dv in the dtypes of q, k, v and d(bias) in the dtype of the bias (None without a bias).
    """
    wide = _wide(q)
    dq, dk, dv = (torch.zeros_like(t, dtype=wide) for t in (q, k, v))
    dbias = None if bias is None else torch.zeros_like(bias, dtype=wide)
    for b, rows, queries in _chunks(q, k):
        probabilities, _ = _probabilities(q, k, bias, mask, scale, b, rows, queries)
        cotangent = grad_out[b, rows, :, queries].to(wide)
        dscores = cotangent @ v[b, rows].to(wide).transpose(-1, -2)
        dropped = probabilities
        if dropout_p:
            keep = _keep_factor(seed, dropout_p, q, k, offsets, b, rows, queries)
            dropped, dscores = probabilities * keep, dscores * keep
        if k.shape[3] <= FEW_KEYS:
            delta = (probabilities * dscores).sum(-1, keepdim=True)
        else:
            delta = (cotangent * out[b, rows, :, queries].to(wide)).sum(-1, keepdim=True)
        if grad_lse is not None:
            delta = delta - grad_lse[b, rows, :, queries, None].to(wide)
        dv[b, rows] += dropped.transpose(-1, -2) @ cotangent
        dscores = probabilities * (dscores - delta)
        dq[b, rows, :, queries] = scale * (dscores @ k[b, rows].to(wide))
        dk[b, rows] += scale * (dscores.transpose(-1, -2) @ q[b, rows, :, queries].to(wide))
        if dbias is not None:
            dbias[b, :, queries] += dscores.sum(0)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), None if dbias is None else dbias.to(bias.dtype)


def _wide(tensor: Tensor) -> torch.dtype:
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _chunks(q: Tensor, k: Tensor) -> Iterator[tuple[int, slice, slice]]:
    """(batch, slice of rows, slice of queries) so that no chunk has more than CHUNK_ELEMENTS scores."""
    batch, n_rows, heads, n_queries, _ = q.shape
    per_query = max(1, heads * k.shape[3])
    queries = max(1, min(n_queries, CHUNK_ELEMENTS // per_query))
    rows = max(1, min(n_rows, CHUNK_ELEMENTS // (per_query * queries)))
    for b in range(batch):
        for row in range(0, n_rows, rows):
            for query in range(0, n_queries, queries):
                yield b, slice(row, min(row + rows, n_rows)), slice(query, min(query + queries, n_queries))


def _probabilities(
    q: Tensor,
    k: Tensor,
    bias: Tensor | None,
    mask: Tensor | None,
    scale: float,
    b: int,
    rows: slice,
    queries: slice,
) -> tuple[Tensor, Tensor]:
    wide = _wide(q)
    scores = (q[b, rows, :, queries].to(wide) * scale) @ k[b, rows].to(wide).transpose(-1, -2)
    if bias is not None:
        scores += bias[b, :, queries].to(wide)
    if mask is not None:
        scores.masked_fill_(~mask[b, rows, None, None, :], float("-inf"))
    lse = scores.logsumexp(-1)
    # A query without keys: exp(-inf - 0) = 0 instead of exp(-inf + inf) = NaN.
    scores -= lse.masked_fill(lse == float("-inf"), 0.0)[..., None]
    return scores.exp_(), lse


def _keep_factor(
    seed: Tensor | None, dropout_p: float, q: Tensor, k: Tensor, offsets: list[int], b: int, rows: slice, queries: slice
) -> Tensor:
    def index(start: int, stop: int, offset: int, axis: int) -> Tensor:
        shape = [-1 if a == axis else 1 for a in range(4)]
        return (torch.arange(start, stop, device=q.device) + offset).view(shape)

    b0, r0, h0, i0, j0 = offsets
    keep = philox_keep(
        seed,
        dropout_p,
        torch.tensor(b + b0, device=q.device),
        index(rows.start, rows.stop, r0, 0),
        index(0, q.shape[2], h0, 1),
        index(queries.start, queries.stop, i0, 2),
        index(0, k.shape[3], j0, 3),
    )
    return keep.to(_wide(q)) / (1.0 - dropout_p)
