"""What all kernel contenders share: times of forward and forward + backward, eager and as a CUDA graph, peak memory."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from experiments.contenders.floors import Floor
from experiments.providers import Context
from experiments.record import Metric
from megafold.metrics.memory import MemoryProbe, graph_memory
from megafold.metrics.timing import Timer, summarize
from megafold.testing import CheckResult, relative_error

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SAMPLE_SECONDS = 0.02
MOST_CALLS = 100
WARMUP_CALLS = 3
MIB = 2**20
TIMES = {
    "forward_time": "eager calls, as in training: what the backward needs is kept",
    "forward_backward_time": "eager calls; gradients of every input",
    "graph_forward_time": "replay of a CUDA graph",
    "graph_forward_backward_time": "replay of a CUDA graph",
}
PEAK = "peak of torch's allocator above the inputs in forward + backward, no gradient held before"


class WrongNumbers(ArithmeticError):
    """A contender is off by more than the error budget; it is not timed."""


class TimedSession:
    """One contender's function at one shape; a subclass says which, and has checked its numbers before.

    Attributes:
        errors: by quantity, the relative error of the check. checked: at which size, for the record.
        floor: what no implementation can beat, or None.
    """

    errors: Mapping[str, float]
    checked: str
    floor: Floor | None = None

    def __init__(self, context: Context) -> None:
        setting = context.point.setting
        self._device, self._dtype, self._seed = context.device, DTYPES[setting.dtype], setting.seed
        self.notes: list[str] = []
        self._timer, self._probe = Timer(context.device), MemoryProbe(context.device)
        self._work: dict[str, Callable[[], object]] = {}
        self._calls: dict[str, int] = {}
        self._peaks: list[float] = []
        self._first = True

    def _prepare(self) -> tuple[Callable[[], Tensor | Sequence[Tensor]], Sequence[Tensor]]:
        """The function without arguments, and the leaves that gradients are taken for, on the device."""
        raise NotImplementedError

    def resume(self) -> None:
        """Make inputs on the device, warm up, take the peak memory, and capture the graphs."""
        call, leaves = self._prepare()
        cotangents = [torch.randn_like(out.detach()) for out in _several(call())]

        def forward_backward() -> tuple[Tensor, ...]:
            return torch.autograd.grad(_several(call()), leaves, cotangents)

        self._work = {"forward_time": call, "forward_backward_time": forward_backward}
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
        """Times (s), memory (MiB), the relative errors of the check, and the floor."""
        metrics = {}
        for name, definition in TIMES.items():
            if name in samples:
                summary = summarize(samples[name])
                text = f"{definition}; mean of {self._calls[name]} calls a sample"
                metrics[name] = Metric(summary.median, "s", summary.p20, summary.p80, summary.n, text)
        metrics["peak_memory"] = Metric(max(self._peaks) / MIB, "MiB", n=len(self._peaks), definition=PEAK)
        for name, error in self.errors.items():
            text = f"||x - exact|| / ||exact|| at {self.checked}, exact in float64"
            metrics[f"error_{name}"] = Metric(error, "relative", definition=text)
        if self.floor is not None:
            metrics |= self.floor.metrics()
        return metrics

    def _accept(self, results: Sequence[CheckResult]) -> None:
        """Raise WrongNumbers unless the error budget holds."""
        wrong = [f"{result.name}: {result.detail}" for result in results if not result.ok]
        if wrong:
            raise WrongNumbers(f"not timed, wrong at {self.checked}: {'; '.join(wrong)}")

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
        # The peak counts what graphs hold; those of an earlier visit still hold their libraries' workspaces.
        before = torch.cuda.memory_allocated() + graph_memory()
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


def relative_errors(found: Mapping[str, Tensor], exact: Mapping[str, Tensor]) -> dict[str, float]:
    """By name, ||found - exact|| / ||exact||."""
    return {name: relative_error(found[name], truth) for name, truth in exact.items()}


def _several(outputs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)
