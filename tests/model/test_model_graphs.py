"""Blocks as graphs: keys, buffers, random numbers and gradients, with recordings that are emulated on a CPU."""

from __future__ import annotations

import copy
import gc
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch.overrides import TorchFunctionMode

from megafold.model.graphs import BlockGraphs, Captured, Emulated
from megafold.model.plan import Plan

CHECKPOINTED = {f"checkpoint_{part}": True for part in ("input_embedding", "trunk_pairformer", "diffusion_module")}
DEEP = {"pairformer_stack": {"depth": 3}, "msa_module_kwargs": {"depth": 2}}
DEEP |= {"diffusion_module_kwargs": {"token_transformer_depth": 2}}


class _Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.unused = torch.nn.Linear(4, 4), torch.nn.Linear(2, 2)


def _block(layer, x, pair, mask):
    (module,) = layer
    y = torch.nn.functional.dropout(module.linear(x), 0.5) * pair[0]
    return y.masked_fill(~mask, 0.0), x.detach().sum()


def _inputs(rows=3):
    g = torch.Generator().manual_seed(rows)
    x, pair = (torch.randn(rows, 4, generator=g, requires_grad=True) for _ in range(2))
    return x, (pair, 7), torch.rand(rows, 4, generator=g) < 0.8


def _gradients(run, module, inputs):
    torch.manual_seed(0)
    out, total = run(inputs)
    torch.randn(3)  # between forward and backward the generator moves on
    gradients = torch.autograd.grad(out.square().sum(), [inputs[0], inputs[1][0], *module.linear.parameters()])
    return [out, total, *gradients, torch.randn(1)]


@pytest.fixture()
def module():
    torch.manual_seed(1)
    return _Block()


def test_a_replayed_block_draws_the_same_dropout_in_both_directions(module):
    graphs, layer = BlockGraphs(Emulated()), [module]
    for rows in (3, 3, 5, 3):  # recorded, replayed, another shape, replayed with other numbers
        inputs = _inputs(rows)
        expected = _gradients(lambda given: _block(layer, *given), module, inputs)
        found = _gradients(lambda given: graphs.run(_block, layer, *given), module, inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert graphs.shapes == 2


def test_two_replays_may_wait_for_their_backward_at_once(module):
    graphs, layer = BlockGraphs(Emulated()), [module]
    first, second = _inputs(), [t.clone() if torch.is_tensor(t) else t for t in _inputs()]
    second[0] = (second[0].detach() * 2).requires_grad_()
    outs = [graphs.run(_block, layer, *given)[0] for given in (first, second)]
    found = [torch.autograd.grad(out.sum(), given[0])[0] for out, given in zip(outs, (first, second))]
    kept = [(out != 0).float() * 2 * first[1][0] for out in outs]
    for gradient, factor in zip(found, kept):
        torch.testing.assert_close(gradient, factor @ module.linear.weight)


def test_shapes_not_used_for_longest_are_dropped(module):
    graphs, layer = BlockGraphs(Emulated(), most=2), [module]
    for rows in (3, 4, 3, 5):
        graphs.run(_block, layer, *_inputs(rows))
    assert graphs.shapes == 2
    kept = {key[1][0][0][0] for key in graphs._shapes}
    assert kept == {3, 5}
    graphs.release()
    assert graphs.shapes == 0


def test_weights_that_moved_are_recorded_anew(module):
    graphs, layer, inputs = BlockGraphs(Emulated()), [module], _inputs()
    graphs.run(_block, layer, *inputs)
    (shape,) = graphs._shapes.values()
    (before,) = shape._cells.values()
    graphs.run(_block, list(layer), *inputs)
    assert list(shape._cells.values()) == [before]
    module.linear.weight.data = module.linear.weight.data.clone()
    graphs.run(_block, layer, *inputs)
    (after,) = shape._cells.values()
    assert after is not before


def test_other_numbers_precision_or_gradients_are_other_graphs(module):
    graphs, layer = BlockGraphs(Emulated(), most=9), [module]
    x, (pair, number), mask = _inputs()
    graphs.run(_block, layer, x, (pair, number), mask)
    graphs.run(_block, layer, x, (pair, 8), mask)
    graphs.run(_block, layer, x.detach(), (pair, number), mask)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        graphs.run(_block, layer, x, (pair, number), mask)
    assert graphs.shapes == 4
    assert copy.deepcopy(graphs).shapes == 0


def _chained(layer, x, y, context, mask):
    (module,) = layer
    dropped = torch.nn.functional.dropout(module.linear(x), 0.5)
    return x + (dropped * context[0]).masked_fill(~mask, 0.0), y + 0.1 * x.sum(-1, keepdim=True)


def _plainly(layers, carried, *context):
    for layer in layers:
        carried = _chained(layer, *carried, *context)
    return carried


def _stack_gradients(run, layers, first_only=False):
    x, (context, _), mask = _inputs()
    carried = (x.detach().requires_grad_(), torch.ones(3, 1))
    torch.manual_seed(0)
    out = run(layers, carried, (context, 3), mask)
    loss = out[0].square().sum() + (0.0 if first_only else out[1].sum())
    torch.randn(3)
    weights = [parameter for (module,) in layers for parameter in module.linear.parameters()]
    return [*out, *torch.autograd.grad(loss, [carried[0], context, *weights]), torch.randn(1)]


@pytest.mark.parametrize("first_only", [False, True], ids=["all-outputs", "one-output"])
@pytest.mark.parametrize("depth", [1, 3])
def test_a_stack_of_blocks_is_the_same_in_place(depth, first_only):
    torch.manual_seed(1)
    graphs, layers = BlockGraphs(Emulated()), [[_Block()] for _ in range(depth)]
    expected = _stack_gradients(_plainly, layers, first_only=first_only)
    for _ in range(2):
        found = _stack_gradients(lambda *a: graphs.run_stack(_chained, *a), layers, first_only=first_only)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b)
    assert graphs.shapes == 1


