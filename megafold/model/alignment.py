"""Rigid and chain alignment of true to predicted coordinates; the host reads for several chains alone.

The coordinates stay on the device; alignments compute in fp64. What only depends on which token is of which chain is
decided on the host, from ids that are copied once, at the start of a step (:class:`Chains`).
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from megafold.model.geometry import rotated

if TYPE_CHECKING:
    from torch.nn import Module

POLYMERS, LIGANDS = slice(0, 3), slice(3, 5)  # molecule types: protein, RNA, DNA; ligand, metal ion
_NO_BOND = 1_000_000
SQUARINGS = 26  # 2^26 products tell the best of two rotations whose agreement differs by a ten-millionth


@dataclass(frozen=True)
class Chains:
    """Ids of one structure's N tokens, on the host.

    Attributes:
        token, chain, entity: int64 [N]; ``chain`` is the asymmetric unit's id.
        moved: the chain of every token [N], that of a covalently bound ligand being its polymer's.
        lengths: atoms a token [N].
        atoms: M, the atoms with padding.
    """

    token: Tensor
    chain: Tensor
    entity: Tensor
    moved: Tensor
    lengths: Tensor
    atoms: int

    @classmethod
    def read(cls, ids: Tensor, types: Tensor, bonds: Tensor, lengths: Tensor, atoms: int) -> Chains:
        """From additional_molecule_feats and is_molecule_types [1, N, 5], token_bonds [1, N, N], atoms a token [1, N].

        They may be on any device, which is waited for once.
        """
        _, token, chain, entity, _ = ids[0].unbind(dim=-1)
        is_polymer, is_ligand = types[0, :, POLYMERS].any(-1), types[0, :, LIGANDS].any(-1)
        mixed = is_polymer[:, None] & is_ligand
        bound = (mixed | mixed.T) & bonds[0]
        bound_chain = torch.where(bound, chain[:, None], _NO_BOND).mode(dim=-1).values
        moved = torch.where(is_ligand & bound.any(-1), bound_chain, chain)
        return cls(*torch.stack((token, chain, entity, moved, lengths[0])).cpu(), atoms)

    @property
    def is_one(self) -> bool:
        """Whether there is but one chain and no padding, so that nothing can be permuted."""
        return bool((self.chain == self.chain[0]).all()) and int(self.lengths.sum()) == self.atoms

    def of_atoms(self) -> Tensor:
        """``moved`` for each atom [M]; 0 for padding, as in the stock model."""
        of_atoms = self.moved.repeat_interleave(self.lengths)[: self.atoms]
        return torch.nn.functional.pad(of_atoms, (0, self.atoms - len(of_atoms)))


def rigid_align(
    self: Module,
    pred_coords: Tensor,
    true_coords: Tensor,
    weights: Tensor | None = None,
    mask: Tensor | None = None,
    return_transforms: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor]:
    """``WeightedRigidAlign.forward`` (AF3 algorithm 28): true onto predicted coordinates, both [B, M, 3], in fp64.

    weights [B, M], mask [B, M]. The stock module waits for the device's solver, for its status and for a warning about
    the rank; here a GPU is not waited for. Coordinates that are not finite give NaN there.

    Raises:
        torch.linalg.LinAlgError: on a CPU, for coordinates that are not finite.
    """
    dtype = true_coords.dtype
    with torch.no_grad(), torch.autocast(pred_coords.device.type, enabled=False):
        # What is wrong here is wrong in the same way for all atoms, and so in every gradient.
        pred_coords, true_coords = pred_coords.double(), true_coords.double()
        weights = torch.ones_like(pred_coords[..., 0]) if weights is None else weights.double()
        if mask is not None:
            pred_coords, true_coords = (t.masked_fill(~mask.unsqueeze(-1), 0.0) for t in (pred_coords, true_coords))
            weights = weights.masked_fill(~mask, 0.0)
        weights = weights.unsqueeze(-1)
        total = weights.sum(dim=1, keepdim=True)
        true_centre, pred_centre = ((t * weights).sum(dim=1, keepdim=True) / total for t in (true_coords, pred_coords))
        centred = true_coords - true_centre
        covariance = ((weights * centred).unsqueeze(-1) * (pred_coords - pred_centre).unsqueeze(-2)).sum(dim=1)
        rotation = (_rotation if covariance.device.type == "cpu" else rotation_by_squaring)(covariance)
        aligned = (rotated(centred, rotation) + pred_centre).to(dtype)
        if not return_transforms:
            return aligned
        # The stock module turns the predicted centre here, not the true one.
        return aligned, rotation.to(dtype), (true_centre - rotated(pred_centre, rotation)).to(dtype)


def _rotation(covariance: Tensor) -> Tensor:
    left, _, right = torch.linalg.svd(covariance)
    right = right.transpose(1, 2)
    flip = torch.ones(covariance.shape[:2], dtype=covariance.dtype)
    flip[:, -1] = torch.linalg.det(right @ left.transpose(1, 2))
    return (right * flip.unsqueeze(1)) @ left.transpose(1, 2)


def rotation_by_squaring(covariance: Tensor) -> Tensor:
    """The proper rotations [B, 3, 3] that the covariances [B, 3, 3] of two point sets ask for, without a solver.

    Turned by the unit quaternion q, points agree by q^T K q (Horn 1987), where K [4, 4] is linear in the covariance.
    K moved to have no negative eigenvalue and squared again and again becomes the projector on the best q, in matrix
    products alone. All in fp64; points on a line leave the turn about it open, and get one of the best.
    """
    horn, to_rotation = _horn(covariance.device)
    flat = covariance.double().flatten(1)
    bound = (3**0.5 * torch.linalg.vector_norm(flat, dim=1) + torch.finfo(torch.float32).tiny)[:, None, None]
    power = (flat @ horn).unflatten(1, (4, 4)) / bound + torch.eye(4, dtype=flat.dtype, device=flat.device)
    for _ in range(SQUARINGS):
        power = power @ power
        power = power / power.diagonal(dim1=1, dim2=2).sum(dim=1)[:, None, None]
    # All columns are multiples of q; the longest one loses no digits.
    column = power.diagonal(dim1=1, dim2=2).argmax(dim=1)[:, None, None].expand(-1, 4, 1)
    q = torch.nn.functional.normalize(power.gather(2, column), dim=1)
    return ((q @ q.transpose(1, 2)).flatten(1) @ to_rotation).unflatten(1, (3, 3)).to(covariance.dtype)


@functools.cache
def _horn(device: torch.device) -> tuple[Tensor, Tensor]:
    """Two linear maps: a covariance [9] to K [16], and the products of a quaternion's components [16] to a rotation."""
    to_k, to_rotation = torch.zeros(3, 3, 4, 4, dtype=torch.float64), torch.zeros(4, 4, 3, 3, dtype=torch.float64)
    for i, j in itertools.product(range(3), repeat=2):
        if i == j:
            # R_ii = w^2 + q_i^2 - q_j^2 - q_k^2
            to_k[i, i] = torch.diag(torch.tensor([1.0] + [1.0 if axis == i else -1.0 for axis in range(3)]))
            continue
        k, sign = 3 - i - j, 1.0 if (j - i) % 3 == 1 else -1.0
        # R_ji = 2 q_i q_j + 2 w q_k for even (i, j, k), minus for odd
        to_k[i, j, i + 1, j + 1] = to_k[i, j, j + 1, i + 1] = 1.0
        to_k[i, j, 0, k + 1] = to_k[i, j, k + 1, 0] = sign
    # The agreement is sum_ij S_ij R_ji = q^T K(S) q: both maps are one.
    to_rotation = to_k.permute(2, 3, 1, 0)
    return to_k.reshape(9, 16).to(device), to_rotation.reshape(16, 9).to(device)


