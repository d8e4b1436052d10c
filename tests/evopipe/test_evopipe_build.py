"""Building a cache: bad input is one line and ends nothing else; a second build does only what is new."""

from __future__ import annotations

import gzip
import json
import multiprocessing
import os
import re
import shutil
import signal
import threading
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from megafold.errors import InputError
from megafold.evopipe import alignments, build, cache, layout, merge, workers
from megafold.evopipe.build import build_cache
from megafold.evopipe.cache import StructureCache
from megafold.evopipe.maker import PREPARING, READY, Maker
from megafold.evopipe.sources import DataSource


@pytest.fixture
def folder(sample, tmp_path) -> DataSource:
    """1ubq and 2q2k, the latter with its alignments."""
    mmcif, msa = tmp_path / "mmcif", tmp_path / "msa"
    mmcif.mkdir()
    shutil.copy(sample.mmcif / "1ubq.cif", mmcif)
    shutil.copy(sample.mmcif / "2q2k.cif", mmcif)
    shutil.copytree(sample.msa, msa)
    return DataSource("folders", mmcif, msa)


def build_quietly(source, out, **options):
    return build_cache(source, out, msa_depth=16, progress=False, **options)


def truncate(path, fraction=0.6):
    data = path.read_bytes()
    path.write_bytes(data[: int(len(data) * fraction)])


def test_truncated_mmcif_is_a_line_of_the_report_and_the_rest_is_built(folder, tmp_path):
    truncate(folder.mmcif / "2q2k.cif")
    report = build_quietly(folder, tmp_path / "c.h5")
    assert report.built == ["1ubq-assembly1"]
    [(file, entry, reason)] = report.failed
    assert file.endswith("2q2k.cif") and entry == "2q2k-assembly1" and "truncated" in reason
    assert StructureCache(tmp_path / "c.h5").entries() == ["1ubq-assembly1"]
    assert "failed: " in str(report) and "2q2k" in str(report)


def test_truncated_mmcif_that_is_named_raises(folder, tmp_path):
    truncate(folder.mmcif / "2q2k.cif")
    with pytest.raises(InputError, match=r"2q2k.cif: mmCIF: cannot be parsed, truncated\?") as caught:
        build_quietly(DataSource("folders", folder.mmcif / "2q2k.cif"), tmp_path / "c.h5")
    assert "\n" not in str(caught.value)


def test_truncated_gzip_is_a_line_of_the_report(folder, tmp_path):
    path = folder.mmcif / "2q2k.cif"
    packed = folder.mmcif / "2q2k.cif.gz"
    packed.write_bytes(gzip.compress(path.read_bytes()))
    path.unlink()
    truncate(packed)
    [(file, _, reason)] = build_quietly(folder, tmp_path / "c.h5").failed
    assert file.endswith("2q2k.cif.gz") and "cannot be read" in reason


def test_truncated_assembly_file_is_one_clear_line(folder, tmp_path, shared_data):
    path = tmp_path / "721p-assembly1.cif"
    path.write_text(alignments.read_text(shared_data / "mmcif" / "721p-assembly1.cif.gz")[:200_000])
    with pytest.raises(InputError, match=r"721p-assembly1\.cif"):
        build_quietly(DataSource("folders", path), tmp_path / "c.h5")


ALIGNMENTS = {
    "another protein": (
        ">q\nMKTAYIAKQR\n>x\nMKTAYIAKQR\n",
        "the query (10 residues, MKTAYIAKQR...) is not the chain's",
    ),
    "one residue changed": (None, "is not the chain's sequence"),
    "ragged row": (None, "row 2 does not have the query's 70 columns"),
    "empty": ("", "holds no sequence"),
}


