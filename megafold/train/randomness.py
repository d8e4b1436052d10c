"""State of every random generator that a training step may draw from, to save, restore and keep apart."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def snapshot() -> dict[str, Any]:
    """States of torch (CPU and the current GPU), numpy and Python, in types that a safe load accepts."""
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None,
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), int(position), int(has_gauss), float(gauss)),
    }


def restore(state: dict[str, Any]) -> None:
    """Bring back what :func:`snapshot` returned; the state of a GPU only where there is one."""
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    version, keys, gauss = state["python"]
    random.setstate((version, tuple(keys), gauss))
    name, keys, position, has_gauss, gauss = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, gauss))


def seed_all(*parts: int) -> None:
    """Seed every generator of this process by ``parts``."""
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@contextmanager
def seeded(*parts: int) -> Iterator[None]:
    """Draw from host generators seeded by ``parts``, and leave the global states as they were before.

    What happens inside depends on ``parts`` alone, and what happens after does not depend on it.
    """
    before = torch.get_rng_state(), random.getstate(), np.random.get_state()
    seed = int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:4], "little")
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        torch.set_rng_state(before[0])
        random.setstate(before[1])
        np.random.set_state(before[2])
