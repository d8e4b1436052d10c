"""Triangle multiplication and triangle attention (AF3 algorithms 12 to 15) on a block of rows of the pair tensor.

Each function is the ``forward`` of one stock module (``self``): pairs [b, n, N, d], of which this rank holds n of the N
rows, the mask [b, N] whole. Sent per rank and forward, in elements, with f = (P - 1) / P:

* a triangle multiplication: 3 N^2 c / P f. Both operands go to a sharding over channels, where the product is local
  whichever index it sums, and one product comes back. No rank holds an operand [N, N, c], and any P works: beyond c
  ranks some have no channel.
* triangle attention around starting nodes: H N^2 f of bias, gathered for H heads, not for c channels.
* around ending nodes: the same, and 2 N^2 c / P f for rows to columns and back.

A block of four: 8 N^2 c / P f + 2 H N^2 f; with c = 128, H = 4 and P = 8 this is 119 N^2, and falls with P towards 8
N^2. The published code moves 4 all-to-all of N^2 c / P, 2 all-gathers of N^2 c (the operands of the multiplications,
whole) and 3 of biases: (4 c / P + 2 c + 3 H) N^2 f = 291 N^2 at P = 8, and its 2 c N^2 stay whatever P is.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import Tensor

from megafold.evosp3d.collectives import Exchange, Gather, run, start

if TYPE_CHECKING:
    from alphafold3_pytorch.attention import Attention
    from torch.nn import Module

    from megafold.evosp3d.mesh import Shards
    from megafold.model.attend import Attend


def triangle_multiplication(self: Module, x: Tensor, mask: Tensor | None = None, *, shards: Shards) -> Tensor:
    """``TriangleMultiplication.forward``: x [b, n, N, d], mask [b, N] -> [b, n, N, d]."""
    name, total = "triangle_multiplication", x.shape[2]
    # Channels first: what packs the message also makes each channel a matrix.
    operands = project_operands(self, x, mask, shards).permute(0, 3, 4, 1, 2)
    width = operands.shape[2]
    flight = start(Exchange(split=2, split_total=width, join=3, join_total=total), operands, shards, name)
    gate = self.out_gate(x).sigmoid()
    left, right = flight.wait().unbind(1)
    product = triangle_product(left, right, outgoing=_is_outgoing(self))
    product = run(Exchange(split=2, split_total=total, join=1, join_total=width), product, shards, name)
    return self.to_out(self.to_out_norm(product.permute(0, 2, 3, 1))) * gate


def project_operands(self: Module, x: Tensor, mask: Tensor | None, shards: Shards) -> Tensor:
    """Left and right operand [b, n, N, 2, h], 0 where the mask is False."""
    operands = self.left_right_proj(x).unflatten(-1, (2, -1))
    if mask is None:
        return operands
    seen = shards.narrow(mask, 1).unsqueeze(2) & mask.unsqueeze(1)
    return operands * seen[..., None, None]


def triangle_product(left: Tensor, right: Tensor, *, outgoing: bool) -> Tensor:
    """All rows and columns of some channels, both [b, h', N, N] -> sum over the third edge [b, h', N, N]."""
    # outgoing: l[i, k] r[j, k]; incoming: l[k, j] r[k, i]
    return left @ right.transpose(-1, -2) if outgoing else right.transpose(-1, -2) @ left


def triangle_attention(
    self: Module,
    pairwise_repr: Tensor,
    mask: Tensor | None = None,
    return_values: bool = False,
    value_residual: Tensor | None = None,
    *,
    shards: Shards,
    attend: Attend,
) -> Tensor | tuple[Tensor, Tensor]:
    """``TriangleAttention.forward``: [b, n, N, d], mask [b, N] -> [b, n, N, d].

    The values that a later layer may take as ``value_residual`` are those of this rank's rows (columns where the
    module attends along columns).
    """
    ending, total = self.need_transpose, pairwise_repr.shape[2]
    name = "triangle_attention"
    bias_flight = start(Gather(dim=2, total=total), self.to_attn_bias(pairwise_repr), shards, name)
    if ending:
        turned = run(Exchange(split=2, split_total=total, join=1, join_total=total), pairwise_repr, shards, name)
        x = turned.transpose(1, 2)
    else:
        x = pairwise_repr
    q, k, v, values = project_attention(self.attn, x, value_residual)
    gate = None if self.attn.to_gates is None else self.attn.to_gates(x)
    bias = bias_flight.wait()
    bias = bias.transpose(-1, -2) if ending else bias
    out = attend(q, k, v, bias, None if mask is None else mask.unsqueeze(1))
    out = out.transpose(2, 3).flatten(-2)
    out = self.attn.to_out(out if gate is None else out * gate)
    if ending:
        out = run(Exchange(split=1, split_total=total, join=2, join_total=total), out.transpose(1, 2), shards, name)
    out = drop_shared(self.dropout, out, shards)
    return (out, values) if return_values else out


def project_attention(attn: Attention, x: Tensor, value_residual: Tensor | None) -> tuple[Tensor, ...]:
    """x [b, R, N, d] -> queries, keys, values [b, R, H, N, D] and the values [b * R, H, N, D] before any mixing."""
    heads = attn.split_heads.axes_lengths["h"]
    q, k, v = (t.unflatten(-1, (heads, -1)).transpose(2, 3) for t in (attn.to_q(x), *attn.to_kv(x).chunk(2, dim=-1)))
    values = v.flatten(0, 1)
    if value_residual is not None:
        mixed = values.lerp(value_residual, attn.to_value_residual_mix(x.flatten(0, 1)))
        v = mixed.unflatten(0, v.shape[:2])
    return q, k, v, values


def drop_shared(dropout: Module, x: Tensor, shards: Shards) -> Tensor:
    """The stock ``Dropout`` on [b, n, N, d]: the mask is drawn as for all N rows, and this rank's part is used."""
    if dropout.dropout_type != "col":
        return dropout(x)  # one mask for all rows, of a shape without them
    ones = x.new_ones(x.shape[0], x.shape[2], 1, x.shape[3])
    return x * shards.narrow(dropout.dropout(ones), 1)


def _is_outgoing(self: Module) -> bool:
    return self.mix_einsum_eq.startswith("... i k")


def attend_or_nothing(attend: Attend) -> Attend:
    """``attend`` for ranks that may hold no row: nothing is computed there, but the graph stays connected.

    A rank whose bias got no gradient would not take part in the collective that reduces it, and the others would wait.
    """

    def attend_rows(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, mask: Tensor | None, *, dropout_p: float = 0.0
    ) -> Tensor:
        if q.numel():
            return attend(q, k, v, bias, mask, dropout_p=dropout_p)
        out = q + (k.sum() + v.sum()) * 0
        return out if bias is None else out + bias.sum() * 0

    return attend_rows
