"""How many programs of a kernel share a head where its memory is written: as many as a device has room for.

See `triton/meeting.py`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

UNITS = 32
"""Inner units that are on a multiprocessor at a time."""
MULTIPROCESSORS = 132
"""Those of an H100, where there is no device to ask."""


def parts_of(key: Tensor, units: int) -> int:
    """Return how many programs share a head where its memory is written, each with some of its inner `units`.

    key: [B, H, ...], where is computed.
    """
    there = torch.cuda.get_device_properties(key.device).multi_processor_count if key.is_cuda else MULTIPROCESSORS
    return parts_for(key.shape[:2].numel(), math.ceil(units / UNITS), there)


def parts_for(heads: int, blocks: int, multiprocessors: int) -> int:
    """Return how many programs share each head's blocks, the same number each, so that all are at work at a time."""
    return max(n for n in range(1, blocks + 1) if n == 1 or (blocks % n == 0 and n * heads <= multiprocessors))
