"""Entries of random numbers, for tests of the storage. Imports no test framework: writers that are killed use it."""

from __future__ import annotations

import numpy as np

from megafold.evopipe import layout
from megafold.evopipe.layout import Entry


def random_entry(name: str, n: int = 300, rows: int = 40, seed: int = 0) -> Entry:
    """An entry of random numbers: sound as storage, no structure."""
    rng = np.random.default_rng(seed)
    sizes = {
        "tokens": (n,), "residues": (n,), "atoms": (8 * n,), "bonds": (5,), "links": (2,), "link_tokens": (7,),
        "msa": (rows, n), "deletions": (rows, n), "deletion_values": (9,), "profile": (n, 33),
        "template_mask": (1,), "template_classes": (1, n), "template_state": (1, n),
        "template_positions": (1, n, 3), "template_frames": (1, n, 3, 3),
    }  # fmt: skip
    arrays = {}
    for key, dtype in layout.ARRAYS.items():
        if key == "components":
            arrays[key] = np.array([b"ALA", b"GLY", b"DA", b"ATP"], dtype)
        else:
            size = int(np.prod(sizes[key])) * dtype.itemsize
            data = rng.integers(0, 2, size, dtype=np.uint8)
            arrays[key] = np.frombuffer(data.tobytes(), dtype).reshape(sizes[key]).copy()
    arrays["tokens"]["kind"][::7] = layout.LIGAND  # some have neighbours to look up
    return Entry(name, arrays, ("A", "B"), 1.8, "1987-04-16", {"ATP": "CCO"}, {"x.cif": "0" * 64}, ("a note",))
