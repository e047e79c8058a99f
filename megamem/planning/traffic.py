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
    data: float
    """Gradients, and weights where ZeRO divides them, over data-parallel ranks."""

    @property
    def total(self) -> float:
        """Bytes of all kinds."""
        return self.tensor + self.pipeline + self.data


def traffic(config: RunConfig, layers: range, stage: int, parameters: StageParameters, dp_size: int) -> Traffic:
    """Return the traffic of a rank of `stage`, which holds `layers` with `parameters`.

    Sums over ranks that some mechanisms make besides (their pages say so) are small and left out.
    """
    parallel, training, model = config.parallel, config.training, config.model
    element = DTYPES[training.precision].itemsize
    chunks = config.global_rows // dp_size * config.chunks * training.objective.readings
    # all hidden chunks of a step: of their tokens alone, and with the rows beside them that layers read
    tokens, hidden = (float(chunks * n * model.hidden_size * element) for n in (model.chunk_size, model.rows_per_chunk))

    # two sums forward and two backward per layer; recomputation needs the first of the forward ones again
    reach = backward_pass_of(config)
    backward = reach.reached(layers) if reach else len(layers)
    summed = (2 * len(layers) + (3 if training.recompute else 2) * backward) * hidden
    summed += ((stage == 0) + (stage == parallel.pp - 1)) * tokens  # the embedding's forward, the head's backward
    borders = (stage > 0) + (stage < parallel.pp - 1)
    weights, updated = float(parameters.all * element), float(parameters.learning * element)
    gradients = 4.0 * parameters.learning  # summed in FP32
    windows = _windows(config, dp_size)
    zero = parallel.zero_stage
    if zero == 0:
        data = all_reduce(gradients, dp_size)
    elif zero == 1:
        data = all_reduce(gradients, dp_size) + gather(updated, dp_size)
    elif zero == 2:  # gradients are divided after each backward pass
        data = windows * all_reduce(gradients, dp_size) + gather(updated, dp_size)
    else:
        gathered = _gathers(parameters.all, config.bptt_chunks) * gather(weights, dp_size)
        data = windows * (gather(gradients, dp_size) + gathered)
    return Traffic(
        tensor=all_reduce(summed, parallel.tp),
        pipeline=borders * hidden / (parallel.tp if parallel.sequence_parallel else 1),
        data=data,
    )


def _gathers(parameters: int, bptt_chunks: int) -> float:
    """Return how often ZeRO 3 gathers a weight in a window.

    It stays gathered if its next use is within `LIVE` parameters. Between chunks of a forward pass its next use is a
    whole model away, between the last forward and its backward up to two.
    """
    if parameters > LIVE:
        return 2.0 * bptt_chunks
    return 1.0 + max(0.0, 1.0 - LIVE / (2 * parameters))


def all_reduce(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends to sum `size` bytes over a ring: a reduce-scatter and an all-gather."""
    return 2 * gather(size, ranks)


def gather(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends to gather (or reduce-scatter) `size` bytes over a ring."""
    return size * (ranks - 1) / ranks


def _windows(config: RunConfig, dp_size: int) -> int:
    """Return the number of backward passes of a step without a pipeline."""
    return config.micro_batches(dp_size) * config.chunks // config.bptt_chunks
