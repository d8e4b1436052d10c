"""Alignment files of every kind give the baseline's features, or are refused with file, chain and what to do."""

from __future__ import annotations

import gzip
import runpy
import shutil
from pathlib import Path

import numpy as np
import pytest

from megafold.errors import InputError
from megafold.evopipe import alignments, ccd, featurize, report
from megafold.evopipe.sources import DataSource

QUERY = "MQIFVKTLTGKTITLEVEPSDTIENVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLSDYNIQKESTLHLVLRLRGG"  # 1ubq
OTHER = "MQIFVKTLTGKTITLEVESSDTIDNVKAKIQDKEGIPPDQQRLIFAGKQLEDGRTLADYNIQKESTLHLVLRLRGG"
WITH_INSERTION = f"{OTHER[:20]}aa{OTHER[20:40]}-{OTHER[41:]}"
STOCKHOLM = f"""# STOCKHOLM 1.0
#=GF ID x

query  {QUERY[:20]}..{QUERY[20:40]}
other  {OTHER[:20]}AA{OTHER[20:40]}
#=GC RF xxxx
query  {QUERY[40:]}
other  -{OTHER[41:]}
//
"""
PLAIN = f">q\n{QUERY}\n>x\n{WITH_INSERTION}\n"


@pytest.fixture(scope="module", autouse=True)
def components():
    ccd.install()


def made(sample, msa: Path | None, id: str = "1ubq", depth: int | None = 64):
    path = sample.mmcif / f"{id}.cif"
    return featurize.featurize(DataSource("folders", path, msa), f"{id}-assembly1", path, msa_depth=depth)


def rows(entry) -> list[str]:
    from alphafold3_pytorch.inputs import HUMAN_AMINO_ACIDS

    letters = [*list(HUMAN_AMINO_ACIDS)[:20], *"X" * 11, "-"]
    return ["".join(letters[i] for i in row) for row in entry.arrays["msa"]]


FORMS = {
    "A3M": ("1ubq-assembly1A_protein.a3m", PLAIN.encode()),
    "gzipped A3M": ("1ubq-assembly1A_protein.a3m.gz", gzip.compress(PLAIN.encode())),
    "gzipped without the suffix": ("1ubq-assembly1A_protein.a3m", gzip.compress(PLAIN.encode())),
    "CRLF": ("1ubq-assembly1A_protein.a3m", PLAIN.replace("\n", "\r\n").encode()),
    "wrapped lines": ("1ubq_A.a3m", PLAIN.replace(QUERY[:30], QUERY[:30] + "\n").encode()),
    "dots for insertions": ("1ubqA_x.a3m", PLAIN.replace(QUERY[:20], QUERY[:20] + "..").encode()),
    "comments and zero bytes": ("1ubq_A.a3m", b"#76\t1\n" + PLAIN.encode() + b"\x00"),
    "Stockholm": ("1ubq-assembly1A_uniref.sto", STOCKHOLM.encode()),
    "gzipped Stockholm": ("1ubq-assembly1A_uniref.sto.gz", gzip.compress(STOCKHOLM.encode())),
    "duplicate rows": ("1ubq_A.a3m", (PLAIN + PLAIN + PLAIN.replace(">x", ">y")).encode()),
}


@pytest.mark.parametrize("form", FORMS)
def test_form_of_an_alignment_does_not_matter(sample, tmp_path, form):
    name, data = FORMS[form]
    (tmp_path / name).write_bytes(data)
    entry = made(sample, tmp_path)
    first, second, *rest = rows(entry)
    assert [first, second] == [QUERY, WITH_INSERTION.replace("aa", "")]
    assert set(rest) <= {"-" * 76}  # the baseline leaves a row of gaps for each duplicate
    values = entry.arrays["deletion_values"][entry.arrays["deletions"]]
    assert (values > 0).sum() == 1 and values[1, 20] == pytest.approx(2 / np.pi * np.arctan(2 / 3), abs=1e-6)


def test_alignment_of_one_row_is_the_query(sample, tmp_path):
    (tmp_path / "1ubq_A.a3m").write_text(f">q\n{QUERY}\n")
    assert rows(made(sample, tmp_path)) == rows(made(sample, None)) == [QUERY]


def test_missing_alignment_is_told(sample, tmp_path):
    [finding] = [one for one in made(sample, tmp_path).findings if one.code == "no alignment"]
    assert "chain A" in finding.reason


