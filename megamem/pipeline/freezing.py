"""Training of new parameters alone: which those of a rank are, and what a frozen parameter holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.errors import ConfigError
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears


def check_learns(new_parameters: Collection[str], weights: Path | None) -> None:
    """Raise ConfigError for a frozen base without new parameters. weights: the file that would list them."""
    if not new_parameters:
        raise ConfigError(
            f"training.freeze base: {weights} lists no new parameters, so nothing would learn; import the model with a "
            "memory that has parameters of its own, or leave training.freeze out"
        )


def check_stages_learn(model: ModelConfig, placement: Sequence[range], new_parameters: Collection[str]) -> None:
    """Raise ConfigError naming the first stage of a pipeline without a parameter that learns.

    placement: the layers of each stage.
    """
    for stage, layers in enumerate(placement):
        with torch.device("meta"):
            names = [name for name, _ in build_stage(model, PlainLinears(), layers).named_parameters()]
        if not any(name in new_parameters for name in names):
            raise ConfigError(
                f"training.freeze base: pipeline stage {stage} (layers {layers.start}-{layers.stop - 1}) has no new "
                "parameter to train; add the memory to one of its layers, or use fewer stages (parallel.pp)"
            )


def freeze(stage: Stage, new_parameters: Collection[str]) -> None:
    """Let no parameter learn but the new ones."""
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name in new_parameters)


def learning(stage: Stage) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that learn, with their global names."""
    return [(name, parameter) for name, parameter in stage.named_parameters() if parameter.requires_grad]


def frozen_part(parameter: nn.Parameter, dp_rank: int) -> tuple[Tensor, int]:
    """Return what this rank holds of a frozen parameter [...], flattened [N], and the place of its first element.

    It is memory that training uses, in the dtype it computes with: frozen parameters have no FP32 master weights.
    """
    partition: Tensor | None = getattr(parameter, "ds_tensor", None)
    if partition is None:
        return parameter.detach().view(-1), 0
    # ZeRO 3: equal parts over the data-parallel ranks, the last of them filled up
    width = partition.numel()
    start = width * dp_rank
    return partition.detach().view(-1)[: max(min(width, parameter.ds_numel - start), 0)], start  # type: ignore[attr-defined]
