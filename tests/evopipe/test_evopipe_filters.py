"""Chains that AF3's data section leaves out: broken ones, and those far from one interface of a large assembly."""

from __future__ import annotations

import runpy
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from megafold.errors import InputError
from megafold.evopipe import assembly, filters, identity, sources
from megafold.evopipe.featurize import inputs_of, options_of
from megafold.evopipe.report import Log
from megafold.evopipe.residues import Residue
from megafold.evopipe.source_file import read_source, write_source

NAME = "1kd8-assembly1"
COLUMNS = [f"matrix[{i}][{j}]" for i in (1, 2, 3) for j in (1, 2, 3)] + [f"vector[{i}]" for i in (1, 2, 3)]


@pytest.fixture
def changed(sample):
    mutated = runpy.run_path(str(Path(__file__).with_name("mutated.py")))
    return lambda id: mutated["Entry"]((sample.mmcif / f"{id}.cif").read_text())


def chain_of(steps, author=None) -> list[Residue]:
    """Alanines along a line; `steps`: place in the sequence -> angstrom from the one before."""
    at, residues = 0.0, []
    for number, step in steps.items():
        at += step
        mine = str((author or {}).get(number, number))
        residues.append(Residue("ALA", "A", "A", mine, "", "1", str(number), "ATOM", str(number), True,
                                [("N", "N", (at, 1.0, 0.0), "0.00"), ("CA", "C", (at, 0.0, 0.0), "0.00")]))  # fmt: skip
    return residues


@pytest.mark.parametrize(
    ("steps", "author", "where"),
    [
        ({1: 0.0, 2: 3.8, 3: 9.99}, None, ""),
        ({1: 0.0, 2: 3.8, 3: 10.01}, None, "10.0 angstrom between residues 2 and 3"),
        ({1: 0.0, 2: 3.8, 5: 20.0}, None, ""),  # a loop that is not resolved
        ({1: 0.0, 2: 3.8, 3: 20.0}, {1: 10, 2: 11, 3: 20}, ""),  # a sequence made of the coordinates alone
        ({1: 0.0, 2: 30.0}, {1: -1, 2: 0}, "30.0 angstrom between residues -1 and 0"),
    ],
    ids=["near", "far", "loop", "author knows of a loop", "negative numbers"],
)
def test_consecutive_residues_far_apart_break_a_chain(steps, author, where):
    assert filters.broken(chain_of(steps, author)) == where


def test_residue_without_a_center_atom_is_no_break():
    residues = chain_of({1: 0.0, 2: 15.0, 3: 15.0})
    residues[1].atoms = residues[1].atoms[:1]
    assert filters.broken(residues) == ""


def test_broken_chain_is_left_out_and_listed(changed):
    file, log = changed("1kd8"), Log("1kd8.cif", NAME)
    for atom in file.atoms:
        if atom["label_asym_id"] == "A" and atom["label_seq_id"].isdigit() and int(atom["label_seq_id"]) > 20:
            atom["Cartn_x"] = f"{float(atom['Cartn_x']) + 40:.3f}"
    built = assembly.build(file.text(), NAME, "1kd8.cif", log)
    parts = {part.asym for chain in built.chains.values() for part in chain if part.sequence}
    assert "A" not in parts and parts
    [told] = [one for one in log.findings if one.code == "broken chains"]
    assert told.kind == "changed" and "A (" in told.reason and "between residues" in told.reason
    whole = assembly.build(changed("1kd8").text(), NAME, "1kd8.cif", Log("1kd8.cif", NAME))
    assert "A" in {part.asym for chain in whole.chains.values() for part in chain if part.sequence}


def test_structure_of_broken_chains_only_is_refused_with_the_reason(changed):
    file = changed("1ubq")
    for atom in file.atoms:
        if atom["label_seq_id"].isdigit() and int(atom["label_seq_id"]) > 40:
            atom["Cartn_z"] = f"{float(atom['Cartn_z']) + 40:.3f}"
    with pytest.raises(InputError, match=r"every chain is broken: A .* between residues 40 and 41"):
        assembly.build(file.text(), "1ubq-assembly1", "1ubq.cif")