def test_two_chains_may_have_the_identical_alignment(sample, tmp_path):
    for chain in "AB":
        shutil.copy(sample.msa / "2q2k-assembly1A_protein.a3m", tmp_path / f"2q2k-assembly1{chain}_protein.a3m")
    same = made(sample, tmp_path, "2q2k")
    original = made(sample, sample.msa, "2q2k")
    assert np.array_equal(same.arrays["msa"], original.arrays["msa"]) and same.msa_depth > 10


def test_alignment_of_the_resolved_residues_gets_gaps(sample, tmp_path):
    """Searched with the sequence of the coordinates: the columns of unresolved residues hold the query and gaps."""
    whole = made(sample, sample.msa, "2q2k")
    have = [bool(one) for one in whole.arrays["tokens"]["center_resolved"][whole.arrays["tokens"]["chain"] == 0]]
    text = (sample.msa / "2q2k-assembly1A_protein.a3m").read_text()
    kept = "".join(f">{name}\n{alignments._select(row, have)}\n" for name, row in alignments.records(text))
    for chain in "AB":
        (tmp_path / f"2q2k_{chain}.a3m").write_text(kept if chain == "A" else text)
    entry = made(sample, tmp_path, "2q2k")
    mine = entry.arrays["tokens"]["chain"] == 0
    expected = whole.arrays["msa"][:, mine].copy()
    full = entry.arrays["msa"][:, mine]
    assert np.array_equal(full[0], expected[0]) and sum(have) < len(have) == 70
    assert (full[1:][:, ~np.array(have)] == 31).all()


@pytest.mark.parametrize("depth", [1, 3, 10])
def test_depth_limits_the_rows_of_each_chain(sample, depth):
    assert made(sample, sample.msa, "2q2k", depth).msa_depth == depth


REFUSED = {
    "another protein": (">q\nMKTAYIAKQR\n", "is not the chain's sequence"),
    "ragged": (f">q\n{QUERY}\n>x\n{QUERY[:-1]}\n", "row 2 does not have the query's 76 columns"),
    "empty": ("", "holds no sequence"),
    "ragged Stockholm": (f"# STOCKHOLM 1.0\nq {QUERY}\nx {QUERY[1:]}\n//\n", "row x does not have"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_alignment_that_cannot_be_used_is_told_with_what_to_do(sample, tmp_path, case):
    text, expected = REFUSED[case]
    path = tmp_path / "1ubq_A.a3m"
    path.write_text(text)
    with pytest.raises(InputError) as caught:
        made(sample, tmp_path)
    finding = report.failed("1ubq-assembly1", "1ubq.cif", caught.value)
    assert finding.file == str(path) and finding.reason.startswith("chain A: ") and expected in finding.reason
    assert finding.action and "\n" not in str(finding)


@pytest.mark.parametrize("kalign", [None, "kalign"])
@pytest.mark.parametrize("content", [None, b"", b"not a table\n"], ids=["no file", "empty file", "no table"])
def test_template_hits_may_be_missing_empty_or_broken(sample, tmp_path, kalign, content):
    if content is not None:
        (tmp_path / "1ubq-assembly1A_protein_hits.m8").write_bytes(content)
    path = sample.mmcif / "1ubq.cif"
    program = None if kalign is None else tmp_path / kalign
    if program is not None:
        program.touch()  # its digest is part of the entry's identity
    source = DataSource("folders", path, templates=tmp_path, kalign=program)
    entry = featurize.featurize(source, "1ubq-assembly1", path, msa_depth=4)
    assert not entry.arrays["template_mask"].any()
    told = {finding.code for finding in entry.findings} & {"templates not aligned", "template hits not usable"}
    assert bool(told) == bool(content if kalign else content is not None)


def test_free_amino_acid_is_no_column_of_the_alignment(sample, tmp_path):
    """A ligand that is a polymer's component counts as a residue in the baseline; alignments do not have it."""
    mutated = runpy.run_path(str(Path(__file__).with_name("mutated.py")))
    changed = mutated["Entry"]((sample.mmcif / "1ubq.cif").read_text())
    changed.drop(*mutated["ASSEMBLY_TABLES"])
    changed.ligand("GLU", "B", "A", 201, (60.0, 0.0, 0.0))
    changed.keep(lambda atom: atom["label_seq_id"] != "76" and atom["label_atom_id"] != "OXT")
    path = tmp_path / "1ubq.cif"
    path.write_text(changed.text())
    (tmp_path / "1ubq_A.a3m").write_text(PLAIN)
    entry = featurize.featurize(DataSource("folders", path, tmp_path), "1ubq-assembly1", path, msa_depth=8)
    assert entry.n_tokens == 77
    assert rows(entry) == [QUERY + "E", WITH_INSERTION.replace("aa", "") + "-"]
