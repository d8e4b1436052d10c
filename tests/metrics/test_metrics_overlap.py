"""Spans that overlap, touch, contain one another, and what two kinds of them share."""

from __future__ import annotations

import random

import pytest

from megafold.metrics.overlap import Overlap, merged, overlap


def test_merged_spans_cover_the_same_moments():
    assert merged([(5, 6), (0, 2), (1, 3), (3, 4), (0, 1)]) == [(0, 4), (5, 6)]
    assert merged([]) == []


@pytest.mark.parametrize(
    ("sends", "computes", "expected"),
    [
        ([(0, 2)], [(1, 4)], Overlap(4, 2, 3, 1, 0)),
        ([(0, 1)], [(2, 3)], Overlap(3, 1, 1, 0, 1)),
        ([(1, 2), (1.5, 3)], [(0, 10)], Overlap(10, 2, 10, 2, 0)),
        ([], [(2, 3), (5, 6)], Overlap(4, 0, 2, 0, 2)),
    ],
)
def test_what_is_hidden_and_what_is_idle(sends, computes, expected):
    assert overlap(sends, computes) == expected


def test_it_agrees_with_counting_every_moment():
    draw = random.Random(0)
    for _ in range(50):
        kinds = [[(s, s + draw.randint(1, 9)) for s in draw.sample(range(60), draw.randint(1, 8))] for _ in range(2)]
        covers = [[any(s <= t < e for s, e in spans) for t in range(80)] for spans in kinds]
        found = overlap(*kinds)
        assert found.hidden == sum(a and b for a, b in zip(*covers))
        assert found.communication == sum(covers[0])
        busy = [a or b for a, b in zip(*covers)]
        assert found.total - found.idle == sum(busy)


def test_a_trace_without_kernels_is_an_error():
    with pytest.raises(ValueError, match="no spans"):
        overlap([], [])
