"""One training step with EvoSP-3D: real ranks in a process group, or one rank of many, emulated on one device.

The trunk, the heads and the losses are split over `sp` ranks, structures over `dp` replicas. All ranks take the same
example. `mode: emulated` runs rank 0, which has the longest blocks, on torch's fake process group: memory, compute time
and bytes are those of a rank of the job, values are not, and nothing is waited for. There, and where nothing else comes
before the first step that counts, a step on a short structure does: it compiles kernels and makes the optimizer's
state, so that one step of a long structure is enough to know its peak.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

import torch

from experiments.contenders.examples import Batch, examples
from experiments.providers import Context, Unsupported
from experiments.record import Metric
from experiments.spec import Contender, Setting
from megafold.evosp3d.traffic import KINDS
from megafold.metrics.memory import MemoryProbe
from megafold.metrics.timing import summarize
from megafold.model.build import build_model
from megafold.model.graphs import release_graphs
from megafold.model.plan import Plan
from megafold.model.presets import preset
from megafold.train.synthetic import synthetic_batch
from megafold.train.trainer import Trainer
from megafold.train.workload import arrange

if TYPE_CHECKING:
    from megafold.train.parallel import Parallel

GIB = 2**30
# What a worker keeps between points (workspaces of libraries): more is of an earlier point, and is told.
KEPT_BYTES = 256 << 20
# Bytes a second that a rank can send, one direction, by kind of link: for estimates, never for a measured time.
BANDWIDTH = {
    "nvlink": (450e9, "NVLink 4 of an H100 or H200, one direction, as specified"),
    "network": (50e9, "one 400 Gb/s port a GPU, as specified"),
}
EMULATED = "one rank on one device, fake collectives: compute only"
PERSISTENT = "weights, buffers, gradients and optimizer state"
TIMES = {
    "iteration_time": "forward, backward, gradient reduction, clipping and AdamW update",
    "forward_time": "",
    "backward_time": "with what checkpointing recomputes, and the gradient reduction",
    "optimizer_time": "gradient clipping, check for finite numbers, AdamW update",
}


class SequenceParallelSession:
    """A model in a `Trainer` over the ranks of a point; every visit starts from the same example and random state.

    Raises:
        Unsupported: for settings that cannot run here.
    """

    def __init__(self, context: Context) -> None:
        self._setting = setting = context.point.setting
        _check_supported(setting, context)
        self._emulated = setting.mode == "emulated"
        self._scope, self._member = ExitStack(), None
        self._place, self._contender = self._enter(context), context.point.contender
        self._device = self._place.type
        self._probe = MemoryProbe(self._device)
        with self._telling_others():
            limit_memory(setting.variant, self._place)
        self._trainer: Trainer | None = None
        self._parallel: Parallel | None = None
        if self._emulated and setting.data == "synthetic":
            self._examples, self.notes = _with_few_templates(setting), []
        else:
            self._examples, self.notes = examples(setting, context.cache, context.device)
        self._batches: Iterator[Batch] = iter(())
        self._step, self._visits = 0, 0

    def resume(self) -> None:
        """Weights and optimizer state onto the device, random state and examples from the start."""
        if self._trainer is None:
            with self._telling_others():
                self._build()
        self._trainer.onload()
        torch.manual_seed(self._setting.seed)
        self._step, self._batches = 0, self._examples()

    def step(self) -> dict[str, float]:
        """One call of `Trainer.step`: seconds and bytes by name."""
        batch = arrange(next(self._batches), self._setting.workload, self._step, self._setting.seed)
        traffic = None if self._parallel is None else self._parallel.shards.traffic
        if traffic is not None:
            traffic.clear()
        self._probe.reset()
        with self._telling_others():
            result = self._trainer.step(batch)
            loss, seconds = result.loss, result.seconds
        peak = self._probe.peak(self._trainer.persistent_bytes())
        self._step += 1
        if result.skipped and not self._emulated:
            raise ArithmeticError(f"step {self._step}: the loss or the gradient norm is not finite")
        sent = dict.fromkeys(KINDS, 0) if traffic is None else traffic.by_kind()
        return {
            "iteration_time": seconds,
            "forward_time": result.forward_seconds,
            "backward_time": result.backward_seconds,
            "optimizer_time": result.optimizer_seconds,
            "peak": float(peak.allocated),
            "persistent": float(peak.persistent),
            "loss": loss,
            **{f"sent_{kind}": float(size) for kind, size in sent.items()},
        }

    def suspend(self) -> None:
        """Weights and optimizer state to host memory, gradients dropped; after the last visit nothing is kept."""
        self._batches = iter(())
        if self._trainer is None:  # before the first visit: what is not built takes no memory
            return
        self._visits += 1
        if self._visits < self._setting.protocol.visits:
            release_graphs(self._trainer.model)  # they hold addresses of weights that move
            self._trainer.offload()
            return
        self._trainer = self._parallel = None
        gc.collect()
        if self._device == "cuda":
            torch.cuda.empty_cache()

    def _build(self) -> None:
        setting = self._setting
        import alphafold3_pytorch  # noqa: F401 (what it makes when it is imported belongs to the host)

        self.notes = [*self.notes, *_left_behind(self._place)]
        torch.manual_seed(setting.seed)
        with self._place:
            model = build_model(setting.model)
        self._parallel = _parallel(setting, self._place, model, self._contender)
        dtype = torch.bfloat16 if setting.dtype == "bf16" else torch.float32
        self._trainer = Trainer(model, device=self._place, dtype=dtype, parallel=self._parallel)
        if self._emulated or setting.protocol.warmup == 0:
            # Rows of a rank in multiples of 16, as long structures have: kernels are compiled for them.
            short = {"n_tokens": 16 * setting.sp, "msa_depth": min(setting.size("msa_depth"), 64)}
            batch = next(_with_few_templates(setting, **short)())
            self._trainer.step(arrange(batch, setting.workload, 0, setting.seed))

    def close(self) -> None:
        """Leave the process group."""
        if self._member is not None:
            self._member.leave()
            self._member = None
        self._scope.close()

    def finish(self, samples: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
        """Times (s), memory of this rank (GiB), GiB that it sent in a step by kind, and how long that may take."""
        self.close()
        metrics = {}
        for name, text in TIMES.items():
            summary = summarize(samples[name])
            text = "; ".join(filter(None, (text, EMULATED if self._emulated else "")))
            metrics[name] = Metric(summary.median, "s", summary.p20, summary.p80, summary.n, text)
        peak, persistent, count = max(samples["peak"]), max(samples["persistent"]), len(samples["peak"])
        allocator = "peak of torch's allocator in a step, of one rank"
        where = allocator if self._device != "cpu" else "peak resident memory of rank 0's process, libraries included"
        for name, value, text in (
            ("peak_memory", peak, where),
            ("persistent_memory", persistent, PERSISTENT),
            ("peak_above_persistent", peak - persistent, "peak_memory less persistent_memory"),
        ):
            metrics[name] = Metric(value / GIB, "GiB", n=count, definition=text)
        return metrics | sent_metrics(samples) | self._loss(samples)

    @contextmanager
    def _telling_others(self) -> Iterator[None]:
        """Ranks that wait for this one end with its error."""
        try:
            yield
        except BaseException as error:
            if self._member is not None:
                self._member.watch.fail(error)
            self._scope.close()
            raise

    def _loss(self, samples: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
        if self._emulated:  # its values mean nothing
            return {}
        return {"loss": Metric(samples["loss"][-1], "dimensionless", definition="of the last step")}

    def _enter(self, context: Context) -> torch.device:
        """Into the process group of the point, if it has one; returns this rank's device."""
        setting, size = self._setting, self._setting.sp * self._setting.dp
        if size == 1:
            return torch.device(context.device)
        if self._emulated:
            from megafold.evosp3d.emulate import emulated_ranks

            self._scope.enter_context(emulated_ranks(size))
            return torch.device(context.device)
        from torch.distributed import PrefixStore

        from experiments.ranks import open_store
        from megafold.train.ranks import Membership, device_of, find_place

        place = find_place()
        device = device_of(place, context.device)
        store = PrefixStore(context.meeting, open_store(is_host=False))
        self._member = Membership(store, place, device, timeout_s=setting.protocol.timeout_s)
        return device


