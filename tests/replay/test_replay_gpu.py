"""Repeated calls on a GPU: bit for bit what calls as written give, at other addresses, in no more memory."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from megafold.evoflash3d.api import evoflash3d
from megafold.evofusion import cases
from megafold.evofusion.cases import Draw
from megafold.replay import ordinary
from megafold.replay.tape import Tape

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or bool(torch.version.hip), reason="needs an NVIDIA GPU"),
]
Function = Callable[..., torch.Tensor | list[torch.Tensor]]
OPERATORS = {
    # In bf16 of width 128, where kernels for sm_90 run on one, and where they do not.
    "triangle multiplication": lambda d: cases.triangle_multiplication_case(d, 64, keep_operands=None),
    "triangle multiplication, operands made again": lambda d: cases.triangle_multiplication_case(
        d, 64, mix="incoming", masked=True, shared="col"
    ),
    "triangle multiplication, two structures": lambda d: cases.triangle_multiplication_case(d, 33, 32, batch=2),
    "transition": lambda d: cases.transition_case(d, (3, 100)),
    "wide transition": lambda d: cases.transition_case(d, (100,), 801, 1602),
    "projections": lambda d: cases.norm_project_case(d, (1, 64, 64), passes=True),
    "heads": lambda d: cases.norm_project_case(d, (1, 40, 40), count=0, heads=4, norm_bias=False),
    "attention output": lambda d: cases.attention_output_case(d, (1, 40, 40), shared="col"),
    "conditioned transition of atoms": lambda d: cases.conditioned_transition_case(d, (3, 100), 128, 128),
    "conditioned transition of tokens": lambda d: cases.conditioned_transition_case(d, (3, 50), 768, 801),
    "windowed attention": lambda d: cases.windowed_attention_case(d, 100, masked=True),
    "outer product mean": lambda d: cases.outer_product_mean_case(d, 16, 24, masked=True),
    "pair-weighted averaging": lambda d: cases.pair_weighted_averaging_case(d, 24, 40),
    "pair-weighted averaging, narrow heads": lambda d: cases.pair_weighted_averaging_case(d, 24, 40, inner=64),
    "smooth lDDT": lambda d: cases.smooth_lddt_case(d, 100),
}
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])


@pytest.fixture(autouse=True)
def poisoned_memory():
    """Fresh memory is NaN, so that an element that no step writes cannot pass."""
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def repeats(monkeypatch) -> list[Tape]:
    """The tapes that were run, one after the other."""
    ran, call = [], Tape.__call__
    monkeypatch.setattr(Tape, "__call__", lambda self, *given: ran.append(self) or call(self, *given))
    return ran


def everything(function: Function, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Outputs and gradients."""
    leaves = {name: t.detach().clone().requires_grad_(t.is_floating_point()) for name, t in inputs.items()}
    outs = function(**leaves)
    outs = [outs] if isinstance(outs, torch.Tensor) else list(outs)
    grads = [torch.linspace(-1, 1, out.numel(), device=out.device).view(out.shape).to(out.dtype) for out in outs]
    wanted = [leaf for leaf in leaves.values() if leaf.requires_grad]
    return [*outs, *torch.autograd.grad(outs, wanted, grads)]


def same(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    assert not any(t.isnan().any() for t in wanted)
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(found, wanted, strict=True))


def assert_repeats(function: Function, draws: list[dict[str, torch.Tensor]], repeats: list[Tape]) -> None:
    with ordinary():
        wanted = [everything(function, inputs) for inputs in draws]
    assert not repeats
    held = []  # memory that was free when a tape was recorded
    for inputs, values in zip(draws * 3, wanted * 3):
        before = len(repeats)
        assert same(everything(function, inputs), values)
        held.append(torch.empty(1 << 16, device="cuda"))
    assert len(repeats) - before >= 2, "forward and backward"


@DTYPES
@pytest.mark.parametrize("name", OPERATORS)
def test_what_is_repeated_is_what_a_call_gives(name, dtype, repeats):
    drawn = [OPERATORS[name](Draw(dtype, "cuda", seed)) for seed in (0, 1)]
    # Masks and dropout are the first draw's, as a function of the rest.
    assert_repeats(drawn[0].operator, [case.inputs for case in drawn], repeats)


