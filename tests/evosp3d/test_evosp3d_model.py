"""The loss of the whole model and every gradient, sequence and data parallel, against one device."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from megafold.evosp3d import diffusion
from megafold.evosp3d.diffusion import Share, share_of

# name -> lengths of the structures, arguments of the batch, of the model, of forward, dropout, numbers of ranks
CASES = {
    "two-of-unequal-length": ((11, 7), {}, {}, {}, 0.25, (2, 3)),
    "more-ranks-than-rows-and-augmentations": ((3,), {}, {"diffusion_num_augmentations": 3}, {}, 0.0, (5,)),
    "recycling-and-checkpointing": (
        (9,),
        {},
        {
            "checkpoint_input_embedding": True,
            "checkpoint_trunk_pairformer": True,
            "checkpoint_diffusion_module": True,
            "checkpoint_distogram_head": True,
        },
        {"num_recycling_steps": 2, "detach_when_recycling": False},
        0.25,
        (2,),
    ),
    "without-msa-and-templates": ((8,), {"msa": False, "templates": False}, {}, {}, 0.0, (3,)),
    "auxiliary-losses-and-one-augmentation": (
        (9,),
        {},
        {"diffusion_num_augmentations": 1},
        {"diffusion_add_bond_loss": True, "diffusion_add_smooth_lddt_loss": True},
        0.0,
        (2,),
    ),
    "confidence-head": ((9, 6), {"confidence": True}, {"checkpoint_confidence_head": True}, {}, 0.25, (3,)),
    "value-residuals-and-constraints": (
        (8,),
        {},
        {"pairformer_stack": {"depth": 2, "add_value_residual": True}, "constraints": ["pocket", "contact"]},
        {},
        0.0,
        (2,),
    ),
}


def _with_ligands(batch):
    """The last tokens of every structure belong to a ligand: no polymer, no relative positions, other weights."""
    batch["is_molecule_types"][:, -2:] = torch.tensor([False, False, False, True, False])
    return batch


def _step(helpers, model, batch, kwargs, seed=3):
    """Loss, gradients by name and the generator's state, all in float64 with the random numbers of a float32 run."""
    with helpers._float64():
        model.zero_grad(set_to_none=True)
        torch.manual_seed(seed)
        random.seed(seed)
        loss, terms = model(**batch, return_loss_breakdown=True, **kwargs)
        loss.backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    values = {"loss": loss.detach(), **{f"term.{name}": term.detach() for name, term in terms._asdict().items()}}
    return values, gradients, torch.get_rng_state()[:64]


def _on_rank(helpers, model, batches, kwargs, dp, sp, plan=None, optimized=False):
    from megafold.evosp3d.mesh import make_mesh
    from megafold.evosp3d.parallelize import parallelize
    from megafold.evosp3d.reduce import GradientReducer
    from megafold.model.optimize import optimize

    model = copy.deepcopy(model)
    mesh = make_mesh(dp, sp, "cpu")
    if optimized:
        optimize(model, plan)
    parallelize(model, mesh, plan)
    replica = mesh.get_local_rank("dp")
    reducer = GradientReducer(model.parameters(), dp=dp, bucket_bytes=1 << 16)
    values, gradients, generator = _step(helpers, model, batches[replica], kwargs, seed=3 + replica)
    reducer.finish()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return values, gradients, generator


def _double(batch):
    return {k: v.double() if v is not None and v.is_floating_point() else v for k, v in batch.items()}


@pytest.mark.parametrize("name", CASES)
def test_loss_and_gradients_equal_one_device(run_ranks, helpers, make_model, set_dropout, beyond, name):
    lengths, batch_kwargs, model_kwargs, kwargs, dropout, sizes = CASES[name]
    model, batch = make_model(**model_kwargs), _double(_with_ligands(helpers._batch(*lengths, **batch_kwargs)))
    if model.constraints:
        batch["token_constraints"] = batch["templates"][:, 0, ..., : len(model.constraints)]
    set_dropout(model, dropout)
    values, gradients, generator = _step(helpers, copy.deepcopy(model), batch, kwargs)
    for size in sizes:
        for found in run_ranks(size, _on_rank, helpers, model, [batch], kwargs, 1, size):
            assert beyond(found[0], values, 1e-10) == []
            assert beyond(found[1], gradients, 1e-10) == []
            assert torch.equal(found[2], generator), "random numbers were drawn in another order"


