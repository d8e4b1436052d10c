"""One mmCIF file with its alignments and template hits -> an `Entry`, through alphafold3-pytorch's own functions.

Deterministic: the baseline's own randomness (crop, truncation at random, RDKit conformers) is either downstream of the
cached stage (`augment.py`) or without effect on the features (`molecules.py`). No random number generator is used.
"""

from __future__ import annotations

import hashlib
import tempfile
from functools import lru_cache
from pathlib import Path

import numpy as np

from megafold.errors import InputError
from megafold.evopipe import alignments, assembly, structure, templates
from megafold.evopipe.layout import Entry
from megafold.evopipe.listing import starting_with
from megafold.evopipe.report import Log
from megafold.evopipe.sources import DataSource

LIGAND_CHEMTYPE = 3  # of the baseline


def inputs_of(source: DataSource, name: str, path: Path) -> dict[str, Path]:
    """Files that an entry is made of, as far as they can be told without reading any: name -> path."""
    files = {path.name: path}
    for folder in (source.msa, source.templates):
        if folder is not None:
            short = name.split("-assembly")[0]
            files |= {found.name: found for found in starting_with(folder, short)}
    if source.components is not None:
        files["components"] = source.components
    if source.templates is not None and source.kalign is not None and source.kalign.is_file():
        files["kalign"] = source.kalign
    return files


def options_of(source: DataSource) -> dict[str, int]:
    """What else an entry depends on, besides its files."""
    return {"max_chains": source.max_chains}


@lru_cache(maxsize=4)
def _large_digest(path: Path, changed: int, size: int) -> str:
    """sha256 of a file that every entry is made with."""
    return _digest(path)


def _digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def digests(files: dict[str, Path]) -> dict[str, str]:
    """sha256 of each file. Raises InputError for a file that cannot be read."""
    sums = {}
    for name, path in files.items():
        try:
            if name in ("components", "kalign"):
                facts = path.stat()
                sums[name] = _large_digest(path, facts.st_mtime_ns, facts.st_size)
            else:
                sums[name] = _digest(path)
        except OSError as error:
            raise InputError(path, "", f"cannot be read ({error})") from error
    return sums


def featurize(source: DataSource, name: str, path: Path, *, msa_depth: int | None = None) -> Entry:
    """Features of one structure before any crop.

    Args:
        source: where alignments, templates and the component dictionary are.
        name: entry id, `<id>-assembly1`.
        path: mmCIF file, gzipped or not. One named `-assembly1` is taken as it is, any other is expanded and cleaned.
        msa_depth: rows per chain and of the whole alignment (the baseline's `max_msas_per_chain`); None keeps all.

    Raises:
        InputError: names the file and the field of whatever cannot be used.
    """
    log = Log(path, name)
    parsed = _parsed(alignments.read_text(path), name, path, log, source.max_chains)
    arrays, smiles = structure.arrays(parsed, str(path), log)
    chains = chain_residues(parsed.biomolecule)
    template = templates.features(source, name, chains, parsed, arrays["tokens"], log)
    msa = _alignment(source.msa, name, chains, parsed, msa_depth, log)
    return Entry(
        name=name,
        arrays=arrays | msa | template,
        chains=tuple(str(chain) for chain in np.unique(parsed.biomolecule.chain_id)),
        resolution=parsed.resolution,
        released=parsed.released,
        smiles=smiles,
        sources=digests(inputs_of(source, name, path)),
        notes=tuple(finding.reason for finding in log.findings),
        findings=tuple(log.findings),
    )


def _parsed(text: str, name: str, path: Path, log: Log, most_chains: int) -> structure.Structure:
    if assembly.is_prepared(text, path.name):
        try:
            return structure.parse(text, name, str(path), log)
        except InputError as error:
            log.findings.clear()
            reason = f"the baseline's parser refuses the file as it is ({error.problem}): it is cleaned first"
            log.note("cleaned assembly", reason)
    built = assembly.build(text, name, str(path), log, most_chains)
    return structure.parse(built.text, name, str(path), log)


def chain_residues(biomolecule) -> dict[str, dict[str, list[int]]]:
    """Per chain, in file order, what the baseline's alignment and template functions want to know of its tokens."""
    result = {}
    for chain in dict.fromkeys(biomolecule.chain_id.tolist()):
        mine = biomolecule.chain_id == chain
        residue = biomolecule.residue_index[mine]
        result[chain] = {
            "chemtype": biomolecule.chemtype[mine].tolist(),
            "restype": biomolecule.restype[mine].tolist(),
            "residue_index": (residue - 1).tolist(),
            "unique_chain_residue_indices": np.sort(np.unique(residue, return_index=True)[1]).tolist(),
        }
    return result


def sequence_parts(parsed: structure.Structure, chains) -> dict[str, tuple[str, list[list[bool]]]]:
    """Chain -> (one-letter sequence of its polymer tokens, the parts of it that an alignment may be of).

    The parts: the resolved residues, those of the polymer (without free amino acids), and those that are both.
    """
    from alphafold3_pytorch import inputs

    biomolecule, result = parsed.biomolecule, {}
    for chain, residues in chains.items():
        firsts = residues["unique_chain_residue_indices"]
        sequence = inputs.extract_polymer_sequence_from_chain_residues(
            residues["chemtype"], residues["restype"], firsts
        )
        mine = biomolecule.chain_id == chain
        polymer = [first for first in firsts if residues["chemtype"][first] != LIGAND_CHEMTYPE]
        have = biomolecule.atom_mask[mine].any(axis=-1)[polymer]
        inside = ~parsed.ligand[mine][polymer]
        result[chain] = sequence, [part.tolist() for part in (have, inside, have & inside)]
    return result


def _alignment(folder, name, chains, parsed, depth, log: Log) -> dict[str, np.ndarray]:
    from alphafold3_pytorch import inputs

    bare = []
    with tempfile.TemporaryDirectory() as staged:
        for chain, (sequence, parts) in sequence_parts(parsed, chains).items():
            found = alignments.find(folder, name, chain) if sequence else []
            share = None if depth is None or not found else max(1, depth // len(found))
            texts = [alignments.fit(path, chain, sequence, None, share, parts) for path in found]
            if texts:  # one file, because the baseline reads several in the order of the file system
                (Path(staged) / f"{name}{chain}_all.a3m").write_text("".join(texts))
            elif folder is not None and sequence:
                bare.append(chain)
        features = inputs.load_msa_from_msa_dir(staged, name, chains, max_msas_per_chain=depth)
    if bare:
        log.note("no alignment", f"no alignment of chain {', '.join(bare)}: its own sequence only")
    values = features["deletion_value"].numpy()
    has_deletion = features["has_deletion"].numpy()
    table, index = np.unique(values, return_inverse=True)
    if not np.array_equal(has_deletion, (values > 0).astype(np.float32)) or len(table) > np.iinfo(np.uint16).max:
        raise InputError(str(folder), name, "deletion features that this cache cannot represent")
    profile = np.concatenate([features["profile"].numpy(), features["deletion_mean"].numpy()[:, None]], axis=-1)
    arrays = {
        "msa": features["msa"].numpy().astype(np.uint8),
        "deletions": index.reshape(values.shape).astype("<u2"),
        "deletion_values": table.astype("<f4"),
        "profile": profile.astype("<f4"),
    }
    if not bool(features["msa_row_mask"].all()):
        raise InputError(str(folder), name, "a masked alignment row")
    return arrays
