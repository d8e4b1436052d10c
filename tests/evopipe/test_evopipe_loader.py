"""Batches for the model: right shapes, and the same examples whatever the workers, the order or the interruption."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from megafold.errors import InputError
from megafold.evopipe import expand, layout
from megafold.evopipe.loader import CachedStructures, collate, make_loader

NAMES = ["1kd8-assembly1", "2q2k-assembly1", "4zey-assembly1"]


def equal(one, other) -> bool:
    return all(
        (one[key] is None and other[key] is None) or torch.equal(one[key], other[key])
        for key in one.keys() | other.keys()
    )


def loader(cache, **options):
    return make_loader(cache, **{"crop_size": 48, "msa_depth": 8, "entries": NAMES, **options})


def test_batch_is_what_the_model_takes(sample_cache):
    batch = next(iter(loader(sample_cache, batch_size=3, shuffle=False)))
    n, m = batch["molecule_ids"].shape[1], batch["atom_inputs"].shape[1]
    assert n == 48 and batch["msa"].shape == (3, 8, n, 32)
    assert batch["atompair_inputs"].shape == (3, -(-m // 27), 27, 54, 5)
    assert batch["templates"].shape == (3, 1, n, n, 108) and not batch["template_mask"].any()
    assert batch["atom_pos"].shape == (3, m, 3) and batch["resolved_labels"].shape == (3, m)
    assert not {"chains", "filepath"} & set(batch)
    lengths = batch["molecule_atom_lens"].sum(dim=-1)
    assert lengths.max() == m


def test_core_workload_has_no_confidence_labels(sample_cache):
    batch = next(iter(loader(sample_cache, labels=False, shuffle=False)))
    assert batch["resolved_labels"] is None and batch["atom_indices_for_frame"] is None
    assert batch["distogram_atom_indices"] is not None and batch["atom_pos"] is not None
    assert next(iter(loader(sample_cache, templates=False)))["templates"] is None


@pytest.mark.parametrize("workers", [1, 2])
def test_workers_do_not_change_the_examples(sample_cache, workers):
    alone, shared = loader(sample_cache, seed=5), loader(sample_cache, seed=5, workers=workers)
    for epoch in range(2):  # workers outlive an epoch and must see the next one
        alone.dataset.set_epoch(epoch)
        shared.dataset.set_epoch(epoch)
        pairs = list(zip(alone, shared, strict=True))
        assert len(pairs) == len(NAMES) and all(equal(one, other) for one, other in pairs)


def test_spawned_workers_give_the_same_examples(sample_cache):
    """Of entries without ligands: a crop that cuts one makes a worker import the baseline, here once more."""
    polymers = {"entries": ["1a8q-assembly1", "1psm-assembly1", "1ubq-assembly1"]}
    alone, spawned = loader(sample_cache, **polymers), loader(sample_cache, workers=1, **polymers)
    spawned.multiprocessing_context = "spawn"
    assert all(equal(one, other) for one, other in zip(alone, spawned, strict=True))


def test_examples_change_with_epoch_and_seed_and_repeat(sample_cache):
    data = CachedStructures(sample_cache, crop_size=48, msa_depth=8, entries=NAMES)
    again = CachedStructures(sample_cache, crop_size=48, msa_depth=8, entries=NAMES[::-1])
    first = data.features(1)
    again.set_epoch(0)
    assert equal(first, again.features(1))
    data.set_epoch(1)
    assert not torch.equal(first["atom_pos"].sum(), data.features(1)["atom_pos"].sum())
    other = CachedStructures(sample_cache, crop_size=48, msa_depth=8, entries=NAMES, seed=1)
    assert not torch.equal(first["atom_pos"].sum(), other.features(1)["atom_pos"].sum())


def test_order_is_a_function_of_seed_and_epoch(sample_cache):
    def order(seed, epoch):
        made = make_loader(sample_cache, crop_size=16, msa_depth=1, seed=seed)
        made.dataset.set_epoch(epoch)
        return list(made.sampler)

    assert order(0, 0) == order(0, 0) and sorted(order(0, 0)) == list(range(9))
    assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) > 5


def test_example_is_the_input_class_of_the_baseline(sample_cache):
    from alphafold3_pytorch.inputs import AtomInput

    example = CachedStructures(sample_cache, crop_size=48, msa_depth=8, entries=NAMES).atom_input(0)
    assert isinstance(example, AtomInput) and example.filepath == NAMES[0]


def test_alignment_is_subsampled_without_repetition(sample_cache):
    data = CachedStructures(sample_cache, crop_size=1000, msa_depth=4, entries=["2q2k-assembly1"])
    whole = CachedStructures(sample_cache, crop_size=1000, msa_depth=1000, entries=["2q2k-assembly1"])[0]["msa_classes"]
    place = {row.numpy().tobytes(): number for number, row in enumerate(whole.T)}
    seen = set()
    for epoch in range(6):
        data.set_epoch(epoch)
        found = [place[row.numpy().tobytes()] for row in data[0]["msa_classes"].T]
        assert len(found) == 4 and found == sorted(set(found))
        seen.update(found)
    assert len(seen) > 4


def test_compact_batch_is_small_and_expands_to_what_the_model_takes(sample_cache):
    compact = next(iter(loader(sample_cache, batch_size=3, shuffle=False, compact=True)))
    batch = next(iter(loader(sample_cache, batch_size=3, shuffle=False)))
    assert equal(expand.expand(compact), batch) and expand.expand(batch) == batch
    size, expanded = (sum(value.nbytes for value in one.values() if value is not None) for one in (compact, batch))
    assert size < expanded / 10
    assert not {"msa", "templates", "atompair_inputs", "additional_msa_feats"} & set(compact)


def test_collation_equals_that_of_the_baseline(sample_cache):
    """Two examples of other sizes in every dimension, with labels in one of them only."""
    from alphafold3_pytorch.inputs import collate_inputs_to_batched_atom_input

    data = CachedStructures(sample_cache, crop_size=40, msa_depth=8, entries=["2q2k-assembly1", "1psm-assembly1"])
    inputs, examples = [data.atom_input(i) for i in range(2)], [data[i] for i in range(2)]
    examples[1] |= {"resolution": None, "resolved_labels": None}
    inputs[1].resolution = inputs[1].resolved_labels = None
    assert len({len(one.msa) for one in inputs}) == len({len(one.atom_pos) for one in inputs}) == 2
    stock = collate_inputs_to_batched_atom_input(
        inputs, atoms_per_window=layout.ATOMS_PER_WINDOW, transform_to_atom_inputs=False
    ).model_forward_dict()
    batch = expand.expand(collate(examples))
    assert set(batch) == set(stock)
    different = [
        name
        for name, value in stock.items()
        if (value is None) != (batch[name] is None)
        or (value is not None and (value.dtype != batch[name].dtype or not torch.equal(value, batch[name])))
    ]
    assert different == []


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"crop_size": 0}, "crop_size: must be at least 1"),
        ({"msa_depth": 0}, "msa_depth: must be at least 1"),
        ({"entries": ["9zzz-assembly1"]}, "9zzz-assembly1: no such entry"),
        ({"entries": []}, "entries: no such entry"),
    ],
)
def test_bad_argument_is_one_clear_line(sample_cache, options, expected):
    with pytest.raises(InputError, match=expected):
        loader(sample_cache, **options)


def test_missing_cache_is_one_clear_line(tmp_path):
    with pytest.raises(InputError, match=r"nowhere.h5: cache: no such file"):
        make_loader(tmp_path / "nowhere.h5", crop_size=8, msa_depth=1)


@pytest.mark.parametrize("n_atoms", [1, 26, 27, 28, 135])
def test_windows_equal_those_of_the_dense_pairs(n_atoms):
    from alphafold3_pytorch.attention import full_pairwise_repr_to_windowed
    from alphafold3_pytorch.inputs import atom_ref_pos_to_atompair_inputs

    generator = torch.Generator().manual_seed(n_atoms)
    position = torch.randn(n_atoms, 3, generator=generator) * 9
    molecule = torch.randint(0, 2, (n_atoms,), generator=generator).cumsum(0) // 3
    dense = atom_ref_pos_to_atompair_inputs(position, molecule)
    windows = expand.atom_pairs(position, molecule)
    assert torch.equal(windows, full_pairwise_repr_to_windowed(dense, layout.ATOMS_PER_WINDOW))


def test_model_of_the_baseline_takes_a_batch(sample_cache):
    """Loss and gradients of a small stock model are finite, padding and missing atoms included."""
    from alphafold3_pytorch import Alphafold3

    torch.manual_seed(0)
    small = {"depth": 1, "heads": 2}
    model = Alphafold3(
        dim_atom_inputs=3, dim_atompair_inputs=5, atoms_per_window=27, dim_template_feats=108, num_dist_bins=64,
        dim_atom=8, dim_atompair=4, dim_input_embedder_token=16, dim_single=16, dim_pairwise=8, dim_token=16,
        diffusion_num_augmentations=2, num_molecule_mods=4, dim_additional_msa_feats=2, dim_additional_token_feats=33,
        confidence_head_kwargs={"pairformer_depth": 1},
        template_embedder_kwargs={"pairformer_stack_depth": 1},
        msa_module_kwargs={"depth": 1, "dim_msa": 8},
        pairformer_stack={"depth": 1, "pair_bias_attn_heads": 2, "pair_bias_attn_dim_head": 8},
        diffusion_module_kwargs={
            **{f"atom_{side}_{key}": value for side in ("encoder", "decoder") for key, value in small.items()},
            "token_transformer_depth": 1, "token_transformer_heads": 2,
        },
    )  # fmt: skip
    batch = next(iter(loader(sample_cache, batch_size=2, labels=False, shuffle=False)))
    loss = model(**batch, num_recycling_steps=1)
    loss.backward()
    assert torch.isfinite(loss)
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    assert gradients and all(torch.isfinite(gradient).all() for gradient in gradients)


def test_measured_paths_read_comparable_examples(sample, sample_cache):
    from megafold.evopipe import measure

    name = "2q2k-assembly1"
    one = replace(sample, mmcif=sample.mmcif / "2q2k.cif")
    stock = measure.read_stock_example(one, name, 64, 16, seed=0)
    compact = measure.read_cached_example(CachedStructures(sample_cache, crop_size=64, msa_depth=16), name)
    cached = SimpleNamespace(**expand.expand(compact))
    assert len(stock.molecule_ids) == len(cached.molecule_ids) == 64
    assert len(stock.msa) == len(cached.msa) == 16
    assert stock.templates.shape == cached.templates.shape
    assert stock.atompair_inputs.ndim == 3 and cached.atompair_inputs.ndim == 4
