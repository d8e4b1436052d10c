"""What reading one example costs: bytes and blocks, calls, and shortcuts that change no value."""

from __future__ import annotations

import cProfile
import dataclasses
import os
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from megafold.evopipe import augment, cache, codec, crop, layout, measure, measure_examples, shortcuts
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


def test_a_measured_example_reads_what_the_first_one_of_a_reader_does(deep_cache, monkeypatch):
    data = CachedStructures(deep_cache, crop_size=64, msa_depth=16)
    name, pread, read = data.entries[0], os.pread, []
    data.cache.row(name)
    monkeypatch.setattr(os, "pread", lambda handle, size, at: read.append((at, size)) or pread(handle, size, at))
    measure.read_cached_example(data, name)
    first = read.copy()
    measure.blocks_of(data, name)
    read.clear()
    measure.read_cached_example(data, name)
    assert read == first


@pytest.mark.parametrize("templates", [0, 2])
def test_examples_are_measured_with_and_without_templates(deep_cache, monkeypatch, templates):
    """Real times, so what is checked is that an example takes longer than its bare read, and which cache is read."""
    read, own = [], measure_examples._table
    monkeypatch.setattr(measure_examples, "_table", lambda path, *given: read.append(_masks(path)) or own(path, *given))
    table = measure_examples.measure_examples(deep_cache, crop_size=64, msa_depth=16, templates=templates, repeats=2)
    rows = [line.split("|")[1:-1] for line in table.splitlines()[2:]]
    assert len(rows) == measure_examples.EPOCHS
    assert all(float(whole) > max(float(bare), float(library)) for *_, whole, bare, _, library, _ in rows)
    assert read[0] == ([True] * 2 if templates else _masks(deep_cache))


def _masks(path):
    with cache.StructureCache(path) as reader:
        return reader.read(reader.names[0]).arrays["template_mask"].tolist()


def test_an_example_reads_and_inflates_each_of_its_blocks_once(deep_cache, monkeypatch):
    data = CachedStructures(deep_cache, crop_size=64, msa_depth=16)
    name = data.entries[0]
    wanted = [(offset, size) for _, offset, size, _ in measure.blocks_of(data, name)]
    row = data.cache.row(name)
    read, inflated = [], []
    pread, unpack = os.pread, codec.unpack
    monkeypatch.setattr(os, "pread", lambda handle, size, at: read.append((at, size)) or pread(handle, size, at))
    monkeypatch.setattr(codec, "unpack", lambda *given: inflated.append(1) or unpack(*given))
    fresh = CachedStructures(deep_cache, crop_size=64, msa_depth=16)
    fresh.cache.row(name)
    read.clear(), inflated.clear()
    fresh.read(name)
    wanted.append((int(row["meta_offset"]), int(row["meta_bytes"])))
    spans = [(offset, offset + size) for offset, size in read]
    assert all(sum(first <= at and at + size <= last for first, last in spans) == 1 for at, size in wanted)
    assert len(read) <= 5 and sum(size for _, size in read) < 1.05 * sum(size for _, size in wanted)  # read together
    assert len(inflated) == len(wanted) - 1


def test_an_example_takes_few_calls(deep_cache):
    """What python does around the blocks, counted: unlike time it is the same on a busy machine."""
    data = CachedStructures(deep_cache, crop_size=384, msa_depth=ROWS)
    data.read(data.entries[0])  # what the first one opens and imports
    profile = cProfile.Profile()
    profile.runcall(data.read, data.entries[0])
    calls = sum(entry.callcount for entry in profile.getstats())
    assert calls < 1450, calls  # 1,404; without shortcuts, and read block by block, 1,590


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
    rng, plain = np.random.default_rng(3), []
    for _ in range(60):
        n = int(rng.integers(1, 60))
        position = (rng.normal(0, spread, (n, 3)) + away).astype(np.float32)
        resolved = rng.random(n) < 0.9
        wanted = np.sort(rng.choice(n, min(n, 4), replace=False))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(
                crop, "_plain_frames", lambda *given, own=crop._plain_frames: plain.append(own(*given)) or plain[-1]
            )
            found = crop.frames_of_chain(position, resolved, wanted)
        assert np.array_equal(found, stock_frames(position, resolved)[wanted])
    assert sum(one is not None for one in plain) > (0 if away else 5)  # far away rounding decides almost always


