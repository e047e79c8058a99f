"""torch.compile of what lies between the matrix products.

A block as a whole takes host integers (where its tokens lie in their documents) and would be compiled anew for every
chunk. The functions here take tensors and constants only, so that they are compiled once per shape, whatever the
position: norms, rotations and gated units become one kernel each, forward and backward. Matrix products, attention
kernels and collectives are left to their libraries.
"""

from __future__ import annotations

from typing import Any, cast

import torch

from megamem.memory.shared.block_attention import AttentionProjections
from megamem.model.mlp import SwiGLU, gated
from megamem.model.norm import RMSNorm, rms_norm
from megamem.model.stage import Stage
from megamem.ops.rotary import apply_rotary


def compile_pointwise(stage: Stage, **options: Any) -> None:
    """Make the stage use compiled norms, rotations and gates; `options` go to torch.compile."""
    norm, gate, rotary = (cast(Any, torch.compile(f, **options)) for f in (rms_norm, gated, apply_rotary))
    use_pointwise(stage, norm, gate, rotary)


def restore_pointwise(stage: Stage) -> None:
    """Undo `compile_pointwise`."""
    use_pointwise(stage, rms_norm, gated, apply_rotary)


def use_pointwise(stage: Stage, norm: Any, gate: Any, rotary: Any) -> None:
    """Let the stage use these functions in the place of `rms_norm`, `gated` and `apply_rotary`."""
    for module in stage.modules():
        if isinstance(module, RMSNorm):
            module.function = norm
        elif isinstance(module, SwiGLU):
            module.gated = gate
        elif isinstance(module, AttentionProjections) and module.rotates:
            module.apply_rotary = rotary
