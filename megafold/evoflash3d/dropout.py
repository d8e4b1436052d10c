"""Which attention probabilities dropout keeps: counter-based, the same bits in the reference and in the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

PHILOX_ROUNDS = 7
_WORD = 0xFFFFFFFF


def philox_keep(
    seed: Tensor, dropout_p: float, b: Tensor, r: Tensor, h: Tensor, i: Tensor, j: Tensor, rounds: int = PHILOX_ROUNDS
) -> Tensor:
    """Which probabilities dropout keeps: a pure function of the seed and the global (b, r, h, i, j).

    Philox-4x32 (Salmon et al. 2011) with counter (j, i, r, b * 65536 + h); the kernels draw the same bits.

    Args:
        seed: int64 [1]. dropout_p: probability of dropping. b, r, h, i, j: int64 indices that broadcast together.

    Returns:
        bool of the broadcast shape, True = keep.
    """
    c0, c1, c2, c3 = torch.broadcast_tensors(j, i, r, b * 65536 + h)
    k0, k1 = seed & _WORD, (seed >> 32) & _WORD
    for _ in range(rounds):
        low, high = c0 * 0xD2511F53, c2 * 0xCD9E8D57
        c0, c1, c2, c3 = (
            ((high >> 32) & _WORD) ^ c1 ^ k0,
            high & _WORD,
            ((low >> 32) & _WORD) ^ c3 ^ k1,
            low & _WORD,
        )
        k0, k1 = (k0 + 0x9E3779B9) & _WORD, (k1 + 0xBB67AE85) & _WORD
    return c0 >= keep_threshold(dropout_p)


def keep_threshold(dropout_p: float) -> int:
    """A 32-bit draw at or above this number is kept."""
    return min(round(dropout_p * 2**32), _WORD)
