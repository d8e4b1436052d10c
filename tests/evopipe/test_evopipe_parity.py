"""The cached features of a crop equal the baseline's for the same chains and crop mask, bit for bit."""

from __future__ import annotations

import collections

import numpy as np
import pytest
import torch

from megafold.evopipe import augment, layout, loader, measure, sample_data
from megafold.evopipe.build import build_cache
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.sources import DataSource

DEPTH = 64


@pytest.fixture(scope="module")
def shared_source(shared_data) -> DataSource:
    return DataSource("folders", shared_data / "mmcif", shared_data / "msa", shared_data / "templates")


@pytest.fixture(scope="module")
def shared_cache(shared_source, tmp_path_factory):
    path = tmp_path_factory.mktemp("cache") / "shared.h5"
    assert not build_cache(shared_source, path, msa_depth=DEPTH, progress=False).failed
    return path


def stock_features(source: DataSource, name: str, keep: np.ndarray, *, training: bool = True):
    """What the baseline computes when its crop is replaced by the mask `keep` (in the file's token order)."""
    from alphafold3_pytorch import inputs
    from alphafold3_pytorch.attention import full_pairwise_repr_to_windowed
    from alphafold3_pytorch.common.biomolecule import Biomolecule

    def crop(self, **_):
        chains = list(collections.Counter(self.chain_id).items())
        masks = [keep[self.chain_id == chain] for chain, _ in chains]
        return self.crop_chains_with_masks(chains, masks), chains, masks

    root = measure.stage_for_stock(source)
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
        result = inputs.maybe_transform_to_atom_input(example, raise_exception=True)
    assert result.atompair_inputs.ndim == 3
    result.atompair_inputs = full_pairwise_repr_to_windowed(result.atompair_inputs, layout.ATOMS_PER_WINDOW)
    return result


def cached_features(cache_path, name: str, keep: np.ndarray, *, training: bool = True):
    with StructureCache(cache_path) as cache:
        rows = np.arange(cache.msa_depth(name))
        alignment = cache.read_alignment(name, rows, keep)
        return loader.model_features(cache.read_structure(name), keep, *alignment, training=training)


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


def mask_of(cache_path, name: str, kind: str, size: int) -> np.ndarray:
    with StructureCache(cache_path) as cache:
        entry = cache.read_structure(name)
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
def test_shared_structure_equals_the_baseline(shared_source, shared_cache, name, kind, size):
    keep = mask_of(shared_cache, name, kind, size)
    stock = stock_features(shared_source, name, keep)
    assert_equal(stock, cached_features(shared_cache, name, keep))
    if name.startswith("7a4d"):
        assert stock.msa.shape[0] == DEPTH  # the alignments were really read


def test_shared_structure_without_bonds_of_the_file(shared_source, shared_cache):
    name = "209d-assembly1"
    keep = mask_of(shared_cache, name, "whole", 0)
    stock = stock_features(shared_source, name, keep, training=False)
    assert_equal(stock, cached_features(shared_cache, name, keep, training=False))
    with_bonds = cached_features(shared_cache, name, keep)["token_bonds"]
    assert with_bonds.sum() > stock.token_bonds.sum()


@pytest.mark.parametrize("id", sorted(sample_data.ENTRIES))
def test_sample_structure_equals_the_baseline(sample, sample_cache, id):
    name = f"{id}-assembly1"
    keep = mask_of(sample_cache, name, "spatial" if id != "3u8v" else "scattered", 60)
    assert_equal(stock_features(sample, name, keep), cached_features(sample_cache, name, keep))


def test_sample_alignment_of_the_full_sequence_keeps_the_resolved_columns(sample_cache):
    from alphafold3_pytorch.inputs import HUMAN_AMINO_ACIDS

    with StructureCache(sample_cache) as cache:
        entry = cache.read("2q2k-assembly1")
    protein = entry.arrays["tokens"]["kind"] == 0
    assert entry.msa_depth > 10 and protein.sum() < 4 * 70  # the files' queries have 70 residues, with a tag
    residues = entry.arrays["residues"][entry.arrays["tokens"]["residue"][protein]]
    letters = "".join(chr(code) for code in residues["letter"])
    classes = list(HUMAN_AMINO_ACIDS)
    assert letters == "".join(classes[i] for i in entry.arrays["msa"][0][protein])


def test_layout_restates_the_conventions_of_the_baseline():
    from alphafold3_pytorch import inputs

    assert layout.NUM_MSA_CLASSES == inputs.NUM_MSA_ONE_HOT
    assert layout.METAL_ION_ID == inputs.MOLECULE_METAL_ION_ID
    assert layout.NUM_MOLECULE_TYPES == inputs.IS_MOLECULE_TYPES
    assert layout.NUM_MODIFICATIONS == inputs.DEFAULT_NUM_MOLECULE_MODS
