"""The diffusion module with everything that the augmentations of a structure share computed once.

b structures of N tokens and M atoms, ``copies`` augmentations each; the batch B = b * copies runs over the
augmentations of the first structure, then over those of the next. What knows the noise level or the noised positions
has B elements, the rest b.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from alphafold3_pytorch.attention import full_pairwise_repr_to_windowed
from torch import Tensor

from megafold.model.recompute import recomputed, with_residual
from megafold.model.repeated import Repeated, materialize, on_once, plus, scaled
from megafold.model.tokens import to_atoms, token_of_atom
from megafold.model.windows import in_windows, with_previous

if TYPE_CHECKING:
    from alphafold3_pytorch.alphafold3 import ConfidenceHead, ElucidatedAtomDiffusion
    from torch.nn import Module


class Shared(NamedTuple):
    """What a structure's augmentations and all noise levels have in common.

    pairs [b, N, N, c] conditioned, with room for each layer's bias; singles [b, N, d] normalised; atom_feats
    [b, M, da]; atompairs [b, nw, w, 2w, dap] with the tokens' pairs added; windowed_mask [B, nw, w, 2w]; lengths, atoms
    a token [b, N].
    """

    pairs: Repeated
    singles: Repeated
    atom_feats: Repeated
    atompairs: Tensor
    windowed_mask: Tensor | None
    lengths: Tensor


def denoise(
    self: Module,
    noised_atom_pos: Tensor,
    *,
    atom_mask: Tensor,
    times: Tensor,
    mask: Tensor,
    molecule_atom_lens: Tensor,
    missing_atom_mask: Tensor | None = None,
    memory: dict[Any, Any] | None = None,
    **features: Tensor | Repeated | None,
) -> Tensor:
    """``DiffusionModule.forward`` (AF3 algorithm 20): noised_atom_pos [B, M, 3], noise ``times`` [B] -> [B, M, 3].

    The features (see :func:`share`) may be :class:`Repeated`. Integer and boolean arguments come with B elements, equal
    for all copies of a structure. Where ``times`` is one number expanded over the batch, the single conditioning is
    shared too. A ``memory`` keeps what depends on the features alone, for the next call with the same ones; it holds no
    graph, so it is for calls without gradients.
    """
    shared = None if memory is None else memory.get(Shared)
    if shared is None:
        shared = share(self, molecule_atom_lens=molecule_atom_lens, memory=memory, **features)
        if memory is not None:
            memory[Shared] = shared
    atom_feats, pairs, lengths, atoms_total = shared.atom_feats, shared.pairs, shared.lengths, noised_atom_pos.shape[1]
    single = recomputed(_condition_single, self, self.single_conditioner, times, shared.singles)

    positions = self.atom_pos_to_atom_feat(noised_atom_pos)
    if missing_atom_mask is not None:
        positions = torch.where(missing_atom_mask.unsqueeze(-1), self.missing_atom_feat, positions)
    atoms = plus(positions, atom_feats)
    atom_cond = on_once(lambda t: to_atoms(self.single_repr_to_atom_feat_cond(t), lengths, atoms_total), single)
    atom_context = {
        "mask": atom_mask,
        "windowed_mask": shared.windowed_mask,
        "single_repr": plus(atom_cond, atom_feats),
        "pairwise_repr": recomputed(_condition_atompairs, self, self, atoms, shared.atompairs, pairs.copies),
    }
    atoms = self.atom_encoder(atoms, **atom_context)

    tokens = self.atom_feats_to_pooled_token(
        atom_feats=atoms, atom_mask=atom_mask, molecule_atom_lens=molecule_atom_lens
    )
    tokens = plus(on_once(self.cond_tokens_with_cond_single, single), tokens)
    if self.token_transformer.has_registers:  # the stock module pads both, which only tensors can take
        single, pairs = materialize(single), materialize(pairs)
    tokens = self.token_transformer(tokens, mask=mask, single_repr=single, pairwise_repr=pairs)
    tokens = self.tokens_to_atom_decoder_input_cond(self.attended_token_norm(tokens))

    atoms = self.atom_decoder(to_atoms(tokens, lengths, atoms_total) + atoms, **atom_context)
    return self.atom_feat_to_atom_pos_update(atoms)


def share(
    self: Module,
    *,
    atom_feats: Tensor | Repeated,
    atompair_feats: Tensor | Repeated,
    single_trunk_repr: Tensor | Repeated,
    single_inputs_repr: Tensor | Repeated,
    pairwise_trunk: Tensor | Repeated,
    pairwise_rel_pos_feats: Tensor | Repeated,
    molecule_atom_lens: Tensor,
    atom_parent_ids: Tensor | None = None,
    memory: dict[Any, Any] | None = None,
) -> Shared:
    """What the diffusion module makes of its features alone; they are [B, ...] or stand for as much."""
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
    atom_feats, atompairs, single_trunk, single_inputs, pairwise_trunk, relative = (t.once for t in features)
    lengths = molecule_atom_lens[::copies]
    pairs = recomputed(_condition_pairs, self, self.pairwise_conditioner, pairwise_trunk, relative)
    singles = self.single_conditioner.norm_single(torch.cat((single_trunk, single_inputs), dim=-1))
    return Shared(
        pairs=Repeated(pairs, copies, memory),
        singles=Repeated(singles, copies),
        atom_feats=Repeated(atom_feats, copies),
        atompairs=_with_token_pairs(self, atompairs, pairs, lengths, atom_feats.shape[1]),
        windowed_mask=_same_parent(atom_parent_ids, self.atoms_per_window, copies),
        lengths=lengths,
    )


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


def _condition_pairs(conditioner: Module, trunk: Tensor, relative: Tensor) -> Tensor:
    return conditioner(pairwise_trunk=trunk, pairwise_rel_pos_feats=relative)


def _condition_single(conditioner: Module, noise: Tensor, singles: Repeated) -> Tensor | Repeated:
    """``SingleConditioning`` (AF3 algorithm 21): noise [B], normalised singles [b, N, d] -> [B, N, d], or one copy."""
    one_level = singles.copies > 1 and noise.stride(0) == 0
    noise = noise[:: singles.copies] if one_level else noise
    fourier = conditioner.fourier_embed((noise / conditioner.sigma_data).clamp(min=conditioner.eps).log() * 0.25)
    fourier = conditioner.fourier_to_single(conditioner.norm_fourier(fourier)).unsqueeze(1)
    single = plus(Repeated(fourier, singles.copies) if one_level else fourier, singles)
    for transition in conditioner.transitions:
        single = on_once(partial(with_residual, transition), single)
    return single


def _with_token_pairs(self: Module, atompairs: Tensor, pairs: Tensor, lengths: Tensor, atoms: int) -> Tensor:
    """Atom pairs of the input [b, nw, w, 2w, c] (or [b, M, M, c]) plus those of their tokens [b, N, N, c']."""
    size, tokens = self.atoms_per_window, pairs.shape[2]  # rows may be a block of them
    if atompairs.ndim == 4:
        atompairs = full_pairwise_repr_to_windowed(atompairs, window_size=size)
    windows = in_windows(token_of_atom(lengths, atoms)[0], size)
    index = windows.unsqueeze(-1) * tokens + with_previous(windows).unsqueeze(-2)
    of_tokens = self.pairwise_repr_to_atompair_feat_cond(pairs).flatten(1, 2)
    first = torch.arange(len(index), device=index.device) * of_tokens.shape[1]
    # Indexed, not gathered: the gradient is summed in a fixed order (that of a gather is summed with atomics).
    return of_tokens.flatten(0, 1)[index + first.view(-1, 1, 1, 1)] + atompairs


def _condition_atompairs(self: Module, atoms: Tensor, atompairs: Tensor, copies: int) -> Tensor:
    """Atom pairs [B, nw, w, 2w, c] from those shared by the copies and from the noised atoms [B, M, da]."""
    rows, columns = in_windows(self.atom_repr_to_atompair_feat_cond(atoms), self.atoms_per_window).chunk(2, dim=-1)
    pairs = plus(Repeated(atompairs, copies), rows.unsqueeze(3)) + with_previous(columns).unsqueeze(2)
    return self.atompair_feats_mlp(pairs) + pairs


def _same_parent(parents: Tensor | None, size: int, copies: int) -> Tensor | None:
    """Which atoms of a window belong to the same molecule: parent ids [B, M] -> [B, nw, w, 2w]."""
    if parents is None:
        return None
    windows = in_windows(parents[::copies], size)
    return Repeated(windows.unsqueeze(-1) == with_previous(windows).unsqueeze(-2), copies).materialize()
