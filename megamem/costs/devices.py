"""Peak arithmetic of accelerators, which model FLOPs utilization (MFU) is measured against."""

from __future__ import annotations

import re
from typing import Literal

import torch

Precision = Literal["bf16", "fp32"]

# (pattern of torch.cuda.get_device_name, BF16, FP32), TFLOP/s of one device; the first match counts.
# BF16: tensor cores, dense, FP32 accumulation. Data sheets of the Hopper, Ada and Blackwell lines print the value with
# 2:4 sparsity; it is halved here. FP32: the ordinary units, since torch multiplies FP32 matrices without TF32 unless
# told otherwise.
_PEAKS: list[tuple[str, float | None, float]] = [
    # H100 data sheet (nvidia.com/en-us/data-center/h100): SXM 1,979 sparse, NVL 1,671; PCIe (brief PB-11133) 1,513
    (r"H100 NVL", 835.5, 60.0),
    (r"H100 PCIe", 756.5, 51.0),
    (r"H100.* HBM3", 989.5, 67.0),
    # H200 data sheet (nvidia.com/en-us/data-center/h200): 1,979 sparse, NVL 1,671 sparse
    (r"H200 NVL", 835.5, 60.0),
    (r"GH200", 989.5, 67.0),
    (r"H200", 989.5, 67.0),
    # H800 and H20 (export variants), their data sheets
    (r"H800 PCIe", 756.5, 51.0),
    (r"H800", 989.5, 67.0),
    (r"H20", 148.0, 44.0),
    # HGX B200 and B300 (nvidia.com/en-us/data-center/hgx): 36 PFLOP/s sparse BF16, 600 TFLOP/s FP32 for eight;
    # GB200 and GB300 NVL72: 360 PFLOP/s sparse BF16, 5,760 TFLOP/s FP32 for 72
    (r"GB[23]00", 2500.0, 80.0),
    (r"B[23]00", 2250.0, 75.0),
    # A100 data sheet (nvidia.com/en-us/data-center/a100): SXM and PCIe alike
    (r"A[18]00", 312.0, 19.5),
    # L40S, L40, L4, A40, A10 data sheets; the dense figure is printed beside the sparse one
    (r"L40S", 362.05, 91.6),
    (r"L40", 181.05, 90.5),
    (r"L4", 121.0, 30.3),
    (r"A40", 149.7, 37.4),
    (r"A10", 125.0, 31.2),
    # Ada and GA102 white papers: 6000-class cards run FP32 accumulation at full rate, GeForce at half
    (r"RTX 6000 Ada.*", 364.2, 91.1),
    (r"RTX A6000", 154.8, 38.7),
    (r"RTX 4090", 165.2, 82.6),
    (r"RTX 3090", 71.0, 35.6),
    # V100 data sheet; no BF16 units
    (r"V100-SXM.*", None, 15.7),
    (r"V100-PCIE.*", None, 14.0),
    # AMD Instinct MI300X data sheet (ROCm devices are CUDA devices to torch)
    (r"MI300X", 1307.4, 163.4),
]


def device_name(device: torch.device) -> str:
    """Return the accelerator's name, or `cpu`."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def device_peak(name: str, dtype: Precision) -> float | None:
    """Return the peak FLOP/s of one device for dense matrix products, or None if it is not in the table.

    Args:
        name: as `torch.cuda.get_device_name` gives it. Slices of a device (MIG) and laptop variants have none.
        dtype: `bf16` or `fp32`.
    """
    if re.search(r"\b(MIG|Laptop|Max-Q)\b", name):
        return None
    for pattern, bf16, fp32 in _PEAKS:
        if re.search(rf"(?<![A-Za-z0-9]){pattern}(?![A-Za-z0-9])", name):
            peak = bf16 if dtype == "bf16" else fp32
            return None if peak is None else peak * 1e12
    return None
