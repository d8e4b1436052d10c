"""The atoms of an mmCIF file as residues: one model, one location an atom, no water, no hydrogen.

Columns that files from outside the wwPDB leave out or leave unset have a substitute where there is one (occupancy 1,
the author's names for the wwPDB's, the element from the atom's name); what has none is an InputError that names it.
"""

from __future__ import annotations

import math
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache

from megafold.evopipe.report import EntryError, Log, listed

WATERS = {"HOH", "DOD", "WAT", "H2O"}
UNKNOWN_RESIDUE = "X"  # what files from outside the wwPDB call one; in the dictionary it is a nucleotide
UNKNOWN_LIGANDS = {"UNX", "UNL"}
UNSET = (".", "?", "")
FARTHEST = 1e6  # angstrom; no structure is that large
ORIGIN = 5e-4  # angstrom; the baseline takes an atom in the origin for an absent one

_COLUMNS = {  # what is read from _atom_site, and what stands for an absent column
    "group_PDB": "ATOM", "type_symbol": "?", "label_atom_id": None, "label_alt_id": ".", "label_comp_id": None,
    "label_asym_id": None, "label_entity_id": "?", "label_seq_id": ".", "pdbx_PDB_ins_code": "?", "Cartn_x": None,
    "Cartn_y": None, "Cartn_z": None, "occupancy": "1.00", "B_iso_or_equiv": "0.00", "auth_seq_id": None,
    "auth_asym_id": None, "pdbx_PDB_model_num": "1",
}  # fmt: skip
_FALLBACK = {"auth_asym_id": "label_asym_id", "label_asym_id": "auth_asym_id", "auth_seq_id": "label_seq_id",
             "label_atom_id": "auth_atom_id", "label_comp_id": "auth_comp_id"}  # fmt: skip


@dataclass
class Residue:
    """One residue or ligand.

    `label` is the file's `label_seq_id` ("." where there is none); `number` its place in the full sequence, from 1.
    `atoms`: (name, element, (x, y, z) in angstrom, B factor with two decimals).
    """

    component: str
    asym: str
    author_chain: str
    author_number: str
    insertion: str
    entity: str
    label: str
    group: str
    number: str = "."
    polymer: bool = False
    atoms: list[tuple] = field(default_factory=list)


def read(block, log: Log) -> list[Residue]:
    """Residues of the first model, in the order of the file.

    Args:
        block: a `gemmi.cif.Block`.
        log: where models, locations and atoms that are left out are told.

    Raises:
        InputError: no coordinates, a needed column is missing, a coordinate is no number, nothing is left.
    """
    best: dict[tuple, dict] = defaultdict(dict)
    seen: Counter[str] = Counter()
    unknown = []
    first_model = None
    for atom in _rows(block, log.file):
        component, element = atom["label_comp_id"], atom["type_symbol"].upper()
        first_model = first_model or atom["pdbx_PDB_model_num"]
        if atom["pdbx_PDB_model_num"] != first_model:
            seen["models", atom["pdbx_PDB_model_num"]] = 1
            continue
        if component in WATERS:
            seen["water"] += 1
            continue
        if component in UNKNOWN_LIGANDS:
            unknown.append(component)
            continue
        if element in UNSET:
            element = _element(component, atom["label_atom_id"]).upper()
        if element in ("H", "D"):
            continue
        place = _place(atom, log.file)
        if place is None:
            seen["no place"] += 1
            continue
        occupancy = _number(atom["occupancy"], 1.0)
        seen["no occupancy"] += occupancy <= 0
        sequential = atom["label_seq_id"] not in UNSET
        number = (atom["label_seq_id"], "") if sequential else (atom["auth_seq_id"], atom["pdbx_PDB_ins_code"])
        record = (occupancy, atom["label_atom_id"], element, place, atom)
        best[atom["label_asym_id"], sequential, *number].setdefault(component, []).append(record)
    residues = [_residue(alternatives, seen) for alternatives in best.values()]
    if not residues:
        action = "the entry has nothing to learn from: remove the file"
        raise EntryError(log.file, "_atom_site", "no atom is left without waters and hydrogens", action, "no atoms")
    _tell(seen, unknown, log)
    return residues