def _sample(helpers, model, batch):
    """Positions and all logits of two structures, sampled without labels."""
    inputs = {name: value for name, value in batch.items() if name != "atom_pos"}
    with helpers._float64(), torch.no_grad():
        torch.manual_seed(3)
        positions, logits = model.eval()(
            **inputs, num_sample_steps=2, return_confidence_head_logits=True, return_distogram_head_logits=True
        )
    return {"positions": positions, **{f"{name}.logits": value for name, value in logits._asdict().items()}}


def _sample_on_rank(helpers, model, batch):
    from megafold.evosp3d.mesh import make_mesh
    from megafold.evosp3d.parallelize import parallelize

    parallelize(model, make_mesh(1, 3, "cpu"))
    return _sample(helpers, model, batch)


def test_sampled_structures_and_logits_come_back_whole(run_ranks, helpers, make_model, beyond):
    model, batch = make_model(), _double(helpers._batch(7, 5))
    exact = _sample(helpers, copy.deepcopy(model), batch)
    for found in run_ranks(3, _sample_on_rank, helpers, model, batch):
        assert beyond(found, exact, 1e-10) == []


@pytest.mark.parametrize("sp", [2, 3], ids="2x{}".format)
def test_data_and_sequence_parallel_equals_the_global_batch(run_ranks, helpers, make_model, beyond, sp):
    model = make_model()
    batches = [_double(helpers._batch(length, seed=length)) for length in (7, 9)]
    steps = [_step(helpers, copy.deepcopy(model), batch, {}, seed=3 + r) for r, batch in enumerate(batches)]
    exact = {name: (steps[0][1][name] + steps[1][1][name]) / 2 for name in steps[0][1]}
    for found in run_ranks(2 * sp, _on_rank, helpers, model, batches, {}, 2, sp):
        assert beyond(found[1], exact, 1e-10) == []


AUXILIARY = {"diffusion_add_bond_loss": True, "diffusion_add_smooth_lddt_loss": True}


@pytest.mark.parametrize(
    ("switches", "kwargs", "dropout", "size"),
    [
        ({}, {}, 0.25, 2),
        ({"evofusion": False}, {}, 0.0, 2),
        ({"shared_conditioning": False}, AUXILIARY, 0.25, 3),
        ({"asynchronous": False, "chunked_heads": False}, {}, 0.0, 2),
    ],
    ids=str,
)
def test_an_optimized_model_gives_the_same(
    run_ranks, helpers, make_model, set_dropout, beyond, switches, kwargs, dropout, size
):
    from megafold.model.plan import Plan

    model = make_model(checkpoint_trunk_pairformer=True)
    set_dropout(model, dropout)
    batch = _double(_with_ligands(helpers._batch(9, confidence="evofusion" in switches)))
    values, gradients, generator = _step(helpers, copy.deepcopy(model), batch, kwargs)
    plan, optimized = Plan(**switches), True
    for found in run_ranks(size, _on_rank, helpers, model, [batch], kwargs, 1, size, plan, optimized):
        assert beyond(found[0], values, 1e-8) == []
        assert beyond(found[1], gradients, 1e-8) == []
        assert torch.equal(found[2], generator), "random numbers were drawn in another order"


