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

from megafold.errors import InputError
from megafold.evopipe import layout, molecules
from megafold.evopipe.layout import Entry

EPS = 1e-20  # the baseline's, in the length of a vector
FAR = 1e4  # angstrom: the baseline's distance of an atom to itself and to atoms that are not there
MIN_ANGLE = 25.0  # degrees between the edges of a frame, and to a straight line
CLEAR_ANGLE = 0.05  # degrees: more than float32 can be wrong by, at these angles and the lengths of bonds
EPSILON = 32 * float(np.finfo(np.float32).eps)  # of the difference of two squared distances in float32, generously
# by kind of token: the baseline's type of molecule (protein, RNA, DNA, ligand, ion), and which modification it has
ION_TYPE = 4
MOLECULE_TYPE = np.minimum(np.arange(len(layout.KINDS)) % layout.FIRST_ATOMISED, 3)
MOLECULE_TYPE[layout.LIGAND] = ION_TYPE - 1
IS_TYPE = np.eye(layout.NUM_MOLECULE_TYPES, dtype=bool)
IS_MODIFICATION = np.zeros((len(layout.KINDS), layout.NUM_MODIFICATIONS), bool)
IS_MODIFICATION[np.arange(layout.FIRST_ATOMISED, layout.LIGAND), np.arange(layout.LIGAND - layout.FIRST_ATOMISED)] = (
    True
)


class Crop:
    """The tokens, residues and atoms that a mask keeps, renumbered.

    Args:
        entry: the uncropped structure (the alignment is not needed).
        keep: which tokens stay, bool [N].
    """

    def __init__(self, entry: Entry, keep: np.ndarray) -> None:
        arrays = entry.arrays
        self.entry, self.keep = entry, keep
        self.index = keep.nonzero()[0]
        self.new = keep.cumsum() - 1  # old token -> new token, where kept
        self.tokens = layout.take_rows(arrays["tokens"], self.index)
        self.atom_index = keep[arrays["atoms"]["token"]].nonzero()[0]
        self.atoms = layout.take_rows(arrays["atoms"], self.atom_index)
        n, residue, kind = len(self.tokens), self.tokens["residue"], self.tokens["kind"]
        first = np.ones(n, bool)
        np.not_equal(residue[1:], residue[:-1], out=first[1:])
        starts = first.nonzero()[0]
        self.residue_starts, self.residue_tokens = starts, np.diff(starts, append=n)
        self.residues = layout.take_rows(arrays["residues"], residue[starts])
        self.residue_of_token = first.cumsum() - 1
        self.atomised = kind >= layout.FIRST_ATOMISED
        self.any_atomised = bool(self.atomised.any())
        self.residue_atomised = self.atomised[starts]
        self.cut = self.residue_tokens != self.residues["tokens"]
        self.residue_atoms = np.where(self.residue_atomised, self.residue_tokens, self.residues["atoms"])
        self.residue_offsets = self.residue_atoms.cumsum() - self.residue_atoms
        if int(self.residue_atoms.sum()) != len(self.atoms):
            raise InputError(entry.name, "residues", "corrupt entry (they do not have the atoms that they name)")
        self.token_offsets = self.residue_offsets[self.residue_of_token]
        # position inside its residue (atomised), or the center atom (polymer)
        self.local = np.where(self.atomised, np.arange(n) - starts[self.residue_of_token], self.tokens["center"])
        self.features, self.bonds = self._chemistry()

    def _chemistry(self) -> tuple[np.ndarray, np.ndarray]:
        """Atom features [M, 3] and bonds [bonds, 2] (new tokens); a residue that the crop cuts is perceived anew."""
        arrays, features = self.entry.arrays, self.atoms["features"].copy()
        bonds, cut = arrays["bonds"], self.cut.nonzero()[0]
        inside = self.keep[bonds["first"]]
        if len(cut):
            whole = np.ones(len(arrays["residues"]), bool)
            whole[self.tokens["residue"][self.residue_starts[cut]]] = False
            inside = inside & whole[arrays["tokens"]["residue"][bonds["first"]]]
        bonds = bonds[inside]
        pairs = [np.stack([self.new[bonds["first"]], self.new[bonds["second"]]], axis=-1)]
        for residue in cut:
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
        return features, np.concatenate(pairs) if len(cut) else pairs[0]

    def segments(self) -> list[tuple[str, int, int, bool]]:
        """Runs of the crop as the baseline's "chain sequences": (sequence, first token, tokens, atomised).

        Consecutive polymer residues of one chain and kind form a run; every atomised residue is a run of its own.
        """
        chain, kind = self.tokens["chain"][self.residue_starts], self.residues["kind"]
        breaks = np.ones(len(chain), bool)
        breaks[1:] = (chain[1:] != chain[:-1]) | (kind[1:] != kind[:-1]) | self.residue_atomised[1:]
        firsts = breaks.nonzero()[0]
        tokens, sizes = self.residue_starts[firsts].tolist(), self.residue_tokens[firsts].tolist()
        atomised, components = self.residue_atomised[firsts].tolist(), self.residues["component"][firsts].tolist()
        names, letters, firsts, runs = (
            self.entry.arrays["components"],
            self.residues["letter"].tobytes(),
            firsts.tolist(),
            [],
        )
        for i, (first, last) in enumerate(zip(firsts, [*firsts[1:], len(chain)])):
            if atomised[i]:
                runs.append((names[components[i]].decode(), tokens[i], sizes[i], True))
            else:
                runs.append((letters[first:last].decode(), tokens[i], last - first, False))
        return runs


