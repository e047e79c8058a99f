"""The cost of a model's parts: each layer, the embedding and the output head, in any one unit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class PartCosts:
    """Costs in any one unit, such as parameters, operations or seconds."""

    layers: tuple[float, ...]
    """The cost of each layer."""
    embedding: float
    head: float
    """The cost of the output head, with what the unit counts of the last norm."""

    def by_stage(self, counts: Sequence[int]) -> list[float]:
        """Return the cost of each stage of a pipeline. counts: layers of each stage."""
        rest = iter(self.layers)
        stages = [sum(next(rest) for _ in range(count)) for count in counts]
        # the first stage holds the embedding, the last one the output head
        stages[0] += self.embedding
        stages[-1] += self.head
        return stages