def _with_graphs(limit, steps, *args):
    """Steps with and without blocks as graphs: values, gradients, generator and bytes of each; the kinds of blocks."""
    from megafold.evosp3d import graphs as of_ranks
    from megafold.evosp3d.mesh import make_mesh
    from megafold.evosp3d.parallelize import parallelize
    from megafold.model import replacements
    from megafold.model.graphs import BlockGraphs, Emulated
    from megafold.model.optimize import optimize
    from megafold.model.plan import Plan

    helpers, model, batch, size = args
    replacements.BlockGraphs = lambda: BlockGraphs(Emulated())
    of_ranks.MOST_ELEMENTS = limit
    mesh, found = make_mesh(1, size, "cpu"), {}
    for graphs in (False, True):
        optimize(model, Plan(graphs=graphs))
        shards = parallelize(model, mesh, Plan(graphs=graphs))
        for _ in range(steps):
            shards.traffic.clear()
            values, gradients, generator = _step(helpers, model, batch, {})
        found[graphs] = values, gradients, generator, shards.traffic.by_operator()
    return found, sorted(key[0] for key in model.pairformer._megafold_graphs._shapes)


DEEP = {"pairformer_stack": {"depth": 3}, "diffusion_module_kwargs": {"token_transformer_depth": 2}}


@pytest.mark.parametrize(
    ("tokens", "size", "limit"), [(9, 2, 10**6), (3, 5, 10**6), (9, 2, 4 * 9 * 16)], ids=["2", "5-of-3-rows", "unlike"]
)
def test_blocks_as_graphs_give_the_same_and_send_the_same(
    run_ranks, helpers, make_model, set_dropout, beyond, tokens, size, limit
):
    """In the last case the blocks of one rank alone are small enough: recording them would leave it waiting."""
    model, batch = make_model(**CASES["recycling-and-checkpointing"][2], **DEEP), _double(helpers._batch(tokens))
    set_dropout(model, 0.25)
    results = run_ranks(size, _with_graphs, limit, 2, helpers, model, batch, size)
    for found, kinds in results:
        plain, replayed = found[False], found[True]
        assert beyond(replayed[0], plain[0], 1e-8) == []
        assert beyond(replayed[1], plain[1], 1e-8) == []
        assert torch.equal(replayed[2], plain[2])
        assert replayed[3] == plain[3]
        assert kinds == results[0][1]
        stacks = {"_pairformer_block", "_msa_block", "_template_block", "_transformer_block"}
        expected = stacks if limit == 10**6 else set()
        assert expected <= set(kinds)


@pytest.mark.parametrize(
    ("shape", "runs"),
    [((1, 2, 2047, 4), True), ((1, 2, 2048, 4), False), ((48, 3000, 4), True), ((80_000_001,), False)],
    ids=str,
)
def test_long_structures_and_large_blocks_are_not_recorded(shape, runs):
    from megafold.evosp3d.graphs import RankGraphs
    from megafold.evosp3d.mesh import Shards
    from megafold.model.graphs import Emulated

    tensor = torch.zeros(1).expand(shape)
    assert RankGraphs(Shards(), Emulated()).runs(tensor, {"mask": None, "n": 3}) is runs


def _asks_in_training_and_in_a_rollout(requires_grad):
    from megafold.evosp3d.graphs import RankGraphs
    from megafold.evosp3d.mesh import Shards
    from megafold.model.graphs import Emulated

    shards = Shards(torch.distributed.group.WORLD)
    graphs = RankGraphs(shards, Emulated())
    counts = [share_of(shards, total).count for total in (4, 1)]
    trained = graphs.runs(torch.zeros(counts[0], 5, 8, requires_grad=requires_grad))
    with torch.no_grad():
        return counts, [trained, graphs.runs(torch.zeros(counts[1], 5, 8))]


@pytest.mark.parametrize("requires_grad", [True, False], ids=["", "frozen"])
def test_a_rank_that_repeats_an_augmentation_asks_as_often_as_the_others(run_ranks, requires_grad):
    """Four augmentations and one rollout on three ranks: the last one denoises one structure in both."""
    found = run_ranks(3, _asks_in_training_and_in_a_rollout, requires_grad)
    assert found == [([2, 1], [True, True]), ([2, 1], [True, True]), ([1, 1], [True, True])]


