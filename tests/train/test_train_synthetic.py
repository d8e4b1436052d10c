"""Synthetic batches and workloads: exact sizes, determinism, plausible values, and acceptance by the stock model."""

from __future__ import annotations

import pytest
import torch

from megafold.model.presets import preset
from megafold.train.synthetic import synthetic_batch
from megafold.train.workload import CONFIDENCE_LABELS, arrange, recycles

TINY = preset("tiny")


@pytest.mark.parametrize(("n", "atoms"), [(17, 8), (27, 8), (97, 3)])
def test_sizes_are_exact(n, atoms):
    batch = synthetic_batch(n, atoms_per_token=atoms, msa_depth=5, templates=2, model_kwargs=TINY)
    windows = -(-n * atoms // 27)
    assert batch["atom_inputs"].shape == (1, n * atoms, TINY["dim_atom_inputs"])
    assert batch["atompair_inputs"].shape == (1, windows, 27, 54, 5)
    assert batch["msa"].shape == (1, 5, n, 32)
    assert batch["templates"].shape == (1, 2, n, n, 108)
    assert batch["molecule_atom_lens"].sum() == n * atoms
    assert batch["molecule_atom_indices"].max() < n * atoms


def test_seed_decides_every_value():
    first, again, other = (
        synthetic_batch(20, msa_depth=4, workload="full", seed=seed, model_kwargs=TINY) for seed in (3, 3, 4)
    )
    assert all(torch.equal(first[name], again[name]) for name in first)
    for name in ("atom_inputs", "atom_pos", "msa", "templates"):
        assert not torch.equal(first[name], other[name])


def test_global_random_state_is_left_alone():
    before = torch.get_rng_state()
    synthetic_batch(20, msa_depth=4, model_kwargs=TINY)
    assert torch.equal(before, torch.get_rng_state())


def test_coordinates_are_a_chain_and_the_alignment_is_one_hot():
    batch = synthetic_batch(200, msa_depth=50, model_kwargs=TINY)
    alpha = batch["atom_pos"][0, batch["molecule_atom_indices"][0]]
    steps = (alpha[1:] - alpha[:-1]).norm(dim=-1)
    torch.testing.assert_close(steps, torch.full((199,), 3.8))
    assert (alpha[::20] - alpha.mean(0)).norm(dim=-1).mean() > 8  # spread out, not a point
    assert torch.equal(batch["msa"].sum(-1), torch.ones(1, 50, 200))
    same = (batch["msa"][0].argmax(-1) == batch["molecule_ids"][0]).float().mean(-1)
    assert same[0] == 1
    assert 0.5 < same[1:].mean() < 0.85


def test_only_workloads_with_confidence_have_its_labels():
    core, full = (synthetic_batch(12, msa_depth=2, workload=w, model_kwargs=TINY) for w in ("core", "full"))
    assert set(full) - set(core) == set(CONFIDENCE_LABELS)


def test_alignment_and_templates_can_be_left_out():
    batch = synthetic_batch(12, msa_depth=0, templates=0, model_kwargs=TINY)
    assert not {"msa", "msa_mask", "templates", "template_mask"} & set(batch)


@pytest.mark.parametrize(
    "sizes",
    [{"n_tokens": 0}, {"atoms_per_token": 2}, {"msa_depth": -1}, {"templates": -1}, {"workload": "half"}],
    ids=str,
)
def test_sizes_that_make_no_structure_are_refused(sizes):
    with pytest.raises(ValueError):
        synthetic_batch(**{"n_tokens": 12, "model_kwargs": TINY, **sizes})


def test_workloads_arrange_labels_and_recycles():
    full = synthetic_batch(12, msa_depth=2, workload="full", model_kwargs=TINY)
    confident = [bool(set(CONFIDENCE_LABELS) & set(arrange(full, "as_published", step))) for step in range(21)]
    assert [step for step, has in enumerate(confident) if has] == [0, 10, 20]
    assert not set(CONFIDENCE_LABELS) & set(arrange(full, "core", 0))
    for workload in ("full", "full_one_rollout", "as_published"):
        found = [step for step in range(9) if set(CONFIDENCE_LABELS) & set(arrange(full, workload, step, every=4))]
        assert found == [0, 4, 8]
    assert not set(CONFIDENCE_LABELS) & set(arrange(full, "core", 0, every=1))
    assert set(full) <= set(arrange(full, "full", 7))
    drawn = [recycles("as_published", step) for step in range(200)]
    assert set(drawn) == {1, 2, 3, 4}
    assert drawn == [arrange(full, "as_published", step)["num_recycling_steps"] for step in range(200)]
    assert {recycles("core", step) for step in range(20)} == {1}
    with pytest.raises(ValueError, match="one of core, full, full_one_rollout, as_published"):
        arrange(full, "half", 0)


@pytest.fixture(scope="module")
def stock():
    from megafold.model.build import build_model

    torch.manual_seed(0)
    return build_model("tiny")


@pytest.mark.parametrize("workload", ["core", "full"])
@pytest.mark.parametrize(("msa_depth", "templates"), [(4, 1), (0, 0)], ids=["with-msa", "bare"])
def test_stock_model_trains_on_it(stock, workload, msa_depth, templates):
    batch = synthetic_batch(
        11, msa_depth=msa_depth, templates=templates, workload=workload, atoms_per_token=4, model_kwargs=TINY
    )
    loss, breakdown = stock(**batch, return_loss_breakdown=True)
    loss.backward()
    assert torch.isfinite(loss)
    assert (breakdown.confidence > 0) == (workload == "full")
