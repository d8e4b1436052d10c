"""The attention modules of alphafold3-pytorch, over :mod:`megafold.model.attend` and without repeated biases.

Each function is the ``forward`` of one stock module (``self``), with the stock arguments; ``attend`` is bound by
:func:`megafold.model.optimize.optimize`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import einx
import torch
import torch.nn.functional as F
from alphafold3_pytorch.attention import Attend as StockAttend
from alphafold3_pytorch.attention import full_attn_bias_to_windowed, full_pairwise_repr_to_windowed
from torch import Tensor

from megafold.model.rebind import Stand, with_names
from megafold.model.repeated import Repeated, once_and_copies, remembered
from megafold.model.windows import in_windows, with_previous

if TYPE_CHECKING:
    from alphafold3_pytorch.attention import Attention
    from torch.nn import Module

    from megafold.model.attend import Attend

Gate = Callable[[Tensor, Tensor], Tensor]
"""out * sigmoid(gate) of the output of an attention and of what is projected for its gate."""


def triangle_attention(
    self: Module,
    pairwise_repr: Tensor,
    mask: Tensor | None = None,
    return_values: bool = False,
    value_residual: Tensor | None = None,
    *,
    attend: Attend,
) -> Tensor | tuple[Tensor, Tensor]:
    """``TriangleAttention.forward`` (AF3 algorithms 14, 15): pairwise_repr [b, N, N, d], mask [b, N] -> [b, N, N, d].

    The bias [b, H, N, N] is projected once and shared by the N rows. With ``return_values`` also the values
    [b * N, H, N, D], which a later layer may take as ``value_residual``.
    """
    pairs = pairwise_repr.transpose(1, 2) if self.need_transpose else pairwise_repr
    bias = self.to_attn_bias(pairs)
    out, values = _gated(self.attn, pairs, bias, mask, value_residual, attend)
    out = self.dropout(out.transpose(1, 2) if self.need_transpose else out)
    return (out, values) if return_values else out


def pair_bias_attention(
    self: Module,
    single_repr: Tensor,
    *,
    pairwise_repr: Tensor | Repeated,
    attn_bias: Tensor | None = None,
    return_values: bool = False,
    value_residual: Tensor | None = None,
    mask: Tensor | None = None,
    windowed_mask: None = None,
    attend: Attend,
    make_bias: Callable[[Module, Tensor], Tensor] | None = None,
    gate: Gate | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``AttentionPairBias.forward``, no windows (AF3 algorithm 24): single_repr [B, N, d], mask [B, N] -> [B, N, d].

    pairwise_repr [B, N, N, dp] may be a :class:`Repeated`: then it is normalised and projected to the bias [b, H, N, N]
    once a structure, and its copies share it; ``mask`` must be equal for the copies. Unlike the stock module on ROCm it
    normalises a pair representation of more than 2e9 elements too. ``make_bias`` computes the bias in another way,
    ``gate`` the output gate.
    """
    once, copies = once_and_copies(pairwise_repr)
    bias = remembered(pairwise_repr, self, lambda: (make_bias or _bias)(self, once))
    if attn_bias is not None:
        bias, copies = Repeated(bias, copies).materialize() + attn_bias.unsqueeze(1), 1
    mask = None if mask is None else mask[::copies]
    single = single_repr.unflatten(0, (-1, copies))
    out, values = _gated(self.attn, single, bias, mask, value_residual, attend, gate)
    out = out.flatten(0, 1)
    return (out, values) if return_values else out


