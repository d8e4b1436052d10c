"""Recording and repeating, without Triton: kernels here are functions of addresses, as compiled ones are."""

from __future__ import annotations

import ast
import ctypes
import threading
import weakref
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

import megafold
from megafold.replay import cache, launch_kernel, note, ordinary, recorder, replayed


def floats(address: int, count: int) -> np.ndarray:
    return np.ctypeslib.as_array((ctypes.c_float * count).from_address(address))


class Kernel:
    """Looks to `launch_kernel` as a kernel of Triton's does."""

    def __init__(self, function) -> None:
        self.fn, self.launches = function, []
        self.arg_names = list(function.__code__.co_varnames[: function.__code__.co_argcount])

    def __getitem__(self, grid):
        def run(*values, **named):
            options = {name: named.pop(name) for name in ("num_warps",) if name in named}
            assert not options or options == {"num_warps": 4}
            values = [*values, *(named[name] for name in self.arg_names[len(values) :] if name in named)]
            self.fn(*(value.data_ptr() if isinstance(value, Tensor) else value for value in values))
            return Compiled(self)

        return run


@dataclass
class Compiled:
    kernel: Kernel

    def __getitem__(self, grid):
        def run(*values, stream):
            assert stream is None and not any(isinstance(value, Tensor) for value in values)
            self.kernel.launches.append(grid)
            self.kernel.fn(*values)

        return run


@Kernel
def scale(x, out, count, FACTOR=3.0):
    floats(out, count)[:] = FACTOR * floats(x, count)


@Kernel
def add_rows(of, out, count):
    """of: a descriptor."""
    assert of.shape == [count]
    floats(out, count)[:] += floats(of.base.data_ptr(), count)


class Descriptor:
    def __init__(self, base: Tensor) -> None:
        self.base, self.shape, self.block_shape = base, [base.numel()], [4]


@pytest.fixture(autouse=True)
def on_a_cpu(monkeypatch):
    monkeypatch.setattr(cache, "serves", lambda tensor: True)
    monkeypatch.setattr(recorder, "runner_of", lambda compiled, grid: compiled[(*grid, 1, 1)[:3]])
    scale.launches.clear()


class Counted:
    """A function that counts how often its body runs, and what tapes it has."""

    def __init__(self, function) -> None:
        self.runs = 0
        self._function = function
        self.call = replayed(self._body)

    def _body(self, *arguments):
        self.runs += 1
        return self._function(*arguments)

    def __call__(self, *arguments):
        return self.call(*arguments)


def many_ways(x: Tensor, w: Tensor | None, factor: float) -> tuple[Tensor | None, ...]:
    """Views, allocations, kernels at offsets, a descriptor, an operator of PyTorch's, and a call past it."""
    rows, width = x.shape
    both = torch.empty(2 * rows, width)
    upper, lower = both.chunk(2)
    launch_kernel(scale, (rows, 2), x, upper, x.numel(), num_warps=4)
    launch_kernel(scale, (rows,), x, lower, x.numel(), FACTOR=factor)
    launch_kernel(add_rows, (1,), Descriptor(upper[1:].flatten()), lower[1:], (rows - 1) * width)
    product = both.mT @ both
    doubled = product.new_empty(product.shape)

    def double(at: int, to: int) -> None:
        floats(to, product.numel())[:] = 2 * floats(at, product.numel())

    double(product.data_ptr(), doubled.data_ptr())
    note(double, product, doubled)
    # Two numbers at once, as a copy of 8 bytes moves them.
    pairs = both.view(torch.float64).t().contiguous()
    doubled[0].add_(1.0)
    return lower, doubled, None if w is None else w @ lower, pairs, both.new_empty((0, width))


def same(found, wanted) -> bool:
    for a, b in zip(found, wanted, strict=True):
        assert (a is None) == (b is None)
        assert a is None or (torch.equal(a, b) and a.stride() == b.stride() and a.dtype == b.dtype)
    return True


