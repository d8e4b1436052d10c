"""What reading one example costs: bytes and blocks, calls, and shortcuts that change no value."""

from __future__ import annotations

import cProfile
import os

import numpy as np
import pytest
import torch

from megafold.evopipe import augment, cache, codec, crop, layout, measure
from megafold.evopipe.loader import CachedStructures
from megafold.evopipe.merge import merge
from megafold.evopipe.shards import Shard, folder_of

ROWS = 1024


@pytest.fixture(scope="module")
def deep_cache(sample_cache, tmp_path_factory):
    """The largest entry of the sample set with an alignment of 1,024 rows: each of its residues changed at random."""
    path = tmp_path_factory.mktemp("deep") / "deep.h5"
    cache.create(path, msa_depth=ROWS)
    with cache.StructureCache(sample_cache) as reader:
        entry = reader.read(max(reader.entries(), key=lambda name: int(reader.row(name)["tokens"])))
    rng, query = np.random.default_rng(0), entry.arrays["msa"][0]
    changed = rng.random((ROWS, len(query))) < np.linspace(0.0, 0.7, ROWS)[:, None]
    entry.arrays["msa"] = np.where(changed, rng.integers(0, 21, changed.shape), query).astype("u1")
    entry.arrays["deletions"] = np.zeros(changed.shape, "<u2")
    shard = Shard(folder_of(path), ROWS)
    shard.add(entry, "0" * 32, {"versions": cache.versions()})
    shard.seal()
    merge(path)
    return path


def test_an_example_reads_and_inflates_each_of_its_blocks_once(deep_cache, monkeypatch):
    data = CachedStructures(deep_cache, crop_size=64, msa_depth=16)
    name = data.entries[0]
    wanted = sorted((offset, size) for _, offset, size in measure.blocks_of(data, name))
    row = data.cache.row(name)
    read, inflated = [], []
    pread, unpack = os.pread, codec.unpack
    monkeypatch.setattr(os, "pread", lambda handle, size, at: read.append((at, size)) or pread(handle, size, at))
    monkeypatch.setattr(codec, "unpack", lambda *given: inflated.append(1) or unpack(*given))
    fresh = CachedStructures(deep_cache, crop_size=64, msa_depth=16)
    fresh.cache.row(name)
    read.clear(), inflated.clear()
    fresh.read(name)
    assert sorted(read) == sorted([*wanted, (int(row["meta_offset"]), int(row["meta_bytes"]))])
    assert len(inflated) == len(wanted)


def test_an_example_takes_few_calls(deep_cache):
    """What python does around the blocks, counted: unlike time it is the same on a busy machine."""
    data = CachedStructures(deep_cache, crop_size=384, msa_depth=ROWS)
    data.read(data.entries[0])  # what the first one opens and imports
    profile = cProfile.Profile()
    profile.runcall(data.read, data.entries[0])
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls < 1700, calls  # 1,590; loops over records and trees took 1,730


def stock_frames(position, resolved) -> np.ndarray:
    """All atoms at once, one operation after the other, as the baseline goes about it."""
    position, resolved, n = torch.from_numpy(position), torch.from_numpy(resolved), len(position)
    if n < 3 or int(resolved.sum()) < 3:
        return np.full((n, 3), -1)
    distance = torch.cdist(position[None], position[None])
    distance.masked_fill_(torch.eye(n, dtype=torch.bool), 1e4)
    distance.masked_fill_(~(resolved[:, None] & resolved[None, :])[None], 1e4)
    nearest = (-distance).topk(2, dim=-1).indices[0]
    nearest = torch.stack([nearest[:, 0], torch.arange(n), nearest[:, 1]], dim=-1)
    left, center, right = position[nearest].unbind(dim=-2)
    edges = (torch.nn.functional.normalize(edge, dim=-1, eps=1e-20) for edge in (left - center, right - center))
    degree = torch.rad2deg(torch.acos((next(edges) * next(edges)).sum(dim=-1))).abs()
    return torch.where(((degree < 25.0) | ((180.0 - degree).abs() < 25.0))[:, None], -1, nearest).numpy()


@pytest.mark.parametrize("spread", [3.0, 30.0], ids=["crowded", "sparse"])
@pytest.mark.parametrize("away", [0.0, 400.0], ids=["at the origin", "far away"])
def test_frames_of_ligands_equal_those_with_the_rounding_of_the_baseline(spread, away):
    rng, clear = np.random.default_rng(3), 0
    for _ in range(60):
        n = int(rng.integers(1, 60))
        position = (rng.normal(0, spread, (n, 3)) + away).astype(np.float32)
        resolved = rng.random(n) < 0.9
        wanted = np.sort(rng.choice(n, min(n, 4), replace=False))
        expected = stock_frames(position, resolved)[wanted]
        assert np.array_equal(crop.frames_of_chain(position, resolved, wanted), expected)
        clear += n > 2 and crop._clear_frames(position, resolved, wanted) is not None
    assert clear > (0 if away else 5)  # far from the origin rounding decides almost always


def test_frames_of_equal_distances_are_left_to_the_baseline():
    position = np.float32([[0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, 0, 5]])
    assert crop._clear_frames(position, np.ones(5, bool), np.array([0])) is None
    assert crop._clear_frames(position[[0, 1, 2, 4]], np.ones(4, bool), np.array([3])) is None


def test_interface_found_pair_by_pair_is_that_of_the_trees(monkeypatch):
    rng = np.random.default_rng(5)
    for _ in range(20):
        position = rng.normal(0, 25, (200, 3)).round(0)  # whole numbers: some pairs are 15 angstrom apart exactly
        chain = np.repeat([4, 7], [120, 80])
        position[chain == 7] += [40, 0, 0]
        found = augment._near_another_chain(position, chain)
        with monkeypatch.context() as patch:
            patch.setattr(augment, "MAX_PAIRS", -1)
            assert np.array_equal(found, augment._near_another_chain(position, chain))
        assert found.any() and not found.all()


@pytest.mark.parametrize("step", [1, 2, 50], ids=["one run", "every second column", "few columns"])
def test_columns_are_copied_in_any_pattern(step):
    block = np.random.default_rng(0).integers(0, 32, (40, 256)).astype("u1")
    columns, out = np.arange(3, 256, step), np.zeros((40, 300), "u1")
    cache._copy_columns(block, columns, out[:, 10 : 10 + len(columns)])
    assert np.array_equal(out[:, 10 : 10 + len(columns)], block[:, columns])
    assert not out[:, :10].any() and not out[:, 10 + len(columns) :].any()


def test_records_copied_as_bytes_are_those_of_the_index(make_entry):
    tokens, index = make_entry("1abc-assembly1").arrays["tokens"], np.array([0, 7, 7, 299])
    assert layout.take_rows(tokens, index).tobytes() == tokens[index].tobytes()
    assert len(layout.take_rows(tokens, index[:0])) == 0


def test_an_alignment_that_the_cache_refuses_is_left_out_of_the_baseline_folder(sample, monkeypatch):
    from megafold.errors import InputError
    from megafold.evopipe import alignments

    def refuse(file, *_):
        raise InputError(file, "alignment", "its query is another sequence")

    if sample.msa is None:
        pytest.skip("the sample set has no alignments")
    monkeypatch.setattr(alignments, "fit", refuse)
    measure.stage_for_stock.cache_clear()
    root = measure.stage_for_stock(sample)
    measure.stage_for_stock.cache_clear()
    assert list((root / "mmcif").rglob("*.cif")) and not list((root / "msa").iterdir())
