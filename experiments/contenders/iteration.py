"""One training step, the trainer's own, of a model of alphafold3-pytorch: stock, compiled or with MegaFold's plan."""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from experiments.contenders.examples import Batch, examples
from experiments.providers import Context, Unsupported
from experiments.record import Metric
from experiments.spec import Contender, Setting
from megafold.metrics.activity import Activity, alignment_failures, count_activity
from megafold.metrics.flops import HFU_DEFINITION, MFU_DEFINITION, IterationFlops, iteration_flops, mfu
from megafold.metrics.memory import MemoryProbe
from megafold.metrics.peaks import peak_flops
from megafold.metrics.timing import summarize
from megafold.model.build import build_model
from megafold.model.graphs import release_graphs
from megafold.model.plan import Plan
from megafold.model.presets import preset
from megafold.train.synthetic import synthetic_batch
from megafold.train.trainer import Trainer
from megafold.train.workload import arrange, rollouts

GIB = 2**30
SECONDS_TO_PROFILE = 3.0
# From so many contenders on, a short step of all at once is cheaper than what it saves each of them later.
MANY_CONTENDERS = 4
SHORT = {"n_tokens": 64, "msa_depth": 64}
TIMES = {
    "iteration_time": "forward, backward, gradient clipping and AdamW update",
    "forward_time": "",
    "backward_time": "with what checkpointing recomputes",
    "optimizer_time": "gradient clipping, check for finite numbers, AdamW update",
    "loader_wait": "until the loader hands over the batch",
}
CPU_PEAK = "peak resident memory of the process, libraries included"
CPU_ABOVE = "peak resident memory less what was resident before the model was made, less persistent_memory"
FAILURES = "alignments of the loss that the model gave up in a step, at most"
COUNTS = {
    "launches": "kernels that the host launched in a profiled step, those inside graphs left out",
    "graphs": "graphs that the host launched in a profiled step",
    "waits": "calls of the runtime in a profiled step that wait for the device",
}
NAMED_WORKLOADS = {
    "full_one_rollout": "one rollout of a structure, where the stock model rolls out one an augmentation",
    "as_published": "confidence labels at every tenth step, one to four passes of the trunk",
}
PERSISTENT = "weights, buffers, gradients and optimizer state"