@pytest.mark.parametrize("case", ALIGNMENTS)
def test_wrong_alignment_names_file_and_chain(folder, tmp_path, case):
    path = folder.msa / "2q2k-assembly1A_protein.a3m"
    text, expected = ALIGNMENTS[case]
    (_, query), *rest = list(alignments.records(path.read_text()))
    if case == "one residue changed":
        text = f">q\n{query[:40]}{'W' if query[40] != 'W' else 'A'}{query[41:]}\n"
    elif case == "ragged row":
        text = f">q\n{query}\n>x\n{rest[0][1][:-1]}\n"
    path.write_text(text)
    [(file, entry, reason)] = build_quietly(folder, tmp_path / "c.h5").failed
    assert file == str(path) and entry == "2q2k-assembly1" and reason.startswith("chain A: ") and expected in reason
    with pytest.raises(InputError, match=r"2q2k-assembly1A_protein\.a3m: chain A: "):
        build_quietly(DataSource("folders", folder.mmcif / "2q2k.cif", folder.msa), tmp_path / "d.h5")


def test_gzipped_and_identical_alignments_are_read(folder, tmp_path):
    for chain in "AB":  # two chains with the identical file
        path = folder.msa / f"2q2k-assembly1{chain}_protein.a3m"
        path.with_name(path.name + ".gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    assert not build_quietly(folder, tmp_path / "c.h5").failed
    assert StructureCache(tmp_path / "c.h5").msa_depth("2q2k-assembly1") == 16


def test_second_build_does_only_what_is_new(folder, sample, tmp_path):
    out = tmp_path / "c.h5"
    assert build_quietly(folder, out).built == ["1ubq-assembly1", "2q2k-assembly1"]
    again = build_quietly(folder, out)
    assert (again.built, again.skipped) == ([], ["1ubq-assembly1", "2q2k-assembly1"])
    path = folder.msa / "2q2k-assembly1A_protein.a3m"
    path.write_text("".join(f">{name}\n{row}\n" for name, row in list(alignments.records(path.read_text()))[:2]))
    shutil.copy(sample.mmcif / "1kd8.cif", folder.mmcif)
    changed = build_quietly(folder, out)
    assert (changed.built, changed.skipped) == (["1kd8-assembly1", "2q2k-assembly1"], ["1ubq-assembly1"])


def test_corrupt_entry_alone_is_built_anew(folder, tmp_path):
    out = tmp_path / "c.h5"
    build_quietly(folder, out)
    with StructureCache(out) as reader:
        shard = reader.index.shard_path(reader.row("1ubq-assembly1"))
        offset = reader.tables("1ubq-assembly1")["atoms"].places[0][0]
    with shard.open("r+b") as handle:
        handle.seek(offset + 40)
        handle.write(b"\xde\xad\xbe\xef")
    assert len(cache.verify(out)) == 1
    report = build_quietly(folder, out)
    assert (report.built, report.skipped) == (["1ubq-assembly1"], ["2q2k-assembly1"])
    assert cache.verify(out) == []


@pytest.mark.parametrize("moment", ["during the second structure", "before the index"])
def test_interrupted_build_is_resumed(folder, tmp_path, monkeypatch, moment):
    class Stopped(BaseException):
        """Stands for the end of the process (which test_evopipe_killed.py brings about)."""

    out = tmp_path / "c.h5"
    make, write_index = Maker._make, build.merge

    def make_one(self, name, path):
        if name.startswith("2q2k") and "second" in moment:
            raise Stopped
        return make(self, name, path)

    def stopped(*_):
        raise Stopped

    monkeypatch.setattr(Maker, "_make", make_one)
    monkeypatch.setattr(build, "merge", stopped)
    with pytest.raises(Stopped):
        build_quietly(folder, out)
    assert StructureCache(out).entries() == [] and cache.verify(out) == []
    monkeypatch.setattr(Maker, "_make", make)
    monkeypatch.setattr(build, "merge", write_index)
    report = build_quietly(folder, out)
    everything = ["1ubq-assembly1", "2q2k-assembly1"]
    assert report.built == (everything[1:] if "second" in moment else [])  # what was finished is not made again
    assert StructureCache(out).entries() == everything and cache.verify(out) == []
    assert not list(tmp_path.glob("**/.*"))


def test_two_builds_are_equal_byte_for_byte(folder, tmp_path):
    """Nothing of the cached stage is random: RDKit's unseeded embedding has no part in it."""
    for name in ("a.h5", "b.h5"):
        build_quietly(folder, tmp_path / name)
    with StructureCache(tmp_path / "a.h5") as a, StructureCache(tmp_path / "b.h5") as b:
        for entry in a.entries():
            one, other = a.read(entry), b.read(entry)
            assert all(np.array_equal(one.arrays[key], other.arrays[key]) for key in layout.ARRAYS)
            assert a.meta(entry) == b.meta(entry)


def test_parts_are_made_apart_and_merged(folder, sample, tmp_path):
    """As tasks of a cluster do it; a task that is started again makes nothing anew, and no part writes the index."""
    out = tmp_path / "c.h5"
    shutil.copy(sample.mmcif / "1kd8.cif", folder.mmcif)
    (folder.mmcif / "9bad.cif").write_text("no structure")
    made = [build_quietly(folder, out, part=(number, 2)) for number in (1, 2)]
    assert [report.built for report in made] == [["1kd8-assembly1", "2q2k-assembly1"], ["1ubq-assembly1"]]
    assert StructureCache(out).entries() == []
    again = build_quietly(folder, out, part=(1, 2))
    assert again.built == [] and again.skipped == made[0].built
    merged = merge.merge(out)
    assert StructureCache(out).entries() == ["1kd8-assembly1", "1ubq-assembly1", "2q2k-assembly1"]
    assert merged.problems == [] and cache.verify(out) == []
    assert [one.kind for one in merged.findings["9bad-assembly1"]] == ["failed"]
    listed = [json.loads(line) for line in merge.report_path(out).read_text().splitlines()]
    assert {"9bad-assembly1", "1ubq-assembly1"} <= {line["entry"] for line in listed}
    assert all(line["file"] and line["reason"] for line in listed)
    with pytest.raises(ValueError, match="part"):
        build_quietly(folder, out, part=(3, 2))


def test_entry_of_547_tokens_and_1024_rows_a_chain_fits_into_3_mb(shared_data, tmp_path):
    name = "7a4d-assembly1"
    structure = shared_data / "mmcif" / f"{name}.cif.gz"
    source = DataSource("folders", structure, shared_data / "msa", shared_data / "templates")
    build_cache(source, tmp_path / "c.h5", msa_depth=1024, progress=False)
    with StructureCache(tmp_path / "c.h5") as reader:
        assert int(reader.row(name)["tokens"]) >= 547 and reader.msa_depth(name) == 1024
        assert int(reader.row(name)["bytes"]) <= 3e6
    assert sum(path.stat().st_size for path in tmp_path.rglob("*.h5") if path.is_file()) <= 3e6


@pytest.fixture
def hanging(folder) -> DataSource:
    """2q2k never ends: one of its alignments is a pipe that nobody writes to."""
    path = folder.msa / "2q2k-assembly1A_protein.a3m"
    path.unlink()
    os.mkfifo(path)
    return folder


def test_several_workers_make_the_same_cache_and_stop_what_never_ends(hanging, sample, tmp_path):
    """One structure is sound, one is truncated, and one hangs: each is built or listed, as a single process does it."""
    truncate(hanging.mmcif / "1ubq.cif", 0.5)
    shutil.copy(sample.mmcif / "1kd8.cif", hanging.mmcif)
    report = build_quietly(hanging, tmp_path / "two.h5", workers=2, timeout=15)
    assert report.built == ["1kd8-assembly1"]
    reasons = {entry: reason for _, entry, reason in report.failed}
    assert reasons.keys() == {"1ubq-assembly1", "2q2k-assembly1"} and "truncated" in reasons["1ubq-assembly1"]
    assert reasons["2q2k-assembly1"] == "took more than 15 s"
    assert not list(tmp_path.glob(".*"))  # no shard is left
    build_quietly(replace(hanging, mmcif=hanging.mmcif / "1kd8.cif"), tmp_path / "one.h5")
    with StructureCache(tmp_path / "one.h5") as a, StructureCache(tmp_path / "two.h5") as b:
        one, other = a.read("1kd8-assembly1"), b.read("1kd8-assembly1")
    assert all(np.array_equal(one.arrays[key], other.arrays[key]) for key in layout.ARRAYS)


def test_clock_of_a_structure_stands_still_while_its_process_prepares_itself():
    ours, theirs = multiprocessing.Pipe()
    worker = SimpleNamespace(task=("1abc", Path("1abc.cif")), pipe=ours, ready=True, started=0.0)
    theirs.send(PREPARING)
    assert workers._answer(worker, 1.0) is None  # the message
    assert workers._answer(worker, 1.0) is None and worker.task  # and a long time without another
    theirs.send(READY)
    assert workers._answer(worker, 1.0) is None and time.monotonic() - worker.started < 60
    worker.started = 0.0
    assert workers._answer(worker, 1.0).error.problem == "took more than 1 s"


def test_worker_that_dies_is_replaced_and_its_structure_listed(hanging, tmp_path):
    (hanging.mmcif / "1ubq.cif").unlink()
    known = set(multiprocessing.active_children())

    def kill() -> None:  # as the kernel does when memory runs out
        while not (mine := set(multiprocessing.active_children()) - known):
            time.sleep(0.1)
        time.sleep(1)
        os.kill(mine.pop().pid, signal.SIGKILL)

    killer = threading.Thread(target=kill)
    killer.start()
    [(_, entry, reason)] = build_quietly(hanging, tmp_path / "c.h5", workers=2, timeout=120).failed
    killer.join()
    assert entry == "2q2k-assembly1" and reason.startswith("the worker died (exit code -9")


def test_msa_depth_limits_the_rows(folder, tmp_path):
    build_cache(folder, tmp_path / "c.h5", msa_depth=5, progress=False)
    with StructureCache(tmp_path / "c.h5") as reader:
        assert reader.msa_depth("2q2k-assembly1") == 5 and reader.msa_depth("1ubq-assembly1") == 1
    with pytest.raises(InputError, match="msa_depth: was built with 5 rows, asked for 6"):
        build_cache(folder, tmp_path / "c.h5", msa_depth=6, progress=False)


def test_progress_is_plain_lines_in_a_log(folder, tmp_path, capsys):
    build_cache(folder, tmp_path / "c.h5", msa_depth=5, progress=True)
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("[")]
    assert re.fullmatch(r"\[1/2\] 1ubq-assembly1: ok, \d+:\d\d left", lines[-2])
    assert lines[-1] == "[2/2] 2q2k-assembly1: ok"


