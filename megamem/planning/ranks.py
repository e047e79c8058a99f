"""Bytes that each rank of a layout holds between steps, counted on the layers as it builds them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import nn

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.state_bytes import stage_state_bytes
from megamem.errors import LayoutError
from megamem.memory.base import DTYPES
from megamem.model.stage import Stage, build_stage
from megamem.pipeline.balancing import place_by, planned_costs
from megamem.pipeline.freezing import Learning, freeze, learning_of
from megamem.pipeline.placement import contiguous
from megamem.planning.rank_linears import RankLinears


@dataclass(frozen=True)
class RankBytes:
    """Bytes that a rank holds between steps, and those of a micro-batch's states."""

    parameters: int
    """Number of parameters (not bytes)."""
    learning: int
    """Number of those that learn: the others have neither gradients nor optimizer state."""
    weights: int
    gradients: int
    optimizer: int
    """Both moments and, in BF16 and from ZeRO 1 on, FP32 weights; divided among data-parallel ranks from ZeRO 1 on."""
    states: int
    """Memory states of a micro-batch whose sequences are read to their end."""

    @property
    def total(self) -> int:
        """Bytes of all."""
        return self.weights + self.gradients + self.optimizer + self.states


@dataclass(frozen=True)
class PartParameters:
    """Parameters on one tensor-parallel rank."""

    embedding: int
    layers: tuple[int, ...]
    head: int
    """Parameters of the output head and the last norm."""
    tied: int
    """Parameters of a tied embedding that the last of several stages holds too."""
    shared: int
    """Parameters that layers share; each stage with such layers holds them."""
    sharing_layers: frozenset[int]
    """The layers that share them."""

    def shared_by(self, layers: range) -> int:
        """Return the shared parameters that a stage with `layers` holds."""
        return self.shared if self.sharing_layers.intersection(layers) else 0


def part_parameters(model: ModelConfig, tp_size: int, learning: Learning | None = None) -> PartParameters:
    """Return the parameters of the parts as a rank builds them, without values.

    learning: what learns, if only that counts; all parameters if not given.

    Raises: LayoutError if the model cannot be split so.
    """
    return _part_parameters(model.model_dump_json(), tp_size, learning)


@lru_cache(maxsize=64)
def _part_parameters(model_json: str, tp_size: int, learning: Learning | None) -> PartParameters:
    """Return `part_parameters` of a model as JSON, which a cache can have as key."""
    model = ModelConfig.model_validate_json(model_json)
    for name, size in {"model.heads": model.heads, "model.kv_heads": model.resolved_kv_heads}.items():
        if size % tp_size:
            raise LayoutError(f"parallel.tp: {tp_size} ranks cannot share {name} {size} evenly")
    # one layer of each kind is built, and of each choice of what learns
    kind_of = [(model.layer_kind(layer), learning and learning.of_layer(layer)) for layer in range(model.layers)]
    kinds = {kind_of[layer]: layer for layer in reversed(range(model.layers))}
    linears = RankLinears(tp_size)

    def built(layers: range) -> Stage:
        """Return a stage, with the parameters that count as those that require gradients."""
        with torch.device("meta"):
            stage = build_stage(model, linears, layers)
        if learning is not None:
            freeze(stage, learning.names)
        return stage

    counts = {kind: _count(built(range(i, i + 1)).layers.parameters()) for kind, i in kinds.items()}
    ends, first = built(range(model.layers, model.layers)), built(range(0))
    sharing = first.sharing_layers
    tied = _count(ends.embedding.parameters()) if model.tie_embeddings else 0
    return PartParameters(
        embedding=_count(first.parameters()),
        layers=tuple(counts[kind] for kind in kind_of),
        head=_count(ends.parameters()) - tied,
        tied=tied,
        shared=_count(built(range(sharing[0], sharing[0] + 1)).shared_parameters) if sharing else 0,
        sharing_layers=frozenset(sharing),
    )


def _count(parameters: Iterable[nn.Parameter]) -> int:
    """Return the number of elements of the parameters that learn."""
    return sum(parameter.numel() for parameter in parameters if parameter.requires_grad)


def stage_parameters(model: ModelConfig, layers: range, tp_size: int, learning: Learning | None = None) -> int:
    """Return the parameters of a rank of the stage that holds `layers`. Raises LayoutError as `part_parameters`.

    learning: what learns, if only that counts; all parameters if not given.
    """
    parts = part_parameters(model, tp_size, learning)
    first, last = layers.start == 0, layers.stop == model.layers
    count = sum(parts.layers[layer] for layer in layers) + parts.shared_by(layers)
    count += parts.embedding if first else 0
    return count + (parts.head + (0 if first else parts.tied) if last else 0)


def rank_bytes(config: RunConfig, tp_size: int, pp_size: int, dp_size: int = 1) -> list[RankBytes]:
    """Return the bytes of a rank of each pipeline stage; layers are placed as the run would place them.

    Weights are in the run's precision, gradients are summed in FP32. Activations, communication buffers and states that
    `streams` carry over are left out.

    Raises: LayoutError for a layout that model or ZeRO stage cannot be split into.
    """
    if pp_size > 1 and config.parallel.zero_stage > 1:
        raise LayoutError(f"parallel.zero_stage: {config.parallel.zero_stage} needs pp 1; use 0 or 1 with a pipeline")
    if pp_size > config.model.layers:
        raise LayoutError(
            f"parallel.pp: {pp_size} stages for {config.model.layers} layers; at most one stage per layer"
        )
    stages = contiguous(place_by(planned_costs(config), pp_size))
    return [held_bytes(config, layers, tp_size, dp_size) for layers in stages]


def held_bytes(config: RunConfig, layers: range, tp_size: int, dp_size: int) -> RankBytes:
    """Return the bytes of a rank that holds `layers`. Raises LayoutError as `part_parameters`."""
    parameters = stage_parameters(config.model, layers, tp_size)
    learning = stage_parameters(config.model, layers, tp_size, learning_of(config))
    zero, dtype = config.parallel.zero_stage, DTYPES[config.training.precision]
    mixed = dtype != torch.float32
    rows = config.training.micro_batch_size
    states = stage_state_bytes(config.model, layers, rows, dtype, tp_size, config.chunks)

    def share(count: int, divided: bool, each: int) -> int:
        """Return the bytes of so many parameters at `each` bytes, divided among data-parallel ranks or not."""
        return -(-count * each // (dp_size if divided else 1))

    # ZeRO divides the optimizer from stage 1 on, gradients from 2 on, weights at 3
    return RankBytes(
        parameters=parameters,
        learning=learning,
        weights=share(parameters, zero == 3, dtype.itemsize),
        gradients=share(learning, zero >= 2, 4),
        optimizer=share(learning, zero >= 1, 12 if mixed or zero else 8),
        states=sum(states.values()),
    )


def fullest(config: RunConfig, tp_size: int, pp_size: int, dp_size: int = 1) -> RankBytes | str:
    """Return the bytes of the stage whose rank holds most, or the reason why the layout is impossible."""
    try:
        return max(rank_bytes(config, tp_size, pp_size, dp_size), key=lambda rank: rank.total)
    except LayoutError as error:
        return str(error)


def layouts(
    config: RunConfig, dp_size: int = 1, tp: tuple[int, ...] = (1, 2, 4, 8), pp: tuple[int, ...] = (1, 2, 4)
) -> dict[tuple[int, int], RankBytes | str]:
    """Return `fullest` of each (TP, PP), with so many data-parallel ranks."""
    return {(tp_size, pp_size): fullest(config, tp_size, pp_size, dp_size) for tp_size in tp for pp_size in pp}
