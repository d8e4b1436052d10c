"""`megafold train`: examples, steps, log, checkpoints, and an orderly end whatever ends it."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megafold.errors import InputError
from megafold.metrics.memory import MemoryProbe
from megafold.model.build import build_model, model_kwargs
from megafold.model.plan import Plan
from megafold.train import checkpoint, randomness
from megafold.train.config import TrainConfig
from megafold.train.examples import ExampleStream, open_stream
from megafold.train.log import Progress, StepLog
from megafold.train.parallel import Parallel
from megafold.train.ranks import Place, device_of, find_place, joined
from megafold.train.stop import StopRequest
from megafold.train.trainer import StepResult, Trainer
from megafold.train.workload import arrange, rollouts

_CPU_ALLOCATOR = ("DefaultCPUAllocator", "can't allocate memory", "not enough memory")


@dataclass(frozen=True)
class TrainReport:
    """How a run ended.

    Attributes:
        step: steps done, those of earlier runs in this folder included.
        loss: of the last step of this run; None if there was nothing left to do.
        skipped: steps whose gradient was not finite.
        stopped_by: the signal that ended the run before its last step, or None.
        leads: whether this rank is the one that speaks for all (there may be one only).
    """

    step: int
    loss: float | None
    skipped: int
    stopped_by: str | None
    checkpoint: Path
    log: Path
    leads: bool = True


def train(config: TrainConfig) -> TrainReport:
    """Train until ``config.steps``, from the last checkpoint in ``config.output`` if there is one.

    Checkpoints are written every ``config.checkpoint.every`` steps, at the end, and when SIGTERM, SIGUSR1 or Ctrl-C
    asks the run to stop; a resumed run takes the same steps as one that was never stopped. The log is
    ``output/log.jsonl``: per step the loss and its terms, learning rate, gradient norm, seconds, loader wait, tokens.

    Started by torchrun or srun it is one rank of many (see `megafold.train.ranks`): every rank returns the report, rank
    0 writes log and checkpoints. On several ranks an error ends the process, and the others' with it.

    Raises:
        InputError: for a device, cache, model option or checkpoint that does not fit; when the device has too little
            memory for a step; when ``max_skipped_in_a_row`` steps gave no finite gradient.
    """
    place = find_place()
    device = _device(config, place)
    if place is None:
        if config.parallel.sp > 1:
            raise InputError(
                config.file, "parallel.sp", f"is {config.parallel.sp}: start that many ranks with torchrun"
            )
        return _train(config, device, None)
    with joined(place, device, timeout_s=config.parallel.timeout_s):
        try:
            parallel = Parallel(config.parallel.sp, device)
        except ValueError as error:
            raise InputError(config.file, "parallel.sp", str(error)) from None
        return _train(config, device, parallel)


def _train(config: TrainConfig, device: torch.device, parallel: Parallel | None) -> TrainReport:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = config.tf32
    kwargs = model_kwargs(config.model.preset, **config.model.overrides)
    replica, replicas = (0, 1) if parallel is None else (parallel.replica, parallel.dp)
    stream = open_stream(config, kwargs, replica, replicas)
    torch.manual_seed(config.seed)
    model = _model(config, device)
    if parallel is not None:
        try:
            parallel.prepare(model, config.plan)
        except ValueError as error:
            raise InputError(config.file, "model.overrides", str(error)) from None
        # The ranks of a replica draw the same numbers, replicas others.
        randomness.seed_all(config.seed, replica)
    trainer = Trainer(model, config.optimizer, device=device, dtype=_dtype(config, device), parallel=parallel)
    folder = config.output / "checkpoints"
    log = StepLog(config.output / "log.jsonl" if parallel is None or parallel.rank == 0 else None)
    run = _Run(config, trainer, stream, folder, log, parallel)
    try:
        run.resume()
        return run.run()
    finally:
        log.close()


class _Run:
    """One call of :func:`train` after everything is built."""

    def __init__(
        self,
        config: TrainConfig,
        trainer: Trainer,
        stream: ExampleStream,
        folder: Path,
        log: StepLog,
        parallel: Parallel | None,
    ) -> None:
        self._config, self._trainer, self._stream, self._folder, self._log = config, trainer, stream, folder, log
        self._parallel, self._leads = parallel, parallel is None or parallel.rank == 0
        self._saved: Path | None = None

    def resume(self) -> None:
        """Continue from the newest whole checkpoint, if any.

        Raises:
            InputError: if it was written under another configuration (the first setting that differs is named).
        """
        found = checkpoint.load_latest(self._folder)
        if found is None:
            self._log.write(event="start", digest=self._config.digest(), pid=os.getpid())
            return
        path, state, problems = found
        for problem in problems if self._leads else ():
            print(f"left out: {problem}", flush=True)
        if state["digest"] != self._config.digest():
            name, then, now = _first_difference(state["config"], self._config.trajectory())
            raise InputError(
                self._config.file,
                name,
                f"is {now!r}, but {path} was trained with {then!r}; change it back or choose another output",
            )
        replica, replicas = (0, 1) if self._parallel is None else (self._parallel.replica, self._parallel.dp)
        generators = state.get("replicas", [state["randomness"]])
        if len(generators) != replicas:
            was = f"{len(generators)} data-parallel replicas"
            raise InputError(self._config.file, "parallel.sp", f"gives {replicas}, but {path} was trained with {was}")
        trainer = self._trainer
        trainer.model.load_state_dict(state["model"]["state_dict"])
        trainer.optimizer.load_state_dict(state["optimizer"])
        trainer.steps, trainer.skipped = state["step"], state["skipped"]
        trainer.skipped_in_a_row = state["skipped_in_a_row"]
        self._stream.seek(state["examples"])
        randomness.restore(generators[replica])
        self._saved = path
        self._log.write(event="resume", step=trainer.steps, checkpoint=path.name, pid=os.getpid())
        if self._leads:
            print(f"resumed from {path} at step {trainer.steps}", flush=True)

    def run(self) -> TrainReport:
        config, trainer = self._config, self._trainer
        progress = Progress(trainer.steps, config.steps, shown=self._leads)
        loss: float | None = None
        # Half a million objects of imported modules stay for ever. A full collection amidst a step would look through
        # them for half a second, and of several ranks all wait for the one that does.
        gc.collect()
        gc.freeze()
        try:
            with StopRequest() as request:
                while trainer.steps < config.steps and not self._stops(request):
                    loss = self._step(progress)
                    if trainer.steps % config.checkpoint.every == 0 and trainer.steps < config.steps:
                        self._save()
                if self._saved != self._path():
                    self._save()
                stopped_by = None
                if trainer.steps < config.steps:
                    stopped_by = request.signal or "a signal to another rank"
        finally:
            gc.unfreeze()
            progress.close()
        self._log.write(event="stop", step=trainer.steps, signal=stopped_by, checkpoint=self._saved.name)
        if stopped_by and self._leads:
            print(f"stopped by {stopped_by} after step {trainer.steps}; saved {self._saved}", flush=True)
        log = config.output / "log.jsonl"
        return TrainReport(trainer.steps, loss, trainer.skipped, stopped_by, self._saved, log, self._leads)

    def _stops(self, request: StopRequest) -> bool:
        """Whether a signal asked this run to stop, on whichever rank it arrived."""
        asked = request.signal is not None
        return asked if self._parallel is None else self._parallel.any(asked)

    def _step(self, progress: Progress) -> float:
        config, trainer = self._config, self._trainer
        place, generators = self._stream.state(), randomness.snapshot()
        began = time.perf_counter()
        batch = next(self._stream)
        wait = time.perf_counter() - began
        number = trainer.steps
        try:
            result = trainer.step(arrange(batch, config.workload, number, config.seed, config.confidence_every))
        except (torch.OutOfMemoryError, MemoryError, RuntimeError) as error:
            if not _out_of_memory(error):
                raise
            if self._parallel is None:
                self._save(place, generators)  # the weights are those before this step
            raise self._too_large(batch, error) from None
        self._log.write(**_describe(number, result, batch, wait, self._stream.epoch))
        progress.step(number + 1, loss=result.loss, seconds=result.seconds, loader_wait=wait, skipped=result.skipped)
        if trainer.skipped_in_a_row >= config.max_skipped_in_a_row:
            raise InputError(
                config.file,
                "optimizer.learning_rate",
                f"{trainer.skipped_in_a_row} steps in a row gave no finite gradient (last loss {result.loss}); "
                f"lower the rate or lengthen warmup_steps, and continue from {self._saved or 'the start'}",
            )
        return result.loss

    def _path(self) -> Path:
        return self._folder / f"step-{self._trainer.steps:08d}.pt"

    def _save(self, place: Mapping[str, int] | None = None, generators: Mapping[str, Any] | None = None) -> None:
        trainer, model = self._trainer, self._trainer.model
        generators = generators or randomness.snapshot()
        replicas = [generators] if self._parallel is None else self._parallel.from_replicas(generators)
        if not self._leads:
            self._saved = self._path()
            return
        # The stock model's own layout, so that its `load` and `init_and_load` take the file.
        weights = getattr(model, "state_dict_with_init_args", None) or {"state_dict": model.state_dict()}
        state = {
            "model": weights,
            "optimizer": trainer.optimizer.state_dict(),
            "skipped": trainer.skipped,
            "skipped_in_a_row": trainer.skipped_in_a_row,
            "examples": dict(place or self._stream.state()),
            "randomness": replicas[0],
            "replicas": replicas,
            "config": self._config.trajectory(),
            "digest": self._config.digest(),
        }
        self._saved = checkpoint.save(self._folder, trainer.steps, state, keep=self._config.checkpoint.keep)
        self._log.write(event="checkpoint", step=trainer.steps, checkpoint=self._saved.name)

    def _too_large(self, batch: Mapping[str, Any], error: BaseException) -> InputError:
        peak = MemoryProbe(self._trainer.device).peak().allocated / 2**30
        tokens, depth = _tokens(batch), _length(batch, "msa")
        return InputError(
            self._config.file,
            "data.crop_size",
            f"out of memory on {self._trainer.device} at step {self._trainer.steps + 1}: {tokens} tokens, "
            f"{batch['atom_inputs'].shape[1]} atoms, alignment depth {depth}, peak {peak:.1f} GiB; lower crop_size, "
            f"msa_depth or batch_size, or turn on the checkpoint_* options in model.overrides; saved {self._saved} "
            f"({str(error).splitlines()[0]})",
        )


def _describe(number: int, result: StepResult, batch: Mapping[str, Any], wait: float, epoch: int) -> dict[str, Any]:
    names = batch.get("filepath")
    return {
        "step": number + 1,
        "epoch": epoch,
        "loss": result.loss,
        "breakdown": result.breakdown,
        "lr": result.learning_rate,
        "grad_norm": result.grad_norm,
        "seconds": result.seconds,
        "forward_seconds": result.forward_seconds,
        "backward_seconds": result.backward_seconds,
        "optimizer_seconds": result.optimizer_seconds,
        "loader_wait": wait,
        "tokens": _tokens(batch),
        "entry": [str(name) for name in names] if names else None,
        "skipped": result.skipped,
    }


def _tokens(batch: Mapping[str, Any]) -> int:
    return int((batch["molecule_atom_lens"] > 0).sum())


def _length(batch: Mapping[str, Any], name: str) -> int:
    return 0 if batch.get(name) is None else batch[name].shape[1]


def _model(config: TrainConfig, device: torch.device) -> torch.nn.Module:
    try:
        # Moved first: what `optimize` could not replace depends on the device.
        model = build_model(config.model.preset, **config.model.overrides).to(device)
    except InputError as error:
        raise InputError(config.file, f"model.overrides.{error.field}", error.problem) from None
    if config.plan != Plan.none() or rollouts(config.workload):
        from megafold.model.optimize import optimize

        try:
            print(optimize(model, config.plan, rollouts=rollouts(config.workload)), flush=True)
        except ValueError as error:
            raise InputError(config.file, "workload", f"{config.workload}: {error}") from None
    return model


def _device(config: TrainConfig, place: Place | None) -> torch.device:
    try:
        return device_of(place, config.device)
    except InputError as error:
        raise InputError(config.file, "device", error.problem) from None


def _dtype(config: TrainConfig, device: torch.device) -> torch.dtype | None:
    if config.dtype == "bf16" and device.type == "cpu":
        raise InputError(config.file, "dtype", "bf16: the model's alignment has no bf16 on a CPU; use fp32")
    return {"auto": None, "bf16": torch.bfloat16, "fp32": torch.float32}[config.dtype]


def _out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return any(text in str(error) for text in _CPU_ALLOCATOR)


def _first_difference(then: Any, now: Any, name: str = "") -> tuple[str, Any, Any]:
    if isinstance(then, dict) and isinstance(now, dict):
        for key in [*now, *then]:
            if then.get(key) != now.get(key):
                return _first_difference(then.get(key), now.get(key), f"{name}.{key}" if name else key)
    return name, then, now
