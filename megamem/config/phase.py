"""The configuration of a phase: what a run reads, and in what portions, from some step on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pydantic import Field, PositiveInt, field_validator, model_validator

from megamem.config.base import ConfigModel
from megamem.config.data import SourceConfig, bare_paths


class PhaseConfig(ConfigModel):
    """A part of a run, up to the next one. What it does not name is as in the phase before."""

    from_step: PositiveInt | None = None
    """Steps of the run before it. Give this or `from_tokens`."""
    from_tokens: PositiveInt | None = None
    """Positions that the run reads before it, padding included; whole steps. Give this or `from_step`."""
    sources: tuple[SourceConfig, ...] | None = Field(default=None, min_length=1)
    """Training sources, as `data.sources`."""
    sequence_length: int | None = Field(default=None, ge=2)
    """Tokens per row and step, as `data.sequence_length`."""
    batch_tokens: PositiveInt | None = None
    """Tokens of one optimizer step, as `training.batch_tokens`."""
    micro_batch_size: PositiveInt | None = None
    """Rows of a micro-batch, as `training.micro_batch_size`."""
    bptt_chunks: PositiveInt | None = None
    """Chunks one backward pass spans, as `training.bptt_chunks`."""

    @field_validator("sources", mode="before")
    @classmethod
    def _bare_paths(cls, value: object) -> object:
        """Accept a single path, and paths without weights inside the list."""
        return bare_paths(value)

    @model_validator(mode="after")
    def _one_beginning(self) -> PhaseConfig:
        """Raise ValueError unless the phase says once where it begins, and changes something."""
        if (self.from_step is None) == (self.from_tokens is None):
            raise ValueError("give either from_step or from_tokens")
        if not any(self.changes().values()):
            raise ValueError("changes nothing; name sources, sequence_length, batch_tokens or another of its keys")
        return self

    def changes(self) -> dict[str, dict[str, Any]]:
        """Return what it names, by section of a run."""
        data = {"sources": self.sources, "sequence_length": self.sequence_length}
        training = {name: getattr(self, name) for name in ("batch_tokens", "micro_batch_size", "bptt_chunks")}
        return {
            section: {name: value for name, value in values.items() if value is not None}
            for section, values in (("data", data), ("training", training))
        }


def phase_starts(phases: Sequence[PhaseConfig], batch_tokens: int) -> tuple[int, ...]:
    """Return the steps before each phase, those before the run itself (0) first.

    batch_tokens: positions of a step of the run, until a phase changes them.

    Raises:
        ValueError: a phase begins within a step, or not after the one before; the message says where it may begin.
    """
    starts, positions = [0], 0
    for number, phase in enumerate(phases):
        step = phase.from_step
        if step is None:
            assert phase.from_tokens is not None
            whole, rest = divmod(phase.from_tokens - positions, batch_tokens)
            step = starts[-1] + whole
            if rest:
                below = positions + whole * batch_tokens
                raise ValueError(
                    f"training.phases.{number}.from_tokens {phase.from_tokens} lies within step {step + 1}; the "
                    f"nearest ends of steps are {below} and {below + batch_tokens}"
                )
        if step <= starts[-1]:
            raise ValueError(
                f"training.phases.{number} begins after step {step}, but the phase before it after step {starts[-1]}"
            )
        positions += (step - starts[-1]) * batch_tokens
        batch_tokens = phase.batch_tokens or batch_tokens
        starts.append(step)
    return tuple(starts)
