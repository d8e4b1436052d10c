"""Processor time of examples, beside reading and inflating their blocks alone: the measurement in docs/cache.md."""

from __future__ import annotations

import tempfile
from pathlib import Path

import numpy as np

from megafold.evopipe import cache, shards, template_geometry
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.layout import Entry
from megafold.evopipe.loader import CachedStructures
from megafold.evopipe.measure import processor_seconds
from megafold.evopipe.merge import merge

EPOCHS, REPEATS = 4, 80  # crops of an entry, and times that each is made
NOISE = 0.5  # angstrom, of a template that is an entry's own coordinates


def measure_examples(path: Path, *, crop_size: int, msa_depth: int, templates: int = 0, repeats: int = REPEATS) -> str:
    """A Markdown table, the least of `repeats` runs: milliseconds an example and two bare reads, with their ratios.

    Args:
        path: the cache.
        crop_size, msa_depth: tokens and alignment rows of an example, at most.
        templates: with more than none, every entry is given so many, made of its own coordinates.

    Raises:
        InputError: as `CachedStructures`.
    """
    if not templates:
        return _table(path, crop_size, msa_depth, repeats)
    with tempfile.TemporaryDirectory() as folder:
        return _table(_with_templates(path, Path(folder) / "templates.h5", templates), crop_size, msa_depth, repeats)


def _table(path: Path, crop_size: int, msa_depth: int, repeats: int) -> str:
    data = CachedStructures(path, crop_size=crop_size, msa_depth=msa_depth)
    lines = [
        "| entry | epoch | crop | example, ms | bare read, zlib, ms | ratio | bare read, own library, ms | ratio |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for entry in data.entries:
        for epoch in range(EPOCHS):
            data.set_epoch(epoch)
            data.read(entry)  # what the first one imports
            found = np.array([processor_seconds(data, entry) for _ in range(repeats)]).min(axis=0) * 1e3
            whole, bare, own = found
            cells = [entry, epoch, data.choose(entry)[1].kind, f"{whole:.2f}", f"{bare:.2f}", f"{whole / bare:.2f}"]
            lines.append("| " + " | ".join(map(str, [*cells, f"{own:.2f}", f"{whole / own:.2f}"])) + " |")
    return "\n".join(lines)


def _with_templates(path: Path, copy: Path, count: int) -> Path:
    """The same entries in another cache, each with `count` templates of its own coordinates."""
    with StructureCache(path) as source:
        depth = source.index.msa_depth
        cache.create(copy, msa_depth=depth or None)
        shard = shards.Shard(shards.folder_of(copy), depth)
        for number, name in enumerate(source.names):
            entry = source.read(name)
            entry.arrays.update(_templates(entry, count, np.random.default_rng(number)))
            shard.add(entry, f"{number:032x}", {"versions": cache.versions()})
        shard.seal()
    merge(copy)
    return copy


def _templates(entry: Entry, count: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    tokens, atoms = entry.arrays["tokens"], entry.arrays["atoms"]["position"]
    first = entry.arrays["residues"]["first_atom"][tokens["residue"]]
    frames = atoms[np.minimum(first[:, None] + tokens["frame"], len(atoms) - 1)].astype("<f8")
    centers, n = tokens["center_position"].astype("<f8"), len(tokens)
    state = template_geometry.DISTOGRAM_ATOM | template_geometry.FRAME | template_geometry.PRESENT

    def moved(positions: np.ndarray) -> np.ndarray:
        """With the three decimals of a file."""
        return (positions + rng.normal(0, NOISE, (count, *positions.shape))).round(3)

    return {
        "template_mask": np.ones(count, bool),
        "template_classes": rng.integers(0, 20, (count, n)).astype("u1"),
        "template_positions": moved(centers),
        "template_frames": moved(frames),
        "template_state": np.full((count, n), state, "u1"),
    }
