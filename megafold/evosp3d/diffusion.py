"""The diffusion stage: augmentations spread over the group, pairs sharded to the end.

With P ranks and A augmentations a rank denoises ceil(A / P) of them, whatever P is; one that gets none repeats the last
with weight 0, so that all ranks take part in every collective. Random numbers (noise levels, noise, the augmentations'
rotations) are drawn for all A on every rank, in the stock order, and sliced.

What the augmentations share is conditioned once, on rows of pairs. Sent per rank and forward, in elements, with
f = (P - 1) / P: H N^2 f for the bias of each of the token transformer's layers (see :mod:`megafold.evosp3d.single`),
and c N^2 f, with c = 16 the width of atom pairs, for the pairs of tokens under the windows of atoms.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from megafold.evosp3d.collectives import Gather, run
from megafold.model import diffusion as one_device
from megafold.model.rebind import Stand, with_names
from megafold.model.repeated import Repeated, materialize

if TYPE_CHECKING:
    from alphafold3_pytorch.alphafold3 import ElucidatedAtomDiffusion
    from torch.nn import Module

    from megafold.evosp3d.mesh import Shards

CHAINS = "_megafold_chains"  # what the forward of a step has read of its structure, before the device had work
FEATURES = (
    "atom_feats",
    "atompair_feats",
    "single_trunk_repr",
    "single_inputs_repr",
    "pairwise_trunk",
    "pairwise_rel_pos_feats",
)


class Share(NamedTuple):
    """This rank's augmentations ``first`` to ``first + count`` of ``total``; a ``weight`` of 0 tells a stand-in."""

    first: int
    count: int
    total: int
    weight: float

    def of(self, value: Any, batch: int) -> Any:
        """What belongs to them: of a tensor [b * total, ...] or of a Repeated; anything else passes."""
        if isinstance(value, Repeated):
            return Repeated(value.once, self.count)
        if torch.is_tensor(value) and value.ndim and value.shape[0] == batch:
            return value.unflatten(0, (-1, self.total))[:, self.first : self.first + self.count].flatten(0, 1)
        return value


def share_of(shards: Shards, total: int) -> Share:
    """The augmentations of this rank, of ``total``."""
    first, count = shards.block(total)
    return Share(first, count, total, 1.0) if count else Share(total - 1, 1, total, 0.0)


def diffusion_loss(
    self: ElucidatedAtomDiffusion, atom_pos_ground_truth: Tensor, *, shards: Shards, replaced: bool, **kwargs: Any
) -> tuple[Any, ...]:
    """``ElucidatedAtomDiffusion.forward``: all positions [b * A, M, 3] -> this rank's part of the loss.

    The parts of all ranks add up to the stock loss, term by term; the denoised positions are those of this rank. Where
    ``optimize`` has ``replaced`` the loss on one device, it is that one here too, which does not wait for the device.
    """
    kwargs = _with_repeated_features(kwargs)
    batch, device, dtype = atom_pos_ground_truth.shape[0], atom_pos_ground_truth.device, atom_pos_ground_truth.dtype
    share = share_of(shards, kwargs[FEATURES[0]].copies)
    sigmas = share.of(self.noise_distribution(batch, device=device).type(dtype), batch)
    noise = share.of(torch.randn_like(atom_pos_ground_truth), batch)
    truth = share.of(atom_pos_ground_truth, batch)
    own = {name: share.of(value, batch) for name, value in kwargs.items()}
    if replaced:
        own |= {"noise": noise, "chains": self.__dict__.get(CHAINS)}
        forward = one_device.diffusion_loss
    else:
        own |= {"loss_reduction": "none"}
        stood = Stand(torch, randn_like=lambda _: noise)
        forward = with_names(type(self).forward, torch=stood, calculate_weighted_rigid_align_weights=_weights)
    # What the loss itself draws (chains to permute, atom pairs to leave out) depends on how many augmentations there
    # are here: the ranks' generators must not part over it.
    state = random.getstate()
    with torch.random.fork_rng(devices=[]), shards.denoising(share.total):
        out = forward(self, truth, sigmas=sigmas, **own)
    random.setstate(state)
    weight = share.weight * truth.shape[0] / batch
    loss, terms = (_part(value, weight) for value in (out.loss, out.loss_breakdown))
    return type(out)(loss, out.denoised_atom_pos, terms, out.noise_sigmas)


