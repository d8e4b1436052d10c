"""Every kind of structure file is featurised, or refused with file, entry, reason and what to do. Real entries, and
small files made from real entries by one change each."""

from __future__ import annotations

import gzip
import runpy
import zipfile
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from gemmi import cif

from megafold.errors import InputError
from megafold.evopipe import alignments, assembly, augment, ccd, crop, featurize, layout, molecules, report, sample_data
from megafold.evopipe.sources import DataSource, entry_id

mutated = SimpleNamespace(**runpy.run_path(str(Path(__file__).with_name("mutated.py"))))
MORE = ("1hf9", "2crb", "1y57", "4i6p", "5kc1")  # entries of the wheel beside the sample set; 3zee takes long


@pytest.fixture(scope="module", autouse=True)
def components():
    ccd.install()


@pytest.fixture(scope="module")
def more(tmp_path_factory) -> Path:
    """Further real entries: NMR ensembles, many unresolved residues, salts, crystallisation aids."""
    folder = tmp_path_factory.mktemp("more")
    try:
        wheel = sample_data.download_wheel(folder)
    except InputError as error:
        pytest.skip(f"the sample data cannot be downloaded: {error}")
    with zipfile.ZipFile(wheel) as archive:
        for id in MORE:
            (folder / f"{id}.cif").write_bytes(archive.read(f"{sample_data.FOLDER}/mmcifs/{id}.cif"))
    return folder


def made(path: Path, *, msa: Path | None = None) -> layout.Entry:
    return featurize.featurize(DataSource("folders", path, msa), entry_id(path), path, msa_depth=16)


def codes(entry: layout.Entry) -> set[str]:
    return {finding.code for finding in entry.findings}


def full_length(path: Path, chains: tuple[str, ...]) -> int:
    """Residues of the sequences that the file states, for the chains of an entry, copies included."""
    block = cif.read_string(path.read_text()).sole_block()
    authors = {row[0]: row[1] for row in block.find("_atom_site.", ["auth_asym_id", "label_entity_id"])
               if row[1] in {one[0] for one in block.find(["_entity_poly_seq.entity_id"])}}  # fmt: skip
    lengths = Counter(row[0] for row in set(map(tuple, block.find("_entity_poly_seq.", ["entity_id", "num"]))))
    return sum(lengths[authors[chain.split("-")[0]]] for chain in chains)


@pytest.mark.parametrize("id", MORE)
def test_real_entry_has_all_of_its_sequence(more, id):
    entry = made(more / f"{id}.cif")
    residues = entry.arrays["residues"]
    polymer = residues[residues["kind"] != layout.LIGAND]
    assert len(polymer) == full_length(more / f"{id}.cif", entry.chains)
    expected = {"1hf9": "ensemble", "2crb": "ensemble", "1y57": "crystallisation aids", "4i6p": "unresolved residues",
                "5kc1": "outside the assembly"}[id]  # fmt: skip
    assert expected in codes(entry)
    keep = augment.choose_crop(entry, 64, epoch=0, seed=0).keep
    fields = crop.structure_features(entry, keep)
    assert all(bool(np.isfinite(value.numpy()).all()) for value in fields.values() if value is not None)


@pytest.fixture
def ubiquitin(sample):
    """1ubq, to be changed: 76 residues, all resolved."""
    return mutated.Entry((sample.mmcif / "1ubq.cif").read_text())


@pytest.fixture(scope="module")
def plain(sample) -> layout.Entry:
    return made(sample.mmcif / "1ubq.cif")


def of_atom(name: str, *numbers: int):
    return lambda atom: atom["label_atom_id"] == name and (not numbers or atom["label_seq_id"] in map(str, numbers))


def ensemble(entry) -> None:
    entry.atoms += entry.copies(entry.atoms, 40.0, pdbx_PDB_model_num="2")


def alternative(entry) -> None:
    other = entry.copies(entry.residue(10), 1.0, label_alt_id="B", occupancy="0.40")
    entry.set(lambda atom: atom["label_seq_id"] == "10", label_alt_id="A", occupancy="0.60")
    entry.atoms += other


def without_occupancy(entry) -> None:
    entry.columns.remove("occupancy")


def zero_occupancy(entry) -> None:
    entry.set(lambda atom: atom["label_seq_id"] == "10", occupancy="0.00")


def unset_occupancy(entry) -> None:
    entry.set(lambda atom: True, occupancy="?")


def without_entities(entry) -> None:
    entry.drop(*mutated.POLYMER_TABLES)
    entry.set(lambda atom: True, label_entity_id="?")


