"""Stored bytes are inflated to the same by ISA-L and by zlib, which stands in where ISA-L is not installed."""

from __future__ import annotations

import zlib

import numpy as np
import pytest
from isal import isal_zlib

from megafold.evopipe import inflate as inflating
from megafold.evopipe.inflate import inflate
from megafold.evopipe.table import BadBlock


@pytest.fixture(params=[isal_zlib, zlib], ids=["isa-l", "zlib"], autouse=True)
def library(request, monkeypatch):
    monkeypatch.setattr(inflating, "zlib", request.param)


@pytest.mark.parametrize("level", [0, 1, 6, 9])
@pytest.mark.parametrize("size", [0, 1, 255, 70000])
def test_any_stream_is_inflated_to_what_was_deflated(level, size):
    plain = np.random.default_rng(size).integers(0, 21, size, dtype=np.uint8).tobytes()
    packed = zlib.compress(plain, level)
    assert inflate(memoryview(packed), size) == plain
    assert inflate(packed, size + 1000) == plain


@pytest.mark.parametrize("size", [100, 70000])
def test_what_is_no_whole_stream_is_refused(size):
    packed = zlib.compress(np.random.default_rng(0).integers(0, 21, size, dtype=np.uint8).tobytes())
    wrong_sum = packed[:-1] + bytes([packed[-1] ^ 1])
    for data in (packed[:-1], packed[: size // 4], b"", b"no stream at all", wrong_sum):
        with pytest.raises(BadBlock):
            inflate(data, size)


def test_no_more_is_made_than_was_asked_for():
    bomb = zlib.compress(bytes(50 << 20))
    with pytest.raises(BadBlock, match="more than 1000 bytes"):
        inflate(bomb, 1000)
