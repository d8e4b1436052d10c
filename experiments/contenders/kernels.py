"""Triangle attention by itself: right numbers first, then forward and forward + backward, eager and as a CUDA graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from experiments.contenders.peers import Attention, find_attention
from experiments.providers import Context
from experiments.record import Metric
from megafold.evoflash3d.reference import eager_attention
from megafold.metrics.memory import MemoryProbe
from megafold.metrics.timing import Timer, summarize
from megafold.testing import check_budget, outputs_and_gradients

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
# Length at which numbers are checked. On a GPU above the 100 up to which cuEquivariance does not use its kernels.
CHECK_LENGTH = {"cpu": 17, "cuda": 128}
MASKED = 0.2
SAMPLE_SECONDS = 0.02
MOST_CALLS = 100
WARMUP_CALLS = 3
MIB = 2**20
TIMES = {
    "forward_time": "eager calls, as in training: what the backward needs is kept",
    "forward_backward_time": "eager calls; gradients of q, k, v and the bias",
    "graph_forward_time": "replay of a CUDA graph",
    "graph_forward_backward_time": "replay of a CUDA graph",
}
PEAK = "peak of torch's allocator above the inputs in forward + backward, no gradient held before"


class WrongNumbers(ArithmeticError):
    """A contender is off by more than the error budget; it is not timed."""


class KernelSession:
    """One contender's attention at one shape, with inputs in its own layout and no padding (mask: keep everything).

    Raises:
        Unsupported: the contender cannot run here.
        WrongNumbers: its output or a gradient is off by more than twice the error of eager PyTorch in the same dtype.
    """

    def __init__(self, context: Context) -> None:
        setting = context.point.setting
        self._device, self._dtype = context.device, DTYPES[setting.dtype]
        self._seed, self._n = setting.seed, setting.size("n_tokens")
        self._rows = setting.size("rows") or self._n
        self._batch, self._heads = setting.size("batch_size"), setting.size("heads")
        self._head_dim = setting.size("head_dim")
        self._attention = find_attention(context.point.contender.provider, context.device, self._n)
        self.notes = [self._attention.note] if self._attention.note else []
        self._errors = self._check()
        self._timer, self._probe = Timer(context.device), MemoryProbe(context.device)
        self._work: dict[str, Callable[[], object]] = {}
        self._calls: dict[str, int] = {}
        self._peaks: list[float] = []
        self._first = True

    def resume(self) -> None:
        """Make inputs on the device, warm up, take the peak memory, and capture the graphs."""
        inputs, mask = self._inputs(self._n, self._rows, self._batch)
        leaves = [tensor.requires_grad_() for tensor in _native(self._attention, inputs).values()]
        mask = _native_mask(self._attention, mask if self._attention.needs_mask else None, self._dtype)
        call = self._attention.call
        cotangent = torch.randn_like(call(*leaves, mask).detach())

        def forward() -> Tensor:
            return call(*leaves, mask)

        def forward_backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(*leaves, mask), leaves, cotangent)

        self._work = {"forward_time": forward, "forward_backward_time": forward_backward}
        for work in list(self._work.values()):
            for _ in range(WARMUP_CALLS):
                work()
        self._peaks.append(self._peak())
        if self._device == "cuda":
            self._capture()
        self._first = False
        for name, work in self._work.items():
            self._calls.setdefault(name, self._calls_a_sample(work))

    def step(self) -> dict[str, float]:
        """Seconds a call, of each kind of call."""
        return {name: self._seconds(work, self._calls[name]) for name, work in self._work.items()}

    def suspend(self) -> None:
        """Free inputs and graphs."""
        self._work = {}
        if self._device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def finish(self, samples: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
        """Times (s), memory (MiB) and the relative errors of the check."""
        metrics = {}
        for name, definition in TIMES.items():
            if name in samples:
                summary = summarize(samples[name])
                text = f"{definition}; mean of {self._calls[name]} calls a sample"
                metrics[name] = Metric(summary.median, "s", summary.p20, summary.p80, summary.n, text)
        metrics["peak_memory"] = Metric(max(self._peaks) / MIB, "MiB", n=len(self._peaks), definition=PEAK)
        for name, (error, length) in self._errors.items():
            text = f"||x - exact|| / ||exact|| at N = {length}, exact in float64"
            metrics[f"error_{name}"] = Metric(error, "relative", definition=text)
        return metrics

    def _inputs(self, n: int, rows: int, batch: int) -> tuple[dict[str, Tensor], Tensor]:
        generator = torch.Generator().manual_seed(self._seed)
        shape = (batch, rows, self._heads, n, self._head_dim)
        inputs = {name: torch.randn(shape, generator=generator) for name in ("q", "k", "v")}
        inputs["bias"] = torch.randn(batch, self._heads, n, n, generator=generator)
        mask = torch.ones(batch, rows, n, dtype=torch.bool)
        return {name: t.to(self._device, self._dtype) for name, t in inputs.items()}, mask.to(self._device)

    def _check(self) -> dict[str, tuple[float, int]]:
        n = CHECK_LENGTH[self._device]
        inputs, mask = self._inputs(n, n, 1)
        generator = torch.Generator().manual_seed(self._seed + 1)
        mask &= (torch.rand(mask.shape, generator=generator) >= MASKED).to(self._device)
        mask[..., 0] = True  # what a row without any key gives differs between contenders
        cotangent = torch.randn(inputs["q"].shape, generator=generator).to(self._device)
        attention, order = self._attention, self._attention.order

        def ours(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
            native = _native(attention, {"q": q, "k": k, "v": v, "bias": bias})
            return attention.call(*native.values(), _native_mask(attention, mask, self._dtype)).permute(order)

        doubles = {name: tensor.double() for name, tensor in inputs.items()}
        exact = outputs_and_gradients(eager_attention, doubles, cotangent, mask=mask)
        eager = outputs_and_gradients(eager_attention, inputs, cotangent, mask=mask)
        found = outputs_and_gradients(ours, inputs, cotangent)
        results = check_budget(found, eager, exact)
        wrong = [f"{result.name}: {result.detail}" for result in results if not result.ok]
        if wrong:
            raise WrongNumbers(f"not timed, wrong at N = {n}: {'; '.join(wrong)}")
        return {
            name: (((found[name].double() - truth).norm() / truth.norm()).item(), n) for name, truth in exact.items()
        }

    def _capture(self) -> None:
        pool = torch.cuda.graph_pool_handle()  # one for both: they never replay at the same time
        for name in ("forward_time", "forward_backward_time"):
            graph, work = torch.cuda.CUDAGraph(), self._work[name]
            try:
                stream = torch.cuda.Stream()
                stream.wait_stream(torch.cuda.current_stream())
                with torch.cuda.stream(stream):
                    work()
                torch.cuda.current_stream().wait_stream(stream)
                with torch.cuda.graph(graph, pool=pool):
                    work()
            except RuntimeError as error:
                if self._first:
                    self.notes.append(f"graph_{name}: not captured: {str(error).strip().splitlines()[0]}")
                continue
            self._work[f"graph_{name}"] = graph.replay

    def _calls_a_sample(self, work: Callable[[], object]) -> int:
        return max(1, min(MOST_CALLS, int(SAMPLE_SECONDS / max(1e-6, self._seconds(work, 1)))))

    def _seconds(self, work: Callable[[], object], calls: int) -> float:
        self._timer.synchronize()
        start = self._timer.mark()
        for _ in range(calls):
            work()
        return self._timer.seconds(start, self._timer.mark()) / calls

    def _peak(self) -> float:
        """Bytes above what is held before a forward + backward: of torch's allocator on the device."""
        work = self._work["forward_backward_time"]
        if self._device == "cpu":
            return _profiled_peak(work)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        self._probe.reset()
        work()
        return self._probe.peak().allocated - before


def _profiled_peak(work: Callable[[], object]) -> float:
    """Peak of what torch's CPU allocator holds for `work`: resident memory is too coarse for one kernel."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profiler:
        work()
    events = [event for event in profiler.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = itertools.accumulate(event.nbytes() for event in sorted(events, key=lambda event: event.start_ns()))
    return float(max(held, default=0))


def _native(attention: Attention, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs in the contender's layout: contiguous, detached only where nothing has to be moved."""
    found = {name: inputs[name].permute(attention.order).contiguous() for name in ("q", "k", "v")}
    found["bias"] = inputs["bias"][:, None].contiguous() if attention.wide_bias else inputs["bias"]
    return found


def _native_mask(attention: Attention, mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    return None if mask is None else attention.mask(mask, dtype)
