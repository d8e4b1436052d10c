"""A batch made of random numbers with the shapes, types and value ranges of a real structure.

One protein chain of N tokens with A atoms each (M = A N; the sweeps use A = 8), an alignment of depth S and T
templates. One chain, so that the multi-chain permutation of the loss has nothing to permute and every contender of a
comparison does the same work on the host.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from megafold.metrics.architecture import Architecture
from megafold.train.workload import CONFIDENCE_LABELS, WORKLOADS

ALPHA_CARBON_STEP = 3.8  # angstrom between the alpha carbons of neighbouring residues
AMINO_ACIDS = 20


def synthetic_batch(
    n_tokens: int,
    *,
    atoms_per_token: int = 8,
    msa_depth: int = 512,
    templates: int = 1,
    workload: str = "core",
    seed: int = 0,
    model_kwargs: Mapping[str, Any],
) -> dict[str, Tensor]:
    """Keyword arguments of `Alphafold3.forward` for one structure (batch 1), on the CPU, float32.

    Args:
        n_tokens: N, exact.
        atoms_per_token: A, at least 3 (a frame needs three atoms).
        msa_depth: S rows of a one-hot alignment; 0 leaves the alignment out.
        templates: T templates; 0 leaves them out (the stock model then embeds one masked, empty template).
        workload: ``core`` without the labels of the confidence head, the others with them (the model then rolls out
            structures and runs that head).
        seed: the same seed and arguments give the same tensors.
        model_kwargs: the constructor arguments of the model; they fix the feature widths.

    Returns:
        atom_inputs [1, M, ...], windowed atompair_inputs [1, ceil(M / w), w, 2 w, ...], msa [1, S, N, 32],
        templates [1, T, N, N, ...], atom_pos [1, M, 3] in angstrom and the rest of what a training step needs.

    Raises:
        ValueError: for an unknown workload, or sizes that make no structure.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"workload {workload!r}: expected one of {', '.join(WORKLOADS)}")
    if n_tokens < 1 or atoms_per_token < 3 or msa_depth < 0 or templates < 0:
        raise ValueError(
            f"n_tokens={n_tokens}, atoms_per_token={atoms_per_token}, msa_depth={msa_depth}, templates={templates}: "
            "expected at least 1 token, 3 atoms a token, and no negative size"
        )
    model = Architecture.from_kwargs(model_kwargs)
    random = torch.Generator().manual_seed(seed)
    n, m, window = n_tokens, n_tokens * atoms_per_token, model.atoms_per_window
    windows = -(-m // window)
    token = torch.arange(n)
    first_atom = token * atoms_per_token
    zeros = torch.zeros(n, dtype=torch.long)

    molecule_ids = torch.randint(0, AMINO_ACIDS, (n,), generator=random)
    molecule_types = torch.zeros(n, 5, dtype=torch.bool)
    molecule_types[:, 0] = True
    batch = {
        "atom_inputs": torch.randn(m, model.dim_atom_inputs, generator=random),
        "atompair_inputs": torch.randn(windows, window, 2 * window, model.dim_atompair_inputs, generator=random),
        "additional_molecule_feats": torch.stack([token, token, zeros, zeros, zeros], dim=-1),
        "is_molecule_types": molecule_types,
        "molecule_atom_lens": torch.full((n,), atoms_per_token),
        "molecule_ids": molecule_ids,
        "additional_token_feats": torch.rand(n, model.dim_additional_token_feats, generator=random),
        "atom_parent_ids": torch.zeros(m, dtype=torch.long),
        "missing_atom_mask": torch.zeros(m, dtype=torch.bool),
        "token_bonds": (token[:, None] - token[None, :]).abs() == 1,
        "molecule_atom_indices": first_atom + 1,
        "distogram_atom_indices": first_atom + min(4, atoms_per_token - 1),
        "atom_pos": _chain(n, atoms_per_token, random),
    }
    if model.num_molecule_mods:
        batch["is_molecule_mod"] = torch.rand(n, model.num_molecule_mods, generator=random) < 0.02
    if msa_depth:
        batch["msa"] = _alignment(molecule_ids, msa_depth, model.dim_msa_inputs, random)
        batch["msa_mask"] = torch.ones(msa_depth, dtype=torch.bool)
        deletions = torch.rand(msa_depth, n, model.dim_additional_msa_feats, generator=random)
        batch["additional_msa_feats"] = deletions * (deletions > 0.9)
    if templates:
        batch["templates"] = torch.rand(templates, n, n, model.dim_template_feats, generator=random)
        batch["template_mask"] = torch.ones(templates, dtype=torch.bool)
    batch = {name: tensor[None] for name, tensor in batch.items()}
    if workload != "core":
        batch.update(_confidence_labels(n, m, first_atom, random))
    return batch


def _chain(n_tokens: int, atoms_per_token: int, random: torch.Generator) -> Tensor:
    """Coordinates [M, 3] in angstrom, centred: a walk with persistent direction, atoms near its sites."""
    turns = torch.randn(n_tokens, 3, generator=random)
    direction = torch.zeros(3)
    steps = []
    for turn in turns:
        direction = direction * 0.6 + turn
        direction = direction / direction.norm().clamp(min=1e-6)
        steps.append(direction)
    sites = torch.stack(steps).mul(ALPHA_CARBON_STEP).cumsum(0)
    offsets = torch.randn(n_tokens, atoms_per_token, 3, generator=random).clamp(-2, 2) * 0.9
    offsets[:, 1] = 0.0
    atoms = (sites[:, None] + offsets).reshape(-1, 3)
    return atoms - atoms.mean(0)


def _alignment(query: Tensor, depth: int, classes: int, random: torch.Generator) -> Tensor:
    """One-hot alignment [S, N, classes]: the first row is the query, a third of the other rows' residues is mutated."""
    rows = query.clamp(max=classes - 1).expand(depth, -1).clone()
    mutated = torch.rand(rows.shape, generator=random) < 1 / 3
    mutated[0] = False
    rows[mutated] = torch.randint(0, min(AMINO_ACIDS, classes), (int(mutated.sum()),), generator=random)
    return torch.nn.functional.one_hot(rows, classes).float()


def _confidence_labels(n: int, m: int, first_atom: Tensor, random: torch.Generator) -> dict[str, Tensor]:
    """What makes the stock forward roll out structures and run its confidence head."""
    labels = {
        "resolved_labels": (torch.rand(1, m, generator=random) < 0.95).long(),
        "atom_indices_for_frame": torch.stack([first_atom, first_atom + 1, first_atom + 2], dim=-1)[None],
        "valid_atom_indices_for_frame": torch.ones(1, n, dtype=torch.bool),
        "resolution": torch.tensor([2.0]),
    }
    assert set(labels) == set(CONFIDENCE_LABELS)
    return labels
