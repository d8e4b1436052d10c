"""What is random about an example has the distribution of the baseline's own functions (fixed seeds, so that the tests
give the same answer every time); each comparison is shown to notice a distribution that differs."""

from __future__ import annotations

import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy import stats

from megafold.evopipe import alignments, assembly, augment, ccd, shortcuts, structure
from megafold.evopipe.layout import Entry

DRAWS = 800
LIKELY = 0.01  # a p value; the seeds are fixed, so this is no source of chance failures
NAME = "2q2k-assembly1"  # protein dimer on DNA, doubled by the crystal's symmetry: six chains


@pytest.fixture(scope="module")
def parsed(sample):
    """As the baseline sees it: resolved residues only."""
    ccd.install()
    path = sample.mmcif / "2q2k.cif"
    text = assembly.build(alignments.read_text(path), NAME, str(path)).text
    return structure.parse(text, NAME, str(path), unresolved=False)


@pytest.fixture(scope="module")
def entry(parsed) -> SimpleNamespace:
    """Of an `Entry`, what the choice of a crop looks at."""
    arrays, _ = structure.arrays(parsed, "2q2k.cif")
    assert arrays["tokens"]["center_resolved"].all()  # the baseline takes a missing center atom for one in the origin
    return SimpleNamespace(name=NAME, arrays=arrays, shortcuts=shortcuts.compute(arrays["tokens"]))


def stock_masks(biomolecule, size: int, chains: tuple[int, int], draws: int, weights: dict[str, float]) -> np.ndarray:
    """Crops of the baseline, bool [draws, N], in the order of the structure's tokens."""
    ids = np.unique(biomolecule.chain_id)
    names = [None if one < 0 else str(ids[one]) for one in chains]
    order = list(dict.fromkeys(biomolecule.chain_id.tolist()))
    keywords = {"spatial_interface_weight" if kind == "interface" else f"{kind}_weight": weights.get(kind, 0.0)
                for kind in augment.WEIGHTS}  # fmt: skip
    random.seed(11)
    masks = []
    for _ in range(draws):
        _, lengths, parts = biomolecule.crop(n_res=size, chain_1=names[0], chain_2=names[1], **keywords)
        by_chain = {chain: part for (chain, _), part in zip(lengths, parts)}
        masks.append(np.concatenate([by_chain[chain] for chain in order]))
    return np.array(masks)


def our_masks(entry: Entry, size: int, chains: tuple[int, int], draws: int, weights: dict[str, float]) -> np.ndarray:
    options = {"seed": 5, "weights": weights, "chains": chains}
    return np.array([augment.choose_crop(entry, size, epoch=epoch, **options).keep for epoch in range(draws)])


def least_likely(first: np.ndarray, second: np.ndarray, chain: np.ndarray) -> float:
    """Smallest p value, times the number of tests, of what describes a crop: tokens by chain, place, runs."""

    def described(masks: np.ndarray) -> list[np.ndarray]:
        by_chain = [masks[:, chain == one].sum(axis=1) for one in np.unique(chain)]
        tokens = np.arange(masks.shape[1])
        runs = (masks[:, 1:] != masks[:, :-1]).sum(axis=1)
        return [*by_chain, masks.argmax(axis=1), (masks * tokens).sum(axis=1) / masks.sum(axis=1), runs]

    pairs = list(zip(described(first), described(second)))
    return min(stats.ks_2samp(a, b, method="asymp").pvalue for a, b in pairs) * len(pairs)


@pytest.mark.parametrize("chains", [(0, 2), (4, 5), (3, -1)], ids=["first and third", "last two", "one"])
def test_crops_are_distributed_as_in_the_baseline(parsed, entry, chains):
    weights = augment.WEIGHTS if chains[1] >= 0 else {"contiguous": 0.2, "spatial": 0.4}
    stock = stock_masks(parsed.biomolecule, 60, chains, DRAWS, augment.WEIGHTS)
    chain = entry.arrays["tokens"]["chain"]
    assert least_likely(stock, our_masks(entry, 60, chains, DRAWS, augment.WEIGHTS), chain) > LIKELY
    kinds = list(weights)
    shifted = dict(weights) | {kinds[0]: weights[kinds[1]], kinds[1]: weights[kinds[0]]}
    assert least_likely(stock, our_masks(entry, 60, chains, DRAWS, shifted), chain) < 1e-6  # it would be noticed


