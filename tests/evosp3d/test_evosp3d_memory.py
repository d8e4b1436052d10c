"""What one rank of P allocates in the trunk, forward and backward: everything of size N^2 c falls with P."""

from __future__ import annotations

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megafold.evosp3d.collectives import Gather, run
from megafold.evosp3d.emulate import emulated_ranks
from megafold.evosp3d.mesh import make_mesh
from megafold.evosp3d.parallelize import parallelize, serialize

TOKENS = 48
# Per pair of tokens and head, whole on every rank: the biases of triangle attention and pair-weighted averaging.
BIAS = 4


class Allocations(TorchDispatchMode):
    """The largest result of any operation, views of what was there left out; and all that is kept for the backward."""

    def __init__(self) -> None:
        super().__init__()
        self.largest, self.largest_by = 0, ""
        self._kept: dict[int, int] = {}

    def keep(self, tensor):
        storage = tensor.untyped_storage()
        self._kept[storage.data_ptr()] = storage.nbytes() // 8
        return tensor

    @property
    def kept(self) -> int:
        return sum(self._kept.values())

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in torch.utils._pytree.tree_leaves(args) if torch.is_tensor(t)}
        for tensor in torch.utils._pytree.tree_leaves(out):
            if torch.is_tensor(tensor) and tensor.untyped_storage().data_ptr() not in known:
                size = tensor.untyped_storage().nbytes() // 8
                if size > self.largest:
                    self.largest, self.largest_by = size, f"{function} {tuple(tensor.shape)}"
        return out


def _allocations(model, size: int) -> Allocations:
    """Of the trunk on rank 0 of ``size`` emulated ranks (rank 0 has the longest blocks)."""

    def trunk() -> Allocations:
        shards = parallelize(model, None if size == 1 else make_mesh(1, size, "cpu"))
        rows = shards.block(TOKENS)[1]
        single = torch.zeros(1, TOKENS, 24, dtype=torch.float64, requires_grad=True)
        pairs = torch.zeros(1, rows, TOKENS, 16, dtype=torch.float64, requires_grad=True)
        templates = torch.zeros(1, 2, rows, TOKENS, 108, dtype=torch.float64)
        msa = torch.zeros(1, 8, TOKENS, 32, dtype=torch.float64)
        mask = torch.ones(1, TOKENS, dtype=torch.bool)
        found = Allocations()
        with found, torch.autograd.graph.saved_tensors_hooks(found.keep, lambda tensor: tensor):
            x = pairs + model.template_embedder(
                templates=templates, template_mask=torch.ones(1, 2, dtype=torch.bool), pairwise_repr=pairs, mask=mask
            )
            x = x + model.msa_module(
                msa=msa,
                single_repr=single,
                pairwise_repr=x,
                mask=mask,
                additional_msa_feats=torch.zeros(1, 8, TOKENS, 2, dtype=torch.float64),
            )
            single_out, x = model.pairformer(single_repr=single, pairwise_repr=x, mask=mask)
            (x.sum() + single_out.sum() + model.distogram_head(x).sum()).backward()
        serialize(model)
        return found

    if size == 1:
        return trunk()
    with emulated_ranks(size):
        return trunk()


@pytest.fixture(scope="module")
def model(make_model):
    return make_model()


@pytest.fixture(scope="module")
def of_one_rank(model):
    return _allocations(model, 1)


@pytest.mark.parametrize("size", [2, 4, 8, 24], ids="P={}".format)
def test_allocations_of_a_rank_fall_with_p(model, of_one_rank, size):
    found = _allocations(model, size)
    assert found.largest <= of_one_rank.largest / size + BIAS * TOKENS**2, found.largest_by
    # Biases and the alignment's operands stay whole, so that what is kept falls less than P times.
    assert of_one_rank.kept / found.kept > {2: 1.8, 4: 3.2, 8: 5.0, 24: 8.0}[size]


def test_a_gathered_operand_is_found(model, of_one_rank, monkeypatch):
    """The published fault: the operand of the triangle update, whole on every rank."""
    from megafold.evosp3d import triangle

    def gathered(self, x, mask=None, *, shards):
        left, right = triangle.project_operands(self, x, mask, shards).unbind(3)
        right = run(Gather(1, x.shape[2]), right, shards, "gathered")
        return self.to_out(self.to_out_norm(torch.einsum("bikd,bjkd->bijd", left, right)))

    monkeypatch.setattr(triangle, "triangle_multiplication", gathered)
    found = _allocations(model, 24)
    assert found.largest > of_one_rank.largest / 24 + BIAS * TOKENS**2


