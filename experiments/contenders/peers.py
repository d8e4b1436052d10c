"""Triangle attention (AF3 algorithms 14 and 15 without the projections) of all contenders, each in its own convention.

Our convention: q, k, v and the output are [B, R, H, N, D] (R rows, N = R), bias [B, H, N, N], mask [B, R, N] bool with
True = keep. An `Attention` says how its contender's layout follows from that; it gets contiguous tensors in its own.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from experiments.providers import Unsupported

OURS = (0, 1, 2, 3, 4)
HEADS_FIRST = (0, 2, 1, 3, 4)  # [B, H, R, N, D]
HEADS_LAST = (0, 1, 3, 2, 4)  # [B, R, N, H, D]


def _keep(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask


def _drop(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return ~mask


def _keep_wide(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return mask[:, :, None, None, :].contiguous()


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """0 where a key is kept, -1e9 (finite, so that every kernel can add it) where not: [B, R, 1, 1, N]."""
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(~mask, -1e9)[:, :, None, None, :]


@dataclass(frozen=True)
class Attention:
    """One contender's triangle attention.

    Attributes:
        call: (q, k, v, bias, mask) in the contender's layouts to its output.
        order: the axes of ours in the contender's order; every order here is its own inverse.
        mask: from our mask and the dtype to the contender's.
        wide_bias: the bias is [B, 1, H, N, N].
        needs_mask: it takes no None; it is given a mask that keeps everything.
        narrow_bias: it takes a bias in the dtype of q alone; an fp32 bias is converted as part of its time.
        note: what a reader of its times has to know.
    """

    call: Callable[[Tensor, Tensor, Tensor, Tensor, Any], Tensor]
    order: tuple[int, ...] = OURS
    mask: Callable[[Tensor, torch.dtype], Tensor] = _keep
    wide_bias: bool = False
    needs_mask: bool = False
    narrow_bias: bool = False
    note: str = ""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Any) -> Tensor:
        """The output, in the contender's layout."""
        return self.call(q, k, v, bias.to(q.dtype) if self.narrow_bias else bias, mask)


def find_attention(name: str, device: str, n_tokens: int) -> Attention:
    """The contender of that name; Unsupported, with the reason, where it cannot run on this device."""
    return _ATTENTIONS[name](device, n_tokens)


def _eager(device: str, n_tokens: int) -> Attention:
    from megafold.evoflash3d.reference import eager_attention

    return Attention(eager_attention)


def _sdpa(device: str, n_tokens: int) -> Attention:
    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor | None) -> Tensor:
        added = bias[:, None].expand(*q.shape[:3], *bias.shape[-2:])
        if mask is not None:
            added = added.masked_fill(~mask[:, :, None, None, :], float("-inf"))
        # Rows and batch in one axis: the fused backends take four axes.
        out = functional.scaled_dot_product_attention(
            q.flatten(0, 1), k.flatten(0, 1), v.flatten(0, 1), added.flatten(0, 1)
        )
        return out.view(q.shape)

    return Attention(call, narrow_bias=True)


def _compile(device: str, n_tokens: int) -> Attention:
    from megafold.evoflash3d.reference import eager_attention

    return Attention(torch.compile(eager_attention, dynamic=False))


def _evoflash3d(device: str, n_tokens: int) -> Attention:
    from megafold.evoflash3d.api import evoflash3d

    note = "CPU: the chunked PyTorch reference of EvoFlash-3D, not its kernels" if device == "cpu" else ""
    return Attention(evoflash3d, note=note)


def _trifast(device: str, n_tokens: int) -> Attention:
    need_gpu("trifast", device)
    module = need_module("trifast")
    return Attention(module.triangle_attention, HEADS_FIRST, _drop, needs_mask=True)


def _cuequivariance(device: str, n_tokens: int) -> Attention:
    need_gpu("cuequivariance", device, "nvidia")
    module = need_module("cuequivariance_torch")
    need_module("cuequivariance_ops_torch")
    note = f"N = {n_tokens} <= 100: cuequivariance falls back to plain PyTorch" if n_tokens <= 100 else ""
    return Attention(module.triangle_attention, OURS, _keep_wide, wide_bias=True, note=note)


def _openfold3(device: str, n_tokens: int) -> Attention:
    need_gpu("openfold3", device)
    module = need_module("openfold3.core.kernels.triton.evoformer")
    if module.TritonEvoformer is None:
        raise Unsupported("openfold3: its Triton kernel is not available here")

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        return module.TritonEvoformer(q, k, v, mask, bias)

    return Attention(call, HEADS_LAST, _additive, wide_bias=True, needs_mask=True)


def _protenix(device: str, n_tokens: int) -> Attention:
    need_gpu("protenix", device)
    # Its backward reads d(out) as if it were contiguous in its own layout, which in its model it is.
    attention = need_module("protenix.model.tri_attention.op").TriAttention()

    def call(q: Tensor, k: Tensor, v: Tensor, bias: Tensor, mask: Tensor) -> Tensor:
        # Its kernels do not scale; its own model multiplies the queries before, so this is part of its time.
        return attention(q * q.shape[-1] ** -0.5, k, v, mask, bias)

    return Attention(call, HEADS_LAST, _additive, wide_bias=True, needs_mask=True)


_ATTENTIONS: dict[str, Callable[[str, int], Attention]] = {
    "eager": _eager,
    "sdpa": _sdpa,
    "compile": _compile,
    "evoflash3d": _evoflash3d,
    "trifast": _trifast,
    "cuequivariance": _cuequivariance,
    "openfold3": _openfold3,
    "protenix": _protenix,
}


def need_gpu(name: str, device: str, vendor: str | None = None) -> None:
    """Unsupported where a peer's kernels do not run on this device."""
    if device == "cpu":
        raise Unsupported(f"{name} has no kernels for a CPU")
    if vendor == "nvidia" and torch.version.hip is not None:
        raise Unsupported(f"{name} has kernels for NVIDIA GPUs only")


def need_module(name: str) -> Any:
    """A peer's module; Unsupported, with the reason, where it cannot be imported."""
    try:
        return importlib.import_module(name)
    except Exception as error:  # peers fail to import in many ways: missing libraries, other versions of torch
        reason = str(error).strip().splitlines() or [""]
        raise Unsupported(f"{name} cannot be imported: {type(error).__name__}: {reason[0]}") from error