def without_numbers(entry) -> None:
    entry.drop(*mutated.POLYMER_TABLES)
    entry.set(lambda atom: True, label_seq_id=".", label_entity_id="?")


def without_author_names(entry) -> None:
    for column in ("auth_asym_id", "auth_atom_id", "auth_comp_id"):
        entry.columns.remove(column)


def without_elements(entry) -> None:
    entry.columns.remove("type_symbol")


def with_water_in_two_models(entry) -> None:
    entry.ligand("HOH", "X", "A", 901, (40.0, 0.0, 0.0))


SAME = {  # the features are those of the file as it was
    "ensemble": (ensemble, "ensemble"),
    "alternative locations": (alternative, "alternative locations"),
    "no occupancy column": (without_occupancy, None),
    "zero occupancy": (zero_occupancy, "zero occupancy"),
    "unset occupancy": (unset_occupancy, None),
    "no _entity_poly, entity ?": (without_entities, "no sequence"),
    "no label_seq_id": (without_numbers, "no sequence"),
    "no author columns": (without_author_names, None),
    "no elements": (without_elements, None),
    "another water": (with_water_in_two_models, None),
}


@pytest.mark.parametrize("case", SAME)
def test_unusual_file_gives_the_same_features(ubiquitin, plain, tmp_path, case):
    change, code = SAME[case]
    change(ubiquitin)
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    entry = made(path)
    for name in ("tokens", "residues", "atoms", "msa", "components"):
        assert np.array_equal(entry.arrays[name], plain.arrays[name]), name
    assert code is None or code in codes(entry)


@pytest.mark.parametrize("form", ["gzip", "CRLF", "byte order mark", "Latin-1", "assembly file of the wwPDB"])
def test_form_of_the_file_does_not_matter(sample, plain, tmp_path, form):
    data = (sample.mmcif / "1ubq.cif").read_bytes()
    path = tmp_path / "1ubq.cif"
    if form == "gzip":
        path, data = tmp_path / "1ubq.cif.gz", gzip.compress(data)
    elif form == "CRLF":
        data = data.replace(b"\n", b"\r\n")
    elif form == "byte order mark":
        data = b"\xef\xbb\xbf" + data
    elif form == "Latin-1":
        data = data.replace(b"Vijay-Kumar", b"Vij\xe1y-Kumar")
        assert b"\xe1" in data
    else:  # with its waters, and not to be expanded again
        path = tmp_path / "1ubq-assembly1.cif"
    path.write_bytes(data)
    entry = made(path)
    assert all(np.array_equal(entry.arrays[name], plain.arrays[name]) for name in ("tokens", "atoms"))


@pytest.mark.parametrize("program", ["gemmi", "biopython", "biotite"])
def test_file_of_another_program_is_featurised(sample, plain, tmp_path, program):
    path = tmp_path / "1ubq.cif"
    path.write_text(mutated.written_by(program, (sample.mmcif / "1ubq.cif").read_text()))
    entry = made(path)
    for name in ("residue_index", "kind", "molecule_id", "center_position"):
        assert np.array_equal(entry.arrays["tokens"][name], plain.arrays["tokens"][name]), name


def test_cleaned_assembly_is_taken_as_it_is(sample, tmp_path):
    """What is written for the baseline's parser, read again: the same features, unresolved residues included."""
    raw = made(sample.mmcif / "2q2k.cif")
    path = tmp_path / "2q2k-assembly1.cif"
    path.write_text(assembly.build((sample.mmcif / "2q2k.cif").read_text(), "2q2k-assembly1", "2q2k.cif").text)
    assert assembly.is_prepared(path.read_text(), path.name)
    again = made(path)
    assert all(np.array_equal(again.arrays[name], raw.arrays[name]) for name in layout.ARRAYS)


def test_predicted_model_is_featurised(sample, plain, tmp_path):
    """AlphaFold DB: no assembly records, no experiment, pLDDT as B factors, plain or gzipped."""
    text = mutated.predicted((sample.mmcif / "1ubq.cif").read_text(), "AF-P0CG48-F1")
    path = tmp_path / "AF-P0CG48-F1-model_v4.cif.gz"
    path.write_bytes(gzip.compress(text.encode()))
    entry = made(path)
    assert entry.name == "AF-P0CG48-F1-model_v4-assembly1" and entry.chains == ("A",) and entry.resolution is None
    assert np.array_equal(entry.arrays["tokens"]["center_position"], plain.arrays["tokens"]["center_position"])
    assert not {finding.kind for finding in entry.findings} & {"failed", "changed"}