@pytest.mark.parametrize("weighted", [False, True], ids=["", "two tensors"])
def test_the_third_call_repeats_the_second(weighted):
    function = Counted(many_ways)
    held = []
    for _ in range(5):
        x, w = torch.randn(5, 6), torch.randn(3, 5) if weighted else None
        before = function.runs
        found = function(x, w, 0.5)
        assert same(found, many_ways(x, w, 0.5))
        held += [x, w, found]
    assert function.runs == 2 and before == 2
    assert scale.launches == [(5, 2, 1), (5, 1, 1)] * 3
    with ordinary():
        function(x, w, 0.5)
    assert function.runs == 3


def test_what_else_a_signature_holds():
    function = Counted(many_ways)
    plain, strided = torch.randn(4, 4), torch.randn(4, 8)[:, :4]
    beside = torch.randn(17)[1:].view(4, 4)  # not at a whole 16 bytes
    assert (plain.data_ptr() % 16, beside.data_ptr() % 16) == (0, 4)
    calls = [(plain, None, 0.5), (plain, None, 2.0), (plain, plain, 0.5), (plain, torch.randn(4, 4), 0.5)]
    calls += [(beside, None, 0.5), (torch.randn(6, 4), None, 0.5)]
    for number, call in enumerate(calls):
        for _ in range(4):
            assert same(function(*call), many_ways(*call))
        assert function.runs == 2 * (number + 1)
    strides = Counted(lambda x: [x @ x.mT, x.contiguous() + 1])
    for tensor in (plain, strided, plain, strided, plain, strided):
        assert same(strides(tensor), [tensor @ tensor.mT, tensor.contiguous() + 1])
    assert strides.runs == 4
    dtypes = Counted(lambda x, dtype: x.to(dtype))
    for dtype in (torch.float64, torch.float16):
        for _ in range(3):
            assert dtypes(plain, dtype).dtype == dtype
    assert dtypes.runs == 4


def test_one_tensor_comes_back_as_one():
    function = Counted(lambda x: x + 1)
    for _ in range(3):
        assert torch.equal(function(torch.ones(3)), torch.full((3,), 2.0))
    assert function.runs == 2


@pytest.mark.parametrize(
    "name, body",
    [
        (
            "aten._local_scalar_dense.default tells the host something of a tensor",
            lambda x, y: (x * (x.sum().item() + 1) + y,),
        ),
        ("a tensor from elsewhere", lambda x, y: (x + ELSEWHERE + y,)),
        ("a result is an argument", lambda x, y: (x + y, x.t())),
        ("a kernel's argument of type tuple", lambda x, y: (with_a_tuple(x, y),)),
    ],
)
def test_what_cannot_be_repeated_runs_as_written(name, body, monkeypatch):
    problems, tape = [], recorder.Recorder.tape
    monkeypatch.setattr(
        recorder.Recorder, "tape", lambda self, found: [tape(self, found), problems.append(self.problem)][0]
    )
    function = Counted(body)
    for call in range(8):
        x, y = torch.randn(3, 3), torch.randn(3, 3)
        ELSEWHERE.fill_(float(call))
        assert same(function(x, y), body(x, y))
    assert function.runs == 8
    # Tried a few times: arguments may lie in each other in one call alone.
    assert problems == [name] * cache.TRIES


ELSEWHERE = torch.zeros(3, 3)


@Kernel
def add_two(pair, out, count):
    floats(out, count)[:] = sum(floats(x.data_ptr(), count) for x in pair)


def with_a_tuple(x: Tensor, y: Tensor) -> Tensor:
    out = torch.empty(x.shape)
    launch_kernel(add_two, (1,), (x, y), out, x.numel())
    return out


def test_a_kernel_that_is_not_compiled_is_not_repeated(monkeypatch):
    monkeypatch.setattr(recorder, "runner_of", lambda compiled, grid: None)
    function = Counted(many_ways)
    for _ in range(4):
        x = torch.randn(5, 6)
        assert same(function(x, None, 0.5), many_ways(x, None, 0.5))
    assert function.runs == 4 and not scale.launches


