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
    """Return the device of --device: cuda where there is one if none is named."""
    import torch

    return torch.device(name or ("cuda" if torch.cuda.is_available() else "cpu"))
