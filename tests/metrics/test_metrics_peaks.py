"""Peak rates: the right card's or none."""

from __future__ import annotations

import pytest

from megafold.errors import InputError
from megafold.metrics.peaks import peak_flops


@pytest.mark.parametrize(
    ("name", "peak"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("A100-SXM4-40GB", 312e12),
        ("AMD Instinct MI300X", 1307e12),
        ("AMD Instinct MI250X", 191.5e12),
        ("AMD Instinct MI250", 181e12),
        ("amd instinct mi250", 181e12),
    ],
)
def test_known_card_has_its_own_peak(name, peak):
    assert peak_flops(name).value == pytest.approx(peak, rel=1e-9)


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "NVIDIA H100 PCIe",
        "NVIDIA H100 NVL",
        "NVIDIA H200 NVL",
        "NVIDIA H200 MIG 1g.18gb",
        "NVIDIA GeForce RTX 4090",
        "NVIDIA A10",
        "NVIDIA A100X",
        "AMD Instinct MI210",
        "AMD Instinct MI300A",
        "AMD Instinct MI325X",
        "Intel Data Center GPU Max 1550",
    ],
)
def test_unlisted_card_has_no_peak(name):
    assert peak_flops(name) is None


@pytest.mark.parametrize(("units", "device"), [(110, "mi250x-gcd"), (104, "mi250-gcd")])
def test_shared_driver_name_is_told_apart_by_compute_units(units, device):
    assert peak_flops("AMD Instinct MI250X / MI250", "bf16", units).device == device


@pytest.mark.parametrize("units", [None, 108])
def test_shared_driver_name_without_matching_units_has_no_peak(units):
    assert peak_flops("AMD Instinct MI250X / MI250", "bf16", units) is None


def test_dtype_without_entry_has_no_peak():
    assert peak_flops("AMD Instinct MI250X", "tf32") is None


def test_torch_dtype_spelling_and_unknown_dtype():
    assert peak_flops("NVIDIA H200", "torch.bfloat16") == peak_flops("NVIDIA H200", "bf16")
    with pytest.raises(InputError, match="fp8"):
        peak_flops("NVIDIA H200", "fp8")


def test_every_peak_has_a_source():
    assert all(
        len(peak_flops(name).source) > 20 for name in ("NVIDIA H200", "AMD Instinct MI250", "AMD Instinct MI300X")
    )
