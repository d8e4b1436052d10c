"""Templates as coordinates: three frame atoms and one distogram atom a token, in place of 44 numbers a pair of tokens.

The baseline turns the atoms of a template into pair features at once and keeps no coordinates. `Recorder` keeps what
its functions were given; `expand` makes the pair features of a crop from that, with the baseline's own operations, on
any device. They work in float64, as the coordinates of a file do, so the result has the baseline's bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from megafold.evopipe import layout

DISTOGRAM_ATOM, FRAME, PRESENT = 1, 2, 4  # bits of `template_state`
BINS = (3.25, 50.75, 39)  # angstrom
EPS = 1e-20


class Recorder:
    """Geometry of the templates that the baseline extracts while `recording` is on: see `arrays`."""

    def __init__(self) -> None:
        self.made: list[tuple[Tensor, Tensor, Tensor, Tensor]] = []

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Inside, every successful extraction of a template is recorded, in order."""
        from alphafold3_pytorch.data import data_pipeline, template_parsing

        extract, cdist, rigid, dgram = (
            data_pipeline._extract_template_features,
            torch.cdist,
            template_parsing.RigidFromReference3Points,
            template_parsing.distance_to_dgram,
        )
        last: dict[str, Tensor] = {}

        def noting_cdist(first, *rest, **options):
            last["measured"] = first
            return cdist(first, *rest, **options)

        def noting_dgram(*arguments, **options):
            last["positions"] = last["measured"]  # other distances are measured before, for the frames of ligands
            return dgram(*arguments, **options)

        class NotingRigid(rigid):
            def forward(self, three_points, *rest, **options):
                last["frames"] = torch.stack(tuple(three_points), dim=-2)
                return super().forward(three_points, *rest, **options)

        def noting_extract(*arguments, **options):
            features = extract(*arguments, **options)
            masks = features["template_pseudo_beta_mask"], features["template_backbone_frame_mask"]
            self.made.append((last["positions"].clone(), last["frames"].clone(), *masks))
            return features

        data_pipeline._extract_template_features, torch.cdist = noting_extract, noting_cdist
        template_parsing.RigidFromReference3Points, template_parsing.distance_to_dgram = NotingRigid, noting_dgram
        try:
            yield
        finally:
            data_pipeline._extract_template_features, torch.cdist = extract, cdist
            template_parsing.RigidFromReference3Points, template_parsing.distance_to_dgram = rigid, dgram

    def arrays(self, mask: np.ndarray, n: int) -> dict[str, np.ndarray]:
        """Geometry of one chain of n tokens, `template_positions` [T, n, 3], `_frames` [T, n, 3, 3], `_state` [T, n].

        Args:
            mask: the baseline's `template_mask` of this chain, bool [T]: the templates that were extracted.
        """
        out = empty(len(mask), n)
        for template, (positions, frames, distogram, frame) in zip(np.flatnonzero(mask), self.made, strict=True):
            out["template_positions"][template] = positions.numpy()
            out["template_frames"][template] = frames.numpy()
            state = PRESENT + DISTOGRAM_ATOM * distogram.numpy().astype("u1") + FRAME * frame.numpy().astype("u1")
            out["template_state"][template] = state
        return out


def empty(templates: int, n: int) -> dict[str, np.ndarray]:
    """Geometry of n tokens that have no template."""
    return {
        "template_positions": np.zeros((templates, n, 3), "<f8"),
        "template_frames": np.zeros((templates, n, 3, 3), "<f8"),
        "template_state": np.zeros((templates, n), "u1"),
    }


def expand(positions: Tensor, frames: Tensor, state: Tensor, classes: Tensor, chain: Tensor) -> Tensor:
    """The model's template features of a crop, float32 [..., T, n, n, 108].

    Args:
        positions: distogram atoms, float64 [..., T, n, 3], angstrom.
        frames: frame atoms, float64 [..., T, n, 3, 3].
        state: the bits of each token, uint8 [..., T, n].
        classes: residue classes, uint8 [..., T, n]; any from 32 on gives zeros.
        chain: chain of each token, int64 [..., n].
    """
    width = layout.TEMPLATE_CLASSES
    has_template = (state & PRESENT) > 0
    kinds = torch.arange(width, device=classes.device, dtype=classes.dtype)
    one_hot = (classes[..., None] == kinds).float()
    n, real = classes.shape[-1], (classes < width).float()
    columns = one_hot[..., None, :, :] * real[..., :, None, None]
    rows = one_hot[..., :, None, :] * real[..., None, :, None]
    if not bool(has_template.any()):
        pairs = one_hot.new_zeros((*one_hot.shape[:-2], n, n, layout.TEMPLATE_PAIR_FEATURES))
        return torch.cat((pairs, columns, rows), dim=-1)
    same = (chain[..., :, None] == chain[..., None, :])[..., None, :, :]
    inside = same & has_template[..., :, None] & has_template[..., None, :]
    distance = torch.cdist(positions, positions, compute_mode="donot_use_mm_for_euclid_dist")[..., None]
    # on the CPU, whose `linspace` the baseline uses: a device may round the bins differently
    low = torch.linspace(*BINS).to(distance.device)
    dgram = (distance >= low) & (distance < F.pad(low[1:], (0, 1), value=float("inf")))
    frame, atom = (state & FRAME) > 0, (state & DISTOGRAM_ATOM) > 0
    pairs = torch.cat(
        (
            dgram.float(),
            _pairs(frame, inside),
            _unit_vectors(frames, frame).float(),
            _pairs(atom, inside),
        ),
        dim=-1,
    )
    pairs = torch.where(inside[..., None], pairs, 0.0)
    return torch.cat((pairs, columns, rows), dim=-1)


def _pairs(mask: Tensor, inside: Tensor) -> Tensor:
    return (mask[..., :, None] & mask[..., None, :] & inside)[..., None].float()


def _unit_vectors(frames: Tensor, mask: Tensor) -> Tensor:
    """Direction of each token's frame origin in the frames of the others, float64 [..., n, n, 3]."""
    from alphafold3_pytorch.utils.model_utils import RigidFromReference3Points

    rotation, origin = RigidFromReference3Points()(frames.unbind(-2))
    offset = origin[..., :, None, :] - origin[..., None, :, :]
    vector = torch.einsum("...nij,...mnj->...mni", rotation.transpose(-1, -2), offset)
    inverse = torch.rsqrt(EPS + torch.sum(vector**2, dim=-1))
    # the baseline masks the frame whose origin it is, not the frame in which it is measured
    return (vector * (inverse * mask[..., :, None])[..., None]).transpose(-3, -2)