def _seen_shapes(rank, size, totals, monkeypatch):
    """How often one of several ranks asks the others, and for how many shapes it records, over rollouts of totals."""
    from megafold.evosp3d.graphs import RankGraphs
    from megafold.evosp3d.mesh import Shards
    from megafold.model.graphs import Emulated

    shards, asked = Shards(), []
    shards.rank, shards.size = rank, size
    monkeypatch.setattr(RankGraphs, "_agree", lambda self, own, device: asked.append(own) or own)
    graphs, layer = RankGraphs(shards, Emulated()), [torch.nn.Linear(4, 4)]
    for total in totals:
        x = torch.ones(share_of(shards, total).count, 5, 4)
        with torch.no_grad(), shards.denoising(total):
            assert graphs.runs(x)
            graphs.run_stack(lambda layer, x: (layer[0](x),), [layer], (x,))
    return len(asked), graphs.shapes


def test_all_ranks_ask_and_record_as_often_for_two_totals_of_augmentations(monkeypatch):
    """Rollouts of four structures and of one on three ranks: the last rank has one both times, the first two and one.

    A rank that took the second for the first would neither ask nor rehearse, and the others would wait for it.
    """
    assert [_seen_shapes(rank, 3, (4, 1, 4), monkeypatch) for rank in range(3)] == [(2, 2)] * 3


def test_serialize_gives_the_stock_model_back(helpers, make_model):
    from megafold.evosp3d.parallelize import parallelize, serialize

    model, batch = make_model(), _double(helpers._batch(7))
    before = {path: dict(module.__dict__) for path, module in model.named_modules()}
    stock = _step(helpers, model, batch, {})
    parallelize(model, None)
    alone = _step(helpers, model, batch, {})
    serialize(model)
    assert alone[0]["loss"] == pytest.approx(stock[0]["loss"].item(), rel=1e-12)
    for path, module in model.named_modules():
        assert module.__dict__.keys() == before[path].keys()


@pytest.mark.parametrize("total", [1, 4, 48])
def test_any_number_of_ranks_shares_the_augmentations(total):
    from megafold.evosp3d.mesh import Shards

    for size in range(1, 61):
        counted = []
        for rank in range(size):
            shards = Shards()
            shards.rank, shards.size = rank, size
            share = share_of(shards, total)
            assert share.count >= 1 and share.count <= -(-total // size)
            counted += list(range(share.first, share.first + share.count)) if share.weight else []
        assert counted == list(range(total))


def _chunks_of_four(shards, total):
    """The published fault: 48 augmentations in 12 chunks of 4, the chunks split evenly."""
    chunks = total // 4
    if chunks % shards.size:
        raise ValueError(f"{chunks} chunks over {shards.size} ranks")
    count = chunks // shards.size * 4
    return Share(shards.rank * count, count, total, 1.0)


def _on_rank_in_chunks(*args):
    diffusion.share_of = _chunks_of_four
    return _on_rank(*args)


def test_sharing_by_divisors_of_twelve_is_found(run_ranks, helpers, make_model):
    model, batch = make_model(diffusion_num_augmentations=12), _double(helpers._batch(5))
    with pytest.raises(RuntimeError, match="3 chunks over 2 ranks"):
        run_ranks(2, _on_rank_in_chunks, helpers, model, [batch], {}, 1, 2)
    run_ranks(2, _on_rank, helpers, model, [batch], {}, 1, 2)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        ({"diffusion_candidates": 2}, "diffusion_candidates"),
        ({"distogram_atom_resolution": True}, "distogram_atom_resolution"),
        ({"pairformer_stack": {"num_register_tokens": 2}}, "pairformer has register tokens"),
    ],
)
def test_what_cannot_be_split_is_named(make_model, overrides, problem):
    from megafold.evosp3d.parallelize import parallelize

    with pytest.raises(ValueError, match=problem):
        parallelize(make_model(**overrides), None)
