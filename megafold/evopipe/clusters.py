"""Weights of chains and interfaces by the sizes of their clusters (AF3 supplement 2.5.1), from tables of clusters.

The tables are those that alphafold3-pytorch's clustering writes and its `WeightedPDBSampler` reads, CSV with a header:

chains: pdb_id, chain_id, molecule_id, cluster_id
interfaces: pdb_id, interface_chain_id_1, interface_chain_id_2, interface_molecule_id_1, interface_molecule_id_2,
    interface_cluster_id (other columns are not looked at)

`molecule_id` starts with protein, peptide, rna, dna or ligand, and a minus. `pdb_id` is an entry's id, with
`-assembly1` or without. Clusters of several tables of chains are different ones, as there.
"""

from __future__ import annotations

import csv
import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from megafold.errors import InputError
from megafold.evopipe.augment import CHAIN_WEIGHT, INTERFACE_WEIGHT, TYPE_WEIGHTS

CHAIN_COLUMNS = ("pdb_id", "chain_id", "molecule_id", "cluster_id")
INTERFACE_COLUMNS = (
    "pdb_id", "interface_chain_id_1", "interface_chain_id_2", "interface_molecule_id_1", "interface_molecule_id_2",
    "interface_cluster_id",
)  # fmt: skip


class Clusters:
    """Weights of the chains and interfaces of a data set.

    Args:
        tables: paths of tables of chains and of interfaces, told apart by their columns.

    Raises:
        InputError: a table that cannot be read, lacks a column, or names an unknown type of molecule.
    """

    def __init__(self, tables: Sequence[str | os.PathLike[str]]) -> None:
        self._weights: dict[str, dict[tuple[str, ...], float]] = defaultdict(dict)
        for path in map(Path, tables):
            rows = _rows(path)
            sizes = Counter(row[-1] for row in rows)
            for name, *given, cluster in rows:
                chains, molecules = given[: len(given) // 2], given[len(given) // 2 :]
                alpha = sum(_type_weight(molecule, path) for molecule in molecules)
                beta = CHAIN_WEIGHT if len(chains) == 1 else INTERFACE_WEIGHT
                self._weights[_short(name)][tuple(chains)] = beta * alpha / sizes[cluster]

    def of(self, entry: str, chains: Sequence[str]) -> dict[tuple[int, int], float]:
        """(chain, -1) or (chain, chain), as indices into the entry's chains -> weight; {} for an unknown entry.

        What the tables name and the entry does not have (chains that were left out) has no weight.
        """
        number, found = {chain: place for place, chain in enumerate(chains)}, {}
        for names, weight in self._weights.get(_short(entry), {}).items():
            if all(name in number for name in names):
                pair = sorted(number[name] for name in names)
                found[pair[0], pair[1] if len(pair) == 2 else -1] = weight
        return found

    def total(self, entry: str) -> float:
        """Sum of an entry's weights: how often it is drawn."""
        return sum(self._weights.get(_short(entry), {}).values())


def draw_entries(weights: np.ndarray, count: int, rng: np.random.Generator) -> list[int]:
    """Places of entries, each drawn with the probability of its weight, again and again."""
    sums = weights.cumsum()
    return np.minimum(sums.searchsorted(rng.random(count) * sums[-1], side="right"), len(weights) - 1).tolist()


def _rows(path: Path) -> list[tuple[str, ...]]:
    try:
        with path.open(newline="") as stream:
            reader = csv.DictReader(stream)
            header = reader.fieldnames or ()
            columns = INTERFACE_COLUMNS if "interface_cluster_id" in header else CHAIN_COLUMNS
            missing = [column for column in columns if column not in header]
            if missing:
                raise InputError(path, missing[0], f"no such column; a table of clusters has {', '.join(columns)}")
            return [tuple((row[column] or "").strip() for column in columns) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(path, "clusters", f"cannot be read ({error})") from error


def _type_weight(molecule: str, path: str | os.PathLike[str]) -> float:
    kind = molecule.split("-")[0]
    kind = "protein" if kind == "peptide" else kind
    if kind not in TYPE_WEIGHTS:
        raise InputError(path, molecule, f"names no type of molecule; allowed: {', '.join(TYPE_WEIGHTS)}, peptide")
    return TYPE_WEIGHTS[kind]


def _short(entry: str) -> str:
    return entry.removesuffix("-assembly1").lower()
