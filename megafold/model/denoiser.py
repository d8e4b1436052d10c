"""The diffusion module with everything that the augmentations of a structure share computed once.

b structures of N tokens and M atoms, ``copies`` augmentations each; the batch B = b * copies runs over the
augmentations of the first structure, then over those of the next. What knows the noise level or the noised positions
has B elements, the rest b.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from alphafold3_pytorch.attention import full_pairwise_repr_to_windowed
from torch import Tensor

from megafold.model.repeated import Repeated, materialize, on_once, plus, scaled
from megafold.model.windows import in_windows, with_previous

if TYPE_CHECKING:
    from alphafold3_pytorch.alphafold3 import ConfidenceHead, ElucidatedAtomDiffusion
    from torch.nn import Module


def denoise(
    self: Module,
    noised_atom_pos: Tensor,
    *,
    atom_feats: Tensor | Repeated,
    atompair_feats: Tensor | Repeated,
    atom_mask: Tensor,
    times: Tensor,
    mask: Tensor,
    single_trunk_repr: Tensor | Repeated,
    single_inputs_repr: Tensor | Repeated,
    pairwise_trunk: Tensor | Repeated,
    pairwise_rel_pos_feats: Tensor | Repeated,
    molecule_atom_lens: Tensor,
    atom_parent_ids: Tensor | None = None,
    missing_atom_mask: Tensor | None = None,
) -> Tensor:
    """``DiffusionModule.forward`` (AF3 algorithm 20): noised_atom_pos [B, M, 3], noise ``times`` [B] -> [B, M, 3].

    The features may be :class:`Repeated`. Integer and boolean arguments come with B elements, equal for all copies of a
    structure. Where ``times`` is one number expanded over the batch, the single conditioning is shared too.
    """
    features = (
        atom_feats,
        atompair_feats,
        single_trunk_repr,
        single_inputs_repr,
        pairwise_trunk,
        pairwise_rel_pos_feats,
    )
    if not all(isinstance(feature, Repeated) for feature in features):
        features = tuple(Repeated(materialize(feature), 1) for feature in features)
    copies = features[0].copies
    atom_feats, (atompairs, *trunk) = features[0], (feature.once for feature in features[1:])
    single_trunk, single_inputs, pairwise_trunk, relative_positions = trunk
    token, is_atom = _token_of_atom(molecule_atom_lens[::copies], noised_atom_pos.shape[1])

    pairs = self.pairwise_conditioner(pairwise_trunk=pairwise_trunk, pairwise_rel_pos_feats=relative_positions)
    single_features = Repeated(torch.cat((single_trunk, single_inputs), dim=-1), copies)
    single = _condition_single(self.single_conditioner, times, single_features)

    positions = self.atom_pos_to_atom_feat(noised_atom_pos)
    if missing_atom_mask is not None:
        positions = torch.where(missing_atom_mask.unsqueeze(-1), self.missing_atom_feat, positions)
    atoms = plus(positions, atom_feats)
    atom_cond = _to_atoms(on_once(self.single_repr_to_atom_feat_cond, single), token, is_atom)
    atom_context = {
        "mask": atom_mask,
        "windowed_mask": _same_parent(atom_parent_ids, self.atoms_per_window, copies),
        "single_repr": plus(atom_cond, atom_feats),
        "pairwise_repr": _condition_atompairs(self, atoms, atompairs, pairs, token, copies),
    }
    atoms = self.atom_encoder(atoms, **atom_context)

    tokens = self.atom_feats_to_pooled_token(
        atom_feats=atoms, atom_mask=atom_mask, molecule_atom_lens=molecule_atom_lens
    )
    tokens = plus(on_once(self.cond_tokens_with_cond_single, single), tokens)
    pairs = Repeated(pairs, copies)
    if self.token_transformer.has_registers:  # the stock module pads both, which only tensors can take
        single, pairs = materialize(single), materialize(pairs)
    tokens = self.token_transformer(tokens, mask=mask, single_repr=single, pairwise_repr=pairs)
    tokens = self.tokens_to_atom_decoder_input_cond(self.attended_token_norm(tokens))

    atoms = self.atom_decoder(_to_atoms(tokens, token, is_atom) + atoms, **atom_context)
    return self.atom_feat_to_atom_pos_update(atoms)


def adaptive_layer_norm(self: Module, x: Tensor, cond: Tensor | Repeated) -> Tensor:
    """``AdaptiveLayerNorm.forward`` (AF3 algorithm 26): x [B, N, d], cond [B, N, dc] or Repeated -> [B, N, d]."""
    cond = on_once(self.norm_cond, cond)
    return plus(scaled(self.norm(x), on_once(self.to_gamma, cond)), on_once(self.to_beta, cond))


def conditioned(self: Module, x: Tensor, *, cond: Tensor | Repeated, **kwargs: object) -> Tensor | tuple[Tensor, ...]:
    """``ConditionWrapper.forward`` (AF3 algorithm 25) for a ``cond`` that may be :class:`Repeated`."""
    out = self.fn(self.adaptive_norm(x, cond=cond), **kwargs)
    gate = on_once(self.to_adaln_zero_gamma, cond)
    return (scaled(out[0], gate), *out[1:]) if isinstance(out, tuple) else scaled(out, gate)


def precondition(
    self: ElucidatedAtomDiffusion, noised_atom_pos: Tensor, sigma: Tensor | float, *args: object, **kwargs: object
) -> Tensor:
    """``ElucidatedAtomDiffusion.preconditioned_network_forward``; the one noise level of a rollout stays one number."""
    if isinstance(sigma, float):
        sigma = noised_atom_pos.new_full((), sigma).expand(noised_atom_pos.shape[0])
    return type(self).preconditioned_network_forward(self, noised_atom_pos, sigma, *args, **kwargs)


def confidence_of_copies(self: ConfidenceHead, **kwargs: object) -> object:
    """``ConfidenceHead.forward``: here each copy has coordinates of its own, so the copies are made."""
    return type(self).forward(self, **{name: materialize(value) for name, value in kwargs.items()})


def _condition_single(conditioner: Module, noise: Tensor, features: Repeated) -> Tensor | Repeated:
    """``SingleConditioning`` (AF3 algorithm 21): noise [B], features [b, N, d] -> [B, N, d], or one copy of it."""
    one_level = features.copies > 1 and noise.stride(0) == 0
    noise = noise[:: features.copies] if one_level else noise
    fourier = conditioner.fourier_embed((noise / conditioner.sigma_data).clamp(min=conditioner.eps).log() * 0.25)
    fourier = conditioner.fourier_to_single(conditioner.norm_fourier(fourier)).unsqueeze(1)
    single = plus(
        Repeated(fourier, features.copies) if one_level else fourier, on_once(conditioner.norm_single, features)
    )
    for transition in conditioner.transitions:
        single = plus(on_once(transition, single), single)
    return single


def _condition_atompairs(
    self: Module, atoms: Tensor, atompairs: Tensor, pairs: Tensor, token: Tensor, copies: int
) -> Tensor:
    """Atom pairs [B, nw, w, 2w, c] from those of the input (b), token pairs [b, N, N, c'] and noised atoms (B)."""
    size, tokens = self.atoms_per_window, pairs.shape[1]
    if atompairs.ndim == 4:
        atompairs = full_pairwise_repr_to_windowed(atompairs, window_size=size)
    windows = in_windows(token, size)
    index = windows.unsqueeze(-1) * tokens + with_previous(windows).unsqueeze(-2)
    of_tokens = self.pairwise_repr_to_atompair_feat_cond(pairs).flatten(1, 2)
    of_tokens = of_tokens.gather(1, index.flatten(1).unsqueeze(-1).expand(-1, -1, of_tokens.shape[-1]))
    shared = of_tokens.unflatten(1, index.shape[1:]) + atompairs

    rows, columns = in_windows(self.atom_repr_to_atompair_feat_cond(atoms), size).chunk(2, dim=-1)
    conditioned_pairs = plus(Repeated(shared, copies), rows.unsqueeze(3)) + with_previous(columns).unsqueeze(2)
    return self.atompair_feats_mlp(conditioned_pairs) + conditioned_pairs


def _token_of_atom(atoms_a_token: Tensor, atoms: int) -> tuple[Tensor, Tensor]:
    """[b, N] -> the token that each atom belongs to and whether it is an atom at all, both [b, atoms]."""
    ends = atoms_a_token.cumsum(dim=-1)
    position = torch.arange(atoms, device=ends.device).expand(ends.shape[0], -1).contiguous()
    is_atom = position < ends[:, -1:]
    return torch.searchsorted(ends, position, right=True).masked_fill(~is_atom, 0), is_atom


def _to_atoms(values: Tensor | Repeated, token: Tensor, is_atom: Tensor) -> Tensor | Repeated:
    """What each token has, for each of its atoms: [B, N, d] -> [B, M, d], 0 where there is no atom."""
    if isinstance(values, Repeated):
        return Repeated(_to_atoms(values.once, token, is_atom), values.copies)
    width = values.shape[-1]
    grouped = values.unflatten(0, (token.shape[0], -1))
    index = token[:, None, :, None].expand(-1, grouped.shape[1], -1, width)
    return grouped.gather(2, index).masked_fill(~is_atom[:, None, :, None], 0.0).flatten(0, 1)


def _same_parent(parents: Tensor | None, size: int, copies: int) -> Tensor | None:
    """Which atoms of a window belong to the same molecule: parent ids [B, M] -> [B, nw, w, 2w]."""
    if parents is None:
        return None
    windows = in_windows(parents[::copies], size)
    return Repeated(windows.unsqueeze(-1) == with_previous(windows).unsqueeze(-2), copies).materialize()
