"""The training forward: its breakdown, its options, what it asks of the host, and one rollout instead of many."""

from __future__ import annotations

import traceback

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megafold.model.plan import Plan

# Operators whose result the host must know: on a GPU each waits for the device.
READS = ("_local_scalar_dense", "nonzero", "unique", "_to_sparse", "masked_select", "repeat_interleave.Tensor")


class _Reads(TorchDispatchMode):
    """The functions in which such operators were called."""

    def __init__(self) -> None:
        super().__init__()
        self.callers: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if any(name in str(func) for name in READS):
            frames = [frame for frame in traceback.extract_stack()[:-1] if "/torch/" not in frame.filename]
            self.callers.append(frames[-1].name)
        return func(*args, **(kwargs or {}))


def _loss_and_terms(model, batch, **kwargs):
    torch.manual_seed(3)
    with torch.no_grad():
        return model(**batch, return_loss_breakdown=True, **kwargs)


@pytest.mark.parametrize("confidence", [False, True], ids=["core", "full"])
def test_every_term_of_the_loss_is_the_stock_models(confidence, make_batch, make_model, small_chunks):
    from megafold.model.optimize import optimize

    model, batch = make_model(), make_batch(11, 6, confidence=confidence, seed=2)
    options = {"diffusion_add_bond_loss": True, "diffusion_add_smooth_lddt_loss": True}
    loss, terms = _loss_and_terms(model, batch, **options)
    optimize(model, Plan())
    found_loss, found = _loss_and_terms(model, batch, **options)
    torch.testing.assert_close(found_loss, loss)
    torch.testing.assert_close(found._asdict(), terms._asdict())
    assert len({value.item() for value in found}) == (len(found) if confidence else len(found) - 4)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param({"resolved_labels": None}, id="frames-alone"),
        pytest.param({"atom_indices_for_frame": None}, id="resolved-atoms-alone"),
        pytest.param({"resolution": None}, id="unknown-resolution"),
        pytest.param({"resolution": torch.tensor([9.0, 2.0])}, id="one-poor-resolution"),
        pytest.param({"molecule_atom_indices": None}, id="no-centres"),
    ],
)
def test_labels_that_are_missing_count_as_in_the_stock_model(
    change, make_batch, make_model, step, step_in_float64, beyond_budget
):
    from megafold.model.optimize import optimize

    model, batch = make_model(), make_batch(8, 6, confidence=True, seed=2) | change
    stock, exact = step(model, batch), step_in_float64(model, batch)
    optimize(model, Plan())
    assert beyond_budget(step(model, batch), stock, exact) == []


def test_ligands_and_nucleic_acids_count_as_in_the_stock_model(
    make_batch, make_model, step, step_in_float64, beyond_budget
):
    from megafold.model.optimize import optimize

    model, batch = make_model(), make_batch(12, confidence=True, seed=5)
    kinds = torch.arange(12) % 5
    batch["is_molecule_types"] = torch.nn.functional.one_hot(kinds, 5).bool()[None]
    batch["valid_atom_indices_for_frame"] = (torch.arange(12) % 4 > 0)[None]
    batch["molecule_atom_indices"][0, 3] = batch["distogram_atom_indices"][0, 5] = -1
    options = {"diffusion_add_smooth_lddt_loss": True, "num_rollout_steps": 3}
    stock, exact = step(model, batch, **options), step_in_float64(model, batch, **options)
    optimize(model, Plan())
    assert beyond_budget(step(model, batch, **options), stock, exact) == []


def test_what_the_stock_forward_refuses_is_refused(make_batch, make_model):
    from megafold.model.optimize import optimize

    model, batch = make_model(), make_batch(8)
    optimize(model, Plan())
    with pytest.raises(TypeError, match="pears"):
        model(**batch, pears=1)
    with pytest.raises(ValueError, match="is_molecule_mod: the model needs it"):
        model(**{**batch, "is_molecule_mod": None})
    batch["molecule_atom_indices"] = batch["molecule_atom_indices"].flip(-1)
    with pytest.raises(AssertionError):
        model(**batch, hard_validate=True)


