"""What one cached structure consists of: the arrays of an `Entry`, their types, and the schema version.

The cached stage is the *whole, uncropped* structure after every expensive and deterministic step of the baseline's
pipeline: parsing, RDKit molecules, multiple sequence alignment (MSA) and templates. Everything that the baseline
derives after its crop (molecules, tokens, frames, entity and symmetry ids, bonds, atom pairs) is a cheap function of
these arrays and of a token mask: `megafold.evopipe.crop`.

Letters: N tokens, R residues (the baseline's "molecules"), M atoms, S alignment rows, T templates. A polymer residue is
one token with several atoms; each atom of an *atomised* residue (ligand, ion, modified residue) is a token.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from megafold.evopipe.report import Finding

SCHEMA_VERSION = 3

KINDS = ("protein", "rna", "dna", "mod_protein", "mod_rna", "mod_dna", "ligand")
LIGAND = KINDS.index("ligand")
FIRST_ATOMISED = KINDS.index("mod_protein")

# Conventions of alphafold3-pytorch 0.8.3, restated because importing it takes many seconds: checked by a test.
ATOMS_PER_WINDOW = 27
METAL_ION_ID = 32
NUM_MSA_CLASSES = 32
NUM_MOLECULE_TYPES = 5
NUM_MODIFICATIONS = 4
TEMPLATE_PAIR_FEATURES = 44
TEMPLATE_CLASSES = 32

TOKEN = np.dtype(
    [
        ("residue", "<i4"),  # index into residues
        ("residue_index", "<i4"),  # 1-based position in the chain, the baseline's renumbering
        ("chain", "<i4"),  # the baseline's chain index (rank of the chain id)
        ("component", "<i4"),  # index into components
        ("molecule_id", "u1"),  # residue type, 0..31
        ("kind", "u1"),  # index into KINDS
        ("center", "u1"),  # polymer: its center atom; atomised: position in the 47 atom types of the baseline
        ("distogram", "u1"),  # polymer: distogram atom inside the residue
        ("frame", "u1", (3,)),  # polymer: the three frame atoms inside the residue
        ("center_resolved", "?"),  # is the center atom present in the experiment?
        ("center_position", "<f4", (3,)),  # angstrom; what ligand frames are found from
        ("crop_position", "<f4", (3,)),  # angstrom; what spatial crops measure; infinite where no atom is resolved
        ("element", "S2"),  # atomised: element symbol as the baseline reads it
    ]
)
RESIDUE = np.dtype(
    [
        ("first_token", "<i4"),
        ("tokens", "<i4"),
        ("first_atom", "<i4"),
        ("atoms", "<i4"),
        ("component", "<i4"),
        ("kind", "u1"),
        ("letter", "u1"),  # polymer: ASCII code of the one-letter residue type; atomised: 0
    ]
)
ATOM = np.dtype(
    [
        ("token", "<i4"),
        ("position", "<f4", (3,)),  # angstrom; zeros where missing
        ("features", "i1", (3,)),  # formal charge, implicit valence, explicit valence
        ("missing", "?"),
    ]
)
BOND = np.dtype([("first", "<i4"), ("second", "<i4")])  # tokens, inside an atomised residue
# One row per `_struct_conn` bond that may be installed: the tokens that its two atoms may denote are
# link_tokens[start : start + count]; `key` numbers the atom, because repeated bonds of one atom take the next token.
# That is how the baseline finds atoms, and it misses most of those of ligands; `token` is the right one, or -1.
_LINK_END = ("key", "start", "count", "token")
LINK = np.dtype([(f"{name}_{side}", "<i4") for side in ("first", "second") for name in _LINK_END])

ARRAYS = {
    "tokens": TOKEN,
    "residues": RESIDUE,
    "atoms": ATOM,
    "bonds": BOND,
    "links": LINK,
    "link_tokens": np.dtype("<i4"),
    "components": np.dtype("S8"),
    "msa": np.dtype("u1"),  # [S, N] residue classes, 0..31
    "deletions": np.dtype("<u2"),  # [S, N] index into deletion_values
    "deletion_values": np.dtype("<f4"),  # the distinct values of the baseline's deletion feature
    "profile": np.dtype("<f4"),  # [N, 33] residue profile and mean deletion, over the uncropped alignment
    "template_mask": np.dtype("?"),  # [T]
    "template_classes": np.dtype("u1"),  # [T, N] residue class of the template
    "template_positions": np.dtype("<f8"),  # [T, N, 3] distogram atom of the template's residue, angstrom
    "template_frames": np.dtype("<f8"),  # [T, N, 3, 3] its three frame atoms
    "template_state": np.dtype("u1"),  # [T, N] bits: template_geometry.DISTOGRAM_ATOM, FRAME, PRESENT
}

# What choosing and featurising a crop looks up: functions of the arrays above, made when an entry is stored
# (`megafold.evopipe.shortcuts`).
SHORTCUTS = {
    "chain_types": np.dtype("<i4"),  # [C, 2] each chain, and what most of it is: an index into KINDS
    "pairs": np.dtype("<i4"),  # [K, 2] chains that an interface crop can be drawn around
    "pair_starts": np.dtype("<u4"),  # [K + 1] first of each pair in pair_places
    "pair_places": np.dtype("<u4"),  # the tokens of its interface: places among the resolved tokens of its two chains
    "frame_tokens": np.dtype("<i4"),  # [A] atomised tokens
    "frame_nearest": np.dtype("<i4"),  # [A, 16] resolved tokens of its chain, nearest first; -1 where there is none
}
# Axes of the arrays that have more than one.
RANKS = {
    "msa": 2, "deletions": 2, "profile": 2, "template_classes": 2, "template_state": 2, "template_positions": 3,
    "template_frames": 4, "chain_types": 2, "pairs": 2, "frame_nearest": 2,
}  # fmt: skip


def take_rows(table: np.ndarray, index: np.ndarray) -> np.ndarray:
    """`table[index]` of a contiguous table [rows] of records, copied as bytes: NumPy copies records field by field."""
    rows = table.view(np.uint8).reshape(len(table), table.dtype.itemsize)
    return rows.take(index, axis=0).reshape(-1).view(table.dtype)


@dataclass
class Entry:
    """One structure before cropping.

    Args:
        name: the entry's id, e.g. `7a4d-assembly1`.
        arrays: the arrays named in ARRAYS, with those types.
        chains: chain ids; `tokens["chain"]` indexes them.
        resolution: angstrom, or None where the file gives none.
        released: release date, `YYYY-MM-DD`.
        smiles: SMILES of the components whose residues are atomised (a crop through a ligand needs them).
        sources: file name -> sha256 of each input.
        notes: what a user should know about this entry (e.g. an alignment that was not used).
        findings: the same and more, for the report of a build: what was removed or replaced, why, what to do.
        shortcuts: the arrays named in SHORTCUTS, as a cache has them; None where they are not known yet.
    """

    name: str
    arrays: dict[str, np.ndarray]
    chains: tuple[str, ...]
    resolution: float | None
    released: str
    smiles: dict[str, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    findings: tuple[Finding, ...] = ()
    shortcuts: dict[str, np.ndarray] | None = None

    def __post_init__(self) -> None:
        wrong = [name for name, dtype in ARRAYS.items() if name not in self.arrays or self.arrays[name].dtype != dtype]
        if wrong:
            raise ValueError(f"entry {self.name}: arrays {', '.join(wrong)} are missing or have the wrong type")

    @property
    def n_tokens(self) -> int:
        return len(self.arrays["tokens"])

    @property
    def n_atoms(self) -> int:
        return len(self.arrays["atoms"])

    @property
    def msa_depth(self) -> int:
        return len(self.arrays["msa"])
