"""Several gloo processes by fork, and the labelled batches and models of tests/model."""

from __future__ import annotations

import importlib.util
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch

START = multiprocessing.get_context("fork")
LIMIT_S = 120


def _shared_helpers():
    path = Path(__file__).parents[1] / "model" / "conftest.py"
    spec = importlib.util.spec_from_file_location("model_conftest", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


HELPERS = _shared_helpers()


def _one_rank(rank: int, size: int, folder: str, function: Callable[..., Any], args: tuple) -> None:
    import torch.distributed as dist

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=size, timeout=timedelta(seconds=60)
        )
        result = function(*args)
        torch.save(result, f"{folder}/{rank}.tmp")
        os.rename(f"{folder}/{rank}.tmp", f"{folder}/{rank}.pt")
        dist.barrier()
        os._exit(0)
    except BaseException:
        Path(f"{folder}/{rank}.error").write_text(traceback.format_exc())
        os._exit(1)


def _run_ranks(size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
    with tempfile.TemporaryDirectory() as folder:
        ranks = [START.Process(target=_one_rank, args=(rank, size, folder, function, args)) for rank in range(size)]
        for process in ranks:
            process.start()
        end = time.time() + LIMIT_S
        while any(p.is_alive() for p in ranks) and time.time() < end and not list(Path(folder).glob("*.error")):
            time.sleep(0.01)
        for process in ranks:
            process.join(timeout=5 if time.time() < end else 0)
            if process.is_alive():
                process.kill()
        errors = "\n".join(f"rank {p.stem}: {p.read_text()}" for p in sorted(Path(folder).glob("*.error")))
        missing = [rank for rank in range(size) if not Path(folder, f"{rank}.pt").exists()]
        if errors or missing:
            raise RuntimeError(f"ranks {missing} gave no result\n{errors}")
        return [torch.load(f"{folder}/{rank}.pt", weights_only=False) for rank in range(size)]


@pytest.fixture(scope="session")
def run_ranks() -> Callable[..., list[Any]]:
    """run_ranks(P, function, *args) -> what the function returned on each of P gloo ranks (started by fork)."""
    import alphafold3_pytorch  # noqa: F401 (once, before any fork)

    return _run_ranks


@pytest.fixture(scope="session")
def helpers():
    """The functions behind the fixtures of tests/model/conftest.py, to be called on a rank."""
    return HELPERS
