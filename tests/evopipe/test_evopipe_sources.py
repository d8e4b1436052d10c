"""The `data:` section, downloads from the PDB, the sample wheel, and what these modules import."""

from __future__ import annotations

import gzip
import http.server
import subprocess
import sys
import threading
import urllib.request
import zipfile
from functools import partial

import pytest

from megafold.errors import InputError
from megafold.evopipe import sample_data, sources
from megafold.evopipe.sources import DataSource, load_data_section


@pytest.mark.parametrize(
    "module", ["sources", "sample_data", "alignments", "assembly", "layout", "ccd", "build", "cache"]
)
def test_import_is_light(module):
    heavy = "[m for m in ('torch', 'alphafold3_pytorch') if m in sys.modules]"
    code = f"import sys, megafold.evopipe.{module}; print({heavy})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.fixture
def config(tmp_path):
    for folder in ("cif", "a3m", "hits"):
        (tmp_path / folder).mkdir()
    (tmp_path / "cif" / "1abc.cif").write_text("data_1abc\n")
    return tmp_path / "config.yaml"


def test_folders_count_from_the_configuration_file(config, tmp_path):
    source = load_data_section({"mmcif": "cif", "msa": "a3m", "templates": str(tmp_path / "hits")}, config)
    assert (source.mmcif, source.msa, source.templates) == (tmp_path / "cif", tmp_path / "a3m", tmp_path / "hits")
    assert source.files() == {"1abc-assembly1": tmp_path / "cif" / "1abc.cif"}


def test_one_file_may_be_named(config, tmp_path):
    assert list(load_data_section({"mmcif": "cif/1abc.cif"}, config).files()) == ["1abc-assembly1"]


def test_sample_goes_to_the_named_folder(config, tmp_path):
    source = load_data_section({"sample": True, "folder": "data"}, config)
    assert source.mmcif == tmp_path / "data" / "sample" / "mmcif"