def _entity_and_symmetry(segments, entity: np.ndarray, symmetry: np.ndarray) -> None:
    """Write the number of each run's sequence, and how often it has occurred before, to two int64 [N]."""
    numbers: dict[str, int] = {}
    seen: dict[str, int] = {}
    for sequence, first, count, _ in segments:
        entity[first : first + count] = numbers.setdefault(sequence, len(numbers))
        symmetry[first : first + count] = copy = seen.get(sequence, 0)
        seen[sequence] = copy + 1


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
    """Atoms of the frame of each atomised token, int64 [atomised, 3] (AF3 supplement 4.3.2); -1 where there is none.

    A frame joins a token and the two nearest center atoms of the same chain in the crop.
    """
    chain, positions, resolved = (crop.tokens[name] for name in ("chain", "center_position", "center_resolved"))
    tokens = crop.atomised.nonzero()[0]
    frames, clear = _looked_up_frames(crop, tokens)
    unclear = (~clear).nonzero()[0]
    for asym in np.unique(chain[tokens[unclear]]):
        members = (chain == asym).nonzero()[0]
        mine = unclear[chain[tokens[unclear]] == asym]
        wanted = members.searchsorted(tokens[mine])
        found = frames_of_chain(positions[members], resolved[members], wanted)
        # In every chain but the first the baseline adds the chain's first token to the "no frame" value -1 as well.
        frames[mine] = found + members[0]
    none = (frames == -1).any(axis=-1, keepdims=True)
    return np.where(none, frames, (crop.token_offsets + crop.local)[frames])