def test_missing_alignment_is_noted(folder, tmp_path):
    notes = dict(build_quietly(folder, tmp_path / "c.h5").notes)
    assert "no alignment of chain A" in notes["1ubq-assembly1"]


@pytest.mark.parametrize(
    ("row", "kept", "expected"),
    [
        ("MAK", [True, False, True], "MK"),
        ("MaAK", [True, False, True], "MaK"),
        ("M-K", [False, True, True], "-K"),
        ("MAKx", [True, True, False], "MAx"),
    ],
)
def test_columns_of_an_a3m_row(row, kept, expected):
    assert alignments._select(row, kept) == expected


@pytest.mark.parametrize(
    ("names", "chain", "expected"),
    [
        (["1abc-assembly1A_protein.a3m"], "A", ["1abc-assembly1A_protein.a3m"]),
        (["1abc-assembly1A_protein.a3m"], "A-2", ["1abc-assembly1A_protein.a3m"]),
        (["1abc-assembly1A_x.a3m", "1abc-assembly1A-2_x.a3m"], "A-2", ["1abc-assembly1A-2_x.a3m"]),
        (["1abcA_b.a3m", "1abcA_a.a3m.gz"], "A", ["1abcA_a.a3m.gz", "1abcA_b.a3m"]),
        (["1abc-assembly1AA_x.a3m"], "A", []),
        (["1abc_A.a3m"], "A", ["1abc_A.a3m"]),
        (["1abc_A_uniref.a3m"], "A", ["1abc_A_uniref.a3m"]),
        (["1abc-assembly1A_x.m8"], "A", []),
    ],
)  # fmt: skip
def test_alignments_of_a_chain_are_found_by_name(tmp_path, names, chain, expected):
    for name in names:
        (tmp_path / name).touch()
    assert [path.name for path in alignments.find(tmp_path, "1abc-assembly1", chain)] == expected