def _widening(layer, x, y, context, mask):
    x, y = _chained(layer, x.double(), y.double(), context, mask)
    return x, y


def test_a_narrow_tensor_is_widened_to_what_the_blocks_give():
    torch.manual_seed(1)
    graphs, layers = BlockGraphs(Emulated()), [[_Block().double()] for _ in range(2)]

    def plainly(layers, carried, *context):
        for layer in layers:
            carried = _widening(layer, *carried, *context)
        return carried

    expected = _stack_gradients(plainly, layers)
    found = _stack_gradients(lambda *a: graphs.run_stack(_widening, *a), layers)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b)


def _bytes_of_tensors():
    """Bytes that tensors hold now; fake and functional ones, left by another test of the process, hold none."""
    gc.collect()
    plain = (t for t in gc.get_objects() if type(t) in (torch.Tensor, torch.nn.Parameter))
    tensors = [t for t in plain if not torch._is_functional_tensor(t)]
    return sum({t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}.values())


def test_memory_does_not_grow_with_the_number_of_blocks():
    held = {}
    for depth in (2, 12):
        torch.manual_seed(1)
        layers = [[_Block()] for _ in range(depth)]
        graphs, x, mask = BlockGraphs(Emulated()), torch.randn(512, 4), torch.ones(512, 4, dtype=torch.bool)
        before = _bytes_of_tensors()
        for _ in range(2):
            out = graphs.run_stack(_chained, layers, (x, torch.ones(512, 1)), (torch.ones(512, 4), 3), mask)
            (out[0].sum() + out[1].sum()).backward()
            del out
            for (module,) in layers:
                module.zero_grad(set_to_none=True)
        held[depth] = _bytes_of_tensors() - before
    assert 0 < held[12] <= held[2]


