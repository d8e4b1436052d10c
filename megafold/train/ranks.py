"""Which of a job's ranks this process is, its device and process group; reads torchrun's and SLURM's variables.

``torchrun --nproc-per-node 8 -m megafold train config.yaml`` and ``srun -n 16 megafold train config.yaml`` both work;
without either a run has one rank and no process group. What NCCL or RCCL needs of a site (network interfaces, plug-ins)
comes from the environment, which the launcher fills from the site's ``network`` section.
"""

from __future__ import annotations

import os
import re
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from megafold.errors import EXIT_BAD_INPUT, InputError
from megafold.train.watch import EVERY_S, Watch, forget_failures

_DEFAULTS = {
    # NVLink multicast needs privileges that a container may lack, and a communicator then fails to start.
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    # A message that could start would otherwise wait until the last block of a kernel before it in the queue has a
    # place: on two H200, N = 768, up to 45 microseconds for each of 1,800 messages of a step.
    "TORCH_NCCL_HIGH_PRIORITY": "1",
    # After a collective that failed or timed out torch waits four times as long for a record of past collectives, by
    # default a minute, before it ends the process, and only then could the other ranks notice that this one is gone.
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "2000",
}


@dataclass(frozen=True)
class Place:
    """``rank`` of ``size``, and ``local_rank``, its number on its host."""

    rank: int
    size: int
    local_rank: int


def find_place(environment: Mapping[str, str] | None = None) -> Place | None:
    """The place that torchrun, the launcher or srun gave this process; None where it runs alone.

    Raises:
        InputError: where one variable is there without the others, or is no number.
    """
    env = os.environ if environment is None else environment
    if "WORLD_SIZE" in env or "RANK" in env:
        names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    elif int(env.get("SLURM_STEP_NUM_TASKS", "1")) > 1:
        names = ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID")
    else:
        return None
    values = []
    for name in names:
        if not env.get(name, "").isdigit():
            raise InputError("environment", name, f"is {env.get(name)!r}; {', '.join(names)} go together")
        values.append(int(env[name]))
    place = Place(*values)
    if place.rank >= place.size:
        raise InputError("environment", names[0], f"is {place.rank}, but there are {place.size} ranks")
    return None if place.size == 1 else place


def device_of(place: Place | None, wanted: str) -> torch.device:
    """The rank's device: its local number among those it sees (one that a scheduler bound to it is number 0).

    Raises:
        InputError: for ``cuda`` where no GPU is visible, and for anything but ``auto``, ``cpu`` and ``cuda``.
    """
    if wanted not in ("auto", "cpu", "cuda"):
        raise InputError("device", "", f"is {wanted!r}; expected auto, cpu or cuda")
    if wanted == "cuda" and not torch.cuda.is_available():
        raise InputError("device", "", "cuda: no GPU is visible to this torch; expected auto or cpu here")
    if wanted == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if place is None:
        return torch.device("cuda")
    return torch.device("cuda", place.local_rank % torch.cuda.device_count())


def init_method(environment: Mapping[str, str] | None = None) -> str:
    """Where the ranks meet: MASTER_ADDR and MASTER_PORT, made up from SLURM's variables where they are missing.

    Raises:
        InputError: where they cannot be.
    """
    env = os.environ if environment is None else environment
    address, port = env.get("MASTER_ADDR"), env.get("MASTER_PORT")
    if not address and env.get("SLURM_STEP_NODELIST"):
        address = _first_host(env["SLURM_STEP_NODELIST"])
    if not port and env.get("SLURM_JOB_ID", "").isdigit():
        port = str(20000 + int(env["SLURM_JOB_ID"]) % 20000)
    if not address or not port:
        raise InputError("environment", "MASTER_ADDR, MASTER_PORT", "missing: start ranks with torchrun or srun")
    return f"tcp://{address}:{port}"


class Membership:
    """A process group of all ranks, watched; nccl (RCCL on AMD) on GPUs, gloo on CPUs.

    Args:
        store: shared by the ranks, for this group alone.
        timeout_s: a collective that takes longer raises.
    """

    def __init__(self, store: dist.Store, place: Place, device: torch.device, *, timeout_s: float) -> None:
        for name, value in _DEFAULTS.items():
            os.environ.setdefault(name, value)
        on_gpu = device.type == "cuda"
        self._devices = [device.index] if on_gpu else None
        if on_gpu:
            torch.cuda.set_device(device)
        # On every rank: the first to come must not take a failure of an earlier group for one of this group, in which
        # no collective can have failed before all are here.
        forget_failures(store)
        self.watch = Watch(store, place.rank, place.size)
        # No device_id: torch would split the mesh's groups off this one, and torch (2.11 to 2.13 at least) dies of a
        # segmentation fault in that where the process has had a group before, as a worker with several points has.
        dist.init_process_group(
            "nccl" if on_gpu else "gloo",
            store=dist.PrefixStore("group", store),
            rank=place.rank,
            world_size=place.size,
            timeout=timedelta(seconds=timeout_s),
        )

    def leave(self) -> None:
        """End the group, when no rank needs it any more."""
        from megafold.evosp3d.graphs import release_all

        dist.barrier(device_ids=self._devices)
        release_all()
        self.watch.finish()
        dist.destroy_process_group()


@contextmanager
def joined(place: Place, device: torch.device, *, timeout_s: float) -> Iterator[None]:
    """A :class:`Membership` for the block.

    Where a rank raises in the block, dies or is not heard of any more, all ranks end within a minute, and each says
    which one it was and why.
    """
    by_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    method = "env://" if by_torchrun else init_method()
    limit = timedelta(seconds=timeout_s)
    store, _, _ = next(dist.rendezvous(method, place.rank, place.size, timeout=limit))
    member = Membership(store, place, device, timeout_s=timeout_s)
    try:
        yield
        member.leave()
    except BaseException as error:
        first = member.watch.fail(error)
        if place.rank == 0 and not first:  # the store may go with this process: the others still have to read why
            time.sleep(2 * EVERY_S)
        # Leaving in the usual way would wait for collectives that never end.
        if first:
            print(f"error: rank {place.rank} ends: {first}", file=sys.stderr)
        elif isinstance(error, InputError):
            print(f"error: rank {place.rank}: {error}", file=sys.stderr)
        else:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(EXIT_BAD_INPUT if isinstance(error, InputError) else 1)


def _first_host(hosts: str) -> str:
    """The first of a SLURM host list: ``node[03-07,12],x`` -> ``node03``."""
    found = re.match(r"([^\[,]+)(?:\[(\d+))?", hosts)
    return found[1] + (found[2] or "")
