"""Training of some parameters alone: which those are, how far gradients go, and what a frozen parameter holds."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.backward import BackwardPass
from megamem.errors import ConfigError
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears
from megamem.pipeline.optimizer import parameter_groups
from megamem.pipeline.start_weights import new_parameters, shown_files, whole_model


def check_learns(config: RunConfig) -> None:
    """Raise ConfigError where `training.freeze` leaves nothing to learn, or freezes what nothing has trained.

    CheckpointError if the weights that the run starts from cannot be read, or do not fit its parts.
    """
    frozen, files = config.training.freeze, config.training.init_from
    names = {name for name, _ in whole_model(config.model).named_parameters()}
    new = new_parameters(config) if frozen else frozenset()
    if frozen == "base" and not new:
        raise ConfigError(
            f"training.freeze base: {shown_files(files)} lists no new parameters, so nothing would learn; import the "
            "model with a memory that has parameters of its own, or leave training.freeze out"
        )
    if missing := sorted(new - names):
        raise ConfigError(
            f"training.freeze {frozen}: {shown_files(files)} lists the new parameter {missing[0]}, which the model has "
            "not; train the model that was imported, or import it with this model's memory"
        )
    if frozen not in (None, "base") and (untrained := sorted(new & _part_names(config.model, str(frozen)))):
        raise ConfigError(
            f"training.freeze {frozen} freezes an {frozen} that nothing has trained: {shown_files(files)} does not "
            f"hold {untrained[0]}"
        )


def check_stages_learn(config: RunConfig, placement: Sequence[range]) -> None:
    """Raise ConfigError naming the first stage of a pipeline where too few parameters learn.

    The optimizer has as many groups on every stage, none of them empty. placement: the layers of each stage.
    """
    names, groups = learning_names(config), group_count(config)
    for stage, layers in enumerate(placement if names is not None else ()):
        with torch.device("meta"):
            own = [name for name, _ in build_stage(config.model, PlainLinears(), layers).named_parameters()]
        found = sum(name in (names or ()) for name in own)
        if found < groups:
            frozen = config.training.freeze
            new, remedy = ("new ", "add the memory to more of its layers, or ") if frozen == "base" else ("", "")
            raise ConfigError(
                f"training.freeze {frozen}: pipeline stage {stage} (layers {layers.start}-{layers.stop - 1}) has "
                f"{found or 'no'} {new}parameters to train, but the optimizer groups them by rate and decay into "
                f"{groups}; {remedy}use fewer stages (parallel.pp)"
            )


@dataclass(frozen=True)
class Learning:
    """What learns of a model of which something is frozen, and how far its backward pass goes."""

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
        return self.backward.entered[layer]


def learning_names(config: RunConfig) -> frozenset[str] | None:
    """Return the parameters that learn in a run that freezes something; None if everything does.

    Raises: CheckpointError if the weights that the run starts from, which list new parameters, cannot be read.
    """
    frozen = config.training.freeze
    if frozen is None:
        return None
    if frozen == "base":
        return new_parameters(config)
    everything = {name for name, _ in whole_model(config.model).named_parameters()}
    return frozenset(everything - _part_names(config.model, frozen))


def _part_names(model: ModelConfig, part: str) -> frozenset[str]:
    """Return the parameters of a part of a model."""
    found = model.architecture.parts(model)[part]
    names = (name for name, _ in whole_model(model).named_parameters())
    return frozenset(name for name in names if found.plain_name(name) is not None)


def learning_of(config: RunConfig) -> Learning | None:
    """Return what learns in a run that freezes something; None if everything does. Raises as `learning_names`."""
    names = learning_names(config)
    return None if names is None else what_learns(config.model, names)


def backward_pass_of(config: RunConfig) -> BackwardPass | None:
    """Return what is left of a run's backward pass; None if everything learns. Raises as `learning_names`."""
    learning = learning_of(config)
    return None if learning is None else learning.backward


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
    learning = {id(parameter): parameter.numel() for name, parameter in whole.named_parameters() if name in names}
    # parameters that layers share reach down to the first of these
    sharing = whole.sharing_layers if any(id(p) in learning for p in whole.shared_parameters) else []
    parts = model.architecture.parts(model).values()
    begins = {part.first_layer: part for part in parts}
    in_front = tuple(part.bridge_before for part in parts if part.bridge_before)
    behind = tuple(part.bridge_behind for part in parts if part.bridge_behind)
    entering = [name for name, _ in below.named_parameters() if name in names]
    flows = bool(entering) and not begins
    entered, learns, extra, matrices = [], [], [], []
    for layer in range(model.layers):
        if layer in begins:
            flows = flows or any(begins[layer].plain_name(name) for name in entering)
        own = {f"layers.{layer}.{name}": p for name, p in whole.layers[str(layer)].named_parameters()}
        bridge = [name for name in own if name.startswith(in_front + behind)]
        trained = [name for name, parameter in own.items() if id(parameter) in learning]
        entered.append(flows)
        # a bridge in front of the layer counts as its own, for which gradients come through the layer
        learns.append(layer in sharing or any(not name.startswith(behind) for name in trained))
        reaches = flows or learns[-1]
        met = flows if any(name.startswith(in_front) for name in bridge) else reaches
        trains = any(name in bridge for name in trained)
        extra.append((met + trains) / 2 if bridge else float(reaches))
        flows = reaches or trains
        # a frozen matrix is taken for one of those that are not the memory's own
        inside = model.layer_model(layer)
        dense = inside.mlp_matrices + model.mixer_at(layer).projection_parameters(inside)
        frozen = [p for name, p in own.items() if p.ndim > 1 and name not in {*trained, *bridge}]
        matrices.append(max(dense - sum(p.numel() for p in frozen), 0))
    embedding = [(name, p) for name, p in below.named_parameters() if name.startswith("embedding.")]
    return Learning(
        names,
        sum(learning.values()),
        BackwardPass(
            entered=(*entered, flows),
            learns=tuple(learns),
            layer_matrices=tuple(matrices),
            extra=tuple(extra),
            embedding=_learning_share(embedding, names),
            head=_learning_share(above.named_parameters(), names),
        ),
    )


def _learning_share(parameters: Iterable[tuple[str, nn.Parameter]], names: Collection[str]) -> float:
    """Return the share of the elements of matrices that learn, 0 if there are no matrices."""
    sizes = {name: parameter.numel() for name, parameter in parameters if parameter.ndim > 1}
    return sum(size for name, size in sizes.items() if name in names) / max(sum(sizes.values()), 1)


def freeze(stage: Stage, names: Collection[str]) -> None:
    """Let no parameter learn but those called `names`."""
    for name, parameter in stage.named_parameters():
        parameter.requires_grad_(name in names)


def learning(stage: Stage) -> list[tuple[str, nn.Parameter]]:
    """Return the parameters that learn, with their global names."""
    return [(name, parameter) for name, parameter in stage.named_parameters() if parameter.requires_grad]


def group_count(config: RunConfig) -> int:
    """Return how many groups of parameters the optimizer makes of the whole model."""
    names = learning_names(config)
    parameters = whole_model(config.model).named_parameters()
    learn = [(name, p) for name, p in parameters if names is None or name in names]
    return len(parameter_groups(learn, config.optimizer, fast_parameters(config)))


def fast_parameters(config: RunConfig) -> frozenset[str]:
    """Return the new parameters, where they learn at a rate of their own. Raises as `learning_names`."""
    return new_parameters(config) if config.optimizer.new_parameters_lr else frozenset()


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
