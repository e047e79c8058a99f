"""What ranks send each other in an optimizer step, by kind and by formula."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamem.config.run import RunConfig
from megamem.memory.base import DTYPES


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


def traffic(config: RunConfig, layers: range, stage: int, parameters: int, dp_size: int) -> Traffic:
    """Of a rank of `stage`, which holds `layers` with `parameters` parameters.

    What mechanisms sum over ranks besides (their pages say so) is small and left out.
    """
    parallel, training = config.parallel, config.training
    element = DTYPES[training.precision].itemsize
    rows = config.global_rows // dp_size
    tokens = rows * config.data.sequence_length
    hidden = float(tokens * config.model.hidden_size * element)  # all hidden chunks of a step

    # two sums forward and two backward per layer, the forward ones again with recomputation
    passes = 2 * (3 if training.recompute else 2) * len(layers)
    passes += (stage == 0) + (stage == parallel.pp - 1)  # the embedding's forward, the head's backward
    borders = (stage > 0) + (stage < parallel.pp - 1)
    weights = float(parameters * element)
    gradients = 4.0 * parameters  # summed in FP32
    windows = _windows(config, dp_size)
    zero = parallel.zero_stage
    if zero == 0:
        data = all_reduce(gradients, dp_size)
    elif zero == 1:
        data = all_reduce(gradients, dp_size) + gather(weights, dp_size)
    elif zero == 2:  # gradients are divided after each backward pass
        data = windows * all_reduce(gradients, dp_size) + gather(weights, dp_size)
    else:  # weights are gathered for each forward and each backward pass
        data = windows * (gather(gradients, dp_size) + 2 * gather(weights, dp_size))
    return Traffic(
        tensor=passes * all_reduce(hidden, parallel.tp),
        pipeline=borders * hidden / (parallel.tp if parallel.sequence_parallel else 1),
        data=data,
    )


def all_reduce(size: float, ranks: int) -> float:
    """Bytes each rank sends to sum `size` bytes over a ring: a reduce-scatter and an all-gather."""
    return 2 * gather(size, ranks)


def gather(size: float, ranks: int) -> float:
    """Bytes each rank sends to gather (or reduce-scatter) `size` bytes over a ring."""
    return size * (ranks - 1) / ranks


def _windows(config: RunConfig, dp_size: int) -> int:
    """Backward passes of a step without a pipeline."""
    return config.accumulation_steps(dp_size) * config.chunks // config.bptt_chunks


def most(parts: Sequence[Traffic]) -> Traffic:
    """The stage that sends most."""
    return max(parts, key=lambda part: part.total)