BAD = {
    "unknown key": ({"mmcif": "cif", "mssa": "a3m"}, "data.mssa: unknown key; allowed: sample, mmcif, msa"),
    "nothing": ({}, "data: needs exactly one of"),
    "two": ({"sample": True, "mmcif": "cif"}, "data: needs exactly one of"),
    "missing mmcif": ({"mmcif": "nowhere"}, "data.mmcif: no such file or folder"),
    "missing msa": ({"mmcif": "cif", "msa": "nowhere"}, "data.msa: no such folder"),
    "missing components": ({"mmcif": "cif", "components": "nowhere.cif"}, "data.components: no such file"),
    "number as id": ({"pdb_ids": [1e10]}, "data.pdb_ids: 10000000000.0 is no PDB id"),
    "path as id": ({"pdb_ids": ["../x"]}, "data.pdb_ids: '../x' is no PDB id"),
    "one id": ({"pdb_ids": "1ubq"}, "data.pdb_ids: must be a list"),
    "sample text": ({"sample": "yes"}, "data.sample: must be true"),
    "list": (["cif"], "data: must be a mapping"),
    "number as path": ({"mmcif": 3}, "data.mmcif: must be a path"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_section_names_file_and_field(config, case):
    section, expected = BAD[case]
    with pytest.raises(InputError) as caught:
        load_data_section(section, config)
    assert str(caught.value).startswith(f"{config}: ") and expected in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("case", ["missing", "empty"])
def test_unusable_folder_is_one_clear_line(config, tmp_path, case):
    folder = tmp_path / "cif"
    (folder / "1abc.cif").unlink()
    if case == "missing":
        folder.rmdir()
    expected = {"missing": "no such folder", "empty": "holds no .cif"}[case]
    with pytest.raises(InputError, match=expected):
        DataSource("folders", folder).files()


def test_files_that_no_entry_is_made_of_are_listed(config, tmp_path):
    folder = tmp_path / "cif"
    names = ("1abc.cif.gz", "2abc.mmcif", "3abc.pdb", "pdb4abc.ent.gz", "5abc.bcif", "notes.txt")
    for name in names:
        (folder / name).write_bytes(b"")
    source = DataSource("folders", folder)
    assert source.files() == {"1abc-assembly1": folder / "1abc.cif", "2abc-assembly1": folder / "2abc.mmcif"}
    listed = {finding.file.rpartition("/")[2]: finding for finding in source.passed_over()}
    assert set(listed) == {"1abc.cif.gz", "3abc.pdb", "pdb4abc.ent.gz", "5abc.bcif"}
    assert all(finding.kind == "failed" and finding.action for finding in listed.values())
    assert listed["1abc.cif.gz"].reason.startswith("has the same id as")


def test_assembly_file_and_raw_file_of_one_entry_are_one_entry(config, tmp_path):
    (tmp_path / "cif" / "1abc-assembly1.cif.gz").write_bytes(b"")
    assert list(DataSource("folders", tmp_path / "cif").files()) == ["1abc-assembly1"]


@pytest.fixture
def server(tmp_path, monkeypatch):
    """A local stand-in for the PDB's file server."""
    root = tmp_path / "served"
    root.mkdir()
    (root / "1abc.cif.gz").write_bytes(gzip.compress(b"data_1ABC\n"))
    (root / "2bad.cif.gz").write_bytes(b"<html>maintenance</html>")
    handler = partial(http.server.SimpleHTTPRequestHandler, directory=str(root))
    monkeypatch.setattr(http.server.SimpleHTTPRequestHandler, "log_message", lambda *_: None)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as running:
        threading.Thread(target=running.serve_forever, daemon=True).start()
        monkeypatch.setattr(sources, "DOWNLOAD_URL", f"http://127.0.0.1:{running.server_port}/{{id}}.cif.gz")
        yield root
        running.shutdown()


def direct(url, timeout):
    return urllib.request.build_opener(urllib.request.ProxyHandler({})).open(url, timeout=timeout)


def test_pdb_ids_are_downloaded_once(server, tmp_path, config):
    source = load_data_section({"pdb_ids": ["1ABC"], "folder": "data"}, config)
    source = sources.materialize(source, opener=direct)
    path = tmp_path / "data" / "pdb" / "1abc.cif.gz"
    assert source.files() == {"1abc-assembly1": path}
    assert gzip.decompress(path.read_bytes()) == b"data_1ABC\n"
    (server / "1abc.cif.gz").unlink()
    sources.materialize(source, opener=direct)  # kept: the server is not asked again
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.parametrize(("id", "expected"), [("9zzz", "404"), ("2bad", "not a gzip file")])
def test_failed_download_is_one_clear_line_and_leaves_nothing(server, tmp_path, id, expected):
    with pytest.raises(InputError, match=expected) as caught:
        sources.download_entries((id,), tmp_path / "pdb", opener=direct)
    assert f"data.pdb_ids: {id}" in str(caught.value) and "\n" not in str(caught.value)
    assert list((tmp_path / "pdb").iterdir()) == []


def test_pdb_server_that_cannot_be_reached_is_one_clear_line(tmp_path, monkeypatch):
    monkeypatch.setattr(sources, "DOWNLOAD_URL", "http://127.0.0.1:9/{id}.cif.gz")
    with pytest.raises(InputError, match="1ubq cannot be downloaded"):
        sources.download_entries(("1ubq",), tmp_path, opener=direct)


def test_pip_is_asked_for_the_pinned_hash_only(tmp_path, monkeypatch):
    seen = {}

    def run(command, **_):
        seen["command"] = command
        seen["requirements"] = (tmp_path / "requirements.txt").read_text()
        (tmp_path / "openfold3-0.5.0-py3-none-any.whl").touch()
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(sample_data.subprocess, "run", run)
    sample_data.download_wheel(tmp_path)
    assert seen["command"][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "--require-hashes"} <= set(seen["command"])
    assert seen["requirements"] == f"{sample_data.REQUIREMENT} --hash=sha256:{sample_data.SHA256}\n"
    assert not any("index" in part or "http" in part for part in seen["command"])  # pip's own configuration decides


def test_pin_equals_the_one_of_the_peers(repository):
    assert f"{sample_data.REQUIREMENT} --hash=sha256:{sample_data.SHA256}" in (
        repository / "experiments" / "peers.txt"
    ).read_text().replace(" \\\n", " ")


def test_failing_pip_is_one_clear_line(tmp_path, monkeypatch):
    answer = subprocess.CompletedProcess([], 1, "", "WARNING: retrying\nERROR: no matching distribution\n")
    monkeypatch.setattr(sample_data.subprocess, "run", lambda *_, **__: answer)
    with pytest.raises(InputError, match=r"data.sample: pip download failed \(ERROR: no matching distribution\)"):
        sample_data.fetch_sample(tmp_path / "sample")


def test_wheel_is_unpacked_into_the_layout_of_the_baseline(tmp_path):
    wheel = tmp_path / "openfold3.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for id in sample_data.ENTRIES:
            archive.writestr(f"{sample_data.FOLDER}/mmcifs/{id}.cif", f"data_{id}\n")
        for chain in "AB":
            for name in sample_data.ALIGNMENTS:
                text = ">q\nMAK\n>x\nM-K\n" if name.endswith("a3m") else "# STOCKHOLM 1.0\nq MA-K\ny MAvK\nz MA-R\n//\n"
                archive.writestr(f"{sample_data.FOLDER}/alignments/2q2k_{chain}/{name}", text)
    source = sample_data.extract(wheel, tmp_path / "sample")
    assert list(source.files()) == [f"{id}-assembly1" for id in sorted(sample_data.ENTRIES)]
    # the query once; an insertion in lower case; equal rows once
    expected = ">q\nMAK\n>x\nM-K\n>y\nMAvK\n>z\nMAR\n"
    assert (source.msa / "2q2k-assembly1A_protein.a3m").read_text() == expected
    assert sample_data.fetch_sample(tmp_path / "sample").mmcif == source.mmcif  # complete: nothing is downloaded
