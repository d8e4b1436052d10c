"""submitit's two executors behind one small interface: submit, recover, state, cancel."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from submitit.core.utils import FailedJobError, FailedSubmissionError, JobPaths
from submitit.local.local import LocalExecutor, LocalJob
from submitit.slurm.slurm import SlurmExecutor

from cluster.locks import locked
from cluster.payload import run_command
from cluster.site import Site, shown
from cluster.slurm import Queue, Refused
from megafold.errors import InputError

SBATCH_TIMEOUT_S = 120
PICKLE = re.compile(r"[0-9a-f]{32}\.pkl")
# Snakemake limits these to the driver's threads; the driver's other work is no measure for the job's
THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS", "GOTO_NUM_THREADS")


@dataclass(frozen=True)
class Request:
    """One command to run: `label` for people, `name` unique among the user's jobs, `folder` absolute, in `minutes`."""

    label: str
    name: str
    folder: Path
    command: tuple[str, ...]
    nodes: int
    tasks: int
    minutes: float


class Scheduler(Protocol):
    """What a driver needs. `state` gives the scheduler's word ("" for a job it forgot) and why a job waits.

    All but `submit` raise Silent while the scheduler does not answer.
    """

    def slot(self, request: Request, note: Callable[[str], None]) -> AbstractContextManager[None]: ...
    def submit(self, request: Request) -> str: ...
    def recover(self, request: Request, previous: list[str]) -> str | None: ...
    def state(self, job_id: str, submitted: float) -> tuple[str, str]: ...
    def cancel(self, request: Request, job_id: str | None) -> None: ...