def _left_behind(device: torch.device) -> list[str]:
    """A note where the device holds memory before a point is there: its peak would count it."""
    held = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    return [f"peaks hold {held / GIB:.2f} GiB that were there before the model"] if held > KEPT_BYTES else []


def _with_few_templates(setting: Setting, **sizes: int) -> Callable[[], Iterator[Batch]]:
    """The synthetic example of an emulated rank, whose templates [1, T, N, N, d] are one row in memory: their values
    mean nothing, and whole they are 16 GB at N = 6144."""
    shape = dict(setting.shape) | sizes
    tokens, count = shape["n_tokens"], shape["templates"]
    batch = synthetic_batch(
        tokens,
        atoms_per_token=shape["atoms_per_token"],
        msa_depth=shape["msa_depth"],
        templates=0,
        workload=setting.workload,
        seed=setting.seed,
        model_kwargs=preset(setting.model),
    )
    if count:
        row = torch.rand(1, count, 1, tokens, preset(setting.model)["dim_template_feats"])
        batch["templates"] = row.expand(-1, -1, tokens, -1, -1)
        batch["template_mask"] = torch.ones(1, count, dtype=torch.bool)
    return lambda: itertools.repeat(batch)


def sent_metrics(samples: Mapping[str, Sequence[float]]) -> dict[str, Metric]:
    """What a rank sends in a step, and how long that takes at stated bandwidths if nothing overlaps it."""
    sent = {kind: max(samples[f"sent_{kind}"]) for kind in KINDS}
    total = sum(sent.values())
    metrics = {f"sent_{kind}": Metric(size / GIB, "GiB", definition="a rank and step") for kind, size in sent.items()}
    metrics["sent"] = Metric(total / GIB, "GiB", definition="a rank and step, all collectives")
    for link, (bandwidth, source) in BANDWIDTH.items():
        text = f"sent / {bandwidth / 1e9:g} GB/s ({source}); an estimate, not overlapped"
        metrics[f"communication_estimate_{link}"] = Metric(total / bandwidth, "s", definition=text)
    return metrics


