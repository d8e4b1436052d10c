"""Template features in a compact form: residue classes and coordinates per token, never [T, N, N, 108].

The baseline fills template features only where it is given the Kalign program; otherwise every template is empty and
masked, which costs no storage.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path

import numpy as np

from megafold.evopipe import layout
from megafold.evopipe.alignments import find, read_text
from megafold.evopipe.report import Log
from megafold.evopipe.sources import DataSource
from megafold.evopipe.template_geometry import Recorder, empty

UNKNOWN_CLASS = 20
HITS = (".m8", ".m8.gz")
TEMPLATES_PER_CHAIN = 4  # AF3 supplement 2.4


def features(source: DataSource, name: str, chains, parsed, tokens, log: Log) -> dict[str, np.ndarray]:
    """Arrays `template_*` of an entry; what a user should know of them goes into the log.

    Hits are `<id>-assembly1<chain>_<type>_*.m8[.gz]` in `source.templates`; the structures they name are
    `<mmcif folder>/<middle two letters>/<id>-assembly1.cif`. Hits newer than 60 days before this entry are dropped.
    """
    if source.templates is None or source.kalign is None:
        if source.templates is not None and any(find(source.templates, name, chain, HITS) for chain in chains):
            reason = "template hits are not used: data.kalign is not set"
            log.note("templates not aligned", reason, "install Kalign 3 and name the program in data.kalign")
        return _pack([np.full((1, len(tokens)), UNKNOWN_CLASS)], [empty(1, len(tokens))], np.zeros(1, bool))
    from alphafold3_pytorch.data.data_pipeline import make_template_features
    from alphafold3_pytorch.data.template_parsing import parse_m8

    cutoff = datetime.strptime(parsed.released, "%Y-%m-%d") - timedelta(days=60)
    classes, geometry, mask = [], [], np.zeros(TEMPLATES_PER_CHAIN, bool)
    for chain, residues in chains.items():
        hits = []
        for path in find(source.templates, name, chain, HITS):
            kind = path.name.removesuffix(".gz").removesuffix(".m8").split("_")[1] if "_" in path.name else "protein"
            with _plain(path) as table:
                empty_table = not table.stat().st_size
                found = parse_m8(
                    str(table),
                    kind if kind in ("dna", "rna") else "protein",
                    name.split("-assembly")[0],
                    str(source.mmcif),
                    num_templates=TEMPLATES_PER_CHAIN,
                    template_cutoff_date=cutoff,
                )
            hits += found
            if not found and not empty_table:
                reason = "no hit is usable: no table, too new, too similar, too short, or its structure is not there"
                action = "put <id>-assembly1.cif of the hits into <mmcif folder>/<middle two letters>/"
                log.note("template hits not usable", f"chain {chain}: {reason}", action, path)
        n = len(residues["chemtype"])
        recorder = Recorder()
        with recorder.recording():
            made = make_template_features(
                {chain: hits[:TEMPLATES_PER_CHAIN]},
                {chain: residues},
                num_templates=TEMPLATES_PER_CHAIN,
                kalign_binary_path=str(source.kalign),
            )
        real = made["template_mask"].numpy()
        classes.append(made["templates"].numpy()[:, :, 0, -layout.TEMPLATE_CLASSES :].argmax(axis=-1))
        geometry.append(recorder.arrays(real, n))
        mask |= real
    return _pack(classes, geometry, mask)


@contextmanager
def _plain(path: Path) -> Iterator[Path]:
    """The file itself, or what a gzipped one holds: the baseline's parser reads no other."""
    if path.suffix != ".gz":
        yield path
        return
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / path.name.removesuffix(".gz")
        plain.write_text(read_text(path))
        yield plain


def _pack(classes, geometry, mask) -> dict[str, np.ndarray]:
    return {
        "template_mask": mask,
        "template_classes": np.concatenate(classes, axis=-1).astype(np.uint8),
        **{name: np.concatenate([one[name] for one in geometry], axis=1) for name in geometry[0]},
    }