@pytest.fixture
def large(changed) -> str:
    """Ubiquitin 24 times along a line, copies 25 angstrom apart, which touch their neighbours."""
    file = changed("1ubq")
    file.drop("_pdbx_struct_assembly_gen.", "_pdbx_struct_oper_list.")
    asyms = ",".join(dict.fromkeys(atom["label_asym_id"] for atom in file.atoms))
    loop = file.block.init_mmcif_loop("_pdbx_struct_assembly_gen.", ["assembly_id", "oper_expression", "asym_id_list"])
    loop.add_row(["1", "1-24", asyms])
    loop = file.block.init_mmcif_loop("_pdbx_struct_oper_list.", ["id", *COLUMNS])
    for number in range(24):
        loop.add_row([str(number + 1), *"100010001", str(25.0 * number), "0", "0"])
    return file.text()


def test_of_a_large_assembly_the_chains_nearest_to_an_interface_stay(large):
    log = Log("1ubq.cif", "1ubq-assembly1")
    built = assembly.build(large, "1ubq-assembly1", "1ubq.cif", log)
    numbers = sorted(1 if author == "A" else int(author.split("-")[1]) for author in built.chains)
    assert len(numbers) == 20 and numbers == list(range(numbers[0], numbers[0] + 20))  # along the line: neighbours
    [told] = [one for one in log.findings if one.code == "large assembly"]
    left_out = [f"A-{number}" if number > 1 else "A" for number in range(1, 25) if number not in numbers]
    assert told.kind == "changed" and all(name in told.reason for name in left_out) and "data.max_chains" in told.action
    again = assembly.build(large, "1ubq-assembly1", "elsewhere.cif")
    assert list(again.chains) == list(built.chains) and again.text == built.text
    log = Log("1ubq.cif", "1ubq-assembly1")
    assert len(assembly.build(large, "1ubq-assembly1", "1ubq.cif", log, most_chains=24).chains) == 24
    assert not [one for one in log.findings if one.code == "large assembly"]


def test_the_token_is_any_of_an_interface_and_no_other():
    """Three pairs of chains, far from each other, and one chain alone: the pair of the token stays."""
    places = {
        name: np.array([[x, 0.0, 0.0], [x, 100.0, 0.0]])
        for name, x in zip("ABCDEFG", (0, 9, 500, 509, 1000, 1009, 2000))
    }
    kept = Counter("".join(filters.nearest_chains(places, f"{number}-assembly1", 2)) for number in range(300))
    assert set(kept) == {"AB", "CD", "EF"} and min(kept.values()) > 70
    alone = {name: np.array([[1000.0 * number, 0.0, 0.0]]) for number, name in enumerate("ABC")}
    assert {"".join(filters.nearest_chains(alone, str(number), 1)) for number in range(50)} == {"A", "B", "C"}


def test_entries_are_made_anew_when_more_chains_or_another_kalign_are_asked_for(sample, tmp_path):
    path = sample.mmcif / "1ubq.cif"
    more = replace(sample, max_chains=40)
    keys = {identity.content_key("x", {}, None, options_of(one)) for one in (sample, more)}
    assert len(keys) == 2 and options_of(sample) == {"max_chains": 20}
    program = tmp_path / "kalign"
    program.write_text("aligns")
    aligned = replace(sample, templates=tmp_path, kalign=program)
    assert inputs_of(aligned, "1ubq-assembly1", path).keys() - inputs_of(sample, "1ubq-assembly1", path) == {"kalign"}
    write_source(tmp_path / "c.h5", more)
    assert read_source(tmp_path / "c.h5").max_chains == 40


@pytest.mark.parametrize("value", [0, -1, "20", 2.5, True])
def test_chains_to_keep_must_be_a_number(value):
    with pytest.raises(InputError, match=r"data\.max_chains: must be a whole number"):
        sources.load_data_section({"sample": True, "max_chains": value}, "data.yaml")