def test_another_length_seen_once_is_not_recorded(module, monkeypatch):
    from megafold.model import graphs as module_of_graphs

    monkeypatch.setattr(module_of_graphs, "FIRST_SHAPES", 1)
    graphs, layer = BlockGraphs(Emulated(), patience=1), [module]
    for shapes, rows in ((1, 3), (1, 4), (1, 3), (1, 5), (2, 4)):
        inputs = _inputs(rows)
        expected = _gradients(lambda given: _block(layer, *given), module, inputs)
        found = _gradients(lambda given: graphs.run(_block, layer, *given), module, inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
        assert graphs.shapes == shapes


@pytest.mark.parametrize("failing", range(8), ids="allocation-{}".format)
def test_out_of_memory_leaves_no_half_of_a_shape(failing, module, monkeypatch):
    """Whichever of the first buffers it is that there is no room for: three inputs, two outputs, their gradients."""
    graphs, layer, inputs = BlockGraphs(Emulated()), [module], _inputs()
    expected = _gradients(lambda given: _block(layer, *given), module, inputs)
    empty_like, left = torch.empty_like, [failing]

    def full(*args, **kwargs):
        left[0] -= 1
        if left[0] == -1:
            raise torch.OutOfMemoryError("no room")
        return empty_like(*args, **kwargs)

    monkeypatch.setattr(torch, "empty_like", full)
    with pytest.raises(torch.OutOfMemoryError):
        _gradients(lambda given: graphs.run(_block, layer, *given), module, inputs)
    found = _gradients(lambda given: graphs.run(_block, layer, *given), module, inputs)
    assert left[0] < -1 and all(torch.equal(a, b) for a, b in zip(found, expected))


# What no graph can hold: numbers of the host that become tensors, by a copy from memory that is not pinned, and what
# the host waits for.
_NOT_CAPTURED = {torch.tensor, torch.asarray, torch.as_tensor, torch.from_numpy, torch.nonzero, torch.masked_select}
_NOT_CAPTURED |= {torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.cpu, torch.Tensor.numpy, torch.Tensor.__bool__}
_NOT_CAPTURED |= {torch.Tensor.nonzero, torch.Tensor.__int__, torch.Tensor.__float__, torch.Tensor.__index__}


class _HostIsAway(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in _NOT_CAPTURED and not (func in (torch.asarray, torch.as_tensor) and torch.is_tensor(args[0])):
            raise RuntimeError(f"{func.__name__} in a capture")
        return func(*args, **(kwargs or {}))


class _Strict(Emulated):
    """Fails where a device would refuse to capture."""

    def record(self, compute, pool):
        def replay():
            with _HostIsAway():
                compute()

        return replay


PLANS = {"none": Plan.only("graphs"), "all": Plan()}
PLANS |= {f"with-{name}": Plan.only("graphs", name) for name in Plan().as_dict() if name != "graphs"}
PLANS |= {f"without-{name}": replace(Plan(), **{name: False}) for name in Plan().as_dict() if name != "graphs"}


@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_no_block_brings_numbers_of_the_host_to_the_device(plan, make_model, make_batch, step, monkeypatch):
    """Beside every other switch and without it: what stays stock is captured too."""
    from megafold.model import replacements
    from megafold.model.optimize import optimize

    model, batch = make_model(**CHECKPOINTED, **DEEP), make_batch(9, 7)
    expected = step(model, batch)
    monkeypatch.setattr(replacements, "BlockGraphs", lambda: BlockGraphs(_Strict()))
    optimize(model, plan)
    found = step(model, batch)
    shapes = model.pairformer._megafold_graphs._shapes
    kinds = {key[0] for key in shapes}
    assert kinds >= {"_msa_block", "_template_block", "_pairformer_block", "_transformer_block"}
    assert [shape.name for shape in shapes.values() if shape.fails] == []
    torch.testing.assert_close(found[0], expected[0])
    assert found[1].keys() == expected[1].keys()
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-5, msg=name)


class _Waiting(Emulated):
    """Nothing can be recorded (after the first ``count``), as where an operator waits for the device."""

    def __init__(self, count):
        self.count = count

    def record(self, compute, pool):
        self.count -= 1
        if self.count < 0:
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(compute, pool)


@pytest.mark.parametrize("recorded", [0, 1], ids=["nothing", "the-forward-alone"])
def test_a_block_that_cannot_be_recorded_runs_as_it_is(recorded, module):
    graphs, layer = BlockGraphs(_Waiting(recorded)), [module]
    for _ in range(2):
        inputs = _inputs()
        expected = _gradients(lambda given: _block(layer, *given), module, inputs)
        found = _gradients(lambda given: graphs.run(_block, layer, *given), module, inputs)
        assert all(torch.equal(a, b) for a, b in zip(found, expected))
    assert [shape.fails for shape in graphs._shapes.values()] == [True]


@pytest.mark.parametrize("ends", [True, False], ids=["the-capture-ends", "the-capture-broke"])
def test_after_a_failed_capture_the_allocator_knows_that_none_goes_on(ends, monkeypatch):
    """A capture that broke raises when it ends, before it has told the allocator."""
    told, broken = [], iter([not ends, False])

    class Graph:
        def capture_begin(self, **_):
            pass

        def capture_end(self):
            if next(broken):
                raise RuntimeError("operation failed due to a previous error during capture")

    class Stream:
        def wait_stream(self, _):
            pass

    def compute():
        raise RuntimeError("operation not permitted when stream is capturing")

    for name, stand in {"Stream": Stream, "current_stream": Stream, "CUDAGraph": Graph}.items():
        monkeypatch.setattr(torch.cuda, name, stand)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *given: told.append(given), raising=False)
    with pytest.raises(RuntimeError, match="not permitted"):
        Captured().record(compute, (0, 7))
    assert told == ([] if ends else [(3, (0, 7))])