def limit_memory(variant: str, device: torch.device) -> None:
    """``variant: limit-64gib``: the allocator refuses what a device with so much memory would not have.

    Raises:
        Unsupported: on a CPU, or on a device that has less.
    """
    # By its number: a device without one is refused.
    index = torch.cuda.current_device() if device.type == "cuda" and device.index is None else device.index
    if not variant:
        if device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0, index)
        return
    wanted = int(variant.removeprefix("limit-").removesuffix("gib")) * GIB
    if device.type != "cuda":
        raise Unsupported(f"{variant}: a limit on memory needs a GPU")
    total = torch.cuda.get_device_properties(index).total_memory
    if wanted > total:
        raise Unsupported(f"{variant}: this device has {total / GIB:.0f} GiB")
    torch.cuda.set_per_process_memory_fraction(wanted / total, index)


def _parallel(setting: Setting, device: torch.device, model: torch.nn.Module, contender: Contender):
    """The model made parallel; None for one rank, whose model computes through the same code."""
    from megafold.evosp3d.parallelize import parallelize
    from megafold.model.optimize import optimize
    from megafold.train.parallel import Parallel

    plan = Plan.from_mapping(dict(contender.plan), file=f"contenders.{contender.name}.plan")
    print(optimize(model, plan), flush=True)
    if setting.sp * setting.dp == 1:
        parallelize(model, None, plan)
        return None
    parallel = Parallel(setting.sp, device)
    parallel.prepare(model, plan)
    return parallel


def _check_supported(setting: Setting, context: Context) -> None:
    from megafold.train.ranks import find_place

    size = setting.sp * setting.dp
    if setting.workload == "as_published":
        raise Unsupported("as_published: its steps differ; no median is reported")
    if setting.dtype == "fp16" or (setting.dtype == "bf16" and context.device == "cpu"):
        raise Unsupported(f"{setting.dtype} on {context.device}: use fp32 on a CPU, bf16 on a GPU")
    place = find_place()
    started = 1 if place is None else place.size
    if setting.mode == "measured" and size != started:
        wanted = f"sp={setting.sp} times dp={setting.dp} needs {size} ranks"
        raise Unsupported(f"{wanted}, and {started} were started: use torchrun, or a site")
