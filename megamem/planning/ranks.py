"""Bytes that each rank of a layout holds between steps, counted on the layers as it builds them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.parameters import shared_vectors
from megamem.costs.state_bytes import stage_state_bytes
from megamem.errors import LayoutError
from megamem.memory.base import DTYPES
from megamem.model.stage import build_stage
from megamem.pipeline.balancing import place_by, planned_costs
from megamem.pipeline.placement import contiguous
from megamem.planning.rank_linears import RankLinears


@dataclass(frozen=True)
class RankBytes:
    """Bytes that a rank holds between steps, and those of a micro-batch's states."""

    parameters: int
    """Number of parameters (not bytes)."""
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
    shared: tuple[tuple[int, frozenset[int]], ...]
    """Numbers of parameters that layers share, each with these layers; a stage with some of them holds all of it."""

    def shared_by(self, layers: range) -> int:
        """Return the shared parameters that a stage with `layers` holds."""
        return sum(count for count, sharing in self.shared if sharing.intersection(layers))


def part_parameters(model: ModelConfig, tp_size: int) -> PartParameters:
    """Return the parameters of the parts as a rank builds them, without values.

    Raises: LayoutError if the model cannot be split so.
    """
    return _part_parameters(model.model_dump_json(), tp_size)


@lru_cache(maxsize=64)
def _part_parameters(model_json: str, tp_size: int) -> PartParameters:
    """Return `part_parameters` of a model as JSON, which a cache can have as key."""
    model = ModelConfig.model_validate_json(model_json)
    for name, size in {"model.heads": model.heads, "model.kv_heads": model.resolved_kv_heads}.items():
        if size % tp_size:
            raise LayoutError(f"parallel.tp: {tp_size} ranks cannot share {name} {size} evenly")
    # one layer of each kind is built
    kinds = {model.layer_kind(layer): layer for layer in reversed(range(model.layers))}
    linears = RankLinears(tp_size)
    with torch.device("meta"):
        counts = {kind: _count([build_stage(model, linears, range(i, i + 1)).layers]) for kind, i in kinds.items()}
        ends = build_stage(model, linears, range(model.layers, model.layers))
        first = build_stage(model, linears, range(0))
    tied = _count([ends.embedding]) if model.tie_embeddings else 0
    return PartParameters(
        embedding=_count([first]),
        layers=tuple(counts[model.layer_kind(layer)] for layer in range(model.layers)),
        head=_count([ends]) - tied,
        tied=tied,
        shared=_shared(model, tp_size),
    )


def _shared(model: ModelConfig, tp_size: int) -> tuple[tuple[int, frozenset[int]], ...]:
    """Return `PartParameters.shared`."""
    held = [shared_vectors(model, range(layer, layer + 1)) for layer in range(model.layers)]
    return tuple(
        (count // tp_size, frozenset(layer for layer, own in enumerate(held) if own[kind]))
        for kind, count in shared_vectors(model, range(model.layers)).items()
    )


def _count(modules: Sequence[torch.nn.Module]) -> int:
    """Return the number of parameters of modules."""
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def stage_parameters(model: ModelConfig, layers: range, tp_size: int) -> int:
    """Return the parameters of a rank of the stage that holds `layers`. Raises LayoutError as `part_parameters`."""
    parts = part_parameters(model, tp_size)
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
    return [
        held_bytes(config, layers, stage_parameters(config.model, layers, tp_size), tp_size, dp_size)
        for layers in contiguous(place_by(planned_costs(config), pp_size))
    ]


def held_bytes(config: RunConfig, layers: range, parameters: int, tp_size: int, dp_size: int) -> RankBytes:
    """Return the bytes of a rank that holds `layers` with so many parameters."""
    zero, dtype = config.parallel.zero_stage, DTYPES[config.training.precision]
    mixed = dtype != torch.float32
    rows = config.training.micro_batch_size
    states = stage_state_bytes(config.model, layers, rows, dtype, tp_size, config.chunks)

    def share(divided: bool, each: int) -> int:
        """Return the bytes of all parameters at `each` bytes, divided among data-parallel ranks or not."""
        return -(-parameters * each // (dp_size if divided else 1))

    # ZeRO divides the optimizer from stage 1 on, gradients from 2 on, weights at 3
    return RankBytes(
        parameters=parameters,
        weights=share(zero == 3, dtype.itemsize),
        gradients=share(zero >= 2, 4),
        optimizer=share(zero >= 1, 12 if mixed or zero else 8),
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
