"""What one training step does: with or without the confidence head, and how often the trunk is recycled.

``core``: no confidence labels, one pass of the trunk. ``full``: with them (rollouts and confidence head at every step).
``full_one_rollout``: the same with one rollout of a structure, as AF3 does, instead of one an augmentation as the stock
model does; it needs a plan with ``asynchronous`` or ``chunked_heads`` (see `megafold.model.optimize.optimize`).
``as_published``: confidence labels at every tenth step, and one to four passes of the trunk, drawn for each step.
How often the confidence head is trained can be set for every workload that trains it.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

WORKLOADS = ("core", "full", "full_one_rollout", "as_published")
CONFIDENCE_LABELS = ("atom_indices_for_frame", "resolution", "resolved_labels", "valid_atom_indices_for_frame")
CONFIDENCE_EVERY = 10
MAX_RECYCLES = 4


def has_confidence(workload: str, step: int, every: int = 0) -> bool:
    """Whether step number ``step`` (from 0) of ``workload`` runs the confidence head.

    ``every``: at each so-manieth step; 0: as often as the workload says.
    """
    if workload == "core":
        return False
    return step % (every or (CONFIDENCE_EVERY if workload == "as_published" else 1)) == 0


def rollouts(workload: str) -> int | None:
    """Structures rolled out for the confidence head; None: one for each augmentation, as in the stock model."""
    return 1 if workload == "full_one_rollout" else None


def recycles(workload: str, step: int, seed: int = 0) -> int:
    """Passes of the trunk at step ``step``: a function of step and seed alone, so a resumed run draws the same."""
    if workload != "as_published":
        return 1
    return random.Random(f"{seed}/{step}").randint(1, MAX_RECYCLES)


def arrange(batch: Mapping[str, Any], workload: str, step: int, seed: int = 0, every: int = 0) -> dict[str, Any]:
    """The keyword arguments of `Alphafold3.forward` for this step: labels dropped where the workload has none.

    ``every``: see :func:`has_confidence`.
    """
    if workload not in WORKLOADS:
        raise ValueError(f"workload {workload!r}: expected one of {', '.join(WORKLOADS)}")
    keep = has_confidence(workload, step, every)
    arranged = {name: value for name, value in batch.items() if keep or name not in CONFIDENCE_LABELS}
    arranged["num_recycling_steps"] = recycles(workload, step, seed)
    return arranged