@pytest.mark.parametrize(
    ("rows", "columns", "grouped"),
    [
        (1536, 1536, 48),
        (768, 1536, 48),
        (192, 1536, 0),
        (1280, 1280, 0),
        (128, 2048, 16),
        (48, 1536, 0),
    ],
    ids=["one-device", "P=2", "P=8", "short", "N=2048-P=16", "P=32"],
)
def test_blocks_are_grouped_where_a_rank_holds_many_pairs(rows, columns, grouped):
    from megafold.model import recompute

    assert recompute._in_groups(rows, columns, blocks=48) == grouped


@pytest.mark.parametrize("grouped", [2, 5, 7], ids="{}-of-7".format)
def test_blocks_in_groups_compute_the_same(grouped, monkeypatch):
    """Groups of two: the values and gradients of one block after another, and how often a block runs in the forward."""
    from megafold.model import recompute

    class Stack(torch.nn.Module):
        add_value_residual, recurrent_depth = False, 1

        def __init__(self) -> None:
            super().__init__()
            self.layers = [torch.nn.Linear(4, 4).double() for _ in range(7)]

    ran = []

    def block(layer, single, pairs, mask):
        ran.append(layer)
        return single + pairs.mean(dim=2).tanh(), pairs + layer(pairs).tanh()

    torch.manual_seed(0)
    stack, single, pairs = Stack(), torch.randn(1, 3, 4).double(), torch.randn(1, 3, 3, 4).double()
    parameters = [parameter for layer in stack.layers for parameter in layer.parameters()]
    expected = single, pairs
    for layer in stack.layers:
        expected = block(layer, *expected, None)
    cotangents = [torch.randn_like(tensor) for tensor in expected]
    exact = torch.autograd.grad(expected, parameters, cotangents)

    stack.__dict__[recompute.RECOMPUTES] = True
    monkeypatch.setattr(recompute, "_pairformer_block", block)
    monkeypatch.setattr(recompute, "GROUP", 2)
    monkeypatch.setattr(recompute, "_in_groups", lambda rows, columns, blocks: grouped)
    ran.clear()
    found = recompute.pairformer_blocks(stack, single_repr=single, pairwise_repr=pairs)
    assert [torch.equal(a, b) for a, b in zip(found, expected)] == [True, True]
    gradients = torch.autograd.grad(found, parameters, cotangents)
    assert all(torch.allclose(a, b, rtol=1e-12, atol=0) for a, b in zip(gradients, exact))
    # Once more in a group, but for its last block: its input is all that the group had to make again.
    lasts = {*range(1, grouped, 2), grouped - 1}
    once_more = [index < grouped and index not in lasts for index in range(7)]
    assert [ran.count(layer) for layer in stack.layers] == [3 if more else 2 for more in once_more]


@pytest.mark.parametrize("size", [2, 7, 8, 9, 16, 100, 2000])
def test_all_ranks_group_blocks_or_none(size, monkeypatch):
    """A group is computed once more, messages included, so a rank whose block is short must not leave it out."""
    from megafold.evosp3d import single
    from megafold.evosp3d.mesh import Shards
    from megafold.model import recompute

    answers = set()

    class Stack:
        def forward(self, *, single_repr, pairwise_repr, mask):
            rows, columns = pairwise_repr.shape[1:3]
            answers.add(recompute._in_groups(getattr(self, recompute.MOST_ROWS, rows), columns, blocks=48))
            return single_repr, pairwise_repr

    monkeypatch.setattr(single, "run", lambda what, x, *rest: x)
    for tokens in (1536, 1540, 1600, 2047, 2048, 3000):
        answers.clear()
        for rank in (0, size // 2, size - 1):
            shards, stack = Shards(), Stack()
            shards.rank, shards.size = rank, size
            pairs = torch.empty(1, shards.block(tokens)[1], tokens, 1, device="meta")
            tracks = {"single_repr": torch.empty(1, tokens, 1, device="meta"), "pairwise_repr": pairs}
            single.pairformer(stack, **tracks, shards=shards)
            assert recompute.MOST_ROWS not in stack.__dict__
        assert len(answers) == 1, tokens


def test_a_limit_on_memory_names_the_device_by_number(monkeypatch):
    """torch refuses a device without one, which is what a rank that is alone has."""
    from experiments.contenders.sequence_parallel import GIB, limit_memory

    set_to = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda share, index: set_to.append((share, index))
    )
    properties = type("Properties", (), {"total_memory": 128 * GIB})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    limit_memory("", torch.device("cuda"))
    limit_memory("limit-64gib", torch.device("cuda", 1))
    assert set_to == [(1.0, 3), (0.5, 1)]
