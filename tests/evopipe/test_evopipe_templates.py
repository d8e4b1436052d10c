"""Template features: the compact form equals the baseline's dense tensor, whole and cropped."""

from __future__ import annotations

import gzip
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from megafold.evopipe import alignments, assembly, ccd, expand, featurize, structure, template_geometry, templates
from megafold.evopipe.report import Log

NAME = "2q2k-assembly1"


@pytest.fixture(scope="module")
def parsed(sample):
    ccd.install()
    path = sample.mmcif / "2q2k.cif"
    return structure.parse(assembly.build(alignments.read_text(path), NAME, str(path)).text, NAME, str(path))


def crop(arrays, mask):
    return [torch.from_numpy(arrays[name][:, mask]) for name in expand.GEOMETRY]


def biomolecule_of(parsed, chain):
    """One chain of a structure, as a template."""
    from alphafold3_pytorch.common.biomolecule import Biomolecule

    mine = parsed.biomolecule.chain_id == chain
    fields = vars(parsed.biomolecule)
    per_token = {name for name, value in fields.items() if isinstance(value, np.ndarray) and len(value) == len(mine)}
    return Biomolecule(**{name: value[mine] if name in per_token else value for name, value in fields.items()})


@pytest.mark.parametrize("kind", ["none", "two chains", "gzipped"])
def test_compact_templates_equal_the_dense_ones(sample, parsed, tmp_path, monkeypatch, kind):
    """Kalign and the template files are stood in for: chains B and B-2 get themselves, shifted by two residues."""
    from alphafold3_pytorch.data import data_pipeline, template_parsing

    hits = {} if kind == "none" else {"B": 2, "B-2": 1}
    chains = featurize.chain_residues(parsed.biomolecule)
    found = {chain: [(biomolecule_of(parsed, chain), "protein")] * hits.get(chain, 0) for chain in chains}
    for chain in hits:
        table = tmp_path / f"{NAME}{chain}_protein_x.m8"
        table.touch() if kind != "gzipped" else Path(f"{table}.gz").write_bytes(gzip.compress(b"a table"))

    def realign(query_sequence, template_sequence, **_):
        return template_sequence, {i: i - 2 for i in range(len(query_sequence))}

    def parse_m8(path, *_, **__):
        assert path.endswith(".m8") and Path(path).read_text() == ("a table" if kind == "gzipped" else "")
        return found[path.split(NAME)[1].split("_")[0]]

    monkeypatch.setattr(data_pipeline, "_realign_pdb_template_to_query", realign)
    monkeypatch.setattr(template_parsing, "parse_m8", parse_m8)
    stock = data_pipeline.make_template_features(found, chains, num_templates=4, kalign_binary_path="kalign")
    source = replace(sample, templates=tmp_path, kalign=tmp_path)
    tokens = np.zeros(len(parsed.biomolecule.chain_id))
    arrays = templates.features(source, NAME, chains, parsed, tokens, Log("", NAME))
    keep = np.random.default_rng(0).random(len(tokens)) < 0.4
    chain_of = torch.from_numpy(parsed.biomolecule.chain_index.astype(np.int64))
    for mask in (np.ones(len(tokens), bool), keep):
        dense = template_geometry.expand(*crop(arrays, mask), chain_of[torch.from_numpy(mask)])
        assert torch.equal(dense, stock["templates"][:, mask][:, :, mask])
    assert int(stock["template_mask"].sum()) == max(hits.values(), default=0)
    assert np.array_equal(arrays["template_mask"], stock["template_mask"].numpy())
    assert sum(array.nbytes for array in arrays.values()) == 4 * 98 * len(tokens) + 4  # dense: 4 * 432 * N^2


def test_gzipped_hits_are_those_of_the_plain_file(sample, parsed, tmp_path, shared_data):
    """A real table: the baseline's parser looks for the same structures, none of which is there."""
    table = (shared_data / "templates" / "7a4d-assembly1A_protein_pdball_230102_db.m8").read_bytes()
    seen = []
    for folder, name, data in (("plain", "x.m8", table), ("gzipped", "x.m8.gz", gzip.compress(table)),
                               ("empty", "x.m8.gz", gzip.compress(b""))):  # fmt: skip
        (tmp_path / folder).mkdir()
        (tmp_path / folder / f"{NAME}A_protein_{name}").write_bytes(data)
        chains = {"A": featurize.chain_residues(parsed.biomolecule)["A"]}
        log, n = Log("", NAME), len(chains["A"]["chemtype"])
        arrays = templates.features(replace(sample, templates=tmp_path / folder, kalign=tmp_path), NAME, chains, parsed,
                                    np.zeros(n), log)  # fmt: skip
        assert not arrays["template_mask"].any()
        seen.append([one.code for one in log.findings])
    assert seen == [["template hits not usable"], ["template hits not usable"], []]


def test_hits_without_kalign_are_noted_and_empty(sample, parsed, tmp_path):
    (tmp_path / f"{NAME}A_protein_x.m8").touch()
    log = Log("", NAME)
    arrays = templates.features(replace(sample, templates=tmp_path), NAME, ["A"], parsed, np.zeros(30), log)
    assert "data.kalign is not set" in log.findings[0].reason and log.findings[0].action
    assert not arrays["template_mask"].any() and not arrays["template_state"].any()
