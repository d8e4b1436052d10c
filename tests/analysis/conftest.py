"""A factory of records, made through experiments.record, and a whole demo's worth of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from experiments.record import Metric, Record, write_record
from experiments.spec import SHAPE_KEYS, WORKLOADS, Comparison, Contender, Point, Setting

CPU = {"device": "Some CPU @ 2.00GHz", "threads": 2}
DEVICES = {"cpu": CPU, "nvidia": {"device": "NVIDIA H200"}, "amd": {"device": "AMD Instinct MI250X"}}
SIZES = {"n_tokens": 64, "crop_size": 64}


def timed(value: float, unit: str = "s") -> Metric:
    """A time whose p20 and p80 lie 5 % off."""
    return Metric(value, unit, p20=value * 0.95, p80=value * 1.05, n=4)


def build(
    contenders: dict[str, dict[str, Metric] | tuple[str, str]],
    *,
    what: str = "iteration",
    sweep: str | None = None,
    vendor: str = "cpu",
    evidence: str = "measured",
    provenance: dict[str, Any] | None = None,
    plans: dict[str, dict[str, bool]] | None = None,
    providers: dict[str, str] | None = None,
    **setting: Any,
) -> list[Record]:
    """One comparison's records: contender -> its metrics, or (status, reason)."""
    shape = {key: default if default is not None else SIZES[key] for key, default in SHAPE_KEYS[what].items()}
    shape |= {key: setting.pop(key) for key in list(setting) if key in shape}
    names = {"iteration": "iteration", "kernel": "kernels", "data_pipeline": "data_pipeline"}
    defaults = {
        "workload": WORKLOADS[what][0],
        "model": "demo" if what == "iteration" else "",
        "data": "synthetic",
        "variant": "",
        "dtype": "fp32",
    }
    chosen = Setting(sweep=sweep or names[what], what=what, shape=tuple(shape.items()), **(defaults | setting))
    plans, providers = plans or {}, providers or {}
    rivals = tuple(
        Contender(name, providers.get(name, name), tuple(plans.get(name, {}).items())) for name in contenders
    )
    comparison = Comparison(chosen, rivals)
    source = {
        "commit": "0123456789abcdef",
        "dirty": False,
        "hosts": 1,
        "slurm_job_id": None,
        "started": "2026-01-01T00:00:00+00:00",
        **DEVICES[vendor],
    }
    records = []
    for contender in rivals:
        outcome = contenders[contender.name]
        status, reason = ("ok", "") if isinstance(outcome, dict) else outcome
        records.append(
            Record(
                point=Point(chosen, contender),
                comparison_id=comparison.id,
                status=status,
                reason=reason,
                vendor=vendor,
                evidence=evidence,
                metrics=outcome if isinstance(outcome, dict) else {},
                provenance={**source, **(provenance or {})},
            )
        )
    return records


@pytest.fixture(scope="session")
def make() -> Callable[..., list[Record]]:
    """`build`, for tests."""
    return build


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory) -> Callable[[list[Record]], Path]:
    """Writes records as a sweep does and returns results/<site>."""

    def write(records: list[Record], site: str = "local") -> Path:
        folder = tmp_path_factory.mktemp("results") / site
        for record in records:
            write_record(record, folder / "records")
        return folder

    return write


def step(seconds: float, gib: float) -> dict[str, Metric]:
    return {
        "iteration_time": timed(seconds),
        "peak_memory": Metric(gib, "GiB", n=4, definition="resident memory of the process"),
    }


@pytest.fixture(scope="session")
def demo() -> list[Record]:
    """What `make demo` leaves: four sweeps on a CPU."""
    records: list[Record] = []
    for data in ("cache", "synthetic"):
        for n_tokens, seconds in ((32, 2.1), (64, 5.4)):
            rivals = {"eager": step(seconds, 1.9), "compile": ("unsupported", "no C++ compiler on this host")}
            rivals["megafold"] = step(seconds / 1.7, 1.4)
            records += build(rivals, data=data, n_tokens=n_tokens)
    plans = {
        "megafold": {"shared_conditioning": True, "sdpa": True},
        "only-shared_conditioning": {"shared_conditioning": True, "sdpa": False},
        "only-sdpa": {"shared_conditioning": False, "sdpa": True},
    }
    providers = dict.fromkeys(plans, "megafold")
    rivals = {"eager": step(5.4, 1.9), "only-shared_conditioning": step(3.5, 1.5), "only-sdpa": step(5.5, 1.8)}
    rivals["megafold"] = step(3.2, 1.4)
    records += build(rivals, sweep="ablation", plans=plans, providers=providers)
    for n_tokens in (32, 64, 128):
        cost = (n_tokens / 32) ** 3
        rivals = {
            name: {
                "forward_time": timed(factor * cost * 1e-3),
                "forward_backward_time": timed(3 * factor * cost * 1e-3),
                "peak_memory": Metric(factor * cost / 2**10, "GiB"),
            }
            for name, factor in {"eager": 1.0, "sdpa": 0.8, "evoflash3d": 0.9}.items()
        }
        rivals["trifast"] = ("unsupported", "needs a GPU")
        records += build(rivals, what="kernel", n_tokens=n_tokens)
    rivals = {"stock": {"example_time": timed(1.9)}, "evopipe": {"example_time": timed(0.021)}}
    return records + build(rivals, what="data_pipeline", crop_size=64)
