"""A cached `Entry` and a token mask -> the features that the baseline computes for the same chains and mask.

The baseline crops first and then builds molecules, tokens, frames, ids and bonds in Python loops. Here the same values
are selected and renumbered with array operations; `tests/evopipe` compares every field bit for bit. Quirks of the
baseline that a reader would take for mistakes are repeated on purpose and say so.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from megafold.evopipe import layout, molecules
from megafold.evopipe.layout import Entry

EPS = 1e-20  # the baseline's, in the length of a vector
FAR = 1e4  # angstrom: the baseline's distance of an atom to itself and to atoms that are not there
MIN_ANGLE = 25.0  # degrees between the edges of a frame, and to a straight line
CLEAR_ANGLE = 0.05  # degrees: more than float32 can be wrong by, at these angles and the lengths of bonds
MAX_CLEAR = 8  # among more atoms some distances are always too close to tell
ROUNDINGS = 32  # of float32 in the difference of two squared distances, generously


class Crop:
    """The tokens, residues and atoms that a mask keeps, renumbered.

    Args:
        entry: the uncropped structure (the alignment is not needed).
        keep: which tokens stay, bool [N].
    """

    def __init__(self, entry: Entry, keep: np.ndarray) -> None:
        arrays = entry.arrays
        self.entry, self.keep = entry, keep
        self.index = np.flatnonzero(keep)
        self.new = np.cumsum(keep) - 1  # old token -> new token, where kept
        self.tokens = layout.take_rows(arrays["tokens"], self.index)
        self.atom_index = np.flatnonzero(keep[arrays["atoms"]["token"]])
        self.atoms = layout.take_rows(arrays["atoms"], self.atom_index)
        n = len(self.tokens)
        starts = np.flatnonzero(np.r_[True, self.tokens["residue"][1:] != self.tokens["residue"][:-1]])
        self.residue_starts, self.residue_tokens = starts, np.diff(np.r_[starts, n])
        self.residues = layout.take_rows(arrays["residues"], self.tokens["residue"][starts])
        self.residue_of_token = np.repeat(np.arange(len(starts)), self.residue_tokens)
        self.atomised = self.tokens["kind"] >= layout.FIRST_ATOMISED
        self.residue_atomised = self.atomised[starts]
        self.cut = self.residue_tokens != self.residues["tokens"]
        self.residue_atoms = np.where(self.residue_atomised, self.residue_tokens, self.residues["atoms"])
        self.residue_offsets = np.cumsum(self.residue_atoms) - self.residue_atoms
        self.token_offsets = self.residue_offsets[self.residue_of_token]
        # position inside its residue (atomised), or the center atom (polymer)
        self.local = np.where(self.atomised, np.arange(n) - starts[self.residue_of_token], self.tokens["center"])
        self.features, self.bonds = self._chemistry()

    def _chemistry(self) -> tuple[np.ndarray, np.ndarray]:
        """Atom features [M, 3] and bonds [bonds, 2] (new tokens); a residue that the crop cuts is perceived anew."""
        arrays, features = self.entry.arrays, self.atoms["features"].copy()
        bonds = arrays["bonds"]
        whole = np.ones(len(arrays["residues"]), bool)
        whole[self.tokens["residue"][self.residue_starts[self.cut]]] = False
        bonds = bonds[self.keep[bonds["first"]] & whole[arrays["tokens"]["residue"][bonds["first"]]]]
        pairs = [np.stack([self.new[bonds["first"]], self.new[bonds["second"]]], axis=-1)]
        for residue in np.flatnonzero(self.cut):
            first, count = self.residue_starts[residue], self.residue_tokens[residue]
            span = slice(self.residue_offsets[residue], self.residue_offsets[residue] + count)
            tokens = self.tokens[first : first + count]
            component = arrays["components"][tokens["component"][0]].decode()
            elements = [element.decode() for element in tokens["element"]]
            part = molecules.atomised(
                component, self.entry.smiles.get(component), self.atoms["position"][span], elements
            )
            features[span] = part.features
            pairs.append(part.bonds + first)
        return features, np.concatenate(pairs)

    def segments(self) -> list[tuple[str, int, int, bool]]:
        """Runs of the crop as the baseline's "chain sequences": (sequence, first token, tokens, atomised).

        Consecutive polymer residues of one chain and kind form a run; every atomised residue is a run of its own.
        """
        chain, kind = self.tokens["chain"][self.residue_starts], self.residues["kind"]
        breaks = (chain[1:] != chain[:-1]) | (kind[1:] != kind[:-1]) | self.residue_atomised[1:]
        firsts = np.flatnonzero(np.r_[True, breaks])
        components, runs = self.entry.arrays["components"], []
        for first, last in zip(firsts, np.r_[firsts[1:], len(self.residues)]):
            token, atomised = self.residue_starts[first], bool(self.residue_atomised[first])
            if atomised:
                sequence = components[self.residues["component"][first]].decode()
                runs.append((sequence, token, self.residue_tokens[first], True))
            else:
                runs.append((self.residues["letter"][first:last].tobytes().decode(), token, last - first, False))
        return runs


def _entity_and_symmetry(segments, n: int) -> tuple[np.ndarray, np.ndarray]:
    entities: dict[str, int] = {}
    seen: dict[str, int] = {}
    entity, symmetry = np.zeros(n, np.int64), np.zeros(n, np.int64)
    for sequence, first, count, _ in segments:
        entity[first : first + count] = entities.setdefault(sequence, len(entities))
        symmetry[first : first + count] = seen.get(sequence, 0)
        seen[sequence] = seen.get(sequence, 0) + 1
    return entity, symmetry


def _symmetry_mismatch(segments, chain, component) -> bool:
    """Does some entity occur in chains whose component sequences differ? The baseline then installs no mmCIF bond.

    Each copy of an entity is one segment, which is part of one chain.
    """
    homes: dict[str, set[int]] = {}
    for sequence, first, _, _ in segments:
        homes.setdefault(sequence, set()).add(int(chain[first]))
    sequences: dict[int, bytes] = {}
    for found in homes.values():
        if len(found) > 1:
            sequences |= {one: component[chain == one].tobytes() for one in found - sequences.keys()}
            if len({sequences[one] for one in found}) > 1:
                return True
    return False


def _token_bonds(crop: Crop, segments, *, training: bool, exact: bool) -> np.ndarray:
    n = len(crop.tokens)
    bonds = np.zeros((n, n), bool)
    flat = bonds.reshape(-1)
    for _, first, count, atomised in segments:
        if not atomised and count > 2:  # the baseline leaves the last bond of each run out
            start, stop = first * (n + 1), (first + count - 2) * (n + 1)
            flat[start + 1 : stop + 1 : n + 1] = flat[start + n : stop + n : n + 1] = True
    bonds[crop.bonds[:, 0], crop.bonds[:, 1]] = bonds[crop.bonds[:, 1], crop.bonds[:, 0]] = True
    links, candidates = crop.entry.arrays["links"], crop.entry.arrays["link_tokens"]
    tokens = crop.tokens
    if not training or not len(links):
        return bonds
    if exact:
        ends = np.stack([links["token_first"], links["token_second"]], axis=-1)
        row, column = crop.new[ends[(ends >= 0).all(axis=-1) & crop.keep[ends].all(axis=-1)]].T
        bonds[row, column] = bonds[column, row] = True
        return bonds
    if _symmetry_mismatch(segments, tokens["chain"], tokens["component"]):
        return bonds
    used: dict[int, int] = {}
    sides = ([f"{name}_{side}" for name in ("key", "start", "count")] for side in ("first", "second"))
    first, second = (zip(*(links[name].tolist() for name in names)) for names in sides)
    for link in zip(first, second):
        ends = []
        for key, start, count in link:
            kept = [token for token in candidates[start : start + count].tolist() if crop.keep[token]]
            # a repeated bond of the same atom denotes the next token of that name
            ends.append((key, kept[used.get(key, 0)]) if used.get(key, 0) < len(kept) else None)
        if None in ends:
            continue
        row, column = (crop.new[token] for _, token in ends)
        bonds[row, column] = bonds[column, row] = True
        for key, _ in ends:
            used[key] = used.get(key, 0) + 1
    return bonds


def _ligand_frames(crop: Crop) -> np.ndarray:
    """Atoms of the frame of each atomised token, int64 [N, 3] (AF3 supplement 4.3.2); -1 where there is none.

    A frame joins a token and the two nearest center atoms of the same chain in the crop.
    """
    frames = np.zeros((len(crop.tokens), 3), np.int64)
    chain, positions, resolved = (crop.tokens[name] for name in ("chain", "center_position", "center_resolved"))
    for asym in np.unique(chain[crop.atomised]):
        members = np.flatnonzero(chain == asym)
        wanted = np.flatnonzero(crop.atomised[members])
        found = frames_of_chain(positions[members], resolved[members], wanted)
        # In every chain but the first the baseline adds the chain's first token to the "no frame" value -1 as well.
        frames[members[wanted]] = found + members[0]
    none = (frames == -1).any(axis=-1, keepdims=True)
    local = np.where(crop.atomised, crop.local, crop.tokens["center"])
    return np.where(none, frames, crop.token_offsets[frames] + local[frames])


def frames_of_chain(position: np.ndarray, resolved: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(nearest, itself, second nearest) of some center atoms of a chain, int64 [wanted, 3]; -1 where there is no frame.

    Args:
        position: of all center atoms, float32 [n, 3], angstrom.
        resolved: bool [n].
        wanted: indices of those whose frames are asked for, int64.
    """
    if len(position) < 3 or int(resolved.sum()) < 3:
        return np.full((len(wanted), 3), -1)
    found = _clear_frames(position, resolved, wanted)
    return _rounded_frames(position, resolved, wanted) if found is None else found