def test_spatial_crops_of_the_full_sequence_are_those_of_the_resolved_one(sample, parsed):
    """With the unresolved residues in the sequence the crops hold the same tokens as the baseline's, and no others."""
    path = sample.mmcif / "2q2k.cif"
    text = assembly.build(alignments.read_text(path), NAME, str(path)).text
    arrays, _ = structure.arrays(structure.parse(text, NAME, str(path)), str(path))
    resolved = np.isfinite(arrays["tokens"]["crop_position"]).all(axis=-1)
    assert resolved.sum() == len(parsed.biomolecule.chain_id) < len(resolved)
    weights = {"spatial": 0.5, "interface": 0.5}
    ours = our_masks(SimpleNamespace(name=NAME, arrays=arrays, shortcuts=None), 60, (1, 4), DRAWS, weights)
    assert not ours[:, ~resolved].any()
    stock = stock_masks(parsed.biomolecule, 60, (1, 4), DRAWS, weights)
    assert least_likely(stock, ours[:, resolved], arrays["tokens"]["chain"][resolved]) > LIKELY


def test_spatial_crop_around_each_token_is_the_one_of_the_baseline(parsed, entry):
    from alphafold3_pytorch.common.biomolecule import create_spatial_crop_masks

    tokens = entry.arrays["tokens"]
    positions = tokens["center_position"].astype(np.float64)
    for center in range(0, len(tokens), 5):
        stock = create_spatial_crop_masks(positions, parsed.biomolecule.chain_index, center, 70)
        assert np.array_equal(np.concatenate(stock), augment.spatial(tokens, center, 70))


def test_chains_and_interfaces_have_the_weights_of_the_baseline(entry, tmp_path):
    from alphafold3_pytorch.data.weighted_pdb_sampler import WeightedPDBSampler

    tokens = entry.arrays["tokens"]
    kinds = {
        int(c): "protein" if (tokens["kind"][tokens["chain"] == c] % 3 == 0).mean() > 0.5 else "dna" for c in range(6)
    }
    items, share = augment.chain_weights(tokens)
    pairs = [pair for pair in items if pair[1] >= 0]
    assert set(kinds.values()) == {"protein", "dna"} and pairs
    columns = "pdb_id,interface_chain_id_1,interface_chain_id_2,interface_molecule_id_1,interface_molecule_id_2,"
    columns += "interface_chain_cluster_id_1,interface_chain_cluster_id_2,interface_cluster_id"
    lines = [f"x,c{a},c{b},{kinds[a]}-x,{kinds[b]}-x,{a},{b},{i}" for i, (a, b) in enumerate(pairs)]
    (tmp_path / "interfaces.csv").write_text("\n".join([columns, *lines]))
    lines = [f"x,c{a},{kinds[a]}-x,{a}" for a, b in items if b < 0]
    (tmp_path / "chains.csv").write_text("\n".join(["pdb_id,chain_id,molecule_id,cluster_id", *lines]))
    sampler = WeightedPDBSampler(str(tmp_path / "chains.csv"), str(tmp_path / "interfaces.csv"), batch_size=1)
    rows = sampler.mappings.select(["chain_id_1", "chain_id_2"]).rows()
    assert rows == [(f"c{a}", f"c{b}" if b >= 0 else "") for a, b in items]
    assert np.allclose(sampler.weights, share, atol=1e-7)