def test_frames_of_equal_distances_are_left_to_the_baseline():
    position = np.float32([[0, 0, 0], [1, 0, 0], [-1, 0, 0], [0, 1, 0], [0, 0, 5]])
    distance = np.linalg.norm(position[:1, None] - position, axis=-1).astype(np.float32)
    distance[0, 0] = crop.FAR
    assert crop._plain_frames(position, distance, np.array([0])) is None
    assert crop._plain_frames(position[[0, 1, 2, 4]], distance[:, [0, 1, 2, 4]], np.array([0])) is None
    distance[0, 2] += 0.5
    assert crop._plain_frames(position[[0, 1, 2, 4]], distance[:, [0, 1, 2, 4]], np.array([0])) is not None


def chains_with_ligands(rng, spread: float, away: float) -> np.ndarray:
    """Tokens of four chains in mixed order; some are atoms of ligands, some are not resolved, some are in one place."""
    n = int(rng.integers(6, 90))
    tokens = np.zeros(n, layout.TOKEN)
    tokens["chain"] = np.repeat(rng.permutation(4), -(-n // 4))[:n]
    tokens["kind"] = np.where(rng.random(n) < 0.5, layout.LIGAND, 0)
    tokens["center_resolved"] = rng.random(n) < 0.9
    tokens["center_position"] = rng.normal(0, spread, (n, 3)) + away
    tokens["center_position"][rng.random(n) < 0.05] = away
    tokens["crop_position"] = tokens["center_position"]
    tokens["residue"] = np.arange(n)
    return tokens


@pytest.mark.parametrize("spread", [3.0, 30.0], ids=["crowded", "sparse"])
@pytest.mark.parametrize("away", [0.0, 200.0], ids=["at the origin", "far away"])
def test_frames_looked_up_equal_those_with_the_rounding_of_the_baseline(spread, away):
    """Crops of random tokens, through the neighbours that an entry names; in most places those decide."""
    rng, certain = np.random.default_rng(11), []
    for _ in range(80):
        tokens = chains_with_ligands(rng, spread, away)
        keep = rng.random(len(tokens)) < rng.choice([0.1, 0.5, 1.0])
        keep[0] = True
        inside, index = tokens[keep], np.flatnonzero(keep)
        atomised = inside["kind"] >= layout.FIRST_ATOMISED
        known = SimpleNamespace(shortcuts=shortcuts.compute(tokens))
        some = SimpleNamespace(entry=known, keep=keep, index=index, new=np.cumsum(keep) - 1, tokens=inside,
                               atomised=atomised, token_offsets=1000 * np.arange(len(inside)),
                               local=np.zeros(len(inside), int))  # fmt: skip
        expected = np.zeros((len(inside), 3), int)
        for chain in np.unique(inside["chain"]):
            mine = np.flatnonzero(inside["chain"] == chain)
            expected[mine] = stock_frames(inside["center_position"][mine], inside["center_resolved"][mine]) + mine[0]
        none = (expected == -1).any(axis=-1, keepdims=True)
        expected = np.where(none, expected, 1000 * expected)[atomised]
        assert np.array_equal(crop._ligand_frames(some), expected)
        certain += crop._looked_up_frames(some, np.flatnonzero(atomised))[1].tolist()
    assert np.mean(certain) > (0.05 if away else 0.5)


def test_shortcuts_change_no_crop_and_no_feature(deep_cache):
    """With what the cache has looked up, and without: the same chains, tokens and features."""
    with cache.StructureCache(deep_cache) as reader:
        entry = reader.read(reader.entries()[0])
    bare = dataclasses.replace(entry, shortcuts=None)
    assert entry.shortcuts.keys() == layout.SHORTCUTS.keys() and len(entry.shortcuts["pairs"]) > 3
    kinds = set()
    for epoch in range(12):
        first, second = (augment.choose_crop(one, 100, epoch=epoch, seed=1) for one in (entry, bare))
        kinds.add(first.kind)
        assert np.array_equal(first.keep, second.keep) and (first.kind, first.chains) == (second.kind, second.chains)
        ours, theirs = (crop.structure_features(one, first.keep) for one in (entry, bare))
        assert all(torch.equal(ours[name], theirs[name]) for name in ours if ours[name] is not None)
    assert kinds == {"contiguous", "spatial", "interface"}


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
    one = dataclasses.replace(
        sample, name="refused", mmcif=sample.mmcif / "2q2k.cif"
    )  # a source that nobody else asks for
    root = measure.stage_for_stock(one)
    assert list((root / "mmcif").rglob("*.cif")) and not list((root / "msa").iterdir())
