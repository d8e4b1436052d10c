"""Raw wwPDB mmCIF -> the first biological assembly, cleaned, in the categories that the baseline's parser reads.

The baseline expects files prepared in this way (`<id>-assembly1.cif`); most raw files fail in it. Written anew: the
first model only; waters, hydrogens, alternative locations and unknown ligands removed; copies of a chain named `A-2`,
`A-3`; residues of an author chain numbered 1, 2, ... without insertion codes (so that bonds are found by number), the
polymer before its ligands; chains in sorted order.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass, field
from itertools import product

import numpy as np

from megafold.errors import InputError

WATERS = {"HOH", "DOD", "WAT"}
UNKNOWN_LIGANDS = {"UNX", "UNL"}
BOND_TYPES = ("covale", "disulf", "metalc")
MAX_CHAINS = 300  # the limit of AF3's training filter

_COLUMNS = {  # what is read from _atom_site, and what stands for an absent or unset value
    "group_PDB": "ATOM", "type_symbol": "?", "label_atom_id": None, "label_alt_id": ".", "label_comp_id": None,
    "label_asym_id": None, "label_seq_id": ".", "pdbx_PDB_ins_code": "?", "Cartn_x": None, "Cartn_y": None,
    "Cartn_z": None, "occupancy": "1.00", "B_iso_or_equiv": "0.00", "auth_seq_id": None, "auth_asym_id": None,
    "pdbx_PDB_model_num": "1",
}  # fmt: skip
_FALLBACK = {"auth_asym_id": "label_asym_id", "label_asym_id": "auth_asym_id", "auth_seq_id": "label_seq_id",
             "label_atom_id": "auth_atom_id", "label_comp_id": "auth_comp_id"}  # fmt: skip


@dataclass
class Residue:
    """Atoms of one residue: rows of (name, element, x, y, z, B factor)."""

    component: str
    asym: str
    author_number: str
    number: str
    polymer: bool
    atoms: list[tuple] = field(default_factory=list)


@dataclass(frozen=True)
class Assembly:
    """mmCIF text, and per chain its full sequence with the residues that have coordinates (where the file tells)."""

    text: str
    sequences: dict[str, tuple[str, list[bool]]]


def is_prepared(text: str, name: str) -> bool:
    """Is this an assembly file to take as it is? (Named so, and complete enough for the baseline's parser.)"""
    return "-assembly" in name and "_atom_site.occupancy" in text and "_pdbx_poly_seq_scheme.asym_id" in text


def build(text: str, name: str, file: str) -> Assembly:
    """Expand and clean one file.

    Args:
        text: mmCIF text.
        name: entry id to write.
        file: file name, for messages.

    Raises:
        InputError: not a CIF file, truncated, or without usable atoms.
    """
    from gemmi import cif

    try:
        block = cif.read_string(text).sole_block()
    except (IndexError, RuntimeError, ValueError) as error:
        raise InputError(file, "mmCIF", f"cannot be parsed, truncated? ({error})") from error
    residues = _residues(block, file)
    types = _component_types(block, {residue.component for residue in residues})
    for residue in residues:
        residue.polymer = residue.polymer and any(word in types[residue.component][0].lower() for word in _POLYMERS)
    copies = _copies(block, sorted({residue.asym for residue in residues}), file)
    chains = _chains(residues, copies, _author_chains(block, residues))
    if len(chains) > MAX_CHAINS:
        raise InputError(file, "_pdbx_struct_assembly_gen", f"{len(chains)} chains; at most {MAX_CHAINS} are supported")
    return Assembly(_write(block, name, chains, types), _sequences(block, chains))


_POLYMERS = ("peptide", "dna", "rna")


def _residues(block, file: str) -> list[Residue]:
    from gemmi import cif

    category = block.get_mmcif_category("_atom_site.", raw=True)
    if not category:
        raise InputError(file, "_atom_site", "missing: the file holds no coordinates")
    columns = {}
    count = len(next(iter(category.values())))
    for column, default in _COLUMNS.items():
        values = category.get(column) or category.get(_FALLBACK.get(column, ""))
        if values is None and default is None:
            raise InputError(file, f"_atom_site.{column}", "missing")
        columns[column] = [cif.as_string(v) if v[0] in "'\"" else v for v in values] if values else [default] * count
    first_model = columns["pdbx_PDB_model_num"][0]
    best: dict[tuple, dict] = defaultdict(dict)
    for row in zip(*columns.values()):
        atom = dict(zip(columns, row))
        component, element = atom["label_comp_id"], atom["type_symbol"].upper()
        if atom["pdbx_PDB_model_num"] != first_model or component in WATERS | UNKNOWN_LIGANDS or element in ("H", "D"):
            continue
        try:
            occupancy = float(atom["occupancy"].split("(")[0]) if atom["occupancy"] not in ".?" else 1.0
            place = tuple(float(atom[f"Cartn_{axis}"].split("(")[0]) for axis in "xyz")
        except ValueError as error:
            raise InputError(file, "_atom_site.Cartn_x", f"not a number ({error})") from error
        if atom["label_seq_id"] not in ".?":
            key = (atom["label_asym_id"], atom["label_seq_id"], "")
        else:
            key = (atom["label_asym_id"], atom["auth_seq_id"], atom["pdbx_PDB_ins_code"])
        record = (occupancy, atom["label_atom_id"], atom["type_symbol"], place, atom["B_iso_or_equiv"], atom)
        best[key].setdefault(component, []).append(record)
    residues = []
    for (asym, _, _), alternatives in best.items():
        # several components in one place (microheterogeneity): the one with the largest occupancy
        component, records = max(alternatives.items(), key=lambda item: max(record[0] for record in item[1]))
        atom = records[0][-1]
        residue = Residue(component, asym, atom["auth_seq_id"], atom["label_seq_id"], atom["label_seq_id"] not in ".?")
        kept: dict[str, tuple] = {}
        for record in records:
            if record[1] not in kept or record[0] > kept[record[1]][0]:
                kept[record[1]] = record
        residue.atoms = [(label, element, place, b) for _, label, element, place, b, _ in kept.values()]
        residues.append(residue)
    if not residues:
        raise InputError(file, "_atom_site", "no atom is left without waters and hydrogens")
    return residues


def _component_types(block, components: set[str]) -> dict[str, tuple[str, str, str, str, str]]:
    """Component -> (type, name, formula, weight, standard?); from the file, else from the bundled dictionary."""
    from gemmi import cif

    wanted = ("type", "name", "formula", "formula_weight", "mon_nstd_flag")
    category = block.get_mmcif_category("_chem_comp.", raw=True)
    known = {}
    for i, id in enumerate(category.get("id", ())):
        values = tuple(category[key][i] if key in category else "?" for key in wanted)
        known[cif.as_string(id)] = tuple(cif.as_string(value) or "?" for value in values)
    missing = {component for component in components if known.get(component, ("?",))[0] == "?"}
    if missing:
        import biotite.structure.info as info

        for component in missing:
            try:
                kind, full = info.link_type(component) or "NON-POLYMER", info.full_name(component) or component
            except KeyError:
                kind, full = "NON-POLYMER", component
            known[component] = (kind, full, "?", "0.0", "?")
    return known


def _copies(block, asyms: list[str], file: str) -> list[tuple[set[str], list[np.ndarray]]]:
    """[(asym ids, their 4 x 4 operators)] of the first assembly; the identity where the file defines none."""
    generators = block.find("_pdbx_struct_assembly_gen.", ["assembly_id", "oper_expression", "asym_id_list"])
    names = [f"matrix[{i}][{j}]" for i in (1, 2, 3) for j in (1, 2, 3)] + [f"vector[{i}]" for i in (1, 2, 3)]
    operators = {}
    for row in block.find("_pdbx_struct_oper_list.", ["id", *names]):
        values = [float(value) for value in list(row)[1:]]
        matrix = np.eye(4)
        matrix[:3, :3], matrix[:3, 3] = np.reshape(values[:9], (3, 3)), values[9:]
        operators[row.str(0)] = matrix
    if not len(generators) or not operators:
        return [(set(asyms), [np.eye(4)])]
    first, copies = generators[0].str(0), []
    for row in generators:
        if row.str(0) != first:
            continue
        try:
            steps = [[operators[id] for id in group] for group in _expression(row.str(1))]
        except (KeyError, ValueError) as error:
            raise InputError(file, "_pdbx_struct_assembly_gen.oper_expression", f"unknown operator {error}") from error
        matrices = [np.linalg.multi_dot([*combination, np.eye(4)]) for combination in product(*steps)]
        copies.append(({asym.strip() for asym in row.str(2).split(",")}, matrices))
    return copies


def _expression(text: str) -> list[list[str]]:
    """`1,2`, `(1-3)` or `(X0)(1-10,21)` -> operator ids of each step, the step applied last first."""
    groups = re.findall(r"\(([^)]*)\)", text) or [text]
    steps = []
    for group in groups:
        ids = []
        for part in group.split(","):
            low, dash, high = part.strip().partition("-")
            ids += [str(i) for i in range(int(low), int(high) + 1)] if dash else [low]
        steps.append(ids)
    return steps


def _author_chains(block, residues: list[Residue]) -> dict[str, str]:
    """Asym id -> chain name: the author's, but one polymer to a chain."""
    authors = {}
    for asym, author in block.find("_atom_site.", ["label_asym_id", "auth_asym_id"]):
        authors.setdefault(asym.strip("'\""), author.strip("'\""))
    names, taken = {}, set()
    for residue in residues:
        asym = residue.asym
        if asym not in names:
            name = authors.get(asym, asym)
            if residue.polymer and name in taken:
                name = asym if asym not in taken and asym not in authors.values() else f"{name}{asym}"
            names[asym] = name
            if residue.polymer:
                taken.add(name)
    return names


def _chains(residues, copies, names) -> dict[str, list[tuple[Residue, str, np.ndarray]]]:
    """Chain -> [(residue, asym id in the written file, operator)], polymer first; chains sorted by name."""
    by_asym, chains, number = defaultdict(list), defaultdict(list), defaultdict(int)
    for residue in residues:
        by_asym[residue.asym].append(residue)
    for asyms, matrices in copies:
        for matrix in matrices:
            for asym in by_asym:
                if asym in asyms:
                    number[asym] += 1
                    suffix = "" if number[asym] == 1 else f"-{number[asym]}"
                    chains[names[asym] + suffix] += [(residue, asym + suffix, matrix) for residue in by_asym[asym]]
    for members in chains.values():
        members.sort(key=lambda member: (not member[0].polymer, member[1]))
    return dict(sorted(chains.items()))


def _sequences(block, chains) -> dict[str, tuple[str, list[bool]]]:
    import gemmi

    full: dict[str, dict[str, str]] = defaultdict(dict)
    for asym, number, component in block.find("_pdbx_poly_seq_scheme.", ["asym_id", "seq_id", "mon_id"]):
        full[asym.strip("'\"")].setdefault(number, component.strip("'\""))
    sequences = {}
    for chain, members in chains.items():
        polymer = [residue for residue, _, _ in members if residue.polymer]
        if not polymer or polymer[0].asym not in full:
            continue
        scheme, have = full[polymer[0].asym], {residue.number for residue in polymer}
        letters = [gemmi.find_tabulated_residue(component).one_letter_code.upper() for component in scheme.values()]
        letters = "".join(letter if letter.isalpha() else "X" for letter in letters)
        sequences[chain] = (letters, [number in have for number in scheme])
    return sequences


def _write(block, name: str, chains, types) -> str:
    from gemmi import cif

    out = cif.Block(name)
    out.set_pair("_entry.id", cif.quote(name))
    out.set_pair("_exptl.method", block.find_value("_exptl.method") or cif.quote("unknown"))
    revisions = [row.str(0) for row in block.find(["_pdbx_audit_revision_history.revision_date"])]
    deposited = block.find_value("_pdbx_database_status.recvd_initial_deposition_date")
    dates = [min(revisions, default=""), deposited or "", "1970-01-01"]  # the last: no template can be newer
    released = next(date for date in dates if re.fullmatch(r"\d{4}-\d\d-\d\d", date))
    out.set_pair("_pdbx_audit_revision_history.revision_date", released)
    for tag in ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution", "_reflns.d_resolution_high"):
        values = list(block.find_values(tag))
        if values:
            out.set_pair(tag, values[0])
    used = sorted({residue.component for members in chains.values() for residue, _, _ in members})
    columns = ["id", "type", "name", "formula", "formula_weight", "mon_nstd_flag"]
    _loop(out, "_chem_comp.", columns, [[cif.quote(v) for v in (component, *types[component])] for component in used])
    _write_residues(out, chains)
    _write_bonds(block, out, chains)
    return out.as_string()


def _write_residues(out, chains) -> None:
    from gemmi import cif

    polymers, ligands, atoms, entities = [], [], [], {}
    for chain, members in chains.items():
        for number, (residue, asym, matrix) in enumerate(members, 1):
            entity = str(entities.setdefault(residue.asym, len(entities) + 1))
            table = polymers if residue.polymer else ligands
            component, quoted = residue.component, (cif.quote(asym), cif.quote(chain))
            table.append([quoted[0], entity, component, component, str(number), str(number), quoted[1]])
            for label, element, place, b in residue.atoms:
                x, y, z = (matrix @ [*place, 1.0])[:3]
                if max(abs(x), abs(y), abs(z)) < 5e-4:  # the baseline takes an atom in the origin for an absent one
                    z = 1e-3
                values = {
                    "group_PDB": "ATOM" if residue.polymer else "HETATM", "type_symbol": element,
                    "label_atom_id": cif.quote(label), "label_alt_id": ".", "label_comp_id": component,
                    "label_asym_id": quoted[0], "label_seq_id": str(number) if residue.polymer else ".",
                    "pdbx_PDB_ins_code": "?", "Cartn_x": f"{x:.3f}", "Cartn_y": f"{y:.3f}", "Cartn_z": f"{z:.3f}",
                    "occupancy": "1.00", "B_iso_or_equiv": b, "auth_seq_id": str(number),
                    "auth_asym_id": quoted[1], "pdbx_PDB_model_num": "1",
                }  # fmt: skip
                serial = str(len(atoms) + 1)
                atoms.append([serial, entity, cif.quote(label), *(values[column] for column in _COLUMNS)])
    scheme = ["asym_id", "entity_id", "mon_id", "pdb_mon_id", "seq_id", "pdb_seq_num", "pdb_strand_id"]
    _loop(out, "_pdbx_poly_seq_scheme.", scheme, polymers)
    _loop(out, "_pdbx_nonpoly_scheme.", [tag.replace("seq_id", "ndb_seq_num") for tag in scheme], ligands)
    _loop(out, "_atom_site.", ["id", "label_entity_id", "auth_atom_id", *_COLUMNS], atoms)


def _loop(out, prefix: str, columns: list[str], rows: list[list[str]]) -> None:
    if rows:
        out.init_loop(prefix, columns).set_all_values([list(column) for column in zip(*rows)])


def _write_bonds(block, out, chains) -> None:
    from gemmi import cif

    ends = ["label_asym_id", "label_comp_id", "auth_seq_id", "label_atom_id"]
    tags = ["conn_type_id", *(f"ptnr{side}_{tag}" for side in (1, 2) for tag in ends)]
    optional = ["?pdbx_dist_value", "?ptnr1_symmetry", "?ptnr2_symmetry"]
    places = defaultdict(list)  # (asym, component, author number) -> [(copy, chain, number)]
    for chain, members in chains.items():
        for number, (residue, asym, _) in enumerate(members, 1):
            copy = asym[len(residue.asym) :]
            places[residue.asym, residue.component, residue.author_number].append((copy, chain, number))
    written = ["ptnr{}_auth_seq_id", "ptnr{}_auth_comp_id", "ptnr{}_auth_asym_id", "ptnr{}_label_atom_id"]
    columns = [tag.format(side) for side in (1, 2) for tag in [*written, "ptnr{}_label_asym_id"]]
    rows = []
    for row in block.find("_struct_conn.", tags + optional):
        kind = row.str(0).lower()
        symmetry = [row.str(i) if row.has(i) else "1_555" for i in (10, 11)]
        if not kind.startswith(BOND_TYPES) or symmetry[0] != symmetry[1]:
            continue
        first, second = ([row.str(i) for i in range(start, start + 4)] for start in (1, 5))
        partners = {copy: (chain, number) for copy, chain, number in places[tuple(second[:3])]}
        for copy, chain, number in places[tuple(first[:3])]:
            if copy not in partners:
                continue
            values = []
            for (asym, component, _, atom), (name, place) in ((first, (chain, number)), (second, partners[copy])):
                values += [str(place), component, cif.quote(name), cif.quote(atom), cif.quote(asym + copy)]
            distance = row[9] if row.has(9) else "?"
            rows.append([f"{kind}{len(rows) + 1}", kind, distance, "?", "?", "?", "?", *values])
    fixed = ["id", "conn_type_id", "pdbx_dist_value", "pdbx_ptnr1_label_alt_id", "pdbx_ptnr2_label_alt_id",
             "pdbx_leaving_atom_flag", "pdbx_role"]  # fmt: skip
    _loop(out, "_struct_conn.", [*fixed, *columns], rows)
