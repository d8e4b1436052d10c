"""Cross entropy of logits that are a linear map of the pair representation, row by row: no [N, N, bins] tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

# Logits that one chunk of rows may have.
CHUNK_LOGITS = 1 << 25


def pair_cross_entropy(pairs: Tensor, to_logits: nn.Linear, labels: Tensor, *, ignore: int, symmetric: bool) -> Tensor:
    """Sum over all pairs of the cross entropy of ``to_logits(pairs)`` and ``labels``, by structure, in fp32.

    Args:
        pairs: [B, N, N, d]; with ``symmetric`` the logits are of pairs + their transpose (AF3 algorithms 1 and 31).
        to_logits: d -> bins; without a bias in the stock model.
        labels: int64 [B, N, N]; ``ignore`` where a pair does not count.

    Returns:
        [B].
    """
    rows = max(1, CHUNK_LOGITS // max(1, labels[:, 0].numel() * to_logits.out_features))
    # split, not slices: its backward puts the chunks' gradients together once.
    parts = [pairs.split(rows, dim=1), labels.split(rows, dim=1)]
    parts += [pairs.split(rows, dim=2)] if symmetric else []

    def of_rows(x: Tensor, wanted: Tensor, transposed: Tensor | None = None) -> Tensor:
        x = x if transposed is None else x + transposed.transpose(1, 2)
        loss = F.cross_entropy(to_logits(x).flatten(0, 2), wanted.flatten(), ignore_index=ignore, reduction="none")
        return loss.view(wanted.shape).sum(dim=(1, 2))

    return torch.stack(
        [checkpoint(of_rows, *part, use_reentrant=False, preserve_rng_state=False) for part in zip(*parts)]
    ).sum(dim=0)