class _Refusing(Emulated):
    """Loss and gradients in one cannot be recorded, as where an operator of the loss waits for the device."""

    def record(self, compute, pool):
        if getattr(compute, "keywords", {}).get("gives"):
            raise RuntimeError("operation not permitted when stream is capturing")
        return super().record(compute, pool)


@pytest.mark.parametrize("way", ["whole", "blocks", "refused"])
def test_rollout_and_confidence_head_are_the_same_as_graphs(way, make_model, make_batch, step, monkeypatch):
    from megafold.model import confidence, replacements
    from megafold.model.optimize import optimize

    model = make_model(**CHECKPOINTED, **DEEP, checkpoint_confidence_head=True)
    batch = make_batch(9, confidence=True)
    optimize(model, Plan(graphs=False))
    expected = step(model, batch)
    # Four rollouts: chunks of three and one.
    monkeypatch.setattr(confidence, "CHUNK_PAIRS", 3 * 81)
    if way == "blocks":
        monkeypatch.setattr(confidence, "KEPT_ELEMENTS", 0)
    recorder = _Refusing() if way == "refused" else Emulated()
    monkeypatch.setattr(replacements, "BlockGraphs", lambda: BlockGraphs(recorder))
    assert optimize(model, Plan()).replaced["graphs"] == 5
    for _ in range(2):
        found = step(model, batch)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1].keys() == expected[1].keys()
        for name, gradient in found[1].items():
            torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-5, msg=name)
    kinds = [key[0] for key in model.pairformer._megafold_graphs._shapes]
    assert kinds.count("_transformer_block") == 2
    chunks = {"whole": (1, 2), "blocks": (3, 0), "refused": (3, 2)}[way]
    assert (kinds.count("_pairformer_block"), kinds.count("_Chunk.loss")) == chunks


@pytest.mark.parametrize("shifts", [False, True], ids=["in-turn", "shifted"])
@pytest.mark.parametrize("dropout", [0.0, 0.25], ids=["no-dropout", "dropout"])
def test_the_model_is_the_same_with_its_blocks_as_graphs(dropout, shifts, make_model, make_batch, step, monkeypatch):
    from megafold.model import recompute, replacements
    from megafold.model.optimize import optimize

    monkeypatch.setattr(recompute, "SHIFTS", shifts)

    model, batch = make_model(**CHECKPOINTED, **DEEP), make_batch(9, 7)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    optimize(model, Plan(graphs=False))
    expected = step(model, batch)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replacements, "BlockGraphs", lambda: BlockGraphs(Emulated()))
        report = optimize(model, Plan())
    assert report.replaced["graphs"] == 4
    for _ in range(2):
        found = step(model, batch)
        torch.testing.assert_close(found[0], expected[0])
        assert found[1].keys() == expected[1].keys()
        for name, gradient in found[1].items():
            torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-5, msg=name)
    kinds = [key[0] for key in model.pairformer._megafold_graphs._shapes]
    assert len(kinds) > 2
    assert ("_shifted_block" if shifts else "_pairformer_block") in kinds


