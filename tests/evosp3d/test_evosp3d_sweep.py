"""Points of several ranks through the launcher, and one rank of many emulated: what their records say."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from experiments.record import read_record, read_records, record_path
from experiments.spec import load_sweep

MEGAFOLD = [sys.executable, "-m", "megafold"]
TINY = ["model=tiny", "n_tokens=9", "msa_depth=3", "atoms_per_token=3", "visits=1", "warmup=0", "repeats=1"]


def _sweep(*settings: str):
    return load_sweep("sequence_parallel", size="demo", settings=[*TINY, "timeout_s=200", *settings])


def test_two_ranks_through_the_launcher_give_one_record_a_point(tmp_path):
    from cluster.batch import Layout, measure_batch
    from cluster.site import load_site

    points = [entry.as_dict() for entry in _sweep("sp=2", "n_tokens=[9,8]").comparisons]
    layout = Layout(tmp_path)
    # The second point has the workers of the first: in a process group of its own.
    record, second = measure_batch(load_site("local"), layout, "sequence_parallel", "one", points, MEGAFOLD)
    logs = "\n".join(path.read_text() for path in Path(tmp_path).rglob("*.log"))
    assert (record.status, record.reason, record.evidence) == ("ok", "", "measured"), logs[-3000:]
    assert (second.status, second.reason) == ("ok", ""), logs[-3000:]
    assert len(list(Path(tmp_path).rglob("iteration-megafold-*.log"))) == 2, "a worker a rank"
    metrics = record.metrics
    assert metrics["sent"].value == pytest.approx(
        sum(metrics[f"sent_{kind}"].value for kind in ("all_to_all", "all_gather", "reduce_scatter", "all_reduce"))
    )
    assert metrics["sent_all_to_all"].value > 0 and metrics["loss"].value > 0
    assert metrics["communication_estimate_network"].value > metrics["communication_estimate_nvlink"].value > 0


def test_a_rank_out_of_memory_ends_its_point_on_all_ranks_and_the_next_one_runs(tmp_path):
    """The first rank waits for the second in a collective that never comes; both get new workers afterwards."""
    folder = Path(__file__).parent
    for number, comparison in enumerate(_sweep("sp=2", "n_tokens=[9,8,7]").comparisons):
        content = comparison.as_dict()
        content["contenders"][0]["provider"] = "runs_out"
        (tmp_path / f"{number}.json").write_text(json.dumps(content))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    paths = [str(folder), str(folder.parents[1]), os.environ.get("PYTHONPATH", "")]
    env = os.environ | {"MEGAFOLD_PROVIDERS": "runs_out", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", port]
    files = [f"{tmp_path}/{number}.json" for number in range(3)]
    command = [*torchrun, *MEGAFOLD[1:], "measure", *files, "--records", f"{tmp_path}/out/records"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=180, env=env | {"OMP_NUM_THREADS": "1"})
    found = {r.point.setting.size("n_tokens"): r for r in read_records(tmp_path / "out" / "records")}
    assert {n: r.status for n, r in found.items()} == {9: "ok", 8: "oom", 7: "ok"}, done.stdout + done.stderr[-3000:]
    assert found[8].reason.startswith("rank 1: OutOfMemoryError: CUDA out of memory")


def test_an_emulated_rank_sends_what_a_real_one_sends(tmp_path, run_ranks):
    from experiments.run import measure

    comparisons = [*_sweep("sp=3", "mode=emulated").comparisons, *_sweep("sp=2").comparisons]
    record, refused = measure(comparisons, tmp_path, cache=None, logs=tmp_path / "logs", command="test", device="cpu")
    comparison = comparisons[0]
    assert (record.status, record.reason, record.evidence) == ("ok", "", "emulated")
    assert read_record(record_path(tmp_path, comparison.points[0])).evidence == "emulated"
    assert "emulated" in record.point.id
    assert "loss" not in record.metrics  # it would mean nothing
    assert "fake collectives" in record.metrics["iteration_time"].definition
    real = run_ranks(3, _sent_by_a_real_rank)[0]
    for kind, size in real.items():
        assert record.metrics[f"sent_{kind}"].value * 2**30 == pytest.approx(size, abs=0.5), kind
    # Ranks that were not started are told.
    assert refused.status == "unsupported" and "needs 2 ranks, and 1 were started" in refused.reason


def _sent_by_a_real_rank() -> dict[str, int]:
    import torch

    from megafold.model.build import build_model
    from megafold.model.presets import preset
    from megafold.train.parallel import Parallel
    from megafold.train.synthetic import synthetic_batch
    from megafold.train.trainer import Trainer

    batch = synthetic_batch(9, atoms_per_token=3, msa_depth=3, model_kwargs=preset("tiny"))
    model = build_model("tiny")
    parallel = Parallel(3, torch.device("cpu"))
    parallel.prepare(model, None)
    Trainer(model, device="cpu", parallel=parallel).step(batch)
    return parallel.shards.traffic.by_kind()


def test_the_full_sweeps_are_emulated_and_their_ids_say_so():
    for name in ("sequence_parallel", "max_length"):
        points = [point for comparison in load_sweep(name).comparisons for point in comparison.points]
        assert all(point.setting.mode == "emulated" and "emulated" in point.id for point in points)
    assert {point.setting.sp for point in points} == {1, 8, 32}
