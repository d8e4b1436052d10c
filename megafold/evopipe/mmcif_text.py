"""An assembly as mmCIF text, in the categories that the baseline's parser reads."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator

from megafold.evopipe.report import Log, listed
from megafold.evopipe.residues import ORIGIN, UNSET

BOND_TYPES = ("covale", "disulf", "metalc")
ATOM_COLUMNS = (
    "id", "label_entity_id", "auth_atom_id", "group_PDB", "type_symbol", "label_atom_id", "label_alt_id",
    "label_comp_id", "label_asym_id", "label_seq_id", "pdbx_PDB_ins_code", "Cartn_x", "Cartn_y", "Cartn_z", "occupancy",
    "B_iso_or_equiv", "auth_seq_id", "auth_asym_id", "pdbx_PDB_model_num",
)  # fmt: skip
ANY = "any insertion code"
SCHEME = ("asym_id", "entity_id", "mon_id", "pdb_mon_id", "seq_id", "pdb_seq_num", "pdb_strand_id")
_ENDS = ("label_asym_id", "auth_asym_id", "label_comp_id", "auth_comp_id", "label_seq_id", "auth_seq_id",
         "label_atom_id", "auth_atom_id", "symmetry")  # fmt: skip


def write(block, name: str, authors, types, log: Log) -> str:
    """mmCIF text of an assembly.

    Args:
        block: the file it comes from, for its header and its bonds.
        name: entry id to write.
        authors: author chain -> its `megafold.evopipe.assembly.Chain`s, polymer first.
        types: component -> (type, name, formula, weight, standard?).
        log: where bonds that are left out are told.
    """
    from gemmi import cif

    out = cif.Block(name)
    out.set_pair("_entry.id", cif.quote(name))
    out.set_pair("_exptl.method", block.find_value("_exptl.method") or cif.quote("unknown"))
    out.set_pair("_pdbx_audit_revision_history.revision_date", _released(block, log))
    for tag in ("_refine.ls_d_res_high", "_em_3d_reconstruction.resolution", "_reflns.d_resolution_high"):
        values = [value for value in block.find_values(tag) if value not in UNSET]
        if values:
            out.set_pair(tag, values[0])
    parts = [part for chains in authors.values() for part in chains]
    used = {component for part in parts for component in part.sequence}
    used |= {residue.component for part in parts for residue in part.residues}
    columns = ["id", "type", "name", "formula", "formula_weight", "mon_nstd_flag"]
    rows = [[cif.quote(value) for value in (component, *types[component])] for component in sorted(used)]
    _loop(out, "_chem_comp.", columns, rows)
    _write_residues(out, authors)
    _write_bonds(block, out, authors, log)
    return out.as_string()


def _released(block, log: Log) -> str:
    revisions = [row.str(0) for row in block.find(["_pdbx_audit_revision_history.revision_date"])]
    deposited = block.find_value("_pdbx_database_status.recvd_initial_deposition_date") or ""
    for date in (min(revisions, default=""), deposited):
        if re.fullmatch(r"\d{4}-\d\d-\d\d", date):
            return date
    log.note("no release date", "no release date: 1970-01-01 is used, so that no template is newer")
    return "1970-01-01"


def numbered(chains) -> Iterator[tuple]:
    """(part, residue, its number in the author chain): the full sequence first, then everything else in order."""
    after = max((len(part.sequence) for part in chains), default=0)
    for part in chains:
        for residue in part.residues:
            if residue.polymer:
                yield part, residue, int(residue.number)
    for part in chains:
        for residue in part.residues:
            if not residue.polymer:
                after += 1
                yield part, residue, after


def _write_residues(out, authors) -> None:
    from gemmi import cif

    polymers, ligands, atoms, entities = [], [], [], {}
    for author, chains in authors.items():
        chain = cif.quote(author)
        for part in chains:
            entity = str(entities.setdefault(part.asym, len(entities) + 1))
            for number, component in enumerate(part.sequence, 1):
                row = [entity, cif.quote(component), cif.quote(component), str(number), str(number), chain]
                polymers.append([cif.quote(part.name), *row])
        for part, residue, number in numbered(chains):
            entity, asym = str(entities[part.asym]), cif.quote(part.name if residue.polymer else _ligand_asym(part))
            component = cif.quote(residue.component)
            if not residue.polymer:
                ligands.append([asym, entity, component, component, str(number), str(number), chain])
            places = [place for _, _, place, _ in residue.atoms] @ part.operator[:3, :3].T + part.operator[:3, 3]
            for (label, element, _, b), (x, y, z) in zip(residue.atoms, places):
                if max(abs(x), abs(y), abs(z)) < ORIGIN:  # the baseline takes an atom in the origin for an absent one
                    z = 1e-3
                label = cif.quote(label)
                atoms.append([
                    str(len(atoms) + 1), entity, label, "ATOM" if residue.polymer else "HETATM", element, label, ".",
                    component, asym, str(number) if residue.polymer else ".", "?", f"{x:.3f}", f"{y:.3f}", f"{z:.3f}",
                    "1.00", b, str(number), chain, "1",
                ])  # fmt: skip
    _loop(out, "_pdbx_poly_seq_scheme.", list(SCHEME), polymers)
    _loop(out, "_pdbx_nonpoly_scheme.", [tag.replace("seq_id", "ndb_seq_num") for tag in SCHEME], ligands)
    _loop(out, "_atom_site.", list(ATOM_COLUMNS), atoms)


def _ligand_asym(part) -> str:
    """A ligand's own id, where the file gives it that of a polymer: the parser wants one scheme for each id."""
    return f"{part.name}-ligands" if part.sequence else part.name


