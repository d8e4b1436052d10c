"""The compact batch that leaves a worker -> the keyword arguments of the model, on the device that the batch is on.

A crop of 384 tokens with 1024 alignment rows is some 50 MB of one-hot alignment, 64 MB of features for each template
and 20 MB of atom pairs; as integers and coordinates it is under 2 MB. On the CPU every value has the baseline's bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from megafold.evopipe import layout, template_geometry

NOTHING = 255  # a residue class that has no one-hot: padding
GEOMETRY = ("template_positions", "template_frames", "template_state", "template_classes")
COMPACT = ("msa_classes", "deletion_codes", "deletion_values", "atom_molecules", *GEOMETRY)
# what `Alphafold3.forward` takes and no example has
ABSENT = ("atom_ids", "atompair_ids", "distance_labels", "token_constraints")


def is_compact(batch: Mapping[str, Any]) -> bool:
    """Is there something to expand?"""
    return "msa_classes" in batch


def expand(batch: Mapping[str, Any], window: int = layout.ATOMS_PER_WINDOW) -> dict[str, Any]:
    """One-hot alignment, deletions, template features and atom pairs of a compact batch.

    Args:
        batch: of `loader.make_loader(..., compact=True)`, moved to where the model is; anything else (a batch that is
            not compact) comes back as it is.
        window: atoms per window.

    Returns: the keyword arguments of `Alphafold3.forward`.
    """
    if not is_compact(batch):
        return dict(batch)
    out = {name: value for name, value in batch.items() if name not in COMPACT} | dict.fromkeys(ABSENT)
    out |= expand_alignment(batch["msa_classes"], batch["deletion_codes"], batch["deletion_values"])
    out["atompair_inputs"] = atom_pairs(batch["atom_pos"], batch["atom_molecules"], window)
    out["templates"] = None
    if batch.get("template_state") is not None:
        chain = batch["additional_molecule_feats"][..., 2]
        geometry = (batch[name] for name in GEOMETRY)
        out["templates"] = template_geometry.expand(*geometry, chain)
    return out


def expand_alignment(classes: Tensor, codes: Tensor, values: Tensor) -> dict[str, Tensor]:
    """`msa` float32 [..., S, n, 32] and `additional_msa_feats` float32 [..., S, n, 2] (any deletion, their feature).

    Args:
        classes: residue classes, uint8 [..., n, S], NOTHING where there is none. The columns come first, as in the
            cache, so that a worker copies them as they are.
        codes: index into `values`, uint8 or int16 [..., n, S].
        values: the deletion feature, float32 [..., K].
    """
    classes, codes = (one.transpose(-1, -2).contiguous() for one in (classes, codes))
    kinds = torch.arange(layout.NUM_MSA_CLASSES, device=classes.device, dtype=classes.dtype)
    index = codes.long().flatten(-2)
    value = values.gather(-1, index).view(codes.shape)
    value = torch.where(classes == NOTHING, 0.0, value)
    return {
        "msa": (classes[..., None] == kinds).float(),
        "additional_msa_feats": torch.stack(((value > 0).float(), value), dim=-1),
    }


def atom_pairs(position: Tensor, molecule: Tensor, window: int = layout.ATOMS_PER_WINDOW) -> Tensor:
    """Atom pair features in windows (AF3 algorithm 5, lines 2-6): float32 [..., ceil(M / w), w, 2 w, 5].

    Offset vector, 1 / (1 + d^2) and 1 for pairs in one molecule, else 0. Window i holds its own atoms against those of
    windows i - 1 and i.

    Args:
        position: reference positions, float32 [..., M, 3], angstrom.
        molecule: molecule of each atom, int [..., M]; -1 where there is no atom.
    """
    n_atoms = position.shape[-2]
    n_windows = -(-n_atoms // window)
    batch = position.shape[:-2]
    # a window of nothing before the first, and atoms of no molecule after the last
    padded = functional.pad(molecule, (window, n_windows * window - n_atoms), value=-1)
    where = functional.pad(position, (0, 0, window, n_windows * window - n_atoms))
    own, where = padded.view(*batch, n_windows + 1, window), where.view(*batch, n_windows + 1, window, 3)
    keys = torch.cat((own[..., :-1, :], own[..., 1:, :]), dim=-1)
    key_positions = torch.cat((where[..., :-1, :, :], where[..., 1:, :, :]), dim=-2)
    query, query_positions = own[..., 1:, :], where[..., 1:, :, :]
    same = (query[..., :, None] == keys[..., None, :]) & (query[..., :, None] >= 0)
    offset = query_positions[..., :, None, :] - key_positions[..., None, :, :]
    inverse = (1 + offset.norm(dim=-1, p=2) ** 2) ** -1
    pairs = torch.cat((offset, inverse[..., None], torch.ones_like(inverse)[..., None]), dim=-1)
    return torch.where(same[..., None], pairs, 0.0)
