"""The per-query numbers of the backward: how they lie in memory, and where delta is made from."""

FEW_KEYS = 16
"""Up to so many keys delta is made from probabilities and not from the output; the least tile of keys.

With 2 keys and 16 bits the rounding of the output is nearly all of the error of d(bias), which is then twice that of
eager PyTorch; with 8 keys it is as large as eager's, with 97 two thirds of it.
"""


def statistics_pitch(n_queries: int) -> int:
    """Numbers from one row of a [B, R, H, pitch >= Nq] fp32 tensor to the next: 16 bytes, for the copy engine."""
    return -(-n_queries // 4) * 4
