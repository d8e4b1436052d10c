"""The diffusion loss (AF3 section 3.7.1) of a training step: noise, denoise, align the truth, compare."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from alphafold3_pytorch.alphafold3 import DiffusionLossBreakdown, ElucidatedAtomDiffusionReturn
from loguru import logger
from torch import Tensor

from megafold.model.alignment import Chains
from megafold.model.lddt import bond_loss
from megafold.model.tokens import mark_atoms

if TYPE_CHECKING:
    from alphafold3_pytorch.alphafold3 import ElucidatedAtomDiffusion
    from torch.nn import Module

RNA, DNA, LIGAND = 1, 2, 3


def diffusion_loss(
    self: ElucidatedAtomDiffusion,
    atom_pos_ground_truth: Tensor,
    *,
    atom_mask: Tensor,
    molecule_atom_lens: Tensor,
    molecule_atom_indices: Tensor | None,
    is_molecule_types: Tensor,
    missing_atom_mask: Tensor | None = None,
    token_bonds: Tensor | None = None,
    additional_molecule_feats: Tensor | None = None,
    single_structure_input: bool = False,
    chains: Chains | None = None,
    verbose: bool | None = None,
    add_smooth_lddt_loss: bool = False,
    add_bond_loss: bool = False,
    nucleotide_loss_weight: float = 5.0,
    ligand_loss_weight: float = 10.0,
    filepath: object = None,
    sigmas: Tensor | None = None,
    noise: Tensor | None = None,
    **features: Any,
) -> ElucidatedAtomDiffusionReturn:
    """``ElucidatedAtomDiffusion.forward`` for a training step: positions [B, M, 3] -> the mean loss and its terms.

    ``features`` are what the network is conditioned on besides the masks and lengths given here; they may be
    :class:`megafold.model.repeated.Repeated`. With ``chains`` the chains of the truth are permuted; without, they are
    read from the device for a ``single_structure_input``, as the stock arguments have it. Noise levels ``sigmas`` [B]
    and ``noise`` [B, M, 3] are drawn where they are not given.
    """
    if chains is None and single_structure_input:
        atoms, facts = atom_mask.shape[1], (is_molecule_types, token_bonds, molecule_atom_lens)
        chains = Chains.read(additional_molecule_feats[:1], *(fact[:1] for fact in facts), atoms)
    truth, count = atom_pos_ground_truth, atom_pos_ground_truth.shape[0]
    sigmas = self.noise_distribution(count, device=truth.device).type(truth.dtype) if sigmas is None else sigmas
    padded_sigmas = sigmas[:, None, None]
    denoised = self.preconditioned_network_forward(
        truth + padded_sigmas * (torch.randn_like(truth) if noise is None else noise),
        sigmas,
        network_condition_kwargs={
            **features,
            "atom_mask": atom_mask,
            "missing_atom_mask": missing_atom_mask,
            "molecule_atom_lens": molecule_atom_lens,
        },
    )
    weights = alignment_weights(
        truth, molecule_atom_lens, is_molecule_types, nucleotide_loss_weight, ligand_loss_weight
    )
    aligned = self.weighted_rigid_align(
        pred_coords=denoised.float(), true_coords=truth.float(), weights=weights.float(), mask=atom_mask
    ).type(truth.dtype)
    if chains is not None and molecule_atom_indices is not None:
        aligned = permuted_or_as_is(
            self.multi_chain_permutation_alignment,
            denoised,
            aligned,
            molecule_atom_indices,
            atom_mask,
            chains,
            filepath,
        )

    loss_weight = self.karras_loss_weight if self.karras_formulation else self.loss_weight
    loss_weights = loss_weight(padded_sigmas)
    present = atom_mask if missing_atom_mask is None else atom_mask & ~missing_atom_mask
    errors = (denoised - aligned).square() / 3.0 * weights.unsqueeze(-1) * loss_weights
    counted = present.unsqueeze(-1).expand_as(errors)
    mse = (errors * counted).sum(dim=(-2, -1)) / counted.sum(dim=(-2, -1)).clamp(min=1e-5)

    bond = smooth_lddt = mse.new_zeros(count)
    if add_bond_loss:
        bond = bond_loss(denoised, truth, loss_weights.flatten(), present)
    if add_smooth_lddt_loss:
        is_dna, is_rna = (_atoms_of_kind(is_molecule_types, kind, molecule_atom_lens, truth) for kind in (DNA, RNA))
        smooth_lddt = self.smooth_lddt_loss(denoised, truth, is_dna, is_rna, coords_mask=present, loss_reduction="none")
    breakdown = DiffusionLossBreakdown(mse.mean(), bond.mean(), smooth_lddt.mean())
    total = (mse + bond + smooth_lddt).mean()
    return ElucidatedAtomDiffusionReturn(total, denoised, breakdown, sigmas)


def alignment_weights(truth: Tensor, lengths: Tensor, types: Tensor, nucleotide: float, ligand: float) -> Tensor:
    """Weights of the atoms [B, M] (AF3 section 3.7.1, equation 4): 1, and more for nucleotides and ligands."""
    is_rna, is_dna, is_ligand = (_atoms_of_kind(types, kind, lengths, truth) for kind in (RNA, DNA, LIGAND))
    weights = truth.new_ones(truth.shape[:2]).masked_fill(is_dna | is_rna, 1 + nucleotide)
    return weights.masked_fill(is_ligand, 1 + ligand)


def permuted_or_as_is(
    align: Module, pred: Tensor, true: Tensor, centres: Tensor, mask: Tensor, chains: Chains, filepath: object
) -> Tensor:
    """``true`` with its chains permuted; where that finds no answer, as it is and with the stock model's warning."""
    try:
        return align(pred, true, molecule_atom_indices=centres, mask=mask, chains=chains)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        # Whatever the search trips over (unequal copies of a chain in a crop), the stock model trains on.
        where = "" if filepath is None else f"for {filepath}"
        logger.warning(f"Skipping multi-chain permutation alignment {where} due to: {error}")
        return true


def _atoms_of_kind(types: Tensor, kind: int, lengths: Tensor, positions: Tensor) -> Tensor:
    return mark_atoms(types[..., kind], lengths, positions.shape[1])
