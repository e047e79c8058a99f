"""Peaks of devices: dense, by the name torch gives, None where unknown."""

from __future__ import annotations

import pytest

from megamem.costs.devices import device_peak

NAMES = {
    "NVIDIA H100 80GB HBM3": (989.5, 67.0),
    "NVIDIA H100 PCIe": (756.5, 51.0),
    "NVIDIA H100 NVL": (835.5, 60.0),
    "NVIDIA H200": (989.5, 67.0),
    "NVIDIA H200 NVL": (835.5, 60.0),
    "NVIDIA GH200 480GB": (989.5, 67.0),
    "NVIDIA H20": (148.0, 44.0),
    "NVIDIA A100-SXM4-80GB": (312.0, 19.5),
    "NVIDIA A100 80GB PCIe": (312.0, 19.5),
    "NVIDIA L40S": (362.05, 91.6),
    "NVIDIA L40": (181.05, 90.5),
    "NVIDIA L4": (121.0, 30.3),
    "NVIDIA B200": (2250.0, 75.0),
    "NVIDIA GB200": (2500.0, 80.0),
    "AMD Instinct MI300X": (1307.4, 163.4),
}


@pytest.mark.parametrize("name", NAMES)
def test_known_devices(name: str) -> None:
    bf16, fp32 = NAMES[name]
    assert device_peak(name, "bf16") == bf16 * 1e12
    assert device_peak(name, "fp32") == fp32 * 1e12


@pytest.mark.parametrize(
    "name",
    [
        "cpu",
        "",
        "NVIDIA H100",
        "NVIDIA A10G",
        "NVIDIA GeForce RTX 4090 Laptop GPU",
        "NVIDIA H100 80GB HBM3 MIG 3g.40gb",
    ],
)
def test_unknown_devices_have_no_peak(name: str) -> None:
    assert device_peak(name, "bf16") is None
    assert device_peak(name, "fp32") is None


def test_no_bf16_units() -> None:
    assert device_peak("Tesla V100-SXM2-32GB", "bf16") is None
    assert device_peak("Tesla V100-SXM2-32GB", "fp32") == 15.7e12
