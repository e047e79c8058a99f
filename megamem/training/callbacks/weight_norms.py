"""The callback `weight_norms`: the norm of the weights of each layer, as figures of the log."""

from __future__ import annotations

from typing import Literal

import torch
import torch.distributed as dist
from pydantic import PositiveInt

from megamem.config.extensions import CALLBACKS, CallbackConfig
from megamem.runs.sinks.base import LogRecord
from megamem.training.loop import Callback, Trainer

PREFIX = "weight_norm/"
"""What the figures' names begin with."""


@CALLBACKS.register
class WeightNormsConfig(CallbackConfig):
    """Norm of the FP32 weights of each layer, of the embedding, the output head and the last norm.

    The figures `weight_norm/layers.0`, ... join the records of log lines; the host does not wait at other steps.
    """

    kind: Literal["weight_norms"] = "weight_norms"
    """`weight_norms`"""
    every: PositiveInt = 1
    """Log lines from one measurement to the next; the first line has one."""

    def build(self) -> WeightNorms:
        """See `CallbackConfig.build`."""
        return WeightNorms(self.every)


class WeightNorms(Callback):
    """Adds the Euclidean norm of each component's FP32 weights to the records of log lines."""

    def __init__(self, every: int) -> None:
        """every: log lines from one measurement to the next."""
        self.every = every
        self._lines = 0

    def at_log(self, trainer: Trainer, record: LogRecord) -> None:
        """See `Callback.at_log`. A collective of all ranks at the log lines that measure."""
        if self._lines % self.every == 0:
            record.update({f"{PREFIX}{name}": norm for name, norm in weight_norms(trainer).items()})
        self._lines += 1


def weight_norms(trainer: Trainer) -> dict[str, float]:
    """Return the Euclidean norm of the FP32 weights by component of the whole model, on every rank.

    A collective of all ranks; the host waits for the device.
    """
    # these import the libraries of parallel training, which parsing a configuration does not need
    from checkpoints.training_state import optimizer_fragments
    from megamem.model.stage import meta_stage

    names = [name for name, _ in meta_stage(trainer.config.model).named_parameters()]
    components = list(dict.fromkeys(map(component_of, names)))
    squares = torch.zeros(len(components), dtype=torch.float64, device=trainer.topology.device)
    # each element of a global tensor is written by exactly one rank, so the sum over ranks counts it once
    for key, fragments in optimizer_fragments(trainer.engine).items():
        kind, name = key.split("/", 1)
        if kind == "master" and fragments.writes:
            for piece in fragments.pieces:
                norm = torch.linalg.vector_norm(piece.tensor, dtype=torch.float64)
                squares[components.index(component_of(name))] += norm.square()
    dist.all_reduce(squares)
    return dict(zip(components, squares.sqrt().tolist(), strict=True))


def component_of(parameter: str) -> str:
    """Return the component of a parameter by its global name: `layers.3`, or the first part of the name."""
    first, *rest = parameter.split(".")
    return f"{first}.{rest[0]}" if first == "layers" else first
