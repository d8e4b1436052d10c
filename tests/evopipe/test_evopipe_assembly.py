"""Raw mmCIF files: assemblies are expanded and cleaned so that the baseline's parser takes them."""

from __future__ import annotations

import numpy as np
import pytest
from gemmi import cif

from megafold.errors import InputError
from megafold.evopipe import assembly, ccd, structure

COLUMNS = ["group_PDB", "type_symbol", "label_atom_id", "label_alt_id", "label_comp_id", "label_asym_id",
           "label_seq_id", "pdbx_PDB_ins_code", "Cartn_x", "Cartn_y", "Cartn_z", "occupancy", "B_iso_or_equiv",
           "auth_seq_id", "auth_asym_id", "pdbx_PDB_model_num"]  # fmt: skip
BACKBONE = {"N": (0.0, 1.4, 0.0), "CA": (0.0, 0.0, 0.0), "C": (1.5, 0.0, 0.0), "O": (2.1, 1.0, 0.0)}
MATRIX = ["matrix[1][1]", "matrix[1][2]", "matrix[1][3]", "matrix[2][1]", "matrix[2][2]", "matrix[2][3]",
          "matrix[3][1]", "matrix[3][2]", "matrix[3][3]", "vector[1]", "vector[2]", "vector[3]"]  # fmt: skip
IDENTITY = "1 0 0 0 1 0 0 0 1 0 0 0"
SHIFT = "-1 0 0 0 -1 0 0 0 1 50 0 0"


def residue(
    component, asym, label, author, *, chain=None, shift=0.0, alt=".", occupancy="1.00", insertion="?", model="1"
):
    atoms = dict(BACKBONE)
    if component == "ALA":
        atoms["CB"] = (-0.8, -0.8, 1.0)
    return [
        ["ATOM", name[0], name, alt, component, asym, label, insertion,
         f"{x + shift:.3f}", f"{y:.3f}", f"{z:.3f}", occupancy, "20.00", author, chain or asym, model]
        for name, (x, y, z) in atoms.items()
    ]  # fmt: skip


def single(component, element, asym, author, *, chain, place=(9.0, 9.0, 9.0)):
    where = [f"{value:.3f}" for value in place]
    return [["HETATM", element, element, ".", component, asym, ".", "?", *where, "1.00", "20.00", author, chain, "1"]]


def text(atoms, *, drop=(), extra="", assembly_rows=()) -> str:
    kept = [i for i, column in enumerate(COLUMNS) if column not in drop]
    lines = ["data_1ABC", "_entry.id 1ABC", "loop_", *(f"_atom_site.{COLUMNS[i]}" for i in kept)]
    lines += [" ".join(atom[i] for i in kept) for atom in atoms]
    if assembly_rows:
        lines += ["loop_", "_pdbx_struct_assembly_gen.assembly_id", "_pdbx_struct_assembly_gen.oper_expression",
                  "_pdbx_struct_assembly_gen.asym_id_list", *assembly_rows]  # fmt: skip
        lines += ["loop_", "_pdbx_struct_oper_list.id", *(f"_pdbx_struct_oper_list.{name}" for name in MATRIX)]
        lines += [f"1 {IDENTITY}", f"2 {SHIFT}", f"X {SHIFT}"]
    return "\n".join([*lines, extra, ""])


PEPTIDE = residue("GLY", "A", "1", "41") + residue("ALA", "A", "2", "42", shift=3.8)


def build(source: str):
    return assembly.build(source, "1abc-assembly1", "1abc.cif")


def table(built, category="_atom_site."):
    columns = cif.read_string(built.text).sole_block().get_mmcif_category(category)
    return [dict(zip(columns, row)) for row in zip(*columns.values())]


def chains_of(built) -> list[str]:
    return list(dict.fromkeys(atom["auth_asym_id"] for atom in table(built)))


def test_waters_hydrogens_and_unknown_ligands_are_removed():
    rubbish = single("HOH", "O", "C", "301", chain="A") + single("UNX", "X", "D", "302", chain="A")
    hydrogen = [[*PEPTIDE[0][:1], "H", "HA", *PEPTIDE[0][3:]]]
    built = build(text(PEPTIDE + hydrogen + rubbish))
    assert len(table(built)) == len(PEPTIDE)


def test_ligand_joins_its_author_chain_after_the_polymer():
    built = build(text(single("ZN", "ZN", "B", "900", chain="A") + PEPTIDE))
    atoms = table(built)
    assert {atom["auth_asym_id"] for atom in atoms} == {"A"}
    assert [atom["auth_seq_id"] for atom in atoms] == ["1"] * 4 + ["2"] * 5 + ["3"]
    assert table(built, "_pdbx_nonpoly_scheme.")[0]["pdb_mon_id"] == "ZN"


