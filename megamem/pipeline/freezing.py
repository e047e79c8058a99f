"""Training of new parameters alone: which those of a rank are, and what a frozen parameter holds."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path

import torch
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.errors import ConfigError
from megamem.model.stage import Stage, build_stage, meta_stage
from megamem.parallel.linears import PlainLinears
from megamem.pipeline.optimizer import parameter_groups


def check_learns(new_parameters: Collection[str], weights: Path | None, model: ModelConfig) -> None:
    """Raise ConfigError for a frozen base without new parameters, or with some that `model` has not.

    weights: the file that would list them.
    """
    if not new_parameters:
        raise ConfigError(
            f"training.freeze base: {weights} lists no new parameters, so nothing would learn; import the model with a "
            "memory that has parameters of its own, or leave training.freeze out"
        )
    names = {name for name, _ in meta_stage(model).named_parameters()}
    if missing := sorted(name for name in new_parameters if name not in names):
        raise ConfigError(
            f"training.freeze base: {weights} lists the new parameter {missing[0]}, which the model has not; train the "
            "model that was imported, or import it with this model's memory"
        )


def check_stages_learn(
    model: ModelConfig, placement: Sequence[range], new_parameters: Collection[str], groups: int
) -> None:
    """Raise ConfigError naming the first stage of a pipeline where too few parameters learn.

    Args:
        model: the whole model.
        placement: the layers of each stage.
        new_parameters: the names of those that learn.
        groups: groups that the optimizer has on every stage, none of them empty.
    """
    for stage, layers in enumerate(placement):
        with torch.device("meta"):
            names = [name for name, _ in build_stage(model, PlainLinears(), layers).named_parameters()]
        found = sum(name in new_parameters for name in names)
        if found < groups:
            raise ConfigError(
                f"training.freeze base: pipeline stage {stage} (layers {layers.start}-{layers.stop - 1}) has "
                f"{found or 'no'} new parameters to train, but the optimizer groups them by rate and decay into "
                f"{groups}; add the memory to more of its layers, or use fewer stages (parallel.pp)"
            )


def freeze(stage: Stage, new_parameters: Collection[str]) -> None:
    """Let no parameter learn but the new ones."""
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name in new_parameters)


def learning(stage: Stage) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that learn, with their global names."""
    return [(name, parameter) for name, parameter in stage.named_parameters() if parameter.requires_grad]


def group_count(config: RunConfig, new_parameters: Collection[str]) -> int:
    """Return how many groups of parameters the optimizer makes of the whole model."""
    whole = meta_stage(config.model)
    if config.training.freeze:
        freeze(whole, new_parameters)
    return len(parameter_groups(learning(whole), config.optimizer, new_parameters))


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
