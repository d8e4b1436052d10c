"""Ranks through kernels, without a GPU: the Triton interpreter."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).with_name("interpreted_ranks.py")


@pytest.fixture(scope="module")
def results(printed_by) -> dict[str, list[str]]:
    return printed_by(SCRIPT)


@pytest.mark.interpreter
@pytest.mark.parametrize(
    "case",
    [
        "two ranks, outgoing, a padded row",
        "three ranks, incoming, two structures",
        "five ranks, one without rows, outgoing",
        "one rank, incoming",
    ],
)
def test_triangle_update_on_ranks_keeps_the_error_budget(results, case):
    assert results[case] == []


@pytest.mark.interpreter
def test_a_norm_that_is_scaled_behind_the_message_keeps_the_error_budget(results):
    assert results["normalised and projected"] == []


@pytest.mark.parametrize(
    ("ranks", "tokens", "count"),
    [(2, 768, 2), (2, 1536, 4), (2, 2048, 8), (4, 1536, 4), (8, 1536, 2), (32, 6144, 2), (5, 4, 2), (1, 4096, 2)],
)
def test_all_ranks_cut_the_channels_into_the_same_pieces(ranks, tokens, count):
    from megafold.evosp3d.mesh import Shards
    from megafold.evosp3d.sharded_triangle import _pieces

    shards, found = Shards(), []
    shards.size = ranks
    for shards.rank in range(ranks):
        rows = shards.block(tokens)[1]
        found.append(_pieces(torch.empty(1, 256, rows, tokens, dtype=torch.bfloat16, device="meta"), tokens, shards))
    assert found == [found[0]] * ranks
    assert len(found[0]) == count
    assert [channel for first, length in found[0] for channel in range(first, first + length)] == list(range(128))
