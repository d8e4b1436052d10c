"""For machines with GPUs: parity over NCCL, ranks that end together, and an emulated rank on one GPU."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch


def _parity(ranks: int) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={ranks}", "--standalone"]
    command += ["-m", "megafold.train.parity"]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=600, env=env)


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several GPUs")
def test_parity_of_every_split_over_nccl():
    done = _parity(torch.cuda.device_count())
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert "bf16, stock: ok" in done.stdout and "bf16, megafold: ok" in done.stdout


SEVERAL = [pytest.mark.multigpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several GPUs")]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=SEVERAL)])
def test_a_process_can_be_in_one_group_after_another(device):
    command = [sys.executable, Path(__file__).with_name("two_groups.py"), device]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"}
        env = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        ranks.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env))
    try:
        logs = [rank.communicate(timeout=120)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], logs
    assert all("left 2" in log for log in logs)


# Seconds in which both ranks end, and what one of them says.
ENDS = {
    "kill": (60, ("rank 1 has not been heard of", "Connection", "NCCL")),
    "oom": (30, ("rank 1 failed", "out of memory")),
    "sleep": (90, ("imeout", "imed out")),
}


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs several GPUs")
@pytest.mark.parametrize("mode", ENDS)
def test_ranks_over_nccl_end_together_with_the_reason(mode, tmp_path):
    _end_together(mode, tmp_path, "cuda")


def _end_together(mode: str, folder: Path, device: str) -> None:
    port = str(29700 + list(ENDS).index(mode))
    ranks = []
    for rank in range(2):
        place = {"RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank)}
        env = os.environ | place | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        command = [sys.executable, Path(__file__).with_name("failing_rank.py"), mode, folder / "run", device]
        log = (folder / f"{rank}.log").open("w")
        ranks.append(subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=env))
    try:
        codes = [rank.wait(timeout=300) for rank in ranks]
        ended = time.time()
    finally:
        for rank in ranks:
            rank.kill()
    logs = [(folder / f"{rank}.log").read_text() for rank in range(2)]
    assert all(codes), logs
    began = max(float(line.split()[-1]) for log in logs for line in log.splitlines() if line.startswith(f"{mode} at"))
    limit, reasons = ENDS[mode]
    assert ended - began < limit, logs
    assert any(reason in log for log in logs for reason in reasons), logs


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("plan", ["eager", "sdpa", "evoflash3d", "evofusion"])
def test_an_emulated_rank_takes_a_step_in_bf16(plan):
    from megafold.evosp3d.emulate import emulated_ranks
    from megafold.model.build import build_model
    from megafold.model.optimize import optimize
    from megafold.model.plan import Plan
    from megafold.model.presets import preset
    from megafold.train.parallel import Parallel
    from megafold.train.synthetic import synthetic_batch
    from megafold.train.trainer import Trainer

    kernels = {"evoflash3d": plan in ("evoflash3d", "evofusion"), "evofusion": plan == "evofusion"}
    chosen = Plan(shared_conditioning=plan == "evofusion", sdpa=plan != "eager", **kernels)
    batch = synthetic_batch(200, msa_depth=64, model_kwargs=preset("demo"))
    peaks = []
    for size in (2, 8):
        with emulated_ranks(size):
            model = build_model("demo").cuda()
            if chosen.evofusion:
                optimize(model, chosen)
            parallel = Parallel(size, torch.device("cuda"))
            parallel.prepare(model, chosen)
            trainer = Trainer(model, device="cuda", dtype=torch.bfloat16, parallel=parallel)
            trainer.step(batch)
            before = torch.cuda.memory_allocated()
            torch.cuda.reset_peak_memory_stats()
            trainer.step(batch)
            peaks.append(torch.cuda.max_memory_allocated() - before)
            del model, trainer, parallel
    assert peaks[1] < peaks[0] / 2


def _check(faulty: bool) -> dict[int, list[str]]:
    from megafold.evosp3d import heads
    from megafold.model.build import build_model
    from megafold.model.presets import preset
    from megafold.train.parity import check, without_silence
    from megafold.train.synthetic import synthetic_batch

    torch.manual_seed(0)
    model = without_silence(build_model("tiny").train())
    batches = {r: synthetic_batch(7, msa_depth=4, seed=r, model_kwargs=preset("tiny")) for r in range(2)}
    if faulty:
        heads.symmetrize_rows = lambda pairs, shards: pairs * 2
    return {sp: check(model, batches, sp, autocast=False) for sp in ((2,) if faulty else (1, 2))}


def test_parity_check_on_two_processes(run_ranks):
    assert run_ranks(2, _check, False) == [{1: [], 2: []}] * 2
    for found in run_ranks(2, _check, True):
        assert any(line.startswith("distogram_head") for line in found[2])
