"""Crops and alignment rows: valid, and a pure function of (entry, epoch, seed)."""

from __future__ import annotations

import numpy as np
import pytest

from megafold.evopipe import augment


@pytest.fixture
def entry(make_entry):
    """300 tokens of three chains on parallel lines, 10 angstrom apart, 4 angstrom a step; the last chain a ligand."""
    made = make_entry("1abc-assembly1")
    tokens = made.arrays["tokens"]
    tokens["chain"] = np.repeat([0, 1, 2], [150, 120, 30])
    tokens["kind"] = np.where(tokens["chain"] == 2, 6, 0)
    along = np.concatenate([np.arange(150), np.arange(120), np.arange(30)]) * 4.0
    tokens["crop_position"] = np.stack([along, tokens["chain"] * 10.0, np.zeros(300)], axis=-1)
    return made


@pytest.mark.parametrize("kind", ["contiguous", "spatial", "interface"])
@pytest.mark.parametrize("size", [1, 20, 150, 299])
def test_crop_has_the_size_asked_for(entry, kind, size):
    for epoch in range(20):
        choice = augment.choose_crop(entry, size, epoch=epoch, seed=0, weights={kind: 1.0})
        assert choice.keep.sum() == size and choice.kind == kind
        inside = set(entry.arrays["tokens"]["chain"][choice.keep].tolist())
        assert any(chain in inside for chain in choice.chains)
        assert set(choice.chains) <= inside | {-1}


def test_contiguous_crop_is_a_run_of_each_chain(entry):
    chain = entry.arrays["tokens"]["chain"]
    for epoch in range(20):
        keep = augment.choose_crop(entry, 100, epoch=epoch, seed=0, weights={"contiguous": 1.0}).keep
        for one in range(3):
            kept = np.flatnonzero(keep[chain == one])
            assert len(kept) == 0 or np.array_equal(kept, np.arange(kept[0], kept[-1] + 1))


def test_spatial_crop_is_the_neighbourhood_of_its_center(entry):
    tokens = entry.arrays["tokens"]
    keep = augment.spatial(tokens, 40, 25)
    distance = np.linalg.norm(tokens["crop_position"] - tokens["crop_position"][40], axis=-1)
    assert keep[40] and distance[keep].max() <= distance[~keep].min() + 0.3  # the tie-break adds up to 0.3


def test_interface_crop_holds_both_chains(entry):
    for epoch in range(20):
        choice = augment.choose_crop(entry, 30, epoch=epoch, seed=0, weights={"interface": 1.0}, chains=(0, 1))
        assert len(np.unique(entry.arrays["tokens"]["chain"][choice.keep])) > 1 and choice.chains[1] >= 0


def test_single_chain_gets_no_interface_crop(entry):
    entry.arrays["tokens"]["chain"] = 0
    kinds = {augment.choose_crop(entry, 30, epoch=epoch, seed=0).kind for epoch in range(40)}
    assert kinds == {"contiguous", "spatial"}


def test_structure_that_fits_is_kept_whole(entry):
    choice = augment.choose_crop(entry, 300, epoch=0, seed=0)
    assert choice.kind == "whole" and choice.keep.all()


@pytest.mark.parametrize(("chains", "expected"), [((0, 1), (0.2, 0.4, 0.4)), ((0, -1), (1 / 3, 2 / 3, 0))])
def test_kinds_occur_with_the_published_weights(entry, chains, expected):
    kinds = [augment.choose_crop(entry, 30, epoch=epoch, seed=3, chains=chains).kind for epoch in range(600)]
    for kind, share in zip(augment.WEIGHTS, expected):
        assert abs(kinds.count(kind) / 600 - share) < 0.06


def test_chains_and_interfaces_have_the_published_weights(entry):
    """Two proteins and a ligand in a row: three chains, two interfaces (the outer ones are 20 angstrom apart)."""
    items, share = augment.chain_weights(entry.arrays["tokens"])
    assert items == [(0, -1), (1, -1), (2, -1), (0, 1), (1, 2)]
    assert np.allclose(share * (1.5 + 1.5 + 0.5 + 6 + 4), [1.5, 1.5, 0.5, 6, 4])


def test_choice_depends_on_entry_epoch_and_seed_only(entry, make_entry):
    def choice(epoch=0, seed=0):
        np.random.seed(np.random.randint(1000))  # global state has no say
        return augment.choose_crop(entry, 30, epoch=epoch, seed=seed)

    assert np.array_equal(choice().keep, choice().keep)
    assert any(not np.array_equal(choice(epoch=epoch).keep, choice().keep) for epoch in range(1, 4))
    assert any(not np.array_equal(choice(seed=seed).keep, choice().keep) for seed in range(1, 4))


def test_choice_is_the_same_on_every_machine():
    """The numbers themselves: a resumed run on another host must see the same examples."""
    assert augment.generator("1abc-assembly1", 2, 7, "crop").integers(0, 1 << 30, 3).tolist() == [
        14175247,
        538950986,
        983020766,
    ]
    assert augment.choose_rows("1abc-assembly1", 1000, 4, epoch=2, seed=7).tolist() == [510, 844, 884, 900]
    rotations, translations = augment.rigid_motions("1abc-assembly1", 2, epoch=2, seed=7)
    assert np.allclose(rotations[1, 0], [0.168406, -0.028564, 0.985304], atol=1e-6)
    assert np.allclose(translations[1], [0.099474, 1.800186, -0.257238], atol=1e-6)


@pytest.mark.parametrize(("available", "wanted", "expected"), [(1, 1, 1), (1, 64, 1), (50, 64, 50), (500, 64, 64)])
def test_alignment_rows_ascend(available, wanted, expected):
    for epoch in range(5):
        rows = augment.choose_rows("1abc-assembly1", available, wanted, epoch=epoch, seed=0)
        assert len(rows) == expected and (np.diff(rows) > 0).all() and 0 <= rows[0] <= rows[-1] < available


def test_alignment_rows_change_with_the_epoch():
    rows = [augment.choose_rows("1abc-assembly1", 500, 64, epoch=epoch, seed=0).tolist() for epoch in range(3)]
    assert rows[0] != rows[1] != rows[2]