def test_alignment_rows_are_chosen_as_in_the_baseline():
    from alphafold3_pytorch.alphafold3 import MSAModule

    available, wanted, draws = 24, 6, 600
    module = MSAModule(dim_single=8, dim_pairwise=8, dim_msa=8, depth=1, max_num_msa=wanted, dim_msa_input=available)
    seen = []
    module.msa_init_proj.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0][:, :, 0, :available]))
    torch.manual_seed(3)
    rows = torch.eye(available)[None, :, None].expand(draws, -1, -1, -1)  # each row carries its number
    with torch.no_grad():
        module(
            single_repr=torch.zeros(draws, 1, 8),
            pairwise_repr=torch.zeros(draws, 1, 1, 8),
            msa=rows.contiguous(),
            msa_mask=torch.ones(draws, available, dtype=torch.bool),
            additional_msa_feats=torch.zeros(draws, available, 1, 2),
        )
    stock = seen[0].sum(dim=1).numpy().astype(bool)
    ours = np.zeros((draws, available), bool)
    for epoch in range(draws):
        ours[epoch, augment.choose_rows(NAME, available, wanted, epoch=epoch, seed=0)] = True
    assert (stock.sum(axis=1) == wanted).all() and (ours.sum(axis=1) == wanted).all()
    pairs = np.triu_indices(available, 1)
    for count in (lambda masks: masks.sum(axis=0), lambda masks: (masks.T.astype(int) @ masks)[pairs]):
        assert stats.chi2_contingency([count(stock), count(ours)]).pvalue > LIKELY
        assert stats.chisquare(count(ours)).pvalue > LIKELY
    with_query = ours.copy()
    with_query[:, 0] = True
    assert stats.chi2_contingency([stock.sum(axis=0), with_query.sum(axis=0)]).pvalue < 1e-6


def test_rigid_motions_are_distributed_as_in_the_baseline():
    from alphafold3_pytorch.alphafold3 import CentreRandomAugmentation
    from scipy.spatial.transform import Rotation

    draws = 4000
    torch.manual_seed(1)
    augmenter = CentreRandomAugmentation(trans_scale=1.5)
    stock = augmenter._random_rotation_matrix(draws).numpy(), augmenter._random_translation_vector(draws).numpy()
    ours = augment.rigid_motions(NAME, draws, epoch=0, seed=0, scale=1.5)
    values = [np.concatenate([rotation.reshape(draws, 9), moved], axis=1) for rotation, moved in (stock, ours)]
    assert all(stats.ks_2samp(a, b).pvalue > LIKELY for a, b in zip(*(value.T for value in values)))
    products = [value[:, :9, None] * value[:, None, :9] for value in values]  # the entries' joint distribution
    assert np.abs(products[0].mean(axis=0) - products[1].mean(axis=0)).max() < 0.03
    uniform = Rotation.random(draws, random_state=0).as_matrix().reshape(draws, 9)
    assert min(stats.ks_2samp(a, b).pvalue for a, b in zip(uniform.T, values[0].T)) < 1e-6
    assert np.allclose(ours[0] @ ours[0].transpose(0, 2, 1), np.eye(3), atol=1e-5)
    assert np.allclose(np.linalg.det(ours[0]), 1, atol=1e-5)


def test_augmentation_of_the_model_depends_on_entry_epoch_and_seed_only():
    from alphafold3_pytorch.alphafold3 import CentreRandomAugmentation

    model = SimpleNamespace(augmenter=CentreRandomAugmentation())
    coordinates = torch.randn(4, 30, 3, generator=torch.Generator().manual_seed(0))

    def augmented(entry="a", epoch=0, seed=0):
        with augment.seeded_augmentation(model, entry, epoch=epoch, seed=seed):
            return model.augmenter(coordinates)

    first = augmented()
    torch.manual_seed(99)
    assert torch.equal(augmented(), first)
    for other in ({"entry": "b"}, {"epoch": 1}, {"seed": 1}):
        assert not torch.allclose(augmented(**other), first)
    rotation, moved = augment.rigid_motions("a", 4, epoch=0, seed=0)
    centered = coordinates - coordinates.mean(dim=1, keepdim=True)
    expected = centered.numpy() @ rotation.transpose(0, 2, 1) + moved[:, None]
    assert np.allclose(first.numpy(), expected, atol=1e-5)
    assert not torch.equal(model.augmenter(coordinates), model.augmenter(coordinates))  # torch's generator again
