"""Atoms of tokens and tokens of atoms, on the device alone: no length is read by the host.

A structure's atoms stand in the order of its tokens: ``atoms_a_token`` [b, N] says how many belong to each, atoms
behind the last token's are padding.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from torch.nn import Module


def token_of_atom(atoms_a_token: Tensor, atoms: int) -> tuple[Tensor, Tensor]:
    """[b, N] -> the token that each atom belongs to and whether it is an atom at all, both [b, atoms]."""
    ends = atoms_a_token.cumsum(dim=-1)
    position = torch.arange(atoms, device=ends.device).expand(ends.shape[0], -1).contiguous()
    is_atom = position < ends[:, -1:]
    return torch.searchsorted(ends, position, right=True).masked_fill(~is_atom, 0), is_atom


def to_atoms(values: Tensor, atoms_a_token: Tensor, atoms: int) -> Tensor:
    """What each token has, for each of its atoms: [B, N, d] -> [B, atoms, d], 0 where there is no atom.

    ``atoms_a_token`` [b, N] with B a multiple of b. The gradient sums over a token's atoms in their order, so that two
    runs give the same bits (the gradient of a gather is summed with atomics).
    """
    return _ToAtoms.apply(values, atoms_a_token, atoms)


def sum_over_atoms(values: Tensor, atoms_a_token: Tensor) -> Tensor:
    """The sum over each token's atoms: [B, M, d] -> [B, N, d] of the dtype of ``values``, summed in fp32 or wider."""
    return _SumOverAtoms.apply(values, atoms_a_token)


def mark_atoms(is_marked: Tensor, atoms_a_token: Tensor, atoms: int) -> Tensor:
    """A property of tokens for their atoms: boolean [b, N] -> [b, atoms], False where there is no atom."""
    token, is_atom = token_of_atom(atoms_a_token, atoms)
    return is_marked.gather(1, token) & is_atom


def pool_atoms(
    self: Module, *, atom_feats: Tensor, molecule_atom_lens: Tensor, atom_mask: Tensor | None = None
) -> Tensor:
    """``AtomToTokenPooler.forward``: atoms [B, M, d], their number a token [B, N] -> means [B, N, d'], fp32 at least.

    The stock module takes differences of sums over all atoms before, which loses digits, and asks the host whether the
    lengths fit.
    """
    feats = self.proj(atom_feats)
    feats = feats if feats.dtype == torch.float64 else feats.float()
    return sum_over_atoms(feats, molecule_atom_lens) / molecule_atom_lens.clamp(min=1).unsqueeze(-1)


def _gathered(values: Tensor, atoms_a_token: Tensor, atoms: int) -> Tensor:
    token, is_atom = token_of_atom(atoms_a_token, atoms)
    grouped = values.unflatten(0, (token.shape[0], -1))
    index = token[:, None, :, None].expand(-1, grouped.shape[1], -1, values.shape[-1])
    return grouped.gather(2, index).masked_fill(~is_atom[:, None, :, None], 0.0).flatten(0, 1)


def _summed(values: Tensor, atoms_a_token: Tensor) -> Tensor:
    wide = values if values.dtype == torch.float64 else values.float()
    copies = values.shape[0] // atoms_a_token.shape[0]
    lengths = atoms_a_token.repeat_interleave(copies, dim=0) if copies > 1 else atoms_a_token
    # unsafe: the check that the lengths fit would wait for the device.
    return torch.segment_reduce(wide.contiguous(), "sum", lengths=lengths, axis=1, unsafe=True).to(values.dtype)


class _ToAtoms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, atoms_a_token: Tensor, atoms: int) -> Tensor:
        ctx.save_for_backward(atoms_a_token)
        return _gathered(values, atoms_a_token, atoms)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        return _summed(gradient, *ctx.saved_tensors), None, None


class _SumOverAtoms(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, atoms_a_token: Tensor) -> Tensor:
        ctx.save_for_backward(atoms_a_token)
        ctx.atoms = values.shape[1]
        return _summed(values, atoms_a_token)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return _gathered(gradient, *ctx.saved_tensors, ctx.atoms), None
