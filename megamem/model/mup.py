"""Maximal update parametrization for Adam: start values and learning rates that follow the width (docs/mup.md).

Which rule a parameter follows is read off the shapes it has in the whole model and in the base model, and the axis it
is declared to sum over. So it holds for every mechanism, whatever grows in it, and for any part of a model on a rank.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megamem.parallel.linears import Initializer, ParameterInfo, info


def follow_width(part: nn.Module, whole: nn.Module, base: nn.Module) -> None:
    """Declare start values and learning rates of the parameters of `part` anew.

    Args:
        part: what a rank holds of the model; its shapes do not matter.
        whole: the model with global shapes in the standard parametrization; base: likewise the base model.
    """
    wide, narrow = dict(whole.named_parameters()), dict(base.named_parameters())
    for name, parameter in part.named_parameters():
        parameter.info = widened(info(parameter), wide[name].shape, narrow[name])  # type: ignore[attr-defined]


def widened(declared: ParameterInfo, shape: torch.Size, base: nn.Parameter) -> ParameterInfo:
    """Return the declaration of a parameter of global shape `shape`, which is `base` in the base model.

    With m inputs for each of the base's, the learning rate is the base's over m. The start is the base's over sqrt(m)
    where the outputs grow too, else over m. What sums over nothing that grows is as in the base model.
    """
    axis = declared.fan_in
    m = 1.0 if axis is None else shape[axis] / base.shape[axis]
    outputs_grow = any(a != b for i, (a, b) in enumerate(zip(shape, base.shape, strict=True)) if i != axis)
    start = 1.0 if m == 1.0 else m**-0.5 if outputs_grow else 1 / m
    return replace(declared, init=times(start, info(base).init), lr_scale=1 / m)


def times(factor: float, init: Initializer) -> Initializer:
    """Start from `factor` times what `init` gives."""

    def scaled(shape: tuple[int, ...], generator: torch.Generator) -> Tensor:
        return init(shape, generator) * factor

    return init if factor == 1.0 else scaled
