"""Small files for the tests, each made from a real entry by one change that files in the wild have."""

from __future__ import annotations

import io
import warnings
from collections.abc import Callable

import numpy as np
from gemmi import cif

POLYMER_TABLES = ("_entity_poly.", "_entity_poly_seq.", "_pdbx_poly_seq_scheme.", "_struct_asym.", "_entity.")
ASSEMBLY_TABLES = ("_pdbx_struct_assembly.", "_pdbx_struct_assembly_gen.", "_pdbx_struct_oper_list.",
                   "_pdbx_struct_assembly_prop.")  # fmt: skip
BOND_COLUMNS = ("id", "conn_type_id", "ptnr1_label_asym_id", "ptnr1_label_comp_id", "ptnr1_label_seq_id",
                "ptnr1_label_atom_id", "ptnr1_auth_asym_id", "ptnr1_auth_seq_id", "ptnr2_label_asym_id",
                "ptnr2_label_comp_id", "ptnr2_label_seq_id", "ptnr2_label_atom_id", "ptnr2_auth_asym_id",
                "ptnr2_auth_seq_id", "pdbx_dist_value")  # fmt: skip


class Entry:
    """An mmCIF file that can be changed; `atoms` are its rows of `_atom_site` as dicts."""

    def __init__(self, text: str) -> None:
        self.block = cif.read_string(text).sole_block()
        columns = self.block.get_mmcif_category("_atom_site.", raw=True)
        self.columns = list(columns)
        self.atoms = [dict(zip(columns, row)) for row in zip(*columns.values())]

    def drop(self, *tables: str) -> None:
        for table in tables:
            self.block.find_mmcif_category(table).erase()

    def text(self) -> str:
        loop = self.block.init_mmcif_loop("_atom_site.", self.columns)
        loop.set_all_values([[atom[column] for atom in self.atoms] for column in self.columns])
        return self.block.as_string()

    def set(self, where: Callable[[dict], bool], **values: str) -> None:
        for atom in self.atoms:
            if where(atom):
                atom.update(values)

    def keep(self, where: Callable[[dict], bool]) -> None:
        self.atoms = [atom for atom in self.atoms if where(atom)]

    def residue(self, number: int) -> list[dict]:
        return [atom for atom in self.atoms if atom["label_seq_id"] == str(number)]

    def copies(self, atoms: list[dict], shift: float = 0.0, **values: str) -> list[dict]:
        """New rows like `atoms`, moved along x by `shift` angstrom."""
        moved = [{**atom, "Cartn_x": f"{float(atom['Cartn_x']) + shift:.3f}", **values} for atom in atoms]
        return moved

    def ligand(self, component: str, asym: str, author: str, number: int, first: tuple[float, float, float]) -> None:
        """Append a component of the dictionary, its first atom in a place."""
        import biotite.structure.info as info

        array = info.residue(component)
        array = array[array.element != "H"]
        coordinates = array.coord - array.coord[0] + np.array(first)
        like = {**self.atoms[0], "group_PDB": "HETATM", "label_alt_id": ".", "label_seq_id": ".", "occupancy": "1.00"}
        for name, element, place in zip(array.atom_name, array.element, coordinates):
            atom = dict(zip(("Cartn_x", "Cartn_y", "Cartn_z"), (f"{value:.3f}" for value in place)))
            atom |= {"label_atom_id": cif.quote(str(name)), "auth_atom_id": cif.quote(str(name))}
            atom |= {"type_symbol": str(element), "label_comp_id": component, "auth_comp_id": component}
            atom |= {"label_asym_id": asym, "auth_asym_id": author, "auth_seq_id": str(number), "label_entity_id": "9"}
            self.atoms.append({**like, **atom})

    def bond(self, kind: str, first: dict, second: dict, distance: float) -> None:
        """Append a `_struct_conn` row between two atoms."""
        old = self.block.get_mmcif_category("_struct_conn.", raw=True)
        rows = [list(row) for row in zip(*(old[column] for column in BOND_COLUMNS))] if old else []
        ends = []
        for end in (first, second):
            ends += [end[column] for column in ("label_asym_id", "label_comp_id", "label_seq_id", "label_atom_id",
                                                "auth_asym_id", "auth_seq_id")]  # fmt: skip
        rows.append([f"{kind}{len(rows) + 1}", kind, *ends, f"{distance:.2f}"])
        loop = self.block.init_mmcif_loop("_struct_conn.", list(BOND_COLUMNS))
        loop.set_all_values([list(column) for column in zip(*rows)])

    def place(self, number: int, name: str) -> tuple[float, float, float]:
        [atom] = [atom for atom in self.residue(number) if atom["label_atom_id"] == name]
        return tuple(float(atom[f"Cartn_{axis}"]) for axis in "xyz")


def written_by(program: str, text: str) -> str:
    """The structure as another program writes it: coordinates and little else."""
    out = io.StringIO()
    if program == "gemmi":
        import gemmi

        structure = gemmi.make_structure_from_block(cif.read_string(text).sole_block())
        structure.setup_entities()
        return structure.make_mmcif_document().as_string()
    if program == "biopython":
        from Bio.PDB import MMCIFIO, MMCIFParser

        writer = MMCIFIO()
        writer.set_structure(MMCIFParser(QUIET=True).get_structure("x", io.StringIO(text)))
        writer.save(out)
        return out.getvalue()
    import biotite.structure.io.pdbx as pdbx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        array = pdbx.get_structure(pdbx.CIFFile.read(io.StringIO(text)), model=1)
        file = pdbx.CIFFile()
        pdbx.set_structure(file, array)
        file.write(out)
    return out.getvalue()


def predicted(text: str, name: str) -> str:
    """An experimental entry in the form of an AlphaFold DB model: no assembly, pLDDT as B factors, `_ma_*` tables."""
    entry = Entry(text)
    entry.drop(*ASSEMBLY_TABLES, "_exptl.", "_refine.", "_reflns.", "_struct_conn.", "_pdbx_nonpoly_scheme.", "_cell.")
    entry.keep(lambda atom: atom["group_PDB"] == "ATOM")
    for atom in entry.atoms:
        confidence = 50 + 45 * (int(atom["label_seq_id"]) % 10) / 10
        atom.update(B_iso_or_equiv=f"{confidence:.2f}", occupancy="1.0", auth_seq_id=atom["label_seq_id"])
    block = entry.block
    block.name = name
    block.set_pair("_entry.id", name)
    block.set_pair("_ma_model_list.model_id", "1")
    block.set_pair("_ma_model_list.model_type_text", cif.quote("Ab initio model"))
    loop = block.init_mmcif_loop("_ma_qa_metric.", ["id", "mode", "name", "software_group_id", "type"])
    loop.set_all_values([["1", "2"], ["global", "local"], ["pLDDT", "pLDDT"], ["1", "1"], ["pLDDT", "pLDDT"]])
    numbers = sorted({int(atom["label_seq_id"]) for atom in entry.atoms})
    loop = block.init_mmcif_loop("_ma_qa_metric_local.", ["label_asym_id", "label_seq_id", "metric_value", "model_id"])
    values = [f"{50 + 45 * (number % 10) / 10:.2f}" for number in numbers]
    loop.set_all_values([["A"] * len(numbers), [str(number) for number in numbers], values, ["1"] * len(numbers)])
    return entry.text()