class Slurm:
    """Jobs of a SLURM site."""

    def __init__(self, site: Site, state: Path) -> None:
        self.site, self.shared = site, state
        self.queue = Queue(site, state)

    @contextlib.contextmanager
    def slot(self, request: Request, note: Callable[[str], None]) -> Iterator[None]:
        """Wait until the site's limit on queued jobs has room, and keep other drivers from taking that room."""
        told = False
        while True:
            with locked(self.shared / "submit.lock"):
                count = sum(job.live for job in self.queue.jobs(since=time.time()))
                if count < self.site.max_queued_jobs:
                    yield
                    return
            if not told:
                note(f"waits: {count} jobs are queued, and the site's limit is {self.site.max_queued_jobs}")
                told = True
            time.sleep(self.site.poll)

    def submit(self, request: Request) -> str:
        """Run sbatch; returns the id.

        Raises:
            Refused: where sbatch would not take the job, or did not say whether it did.
        """
        try:
            executor = _BoundedExecutor(request.folder)
        except RuntimeError as error:
            raise InputError(shown(self.site.file), "executor", "is slurm, and this machine has no srun") from error
        executor.update_parameters(**self._parameters(request))
        with _without_scheduler_variables():
            try:
                job = executor.submit(run_command, request.command, str(request.folder), *self._environment())
            except (FailedJobError, FailedSubmissionError) as error:
                raise Refused(str(error)) from error
        return job.job_id

    def _parameters(self, request: Request) -> dict:
        site = self.site
        own = {key: getattr(site, key) for key in ("account", "partition", "qos", "constraint") if getattr(site, key)}
        if site.gpu_request == "per_node":
            own["gpus_per_node"] = site.gpus_per_node if request.tasks > 1 else max(1, site.gpus_per_task)
        elif site.gpu_request == "per_task":
            own["gpus_per_task"] = site.gpus_per_task
        if site.memory is not None:
            own["mem"] = f"{round(site.memory * 1000)}M"
        # sbatch knows --cpus-per-task, newer srun does not inherit it
        srun = ["-c", str(site.cpus_per_task), *site.srun_args]
        if site.gpus_per_task:
            srun += [
                f"--gpus-per-task={site.gpus_per_task}",
                *([f"--gpu-bind={site.gpu_bind}"] if site.gpu_bind else []),
            ]
        return {
            **own,
            "job_name": request.name,
            "time": max(1, round(request.minutes)),
            "nodes": request.nodes,
            "ntasks_per_node": -(-request.tasks // request.nodes),
            "cpus_per_task": site.cpus_per_task,
            # a signal comes this long before the limit; submitit's 90 s would end a short job at once
            "signal_delay_s": min(90, max(10, round(request.minutes * 60 / 10))),
            "setup": [*(f"module load {module}" for module in site.modules), *site.setup],
            "srun_args": srun,
            "stderr_to_stdout": False,
            "additional_parameters": dict(site.sbatch),
        }

    def _environment(self) -> tuple[dict[str, str | None], dict[str, str]]:
        threads = dict.fromkeys(THREADS, str(self.site.cpus_per_task))
        return {**threads, **self.site.network, **self.site.environment}, dict(self.site.node_local)

    def recover(self, request: Request, previous: list[str]) -> str | None:
        """The job of this unique name, if one was submitted and its id never recorded."""
        jobs = self.queue.jobs(since=time.time())
        found = [job.job_id for job in jobs if job.name == request.name and job.state != "CANCELLED"]
        return max((job_id for job_id in found if job_id not in previous), key=int, default=None)

    def state(self, job_id: str, submitted: float) -> tuple[str, str]:
        """State and, for a waiting job, the reason."""
        job = self.queue.find(job_id, submitted)
        return job.state, job.why

    def cancel(self, request: Request, job_id: str | None) -> None:
        """Cancel the job, and whatever else carries its name."""
        self.queue.cancel(request.name, job_id)


class Local:
    """Jobs as processes of this machine. The id is the controller's process id."""

    def __init__(self, site: Site, state: Path) -> None:
        self.site, self.shared = site, state
        self.job: LocalJob | None = None

    def slot(self, request: Request, note: Callable[[str], None]) -> AbstractContextManager[None]:
        """There is always room: Snakemake decides how many jobs run at a time."""
        return contextlib.nullcontext()

    def submit(self, request: Request) -> str:
        """Start the job at once; returns its id."""
        executor = LocalExecutor(request.folder)
        executor.update_parameters(
            timeout_min=request.minutes,
            tasks_per_node=request.tasks,
            signal_delay_s=max(1, round(min(30, request.minutes * 60 / 10))),
            setup=list(self.site.setup),
        )
        # submitit hides all GPUs from a local job that asks for none; the job sees what the driver sees
        environment = {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES")}
        environment |= {**self.site.network, **self.site.environment}
        with _stderr_to(request.folder / "controller.err"):
            self.job = executor.submit(
                run_command, request.command, str(request.folder), environment, dict(self.site.node_local)
            )
        return self.job.job_id

    def recover(self, request: Request, previous: list[str]) -> str | None:
        """The running controller of this folder, if there is one."""
        for entry in Path("/proc").glob("[0-9]*"):
            if entry.name not in previous and _is_controller(entry.name, request.folder):
                return entry.name
        return None

    def state(self, job_id: str, submitted: float) -> tuple[str, str]:
        """RUNNING while the controller lives."""
        if self.job is not None and self.job.job_id == job_id:
            running = not self.job.done()  # also reaps the process
        else:
            running = _is_controller(job_id)
        return ("RUNNING" if running else "FINISHED", "")

    def cancel(self, request: Request, job_id: str | None) -> None:
        """Interrupt the controller, which ends its tasks."""
        job_id = job_id or self.recover(request, [])
        if job_id and _is_controller(job_id, request.folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(int(job_id), signal.SIGINT)
            end = time.time() + 10
            while time.time() < end and self.state(job_id, 0.0)[0] == "RUNNING":
                time.sleep(0.05)


EXECUTORS: dict[str, type[Slurm] | type[Local]] = {"slurm": Slurm, "local": Local}


def adopt_pickle(folder: Path, job_id: str) -> None:
    """Give a job its pickle where the driver died between submitting and naming it; the job waits 60 s for that."""
    wanted = JobPaths(folder, job_id).submitted_pickle
    spare = [path for path in folder.glob("*.pkl") if PICKLE.fullmatch(path.name)]
    if spare and not wanted.exists():
        max(spare, key=lambda path: path.stat().st_mtime).rename(wanted)


class _BoundedExecutor(SlurmExecutor):
    """submitit's, with a limit on the time that sbatch may take; `timeout` also keeps a Ctrl-C away from sbatch."""

    def _make_submission_command(self, submission_file_path: Path) -> list[str]:
        return ["timeout", str(SBATCH_TIMEOUT_S), *super()._make_submission_command(submission_file_path)]


@contextlib.contextmanager
def _stderr_to(path: Path) -> Iterator[None]:
    """What is started here writes its errors to a file: submitit's controller tells of a Ctrl-C by a traceback."""
    kept = os.dup(2)
    try:
        with path.open("ab") as stream:
            os.dup2(stream.fileno(), 2)
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


@contextlib.contextmanager
def _without_scheduler_variables():
    """A driver that itself runs inside a job must not hand its own job's variables on to sbatch."""
    inherited = {
        name: value
        for name, value in os.environ.items()
        if name.startswith(("SLURM_", "SRUN_", "SUBMITIT_")) and name != "SLURM_CONF"
    }
    for name in inherited:
        del os.environ[name]
    try:
        yield
    finally:
        os.environ.update(inherited)


def _is_controller(pid: str, folder: Path | None = None) -> bool:
    """Whether this process is submitit's local controller (of `folder`): a process id may have been given out again."""
    try:
        arguments = (Path("/proc") / pid / "cmdline").read_bytes().decode(errors="replace").split("\0")
    except OSError:
        return False
    return "submitit.local._local" in arguments and (folder is None or str(folder) in arguments)
