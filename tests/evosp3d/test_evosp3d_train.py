"""`megafold train` on several gloo ranks: the same steps as on one, an exact resume, and ranks that end together."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time

import pytest
import torch

from megafold.errors import InputError
from megafold.train.config import config_from_mapping
from megafold.train.ranks import Place, find_place, init_method


def _config(folder, **changes):
    return config_from_mapping(
        {
            "output": str(folder),
            "steps": 2,
            "device": "cpu",
            "model": {"preset": "tiny", "overrides": {"diffusion_num_augmentations": 2}},
            "data": {"synthetic": {"n_tokens": 7, "atoms_per_token": 3, "structures": 3}, "msa_depth": 3},
            "plan": "none",
            "optimizer": {"learning_rate": 1e-3, "warmup_steps": 1},
            **changes,
        }
    )


def _steps(folder):
    lines = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    return [line for line in lines if "event" not in line]


def _train_rank(rank, size, config, folder):
    """A rank of `train` in a process of its own (the process group is the trainer's, not the test's)."""
    from megafold.train import loop, ranks

    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
    ranks.init_method = lambda: f"file://{folder}/rendezvous"
    torch.set_num_threads(1)
    loop.train(config)
    os._exit(0)


@pytest.fixture
def train_ranks(run_ranks, tmp_path):
    """train_ranks(P, config) -> exit codes; waits at most 100 s."""
    import multiprocessing
    import tempfile

    def run(size, config, rank_function=_train_rank, during=lambda ranks: None):
        with tempfile.TemporaryDirectory() as folder:
            context = multiprocessing.get_context("fork")
            ranks = [context.Process(target=rank_function, args=(r, size, config, folder)) for r in range(size)]
            for process in ranks:
                process.start()
            during(ranks)
            end = time.time() + 100
            for process in ranks:
                process.join(timeout=max(0, end - time.time()))
            hung = [process for process in ranks if process.is_alive()]
            for process in hung:
                process.kill()
            return ["hung" if process in hung else process.exitcode for process in ranks]

    return run


def test_two_ranks_take_the_steps_of_one_and_resume(train_ranks, tmp_path):
    from megafold.train.loop import train

    train(_config(tmp_path / "one"))
    assert train_ranks(2, _config(tmp_path / "two", steps=1, parallel={"sp": 2})) == [0, 0]
    assert train_ranks(2, _config(tmp_path / "two", parallel={"sp": 2})) == [0, 0]
    one, two = _steps(tmp_path / "one"), _steps(tmp_path / "two")
    assert len(one) == len(two) == 2
    # The generators are seeded by the replica, so random numbers differ; weights and data do not.
    assert [step["entry"] for step in one] == [step["entry"] for step in two]
    assert all(step["loss"] is not None and not step["skipped"] for step in two)


def test_replicas_train_on_batches_of_their_own(train_ranks, tmp_path):
    assert train_ranks(2, _config(tmp_path / "two", parallel={"sp": 1})) == [0, 0]
    # Three structures in turn, two a step: replica 0, which logs, has the first and then the third.
    assert [step["entry"] for step in _steps(tmp_path / "two")] == [["synthetic-0"], ["synthetic-2"]]


def _to_file(config, rank):
    sys.stderr = open(f"{config.output}-{rank}.err", "w")  # noqa: SIM115 (as long as the process lives)


def _rank_that_raises(rank, size, config, folder):
    from megafold.train.trainer import Trainer

    if rank == 1:
        step = Trainer.step

        def broken(self, batch):
            if self.steps == 1:
                raise ArithmeticError("the flux capacitor is empty")
            return step(self, batch)

        Trainer.step = broken
    _to_file(config, rank)
    _train_rank(rank, size, config, folder)


def test_a_rank_that_raises_ends_all_with_its_error(train_ranks, tmp_path):
    began = time.time()
    codes = train_ranks(3, _config(tmp_path / "out", parallel={"sp": 3}), _rank_that_raises)
    assert time.time() - began < 60
    assert codes == [1, 1, 1]
    own, other = ((tmp_path / f"out-{rank}.err").read_text() for rank in (1, 2))
    assert "ArithmeticError: the flux capacitor is empty" in own and "Traceback" in own
    assert "rank 1 failed: ArithmeticError: the flux capacitor is empty" in other


def _to_a_file(rank, size, config, folder):
    _to_file(config, rank)
    _train_rank(rank, size, config, folder)


def test_a_rank_that_is_killed_ends_all(train_ranks, tmp_path):
    def kill(ranks):
        log = tmp_path / "out" / "log.jsonl"
        end = time.time() + 60
        while time.time() < end and not (log.exists() and '"step": 1' in log.read_text()):
            time.sleep(0.1)
        os.kill(ranks[1].pid, signal.SIGKILL)

    began = time.time()
    config = _config(tmp_path / "out", parallel={"sp": 3}, steps=10000)
    codes = train_ranks(3, config, _to_a_file, kill)
    assert codes[1] == -signal.SIGKILL and codes[0] == codes[2] == 1
    assert time.time() - began < 90
    told = "".join((tmp_path / f"out-{rank}.err").read_text() for rank in (0, 2))
    assert "rank 1 has not been heard of" in told or "Connection" in told


def test_a_silent_rank_is_noticed_where_nothing_else_tells(monkeypatch, tmp_path):
    import torch.distributed as dist

    from megafold.train import watch

    told = []
    monkeypatch.setattr(watch, "EVERY_S", 0.05)
    monkeypatch.setattr(watch.Watch, "_end", lambda self, line: (told.append((self._rank, line)), self._over.set()))
    store = dist.HashStore()
    others = [watch.Watch(store, rank, 3, silent_s=1.0) for rank in (0, 2)]
    silent = watch.Watch(store, 1, 3, silent_s=1.0)
    time.sleep(0.5)
    assert told == []
    silent._over.set()  # as a kill would: it neither counts nor tells
    time.sleep(3)
    assert sorted(rank for rank, _ in told) == [0, 2]
    assert all(line.startswith("rank 1 has not been heard of for 1 s") for _, line in told)
    for other in others:
        other._over.set()


def test_a_time_out_of_nccl_is_told_to_all_ranks_and_forgotten_by_the_next_group(monkeypatch):
    import torch.distributed as dist

    from megafold.train import watch

    told = []
    monkeypatch.setattr(watch, "EVERY_S", 0.05)
    monkeypatch.setattr(watch.Watch, "_end", lambda self, line: (told.append((self._rank, line)), self._over.set()))
    base = dist.HashStore()
    first = dist.PrefixStore("workers", dist.PrefixStore("first", base))
    ranks = [watch.Watch(first, rank, 2) for rank in range(2)]
    time.sleep(0.2)
    assert told == []
    base.set("exception_dump", b"\x01\x00\x00\x00")  # as torch's NCCL group does where a collective of rank 1 fails
    for rank in ranks:
        rank._thread.join(timeout=10)
    assert {rank for rank, _ in told} == {0, 1}
    assert all(line.startswith("rank 1: a collective over NCCL failed or timed out") for _, line in told)
    second = dist.PrefixStore("second", base)
    watch.forget_failures(second)
    alone = watch.Watch(second, 0, 1)
    time.sleep(0.3)
    assert alone._thread.is_alive()
    alone.finish()


def test_a_group_on_gpus_is_not_bound_to_its_device(monkeypatch):
    """torch splits the groups of a mesh off a bound one, and dies in that where the process had a group before."""
    import torch.distributed as dist

    from megafold.train.ranks import Membership

    given = {}
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: given.update(device=device))
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **rest: given.update(rest, backend=backend))
    member = Membership(dist.HashStore(), Place(0, 2, 0), torch.device("cuda", 0), timeout_s=5)
    member.watch._over.set()
    assert given["backend"] == "nccl" and given["device"].index == 0
    assert given.get("device_id") is None
    # A rank whose collective timed out ends within the minute in which all ranks do.
    assert 4 * int(os.environ["TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"]) <= 10_000


@pytest.mark.parametrize(
    ("environment", "place"),
    {
        "alone": ({}, None),
        "torchrun": ({"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}, Place(3, 8, 1)),
        "one-rank": ({"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"}, None),
        "srun": ({"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "6", "SLURM_LOCALID": "2"}, Place(5, 6, 2)),
        "salloc-without-srun": ({"SLURM_NTASKS": "6", "SLURM_PROCID": "0"}, None),
    }.values(),
    ids=["alone", "torchrun", "one-rank", "srun", "salloc-without-srun"],
)
def test_place_from_the_environment(environment, place):
    assert find_place(environment) == place


def test_half_an_environment_is_told():
    with pytest.raises(InputError, match="WORLD_SIZE"):
        find_place({"RANK": "0"})
    with pytest.raises(InputError, match="MASTER_ADDR"):
        init_method({})


def test_ranks_of_srun_meet_on_the_first_host():
    env = {"SLURM_STEP_NODELIST": "node[03-07,12],other", "SLURM_JOB_ID": "20007"}
    assert init_method(env) == "tcp://node03:20007"


def test_sp_without_ranks_is_one_line(tmp_path):
    from megafold.train.loop import train

    with pytest.raises(InputError, match=r"parallel\.sp: is 2: start that many ranks"):
        train(_config(tmp_path, parallel={"sp": 2}))


def test_torchrun_starts_two_ranks(tmp_path):
    config = tmp_path / "config.yaml"
    config.write_text(
        f"output: {tmp_path}/out\nsteps: 1\ndevice: cpu\nplan: none\nmodel: {{preset: tiny}}\n"
        "data: {synthetic: {n_tokens: 6, atoms_per_token: 3, structures: 1}, msa_depth: 2}\nparallel: {sp: 2}\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2", "--standalone"]
    command += ["-m", "megafold", "train", str(config)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=240, env=os.environ | {"OMP_NUM_THREADS": "1"}
    )
    assert done.returncode == 0, done.stderr
    assert len(_steps(tmp_path / "out")) == 1
    assert done.stdout.count(", checkpoint ") == 1  # one rank reports
