"""The cached features of a crop equal the baseline's for the same chains and crop mask, bit for bit."""

from __future__ import annotations

import collections
import dataclasses
import functools
import runpy
from pathlib import Path

import numpy as np
import pytest
import torch

from megafold.evopipe import alignments, augment, ccd, featurize, layout, loader, measure, sample_data, shortcuts
from megafold.evopipe.layout import Entry
from megafold.evopipe.report import Log
from megafold.evopipe.sources import DataSource
from megafold.evopipe.unresolved import complete

DEPTH = 64


@pytest.fixture(scope="module")
def shared_source(shared_data) -> DataSource:
    return DataSource("folders", shared_data / "mmcif", shared_data / "msa", shared_data / "templates")


@pytest.fixture(scope="module")
def entry_of():
    """The entry of one structure, featurised once."""
    ccd.install()

    @functools.cache
    def make(source: DataSource, name: str) -> Entry:
        return featurize.featurize(source, name, source.files()[name], msa_depth=DEPTH)

    return make


def stock_features(source: DataSource, name: str, keep: np.ndarray, *, training: bool = True, unresolved: bool = True):
    """What the baseline computes when its crop is replaced by the mask `keep` (in the file's token order).

    With `unresolved` the baseline is given the structure with its unresolved residues in place, no atom of them
    present. It can compute everything for them, but for one call of `np.vectorize` on an empty array, which is told the
    type of its result here.
    """
    from alphafold3_pytorch import inputs
    from alphafold3_pytorch.attention import full_pairwise_repr_to_windowed
    from alphafold3_pytorch.common.biomolecule import Biomolecule

    def crop(self, **_):
        chains = list(collections.Counter(self.chain_id).items())
        masks = [keep[self.chain_id == chain] for chain, _ in chains]
        return self.crop_chains_with_masks(chains, masks), chains, masks

    def completed(mmcif_object):
        return complete(mmcif_object, from_mmcif(mmcif_object), Log(name, name))[0]

    from_mmcif = inputs._from_mmcif_object
    root = measure.stage_for_stock(source, unresolved=unresolved)
    weights = {"contiguous_weight": 1.0, "spatial_weight": 0.0, "spatial_interface_weight": 0.0, "n_res": 384}
    example = inputs.PDBInput(
        mmcif_filepath=str(root / "mmcif" / name[1:3] / f"{name}.cif"),
        chains=(None, None),
        cropping_config=weights,
        msa_dir=str(root / "msa"),
        max_msas_per_chain=DEPTH,
        training=training,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Biomolecule, "crop", crop)
        if unresolved:
            patch.setattr(inputs, "_from_mmcif_object", completed)
            patch.setattr(np, "vectorize", functools.partial(np.vectorize, otypes=[int]))
        result = inputs.maybe_transform_to_atom_input(example, raise_exception=True)
    assert result.atompair_inputs.ndim == 3
    result.atompair_inputs = full_pairwise_repr_to_windowed(result.atompair_inputs, layout.ATOMS_PER_WINDOW)
    return result


def our_features(entry: Entry, keep: np.ndarray, *, training: bool = True):
    """As a reader of the cache computes them, which has looked things up; without that they are the same."""
    alignment = entry.arrays["msa"][:, keep], entry.arrays["deletions"][:, keep]
    known = dataclasses.replace(entry, shortcuts=shortcuts.compute(entry.arrays["tokens"]))
    found, plain = (loader.model_features(one, keep, *alignment, training=training) for one in (known, entry))
    frames = "atom_indices_for_frame"
    assert torch.equal(found[frames], plain[frames])
    return found


def assert_equal(stock, cached, fields=None) -> None:
    differences = []
    for field, value in cached.items():
        expected = getattr(stock, field)
        if value is None or expected is None:
            same = value is expected
        else:
            same = value.dtype == expected.dtype and value.shape == expected.shape and torch.equal(value, expected)
        if not same:
            differences.append(field)
    assert not differences
    ignored = {"atom_ids", "atompair_ids", "distance_labels", "token_constraints", "chains", "filepath"}
    assert set(vars(stock)) - set(cached) == ignored