def _tell(seen: Counter, unknown: list[str], log: Log) -> None:
    models = sum(isinstance(key, tuple) for key in seen)
    if models:
        log.note("ensemble", f"the first of {models + 1} models is used")
    if seen["location"]:
        log.note("alternative locations", f"of {seen['location']} atoms the location of the largest occupancy is used")
    if seen["component"]:
        log.changed(
            "microheterogeneity", f"in {seen['component']} places the component of the largest occupancy is used"
        )
    if seen["no occupancy"]:
        log.note("zero occupancy", f"{seen['no occupancy']} atoms of occupancy 0 are kept as resolved")
    if seen["no place"]:
        log.note("unset coordinates", f"{seen['no place']} atoms without coordinates count as unresolved")
    if unknown:
        log.changed("unknown ligands", f"atoms of unknown ligands are left out: {listed(unknown)}")


def _rows(block, file: str) -> Iterator[dict[str, str]]:
    from gemmi import cif

    category = block.get_mmcif_category("_atom_site.", raw=True)
    if not category:
        action = "a file of coordinates is needed (a structure-factor or dictionary file has none)"
        raise EntryError(file, "_atom_site", "missing: the file holds no coordinates", action, "no coordinates")
    count = len(next(iter(category.values())))
    columns = {}
    for column, default in _COLUMNS.items():
        values, other = category.get(column), category.get(_FALLBACK.get(column, ""))
        if values is None and other is None and default is None:
            raise EntryError(file, f"_atom_site.{column}", "missing", "add the column", "missing column")
        values = values or other or [default] * count
        if other is not None and any(value in UNSET for value in values):
            values = [b if a in UNSET else a for a, b in zip(values, other)]
        columns[column] = [cif.as_string(value) if value[0] in "'\";" else value for value in values]
    for row in zip(*columns.values()):
        yield dict(zip(columns, row))


def _place(atom: dict[str, str], file: str) -> tuple[float, float, float] | None:
    texts = [atom[f"Cartn_{axis}"] for axis in "xyz"]
    if any(text in UNSET for text in texts):
        return None
    try:
        place = tuple(float(text.split("(")[0]) for text in texts)
    except ValueError as error:
        raise EntryError(file, "_atom_site.Cartn_x", f"not a number ({error})", code="broken coordinates") from error
    if not all(abs(value) < FARTHEST for value in place):
        problem = f"not finite, or farther than {FARTHEST:g} angstrom ({', '.join(texts)})"
        raise EntryError(file, "_atom_site.Cartn_x", problem, code="broken coordinates")
    return place


def _number(text: str, default: float) -> float:
    try:
        value = float(text.split("(")[0])
    except ValueError:
        return default
    return value if math.isfinite(value) else default


def _residue(alternatives: dict[str, list[tuple]], seen: Counter) -> Residue:
    """One residue of the components in one place: the one, and each atom's location, with the largest occupancy."""
    component, records = max(alternatives.items(), key=lambda item: max(record[0] for record in item[1]))
    seen["component"] += len(alternatives) > 1
    kept: dict[str, tuple] = {}
    for record in records:
        if record[1] not in kept:
            kept[record[1]] = record
            continue
        seen["location"] += 1
        if record[0] > kept[record[1]][0]:
            kept[record[1]] = record
    atom = records[0][-1]
    insertion = "" if atom["pdbx_PDB_ins_code"] in UNSET else atom["pdbx_PDB_ins_code"]
    label = "." if atom["label_seq_id"] in UNSET else atom["label_seq_id"]
    return Residue(
        component,
        atom["label_asym_id"],
        atom["auth_asym_id"],
        atom["auth_seq_id"],
        insertion,
        atom["label_entity_id"],
        label,
        atom["group_PDB"],
        label,
        atoms=[(*record[1:4], f"{_number(record[4]['B_iso_or_equiv'], 0.0):.2f}") for record in kept.values()],
    )


@lru_cache(maxsize=4096)
def _dictionary_elements(component: str) -> dict[str, str]:
    import biotite.structure.info as info

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # components without coordinates: only their elements are wanted
            array = info.residue(component, allow_missing_coord=True)
    except KeyError:
        return {}
    return dict(zip(array.atom_name.tolist(), array.element.tolist()))


def _element(component: str, name: str) -> str:
    """Element of an atom whose file does not say: from the dictionary, else the first letter of its name."""
    letters = re.sub(r"[^A-Za-z]", "", name)
    return _dictionary_elements(component).get(name) or letters[:1] or "C"


def of_unknown_component(residue: Residue) -> str | None:
    """The wwPDB's name for an unknown residue of this polymer: UNK, N or DN; None when it is no polymer's residue."""
    names = {atom[0] for atom in residue.atoms}
    if "CA" in names:
        return "UNK"
    if names & {"C1'", "C1*"}:
        return "N" if names & {"O2'", "O2*"} else "DN"
    return None