def _looked_up_frames(crop: Crop, tokens: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Tokens of the frames of atomised `tokens`, int64 [tokens, 3], from the neighbours that the entry names.

    Returns: and which of them are certain, bool [tokens]: of the others the rounding of the baseline may decide.
    """
    known, n = crop.entry.shortcuts, len(tokens)
    if known is None or not n:
        return np.full((n, 3), -1), np.zeros(n, bool)
    row = known["frame_tokens"].searchsorted(crop.index[tokens])
    near = known["frame_nearest"][row]
    inside = crop.keep[near] & (near >= 0)
    rank = inside.cumsum(axis=-1)
    total, all_named = rank[:, -1], near[:, -1] < 0
    places = np.stack([(rank == place).argmax(axis=-1) for place in (1, 2, 3)], axis=-1)
    ends = crop.new[near[np.arange(n)[:, None], places]]
    where, resolved = crop.tokens["center_position"].astype(np.float64), crop.tokens["center_resolved"]
    edges = where[ends] - where[tokens][:, None]
    squares = (edges * edges).sum(axis=-1)
    # where there is no third one among the neighbours that are named, there is one beyond them, or none at all
    squares[:, 2] = np.where(total >= 3, squares[:, 2], np.where(all_named, np.inf, 0.0))
    bad, clear = _judged(edges[:, 0], edges[:, 1], squares, (where[tokens] ** 2).sum(axis=-1))
    few = total < 2
    bad, clear = bad | few, np.where(few, all_named, clear & resolved[tokens])
    frames = np.stack([ends[:, 0], tokens, ends[:, 1]], axis=-1)
    if bad.any():
        # In every chain but the first the baseline adds the chain's first token to the "no frame" value -1 as well.
        chains, first = np.unique(crop.tokens["chain"], return_index=True)
        frames[bad] = first[chains.searchsorted(crop.tokens["chain"][tokens[bad]])][:, None] - 1
    return frames, clear


def _judged(first, second, squares: np.ndarray, away: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which frames have an angle that the baseline refuses, and which are certain: two bool [n].

    Args:
        first, second: edges to the two nearest, float64 [n, 3], angstrom.
        squares: distances to the three nearest, squared, [n, 3]; infinite where there is none.
        away: squared distance of each token to the origin, [n].
    """
    one, two, three = squares.T
    # float32 |a|^2 + |b|^2 - 2ab: at most 13 epsilon max(|a|^2, |b|^2) on either side of a comparison. The three are at
    # most |a| + d from the origin; for tokens farther off, d^2 grows faster than that error.
    error = EPSILON * (np.sqrt(np.maximum(away, 1.0)) + np.sqrt(np.where(three < np.inf, three, two))) ** 2
    clear = (one > error) & (two - one > error) & (three - two > error) & (two < FAR**2 / 4)
    bad, certain = _angles(first, second, one * two)
    return bad, clear & certain


def _angles(first, second, product: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which angles between edges [n, 3] the baseline refuses, and of which float32 leaves no doubt: two bool [n].

    Args:
        product: of the squared lengths, [n].
    """
    cosine = (first * second).sum(axis=-1) / np.sqrt(np.maximum(product, EPS))
    degree = np.degrees(np.arccos(np.minimum(np.maximum(cosine, -1.0), 1.0)))
    off = np.minimum(abs(degree - MIN_ANGLE), abs(degree - (180.0 - MIN_ANGLE)))
    return (degree < MIN_ANGLE) | (degree > 180.0 - MIN_ANGLE), off > CLEAR_ANGLE


def frames_of_chain(position: np.ndarray, resolved: np.ndarray, wanted: np.ndarray) -> np.ndarray:
    """(nearest, itself, second nearest) of some center atoms of a chain, int64 [wanted, 3]; -1 where there is no frame.

    Args:
        position: of all center atoms, float32 [n, 3], angstrom.
        resolved: bool [n].
        wanted: indices of those whose frames are asked for, int64.
    """
    if len(position) < 3 or int(resolved.sum()) < 3:
        return np.full((len(wanted), 3), -1)
    where = torch.from_numpy(np.ascontiguousarray(position))
    # all distances in the baseline's batched call: the same rounding, same ties; the rest goes row by row
    distance = torch.cdist(where[None], where[None])[0].numpy()[wanted]
    distance[:, ~resolved] = FAR
    distance[~resolved[wanted]] = FAR
    distance[np.arange(len(wanted)), wanted] = FAR
    found = _plain_frames(position, distance, wanted)
    return _rounded_frames(where, torch.from_numpy(distance), torch.from_numpy(wanted)) if found is None else found


def _plain_frames(position: np.ndarray, distance: np.ndarray, wanted: np.ndarray) -> np.ndarray | None:
    """`frames_of_chain` of the baseline's distances [wanted, n], or None where ties or rounded angles may decide."""
    order, rows = distance.argpartition(min(2, len(position) - 1), axis=-1)[:, :3], np.arange(len(wanted))[:, None]
    order = order[rows, distance[rows, order].argsort(axis=-1)]
    values = distance[rows, order]
    if not ((values[:, :1] > 0) & (values[:, 1:] > values[:, :-1])).all() or not (values[:, 1] < FAR).all():
        return None
    edges = position[order[:, :2]].astype(np.float64) - position[wanted][:, None]
    bad, clear = _angles(edges[:, 0], edges[:, 1], (edges * edges).sum(axis=-1).prod(axis=-1))
    if not clear.all():
        return None
    found = order[:, [0, 0, 1]]
    found[:, 1] = wanted
    found[bad] = -1
    return found


def _rounded_frames(where: Tensor, distance: Tensor, rows: Tensor) -> np.ndarray:
    """`frames_of_chain` with the baseline's own operations, and so with its rounding."""
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
    if crop.any_atomised:
        frame[crop.atomised] = _ligand_frames(crop)
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
    kind, chain = tokens["kind"], tokens["chain"]
    molecule_type, molecule_id = MOLECULE_TYPE[kind], tokens["molecule_id"].astype(np.int64)
    if crop.any_atomised:
        ion = ((kind == layout.LIGAND) & (crop.residue_tokens == 1)[crop.residue_of_token]).nonzero()[0]
        molecule_type[ion], molecule_id[ion] = ION_TYPE, layout.METAL_ION_ID
    additional = np.empty((n, 5), np.int64)
    np.subtract(tokens["residue_index"], 1, out=additional[:, 0])
    additional[:, 1], additional[:, 2] = np.arange(n), chain
    _entity_and_symmetry(segments, additional[:, 3], additional[:, 4])
    resolution = None if entry.resolution is None else torch.from_numpy(np.array(entry.resolution, np.float32))
    resolved = None
    if resolution is not None:
        resolved = torch.from_numpy(np.full(n_atoms, 0.1 <= float(resolution) <= 3.0, np.int64))
    residue_of_atom = np.arange(len(crop.residues)).repeat(crop.residue_atoms)
    values = {
        "atom_inputs": crop.features.astype(np.float32),
        "molecule_ids": molecule_id,
        "molecule_atom_lens": np.where(crop.atomised, 1, crop.residue_atoms[crop.residue_of_token]),
        "additional_molecule_feats": additional,
        "is_molecule_types": IS_TYPE[molecule_type],
        "is_molecule_mod": IS_MODIFICATION[kind],
        "token_bonds": _token_bonds(crop, segments, training=training, exact=exact_bonds),
        "atom_parent_ids": chain[crop.residue_starts].astype(np.int64)[residue_of_atom],
        "missing_atom_mask": np.ascontiguousarray(crop.atoms["missing"]),
        "atom_molecules": residue_of_atom.astype(np.int32),
        **_atom_indices(crop),
        "atom_pos": np.ascontiguousarray(crop.atoms["position"]),
    }
    tensors = {name: torch.from_numpy(value) for name, value in values.items()}
    return {**tensors, "resolved_labels": resolved, "resolution": resolution}