def test_unresolved_residues_keep_their_tokens(ubiquitin, plain, tmp_path):
    ubiquitin.keep(lambda atom: atom["label_seq_id"] not in ("1", "2", "20", "21", "22", "76"))
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    entry = made(path)
    tokens, whole = entry.arrays["tokens"], plain.arrays["tokens"]
    for name in ("residue_index", "kind", "molecule_id"):
        assert np.array_equal(tokens[name], whole[name]), name
    assert np.array_equal(entry.arrays["msa"], plain.arrays["msa"])
    assert np.flatnonzero(~tokens["center_resolved"]).tolist() == [0, 1, 19, 20, 21, 75]
    atoms = entry.arrays["atoms"]
    assert atoms["missing"][np.isin(atoms["token"], [0, 1, 19, 20, 21, 75])].all()
    assert np.array_equal(atoms["position"][~atoms["missing"]], plain.arrays["atoms"]["position"][~atoms["missing"]])
    nowhere = np.isinf(tokens["crop_position"]).all(axis=-1)
    assert np.flatnonzero(nowhere).tolist() == [0, 1, 19, 20, 21, 75]
    for epoch in range(5):
        inside = augment.choose_crop(entry, 60, epoch=epoch, seed=0, weights={"spatial": 1.0}).keep
        assert inside.sum() == 60 and not (inside & nowhere).any()  # a spatial crop has no use for them
        almost = augment.choose_crop(entry, 72, epoch=epoch, seed=0, weights={"spatial": 1.0}).keep
        assert almost.sum() == 72 and almost[~nowhere].all()  # but takes them when there is room


def rename(entry, number: int, component: str, **atoms: str) -> None:
    entry.set(lambda atom: atom["label_seq_id"] == str(number), label_comp_id=component, auth_comp_id=component)
    for old, new in atoms.items():
        element = "SE" if new == "SE" else new[0]
        entry.set(of_atom(old, number), label_atom_id=new, auth_atom_id=new, type_symbol=element)


@pytest.mark.parametrize(
    ("component", "code"),
    [("MSE", None), ("UNK", None), ("X", "unknown residues"), ("Q0Q0Q", "unknown residues")],
)
def test_modified_and_unknown_residues_become_atoms(ubiquitin, plain, tmp_path, component, code):
    rename(ubiquitin, 1, component, **({"SD": "SE"} if component == "MSE" else {}))
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    entry = made(path)
    kinds = [layout.KINDS[kind] for kind in entry.arrays["residues"]["kind"]]
    assert kinds == ["mod_protein"] + ["protein"] * 75
    assert entry.n_tokens == 8 + 75 and entry.arrays["tokens"]["residue_index"][8] == 2
    assert code is None or code in codes(entry)
    assert entry.arrays["msa"].shape[1] == entry.n_tokens


def test_unresolved_modified_residue_is_represented_by_its_parent(ubiquitin, plain, tmp_path):
    rename(ubiquitin, 1, "MSE")
    for table in ("_entity_poly_seq.", "_pdbx_poly_seq_scheme."):
        column = ubiquitin.block.find([f"{table}mon_id"])
        column[0][0] = "MSE"
    ubiquitin.keep(lambda atom: atom["label_seq_id"] != "1")
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    entry = made(path)
    assert np.array_equal(entry.arrays["tokens"]["molecule_id"], plain.arrays["tokens"]["molecule_id"])
    [finding] = [one for one in entry.findings if one.code == "unresolved modified residues"]
    assert "MSE as MET" in finding.reason and finding.kind == "changed"


def test_terminal_oxygen_is_told(plain):
    assert "atoms that the baseline does not represent: OXT" in plain.notes


def test_covalent_ligand_and_its_bond_are_kept(ubiquitin, tmp_path):
    ubiquitin.ligand("NAG", "B", "A", 201, (60.0, 0.0, 0.0))
    sugar = [atom for atom in ubiquitin.atoms if atom["label_comp_id"] == "NAG"]
    [asparagine] = [atom for atom in ubiquitin.residue(25) if atom["label_atom_id"] == "ND2"]
    ubiquitin.bond("covale", asparagine, sugar[0], 1.45)
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    entry = made(path)
    assert entry.n_tokens == 76 + 15 and (entry.arrays["tokens"]["kind"][76:] == layout.LIGAND).all()
    everything = np.ones(entry.n_tokens, bool)
    bonds = crop.structure_features(entry, everything, exact_bonds=True)["token_bonds"]
    assert bonds[24, 76] and bonds[76, 24] and not bonds[24, 77:].any() and not bonds[25, 76:].any()
    kept = everything.copy()
    kept[:10] = False  # a crop renumbers the tokens
    assert crop.structure_features(entry, kept, exact_bonds=True)["token_bonds"][14, 66]
    kept[76] = False
    assert not crop.structure_features(entry, kept, exact_bonds=True)["token_bonds"][:66, 66:].any()


