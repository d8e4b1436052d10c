"""Peak rates of devices by the name that the driver reports. A device that is not listed has no peak."""

from __future__ import annotations

import re
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

import yaml

from megafold.errors import InputError

PEAKS_FILE = Path(__file__).with_name("peaks.yaml")
DTYPES = ("bf16", "fp16", "tf32", "fp32")
_SPELLINGS = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"}


class Peak(NamedTuple):
    """A peak rate in FLOP/s, where it is from, and the entry of the table that matched."""

    value: float
    source: str
    device: str


def peak_flops(device_name: str, dtype: str = "bf16", compute_units: int | None = None) -> Peak | None:
    """Dense peak of one visible device, or None where it is not known: then no utilisation is reported.

    Args:
        device_name: as `torch.cuda.get_device_name` gives it, e.g. ``NVIDIA H200``. A CPU has no entry.
        dtype: one of ``bf16``, ``fp16``, ``tf32``, ``fp32`` (or torch's spelling of them).
        compute_units: `multi_processor_count` of the device. Some drivers name both cards "MI250X / MI250": without it
            such a device has no peak.

    Raises:
        InputError: for another dtype.
    """
    dtype = _SPELLINGS.get(dtype.removeprefix("torch."), dtype)
    if dtype not in DTYPES:
        raise InputError(str(PEAKS_FILE.name), dtype, f"unknown dtype; expected one of {', '.join(DTYPES)}")
    matching = [entry for entry in _table() if _matches(entry, device_name)]
    if len(matching) > 1:
        matching = [entry for entry in matching if entry.get("compute_units") == compute_units]
    if len(matching) != 1 or dtype not in matching[0]["peaks"]:
        return None
    entry = matching[0]
    return Peak(float(entry["peaks"][dtype]), entry["source"], entry["id"])


def _matches(entry: dict, device_name: str) -> bool:
    name = device_name.strip()
    if any(re.search(rf"\b{word}\b", name, re.IGNORECASE) for word in entry.get("excludes", ())):
        return False
    return any(re.fullmatch(pattern, name, re.IGNORECASE) for pattern in entry["names"])


@lru_cache(maxsize=1)
def _table() -> list[dict]:
    return yaml.safe_load(PEAKS_FILE.read_text())["devices"]