def mask_of(entry: Entry, kind: str, size: int) -> np.ndarray:
    if kind == "whole":
        return np.ones(entry.n_tokens, bool)
    if kind == "scattered":  # cuts through ligands, modified residues and chains everywhere
        return np.random.default_rng(7).random(entry.n_tokens) < size / entry.n_tokens
    return augment.choose_crop(entry, size, epoch=0, seed=1, weights={kind: 1.0}).keep


SHARED = [
    ("7a4d-assembly1", "spatial", 100),
    ("7a4d-assembly1", "contiguous", 200),
    ("7a4d-assembly1", "scattered", 150),
    ("209d-assembly1", "whole", 0),
    ("209d-assembly1", "scattered", 30),
    ("209d-assembly1", "interface", 40),
    ("721p-assembly1", "interface", 90),
]


@pytest.mark.parametrize(("name", "kind", "size"), SHARED)
def test_shared_structure_equals_the_baseline(shared_source, entry_of, name, kind, size):
    """Every residue of these files is resolved: the baseline is given nothing but the file."""
    entry = entry_of(shared_source, name)
    keep = mask_of(entry, kind, size)
    stock = stock_features(shared_source, name, keep, unresolved=False)
    assert_equal(stock, our_features(entry, keep))
    if name.startswith("7a4d"):
        assert stock.msa.shape[0] == DEPTH  # the alignments were really read


def test_shared_structure_without_bonds_of_the_file(shared_source, entry_of):
    name = "209d-assembly1"
    entry = entry_of(shared_source, name)
    keep = mask_of(entry, "whole", 0)
    stock = stock_features(shared_source, name, keep, training=False, unresolved=False)
    assert_equal(stock, our_features(entry, keep, training=False))
    with_bonds = our_features(entry, keep)["token_bonds"]
    assert with_bonds.sum() > stock.token_bonds.sum()


@pytest.mark.parametrize("id", sorted(sample_data.ENTRIES))
def test_sample_structure_equals_the_baseline(sample, entry_of, id):
    name = f"{id}-assembly1"
    entry = entry_of(sample, name)
    keep = mask_of(entry, "spatial" if id != "3u8v" else "scattered", 60)
    assert_equal(stock_features(sample, name, keep), our_features(entry, keep))


@pytest.mark.parametrize("id", ["2q2k", "3u8v", "7l39"])
def test_whole_structure_with_unresolved_residues_equals_the_baseline(sample, entry_of, id):
    name = f"{id}-assembly1"
    entry = entry_of(sample, name)
    keep = mask_of(entry, "whole", 0)
    ours = our_features(entry, keep)
    assert_equal(stock_features(sample, name, keep), ours)
    atoms = entry.arrays["atoms"]
    masked = [bool(atoms["missing"][atoms["token"] == token].all()) for token in range(entry.n_tokens)]
    assert sum(masked) == {"2q2k": 102, "3u8v": 10, "7l39": 2}[id]
    assert (ours["molecule_atom_indices"][masked] == -1).all() and (ours["atom_indices_for_frame"][masked] == -1).all()


def test_sample_alignment_keeps_the_columns_of_unresolved_residues(sample, entry_of):
    """The alignments of 2q2k are of the full sequence, 70 residues; 25 or 26 have no coordinates."""
    from alphafold3_pytorch.inputs import HUMAN_AMINO_ACIDS

    entry = entry_of(sample, "2q2k-assembly1")
    protein = entry.arrays["tokens"]["kind"] == 0
    assert entry.msa_depth > 10 and protein.sum() == 4 * 70
    residues = entry.arrays["residues"][entry.arrays["tokens"]["residue"][protein]]
    letters = "".join(chr(code) for code in residues["letter"])
    classes = list(HUMAN_AMINO_ACIDS)
    assert letters == "".join(classes[i] for i in entry.arrays["msa"][0][protein])
    first = next(alignments.records((sample.msa / "2q2k-assembly1A_protein.a3m").read_text()))[1]
    assert letters == 4 * first