def test_glycan_is_one_chain_of_sugars(ubiquitin, tmp_path):
    block = ubiquitin.block
    ubiquitin.drop(*mutated.ASSEMBLY_TABLES)
    for number in (1, 2):
        ubiquitin.ligand("NAG", "B", "B", number, (60.0 + 9 * number, 0.0, 0.0))
    first, second = ([a for a in ubiquitin.atoms if a["label_asym_id"] == "B" and a["auth_seq_id"] == n] for n in "12")
    ubiquitin.bond("covale", first[0], second[0], 1.4)
    columns = ["asym_id", "entity_id", "mon_id", "num", "pdb_asym_id", "pdb_mon_id", "pdb_seq_num"]
    loop = block.init_mmcif_loop("_pdbx_branch_scheme.", columns)
    loop.set_all_values([[value] * 2 for value in ("B", "9", "NAG")] + [["1", "2"], ["B"] * 2, ["NAG"] * 2, ["1", "2"]])
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    entry = made(path)
    assert entry.chains == ("A", "B")
    residues = entry.arrays["residues"]
    assert [layout.KINDS[kind] for kind in residues["kind"][-2:]] == ["ligand", "ligand"]
    assert entry.arrays["tokens"]["residue_index"][[76, -1]].tolist() == [1, 2]
    bonds = crop.structure_features(entry, np.ones(entry.n_tokens, bool), exact_bonds=True)["token_bonds"]
    assert bonds[76, 91] and bonds[76:91, 91:].sum() == 1


@pytest.mark.parametrize("ion", ["ZN", "MG", "CL", "NA"])
def test_ion_is_one_token(ubiquitin, tmp_path, ion):
    ubiquitin.drop(*mutated.ASSEMBLY_TABLES)
    ubiquitin.ligand(ion, "B", "A", 301, (60.0, 0.0, 0.0))
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    entry = made(path)
    fields = crop.structure_features(entry, np.ones(entry.n_tokens, bool))
    assert entry.n_tokens == 77 and bool(fields["is_molecule_types"][-1, 4])


@pytest.mark.parametrize("kind", ["rna", "dna"])
def test_nucleic_acid_is_featurised(ubiquitin, tmp_path, kind):
    ubiquitin.atoms = ubiquitin.atoms[:1]
    names = ("A", "C", "G", "U") if kind == "rna" else ("DA", "DC", "DG", "DT")
    for number, name in enumerate(names, 1):
        ubiquitin.ligand(name, "A", "A", number, (7.0 * number, 0.0, 0.0))
        ubiquitin.set(lambda atom, n=number: atom["auth_seq_id"] == str(n), label_seq_id=str(number), group_PDB="ATOM")
    ubiquitin.atoms = ubiquitin.atoms[1:]
    ubiquitin.drop(*mutated.POLYMER_TABLES)
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    entry = made(path)
    assert [layout.KINDS[one] for one in entry.arrays["tokens"]["kind"]] == [kind] * 4
    assert entry.arrays["tokens"]["molecule_id"].tolist() == {"rna": [21, 22, 23, 24], "dna": [26, 27, 28, 29]}[kind]


@pytest.mark.parametrize("chain", ["AAA", "A1", "a", "Long-Name"])
def test_chain_of_any_name_finds_its_alignment(ubiquitin, plain, tmp_path, chain):
    ubiquitin.drop(*mutated.ASSEMBLY_TABLES)
    ubiquitin.set(lambda atom: True, auth_asym_id=chain)
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    query = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"
    (tmp_path / f"1ubq-assembly1{chain}_protein.a3m").write_text(f">q\n{query}\n>x\n{query[:-2]}--\n")
    entry = made(path, msa=tmp_path)
    assert entry.chains == (chain,) and entry.msa_depth == 2 and "no alignment" not in codes(entry)


@pytest.mark.parametrize(("method", "tokens"), [("X-RAY DIFFRACTION", 105), ("SOLUTION NMR", 115)])
def test_crystallisation_aids_are_left_out_of_crystals_only(sample, tmp_path, method, tokens):
    entry = mutated.Entry((sample.mmcif / "4zey.cif").read_text())
    entry.block.set_pair("_exptl.method", cif.quote(method))
    path = tmp_path / "4zey.cif"
    path.write_text(entry.text())
    result = made(path)
    assert result.n_tokens == tokens  # two sulfates of five atoms
    assert ("crystallisation aids" in codes(result)) == (tokens == 105)


