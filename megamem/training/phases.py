"""The phases of a run: where each begins, and which part of its data it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from megamem.config.run import RunConfig
from megamem.costs.flops import flops_per_token
from megamem.pipeline.freezing import backward_pass_of


@dataclass(frozen=True)
class Phase:
    """Steps of a run that have one configuration."""

    number: int
    """Counted from 0."""
    config: RunConfig
    """The configuration of a run of its own."""
    first_step: int
    """Steps of the run before it."""
    end: int
    """Steps of the run at its end."""
    first_sample: int
    """Number of its first sequence in the order of its data."""

    @property
    def steps(self) -> int:
        """The number of its steps."""
        return self.end - self.first_step

    def sample_before(self, step: int) -> int:
        """Return the number of sequences in the order of its data before the one that follows `step` steps."""
        return self.first_sample + (step - self.first_step) * self.config.global_rows


def phases_of(config: RunConfig) -> tuple[Phase, ...]:
    """Return the phases of a run, one at least.

    A phase with other sources or another length of sequences has an order of data of its own, which begins with its
    first sequence; else it goes on where the phase before ends.
    """
    configs, starts = config.phases, (*config.phase_starts, config.steps)
    found: list[Phase] = []
    for number, own in enumerate(configs):
        before = found[-1] if found else None
        goes_on = before is not None and before.config.data == own.data
        first_sample = before.sample_before(before.end) if before is not None and goes_on else 0
        found.append(Phase(number, own, starts[number], starts[number + 1], first_sample))
    return tuple(found)


def phase_after(phases: Sequence[Phase], step: int) -> Phase:
    """Return the phase that a run is in after `step` steps; the last one at its end."""
    return next((phase for phase in phases if step < phase.end), phases[-1])


def samples_after(phases: Sequence[Phase], step: int) -> int:
    """Return the number of sequences that a run has read after `step` steps."""
    return sum(max(0, min(step, phase.end) - phase.first_step) * phase.config.global_rows for phase in phases)


def positions_after(phases: Sequence[Phase], step: int) -> int:
    """Return the number of positions that a run has read after `step` steps."""
    return sum(max(0, min(step, phase.end) - phase.first_step) * phase.config.training.batch_tokens for phase in phases)


def training_flops(config: RunConfig) -> list[float]:
    """Return the FLOPs of forward and backward passes per token of the data in each phase.

    A token counts as often as the objective reads it; what is frozen has no gradients.

    Raises: CheckpointError if the weights that list what learns cannot be read.
    """
    reach, readings = backward_pass_of(config), config.training.objective.readings
    lengths = [phase.data.sequence_length for phase in config.phases]
    return [readings * flops_per_token(config.model, length, reach)["training"] for length in lengths]