class IterationSession:
    """A model in a `Trainer`. Each visit starts from the same example and the same random state.

    The model is made on the device at the first visit, and gone after the last: before and after, a contender holds
    nothing that another could need.

    Args:
        context: the point, cache and device.
        prepare: changes the stock model in place, once; returns what the FLOP count needs to know of it, as keyword
            arguments of `iteration_flops`.

    Raises:
        Unsupported: for what this version does not measure: several devices, half precision on a CPU.
    """

    def __init__(self, context: Context, prepare: Callable[[torch.nn.Module, str], Mapping[str, bool]] | None = None):
        self._setting = setting = context.point.setting
        _check_supported(setting, context.point.contender, context.device)
        self._device, self._prepare = context.device, prepare
        self._probe = MemoryProbe(context.device)
        self._trainer: Trainer | None = None
        self._flags: Mapping[str, bool] = {}
        self._examples, self.notes = examples(setting, context.cache, context.device)
        self._batches: Iterator[Batch] = iter(())
        self._visits, self._step, self._seconds = 0, 0, 0.0
        self._before = self._parameters = self._held = self._reserved = 0
        self._profiles = context.device != "cpu"
        self._activity: Activity | None = None
        if setting.workload == "as_published" or rollouts(setting.workload):
            self.notes = [*self.notes, f"workload {setting.workload}: {NAMED_WORKLOADS[setting.workload]}"]
        if context.device != "cpu":  # makes the driver's context now, beside other contenders that are set up
            torch.cuda.synchronize()
        if loads_kernels(context):
            self._load_kernels()

    def _load_kernels(self) -> None:
        """A step on a short structure, beside those of all contenders: libraries and kernels are loaded once a process.

        Nothing is kept of it, and what fails here may still be measured: there is less room and another length.
        """
        setting = self._setting
        sizes = {**dict(setting.shape), **SHORT}
        batch = synthetic_batch(
            sizes["n_tokens"],
            atoms_per_token=sizes["atoms_per_token"],
            msa_depth=min(sizes["msa_depth"], setting.size("msa_depth")),
            templates=sizes["templates"],
            workload=setting.workload,
            seed=setting.seed,
            model_kwargs=preset(setting.model),
        )
        try:
            self._build().step(arrange(batch, setting.workload, 0, setting.seed))
        except Exception as error:
            print(f"no short step: {type(error).__name__}: {error}", flush=True)
        gc.collect()
        self._empty_cache()

    def resume(self) -> None:
        """Weights and optimizer state onto the device, random state and examples from the start."""
        if self._trainer is None:
            self._trainer = self._build()
        self._trainer.onload()
        torch.manual_seed(self._setting.seed)
        self._step, self._batches = 0, self._examples()

    def _build(self) -> Trainer:
        setting = self._setting
        import alphafold3_pytorch  # noqa: F401 (what it makes when it is imported belongs to the host)

        self._before = _resident_bytes()
        torch.manual_seed(setting.seed)  # before the same constructor on the same device: the same weights for all
        with torch.device(self._device):  # at once where they stay: torch.compile guards on that
            model = build_model(setting.model)
        if self._prepare is not None:
            self._flags = self._prepare(model, self._device)
        dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
        trainer = Trainer(model, device=self._device, dtype=dtype)
        self._parameters = sum(parameter.numel() for parameter in trainer.parameters)
        return trainer

    def step(self) -> dict[str, float]:
        """One call of `Trainer.step`: seconds and bytes by name."""
        started = time.perf_counter()
        batch = next(self._batches)
        wait = time.perf_counter() - started
        batch = arrange(batch, self._setting.workload, self._step, self._setting.seed)
        self._probe.reset()
        with alignment_failures() as failures:
            result = self._trainer.step(batch)
        peak = self._probe.peak(self._trainer.persistent_bytes())
        self._step, self._seconds = self._step + 1, result.seconds
        self._reserved = max(self._reserved, peak.reserved or 0)
        flops = self._count(batch)
        if result.skipped:
            raise ArithmeticError(f"step {self._step}: the loss or the gradient norm is not finite")
        sample = {
            "iteration_time": result.seconds,
            "forward_time": result.forward_seconds,
            "backward_time": result.backward_seconds,
            "optimizer_time": result.optimizer_seconds,
            "loader_wait": wait,
            "peak": float(peak.allocated),
            "persistent": float(peak.persistent),
            "model_flops": flops.model,
            "hardware_flops": flops.hardware,
            "loss": result.loss,
            "alignment_failures": float(failures.value),
        }
        return sample | ({} if peak.reserved is None else {"reserved": float(peak.reserved)})

    def suspend(self) -> None:
        """Leave the device: gradients and graphs dropped, weights and optimizer state to host memory.

        After the last visit nothing is kept; first comes, once, a profiled step, so that nothing is timed after it.
        Where the protocol has one step a visit, not one that takes long.
        """
        if self._trainer is None:  # before the first visit
            return
        self._end_visit()
        release_graphs(self._trainer.model)
        if self._visits < self._setting.protocol.visits:
            self._trainer.offload()
            return
        self._trainer = None
        gc.collect()
        self._empty_cache()

    def stay(self) -> None:
        """In place of `suspend` where all contenders fit together: only gradients go, and no graph is recorded anew."""
        self._end_visit()

    def memory(self) -> dict[str, int] | None:
        """Bytes of the device that a visit takes at most and that are held by one who stays, and of all there are."""
        if self._device == "cpu":
            return None
        return {"peak": self._reserved, "held": self._held, "device": torch.cuda.mem_get_info()[1]}

    def _end_visit(self) -> None:
        self._visits += 1
        if self._visits == self._setting.protocol.visits:
            self._profile()
        self._batches = iter(())
        self._trainer.optimizer.zero_grad(set_to_none=True)
        self._empty_cache()
        if self._device != "cpu":
            self._held = torch.cuda.memory_reserved()

    def _profile(self) -> None:
        is_worth_it = self._setting.protocol.repeats > 1 or self._seconds < SECONDS_TO_PROFILE
        if not (self._profiles and is_worth_it and self._step):
            return
        started = time.perf_counter()
        batch = arrange(next(self._batches), self._setting.workload, self._step, self._setting.seed)
        missing = "no launch was traced"
        try:
            found = count_activity(lambda: self._trainer.step(batch))
            self._activity = found if found.launches + found.graphs else None
        except torch.OutOfMemoryError:  # the profiler's own needs; what was timed has fitted
            missing = "out of memory under the profiler"
        except RuntimeError as error:  # nor is what was timed lost to a profiler that fails
            missing = f"the profiler failed: {' '.join(str(error).split())[:200]}"
        if self._activity is None:
            self.notes = [*self.notes, f"launches and waits were not counted: {missing}"]
        print(f"profiled step: {time.perf_counter() - started:.1f} s", flush=True)

    def _empty_cache(self) -> None:
        if self._device != "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    def finish(self, samples: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
        """Times (s), memory (GiB), FLOPs, utilisation (%) and the loss of the last step."""
        metrics = {}
        for name, definition in TIMES.items():
            if name == "loader_wait" and self._setting.data == "synthetic":
                continue
            summary = summarize(samples[name])
            metrics[name] = Metric(summary.median, "s", summary.p20, summary.p80, summary.n, definition)
        metrics |= self._memory(samples)
        for name in ("model_flops", "hardware_flops"):
            metrics[name] = Metric(statistics.fmean(samples[name]), "FLOP", n=len(samples[name]))
        metrics |= self._utilisation(metrics)
        metrics |= self._counts(samples)
        metrics["parameters"] = Metric(float(self._parameters), "1", definition="trained numbers of the model")
        metrics["loss"] = Metric(samples["loss"][-1], "dimensionless", definition="of the last step")
        return metrics

    def _counts(self, samples: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
        failures = samples["alignment_failures"]
        found = {"alignment_failures": Metric(max(failures), "1/step", n=len(failures), definition=FAILURES)}
        if self._activity is not None:
            for name, count in asdict(self._activity).items():
                found[f"host_{name}"] = Metric(float(count), "1/step", n=1, definition=COUNTS[name])
        return found

    def _memory(self, samples: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
        peak, persistent, count = max(samples["peak"]), max(samples["persistent"]), len(samples["peak"])
        on_cpu = self._device == "cpu"
        above = peak - persistent - (self._before if on_cpu else 0)
        found = {
            "peak_memory": (peak, CPU_PEAK if on_cpu else "peak of torch's allocator in a step"),
            "persistent_memory": (persistent, PERSISTENT),
            "peak_above_persistent": (max(0.0, above), CPU_ABOVE if on_cpu else "peak_memory less persistent_memory"),
        }
        if "reserved" in samples:
            found["peak_memory_reserved"] = (max(samples["reserved"]), "what torch's allocator took from the device")
        return {
            name: Metric(value / GIB, "GiB", n=count, definition=definition)
            for name, (value, definition) in found.items()
        }

    def _utilisation(self, metrics: Mapping[str, Metric]) -> dict[str, Metric]:
        if self._device == "cpu":
            return {}
        properties = torch.cuda.get_device_properties(0)
        # Always against the bf16 peak: MFU's denominator must not depend on what a contender chose to do.
        peak = peak_flops(properties.name, "bf16", properties.multi_processor_count)
        if peak is None:
            return {}
        seconds, found = metrics["iteration_time"], {}
        for name, flops, text in (("mfu", "model_flops", MFU_DEFINITION), ("hfu", "hardware_flops", HFU_DEFINITION)):
            value, p80, p20 = (
                100 * mfu(metrics[flops].value, at, peak.value) for at in (seconds.value, seconds.p20, seconds.p80)
            )
            definition = f"{text}; peak {peak.value / 1e12:g} TFLOP/s ({peak.device}: {peak.source})"
            found[name] = Metric(value, "%", p20, p80, seconds.n, definition)
        return found

    def _count(self, batch: Batch) -> IterationFlops:
        one = iteration_flops(
            preset(self._setting.model),
            n_tokens=batch["molecule_atom_lens"].shape[1],
            n_atoms=batch["atom_inputs"].shape[1],
            msa_depth=_length(batch, "msa"),
            templates=max(1, _length(batch, "templates")),
            recycles=batch["num_recycling_steps"],
            rollouts=rollouts(self._setting.workload),
            workload="core" if batch.get("resolved_labels") is None else "full",
            **self._flags,
        )
        return IterationFlops(*(flops * batch["atom_inputs"].shape[0] for flops in one))


def loads_kernels(context: Context) -> bool:
    """Whether a contender takes a short step when it is set up; torch.compile would compile for that length alone."""
    return (
        context.device != "cpu"
        and context.contenders >= MANY_CONTENDERS
        and context.point.contender.provider != "compile"
    )


def megafold_preparation(contender: Contender, workload: str) -> Callable[[torch.nn.Module, str], Mapping[str, bool]]:
    """Apply the contender's plan (empty: the default plan) to a stock model."""
    plan = Plan.from_mapping(dict(contender.plan), file=f"contenders.{contender.name}.plan")

    def prepare(model: torch.nn.Module, device: str) -> Mapping[str, bool]:
        from megafold.model.optimize import optimize

        report = optimize(model, plan, rollouts=rollouts(workload))
        print(report, flush=True)
        return {"shared_conditioning": plan.shared_conditioning, "fused_attention": plan.sdpa or plan.evoflash3d}

    return prepare


def _check_supported(setting: Setting, contender: Contender, device: str) -> None:
    if setting.sp * setting.dp > 1 or setting.mode != "measured":
        raise Unsupported(f"sp={setting.sp}, dp={setting.dp}, mode={setting.mode}: one device is measured so far")
    if setting.workload == "as_published":
        raise Unsupported(
            "as_published: its steps differ (1-4 recycles, confidence at every tenth); no median is reported"
        )
    if rollouts(setting.workload) and contender.provider != "megafold":
        raise Unsupported(f"{setting.workload}: the stock model rolls out one structure an augmentation")
    if setting.dtype == "fp16":
        raise Unsupported("fp16: the trainer has no loss scaling; use bf16")
    if setting.dtype == "bf16" and device == "cpu":
        raise Unsupported(
            "bf16 autocast of alphafold3-pytorch needs a GPU (its alignment has no bf16 on a CPU); use fp32"
        )
    if setting.data == "synthetic" and setting.size("batch_size") > 1:
        raise Unsupported("synthetic batches hold one structure; use data: cache for larger batches")


def _length(batch: Batch, name: str) -> int:
    tensor = batch.get(name)
    return 0 if tensor is None else tensor.shape[1]


def _resident_bytes() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096
