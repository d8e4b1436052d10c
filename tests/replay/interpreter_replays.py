"""Repeat calls of the operators with kernels in Triton's interpreter; print, as JSON, what each case came to.

A script and not a test, for the reason that tests/evofusion/interpreter_cases.py has. Where a compiled kernel would be
launched with addresses, the interpreter is given the memory at these addresses.
"""

import ctypes
import inspect
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"

import torch
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime.interpreter import InterpretedFunction

from megafold import triton_support
from megafold.evoflash3d.api import evoflash3d
from megafold.evofusion import cases
from megafold.evofusion.msa import outer_product
from megafold.evofusion.transition import launch as transition_launch
from megafold.replay import cache, ordinary, recorder
from megafold.replay.tape import Tape

triton_support.runs_kernels = lambda device: True
triton_support.architecture = lambda index=None: "sm_80"
cache.serves = lambda tensor: True
recorder.runner_of = lambda compiled, grid: compiled[grid]
# Several chunks.
outer_product.CHUNK_ELEMENTS = 2000
transition_launch.CHUNK_ELEMENTS = 3 * 64 * 20

CASES = {
    "triangle multiplication, outgoing": lambda d: cases.triangle_multiplication_case(
        d, 3, 16, masked=True, shared="row"
    ),
    "triangle multiplication, kept operands": lambda d: cases.triangle_multiplication_case(
        d, 3, 16, batch=2, mix="incoming", keep_operands=True, residual=False
    ),
    "transition in chunks": lambda d: cases.transition_case(d, (3, 17), 32),
    "wide transition": lambda d: cases.transition_case(d, (2, 9), 21, 42),
    "projections and heads": lambda d: cases.norm_project_case(d, (2, 5, 7), 32, outputs=48, count=3, passes=True),
    "heads alone": lambda d: cases.norm_project_case(d, (1, 5, 7), 16, count=0, heads=16, norm_bias=False),
    "attention output": lambda d: cases.attention_output_case(d, (1, 3, 18), 64, 16, shared="col", residual=False),
    "gate of wide rows": lambda d: cases.gated_case(d, (3, 5), 600),
    "conditioned transition": lambda d: cases.conditioned_transition_case(d, (2, 9), 32, 16),
    "conditioned transition, odd conditioning": lambda d: cases.conditioned_transition_case(d, (2, 9), 32, 33),
    "windowed attention": lambda d: cases.windowed_attention_case(d, 23, heads=1, dim=24, window=9, masked=True),
    "outer product mean in chunks": lambda d: cases.outer_product_mean_case(
        d, 6, 5, width=16, hidden=16, outputs=24, masked=True
    ),
    "pair-weighted averaging": lambda d: cases.pair_weighted_averaging_case(
        d, 6, 5, width=16, pair_width=32, heads=2, inner=32
    ),
    "pair-weighted averaging, narrow heads": lambda d: cases.pair_weighted_averaging_case(
        d, 4, 5, width=16, pair_width=16, heads=2, inner=16
    ),
    "pair-weighted averaging, two structures, no mask, no dropout": lambda d: cases.pair_weighted_averaging_case(
        d, 19, 3, width=16, pair_width=16, heads=3, inner=48, batch=2, masked=False, shared=None
    ),
    "pair-weighted averaging, column dropout": lambda d: cases.pair_weighted_averaging_case(
        d, 19, 3, width=32, pair_width=16, heads=3, inner=48, shared="col", residual=False
    ),
    "smooth lDDT": lambda d: cases.smooth_lddt_case(d, 17),
}


ATTENTION = {"attention": True, "attention, strided heads": False}


class Launched:
    """What a compiled kernel is to a recorder: told of addresses, it runs the interpreter on what lies there."""

    def __init__(self, kernel: InterpretedFunction, given: tuple, named: dict) -> None:
        self._kernel = kernel
        bound = inspect.signature(kernel.fn).bind(*given, **{k: v for k, v in named.items() if k in kernel.arg_names})
        bound.apply_defaults()
        self._like = [_seen(value) for value in bound.arguments.values()]

    def __getitem__(self, grid: tuple[int, ...]):
        def run(*values: object, stream: None) -> None:
            assert not any(isinstance(value, torch.Tensor) for value in values)
            given = [value if like is None else _memory(value, *like) for value, like in zip(values, self._like)]
            interpret(self._kernel, *given, grid=grid, warmup=False)

        return run


