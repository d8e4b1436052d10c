"""Template features in a compact form: residue classes per token, pair features per chain, never [T, N, N, 108].

The baseline fills template features only where it is given the Kalign program; otherwise every template is empty and
masked. That common case costs no storage. With Kalign, one block [T, n, n, 44] is kept per chain that has a template.
"""

from __future__ import annotations

from datetime import datetime, timedelta
from functools import lru_cache

import numpy as np

from megafold.evopipe import layout
from megafold.evopipe.alignments import find
from megafold.evopipe.report import Log
from megafold.evopipe.sources import DataSource

UNKNOWN_CLASS = 20
HITS = (".m8",)
TEMPLATES_PER_CHAIN = 4  # AF3 supplement 2.4


def features(source: DataSource, name: str, chains, parsed, tokens, log: Log) -> dict[str, np.ndarray]:
    """Arrays `template_*` of an entry; what a user should know of them goes into the log.

    Hits are `<id>-assembly1<chain>_<type>_*.m8` in `source.templates`; the structures they name are
    `<mmcif folder>/<middle two letters>/<id>-assembly1.cif`. Hits newer than 60 days before this entry are dropped.
    """
    if source.templates is None or source.kalign is None:
        if source.templates is not None and any(find(source.templates, name, chain, HITS) for chain in chains):
            reason = "template hits are not used: data.kalign is not set"
            log.note("templates not aligned", reason, "install Kalign 3 and name the program in data.kalign")
        return _pack([np.full((1, len(tokens)), UNKNOWN_CLASS)], {}, np.zeros(1, bool))
    from alphafold3_pytorch.data.data_pipeline import make_template_features
    from alphafold3_pytorch.data.template_parsing import parse_m8

    cutoff = datetime.strptime(parsed.released, "%Y-%m-%d") - timedelta(days=60)
    classes, blocks, mask, first = [], {}, np.zeros(TEMPLATES_PER_CHAIN, bool), 0
    for chain, residues in chains.items():
        hits = []
        for path in find(source.templates, name, chain, HITS):
            kind = path.name.removesuffix(".m8").split("_")[1] if "_" in path.name else "protein"
            hits += parse_m8(
                str(path),
                kind if kind in ("dna", "rna") else "protein",
                name.split("-assembly")[0],
                str(source.mmcif),
                num_templates=TEMPLATES_PER_CHAIN,
                template_cutoff_date=cutoff,
            )
        n = len(residues["chemtype"])
        made = make_template_features(
            {chain: hits[:TEMPLATES_PER_CHAIN]},
            {chain: residues},
            num_templates=TEMPLATES_PER_CHAIN,
            kalign_binary_path=str(source.kalign),
        )
        dense = made["templates"].numpy()
        classes.append(dense[:, :, 0, -layout.TEMPLATE_CLASSES :].argmax(axis=-1))
        if bool(made["template_mask"].any()):
            blocks[first] = dense[..., : layout.TEMPLATE_PAIR_FEATURES]
            mask |= made["template_mask"].numpy()
        first += n
    return _pack(classes, blocks, mask)


def _pack(classes, blocks, mask) -> dict[str, np.ndarray]:
    flat = [np.ascontiguousarray(block).ravel() for block in blocks.values()]
    return {
        "template_mask": mask,
        "template_classes": np.concatenate(classes, axis=-1).astype(np.uint8),
        "template_pairs": np.concatenate([np.zeros(0, np.float32), *flat]).astype("<f4"),
        "template_blocks": np.array([(first, block.shape[1]) for first, block in blocks.items()], "<i4").reshape(-1, 2),
    }


def dense(arrays: dict[str, np.ndarray], keep: np.ndarray):
    """The model's template features for the tokens in `keep`: (float32 [T, n, n, 108], mask bool [T]).

    Without any real template the result is one constant per shape; it is shared between calls: do not write to it.
    """
    import torch

    mask, classes = arrays["template_mask"], arrays["template_classes"][:, keep]
    if not len(arrays["template_blocks"]) and (classes == UNKNOWN_CLASS).all():
        return _empty(len(mask), int(keep.sum())), torch.from_numpy(mask.copy())
    pairs, width = layout.TEMPLATE_PAIR_FEATURES, layout.TEMPLATE_CLASSES
    n = int(keep.sum())
    out = np.zeros((len(mask), n, n, pairs + 2 * width), np.float32)
    new, start = np.cumsum(keep) - 1, 0
    for first, size in arrays["template_blocks"]:
        stop = start + len(mask) * size * size * pairs
        block = arrays["template_pairs"][start:stop].reshape(len(mask), size, size, pairs)
        mine = np.flatnonzero(keep[first : first + size])
        if len(mine):
            span = slice(new[first + mine[0]], new[first + mine[-1]] + 1)
            out[:, span, span, :pairs] = block[:, mine][:, :, mine]
        start = stop
    one_hot = np.eye(width, dtype=np.float32)[classes]
    out[..., pairs : pairs + width] = one_hot[:, None]
    out[..., pairs + width :] = one_hot[:, :, None]
    return torch.from_numpy(out), torch.from_numpy(mask.copy())


@lru_cache(maxsize=4)
def _empty(n_templates: int, n: int):
    import torch

    pairs, width = layout.TEMPLATE_PAIR_FEATURES, layout.TEMPLATE_CLASSES
    out = torch.zeros(n_templates, n, n, pairs + 2 * width)
    out[..., pairs + UNKNOWN_CLASS] = out[..., pairs + width + UNKNOWN_CLASS] = 1
    return out
