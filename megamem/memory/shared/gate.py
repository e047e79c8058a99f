"""The learned gate between local attention and a memory beside it: A = g A_mem + (1 - g) A_local, g = sigmoid(b).

Every mechanism with such a gate takes b's start value from a configuration field called `gate_init`, so that a model
which gets memories added can start with all of their gates closed (`megamem/hf/importing.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.memory.base import to_device
from megamem.parallel.linears import Linears, constant, declare


class MemoryGate(nn.Module):
    """The gate g = sigmoid(b) of one layer: one b for each query head, or one for each channel of each head.

    A module of its own, which is called: ZeRO 3 gathers a parameter by hooks of the module that owns it.
    """

    def __init__(self, model: ModelConfig, linears: Linears, gate_init: float, per_channel: bool = False) -> None:
        super().__init__()
        heads = model.heads // linears.tp_size
        shape = (heads, model.resolved_head_dim) if per_channel else (heads,)
        self.logit = declare(nn.Parameter(torch.empty(shape)), constant(gate_init), shard_axis=0)

    def forward(self) -> Tensor:
        """Return g as [local heads, head_dim], or as [local heads, 1] where a head has one gate."""
        gate = self.logit.sigmoid()
        return gate[:, None] if gate.ndim == 1 else gate


def gated(memory: Tensor, local: Tensor, gate: Tensor, entries: list[int]) -> Tensor:
    """Return gate * memory + (1 - gate) * local; local alone in rows whose memory has no entries.

    Args:
        memory, local: what the memory and local attention answer, [tokens, batch, local heads, head_dim].
        gate: `MemoryGate()`, [local heads, head_dim or 1].
        entries: how many entries the memory of each row has.
    """
    mixed = torch.lerp(local, memory, gate.to(local.dtype))
    # where no row has entries, callers give `local` as `memory`, and nothing needs to be masked
    if all(entries) or not any(entries):
        return mixed
    has_entries = to_device([count > 0 for count in entries], local.device, torch.bool)
    return torch.where(has_entries[:, None, None], mixed, local)
