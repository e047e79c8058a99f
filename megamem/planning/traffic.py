"""Bytes that ranks send each other in an optimizer step, by kind and by formula."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from megamem.config.run import RunConfig
from megamem.memory.base import DTYPES
from megamem.pipeline.deepspeed_settings import LIVE
from megamem.pipeline.freezing import backward_pass_of


class StageParameters(NamedTuple):
    """The parameters of a rank of a stage."""

    all: int
    learning: int
    """Those that have gradients and are updated."""


@dataclass(frozen=True)
class Traffic:
    """Bytes that one rank sends in a step (as many come in); rings for whatever more than two ranks share."""

    tensor: float
    """Sums over tensor-parallel ranks around attention, memory and MLP, embedding and loss."""
    pipeline: float
    """Hidden chunks up and gradients down."""
    gradients: float
    """Gradients over data-parallel ranks, in all backward passes that sum them."""
    weights: float
    """Weights that ZeRO divides, over the same ranks."""

    @property
    def data(self) -> float:
        """Bytes over data-parallel ranks."""
        return self.gradients + self.weights

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.tensor + self.pipeline + self.data


def traffic(
    config: RunConfig, layers: range, stage: int, parameters: StageParameters, dp_size: int, rows_per_chunk: int
) -> Traffic:
    """Return the traffic of a rank of `stage`, which holds `layers` with `parameters`.

    Sums over ranks that some mechanisms make besides (their pages say so) are small and left out.

    rows_per_chunk: `ModelConfig.rows_per_chunk`, which looks through all layers: a search does so once.
    """
    parallel, training, model = config.parallel, config.training, config.model
    element = DTYPES[training.precision].itemsize
    chunks = config.global_rows // dp_size * config.chunks * training.objective.readings
    # all hidden chunks of a step: of their tokens alone, and with the rows beside them that layers read
    tokens, hidden = (float(chunks * n * model.hidden_size * element) for n in (model.chunk_size, rows_per_chunk))

    # two sums forward and two backward per layer, and those of what is computed again
    reach = backward_pass_of(config)
    backward = reach.reached(layers) if reach else len(layers)
    summed = (2 * len(layers) + (2 + sums_again(config)) * backward) * hidden
    summed += ((stage == 0) + (stage == parallel.pp - 1)) * tokens  # the embedding's forward, the head's backward
    borders = (stage > 0) + (stage < parallel.pp - 1)
    return Traffic(
        tensor=all_reduce(summed, parallel.tp),
        pipeline=borders * hidden / (parallel.tp if parallel.sequence_parallel else 1),
        gradients=summing_passes(config, dp_size) * gradients_of_a_pass(config, parameters, dp_size),
        weights=_weights(config, parameters, dp_size),
    )


def sums_again(config: RunConfig) -> float:
    """Return how many all-reduces of a layer its recomputation makes again, of the forward pass' two.

    It ends with the last tensor that the backward pass needs: a layer before its second sum, a part before its only
    one. A split sequence is gathered once more where each part begins, which is half of an all-reduce.
    """
    recompute = config.training.recompute
    parts = 0 if recompute is False else 2 if recompute is True else 1
    sums = max(0, parts - 1)
    # of a split sequence, a sum that scatters and a gather are each half of an all-reduce
    return (sums + parts) / 2 if config.parallel.sequence_parallel else sums


def gradients_of_a_pass(config: RunConfig, parameters: StageParameters, dp_size: int) -> float:
    """Return the bytes that a rank sends to sum its gradients once over data-parallel ranks.

    Without ZeRO every rank gets all sums, with it those that it updates (`megamem.pipeline.gradient_sums`).
    """
    sums = 4.0 * parameters.learning  # in FP32
    return gather(sums, dp_size) if config.parallel.zero_stage else all_reduce(sums, dp_size)


def summing_passes(config: RunConfig, dp_size: int) -> int:
    """Return the number of backward passes of a step that sum gradients over ranks: the last one, or those of all
    windows where each rank keeps its own sums alone (ZeRO 2 and 3)."""
    windows = config.micro_batches(dp_size) * config.chunks // config.bptt_chunks
    return windows if config.parallel.zero_stage >= 2 else 1


def _weights(config: RunConfig, parameters: StageParameters, dp_size: int) -> float:
    """Return the bytes of weights that a rank sends in a step: to gather what was updated, or what a window reads."""
    element, zero = DTYPES[config.training.precision].itemsize, config.parallel.zero_stage
    if zero == 0:
        return 0.0
    if zero < 3:
        return gather(float(parameters.learning * element), dp_size)
    windows = summing_passes(config, dp_size)
    reads = config.calls_per_window
    return windows * _gathers(parameters.all, reads) * gather(float(parameters.all * element), dp_size)


def _gathers(parameters: int, reads: int) -> float:
    """Return how often ZeRO 3 gathers a weight in a window in which each layer reads so often.

    It stays gathered if its next use is within `LIVE` parameters. Between chunks of a forward pass its next use is a
    whole model away, between the last forward and its backward up to two.
    """
    if parameters > LIVE:
        return 2.0 * reads
    return 1.0 + max(0.0, 1.0 - LIVE / (2 * parameters))


def all_reduce(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends to sum `size` bytes over a ring: a reduce-scatter and an all-gather."""
    return 2 * gather(size, ranks)


def gather(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends to gather `size` bytes over a ring, or to sum each on one of the ranks."""
    return size * (ranks - 1) / ranks
