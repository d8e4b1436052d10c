"""Which part of the structures a task of a cluster makes: `i/n`, or what SLURM says about the task. Light import."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping

from megafold.errors import InputError

# An array task counts from a first index that the array chooses; a task of one job from 0.
ARRAY = ("SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_TASK_MIN", "SLURM_ARRAY_TASK_COUNT")
STEP = ("SLURM_PROCID", "SLURM_NTASKS")


def parse_part(text: str, environment: Mapping[str, str] | None = None) -> tuple[int, int]:
    """(i, n), i from 1.

    Args:
        text: `i/n`, or `task`: this task's number among those of the SLURM array, or else of the SLURM job.

    Raises:
        InputError: neither, i is not within 1..n, or `task` outside SLURM.
    """
    environment = os.environ if environment is None else environment
    if text == "task":
        return _of_task(environment)
    found = re.fullmatch(r"(\d+)/(\d+)", text)
    if not found or not 1 <= int(found[1]) <= int(found[2]):
        raise InputError("--shard", text, "must be i/n with 1 <= i <= n (2/8: the second of eight parts), or task")
    return int(found[1]), int(found[2])


def _of_task(environment: Mapping[str, str]) -> tuple[int, int]:
    try:
        if all(name in environment for name in ARRAY):
            here, first, count = (int(environment[name]) for name in ARRAY)
            part = here - first + 1, count
        else:
            here, count = (int(environment[name]) for name in STEP)
            part = here + 1, count
    except (KeyError, ValueError) as error:
        problem = f"SLURM does not say which task this is ({', '.join(STEP)}); give i/n instead"
        raise InputError("--shard", "task", problem) from error
    if not 1 <= part[0] <= part[1]:
        problem = f"SLURM names task {part[0]} of {part[1]}; an array must be contiguous (0-{part[1] - 1})"
        raise InputError("--shard", "task", problem)
    return part
