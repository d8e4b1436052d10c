"""The trunk of a training step (AF3 algorithm 1, lines 1 to 14): input features to single and pair representation.

The stock modules do the work; what is left out is where the stock code asks the device for the places of non-zero
elements, and the second trunk that it would build to say what it is doing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from alphafold3_pytorch import alphafold3 as stock
from torch import Tensor

if TYPE_CHECKING:
    from alphafold3_pytorch import Alphafold3
    from torch.nn import Module


class Trunk(NamedTuple):
    """b structures of N tokens and M atoms, and what the heads and losses need of them.

    single [b, N, ds], pairs [b, N, N, dp], single_inputs [b, N, di], atom_feats [b, M, da], atompair_feats
    [b, nw, w, 2w, dap], relative_positions [b, N, N, dp], bonds bool [b, N, N], lengths int64 (atoms a token) and mask
    bool [b, N], atom_mask bool [b, M].
    """

    single: Tensor
    pairs: Tensor
    single_inputs: Tensor
    atom_feats: Tensor
    atompair_feats: Tensor
    relative_positions: Tensor
    bonds: Tensor
    lengths: Tensor
    mask: Tensor
    atom_mask: Tensor


def run_trunk(model: Alphafold3, inputs: Mapping[str, Any]) -> Trunk:
    """From the keyword arguments of ``Alphafold3.forward``; all passes of the trunk.

    Raises:
        ValueError: names the argument that the model needs and did not get, or the other way round.
    """
    dtype = inputs["atom_inputs"].dtype
    lengths = inputs["molecule_atom_lens"].clamp(min=0)
    atoms = inputs["atom_inputs"].shape[1]
    atom_mask = torch.arange(atoms, device=lengths.device) < lengths.sum(dim=-1, keepdim=True)
    mask = lengths > 0
    single_inputs, single_init, pairs_init, atom_feats, atompair_feats = model.input_embedder(
        atom_inputs=inputs["atom_inputs"],
        atompair_inputs=_in_windows(model, inputs["atompair_inputs"]),
        atom_mask=atom_mask,
        additional_token_feats=inputs.get("additional_token_feats"),
        molecule_atom_lens=lengths,
        molecule_ids=inputs["molecule_ids"],
    )
    atom_feats, atompair_feats = _with_embedded_ids(model, atom_feats, atompair_feats, inputs)
    single_init = _with_modifications(model, single_init, inputs.get("is_molecule_mod"))
    pairs_init = _with_constraints(model, pairs_init, inputs.get("token_constraints"))
    single_init = _with_language_models(model, single_init, inputs)

    positions = model.relative_position_encoding(additional_molecule_feats=inputs["additional_molecule_feats"])
    is_chained = inputs["is_molecule_types"][..., stock.IS_BIOMOLECULE_INDICES].any(dim=-1)
    positions = torch.where((is_chained.unsqueeze(-1) & is_chained.unsqueeze(-2)).unsqueeze(-1), positions, 0.0)
    bonds = bonds_of_tokens(inputs.get("token_bonds"), lengths)
    pairs_init = pairs_init + positions + model.token_bond_to_pairwise_feat(bonds.type(dtype))

    single, pairs = _passes(model, single_init, pairs_init, mask, inputs)
    return Trunk(single, pairs, single_inputs, atom_feats, atompair_feats, positions, bonds, lengths, mask, atom_mask)


def _passes(
    model: Alphafold3, single_init: Tensor, pairs_init: Tensor, mask: Tensor, inputs: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    detaches = inputs.get("detach_when_recycling")
    detaches = model.detach_when_recycling if detaches is None else detaches
    templates, template_mask = inputs.get("templates"), inputs.get("template_mask")
    if templates is None:  # an empty one, so that the embedder takes part in every loss
        batch, length = mask.shape
        templates = pairs_init.new_zeros(
            (batch, 1, length, length, model.dim_template_feats), dtype=inputs["atom_inputs"].dtype
        )
        template_mask = mask.new_zeros((batch, 1))
    single, pairs = single_init, pairs_init
    for index in range(inputs.get("num_recycling_steps", 1)):
        if index:
            single, pairs = (single.detach(), pairs.detach()) if detaches else (single, pairs)
            single, pairs = single_init + model.recycle_single(single), pairs_init + model.recycle_pairwise(pairs)
        pairs = pairs + model.template_embedder(
            templates=templates, template_mask=template_mask, pairwise_repr=pairs, mask=mask
        )
        if inputs.get("msa") is not None:
            pairs = pairs + model.msa_module(
                msa=inputs["msa"],
                single_repr=single,
                pairwise_repr=pairs,
                msa_mask=inputs.get("msa_mask"),
                additional_msa_feats=inputs.get("additional_msa_feats"),
                mask=mask,
            )
        single, pairs = model.pairformer(single_repr=single, pairwise_repr=pairs, mask=mask)
    return single, pairs


def embed_templates(
    self: Module, *, templates: Tensor, template_mask: Tensor, pairwise_repr: Tensor, mask: Tensor | None = None
) -> Tensor:
    """``TemplateEmbedder.forward`` (AF3 algorithm 16): templates [b, T, N, N, dt], mask [b, T] -> [b, N, N, dp].

    The stock module makes its zeros on the host, three times, each of which waits for the device.
    """
    batch, count = template_mask.shape
    embedded = self.template_feats_to_embed_input(templates) + self.pairwise_to_embed_input(pairwise_repr).unsqueeze(1)
    embedded = embedded.flatten(0, 1)
    if mask is not None:
        mask = mask.repeat_interleave(count, dim=0)
    checkpoints = stock.should_checkpoint(self, embedded)
    embedded = (self.to_checkpointed_layers if checkpoints else self.to_layers)(embedded, mask=mask)
    embedded = self.final_norm(embedded).unflatten(0, (batch, count))
    embedded = embedded.masked_fill(~template_mask[:, :, None, None, None], 0.0)
    present = template_mask.type(templates.dtype).sum(dim=1).clamp(min=self.eps)
    out = self.to_out(embedded.sum(dim=1) / present[:, None, None, None])
    return out.masked_fill(~template_mask.any(dim=1)[:, None, None, None], 0.0) * self.layerscale


def _in_windows(model: Alphafold3, atompairs: Tensor) -> Tensor:
    if atompairs.ndim == 5:
        return atompairs
    return stock.full_pairwise_repr_to_windowed(atompairs, window_size=model.atoms_per_window)


def _with_embedded_ids(
    model: Alphafold3, atom_feats: Tensor, atompair_feats: Tensor, inputs: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    if _needed(model.has_atom_embeds, inputs, "atom_ids"):
        atom_feats = atom_feats + model.atom_embeds(inputs["atom_ids"])
    if _needed(model.has_atompair_embeds, inputs, "atompair_ids"):
        embedded = model.atompair_embeds(inputs["atompair_ids"])
        atompair_feats = atompair_feats + _in_windows(model, embedded)
    return atom_feats, atompair_feats


def _with_modifications(model: Alphafold3, single: Tensor, is_modified: Tensor | None) -> Tensor:
    if not _needed(model.has_molecule_mod_embeds, {"is_molecule_mod": is_modified}, "is_molecule_mod"):
        return single
    # All kinds for all tokens, in fp32: few, and no search for the modified ones.
    kinds = model.molecule_mod_embeds.weight
    return single + (is_modified.to_dense().unsqueeze(-1) * kinds).sum(dim=-2)


def _with_constraints(model: Alphafold3, pairs: Tensor, constraints: Tensor | None) -> Tensor:
    if model.constraints is None:
        return pairs
    if constraints is None:
        raise ValueError("token_constraints: the model has constraint embeddings and needs them")
    for index, name in enumerate(model.constraints):
        # The stock model starts each slice at the constraint's index, whatever the widths before it.
        given = constraints[..., index : index + stock.CONSTRAINT_DIMS[name]]
        learned = model.learnable_constraint_masks[index]
        pairs = pairs + model.constraint_embeds[index](
            torch.where(given == stock.CONSTRAINTS_MASK_VALUE, learned, given)
        )
    return pairs


def _with_language_models(model: Alphafold3, single: Tensor, inputs: Mapping[str, Any]) -> Tensor:
    ids, types = inputs["molecule_ids"], inputs["is_molecule_types"]
    if model.plms is not None:
        other = (ids < 0) | (ids > stock.NUM_HUMAN_AMINO_ACIDS)
        residues = ids.masked_fill(other, stock.NUM_HUMAN_AMINO_ACIDS)
        residues = residues.masked_fill(types[..., stock.IS_NON_PROTEIN_INDICES].any(dim=-1), -1)
        single = single + model.to_plm_embeds(torch.cat([plm(residues) for plm in model.plms], dim=-1))
    if model.nlms is not None:
        other = (ids < stock.MIN_RNA_NUCLEOTIDE_ID) | (ids > stock.MAX_DNA_NUCLEOTIDE_ID)
        bases = ids.masked_fill(other, stock.MISSING_RNA_NUCLEOTIDE_ID)
        bases = bases.masked_fill(types[..., stock.IS_NON_NA_INDICES].any(dim=-1), -1)
        single = single + model.to_nlm_embeds(torch.cat([nlm(bases) for nlm in model.nlms], dim=-1))
    return single


def bonds_of_tokens(bonds: Tensor | None, lengths: Tensor) -> Tensor:
    """Bonds of tokens [b, N, N]: symmetric, none of a token with itself; without any given those of neighbours."""
    batch, length = lengths.shape
    place = torch.arange(length, device=lengths.device)
    apart = (place.unsqueeze(-1) - place).abs()
    if bonds is None:
        return (apart == 1).expand(batch, -1, -1)
    return (bonds | bonds.transpose(1, 2)) & (apart > 0)


def _needed(has: bool, inputs: Mapping[str, Any], name: str) -> bool:
    if has != (inputs.get(name) is not None):
        raise ValueError(f"{name}: the model {'needs' if has else 'has no embedding for'} it")
    return has