def _weights(
    atom_pos_ground_truth: Tensor,
    molecule_atom_lens: Tensor,
    is_molecule_types: Tensor | None = None,
    nucleotide_loss_weight: float = 5.0,
    ligand_loss_weight: float = 10.0,
) -> Tensor:
    """The stock function without asking the device for lengths, thrice a kind of molecule."""
    if is_molecule_types is None:
        return atom_pos_ground_truth.new_ones(atom_pos_ground_truth.shape[:2])
    kinds = (molecule_atom_lens, is_molecule_types, nucleotide_loss_weight, ligand_loss_weight)
    return one_device.alignment_weights(atom_pos_ground_truth, *kinds)


def sample(self: ElucidatedAtomDiffusion, *args: Any, shards: Shards, **kwargs: Any) -> Tensor:
    """``ElucidatedAtomDiffusion.sample``: the stock loop over noise levels on all structures, evaluated in shares."""
    kwargs = _with_repeated_features(kwargs)
    share = share_of(shards, kwargs[FEATURES[0]].copies)

    def network(noised: Tensor, sigma: Any, network_condition_kwargs: dict[str, Any], clamp: bool = False) -> Tensor:
        batch = noised.shape[0]
        own = {name: share.of(value, batch) for name, value in network_condition_kwargs.items()}
        sigma = share.of(sigma, batch)
        with shards.denoising(share.total):
            found = self.preconditioned_network_forward(share.of(noised, batch), sigma, own, clamp=clamp)
        found = found.unflatten(0, (-1, share.count))
        found = found if share.weight else found[:, :0]
        return run(Gather(dim=1, total=share.total), found, shards, "rollout").flatten(0, 1)

    stock = with_names(type(self).sample)
    with torch.no_grad():
        return stock(Stand(self, preconditioned_network_forward=network), *args, **kwargs)


def atom_pairs_of_tokens(self: Module, pairs: Tensor, *, shards: Shards) -> Tensor:
    """``pairwise_repr_to_atompair_feat_cond``: rows of conditioned pairs [b, n, N, c] -> all of them, [b, N, N, dap].

    The windows of atoms look up pairs of tokens anywhere near the diagonal.
    """
    return run(Gather(dim=1, total=pairs.shape[2]), type(self).forward(self, pairs), shards, "atom_pairs")


def align_or_nan(align: Module) -> Callable[..., Any]:
    """``WeightedRigidAlign.forward`` (what it is now), NaN where it finds no solution instead of an exception.

    One rank's exception would leave the others waiting; a NaN reaches every rank's gradients, and all skip the step.
    """
    forward = align.forward

    def aligned(self: Module, pred_coords: Tensor, true_coords: Tensor, *args: Any, **kwargs: Any) -> Any:
        try:
            return forward(pred_coords, true_coords, *args, **kwargs)
        except torch.linalg.LinAlgError:
            return torch.full_like(true_coords, torch.nan)

    return aligned


def _with_repeated_features(kwargs: dict[str, Any]) -> dict[str, Any]:
    """The features as :class:`Repeated`, all of them: where there is one augmentation they come as tensors."""
    features = {name: kwargs[name] for name in FEATURES}
    if not all(isinstance(value, Repeated) for value in features.values()):
        features = {name: Repeated(materialize(value), 1) for name, value in features.items()}
    return {**kwargs, **features}


def _part(value: Any, weight: float) -> Any:
    """Terms of the structures here, or their means -> this rank's part of the mean over all of the batch."""
    if torch.is_tensor(value):
        return value.mean() * weight
    return type(value)(*(_part(term, weight) for term in value))