def test_the_conditioning_is_prepared_once_for_all_layers(make_model, make_batch, step, monkeypatch):
    from megafold.evofusion.conditioned.api import Conditioning
    from megafold.model import fused, replacements
    from megafold.model.optimize import optimize

    model, batch, calls = make_model(**CHECKPOINTED, **DEEP), make_batch(9), []

    def prepare(cond):  # on a CPU nothing reads what is prepared
        calls.append(tuple(cond.shape))
        return Conditioning(cond, *(torch.full_like(cond, torch.nan),) * 2)

    optimize(model, Plan(graphs=False))
    expected = step(model, batch)
    monkeypatch.setattr(fused, "prepare", prepare)
    monkeypatch.setattr(replacements, "BlockGraphs", lambda: BlockGraphs(Emulated()))
    optimize(model, Plan())
    found = step(model, batch)
    # Atom encoder, token transformer and atom decoder, whatever their depth and in the forward alone.
    assert len(calls) == 3
    torch.testing.assert_close(found[0], expected[0])
    for name, gradient in found[1].items():
        torch.testing.assert_close(gradient, expected[1][name], rtol=1e-4, atol=1e-5, msg=name)


def test_on_a_cpu_the_switch_is_listed_and_blocks_stay(make_model, make_batch, step):
    from megafold.model.optimize import optimize

    model, batch = make_model(**CHECKPOINTED), make_batch(7)
    optimize(model, Plan(graphs=False))
    expected = step(model, batch)
    report = optimize(model, Plan())
    assert ("", "graphs: the model is on cpu; blocks run one operator at a time there") in report.not_replaced
    found = step(model, batch)
    assert torch.equal(found[0], expected[0])
    missed = optimize(make_model(), Plan()).not_replaced
    assert [path for path, reason in missed if "without checkpointing" in reason] == [
        *("pairformer", "diffusion_module.token_transformer", "msa_module", "template_embedder")
    ]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("plan", [Plan(), Plan.only("graphs")], ids=["all", "only-graphs"])
@pytest.mark.parametrize("shifts", [False, True], ids=["in-turn", "shifted"])
@pytest.mark.parametrize("dropout", [0.0, 0.25], ids=["no-dropout", "dropout"])
def test_captured_blocks_give_the_same_on_a_gpu(dropout, shifts, plan, make_model, make_batch, step, monkeypatch):
    from megafold.model import recompute
    from megafold.model.optimize import optimize

    monkeypatch.setattr(recompute, "SHIFTS", shifts)
    model = make_model(**CHECKPOINTED, **DEEP, checkpoint_confidence_head=True).cuda()
    batch = {k: v.cuda() for k, v in make_batch(33, confidence=True).items()}
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = dropout
    optimize(model, replace(plan, graphs=False))
    expected = step(model, batch)
    assert optimize(model, plan).replaced["graphs"] == 5
    for _ in range(3):
        found = step(model, batch)
        assert all(not shape.fails for shape in model.pairformer._megafold_graphs._shapes.values())
        torch.testing.assert_close(found[0], expected[0], rtol=1e-4, atol=1e-5)
        for name, gradient in found[1].items():
            torch.testing.assert_close(gradient, expected[1][name], rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_captured_memory_does_not_grow_with_the_number_of_blocks():
    from megafold.metrics.memory import graph_memory

    held = {}
    for depth in (2, 16):
        layers = [[_Block().cuda()] for _ in range(depth)]
        graphs, x = BlockGraphs(), torch.randn(1 << 20, 4, device="cuda", requires_grad=True)
        context, mask = torch.ones(1, 4, device="cuda"), torch.ones(1, 4, dtype=torch.bool, device="cuda")
        before = torch.cuda.memory_allocated() + graph_memory()
        for _ in range(2):
            out = graphs.run_stack(_chained, layers, (x, torch.ones(1 << 20, 1, device="cuda")), (context, 3), mask)
            (out[0].sum() + out[1].sum()).backward()
            del out
        held[depth] = torch.cuda.memory_allocated() + graph_memory() - before
        graphs.release()
    assert 0 < held[16] < 1.2 * held[2]
