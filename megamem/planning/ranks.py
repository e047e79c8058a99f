"""Bytes that each rank of a layout holds: counted from what the rank builds, not estimated."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.errors import LayoutError
from megamem.model.stage import Stage
from megamem.parallel.linears import Initializer, PlainLinears
from megamem.pipeline.costs import parameter_costs
from megamem.pipeline.placement import contiguous
from megamem.planning.state import state_bytes, state_sizes


class RankLinears(PlainLinears):
    """Layers with the shapes they have on one of `tp_size` ranks; they hold no values and communicate nothing."""

    def __init__(self, tp_size: int) -> None:
        self.tp_size = tp_size

    def column(self, inputs: int, outputs: int, init: Initializer, bias: bool = False) -> nn.Module:
        """See `Linears.column`."""
        return super().column(inputs, self._share(outputs, "outputs of a projection"), init, bias)

    def row(self, inputs: int, outputs: int, init: Initializer, bias: bool = False) -> nn.Module:
        """See `Linears.row`."""
        return super().row(self._share(inputs, "inputs of a projection"), outputs, init, bias)

    def embedding(self, vocabulary: int, width: int, init: Initializer) -> nn.Module:
        """See `Linears.embedding`."""
        return super().embedding(self._share(vocabulary, "rows of the embedding"), width, init)

    def _share(self, size: int, what: str) -> int:
        if size % self.tp_size:
            raise LayoutError(f"parallel.tp: {self.tp_size} ranks cannot share {size} {what} evenly")
        return size // self.tp_size


@dataclass(frozen=True)
class RankBytes:
    """What a rank holds between steps, and the states of a micro-batch while it is read."""

    parameters: int
    """How many, not bytes."""
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


def rank_stage(model: ModelConfig, layers: range, tp_size: int) -> Stage:
    """The part of the model that a rank builds, without values. Raises LayoutError if it cannot be split so."""
    for name, size in {"model.heads": model.heads, "model.kv_heads": model.kv}.items():
        if size % tp_size:
            raise LayoutError(f"parallel.tp: {tp_size} ranks cannot share {name} {size} evenly")
    with torch.device("meta"):
        return Stage(model, RankLinears(tp_size), layers)


def rank_bytes(config: RunConfig, tp_size: int, pp_size: int, dp_size: int = 1) -> list[RankBytes]:
    """Of a rank of each pipeline stage; layers are placed by their parameters.

    Weights are in the run's precision, gradients are summed in FP32. Not in it: activations, communication buffers,
    what `streams` carry over, ZeRO 2 and 3, which divide gradients and weights too.
    Raises: LayoutError for a layout that model or ZeRO stage cannot be split into.
    """
    model, bf16 = config.model, config.training.precision == "bf16"
    if pp_size > 1 and config.parallel.zero_stage > 1:
        raise LayoutError(f"parallel.zero_stage: {config.parallel.zero_stage} needs pp 1; use 0 or 1 with a pipeline")
    if pp_size > model.layers:
        raise LayoutError(f"parallel.pp: {pp_size} stages for {model.layers} layers; at most one stage per layer")
    sizes = state_sizes(model, config.training.micro_batch_size)
    chunks = config.data.sequence_length // model.chunk_size
    shards = dp_size if config.parallel.zero_stage else 1
    found = []
    for layers in contiguous(parameter_costs(model).place(pp_size)):
        stage = rank_stage(model, layers, tp_size)
        count = sum(parameter.numel() for parameter in stage.parameters())
        states = [
            state_bytes(model.mixer_at(i).state_specs(model), sizes, torch.bfloat16 if bf16 else torch.float32,
                        tp_size, chunks)
            for i in layers
        ]  # fmt: skip
        found.append(
            RankBytes(
                parameters=count,
                weights=count * (2 if bf16 else 4),
                gradients=count * 4,
                optimizer=-(-count * (12 if bf16 or config.parallel.zero_stage else 8) // shards),
                states=sum(sum(kinds.values()) for kinds in states),
            )
        )
    return found


def fullest(config: RunConfig, tp_size: int, pp_size: int, dp_size: int = 1) -> RankBytes | str:
    """The stage whose rank holds most, or why the layout is impossible."""
    try:
        return max(rank_bytes(config, tp_size, pp_size, dp_size), key=lambda rank: rank.total)
    except LayoutError as error:
        return str(error)


def layouts(
    config: RunConfig, dp_size: int = 1, tp: tuple[int, ...] = (1, 2, 4, 8), pp: tuple[int, ...] = (1, 2, 4)
) -> dict[tuple[int, int], RankBytes | str]:
    """`fullest` of each (TP, PP), with so many data-parallel ranks."""
    return {(tp_size, pp_size): fullest(config, tp_size, pp_size, dp_size) for tp_size in tp for pp_size in pp}