def windowed_attention(
    self: Module,
    single_repr: Tensor,
    *,
    pairwise_repr: Tensor,
    attn_bias: Tensor | None = None,
    return_values: bool = False,
    value_residual: Tensor | None = None,
    mask: Tensor | None = None,
    windowed_mask: Tensor | None = None,
    attend: Attend,
    make_bias: Callable[[Module, Tensor], Tensor] | None = None,
    gate: Gate | None = None,
    attend_windows: Callable[..., Tensor] | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """``AttentionPairBias.forward`` with windows of w atoms, each seeing itself and the one before.

    single_repr [B, M, d], pairwise_repr [B, M, M, dp] or [B, nw, w, 2w, dp], mask [B, M], windowed_mask [B, nw, w, 2w]
    -> [B, M, d]. As in the stock module attention probabilities are not dropped here. ``attend_windows`` takes q, k and
    v [B, M, H, D], the bias and both masks as they are, instead of ``attend`` on windows put side by side.
    """
    attn, size, atoms = self.attn, self.window_size, single_repr.shape[1]
    if pairwise_repr.ndim == 4:
        pairwise_repr = full_pairwise_repr_to_windowed(pairwise_repr, window_size=size)
    bias = (make_bias or _bias)(self, pairwise_repr)
    if attn_bias is not None:
        bias = bias + full_attn_bias_to_windowed(attn_bias, window_size=size).unsqueeze(1)
    q, k, v, values = _project(attn, single_repr, bias.shape[1], value_residual)

    if attend_windows is not None and attn.memory_kv is None:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        out = attend_windows(q, k, v, bias, mask, windowed_mask)
        # Copies of one structure (the stride says so) have no padding that differs.
        if mask is not None and (mask.shape[0] == 1 or mask.stride(0) != 0):
            out = _average_where_unseen(out, v, mask, windowed_mask, size)
        out = out.flatten(2)
        out = attn.to_out(_through_gate(attn, out, single_repr, gate))
        return (out, values) if return_values else out

    # [B, H, M, D] -> one group a window, [B * nw, 1, H, w or 2w, D]; likewise the bias and the mask of seen keys.
    q, k, v = (in_windows(t.transpose(1, 2), size) for t in (q, k, v))
    q, k, v = (t.flatten(0, 1).transpose(1, 2).unsqueeze(1) for t in (q, with_previous(k), with_previous(v)))
    valid = single_repr.new_ones(single_repr.shape[:2], dtype=bool) if mask is None else mask
    seen = with_previous(in_windows(valid, size)).unsqueeze(2)
    seen = seen if windowed_mask is None else seen & windowed_mask
    k, v, bias, seen = _with_memory(attn, k, v, bias.transpose(1, 2).flatten(0, 1), seen.flatten(0, 1))

    out = attend(q, k, v, bias, seen).squeeze(1).transpose(1, 2)
    out = out.unflatten(0, (single_repr.shape[0], -1)).flatten(1, 2)[:, :atoms].flatten(2)
    out = attn.to_out(_through_gate(attn, out, single_repr, gate))
    return (out, values) if return_values else out


def _average_where_unseen(out: Tensor, v: Tensor, mask: Tensor, windowed_mask: Tensor | None, size: int) -> Tensor:
    """Padding that sees no atom averages its windows' values [B, M, H, D], as in the stock model, instead of giving 0.

    It matters to nothing but the centre of a rollout's structures, to which the stock model counts the padding.
    """
    seen = with_previous(in_windows(mask, size)).unsqueeze(2)
    seen = seen if windowed_mask is None else seen & windowed_mask
    total = in_windows(v, size).sum(dim=2, keepdim=True)
    total = total + F.pad(total[:, :-1], (0, 0, 0, 0, 0, 0, 1, 0))
    average = (total / (2 * size)).expand(-1, -1, size, -1, -1).flatten(1, 2)[:, : out.shape[1]]
    is_seen = seen.any(dim=-1).expand(-1, -1, size).flatten(1, 2)[:, : out.shape[1]]
    return torch.where(is_seen[..., None, None], out, average.to(out.dtype))


def _bias(self: Module, pairs: Tensor) -> Tensor:
    return self.to_attn_bias(self.to_attn_bias_norm(pairs))


def _gated(
    attn: Attention,
    x: Tensor,
    bias: Tensor,
    mask: Tensor | None,
    value_residual: Tensor | None,
    attend: Attend,
    gate: Gate | None = None,
) -> tuple[Tensor, Tensor]:
    """x [G, R, N, d], bias [G, H, N, N], mask [G, N] -> the output [G, R, N, d] and the values [G * R, H, N, D]."""
    q, k, v, values = _project(attn, x.flatten(0, 1), bias.shape[1], value_residual)
    q, k, v = (t.unflatten(0, x.shape[:2]) for t in (q, k, v))
    seen = None if mask is None else mask.unsqueeze(1)
    k, v, bias, seen = _with_memory(attn, k, v, bias, seen)
    dropout_p = attn.attend.attn_dropout.p if attn.attend.attn_dropout.training else 0.0
    out = attend(q, k, v, bias, seen, dropout_p=dropout_p)
    out = out.transpose(-3, -2).flatten(-2)
    return attn.to_out(_through_gate(attn, out, x, gate)), values


def _project(attn: Attention, x: Tensor, heads: int, value_residual: Tensor | None) -> tuple[Tensor, ...]:
    """x [B, N, d] -> queries, keys, values, all [B, H, N, D], and the values before another layer's are mixed in."""
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(1, 2) for t in (attn.to_q(x), *attn.to_kv(x).chunk(2, dim=-1)))
    mixed = v if value_residual is None else v.lerp(value_residual, attn.to_value_residual_mix(x))
    return q, k, mixed, v


def _with_memory(attn: Attention, k: Tensor, v: Tensor, bias: Tensor, seen: Tensor | None) -> tuple[Tensor | None, ...]:
    """Learned keys and values put before the others, seen by all queries without a bias (where ``attn`` has them)."""
    if attn.memory_kv is None:
        return k, v, bias, seen
    count = attn.memory_kv.shape[-2]
    k, v = (F.pad(t, (0, 0, count, 0)) for t in (k, v))
    memory = F.pad(attn.memory_kv, (0, 0, 0, k.shape[-2] - count)).to(k.dtype)
    seen = None if seen is None else F.pad(seen, (count, 0), value=True)
    return k + memory[0], v + memory[1], F.pad(bias, (count, 0)), seen


def _through_gate(attn: Attention, out: Tensor, x: Tensor, gate: Gate | None) -> Tensor:
    if attn.to_gates is None:
        return out
    if gate is None:
        return out * attn.to_gates(x)
    project, _ = attn.to_gates
    return gate(out, project(x))


def _where(pattern: str, condition: Tensor, value: Tensor, otherwise: Any) -> Tensor:
    """``einx.where``, a plain number made where the tensors are: einx copies it there, which no graph can hold."""
    if not torch.is_tensor(otherwise):
        otherwise = value.new_full((), otherwise)
    return einx.where(pattern, condition, value, otherwise)


attend_in_graphs = with_names(StockAttend.forward, einx=Stand(einx, where=_where))
"""``Attend.forward``, the same numbers, for blocks that are captured while their attention stays stock."""