@DTYPES
@pytest.mark.parametrize("few", [False, True], ids=["", "few keys"])
def test_attention_is_repeated(dtype, few, repeats):
    def draw(seed: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(seed)
        keys = 4 if few else 96
        shapes = {"q": (1, 8, 4, 96, 32), "k": (1, 8, 4, keys, 32), "v": (1, 8, 4, keys, 32), "bias": (1, 4, 96, keys)}
        return {name: torch.randn(shape, device="cuda").to(dtype) for name, shape in shapes.items()}

    assert_repeats(evoflash3d, [draw(0), draw(1)], repeats)


@pytest.mark.parametrize(
    "shape", [(1, 9, 4, 384, 384, 32), (1, 400, 4, 512, 512, 32), (2, 3, 4, 200, 200, 64)], ids=str
)
def test_kernels_that_run_beside_one_another_are_repeated(shape, repeats):
    """On Hopper those of the backward do, unless fresh memory is filled between them; no result may be overwritten."""
    torch.use_deterministic_algorithms(False)
    batch, rows, heads, queries, keys, dim = shape
    torch.manual_seed(0)
    tensors = [torch.randn(batch, rows, heads, n, dim, device="cuda").bfloat16() for n in (queries, keys, keys)]
    tensors.append(torch.randn(batch, heads, queries, keys, device="cuda").bfloat16())
    inputs = dict(zip(("q", "k", "v", "bias"), tensors))
    with ordinary():
        wanted = everything(evoflash3d, inputs)
    for _ in range(20):
        assert same(everything(evoflash3d, inputs), wanted)
    assert len(repeats) == 36


def test_a_tape_takes_no_more_memory_than_the_call():
    case = cases.triangle_multiplication_case(Draw(torch.bfloat16, "cuda"), 256)
    leaves = {name: t.detach().requires_grad_() for name, t in case.inputs.items()}

    def peak() -> int:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = case.operator(**leaves)
        torch.autograd.grad(out, list(leaves.values()), torch.ones_like(out))
        return torch.cuda.max_memory_allocated() - before

    with ordinary():
        peak()
        as_written = peak()
    assert max([peak() for _ in range(4)][2:]) <= as_written


def test_a_graph_of_repeated_calls(repeats):
    case = cases.triangle_multiplication_case(Draw(torch.bfloat16, "cuda"), 64, keep_operands=None)
    with ordinary():
        wanted = everything(case.operator, case.inputs)
    for _ in range(2):
        everything(case.operator, case.inputs)
    del repeats[:]
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        found = everything(case.operator, case.inputs)
    assert len(repeats) == 2
    graph.replay()
    assert same(found, wanted)


def test_precision_is_part_of_a_signature(repeats):
    case = cases.norm_project_case(Draw(torch.float32, "cuda"), (1, 40, 40))
    for _ in range(3):
        exact = everything(case.operator, case.inputs)
    assert repeats
    allowed = torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        coarse = [everything(case.operator, case.inputs) for _ in range(3)]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = allowed
    assert same(coarse[2], coarse[0]) and not torch.equal(coarse[2][0], exact[0])


def test_a_call_that_fails_for_want_of_memory_leaves_nothing_behind(repeats):
    case = cases.triangle_multiplication_case(Draw(torch.bfloat16, "cuda"), 1024)
    with torch.no_grad():
        for _ in range(3):
            case.operator(**case.inputs)
        assert repeats
        torch.cuda.synchronize()
        held = torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        most = (held + (300 << 20)) / torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(most)
        try:
            with pytest.raises(torch.OutOfMemoryError):
                case.operator(**case.inputs)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)
        assert torch.cuda.memory_allocated() == held
        with ordinary():
            wanted = case.operator(**case.inputs)
        assert torch.equal(case.operator(**case.inputs), wanted)


def test_repeated_calls_run_on_the_stream_of_their_caller(repeats):
    case = cases.transition_case(Draw(torch.bfloat16, "cuda"), (3, 4000))
    x = case.inputs["x"].clone()
    with ordinary():
        wanted = everything(case.operator, case.inputs)
    for _ in range(2):
        everything(case.operator, case.inputs)
    del repeats[:]
    slow = torch.randn(6000, 6000, device="cuda")
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        case.inputs["x"].zero_()
        for _ in range(20):  # so long that what runs on another stream finds zeros
            slow = slow @ slow * 1e-3
        case.inputs["x"].copy_(x)
        found = everything(case.operator, case.inputs)
    torch.cuda.synchronize()
    assert len(repeats) == 2
    assert same(found, wanted)


def test_compiled_functions_repeat_their_operators(repeats):
    case = cases.attention_output_case(Draw(torch.bfloat16, "cuda"), (1, 24, 40), shared="col")
    with ordinary():
        wanted = everything(case.operator, case.inputs)
    compiled = torch.compile(case.operator, backend="aot_eager", fullgraph=True)
    for _ in range(4):
        assert same(everything(compiled, case.inputs), wanted)
    assert len(repeats) >= 2
