"""torch.compile of what lies between the matrix products.

A block as a whole takes host integers (where its tokens lie in their documents) and would be compiled anew for every
chunk. The functions here take tensors and constants only, so that they are compiled once per shape, whatever the
position: norms, rotations, gated units, short convolutions and the functions of memories that are networks become one
kernel each, forward and backward. Matrix products, attention kernels and collectives are left to their libraries.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import torch

from megamem.memory.composite.log_linear_products import FadedMatrices
from megamem.memory.recurrent.base import RecurrentMixer
from megamem.memory.recurrent.deep import DeepMemory
from megamem.memory.recurrent.head_norm import HeadNorm, gated_head_norm
from megamem.memory.recurrent.short_convolution import ShortConvolution
from megamem.memory.shared.block_attention import AttentionProjections
from megamem.model.mlp import SwiGLU, gated
from megamem.model.norm import RMSNorm, rms_norm
from megamem.model.stage import Stage
from megamem.ops.deep_memory.pointwise import PLAIN, Pointwise
from megamem.ops.rotary import apply_rotary
from megamem.ops.short_convolution import short_convolution
from megamem.ops.unit import unit

Function = Callable[..., Any]
"""A function of tensors that works number by number, or row by row."""


def compile_pointwise(stage: Stage, **options: Any) -> None:
    """Make the stage use compiled functions; `options` go to torch.compile."""
    use_pointwise(stage, lambda function: cast(Any, torch.compile(function, **options)))


def restore_pointwise(stage: Stage) -> None:
    """Undo `compile_pointwise`."""
    use_pointwise(stage, lambda function: function)


def use_pointwise(stage: Stage, changed: Callable[[Function], Function]) -> None:
    """Let the stage use `changed` versions of the functions that work number by number."""
    functions: tuple[Function, ...] = (rms_norm, gated, apply_rotary, short_convolution, gated_head_norm, unit)
    norm, gate, rotary, convolution, head_norm, of_length_one = map(changed, functions)
    of_networks = Pointwise(*map(changed, PLAIN))
    for module in stage.modules():
        if isinstance(module, RMSNorm):
            module.function = norm
        elif isinstance(module, SwiGLU):
            module.gated = gate
        elif isinstance(module, AttentionProjections) and module.rotates:
            module.apply_rotary = rotary
        elif isinstance(module, ShortConvolution):
            module.function = convolution
        elif isinstance(module, HeadNorm):
            module.function = head_norm
        elif isinstance(module, RecurrentMixer):
            module.unit = of_length_one
        if isinstance(module, DeepMemory | FadedMatrices):
            module.pointwise = of_networks
