"""For machines with GPUs: parity over NCCL, and an emulated rank on one GPU."""

from __future__ import annotations

import os
import subprocess
import sys

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
