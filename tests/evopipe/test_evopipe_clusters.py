"""Entries, chains and interfaces drawn by the sizes of their clusters, as the baseline's sampler draws them."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
import torch

from megafold.errors import InputError
from megafold.evopipe import augment, cache, clusters
from megafold.evopipe.clusters import Clusters
from megafold.evopipe.loader import CachedStructures, make_loader

CHAINS = """pdb_id,chain_id,molecule_id,cluster_id
1kd8-assembly1,A,protein-P12,0
1kd8-assembly1,B,protein-P12,0
2q2k-assembly1,A,protein-P9,1
2q2k-assembly1,B,protein-P9,1
2q2k-assembly1,F,dna-D1,2
4zey-assembly1,A,peptide-P1,0
9zzz-assembly1,A,ligand-L7,3
"""
INTERFACES = """pdb_id,interface_chain_id_1,interface_chain_id_2,interface_molecule_id_1,interface_molecule_id_2,\
interface_chain_cluster_id_1,interface_chain_cluster_id_2,interface_cluster_id
1kd8-assembly1,B,A,protein-P12,protein-P12,0,0,0
2q2k-assembly1,A,F,protein-P9,dna-D1,1,2,1
2q2k-assembly1,B,F,protein-P9,dna-D1,1,2,1
9zzz-assembly1,A,B,ligand-L7,protein-P1,3,0,1
"""


@pytest.fixture
def tables(tmp_path):
    paths = [tmp_path / "chains.csv", tmp_path / "interfaces.csv"]
    for path, text in zip(paths, (CHAINS, INTERFACES)):
        path.write_text(text)
    return paths


def test_weights_are_those_of_the_baseline(tables):
    from alphafold3_pytorch.data.weighted_pdb_sampler import WeightedPDBSampler

    stock, ours = WeightedPDBSampler(*map(str, tables), batch_size=1), Clusters(tables)
    rows = stock.mappings.select(["pdb_id", "chain_id_1", "chain_id_2", "weight"]).rows()
    assert len(rows) == 11
    names = {"1kd8": "AB", "2q2k": "ABF", "4zey": "A", "9zzz": "AB"}
    found = {}
    for id, chains in names.items():
        for pair, weight in ours.of(f"{id}-assembly1", tuple(chains)).items():
            found[id, *sorted(chains[place] for place in pair if place >= 0)] = weight
    expected = {(row[0][:4], *sorted(name for name in row[1:3] if name)): row[3] for row in rows}
    assert found.keys() == expected.keys()
    assert all(np.isclose(found[key], expected[key]) for key in found)
    for id in names:
        assert np.isclose(ours.total(id), sum(weight for key, weight in expected.items() if key[0] == id))


def test_chains_that_the_entry_does_not_have_have_no_weight(tables):
    ours = Clusters(tables)
    assert set(ours.of("2q2k", ("A", "F"))) == {(0, -1), (1, -1), (0, 1)}
    assert ours.of("3abc-assembly1", ("A",)) == {} and ours.total("3abc") == 0


def test_entries_and_chains_are_drawn_by_their_weights(sample_cache, tables):
    with pytest.warns(UserWarning, match="6 of 9 entries are in no table of clusters"):
        data = CachedStructures(sample_cache, crop_size=40, msa_depth=2, clusters=tables)
    ours, drawn = Clusters(tables), Counter()
    order = make_loader(
        sample_cache,
        crop_size=40,
        msa_depth=2,
        clusters=tables,
        entries=["1kd8-assembly1", "2q2k-assembly1", "4zey-assembly1"],
    )
    for epoch in range(700):
        order.dataset.set_epoch(epoch)
        places = list(order.sampler)
        assert len(places) == 3 == len(set(places))  # what comes again is another draw
        drawn.update(order.dataset.name_of(place) for place in places)
    weights = np.array([ours.total(name) for name in sorted(drawn)])
    assert np.abs(np.array([drawn[name] for name in sorted(drawn)]) / 2100 - weights / weights.sum()).max() < 0.03
    entry = data.cache.read_structure("2q2k-assembly1")
    sampled = ours.of(entry.name, entry.chains)
    kept = Counter()
    for epoch in range(600):
        chosen = augment.choose_crop(entry, 10_000, epoch=epoch, seed=0, sampled=sampled).chains
        kept[chosen] += 1
    assert set(kept) == set(sampled)
    total = sum(sampled.values())
    assert all(abs(kept[pair] / 600 - weight / total) < 0.06 for pair, weight in sampled.items())


def test_another_draw_of_an_entry_in_an_epoch_is_another_crop(sample_cache, tables):
    data = CachedStructures(sample_cache, crop_size=40, msa_depth=2, entries=["2q2k-assembly1"], clusters=tables)
    sums = {float(data[draw]["atom_pos"].sum()) for draw in range(4)}
    assert len(sums) > 1 and torch.equal(data[1]["atom_pos"], data[1]["atom_pos"])
    plain = CachedStructures(sample_cache, crop_size=40, msa_depth=2, entries=["2q2k-assembly1"])
    assert data.name_of(3) == "2q2k-assembly1" == plain.name_of(0)


def test_order_of_draws_is_a_function_of_seed_and_epoch(sample_cache, tables):
    def order(seed, epoch):
        made = make_loader(
            sample_cache,
            crop_size=16,
            msa_depth=1,
            seed=seed,
            clusters=tables,
            entries=["1kd8-assembly1", "2q2k-assembly1"],
        )
        made.dataset.set_epoch(epoch)
        return list(made.sampler)

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(4)}) > 2


@pytest.mark.filterwarnings("ignore:.*in no table of clusters")
def test_training_draws_by_clusters_and_resumes(sample_cache, tables, tmp_path):
    from megafold.train.config import DataConfig, TrainConfig
    from megafold.train.examples import open_stream

    data = DataConfig(cache=sample_cache, crop_size=16, msa_depth=1, clusters=tuple(map(str, tables)))
    config = TrainConfig(output=tmp_path, steps=1, data=data)
    stream = open_stream(config, {})
    batches = [next(stream) for _ in range(12)]  # beyond the nine of an epoch
    names = [name for batch in batches for name in batch["filepath"]]
    assert {"1kd8-assembly1", "2q2k-assembly1"} <= set(names) <= {"1kd8-assembly1", "2q2k-assembly1", "4zey-assembly1"}
    again = open_stream(config, {})
    again.seek({"epoch": 0, "position": 5})
    assert all(torch.equal(next(again)["atom_pos"], batch["atom_pos"]) for batch in batches[5:])
    without = TrainConfig(output=tmp_path, steps=1, data=DataConfig(cache=sample_cache))
    assert "clusters" in config.trajectory()["data"] and "clusters" not in without.trajectory()["data"]


def test_no_entry_of_weight_zero_is_drawn():
    found = clusters.draw_entries(np.array([0.0, 1.0, 0.0, 2.0, 0.0]), 5000, np.random.default_rng(0))
    assert set(found) == {1, 3} and abs(found.count(3) / 5000 - 2 / 3) < 0.03


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("pdb_id,chain_id,cluster_id\n1abc,A,0\n", "molecule_id: no such column"),
        ("pdb_id,interface_cluster_id\n", "interface_chain_id_1: no such column"),
        ("pdb_id,chain_id,molecule_id,cluster_id\n1abc,A,sugar-1,0\n", "sugar-1: names no type of molecule"),
        ("", "pdb_id: no such column"),
        (None, "clusters: cannot be read"),
        (
            "pdb_id,chain_id,molecule_id,cluster_id\n1abc,A,protein-1,0\n",
            "clusters: the tables name none of the entries",
        ),
    ],
)
def test_bad_table_is_one_clear_line(sample_cache, tmp_path, text, expected):
    path = tmp_path / "clusters.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(InputError, match=expected) as caught:
        make_loader(sample_cache, crop_size=8, msa_depth=1, clusters=[path])
    assert "\n" not in str(caught.value)
    assert cache.verify(sample_cache) == []