def _clear_frames(position: np.ndarray, resolved: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
    """`frames_of_chain`, or None where the rounding of the baseline's distances or angles may have decided."""
    if len(wanted) > MAX_CLEAR or not resolved[wanted].all():
        return None
    where = position.astype(np.float64)
    squares = ((where[wanted, None] - where) ** 2).sum(axis=-1)
    squares[:, ~resolved] = np.inf
    squares[np.arange(len(wanted)), wanted] = np.inf
    order = np.argpartition(squares, min(2, len(position) - 1), axis=-1)[:, :3]
    values = np.take_along_axis(squares, order, axis=-1)
    rank = np.argsort(values, axis=-1)
    order, values = (np.take_along_axis(one, rank, axis=-1) for one in (order, values))
    # float32 |a|^2 + |b|^2 - 2ab: at most 13 epsilon |a|^2 on either side of a comparison
    error = ROUNDINGS * np.finfo(np.float32).eps * max(1.0, float((where[resolved] ** 2).sum(axis=-1).max()))
    clear = (values[:, 0] > error) & (values[:, 1] - values[:, 0] > error) & (values[:, 2] - values[:, 1] > error)
    if not (clear & (values[:, 1] < FAR**2 / 4)).all():
        return None
    nearest = np.stack([order[:, 0], wanted, order[:, 1]], axis=-1)
    first, second = where[nearest[:, 0]] - where[wanted], where[nearest[:, 2]] - where[wanted]
    cosine = (first * second).sum(axis=-1) / np.sqrt(values[:, 0] * values[:, 1])
    degree = np.degrees(np.arccos(np.clip(cosine, -1.0, 1.0)))
    if not (np.minimum(abs(degree - MIN_ANGLE), abs(degree - (180.0 - MIN_ANGLE))) > CLEAR_ANGLE).all():
        return None
    bad = (degree < MIN_ANGLE) | (degree > 180.0 - MIN_ANGLE)
    return np.where(bad[:, None], -1, nearest)


def _rounded_frames(position: np.ndarray, resolved: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """`frames_of_chain` with the baseline's own operations, and so with its rounding."""
    arrays = (np.ascontiguousarray(one) for one in (position, resolved, wanted))
    where, known, rows = (torch.from_numpy(one) for one in arrays)
    # all distances in the baseline's batched call: the same rounding, same ties; the rest goes row by row
    distance = torch.cdist(where[None], where[None])[0, rows]
    distance[torch.arange(len(rows)), rows] = FAR
    distance.masked_fill_(~(known[rows, None] & known), FAR)
    nearest = (-distance).topk(2, dim=-1).indices
    nearest = torch.stack([nearest[:, 0], rows, nearest[:, 1]], dim=-1)
    left, center, right = where[nearest].unbind(dim=-2)
    first, second = (functional.normalize(edge, dim=-1, eps=EPS) for edge in (left - center, right - center))
    degree = torch.rad2deg(torch.acos((first * second).sum(dim=-1))).abs()
    bad = (degree < MIN_ANGLE) | ((180.0 - degree).abs() < MIN_ANGLE)
    return torch.where(bad[:, None], -1, nearest).numpy()


def _atom_indices(crop: Crop) -> dict[str, np.ndarray]:
    """Center, distogram and frame atoms of each token, offset to the crop's atoms; -1 where the atom is missing."""
    tokens, offsets = crop.tokens, crop.token_offsets
    center = crop.local + offsets
    distogram = np.where(crop.atomised, crop.local, tokens["distogram"]) + offsets
    frame = tokens["frame"].astype(np.int64) + offsets[:, None]
    if crop.atomised.any():
        frame = np.where(crop.atomised[:, None], _ligand_frames(crop), frame)
    missing = np.flatnonzero(crop.atoms["missing"])
    if len(missing):
        token = crop.new[crop.atoms["token"][missing]]
        # The baseline offsets token t's missing atoms by the first atom of *molecule* t, and by nothing when there are
        # fewer molecules; after an atomised residue that differs from the token's own offset.
        wrong = np.zeros(len(tokens), np.int64)
        wrong[: len(crop.residues)] = crop.residue_offsets
        value = missing - offsets[token] + wrong[token]
        no_center, no_distogram = np.zeros(len(tokens), bool), np.zeros(len(tokens), bool)
        no_frame = np.zeros(len(tokens), bool)
        no_center[token[value == center[token]]] = True
        no_distogram[token[value == distogram[token]]] = True
        no_frame[token[(value[:, None] == frame[token]).any(axis=-1)]] = True
        center, distogram = np.where(no_center, -1, center), np.where(no_distogram, -1, distogram)
        frame = np.where(no_frame[:, None], -1, frame)
    return {"molecule_atom_indices": center, "distogram_atom_indices": distogram, "atom_indices_for_frame": frame}


def structure_features(
    entry: Entry, keep: np.ndarray, *, training: bool = True, exact_bonds: bool = False
) -> dict[str, Tensor | None]:
    """The fields of the baseline's `AtomInput` that come from the structure, for the tokens in `keep`.

    Args:
        entry: the uncropped structure.
        keep: bool [N], at least one True.
        training: install bonds of the mmCIF file (`_struct_conn`), which the baseline does in training only.
        exact_bonds: install all of them. The baseline misses most bonds of ligands (glycans, covalent inhibitors),
            because it looks their atoms up by element, and every bond where copies of a chain differ.

    Returns: tensors by field name; shapes as in `alphafold3_pytorch.inputs.AtomInput`. In place of the atom pairs there
        is `atom_molecules`, int32 [M], the molecule of each atom (`megafold.evopipe.expand.atom_pairs`).
    """
    crop = Crop(entry, keep)
    tokens, n, n_atoms = crop.tokens, len(crop.tokens), len(crop.atoms)
    segments = crop.segments()
    entity, symmetry = _entity_and_symmetry(segments, n)
    ion = (tokens["kind"] == layout.LIGAND) & (crop.residue_tokens == 1)[crop.residue_of_token]
    kind = tokens["kind"]
    molecule_type = np.where(kind < layout.LIGAND, kind % layout.FIRST_ATOMISED, np.where(ion, 4, 3))
    modified = np.zeros((n, layout.NUM_MODIFICATIONS), bool)
    is_modified = (kind >= layout.FIRST_ATOMISED) & (kind < layout.LIGAND)
    modified[is_modified, kind[is_modified] - layout.FIRST_ATOMISED] = True
    additional = np.stack(
        [tokens["residue_index"] - 1, np.arange(n), tokens["chain"], entity, symmetry], axis=-1, dtype=np.int64
    )
    position = torch.from_numpy(np.ascontiguousarray(crop.atoms["position"]))
    resolution = None if entry.resolution is None else torch.tensor(entry.resolution)
    resolved = None
    if resolution is not None:
        resolved = torch.full((n_atoms,), int(0.1 <= float(resolution) <= 3.0), dtype=torch.long)
    chain_of_residue = tokens["chain"][crop.residue_starts].astype(np.int64)
    molecule = np.repeat(np.arange(len(crop.residues)), crop.residue_atoms)
    values = {
        "atom_inputs": crop.features.astype(np.float32),
        "molecule_ids": np.where(ion, layout.METAL_ION_ID, tokens["molecule_id"]).astype(np.int64),
        "molecule_atom_lens": np.where(crop.atomised, 1, crop.residue_atoms[crop.residue_of_token]).astype(np.int64),
        "additional_molecule_feats": additional,
        "is_molecule_types": np.arange(layout.NUM_MOLECULE_TYPES) == molecule_type[:, None],
        "is_molecule_mod": modified,
        "token_bonds": _token_bonds(crop, segments, training=training, exact=exact_bonds),
        "atom_parent_ids": np.repeat(chain_of_residue, crop.residue_atoms),
        "missing_atom_mask": np.ascontiguousarray(crop.atoms["missing"]),
        "atom_molecules": molecule.astype(np.int32),
        **_atom_indices(crop),
    }
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    return {**tensors, "atom_pos": position, "resolved_labels": resolved, "resolution": resolution}
