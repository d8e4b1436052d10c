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


def _beyond(found: dict[str, Any], exact: dict[str, Any], tolerance: float) -> list[str]:
    """Names whose tensor is off by more than ``tolerance``, relative to the largest of the same module."""
    assert found.keys() == exact.keys(), sorted(found.keys() ^ exact.keys())
    scales: dict[str, float] = {}
    for name, value in exact.items():
        module = name.rpartition(".")[0]
        scales[module] = max(scales.get(module, 0.0), value.norm().item())
    errors = {name: (found[name] - value).norm().item() for name, value in exact.items()}
    return [
        f"{name}: {error:.1e} of {scales[name.rpartition('.')[0]]:.1e}"
        for name, error in errors.items()
        if not error <= tolerance * scales[name.rpartition(".")[0]] + 1e-16
    ]


@pytest.fixture(scope="session")
def beyond() -> Callable[..., list[str]]:
    return _beyond


def _summed(results: list[dict[str, Any]]) -> dict[str, Any]:
    """Gradients by name, summed over the ranks: what the one reduction of a step makes of them."""
    return {name: sum(gradients[name] for gradients in results) for name in results[0]}


@pytest.fixture(scope="session")
def summed() -> Callable[..., dict[str, Any]]:
    return _summed


def _set_dropout(model: torch.nn.Module, probability: float) -> None:
    """Where the published model drops something: pairs, alignments and the trunk's single attention."""
    for name, module in model.named_modules():
        of_attention = name.endswith("attn_dropout")
        in_trunk = name.startswith(("template_embedder", "msa_module", "pairformer", "confidence_head"))
        if isinstance(module, torch.nn.Dropout) and in_trunk and not (of_attention and "tri_attn" in name):
            module.p = probability


@pytest.fixture(scope="session")
def set_dropout() -> Callable[..., None]:
    return _set_dropout


@pytest.fixture(scope="session")
def make_model() -> Callable[..., torch.nn.Module]:
    """The tiny model of tests/model in float64: every layerscale and gate random, dropout off."""
    import alphafold3_pytorch  # noqa: F401

    return lambda **overrides: HELPERS._make_model(**overrides).double()
