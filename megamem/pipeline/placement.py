"""Which stage holds which layers. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from itertools import accumulate
from math import inf


def contiguous(counts: Sequence[int]) -> list[range]:
    """Return the layers of each stage from the number of layers of each."""
    ends = list(accumulate(counts))
    return [range(end - count, end) for count, end in zip(counts, ends, strict=True)]


def balance(layer_costs: Sequence[float], stages: int, first_extra: float = 0.0, last_extra: float = 0.0) -> list[int]:
    """Layers of each stage, in order and at least one each, so that the slowest stage is as fast as can be.

    The slowest stage sets the pace of a pipeline. Among the placements with the fastest slowest stage, the one with
    the smallest sum of squared costs is taken, then the one with the most layers in front.

    Args:
        layer_costs: by layer.
        first_extra: cost of the embedding, on the first stage.
        last_extra: cost of the output head, on the last stage.
    Raises: ValueError if there are fewer layers than stages.
    """
    layers = len(layer_costs)
    if stages > layers:
        raise ValueError(f"{stages} stages for {layers} layers")
    prefix = [0.0, *accumulate(layer_costs)]

    def ends(stage: int, begin: int) -> range:
        return range(begin + 1, layers - (stages - 1 - stage) + 1)

    def cost(stage: int, begin: int, end: int) -> float:
        extra = (first_extra if stage == 0 else 0.0) + (last_extra if stage == stages - 1 else 0.0)
        return prefix[end] - prefix[begin] + extra

    @cache
    def slowest(stage: int, begin: int) -> float:
        """Return the cost of the slowest of stages `stage`.. over layers `begin`.., as low as it can be."""
        if stage == stages - 1:
            return cost(stage, begin, layers)
        return min(max(cost(stage, begin, end), slowest(stage + 1, end)) for end in ends(stage, begin))

    @cache
    def best(stage: int, begin: int) -> tuple[float, tuple[int, ...]]:
        """(sum of squares, negated counts) of these stages where none costs more than `limit`."""
        if stage == stages - 1:
            own = cost(stage, begin, layers)
            return (own * own if own <= limit else inf), (begin - layers,)
        found = []
        for end in ends(stage, begin):
            own = cost(stage, begin, end)
            squares, counts = best(stage + 1, end)
            found.append((own * own + squares if own <= limit else inf, (begin - end, *counts)))
        return min(found)

    limit = slowest(0, 0)
    return [-count for count in best(0, 0)[1]]