def test_clashing_chain_is_left_out_and_told(ubiquitin, plain, tmp_path):
    ubiquitin.drop(*mutated.ASSEMBLY_TABLES)
    ubiquitin.keep(lambda atom: atom["group_PDB"] == "ATOM")
    ubiquitin.atoms += ubiquitin.copies(ubiquitin.atoms, 0.4, label_asym_id="C", auth_asym_id="C")
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    entry = made(path)
    assert entry.chains == ("A",) and np.array_equal(entry.arrays["tokens"], plain.arrays["tokens"])
    [finding] = [one for one in entry.findings if one.code == "clashing chains"]
    assert finding.kind == "changed" and "C (100 % of its atoms are within 1.7 angstrom of A)" in finding.reason


def test_embedding_that_never_ends_is_never_started(ubiquitin, tmp_path, monkeypatch):
    from alphafold3_pytorch import life

    def hang(*_, **__):
        raise AssertionError("a conformer was embedded")

    monkeypatch.setattr(life, "generate_conformation", hang)
    ubiquitin.drop(*mutated.ASSEMBLY_TABLES)
    ubiquitin.ligand("NAG", "B", "A", 201, (60.0, 0.0, 0.0))
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.text())
    assert made(path).n_tokens > 76


def test_search_for_bond_orders_is_ended_and_told(monkeypatch):
    """Cardiolipin: nobody has seen the end of the search for its bond orders."""
    import biotite.structure.info as info
    from alphafold3_pytorch import inputs

    array = info.residue("CDL")
    array = array[array.element != "H"]
    log = report.Log("x.cif", "x-assembly1")
    monkeypatch.setattr(molecules, "MAX_ITERATIONS", 200)
    with molecules.bounded(log):
        molecule = inputs.create_mol_from_atom_positions_and_types(
            name="CDL",
            atom_positions=array.coord.astype(float),
            element_types=[element.capitalize() for element in array.element],
            missing_atom_indices=set(),
        )
        molecule = inputs.AllChem.AssignBondOrdersFromTemplate(
            inputs.mol_from_smile(ccd.bundled_smiles("CDL")), molecule
        )
    [finding] = log.findings
    assert finding.kind == "changed" and finding.code == "bond orders" and "CDL" in finding.reason
    assert len(molecules.describe(molecule).bonds) == 99 and inputs.rdDetermineBonds.__name__.startswith("rdkit")


REFUSED = {
    "no coordinates": (lambda entry: entry.drop("_atom_site."), "_atom_site"),
    "broken number": (lambda entry: entry.set(of_atom("CA", 5), Cartn_x="1.2.3"), "not a number"),
    "infinite": (lambda entry: entry.set(of_atom("CA", 5), Cartn_x="inf"), "not finite"),
    "far away": (lambda entry: entry.set(of_atom("CA", 5), Cartn_x="1e300"), "farther than"),
    "only water": (lambda entry: entry.keep(lambda atom: atom["label_comp_id"] == "HOH"), "no atom is left"),
    "unknown ligand": (lambda entry: entry.ligand("BEN", "B", "A", 201, (60.0, 0.0, 0.0)), "Q0Q0Q"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_file_that_cannot_be_used_is_told_with_what_to_do(ubiquitin, tmp_path, case):
    change, expected = REFUSED[case]
    ubiquitin.drop(*mutated.ASSEMBLY_TABLES)
    change(ubiquitin)
    ubiquitin.set(lambda atom: atom["label_comp_id"] == "BEN", label_comp_id="Q0Q0Q", auth_comp_id="Q0Q0Q")
    path = tmp_path / "1ubq.cif"
    path.write_text(ubiquitin.block.as_string() if case == "no coordinates" else ubiquitin.text())
    with pytest.raises(InputError) as caught:
        made(path)
    finding = report.failed("1ubq-assembly1", path, caught.value)
    assert finding.file == str(path) and finding.entry == "1ubq-assembly1" and finding.action
    assert expected in finding.reason and "\n" not in str(finding) and finding.code != "unexpected error"


def test_text_of_alignments_is_read_whatever_its_encoding(tmp_path):
    (tmp_path / "x.a3m").write_bytes(b"\xef\xbb\xbf>q\r\nMK\r\n")
    assert list(alignments.records(alignments.read_text(tmp_path / "x.a3m"))) == [("q", "MK")]
