"""Sample structures for demos and tests: real PDB entries that a pinned Python wheel carries.

The `openfold3` wheel (Apache-2.0; PDB entries are CC0) holds raw wwPDB files and the alignments of 2q2k. It is
downloaded by hash with pip, never installed and never imported, so any machine whose pip works can fetch it, through
whatever index, mirror or proxy its pip is configured for.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

from megafold.errors import InputError
from megafold.evopipe.alignments import records, stockholm_to_a3m
from megafold.evopipe.sources import DataSource

REQUIREMENT = "openfold3==0.5.0"
SHA256 = "9948071ed086ec063dac2b7d47a8d31a352536baab80a23f436158dbedfde721"
FOLDER = "openfold3/tests/test_data"

# id -> what it shows. Alignments exist for 2q2k only; the NMR ensemble keeps its first model.
ENTRIES = {
    "1a8q": "monomer of 274 residues",
    "1kd8": "coiled coil of two chains",
    "1psm": "NMR ensemble of a peptide",
    "1pzp": "protein with an inhibitor",
    "1ubq": "one small protein",
    "2q2k": "protein dimer on DNA made by symmetry, with alignments",
    "3u8v": "protein with metal ions",
    "4zey": "small protein at high resolution",
    "7l39": "protein with a bound solvent molecule",
}
ALIGNMENTS = ("bfd_uniclust_hits.a3m", "uniref90_hits.sto", "uniprot_hits.sto", "mgnify_hits.sto")


def download_wheel(folder: Path) -> Path:
    """`pip download` the pinned wheel into a folder. Raises InputError with pip's last line when that fails."""
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{REQUIREMENT} --hash=sha256:{SHA256}\n")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--require-hashes", "--only-binary=:all:",
               "--disable-pip-version-check", "-d", str(folder), "-r", str(requirements)]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True)
    wheels = sorted(folder.glob("openfold3-*.whl"))
    if done.returncode or not wheels:
        lines = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        raise InputError(REQUIREMENT, "data.sample", f"pip download failed ({lines[-1] if lines else 'no output'})")
    return wheels[0]


def extract(wheel: Path, out_dir: Path) -> DataSource:
    """Unpack the sample entries of a wheel into `out_dir/mmcif` and `out_dir/msa` (the baseline's layout)."""
    mmcif, msa = out_dir / "mmcif", out_dir / "msa"
    for folder in (mmcif, msa):
        folder.mkdir(parents=True, exist_ok=True)
    with zipfile.ZipFile(wheel) as archive:
        for id in ENTRIES:
            with archive.open(f"{FOLDER}/mmcifs/{id}.cif") as inp, (mmcif / f"{id}.cif").open("wb") as out:
                shutil.copyfileobj(inp, out)
        for chain in ("A", "B"):
            texts = {name: archive.read(f"{FOLDER}/alignments/2q2k_{chain}/{name}").decode() for name in ALIGNMENTS}
            merged = _merge([t if n.endswith(".a3m") else stockholm_to_a3m(t) for n, t in texts.items()])
            (msa / f"2q2k-assembly1{chain}_protein.a3m").write_text(merged)
    (out_dir / "complete").write_text(f"{SHA256}\n")
    return DataSource("sample", mmcif, msa)


def _merge(alignments: list[str]) -> str:
    """One A3M of several with the same query, every sequence once."""
    seen: dict[str, str] = {}
    for text in alignments:
        for description, row in records(text):
            seen.setdefault(row, description)
    return "".join(f">{description}\n{row}\n" for row, description in seen.items())


def fetch_sample(out_dir: Path) -> DataSource:
    """Download and unpack the sample set; when it is complete in `out_dir`, nothing is downloaded.

    Raises:
        InputError: pip cannot download the wheel.
    """
    out_dir = Path(out_dir)
    done = out_dir / "complete"
    if done.is_file() and done.read_text().strip() == SHA256:
        return DataSource("sample", out_dir / "mmcif", out_dir / "msa")
    with tempfile.TemporaryDirectory() as folder:
        return extract(download_wheel(Path(folder)), out_dir)