def permute_chains(
    self: Module,
    pred_coords: Tensor,
    true_coords: Tensor,
    *,
    molecule_atom_indices: Tensor,
    mask: Tensor,
    chains: Chains | None = None,
    molecule_atom_lens: Tensor | None = None,
    token_bonds: Tensor | None = None,
    additional_molecule_feats: Tensor | None = None,
    is_molecule_types: Tensor | None = None,
) -> Tensor:
    """``MultiChainPermutationAlignment.forward`` (AF3 section 4.2) for B copies of one structure.

    Coordinates [B, M, 3], centre atoms [B, N], mask [B, M]. One chain needs no search. For several, the stock search
    runs with its ids on the host; it reads the device once for every pair of chains that it compares.

    Without ``chains`` they are read from the stock arguments, [B, ...] each.

    Atoms are put in the order of their chains by torch's sort on the coordinates' device, as in the stock model. On a
    CPU it shuffles the atoms of a chain of more than 16, so there the truth is shuffled, in the stock model and here
    alike; a GPU's radix sort keeps their order.
    """
    copies = pred_coords.shape[0]
    if chains is None:
        facts = (additional_molecule_feats, is_molecule_types, token_bonds, molecule_atom_lens)
        chains = Chains.read(*(fact[:1] for fact in facts), mask.shape[1])
    with torch.no_grad(), torch.autocast(pred_coords.device.type, enabled=False):
        pred_coords, true_coords = (t.masked_fill(~mask.unsqueeze(-1), 0.0) for t in (pred_coords, true_coords))
        of_atoms = chains.of_atoms()
        sorted_coords = true_coords[:, of_atoms.to(true_coords.device, non_blocking=True).sort().indices]
        if chains.is_one:
            return sorted_coords
        labels = self.split_ground_truth_labels({"asym_id": of_atoms.expand(copies, -1), "true_coords": sorted_coords})
        centres = molecule_atom_indices.unsqueeze(-1).expand(-1, -1, 3)
        centre_mask = mask.gather(1, molecule_atom_indices)
        chain, entity, token = (t.expand(copies, -1) for t in (chains.chain, chains.entity, chains.token))
        alignments = self.compute_permutation_alignment(
            out={"pred_coords": pred_coords.gather(1, centres), "mask": centre_mask},
            features={"asym_id": chain, "entity_id": entity, "token_index": token},
            ground_truth={
                "true_coords": true_coords.gather(1, centres),
                "mask": centre_mask,
                "asym_id": chain,
                "entity_id": entity,
            },
        )
        # Ids have done their work; merging them would mix devices.
        labels = [{"true_coords": label["true_coords"]} for label in labels]
        return self.merge_labels(labels=labels, alignments=alignments, original_num_tokens=true_coords.shape[1])[
            "true_coords"
        ]
