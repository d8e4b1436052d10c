"""Clashing chains as in AF3's supplement, and the full sequence of a chain from whatever the file has."""

from __future__ import annotations

import numpy as np
import pytest
from gemmi import cif

from megafold.evopipe import clashes, sequences
from megafold.evopipe.report import Finding, Log, counts
from megafold.evopipe.residues import Residue


def line(count: int, *, first: float = 0.0, y: float = 0.0) -> np.ndarray:
    """Atoms in a row, 3 angstrom apart."""
    return np.stack([first + 3.0 * np.arange(count), np.full(count, y), np.zeros(count)], axis=-1)


CLASHES = {
    "apart": ({"A": line(10), "B": line(10, y=1.8)}, []),
    "within 1.7": ({"A": line(10), "B": line(10, y=1.6)}, ["B"]),
    "the larger share goes": ({"A": line(4), "B": line(10, y=1.0)}, ["A"]),
    "equal shares: fewer atoms go": ({"A": line(4), "B": np.concatenate([line(4, y=1.0)] * 2)}, ["A"]),
    "equal shares and sizes: the last id goes": ({"B": line(5), "A": line(5, y=1.0)}, ["B"]),
    "exactly 30 %": ({"A": line(10), "B": line(10, first=21.0, y=1.0)}, []),
    "40 %": ({"A": line(10), "B": line(10, first=18.0, y=1.0)}, ["B"]),
    "an atom counts once": ({"A": line(10), "B": np.concatenate([line(1, y=0.2 * i) for i in range(7)])}, ["B"]),
    "shares of several chains are not added": (
        {"A": line(10), "B": line(10, first=24.0, y=1.0), "C": line(10, first=-21.0, y=1.0)},
        [],
    ),
    "what clashed with a removed chain stays": (
        {"A": line(10), "B": line(10, y=1.0), "C": line(10, y=2.0)},
        ["B"],
    ),
    "one chain": ({"A": line(3)}, []),
}


@pytest.mark.parametrize("case", CLASHES)
def test_clashing_chain_is_found(case):
    places, expected = CLASHES[case]
    assert [loser for loser, _, _ in clashes.clashing(places)] == expected


def residue(component: str, label: str, asym: str = "A") -> Residue:
    return Residue(component, asym, asym, label, "", "1", label, "ATOM", label, polymer=True)


SCHEME = """_pdbx_poly_seq_scheme.asym_id
_pdbx_poly_seq_scheme.seq_id
_pdbx_poly_seq_scheme.mon_id
A 1 GLY
A 2 ALA
A 2 SER
A 3 TRP
"""
ENTITY = "_entity_poly_seq.entity_id\n_entity_poly_seq.num\n_entity_poly_seq.mon_id\n1 1 GLY\n1 2 ALA\n1 3 TRP\n"
LETTERS = "_entity_poly.entity_id\n_entity_poly.type\n_entity_poly.pdbx_seq_one_letter_code\n1 polypeptide(L) {}\n"
SOURCES = {
    "scheme": ([SCHEME], ["GLY", "ALA", "TRP"], None),
    "entity sequence": ([ENTITY], ["GLY", "ALA", "TRP"], None),
    "letters": ([LETTERS.format("GAW")], ["GLY", "ALA", "TRP"], None),
    "letters with a modified residue": ([LETTERS.format("G(MSE)W")], ["GLY", "ALA", "TRP"], None),
    "unbalanced letters": ([LETTERS.format("G(MSEW")], ["GLY", "ALA"], "no sequence"),
    "nothing": ([], ["GLY", "ALA"], "no sequence"),
    "too short": ([ENTITY.replace("1 2 ALA\n1 3 TRP\n", "")], ["GLY", "ALA"], "contradicting sequence"),
    "a gap": ([ENTITY.replace("1 2 ALA\n", "")], ["GLY", "ALA"], "no sequence"),
    "numbers that are none": ([ENTITY.replace("1 2 ALA", "1 x ALA")], ["GLY", "ALA"], "no sequence"),
    "the first that fits": ([SCHEME.replace("A 1 GLY\nA 2 ALA\nA 2 SER\n", ""), ENTITY], ["GLY", "ALA", "TRP"], None),
}


@pytest.mark.parametrize("case", SOURCES)
def test_sequence_is_found_where_the_file_has_it(case):
    tables, expected, code = SOURCES[case]
    block = cif.read_string("data_x\n_entry.id x\n" + "".join(f"loop_\n{table}" for table in tables)).sole_block()
    residues, log = [residue("GLY", "1"), residue("ALA", "2")], Log("x.cif", "x-assembly1")
    assert sequences.of_chains(block, residues, log) == {"A": expected}
    assert [one.number for one in residues] == ["1", "2"]
    assert [finding.code for finding in log.findings] == ([code] if code else [])


def test_sequence_of_another_protein_is_not_used():
    components = ["GLY", "ALA", "TRP", "LEU", "SER", "VAL"]
    rows = "".join(f"1 {number} {component}\n" for number, component in enumerate(components, 1))
    table = "loop_\n" + ENTITY[: ENTITY.index("1 1 GLY")] + rows
    block = cif.read_string(f"data_x\n{table}").sole_block()
    residues = [residue(component, str(number)) for number, component in enumerate(["LYS", "LYS", "LYS"], 2)]
    log = Log("x.cif", "x-assembly1")
    assert sequences.of_chains(block, residues, log) == {"A": ["LYS", "LYS", "LYS"]}
    assert [one.number for one in residues] == ["1", "2", "3"]
    assert log.findings[0].code == "contradicting sequence" and log.findings[0].action


def test_finding_is_one_line_and_one_object():
    finding = Finding("changed", "clashing chains", "x.cif", "x-assembly1", "left out: B", "nothing")
    assert str(finding) == "changed: x.cif: x-assembly1: left out: B -> nothing"
    assert Finding.from_json(finding.to_json()) == finding
    with pytest.raises(ValueError, match="kind must be one of"):
        Finding("lost", "x", "x", "x", "x")


def test_findings_are_counted_by_entry():
    def found(entry: str, code: str = "a") -> Finding:
        return Finding("note", code, "f", entry, "r")

    assert counts([found("x"), found("x"), found("y"), found("x", "b")]) == {("note", "a"): 2, ("note", "b"): 1}
