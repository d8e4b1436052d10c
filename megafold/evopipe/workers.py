"""The processes of a build: they are given one structure at a time, and one that hangs or dies costs that structure."""

from __future__ import annotations

import math
import multiprocessing
import multiprocessing.connection
import signal
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from megafold.errors import InputError
from megafold.evopipe import shards
from megafold.evopipe.maker import PREPARING, READY, Made, Maker, peak_memory
from megafold.evopipe.report import Finding, failed
from megafold.evopipe.shards import Shard, StorageError
from megafold.evopipe.sources import DataSource

LEAVING = 20.0  # seconds for a process that is told to leave to write what it has
Task = tuple[str, Path]


def in_process(source: DataSource, out: Path, msa_depth: int | None, known: dict[str, str], work: list[Task], memory):
    """Make the entries in this process. Yields a Made for each; what was made is kept also when this is interrupted."""
    maker = Maker(source, out, msa_depth, known)
    try:
        for name, path in work:
            yield maker.make(name, path)
    finally:
        maker.finish()
        memory.append(peak_memory())


def _work(source, out, msa_depth, known, pipe) -> None:
    import torch

    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the parent decides
    maker = Maker(source, out, msa_depth, known, pipe.send)
    signal.signal(signal.SIGTERM, _leave)
    pipe.send(READY)
    try:
        try:
            while (task := pipe.recv()) is not None:
                pipe.send(maker.make(*task))
        finally:  # also when it is told to leave: what is made is kept
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            maker.finish()
        pipe.send(peak_memory())
    except StorageError as error:
        pipe.send(error)


def _leave(*_) -> None:
    raise SystemExit(1)


class Worker:
    """A process that makes entries.

    It is forked from a server that has the baseline imported but has run nothing: forking this process could deadlock
    in the thread pools of the libraries (polars, OpenMP), and a fresh interpreter would take 15 seconds for each.
    """

    def __init__(self, *job) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(["megafold.evopipe.preload"])
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(*job, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.task: Task | None = None
        self.started = math.inf  # of the task; the clock does not run while the process prepares itself
        self.ready = False
        self.unsealed: list[Task] = []  # made, but only in the process's memory

    def give(self, task: Task | None) -> None:
        self.task = task
        self.started = time.monotonic() if self.ready else math.inf
        with suppress(OSError):  # a worker that died while idle is found by the end of its pipe
            self.pipe.send(task)

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.pipe.close()


def in_workers(
    source: DataSource,
    out: Path,
    msa_depth: int | None,
    known: dict[str, str],
    work: list[Task],
    memory: list[float],
    *,
    workers: int,
    timeout: float,
) -> Iterator[Made]:
    """The same with several processes; a structure that takes longer than `timeout` seconds is listed and left.

    Raises:
        StorageError: a worker cannot write.
    """
    if not work:
        return
    job = source, out, msa_depth, known
    waiting, lost = work[::-1], Shard(shards.folder_of(out), msa_depth or 0)
    pool = [Worker(*job) for _ in range(min(workers, len(work)))]
    reported: set[str] = set()
    try:
        while waiting or any(worker.task for worker in pool):
            pool += [Worker(*job)] if waiting and not pool else []
            for worker in pool:
                if worker.task is None and waiting:
                    worker.give(waiting.pop())
            busy = [worker for worker in pool if worker.task]
            multiprocessing.connection.wait([worker.pipe for worker in busy], timeout=0.5)
            for worker in busy:
                made = _answer(worker, timeout)
                if made is None:
                    continue
                if worker.task is not None:  # dead or too slow: a fresh process takes its place
                    waiting += worker.unsealed  # and makes again what only it had
                    lost.findings += made.findings
                    worker.stop()
                    pool.remove(worker)
                    pool += [Worker(*job)] if waiting else []
                if made.name not in reported:
                    reported.add(made.name)
                    yield made
            if not waiting:
                waiting += _ended(pool, memory)
        lost.seal()
    finally:
        for worker in pool:
            worker.process.terminate()
        for worker in pool:
            worker.process.join(LEAVING)
            worker.stop()


def _ended(pool: list[Worker], memory: list[float]) -> list[Task]:
    """Let idle workers write their shards and end; what one had made that died instead."""
    again: list[Task] = []
    for worker in [worker for worker in pool if worker.task is None]:
        worker.give(None)
        try:
            while (answer := worker.pipe.recv()) == READY:
                pass
            if isinstance(answer, StorageError):
                raise answer
            memory.append(answer)
        except (EOFError, ConnectionError):
            again += worker.unsealed
        worker.stop()
        pool.remove(worker)
    return again


def _answer(worker: Worker, timeout: float) -> Made | None:
    """What became of the worker's task; None while it works. `worker.task` stays set where the worker is lost."""
    name, path = worker.task
    if worker.pipe.poll():
        try:
            answer = worker.pipe.recv()
        except (EOFError, ConnectionError):
            worker.process.join(5)
            problem = InputError(path, "", f"the worker died (exit code {worker.process.exitcode})")
            return Made(name, "failed", (failed(name, path, problem),), error=problem)
        if answer in (PREPARING, READY):
            worker.ready, worker.started = True, time.monotonic() if answer == READY else math.inf
            return None
        if isinstance(answer, StorageError):
            raise answer
        worker.unsealed = [] if answer.sealed else [*worker.unsealed, worker.task]
        worker.task = None
        return answer
    if time.monotonic() - worker.started > timeout:
        problem = InputError(path, "", f"took more than {timeout:g} s")
        finding = Finding("failed", "time-out", str(path), name, problem.problem, "build again with a longer --timeout")
        return Made(name, "failed", (finding,), error=problem)
    return None