def test_structure_of_everything_equals_the_baseline(sample, entry_of, tmp_path):
    """Unresolved, modified, unknown and incomplete residues, a sugar on a residue, an ion, a free amino acid."""
    mutated = runpy.run_path(str(Path(__file__).with_name("mutated.py")))
    changed = mutated["Entry"]((sample.mmcif / "1ubq.cif").read_text())
    changed.drop(*mutated["ASSEMBLY_TABLES"])
    changed.set(lambda atom: atom["label_seq_id"] == "1", label_comp_id="MSE", auth_comp_id="MSE")
    changed.set(lambda atom: atom["label_seq_id"] == "30", label_comp_id="UNK", auth_comp_id="UNK")
    changed.keep(lambda atom: atom["label_seq_id"] not in ("10", "11", "12", "75", "76"))
    changed.keep(lambda atom: atom["label_seq_id"] != "40" or atom["label_atom_id"] in ("N", "C"))
    changed.ligand("NAG", "B", "A", 201, changed.place(25, "ND2"))
    changed.ligand("ZN", "C", "A", 202, (60.0, 0.0, 0.0))
    changed.ligand("GLU", "D", "A", 203, (70.0, 0.0, 0.0))
    sugar = next(atom for atom in changed.atoms if atom["label_comp_id"] == "NAG")
    amide = next(atom for atom in changed.residue(25) if atom["label_atom_id"] == "ND2")
    changed.bond("covale", amide, sugar, 1.45)
    (tmp_path / "mmcif").mkdir()
    (tmp_path / "mmcif" / "1ubq.cif").write_text(changed.text())
    source = DataSource("folders", tmp_path / "mmcif")
    entry = entry_of(source, "1ubq-assembly1")
    kinds = {layout.KINDS[kind] for kind in entry.arrays["tokens"]["kind"]}
    assert kinds == {"protein", "mod_protein", "ligand"} and entry.n_tokens > 76 + 15
    for kind, size in (("whole", 0), ("spatial", 50), ("scattered", 60)):
        keep = mask_of(entry, kind, size)
        assert_equal(stock_features(source, "1ubq-assembly1", keep), our_features(entry, keep))


def test_alignment_of_7a4d_fits_the_full_sequence(shared_data, entry_of, tmp_path):
    """The report that the baseline has open: residues without coordinates, an alignment of the whole sequence."""
    mutated = runpy.run_path(str(Path(__file__).with_name("mutated.py")))
    name = "7a4d-assembly1"
    changed = mutated["Entry"](alignments.read_text(shared_data / "mmcif" / f"{name}.cif.gz"))
    lost = [("A", str(number)) for number in (1, 2, 50, 51, 52, 53, 118)] + [("C", "7")]
    changed.keep(lambda atom: (atom["auth_asym_id"], atom["auth_seq_id"]) not in lost)
    (tmp_path / "mmcif").mkdir()
    (tmp_path / "mmcif" / f"{name}.cif").write_text(changed.text())
    source = DataSource("folders", tmp_path / "mmcif", shared_data / "msa")
    whole = DataSource("folders", shared_data / "mmcif", shared_data / "msa", shared_data / "templates")
    entry, original = entry_of(source, name), entry_of(whole, name)
    assert np.array_equal(entry.arrays["msa"], original.arrays["msa"])
    assert np.array_equal(entry.arrays["tokens"]["residue_index"], original.arrays["tokens"]["residue_index"])
    keep = np.zeros(entry.n_tokens, bool)
    keep[40:90] = True
    stock = stock_features(source, name, keep)
    assert_equal(stock, our_features(entry, keep))
    assert stock.missing_atom_mask.sum() > 20 and len(stock.msa) == DEPTH


def test_layout_restates_the_conventions_of_the_baseline():
    from alphafold3_pytorch import inputs

    assert layout.NUM_MSA_CLASSES == inputs.NUM_MSA_ONE_HOT
    assert layout.METAL_ION_ID == inputs.MOLECULE_METAL_ION_ID
    assert layout.NUM_MOLECULE_TYPES == inputs.IS_MOLECULE_TYPES
    assert layout.NUM_MODIFICATIONS == inputs.DEFAULT_NUM_MOLECULE_MODS
