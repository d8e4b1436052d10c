"""One training example through the baseline's own path, and the same through the cache (sweep `data_pipeline`)."""

from __future__ import annotations

import atexit
import math
import os
import random
import shutil
import tempfile
import time
import zlib
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from megafold.errors import InputError
from megafold.evopipe import alignments, assembly
from megafold.evopipe.inflate import inflate
from megafold.evopipe.sources import DataSource, materialize

if TYPE_CHECKING:
    from collections.abc import Callable

    from megafold.evopipe.loader import CachedStructures


@lru_cache(maxsize=4)
def stage_for_stock(source: DataSource, *, unresolved: bool = False) -> Path:
    """A folder in the layout that the baseline reads: uncompressed, expanded, cleaned, alignments named by chain.

    Not timed: the baseline needs files prepared like this (and silently ignores gzipped alignments). The alignments
    have columns for the resolved residues, which is all that the baseline keeps, or for every one with `unresolved`.
    """
    source = materialize(source)
    root = Path(tempfile.mkdtemp(prefix="megafold-stock-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    (root / "msa").mkdir()
    from megafold.evopipe.featurize import chain_residues
    from megafold.evopipe.structure import parse

    for name, path in source.files().items():
        text = alignments.read_text(path)
        if not assembly.is_prepared(text, path.name):
            text = assembly.build(text, name, str(path), most_chains=source.max_chains).text
        folder = root / "mmcif" / name[1:3]
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{name}.cif").write_text(text)
        if source.msa is None:
            continue
        from alphafold3_pytorch.inputs import extract_polymer_sequence_from_chain_residues as polymer_sequence

        parsed = parse(text, name, str(path), unresolved=unresolved)
        for chain, residues in chain_residues(parsed.biomolecule).items():
            keys = ("chemtype", "restype", "unique_chain_residue_indices")
            sequence = polymer_sequence(*(residues[key] for key in keys))
            full = parsed.sequences.get(chain)
            for number, file in enumerate(alignments.find(source.msa, name, chain) if sequence else []):
                try:
                    fitted = alignments.fit(file, chain, sequence, full, None)
                except InputError:
                    continue  # the cache does without it, and its build has said so
                (root / "msa" / f"{name}{chain}_{number}.a3m").write_text(fitted)
    return root


def read_stock_example(source: DataSource, entry: str, crop_size: int, msa_depth: int, seed: int) -> Any:
    """The baseline: parse, featurise and crop one structure. Returns an `AtomInput` (dense atom pairs).

    The first call for a source prepares its folder (`stage_for_stock`); call that before timing.
    """
    from alphafold3_pytorch import inputs

    if inputs.CCD_COMPONENTS_SMILES is None:
        from megafold.evopipe import ccd

        ccd.install(source.components)
    from alphafold3_pytorch.data import mmcif_parsing

    mmcif_parsing.parse.cache_clear()  # it keeps the last 16 files; an epoch over a data set never hits it
    root = stage_for_stock(source)
    random.seed(seed)
    np.random.seed(seed)
    example = inputs.PDBInput(
        mmcif_filepath=str(root / "mmcif" / entry[1:3] / f"{entry}.cif"),
        chains=(None, None),
        cropping_config={
            "contiguous_weight": 0.2,
            "spatial_weight": 0.4,
            "spatial_interface_weight": 0.4,
            "n_res": crop_size,
        },
        msa_dir=str(root / "msa"),
        max_msas_per_chain=msa_depth,
        training=True,
    )
    return inputs.maybe_transform_to_atom_input(example, raise_exception=True)


def read_cached_example(dataset: CachedStructures, entry: str) -> dict[str, Any]:
    """The same through a cache: one crop of an entry, from the files, in the compact form that leaves a worker.

    Nothing of the entry is in the reader's memory (it keeps none); its files are open, as in a worker.
    """
    return dataset.read(entry)


def blocks_of(dataset: CachedStructures, entry: str) -> list[tuple[int, int, int, int]]:
    """(open file, offset, bytes, bytes inflated) of each stored block that an example of `entry` needs.

    Of two equal sizes the block is not deflated. The reader keeps nothing of the entry.
    """
    _, choice, rows = dataset.choose(entry)
    window = np.flatnonzero(choice.keep), (int(rows[0]), int(rows[-1]))
    handle = dataset.cache.shard_handle(dataset.cache.row(entry))
    found = [
        (handle, offset, size, math.prod(table.block) * table.dtype.itemsize)
        for name, table in dataset.cache.tables(entry).items()
        for _, (offset, size, _) in (table.chosen(*window) if name == "msa" else table.chosen())
    ]
    dataset.cache.forget()
    return found


def _with_zlib(data: bytes, _: int) -> bytes:
    return zlib.decompress(data)


def read_blocks(blocks: list[tuple[int, int, int, int]], inflating: Callable[[bytes, int], bytes] = _with_zlib) -> int:
    """Read and decompress blocks by the shortest way, without checks, and drop them; their bytes.

    What `read_cached_example` cannot do without; by default with zlib, as any program without further libraries does.
    """
    total = 0
    for handle, offset, size, whole in blocks:
        data = os.pread(handle, size, offset)
        total += len(data if size == whole else inflating(data, whole))
    return total


def processor_seconds(dataset: CachedStructures, entry: str) -> tuple[float, float, float]:
    """Processor time (s) of one example, and of reading and inflating its blocks alone; other processes change it less.

    The first is what `read_cached_example` takes, the second what `read_blocks` does, the third the same with the
    library that the reader inflates with.
    """
    blocks = blocks_of(dataset, entry)
    started = time.process_time_ns()
    read_cached_example(dataset, entry)
    marks = [time.process_time_ns()]
    for inflating in (_with_zlib, inflate):
        read_blocks(blocks, inflating)
        marks.append(time.process_time_ns())
    whole, bare, own = (after - before for before, after in zip([started, *marks], marks))
    return whole / 1e9, bare / 1e9, own / 1e9


def read_with_hdf5(dataset: CachedStructures, entry: str) -> dict[str, np.ndarray]:
    """The datasets of an entry, whole, through the HDF5 library: how any other program would read them."""
    from megafold.evopipe import codec, safe_hdf5

    row = dataset.cache.row(entry)
    with safe_hdf5.opened(dataset.cache.index.shard_path(row)) as file:
        group = file[f"entries/{row['key'].tobytes().hex()}"]
        return {name: group[name][()] for name in codec.STORED}