@pytest.mark.parametrize(
    ("rows", "chains"),
    [
        (["1 1,2 A"], ["A", "A-2"]),
        (["1 (1-2) A"], ["A", "A-2"]),
        (["1 1 A", "1 2 A"], ["A", "A-2"]),
        (["1 (1,2)(X) A"], ["A", "A-2"]),
        (["1 1 A", "2 1,2 A"], ["A"]),
    ],
    ids=["list", "range", "two rows", "product", "first assembly only"],
)
def test_assembly_is_expanded(rows, chains):
    built = build(text(PEPTIDE, assembly_rows=rows))
    assert chains_of(built) == chains
    assert len({atom["label_asym_id"] for atom in table(built)}) == len(chains)


def test_copy_is_the_operator_times_the_original():
    atoms = table(build(text(PEPTIDE, assembly_rows=["1 1,2 A"])))
    place = np.array([[float(atom[f"Cartn_{axis}"]) for axis in "xyz"] for atom in atoms]).reshape(2, len(PEPTIDE), 3)
    assert np.allclose(place[1], place[0] * [-1, -1, 1] + [50, 0, 0], atol=1e-3)


def test_operators_of_a_product_are_applied_right_to_left():
    turn = "0 -1 0 1 0 0 0 0 1 0 0 0"
    source = text(PEPTIDE, assembly_rows=["1 (1)(2) A"]).replace(f"1 {IDENTITY}", f"1 {turn}")
    atom = table(build(source))[4]  # N of the second residue, at (3.8, 1.4, 0)
    moved = np.array([[0, -1, 0], [1, 0, 0], [0, 0, 1]]) @ np.array([50 - 3.8, -1.4, 0])
    assert np.allclose([float(atom[f"Cartn_{axis}"]) for axis in "xyz"], moved, atol=1e-3)


def test_unknown_operator_is_one_clear_line():
    with pytest.raises(InputError, match=r"1abc.cif: _pdbx_struct_assembly_gen.oper_expression: unknown operator '7'"):
        build(text(PEPTIDE, assembly_rows=["1 7 A"]))


def test_too_many_chains_are_refused():
    with pytest.raises(InputError, match="at most 300"):
        build(text(PEPTIDE, assembly_rows=[f"1 ({','.join(['1'] * 301)}) A"]))


def test_first_model_of_an_ensemble_is_kept():
    second = residue("GLY", "A", "1", "41", model="2", shift=99.0)
    assert len(table(build(text(PEPTIDE + second)))) == len(PEPTIDE)


def test_alternative_location_with_the_largest_occupancy_is_kept():
    low = residue("ALA", "A", "2", "42", shift=50.0, alt="A", occupancy="0.30")
    high = residue("ALA", "A", "2", "42", shift=3.8, alt="B", occupancy="0.70")
    atoms = table(build(text(residue("GLY", "A", "1", "41") + low + high)))
    assert len(atoms) == len(PEPTIDE) and max(float(atom["Cartn_x"]) for atom in atoms) < 10


def test_microheterogeneity_keeps_one_residue():
    other = residue("GLY", "A", "2", "42", shift=3.8, occupancy="0.40")
    atoms = table(build(text(residue("GLY", "A", "1", "41") + other + residue("ALA", "A", "2", "42", shift=3.8))))
    assert [atom["label_comp_id"] for atom in atoms if atom["label_atom_id"] == "CA"] == ["GLY", "ALA"]


@pytest.mark.parametrize("column", ["occupancy", "B_iso_or_equiv", "label_alt_id", "pdbx_PDB_ins_code", "auth_asym_id",
                                    "auth_seq_id", "pdbx_PDB_model_num", "type_symbol"])  # fmt: skip
def test_optional_column_may_be_absent(column):
    assert len(table(build(text(PEPTIDE, drop=(column,))))) == len(PEPTIDE)


@pytest.mark.parametrize("column", ["Cartn_x", "label_atom_id", "label_comp_id"])
def test_absent_needed_column_is_named(column):
    with pytest.raises(InputError, match=rf"1abc.cif: _atom_site.{column}: missing"):
        build(text(PEPTIDE, drop=(column,)))


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (text(PEPTIDE)[:-80], "mmCIF: cannot be parsed"),
        ("", "mmCIF: cannot be parsed"),
        ("not a cif file", "mmCIF: cannot be parsed"),
        ("data_x\n_entry.id x\n", "_atom_site: missing"),
        (text(single("HOH", "O", "C", "301", chain="A")), "no atom is left"),
        (text([[*PEPTIDE[0][:8], "here", *PEPTIDE[0][9:]]]), "_atom_site.Cartn_x: not a number"),
    ],
    ids=["truncated", "empty", "text", "no atoms", "only water", "no number"],
)
def test_broken_file_is_one_clear_line(source, expected):
    with pytest.raises(InputError) as caught:
        build(source)
    assert str(caught.value).startswith("1abc.cif: ") and expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_insertion_codes_and_gaps_are_renumbered_and_bonds_follow():
    atoms = residue("GLY", "A", "1", "41") + residue("ALA", "A", "2", "41", shift=3.8, insertion="A")
    atoms += single("ZN", "ZN", "B", "900", chain="A")
    bond = """loop_
_struct_conn.id
_struct_conn.conn_type_id
_struct_conn.ptnr1_label_asym_id
_struct_conn.ptnr1_label_comp_id
_struct_conn.ptnr1_auth_seq_id
_struct_conn.ptnr1_label_atom_id
_struct_conn.ptnr2_label_asym_id
_struct_conn.ptnr2_label_comp_id
_struct_conn.ptnr2_auth_seq_id
_struct_conn.ptnr2_label_atom_id
_struct_conn.pdbx_dist_value
metalc1 metalc A ALA 41 O B ZN 900 ZN 2.1
hydrog1 hydrog A ALA 41 N B ZN 900 ZN 2.9
"""
    built = build(text(atoms, extra=bond, assembly_rows=["1 1,2 A,B"]))
    bonds = table(built, "_struct_conn.")
    assert [(b["ptnr1_auth_asym_id"], b["ptnr1_auth_seq_id"], b["ptnr2_auth_seq_id"]) for b in bonds] == [
        ("A", "2", "3"),
        ("A-2", "2", "3"),
    ]