def test_arguments_that_lie_in_each_other():
    def body(x: Tensor, y: Tensor) -> Tensor:
        out = torch.empty(2, 4)
        launch_kernel(scale, (1,), x[1:], out, 8)
        return out + y[:2]

    function, whole = Counted(body), torch.randn(4, 4)
    for _ in range(2):  # the second is recorded, but in vain
        assert torch.equal(function(whole[:3], whole[1:]), body(whole[:3], whole[1:]))
    for _ in range(2):  # apart, with the same shapes: recorded, repeated
        x, y = torch.randn(3, 4), torch.randn(3, 4)
        assert torch.equal(function(x, y), body(x, y))
    assert function.runs == 3
    for _ in range(2):  # a tape of two that are apart serves two that are not
        assert torch.equal(function(whole[:3], whole[1:]), body(whole[:3], whole[1:]))
    assert function.runs == 3


@pytest.mark.parametrize("holds", [False, True], ids=["let go", "held"])
def test_a_buffer_is_let_go_where_the_operator_lets_go_of_it(monkeypatch, holds):
    """Kernels that run beside one another count on memory that is held."""

    def body(x: Tensor) -> Tensor:
        first, second, third = torch.empty(6), torch.empty(6), torch.empty(6)
        launch_kernel(scale, (1,), x, first, 6)
        launch_kernel(scale, (1,), first, second, 6)
        if not holds:
            del first
        launch_kernel(scale, (1,), second, third, 6)
        return third

    function = Counted(body)
    for _ in range(2):
        function(torch.ones(6))
    made, empty_strided, alive = [], torch.empty_strided, []

    def spied(*given, **named):
        tensor = empty_strided(*given, **named)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(torch, "empty_strided", spied)
    run = scale.fn
    monkeypatch.setattr(
        scale, "fn", lambda *values: [run(*values), alive.append([tensor() is not None for tensor in made])]
    )
    out = function(torch.ones(6))
    assert torch.equal(out, torch.full((6,), 27.0)) and function.runs == 2
    assert alive == [[True, True, True], [True, True, True], [holds, True, True]]
    assert [tensor() is not None for tensor in made] == [False, False, True]


def test_a_call_that_fails_is_not_kept():
    failing = [False]

    def body(x: Tensor) -> Tensor:
        out = torch.empty(6)
        launch_kernel(scale, (1,), x, out, 6)
        if failing[0]:
            raise RuntimeError("out of memory")
        return out

    function = Counted(body)
    function(torch.ones(6))
    failing[0] = True
    with pytest.raises(RuntimeError, match="out of memory"):
        function(torch.ones(6))
    assert recorder.recording() is None
    for _ in range(2 * cache.TRIES):
        with pytest.raises(RuntimeError, match="out of memory"):
            function(torch.ones(6))
    failing[0] = False
    runs = function.runs
    for _ in range(3):
        assert torch.equal(function(torch.ones(6)), torch.full((6,), 3.0))
    assert function.runs == runs + 1


def test_the_oldest_tapes_go_first(monkeypatch):
    monkeypatch.setattr(cache, "MOST", 2)
    function = Counted(lambda x: x * 2)
    for length in (3, 4, 5):
        for _ in range(3):
            function(torch.ones(length))
    assert function.runs == 6
    function(torch.ones(5))
    assert function.runs == 6
    function(torch.ones(3))
    assert function.runs == 7
    for length in range(10, 20):  # seen once each: they do not drive out a tape
        function(torch.ones(length))
        function(torch.ones(5))
    assert function.runs == 17


def test_a_call_under_autocast_is_another_one():
    """PyTorch's products inside an operator follow autocast, and what is recorded holds their dtype."""

    def body(x: Tensor) -> Tensor:
        product = x @ x
        return product.float() + product.element_size()

    function = Counted(body)
    x = torch.randn(4, 4)
    for _ in range(3):
        for enabled in (False, True):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                assert torch.equal(function(x), body(x))
    assert function.runs == 4