def _seen(value: object) -> tuple[int, torch.dtype] | None:
    """Bytes from a tensor's first element to the end of its storage, and its dtype; None for other values."""
    if not isinstance(value, torch.Tensor):
        return None
    return value.untyped_storage().nbytes() - value.storage_offset() * value.element_size(), value.dtype


def _memory(address: int, size: int, dtype: torch.dtype) -> torch.Tensor:
    if not address:
        return torch.empty(0, dtype=dtype)
    return torch.frombuffer((ctypes.c_byte * size).from_address(address), dtype=dtype)


interpret = InterpretedFunction.run


def run(kernel: InterpretedFunction, *given: object, grid: tuple[int, ...], warmup: bool, **named: object) -> Launched:
    """As `InterpretedFunction.run`, out of sight of the recorder, as a launch is."""
    launched = Launched(kernel, given, named)
    with _disable_current_modes():
        interpret(kernel, *given, grid=grid, warmup=warmup, **named)
    return launched


InterpretedFunction.run = run


def everything(function, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    """Outputs and gradients."""
    leaves = {n: t.detach().clone(memory_format=torch.preserve_format).requires_grad_() for n, t in inputs.items()}
    outs = function(**leaves)
    outs = [outs] if isinstance(outs, torch.Tensor) else list(outs)
    grads = [torch.linspace(-1, 1, out.numel()).view(out.shape).to(out.dtype) for out in outs]
    return [*outs, *torch.autograd.grad(outs, list(leaves.values()), grads)]


def repeated(function, draws: list[dict[str, torch.Tensor]]) -> dict:
    """How many tapes ran in the third and fourth call, what was wrong, and why there are calls without a tape."""
    with ordinary():
        wanted = [everything(function, inputs) for inputs in draws]
    ran, wrong, held = [], [], []
    call, tape = Tape.__call__, recorder.Recorder.tape
    problems: list[str] = []
    Tape.__call__ = lambda self, *given: ran.append(self) or call(self, *given)
    recorder.Recorder.tape = lambda self, found: [tape(self, found), self.problem and problems.append(self.problem)][0]
    for number in (0, 0, 1, 0):
        del ran[:]
        found = everything(function, draws[number])
        held.append((torch.empty(1000), found))  # other memory for the next call
        for at, (a, b) in enumerate(zip(found, wanted[number], strict=True)):
            if not torch.equal(a, b) or a.stride() != b.stride() or a.isnan().any():
                wrong.append(f"result {at} of call {len(held)}")
    Tape.__call__, recorder.Recorder.tape = call, tape
    return {"tapes": len(ran), "wrong": wrong, "problems": problems}


def attention(seed: int, biased: bool) -> dict[str, torch.Tensor]:
    """With a bias; or without one, and heads whose columns do not lie side by side."""
    draw = torch.Generator().manual_seed(seed)
    inputs = {name: torch.randn(1, 2, 2, 20, 16, generator=draw).half() for name in "qkv"}
    if biased:
        return inputs | {"bias": torch.randn(1, 2, 20, 20, generator=draw).half()}
    return {name: tensor.mT.contiguous().mT for name, tensor in inputs.items()}


if __name__ == "__main__":
    torch.set_num_threads(1)
    # What no step writes shows up as NaN.
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)
    found = {}
    for name, make in CASES.items():
        dtype = torch.float32 if "lDDT" in name else torch.float16
        drawn = [make(cases.Draw(dtype, "cpu", seed)) for seed in (0, 1)]
        # Masks and dropout are the first draw's, as a function of the rest.
        found[name] = repeated(drawn[0].operator, [case.inputs for case in drawn])
    for name, biased in ATTENTION.items():
        found[name] = repeated(evoflash3d, [attention(seed, biased) for seed in (0, 1)])
    json.dump(found, sys.stdout)
