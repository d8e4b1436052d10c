"""Every collective against its definition, and its backward as the exact transpose over all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megafold.evosp3d import collectives
from megafold.evosp3d.collectives import Exchange, Gather, Scatter, Sum, run, start
from megafold.evosp3d.mesh import Shards

# One rank holds a short block, or none: 5 over 3 is 2, 2, 1; 3 over 5 is 1, 1, 1, 0, 0.
LENGTHS = (3, 5, 12)


def _random(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def _blocks(total: int, size: int) -> list[tuple[int, int]]:
    step = -(-total // size)
    return [(min(step * r, total), min(step, max(0, total - step * r))) for r in range(size)]


def _cases(n: int, m: int):
    """name -> (collective, inputs of all ranks, what each rank must get)."""
    size = dist.get_world_size()
    whole = _random(2, n, m, 3, seed=1)
    copies = [_random(2, n, m, 3, seed=10 + r) for r in range(size)]
    rows, columns = _blocks(n, size), _blocks(m, size)
    return {
        "gather": (Gather(1, n), [whole.narrow(1, *b) for b in rows], [whole] * size),
        "scatter": (Scatter(1, n), copies, [sum(copies).narrow(1, *b) for b in rows]),
        "exchange": (
            Exchange(split=2, split_total=m, join=1, join_total=n),
            [whole.narrow(1, *b) for b in rows],
            [whole.narrow(2, *b) for b in columns],
        ),
        "sum": (Sum(), copies, [sum(copies)] * size),
    }


def _check_all() -> list[str]:
    shards, wrong = Shards(dist.group.WORLD), []
    for n in LENGTHS:
        for m in (4, 7):
            for name, (what, inputs, expected) in _cases(n, m).items():
                x = inputs[shards.rank].clone().requires_grad_()
                y = run(what, x, shards, name)
                if not torch.allclose(y, expected[shards.rank], rtol=0, atol=1e-13):
                    wrong.append(f"{name} n={n} m={m}: forward")
                cotangent = _random(*y.shape, seed=100 + shards.rank)
                (gradient,) = torch.autograd.grad(y, x, cotangent)
                # <F x, g> = <x, F^T g>, both summed over the ranks
                products = torch.stack(((y.detach() * cotangent).sum(), (x.detach() * gradient).sum()))
                dist.all_reduce(products)
                if abs(products[0] - products[1]) > 1e-11:
                    wrong.append(f"{name} n={n} m={m}: backward {products.tolist()}")
    return wrong


@pytest.mark.parametrize("size", [1, 2, 3, 5], ids="P={}".format)
def test_collectives_and_their_transposes(run_ranks, size):
    assert [line for wrong in run_ranks(size, _check_all) for line in wrong] == []


def _gather_twice(split_backward: bool) -> float:
    """Relative error of the gradient of a row that every rank reads."""
    if split_backward:

        class Split(Scatter):
            def launch(self, x, shards, operator):
                return lambda: shards.narrow(x, self.dim)

        collectives.Gather.adjoint = property(lambda self: Split(self.dim, self.total))
    shards = Shards(dist.group.WORLD)
    whole = _random(6, 4, seed=0)
    own = shards.narrow(whole, 0).clone().requires_grad_()
    weights = [_random(6, 4, seed=20 + r) for r in range(shards.size)]
    (run(Gather(0, 6), own, shards, "rows") ** 2 * weights[shards.rank]).sum().backward()
    exact = shards.narrow(2 * whole * sum(weights), 0)
    return ((own.grad - exact).norm() / exact.norm()).item()


@pytest.mark.parametrize("size", [2, 4], ids="P={}".format)
def test_a_local_split_as_backward_of_gather_is_found(run_ranks, size):
    """The published fault: the forward is right, and every gradient lacks what the other ranks wanted."""
    assert max(run_ranks(size, _gather_twice, False)) < 1e-14
    assert min(run_ranks(size, _gather_twice, True)) > 0.3


def _overlapping() -> bool:
    shards = Shards(dist.group.WORLD)
    x = _random(3, 6, 4, seed=shards.rank).requires_grad_()
    flights = [start(Exchange(1, 6, 0, 3 * shards.size), x * k, shards, "many") for k in (1.0, 2.0, 3.0)]
    one, two, three = (flight.wait() for flight in reversed(flights))
    (one + two + three).sum().backward()
    return torch.allclose(x.grad, torch.full_like(x, 6.0)) and torch.allclose(one * 2, two * 3)


def test_messages_in_flight_at_once_do_not_mix(run_ranks):
    assert all(run_ranks(2, _overlapping))


def _half_precision() -> float:
    shards = Shards(dist.group.WORLD)
    x = torch.full((shards.size, 1), 1.0 if shards.rank == 0 else 2.0**-9, dtype=torch.bfloat16)
    return run(Scatter(0, shards.size), x, shards, "").item()


def test_sums_of_half_precision_are_rounded_once(run_ranks):
    # 1 + 4 * 2**-9: added one by one in bfloat16 each of the four would be lost
    assert run_ranks(5, _half_precision) == [1.0 + 2.0**-7] * 5


def _laid_out(shape: tuple[int, ...], lies: str, dtype: torch.dtype) -> torch.Tensor:
    count = torch.Size(shape).numel()
    if lies == "whole":
        return torch.arange(count).to(dtype).view(shape)
    if lies == "turned":
        return torch.arange(count).to(dtype).view(shape[::-1]).permute(tuple(reversed(range(len(shape)))))
    return torch.arange(2 * count + 3).to(dtype)[3 : 3 + 2 * count].view(*shape[:-1], 2 * shape[-1])[..., ::2]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("lies", ["whole", "turned", "apart"])
@pytest.mark.parametrize("lengths", [(4, 4, 4), (5, 5, 2), (6, 6, 0)], ids=str)
@pytest.mark.parametrize(("batch", "dim"), [(1, 1), (1, 2), (2, 1)])
def test_blocks_of_a_dimension_lie_one_after_another_and_back(batch, dim, lengths, lies, dtype):
    shape = [batch, 3, 3, 8]
    shape[dim] = sum(lengths)
    x = _laid_out(tuple(shape), lies, dtype)
    flat, sizes = collectives.in_blocks(x, dim, lengths)
    blocks = x.split(list(lengths), dim)
    assert sizes == [block.numel() for block in blocks]
    assert torch.equal(flat, torch.cat([block.reshape(-1) for block in blocks]))
    shapes = [tuple(block.shape) for block in blocks]
    assert torch.equal(collectives.from_blocks(flat, shapes, dim), x)
    into = _laid_out(tuple(shape), "apart", dtype).clone(memory_format=torch.preserve_format).zero_()
    assert collectives.from_blocks(flat, shapes, dim, into) is into
    assert torch.equal(into, x)


def test_nothing_is_copied_where_blocks_lie_so_already():
    x = torch.zeros(1, 6, 2, 8)
    assert collectives.in_blocks(x, 1, (3, 3))[0].data_ptr() == x.data_ptr()
    assert collectives.from_blocks(x.view(-1), [(1, 3, 2, 8)] * 2, 1).data_ptr() == x.data_ptr()
    assert collectives.in_blocks(x, 2, (1, 1))[0].data_ptr() != x.data_ptr()