def test_tensors_without_elements_are_nobodys_memory():
    """All of them have the address 0, and those that are there for their shape alone, too."""

    def body(x: Tensor, nothing: Tensor) -> tuple[Tensor, ...]:
        first = x.new_empty(0)
        strides = torch.empty_like(x, device="meta").stride()
        second, out = x.new_empty((2, 0), dtype=torch.float64), x.new_empty((4, 4))
        launch_kernel(scale, (1,), x, out, 16)
        joined = torch.cat((nothing, x.flatten()))
        del second
        return first, out.as_strided((4, 4), strides), joined, nothing @ first, x.new_empty((0, 3))

    function = Counted(body)
    for _ in range(4):
        x, nothing = torch.randn(4, 4), torch.empty(0)
        found = function(x, nothing)
        assert same(found, body(x, nothing))
        assert found[0] is not found[4] and found[0] is not nothing
    assert function.runs == 2


def test_a_view_of_larger_elements_depends_on_where_a_storage_begins():
    function = Counted(lambda x: x.view(torch.float64).clone())
    memory = np.arange(80, dtype=np.float32)
    whole = -memory.ctypes.data % 16 // 4
    plain = torch.from_numpy(memory[whole:])[:32]
    for _ in range(3):
        assert torch.equal(function(plain).view(torch.float32), plain)
    assert function.runs == 2
    # As well at a whole 16 bytes, but not so many doubles from where its storage begins.
    shifted = torch.from_numpy(memory[whole + 1 :])[3:35]
    assert plain.data_ptr() % 16 == shifted.data_ptr() % 16 == 0
    with pytest.raises(RuntimeError, match="storage_offset"):
        function(shifted)


def test_what_a_recorder_does_not_understand_is_no_error(monkeypatch):
    problems, tape = [], recorder.Recorder.tape
    monkeypatch.setattr(
        recorder.Recorder, "tape", lambda self, found: [tape(self, found), problems.append(self.problem)][0]
    )
    function = Counted(lambda x: (x.to_sparse() * 2).to_dense())
    for _ in range(3):
        assert torch.equal(function(torch.eye(3)), 2 * torch.eye(3))
    assert function.runs == 3 and all(problems) and len(problems) == 2


def test_nothing_of_a_call_stays_alive():
    function, gone = Counted(many_ways), []
    for _ in range(3):
        x, w = torch.randn(5, 6), torch.randn(3, 5)
        found = function(x, w, 0.5)
        gone += [weakref.ref(tensor) for tensor in (x, w, *found)]
        del x, w, found
    assert function.runs == 2 and not any(tensor() is not None for tensor in gone)


def test_an_operator_inside_is_a_step_like_others():
    inner = Counted(lambda x: many_ways(x, None, 2.0)[1])
    library = torch.library.Library("replay_test", "FRAGMENT")
    library.define("inner(Tensor x) -> Tensor")
    library.impl("inner", inner.call, "CompositeExplicitAutograd")

    def body(x: Tensor) -> Tensor:
        found = torch.ops.replay_test.inner(x)
        out = torch.empty(found.shape)
        launch_kernel(scale, (1,), found, out, out.numel())
        return out

    function = Counted(body)
    for _ in range(5):
        x = torch.randn(5, 6)
        assert torch.equal(function(x), 3 * many_ways(x, None, 2.0)[1])
    assert function.runs == 2 and inner.runs == 2


def test_threads_repeat_one_tape_at_once():
    function = Counted(many_ways)
    for _ in range(2):
        function(torch.randn(5, 6), None, 0.5)
    wrong = []

    def work(seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        for _ in range(200):
            x = torch.randn(5, 6, generator=draw)
            try:
                same(function(x, None, 0.5), many_ways(x, None, 0.5))
            except BaseException as error:
                wrong.append(error)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong and function.runs == 2


def test_kernels_are_launched_in_one_way():
    """A launch that `launch_kernel` does not see would be missing from tapes."""
    package = Path(megafold.__file__).parent
    for path in package.rglob("*.py"):
        called = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        launches = [node for node in called if isinstance(node.func, ast.Subscript)]
        if path.relative_to(package).parts[0] not in ("evoflash3d", "evofusion", "replay"):
            launches = [node for node in launches if "kernel" in ast.unparse(node.func.value).lower()]
        launches += [node for node in called if ast.unparse(node.func).endswith("kernel.run")]
        allowed = 1 if path.relative_to(package).as_posix() == "replay/recorder.py" else 0
        assert len(launches) == allowed, [(path, node.lineno) for node in launches]