def _loop(out, prefix: str, columns: list[str], rows: list[list[str]]) -> None:
    if rows:
        out.init_loop(prefix, columns).set_all_values([list(column) for column in zip(*rows)])


def _write_bonds(block, out, authors, log: Log) -> None:
    from gemmi import cif

    places = _places(authors)
    written = ["ptnr{}_auth_seq_id", "ptnr{}_auth_comp_id", "ptnr{}_auth_asym_id", "ptnr{}_label_atom_id"]
    columns = [tag.format(side) for side in (1, 2) for tag in [*written, "ptnr{}_label_asym_id"]]
    rows, symmetric, lost = [], 0, []
    for kind, distance, first, second in _bonds(block):
        if first["symmetry"] != second["symmetry"]:
            symmetric += 1
            continue
        mine, other = (_find(places, end) for end in (first, second))
        partners = {copy: rest for copy, *rest in other}
        found = [(one, partners[copy]) for copy, *one in mine if copy in partners]
        if not found:
            lost.append(f"{_named(first)} to {_named(second)}")
        for ends in found:
            values = []
            for end, (chain, number, component, asym) in zip((first, second), ends):
                atom = end["label_atom_id"] or end["auth_atom_id"]
                values += [str(number), *map(cif.quote, (component, chain, atom, asym))]
            rows.append([f"{kind}{len(rows) + 1}", kind, distance, "?", "?", "?", "?", *values])
    fixed = ["id", "conn_type_id", "pdbx_dist_value", "pdbx_ptnr1_label_alt_id", "pdbx_ptnr2_label_alt_id",
             "pdbx_leaving_atom_flag", "pdbx_role"]  # fmt: skip
    _loop(out, "_struct_conn.", [*fixed, *columns], rows)
    if symmetric:
        log.note("bonds between copies", f"{symmetric} bonds between copies of the crystal are left out")
    if lost:
        log.note("bonds of removed atoms", f"bonds of residues that are not there are left out: {listed(lost, 3)}")


def _bonds(block) -> Iterator[tuple[str, str, dict[str, str], dict[str, str]]]:
    """(type, distance, first end, second end) of each bond that is kept; an end's unset columns are ""."""
    tags = [f"?ptnr{side}_{tag}" for side in (1, 2) for tag in _ENDS]
    codes = [f"?pdbx_ptnr{side}_PDB_ins_code" for side in (1, 2)]
    for row in block.find("_struct_conn.", ["conn_type_id", "?pdbx_dist_value", *tags, *codes]):
        kind = row.str(0).lower()
        if not kind.startswith(BOND_TYPES):
            continue
        values = ["" if not row.has(i) or row[i] in UNSET else row.str(i) for i in range(2, len(tags) + 4)]
        sides = values[: len(_ENDS)], values[len(_ENDS) : 2 * len(_ENDS)]
        first, second = (dict(zip(_ENDS, side)) | {"insertion": code} for side, code in zip(sides, values[-2:]))
        for end in (first, second):
            end["symmetry"] = end["symmetry"] or "1_555"
        yield kind, row[1] if row.has(1) else "?", first, second


def _places(authors) -> dict[tuple, list[tuple]]:
    """What a bond may call a residue -> [(copy, author chain, number, component, asym)]."""
    places: dict[tuple, list[tuple]] = defaultdict(list)
    for author, chains in authors.items():
        for part, residue, number in numbered(chains):
            place = (part.name[len(part.asym) :], author, number, residue.component, part.name)
            for asym in {part.asym, f"author {residue.author_chain}"}:
                for insertion in (residue.insertion, ANY):
                    places[asym, "author", residue.author_number, insertion].append(place)
                if residue.label != ".":
                    places[asym, "label", residue.label, ""].append(place)
    return places


def _find(places, end: dict[str, str]) -> list[tuple]:
    asym = end["label_asym_id"] or f"author {end['auth_asym_id']}"
    component = end["label_comp_id"] or end["auth_comp_id"]
    keys = [
        (asym, "author", end["auth_seq_id"], code)
        for code in dict.fromkeys((end["insertion"], end["insertion"] or ANY))
    ]
    for key in [*keys, (asym, "label", end["label_seq_id"], "")]:
        found = [place for place in places.get(key, ()) if not component or place[3] == component]
        if key[2] and found:
            return found
    return []


def _named(end: dict[str, str]) -> str:
    chain, number = end["auth_asym_id"] or end["label_asym_id"], end["auth_seq_id"] or end["label_seq_id"]
    atom = end["label_atom_id"] or end["auth_atom_id"]
    return f"{end['label_comp_id'] or end['auth_comp_id']} {number} {atom} of {chain}"
