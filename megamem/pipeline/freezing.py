"""Training of new parameters alone: which those of a rank are, and what a frozen parameter holds."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.backward import BackwardPass
from megamem.errors import CheckpointError, ConfigError
from megamem.model.stage import Stage, build_stage, meta_stage
from megamem.parallel.linears import PlainLinears
from megamem.pipeline.optimizer import parameter_groups


def whole_model(model: ModelConfig) -> Stage:
    """Return `meta_stage` of a model, which is built once for all who look at its parameters and change nothing."""
    return _whole_model(model.model_dump_json())


@lru_cache(maxsize=4)
def _whole_model(model_json: str) -> Stage:
    """Return `whole_model` of a model as JSON, which a cache can have as key."""
    return meta_stage(ModelConfig.model_validate_json(model_json))


def check_learns(new_parameters: Collection[str], weights: Path | None, model: ModelConfig) -> None:
    """Raise ConfigError for a frozen base without new parameters, or with some that `model` has not.

    weights: the file that would list them.
    """
    if not new_parameters:
        raise ConfigError(
            f"training.freeze base: {weights} lists no new parameters, so nothing would learn; import the model with a "
            "memory that has parameters of its own, or leave training.freeze out"
        )
    names = {name for name, _ in whole_model(model).named_parameters()}
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


@dataclass(frozen=True)
class Learning:
    """What learns of a model with a frozen base, and how far its backward pass goes."""

    names: frozenset[str]
    """The parameters that learn, by global name."""
    total: int
    """Number of their elements in the whole model."""
    backward: BackwardPass

    def of_layer(self, layer: int) -> tuple[str, ...]:
        """Return the names that learn in a layer, as the layer itself calls them."""
        prefix = f"layers.{layer}."
        return tuple(sorted(name.removeprefix(prefix) for name in self.names if name.startswith(prefix)))

    def reaches_input(self, layer: int) -> bool:
        """Return whether the hidden states that enter a layer have a gradient; the number of layers is the head."""
        return layer > self.backward.lowest or (self.backward.enters and layer == self.backward.lowest)


def learning_of(config: RunConfig) -> Learning | None:
    """Return what learns in a run with a frozen base; None if everything does.

    Raises: CheckpointError if the weights that the run starts from, which list it, cannot be read.
    """
    if config.training.freeze is None or config.training.init_from is None:
        return None
    return what_learns(config.model, new_parameter_names(config.training.init_from))


def backward_pass_of(config: RunConfig) -> BackwardPass | None:
    """Return what a frozen base leaves of a run's backward pass; None if everything learns. Raises as `learning_of`."""
    learning = learning_of(config)
    return None if learning is None else learning.backward


def new_parameter_names(path: Path) -> set[str]:
    """Return the parameters that a weights file says it does not hold. Raises CheckpointError if it cannot be read."""
    try:
        found = path.stat()
        return set(_listed(path, found.st_mtime_ns, found.st_size))
    except (OSError, SafetensorError, ValueError) as error:
        raise CheckpointError(f"{path}: not a readable safetensors file ({error})") from None


@lru_cache(maxsize=16)
def _listed(path: Path, changed: int, size: int) -> frozenset[str]:
    """Return what a weights file lists; the time of its last change and its size tell another file of the same name."""
    with safe_open(path, framework="pt") as file:
        return frozenset(json.loads((file.metadata() or {}).get("new_parameters", "[]")))


def what_learns(model: ModelConfig, names: Collection[str]) -> Learning:
    """Return what learns where the parameters `names` do, and the others are frozen."""
    return _what_learns(model.model_dump_json(), frozenset(names))


@lru_cache(maxsize=16)
def _what_learns(model_json: str, names: frozenset[str]) -> Learning:
    """Return `what_learns` of a model as JSON, which a cache can have as key."""
    model = ModelConfig.model_validate_json(model_json)
    whole = whole_model(model)
    with torch.device("meta"):
        below = build_stage(model, PlainLinears(), range(0))
        above = build_stage(model, PlainLinears(), range(model.layers, model.layers))
    enters = any(name in names for name, _ in below.named_parameters())
    learning = {id(parameter): parameter.numel() for name, parameter in whole.named_parameters() if name in names}
    # parameters that layers share reach down to the first of these
    reached = whole.sharing_layers if any(id(p) in learning for p in whole.shared_parameters) else []
    matrices = []
    for layer in range(model.layers):
        parameters = list(whole.layers[str(layer)].parameters())
        if any(id(p) in learning for p in parameters):
            reached.append(layer)
        # a frozen matrix is taken for one of those that are not the memory's own
        inside = model.layer_model(layer)
        dense = inside.mlp_matrices + model.mixer_at(layer).projection_parameters(inside)
        matrices.append(max(dense - sum(p.numel() for p in parameters if p.ndim > 1 and id(p) not in learning), 0))
    return Learning(
        names,
        sum(learning.values()),
        BackwardPass(
            lowest=0 if enters else min(reached, default=model.layers),
            enters=enters,
            layer_matrices=tuple(matrices),
            embedding=_learning_share(below.named_parameters(), names),
            head=_learning_share(above.named_parameters(), names),
        ),
    )


def _learning_share(parameters: Iterable[tuple[str, nn.Parameter]], names: Collection[str]) -> float:
    """Return the share of the elements of matrices that learn, 0 if there are no matrices."""
    sizes = {name: parameter.numel() for name, parameter in parameters if parameter.ndim > 1}
    return sum(size for name, size in sizes.items() if name in names) / max(sum(sizes.values()), 1)


def freeze(stage: Stage, new_parameters: Collection[str]) -> None:
    """Let no parameter learn but the new ones."""
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name in new_parameters)


def learning(stage: Stage) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that learn, with their global names."""
    return [(name, parameter) for name, parameter in stage.named_parameters() if parameter.requires_grad]


def group_count(config: RunConfig, new_parameters: Collection[str]) -> int:
    """Return how many groups of parameters the optimizer makes of the whole model."""
    parameters = whole_model(config.model).named_parameters()
    return len(
        parameter_groups(
            [(name, p) for name, p in parameters if not config.training.freeze or name in new_parameters],
            config.optimizer,
            new_parameters,
        )
    )


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
