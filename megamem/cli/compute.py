"""The options --dtype and --device as torch's types."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megamem.errors import ConfigError

if TYPE_CHECKING:
    import torch


def compute_dtype(name: str) -> torch.dtype:
    """Return the dtype of --dtype, the processor prepared for it. Raises ConfigError for an unknown one."""
    from megamem.memory.base import DTYPES

    if name not in DTYPES:
        raise ConfigError(f"--dtype {name}: give fp32 or bf16")
    if name == "bf16":
        from megamem.hardware import avoid_broken_amx

        avoid_broken_amx()
    return DTYPES[name]


def compute_device(name: str | None) -> torch.device:
    """Return the device of --device: cuda where there is one if none is named. Raises ConfigError where it is not."""
    import torch

    there = torch.cuda.is_available()
    try:
        device = torch.device(name or ("cuda" if there else "cpu"))
    except RuntimeError:
        raise ConfigError(f"--device {name}: give cpu, cuda or the number of one, as cuda:1") from None
    if device.type == "cuda" and not there:
        raise ConfigError(f"--device {name}: torch finds no CUDA device; give cpu")
    return device