@pytest.mark.parametrize("rollouts", [1, 3])
def test_fewer_rollouts_train_the_confidence_head_alone_on_as_many_structures(rollouts, make_batch, make_model, step):
    from megafold.model.optimize import optimize

    model, batch = make_model(), make_batch(9, 7, confidence=True)
    shapes = []
    model.edm.register_forward_hook(lambda *_: None)
    optimize(model, Plan())
    many = step(model, batch)
    optimize(model, Plan(), rollouts=rollouts)
    sample = model.edm.sample
    model.edm.__dict__["sample"] = lambda **kwargs: shapes.append(kwargs["atom_mask"].shape[0]) or sample(**kwargs)
    few = step(model, batch)
    assert shapes == [2 * rollouts]
    differs = {name for name, gradient in few[1].items() if not torch.equal(gradient, many[1][name])}
    assert differs and all(name.startswith("confidence_head.") for name in differs)


def test_a_rollout_conditions_its_pairs_once(make_batch, make_model, monkeypatch):
    from megafold.model.optimize import optimize

    model, batch = make_model(num_rollout_steps=3), make_batch(9, confidence=True)
    calls = []
    model.diffusion_module.pairwise_conditioner.register_forward_hook(lambda *_: calls.append("pairs"))
    model.diffusion_module.token_transformer.layers[0][2].fn.to_attn_bias.register_forward_hook(
        lambda *_: calls.append("bias")
    )
    for plan, expected in ((Plan(shared_rollout=False, evofusion=False), 6), (Plan(evofusion=False), 2)):
        optimize(model, plan)
        calls.clear()
        model(**batch)
        assert (calls.count("pairs"), calls.count("bias")) == (expected, expected)


@pytest.mark.parametrize(("pairs", "expected"), [(1, [1] * 8), (3 * 81, [3, 1, 3, 1])], ids=["one", "three"])
def test_the_confidence_head_sees_as_many_rollouts_as_a_chunk_holds(
    pairs, expected, make_batch, make_model, monkeypatch
):
    from megafold.model import confidence
    from megafold.model.optimize import optimize

    monkeypatch.setattr(confidence, "CHUNK_PAIRS", pairs)
    model, batch, seen = make_model(), make_batch(9, 7, confidence=True), []
    model.confidence_head.pairformer_stack.register_forward_pre_hook(
        lambda module, args, kwargs: seen.append(len(kwargs["pairwise_repr"])), with_kwargs=True
    )
    optimize(model, Plan())
    model(**batch)
    assert seen == expected


@pytest.mark.parametrize(("kept", "checkpoints"), [(0, True), (1 << 30, False)], ids=["long", "short"])
def test_the_confidence_head_is_checkpointed_where_its_activations_are_many(
    kept, checkpoints, make_batch, make_model, monkeypatch
):
    from megafold.model import confidence
    from megafold.model.optimize import optimize

    monkeypatch.setattr(confidence, "KEPT_ELEMENTS", kept)
    model, batch, seen = make_model(checkpoint_confidence_head=True), make_batch(9, confidence=True), []
    stack = model.confidence_head.pairformer_stack
    stack.register_forward_pre_hook(lambda module, _: seen.append(module.checkpoint))
    optimize(model, Plan())
    model(**batch)
    assert seen == [checkpoints] and stack.checkpoint


@pytest.mark.parametrize("confidence", [False, True], ids=["core", "full"])
def test_a_step_reads_nothing_from_the_device_but_chains_and_alignments(confidence, make_batch, make_model):
    from megafold.model.optimize import optimize

    model, batch = make_model(), make_batch(9, confidence=confidence)
    batch["additional_molecule_feats"][..., 2] = 0  # one chain: several are searched
    with _Reads() as stock:
        model(**batch).backward()
    optimize(model, Plan())
    with _Reads() as ours:
        model(**batch).backward()
    assert len(stock.callers) > 30
    # Ids of chains, which are on the host by then. Alignments copy 3 x 3 matrices, which on a CPU is no operator.
    assert set(ours.callers) <= {"is_one", "of_atoms"}
