"""Inflating stored bytes, with ISA-L where it is installed: the same bytes as zlib in less time (docs/cache.md).

ISA-L has packages for x86-64 and Arm only.
"""

from __future__ import annotations

from megafold.evopipe.table import BadBlock

try:
    from isal import isal_zlib as zlib
except ImportError:
    import zlib


def inflate(data: bytes | memoryview, most: int) -> bytes:
    """What a zlib stream holds. Raises BadBlock: it is none, is cut short, or holds more than `most` bytes."""
    stream = zlib.decompressobj()
    try:
        raw = stream.decompress(data, most + 1)
    except zlib.error as error:
        raise BadBlock(str(error)) from error
    if len(raw) > most:
        raise BadBlock(f"it does not have its size: more than {most} bytes")
    if not stream.eof:
        raise BadBlock("it is cut short")
    return raw
