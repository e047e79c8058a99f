"""The task `sorting`: a sequence drawn from frequencies that drift, then its symbols, the most frequent first.

Martins, Marinho and Martins, "infinity-former: Infinite Memory Transformer", 2022, section 4.1. The last tokens alone
have other frequencies than the whole sequence.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from megamem.data.batch import IGNORED
from megamem.data.store import Int64
from megamem.data.tasks.base import TASKS, TaskConfig

LARGEST_SHARE = 9
"""Shares of the symbols are integers from 1 to this, before they are normalized."""


@TASKS.register
class SortingConfig(TaskConfig):
    """Sorting by frequency: random symbols, a separator, then all symbols by decreasing count, which are predicted.

    Martins et al., "infinity-former", 2022. Of equally frequent symbols the one that came first comes first; symbols
    that did not come stand at the end, in the order of their numbers.
    """

    kind: Literal["sorting"] = "sorting"
    """`sorting`"""
    symbols: Annotated[int, Field(ge=2)] = 20
    """Tokens that are drawn and sorted, 0 to one less than this. The token of this number is the separator."""
    length: PositiveInt = 4020
    """Tokens of an example: those that are drawn and, for separator and answer, as many as there are symbols."""
    shortest: PositiveInt | None = None
    """Tokens of the shortest example: lengths are drawn evenly from it to `length`. All have `length` if not given."""
    examples: PositiveInt = 100_000
    """Examples of an epoch."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the examples."""

    @model_validator(mode="after")
    def _fits(self) -> SortingConfig:
        if self.length <= self.symbols:
            raise ValueError(
                f"length {self.length} has no room for a sequence: separator and answer of {self.symbols} symbols take "
                f"{self.symbols}; at least {self.symbols + 1}"
            )
        if self.shortest is not None and not self.symbols < self.shortest <= self.length:
            raise ValueError(f"shortest {self.shortest} must be larger than symbols {self.symbols} and at most length")
        return self

    def lengths(self) -> Int64:
        """See `TaskConfig.lengths`."""
        if self.shortest is None:
            return super().lengths()
        return np.array([self.draw_length(self.generator(example)) for example in range(self.examples)], np.int64)

    def draw_length(self, generator: np.random.Generator) -> int:
        """Return the tokens of an example: the first number drawn from its generator, if there is a choice."""
        return self.length if self.shortest is None else int(generator.integers(self.shortest, self.length + 1))

    def open(self) -> Sorting:
        """See `TaskConfig.open`."""
        return Sorting(self)


class Sorting:
    """Makes examples of sorting."""

    fingerprint = "sorting-1"
    tokenizer_hash = None

    def __init__(self, config: SortingConfig) -> None:
        """Make examples as `config` describes them."""
        self.config = config
        self.vocab_size = config.symbols + 1

    def make(self, generator: np.random.Generator) -> tuple[Int64, Int64]:
        """See `Task.make`."""
        symbols = self.config.symbols
        length = self.config.draw_length(generator)
        drawn = draw_sequence(length - symbols, symbols, generator)
        answer = by_frequency(drawn, symbols)
        # the last symbol of the answer is a label only
        tokens = np.concatenate([drawn, [symbols], answer[:-1]])
        labels = np.full(length, IGNORED, np.int64)
        labels[-symbols:] = answer
        return tokens, labels


def draw_sequence(length: int, symbols: int, generator: np.random.Generator) -> Int64:
    """Return random symbols, [length]: place j of T has the distribution (1 - r) p_0 + r p_1 with r = (j + 1) / T.

    Both distributions are drawn first, each symbol's share from 1 to `LARGEST_SHARE`. A mixture is drawn from by
    choosing one of the two, then a symbol of it: out of an urn that holds each symbol as often as its share says.
    """
    shares = generator.integers(1, LARGEST_SHARE + 1, (2, symbols))
    early, late = (np.repeat(np.arange(symbols), share) for share in shares)
    is_late = generator.random(length) < np.arange(1, length + 1) / length
    from_early = early[generator.integers(0, len(early), length)]
    from_late = late[generator.integers(0, len(late), length)]
    return np.where(is_late, from_late, from_early)


def by_frequency(drawn: Int64, symbols: int) -> Int64:
    """Return all symbols, [symbols], the most frequent first; then by first occurrence; then by number."""
    counts = np.bincount(drawn, minlength=symbols)
    first = np.full(symbols, len(drawn))
    present, places = np.unique(drawn, return_index=True)
    first[present] = places
    return np.lexsort((first, -counts))
