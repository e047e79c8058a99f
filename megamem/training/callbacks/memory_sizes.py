"""The callback that logs how large memories have grown, and warns before they overflow."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.memory.base import Growing, State, States, StateSpec, TensorSpec
from megamem.runs.sinks.base import LogRecord
from megamem.training.loop import Callback, Trainer, has_log_line

if TYPE_CHECKING:
    from megamem.pipeline.base import StepResult

PREFIX = "memory_rms/"
"""What the figures' names begin with."""
LIMIT = 1e6
"""Root mean square from which on a memory is warned of: float32 keeps 24 bits, so that numbers of this size change by
steps of 1/16, and what is written with size 1 is rounded to 3 % already."""
_log = logging.getLogger(__name__)


class MemorySizes(Callback):
    """Adds to log records the root mean square of each layer's memory, at the end of the step's last micro-batch.

    Of the tensors that a layer accumulates (those declared in float32) the largest one's counts, on the rank where it
    is largest: the one that would overflow first.
    """

    def __init__(self, specs: dict[str, StateSpec], every: int) -> None:
        """Describe what is measured.

        Args:
            specs: the declared states of the whole model, by component.
            every: steps between log lines.
        """
        self.every = every
        self.specs = {name: spec for name, spec in specs.items() if any(_accumulating(spec))}
        self._sizes: dict[str, Tensor] = {}
        self._warned: dict[str, float] = {}

    def start(self, trainer: Trainer) -> None:
        """See `Callback.start`."""
        self._watch_next(trainer)

    def after_step(self, trainer: Trainer, result: StepResult) -> None:
        """See `Callback.after_step`."""
        self._watch_next(trainer)

    def _watch_next(self, trainer: Trainer) -> None:
        """Look at the states of the next step if it has a log line."""
        due = bool(self.specs) and has_log_line(trainer.step + 1, self.every, trainer.phase.end)
        trainer.engine.observe_states = self._note if due else None

    def _note(self, states: States) -> None:
        """Keep the sizes of this rank's states, on their device."""
        for name in self.specs.keys() & states.keys():
            tensors = list(accumulated(self.specs[name], states[name]))
            if tensors:
                norms = torch.stack([norm.float() for norm in torch._foreach_norm(tensors)])
                counts = torch.tensor([tensor.numel() for tensor in tensors], dtype=torch.float32)
                self._sizes[name] = (norms / counts.sqrt().to(norms.device, non_blocking=True)).max()

    def at_log(self, trainer: Trainer, record: LogRecord) -> None:
        """See `Callback.at_log`. A collective of all ranks."""
        if not self.specs:
            return
        device = trainer.topology.device
        # what is not finite must win the maximum over ranks
        own = [self._sizes.get(name, torch.zeros((), device=device)) for name in self.specs]
        largest = torch.stack([size.to(device) for size in own]).nan_to_num(nan=torch.inf, posinf=torch.inf)
        dist.all_reduce(largest, dist.ReduceOp.MAX)
        sizes = dict(zip(self.specs, largest.tolist(), strict=True))
        self._sizes.clear()
        record.update({f"{PREFIX}{name}": size for name, size in sizes.items()})
        if trainer.topology.rank == 0:
            self._warn(trainer.step, sizes)

    def _warn(self, step: int, sizes: dict[str, float]) -> None:
        """Warn of the largest memory beyond the limit, once for each thousandfold."""
        name = max(sizes, key=lambda name: sizes[name])
        if sizes[name] >= max(LIMIT, 1000 * self._warned.get(name, 0.0)):
            self._warned[name] = sizes[name]
            _log.warning(
                "step %d: the memory of model.%s has a root mean square of %.1e (figure %s%s); float32 loses what is "
                "written beside numbers beyond %.0e, and overflows at 3e+38: a layer norm inside the memory, stronger "
                "decay or a smaller learning rate bounds it",
                step, name, sizes[name], PREFIX, name, LIMIT,
            )  # fmt: skip


def _accumulating(specs: StateSpec) -> Iterator[str]:
    """Yield the names of what adds up over a document: what is declared in float32 whatever the activations are."""
    for name, spec in specs.items():
        parts = spec.entry.values() if isinstance(spec, Growing) else (spec,)
        if any(part.dtype == "float32" for part in parts):
            yield name


def accumulated(specs: StateSpec, state: State) -> Iterator[Tensor]:
    """Yield the tensors [...] of a component's state that add up over a document, those of entries among them."""
    for name in _accumulating(specs):
        spec = specs[name]
        if isinstance(spec, TensorSpec):
            yield from (state[name],) if state[name].numel() else ()
        else:
            for entry in state[name]:
                yield from (entry[part] for part, own in spec.entry.items() if own.dtype == "float32")