def test_two_polymers_of_one_author_chain_are_two_chains():
    atoms = PEPTIDE + residue("GLY", "B", "1", "1", chain="A", shift=20.0) + single("ZN", "ZN", "C", "9", chain="A")
    assert chains_of(build(text(atoms))) == ["A", "B"]


@pytest.fixture(scope="module")
def components():
    ccd.install()


OXYGEN = [*PEPTIDE[-1][:2], "OXT", *PEPTIDE[-1][3:8], "6.0", "0.5", "0.5", *PEPTIDE[-1][11:]]
CASES = {
    "no occupancy": text(PEPTIDE, drop=("occupancy",)),
    "insertion code": text(residue("GLY", "A", "1", "41") + residue("ALA", "A", "2", "41", insertion="A", shift=3.8)),
    "ligand": text(PEPTIDE + single("ZN", "ZN", "B", "900", chain="A")),
    "two copies": text(PEPTIDE + single("ZN", "ZN", "B", "900", chain="A"), assembly_rows=["1 1,2 A,B"]),
    "unknown residue": text(PEPTIDE + residue("UNK", "A", "3", "43", shift=7.6)),
    "modified residue": text(residue("MSE", "A", "1", "41") + residue("ALA", "A", "2", "42", shift=3.8)),
    "terminal oxygen": text([*PEPTIDE, OXYGEN]),
    "ensemble": text(PEPTIDE + residue("GLY", "A", "1", "41", model="2")),
    "no author numbering": text(PEPTIDE, drop=("auth_asym_id", "auth_seq_id")),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_file_that_is_not_from_the_wwpdb_is_featurised(components, case):
    built = build(CASES[case])
    parsed = structure.parse(built.text, "1abc-assembly1", "1abc.cif")
    arrays, _ = structure.arrays(parsed, "1abc.cif")
    resolved = int((~arrays["atoms"]["missing"]).sum())
    assert resolved == int(parsed.biomolecule.atom_mask.sum())
    assert resolved == len(table(built)) - (case == "terminal oxygen")  # which the baseline does not represent
    assert parsed.released == "1970-01-01" and parsed.resolution is None


def test_unknown_component_is_one_clear_line(components):
    built = build(text(PEPTIDE + single("Q0Q0Q", "C", "B", "900", chain="A")))
    parsed = structure.parse(built.text, "1abc-assembly1", "1abc.cif")
    with pytest.raises(InputError, match=r"1abc.cif: atom_site: a residue cannot be represented .*Q0Q0Q"):
        structure.arrays(parsed, "1abc.cif")


def test_component_may_come_from_the_users_dictionary(tmp_path):
    path = tmp_path / "components.cif"
    path.write_text(
        "data_Q0Q0Q\nloop_\n_chem_comp_atom.atom_id\n_chem_comp_atom.type_symbol\n_chem_comp_atom.charge\n"
        "C1 C 0\nO1 O -1\nH1 H 0\nloop_\n_chem_comp_bond.atom_id_1\n_chem_comp_bond.atom_id_2\n"
        "_chem_comp_bond.value_order\nC1 O1 SING\nC1 H1 SING\n"
    )
    smiles = ccd.ComponentSmiles(path)
    assert "Q0Q0Q" in smiles and smiles["Q0Q0Q"] == "C[O-]"
    assert smiles["ATP"] == ccd.bundled_smiles("ATP")
    with pytest.raises(InputError, match="components: not a readable CIF file"):
        ccd.ComponentSmiles(tmp_path / "nowhere.cif")


@pytest.mark.parametrize("component", ["HEM", "ATP", "PHE", "SF4", "GNP", "NAD"])
def test_bundled_component_kekulizes(component):
    from rdkit import Chem

    assert Chem.MolFromSmiles(ccd.bundled_smiles(component)) is not None


def test_unknown_bundled_component_has_no_smiles():
    assert ccd.bundled_smiles("Q0Q0Q") is None
