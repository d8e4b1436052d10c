"""Atoms of tokens: sums, copies and bins, against loops."""

from __future__ import annotations

import pytest
import torch

from megafold.model import tokens
from megafold.model.bins import bin_labels

LENGTHS = torch.tensor([[3, 0, 4, 1], [2, 2, 0, 0]])
ATOMS = 9


def _looped(values: torch.Tensor, copies: int) -> torch.Tensor:
    rows = []
    for row, lengths in enumerate(LENGTHS.repeat_interleave(copies, 0).tolist()):
        starts = [sum(lengths[:i]) for i in range(len(lengths))]
        rows.append(torch.stack([values[row, s : s + n].sum(0) for s, n in zip(starts, lengths)]))
    return torch.stack(rows)


@pytest.mark.parametrize("copies", [1, 3])
def test_sums_and_copies_are_each_others_gradients(copies):
    g = torch.Generator().manual_seed(0)
    atoms = torch.randn(2 * copies, ATOMS, 5, generator=g, dtype=torch.float64, requires_grad=True)
    values = torch.randn(2 * copies, 4, 5, generator=g, dtype=torch.float64, requires_grad=True)
    summed = tokens.sum_over_atoms(atoms, LENGTHS)
    torch.testing.assert_close(summed, _looped(atoms, copies))
    spread = tokens.to_atoms(values, LENGTHS, ATOMS)
    torch.testing.assert_close((spread * atoms).sum(), (summed * values).sum())
    assert torch.equal(spread[0, 3:7], values[0, 2].expand(4, -1)) and (spread[0, 8] == 0).all()
    (from_sum,) = torch.autograd.grad((summed * values).sum(), atoms, retain_graph=True)
    torch.testing.assert_close(from_sum, spread)
    (from_spread,) = torch.autograd.grad((spread * atoms).sum(), values)
    torch.testing.assert_close(from_spread, summed)


def test_bf16_is_summed_wider():
    atoms = torch.full((1, 1024, 1), 1.0, dtype=torch.bfloat16)  # bf16 alone would stop at 256
    assert tokens.sum_over_atoms(atoms, torch.tensor([[1000, 24]])).flatten().tolist() == [1000.0, 24.0]


def test_no_length_is_read_by_the_host():
    """On the device `meta` nothing can be read."""
    lengths = torch.empty(2, 4, dtype=torch.long, device="meta")
    assert tokens.mark_atoms(torch.empty(2, 4, dtype=torch.bool, device="meta"), lengths, ATOMS).shape == (2, ATOMS)
    assert tokens._gathered(torch.empty(4, 4, 5, device="meta"), lengths, ATOMS).shape == (4, ATOMS, 5)


def test_bins_are_the_stock_models():
    from alphafold3_pytorch.utils.model_utils import distance_to_dgram

    bins = torch.linspace(2, 22, 64)
    edges = torch.stack((bins, bins.nextafter(bins * 0), bins.nextafter(bins * 9)))
    odd = torch.tensor([0.0, -3.0, 1e9, float("inf"), float("nan")])
    distances = torch.cat((edges.flatten(), odd, torch.rand(500) * 30))
    assert torch.equal(bin_labels(distances, bins), distance_to_dgram(distances, bins, return_labels=True))
