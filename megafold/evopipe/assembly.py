"""An mmCIF file -> its first biological assembly, cleaned, in the categories that the baseline's parser reads.

The baseline expects files prepared in this way (`<id>-assembly1.cif`); most files of the wwPDB fail in it. Written
anew: the first model only; waters, hydrogens, alternative locations, unknown ligands, crystallisation aids, broken and
clashing chains removed, and all but 20 chains of a large assembly (AF3 supplement 2.5.4); copies of a chain named
`A-2`, `A-3`; residues of an author chain numbered 1, 2, ... along the full sequence, without insertion codes (so that
bonds are found by number), the polymer before its ligands; chains in sorted order. What is removed or replaced is told
in the log. A file of an assembly (`<id>-assembly<n>`) is not expanded.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from itertools import product

import numpy as np

from megafold.evopipe import clashes, filters, mmcif_text, sequences
from megafold.evopipe.report import EntryError, Log, listed
from megafold.evopipe.residues import UNKNOWN_RESIDUE, UNSET, WATERS, Residue, of_unknown_component, read

MAX_CHAINS = 300  # the limit of AF3's training filter
LARGE = 20  # chains of which the nearest ones stay
POLYMERS = ("peptide", "dna", "rna")
CRYSTALLISATION_AIDS = frozenset(  # AF3 supplement, table 9: left out of structures found by diffraction
    ["SO4", "GOL", "EDO", "PO4", "ACT", "PEG", "DMS", "TRS", "PGE", "PG4", "FMT", "EPE", "MPD", "MES", "CD", "IOD"]
)


@dataclass(frozen=True)
class Chain:
    """One copy of one `label_asym_id` in the assembly.

    Args:
        asym: its id in the file.
        name: its id here (`A`, `A-2`).
        author: the chain that it is written as; a ligand joins the chain that its author put it in.
        residues: those with coordinates.
        sequence: components of the full sequence; () for ligands.
        operator: 4 x 4, from the file's coordinates to the copy's.
    """

    asym: str
    name: str
    author: str
    residues: tuple[Residue, ...]
    sequence: tuple[str, ...]
    operator: np.ndarray

    def places(self) -> np.ndarray:
        """Coordinates of all atoms, angstrom, float64 [atoms, 3]."""
        file = np.array([atom[2] for residue in self.residues for atom in residue.atoms])
        return file @ self.operator[:3, :3].T + self.operator[:3, 3]


@dataclass(frozen=True)
class Assembly:
    """`text`: mmCIF. `chains`: author chain -> its parts, polymer first."""

    text: str
    chains: dict[str, list[Chain]]


def is_prepared(text: str, name: str) -> bool:
    """Is this an assembly file to take as it is? (Named so, cleaned, and complete enough for the baseline's parser.)"""
    if "-assembly" not in name or "_pdbx_poly_seq_scheme.asym_id" not in text:
        return False
    from gemmi import cif

    try:
        block = cif.read_string(text).sole_block()
    except (IndexError, RuntimeError, ValueError):
        return True  # the parser will say what is wrong
    columns = ("label_comp_id", "label_alt_id", "pdbx_PDB_ins_code", "type_symbol", "pdbx_PDB_model_num", "occupancy")
    found = {column: set(block.find_values(f"_atom_site.{column}")) for column in columns}
    if not all(found.values()) or not block.find_values("_pdbx_audit_revision_history.revision_date"):
        return False
    clean = found["label_alt_id"] | found["pdbx_PDB_ins_code"] <= set(UNSET) and len(found["pdbx_PDB_model_num"]) == 1
    return clean and not found["label_comp_id"] & WATERS and not found["type_symbol"] & {"H", "D"}


def build(text: str, name: str, file: str, log: Log | None = None, most_chains: int = LARGE) -> Assembly:
    """Expand and clean one file.

    Args:
        text: mmCIF text.
        name: entry id to write.
        file: file name, for messages.
        log: where everything that is removed or replaced is told.
        most_chains: of a larger assembly so many chains stay, those nearest to a token of an interface.

    Raises:
        InputError: not a CIF file, truncated, or without usable atoms.
    """
    from gemmi import cif

    log = log or Log(file, name)
    try:
        block = cif.read_string(text).sole_block()
    except (IndexError, RuntimeError, ValueError) as error:
        action = "fetch or write the file again"
        raise EntryError(file, "mmCIF", f"cannot be parsed, truncated? ({error})", action, "broken mmCIF") from error
    residues = read(block, log)
    types = _component_types(block, {residue.component for residue in residues})
    _find_polymers(residues, types, log)
    full = sequences.of_chains(block, residues, log)
    types |= _component_types(block, {component for one in full.values() for component in one})
    residues = _without_broken(_without_aids(block, residues, log), log)
    expanded = "-assembly" in file.rpartition("/")[2]
    chains = _expand(None if expanded else block, residues, full, log)
    count = len({chain.author for chain in chains})
    if count > MAX_CHAINS:
        problem = f"{count} chains; at most {MAX_CHAINS} are supported"
        action = "AF3 does not train on such entries; give a file with fewer chains"
        raise EntryError(file, "_pdbx_struct_assembly_gen", problem, action, "too many chains")
    chains = _nearest(_without_clashes(chains, log), name, most_chains, log)
    authors: dict[str, list[Chain]] = defaultdict(list)
    for chain in sorted(chains, key=lambda chain: (chain.author, not chain.sequence)):
        authors[chain.author].append(chain)
    return Assembly(mmcif_text.write(block, name, authors, types, log), dict(authors))


def _find_polymers(residues: list[Residue], types, log: Log) -> None:
    """Set `polymer`: is it in the sequence of a polymer? Residues that no dictionary knows become UNK, N or DN."""
    numbered = any(residue.label != "." for residue in residues)
    renamed, inside = [], []

    def of_polymer(component: str) -> bool:
        return any(word in types[component][0].lower() for word in POLYMERS)

    for residue in residues:
        inside.append(residue.label != "." if numbered else residue.group == "ATOM" or of_polymer(residue.component))
        unknown = types[residue.component][1] == residue.component and not of_polymer(residue.component)
        unknown |= residue.component == UNKNOWN_RESIDUE
        if inside[-1] and unknown and (named := of_unknown_component(residue)) is not None:
            renamed.append(f"{residue.component} as {named}")
            residue.component = named
            types.update(_component_types(None, {named}))
    chains = {residue.asym for residue, within in zip(residues, inside) if within and of_polymer(residue.component)}
    for residue, within in zip(residues, inside):
        residue.polymer = within and residue.asym in chains
    if renamed:
        log.changed("unknown residues", f"residues of unknown type are named: {listed(renamed)}")


def _without_aids(block, residues: list[Residue], log: Log) -> list[Residue]:
    methods = " ".join(row.str(0) for row in block.find(["_exptl.method"])).upper()
    if "DIFFRACTION" not in methods and "CRYSTALLOGRAPHY" not in methods:
        return residues
    aids = [one.component for one in residues if not one.polymer and one.component in CRYSTALLISATION_AIDS]
    if aids:
        log.changed("crystallisation aids", f"left out: {listed(aids)}")
    return [one for one in residues if one.polymer or one.component not in CRYSTALLISATION_AIDS]


def _without_broken(residues: list[Residue], log: Log) -> list[Residue]:
    chains: dict[str, list[Residue]] = defaultdict(list)
    for residue in residues:
        if residue.polymer:
            chains[residue.asym].append(residue)
    found = {asym: where for asym, mine in chains.items() if (where := filters.broken(mine))}
    if not found:
        return residues
    told = [f"{asym} ({where})" for asym, where in found.items()]
    kept = [one for one in residues if not (one.polymer and one.asym in found)]
    if not kept:
        problem, action = f"every chain is broken: {listed(told)}", "AF3 does not train on such chains"
        raise EntryError(log.file, "_atom_site", problem, action, "broken chains")
    log.changed("broken chains", f"left out: {listed(told, len(told))}")
    return kept


def _nearest(chains: list[Chain], name: str, most: int, log: Log) -> list[Chain]:
    authors: dict[str, list[np.ndarray]] = defaultdict(list)
    for chain in chains:
        places = np.array(filters.centers(chain.residues))
        authors[chain.author].append(places @ chain.operator[:3, :3].T + chain.operator[:3, 3])
    if len(authors) <= most:
        return chains
    kept = filters.nearest_chains({author: np.concatenate(parts) for author, parts in authors.items()}, name, most)
    left_out = sorted(authors.keys() - set(kept))
    reason = f"of {len(authors)} chains the {most} nearest to a token of an interface are kept; left out: "
    action = "set data.max_chains to keep more"
    log.changed("large assembly", reason + listed(left_out, len(left_out)), action)
    return [chain for chain in chains if chain.author in kept]


def _without_clashes(chains: list[Chain], log: Log) -> list[Chain]:
    removed = {}
    for loser, winner, share in clashes.clashing({chain.name: chain.places() for chain in chains}):
        removed[loser] = f"{loser} ({100 * share:.0f} % of its atoms are within 1.7 angstrom of {winner})"
    if removed:
        log.changed("clashing chains", f"left out: {listed(removed.values())}")
    return [chain for chain in chains if chain.name not in removed]


def _component_types(block, components: set[str]) -> dict[str, tuple[str, str, str, str, str]]:
    """Component -> (type, name, formula, weight, standard?); from the file, else from the bundled dictionary.

    A component that neither knows has itself as its name.
    """
    from gemmi import cif

    wanted = ("type", "name", "formula", "formula_weight", "mon_nstd_flag")
    category = block.get_mmcif_category("_chem_comp.", raw=True) if block is not None else {}
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


def _expand(block, residues: list[Residue], full: dict[str, list[str]], log: Log) -> list[Chain]:
    by_asym: dict[str, list[Residue]] = defaultdict(list)
    for residue in residues:
        by_asym[residue.asym].append(residue)
    names, number, chains = _author_chains(residues), defaultdict(int), []
    for asyms, operators in _copies(block, list(by_asym), log):
        for operator in operators:
            for asym, mine in by_asym.items():
                if asym in asyms:
                    number[asym] += 1
                    suffix = "" if number[asym] == 1 else f"-{number[asym]}"
                    sequence = tuple(full.get(asym, ()))
                    chains.append(Chain(asym, asym + suffix, names[asym] + suffix, tuple(mine), sequence, operator))
    outside = [asym for asym in by_asym if not number[asym]]
    if outside:
        log.note("outside the assembly", f"not in the first assembly: {listed(f'chain {asym}' for asym in outside)}")
    return chains


def _copies(block, asyms: list[str], log: Log) -> list[tuple[set[str], list[np.ndarray]]]:
    """[(asym ids, their 4 x 4 operators)] of the first assembly; the identity where the file defines none."""
    if block is None:
        return [(set(asyms), [np.eye(4)])]
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
            action = "correct _pdbx_struct_assembly_gen, or give the assembly file of the wwPDB"
            tag = "_pdbx_struct_assembly_gen.oper_expression"
            raise EntryError(log.file, tag, f"unknown operator {error}", action, "broken assembly") from error
        matrices = [np.linalg.multi_dot([*combination, np.eye(4)]) for combination in product(*steps)]
        copies.append(({asym.strip() for asym in row.str(2).split(",")}, matrices))
    if not set(asyms) & set().union(*(chains for chains, _ in copies)):
        log.note(
            "assembly of other chains", "the first assembly names no chain of the file: all chains are used as given"
        )
        return [(set(asyms), [np.eye(4)])]
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


def _author_chains(residues: list[Residue]) -> dict[str, str]:
    """Asym id -> chain name: the author's, but one polymer to a chain."""
    authors: dict[str, str] = {}
    for residue in residues:
        authors.setdefault(residue.asym, residue.author_chain)
    names, taken = {}, set()
    for residue in residues:
        asym = residue.asym
        if asym not in names:
            name = authors[asym]
            if residue.polymer and name in taken:
                name = asym if asym not in taken and asym not in authors.values() else f"{name}{asym}"
            names[asym] = name
            if residue.polymer:
                taken.add(name)
    return names
