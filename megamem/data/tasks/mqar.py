"""The task `mqar`, multi-query associative recall: pairs of keys and values, then the keys again.

Arora et al., "Zoology: Measuring and Improving Recall in Efficient Language Models", 2023.
"""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from megamem.data.batch import IGNORED
from megamem.data.store import Int64
from megamem.data.tasks.base import TASKS, TaskConfig


@TASKS.register
class RecallConfig(TaskConfig):
    """Multi-query associative recall (MQAR): pairs of keys and values, then the keys again, whose values are predicted.

    Arora et al., "Zoology", 2023. Values are labels only; the token after a query is filled like any other.
    """

    kind: Literal["mqar"] = "mqar"
    """`mqar`"""
    vocab_size: Annotated[int, Field(ge=4)] = 8192
    """Keys are 1 to half of it, values the other half."""
    length: PositiveInt = 256
    """Tokens of an example."""
    pairs: PositiveInt = 16
    """Key-value pairs; each key is queried once."""
    power: Annotated[float, Field(gt=0)] = 0.01
    """Gaps i between the pairs and their queries have probability ~ a i^(a-1): the smaller, the sooner most queries."""
    random_fill: bool = True
    """Fill the places between queries with random tokens, keys among them; else with token 0."""
    examples: PositiveInt = 100_000
    """Examples of an epoch."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the examples."""

    @model_validator(mode="after")
    def _fits(self) -> RecallConfig:
        if self.length % 2:
            raise ValueError(f"length {self.length} is odd; pairs need an even one")
        if self.vocab_size <= self.length:
            raise ValueError(f"vocab_size {self.vocab_size} must be larger than length {self.length}")
        if 4 * self.pairs > self.length:
            raise ValueError(f"pairs {self.pairs} do not fit: 4 * pairs may be length {self.length} at most")
        return self

    def open(self) -> Recall:
        """See `TaskConfig.open`."""
        return Recall(self)


class Recall:
    """Makes examples of MQAR."""

    fingerprint = "mqar-1"
    tokenizer_hash = None

    def __init__(self, config: RecallConfig) -> None:
        """Make examples as `config` describes them."""
        self.config = config
        self.vocab_size = config.vocab_size
        places = (config.length - 2 * config.pairs) // 2
        weights = np.arange(1, places + 1) ** (config.power - 1.0)
        self.gaps = weights / weights.sum()

    def make(self, generator: np.random.Generator) -> tuple[Int64, Int64]:
        """See `Task.make`."""
        config, half = self.config, self.config.vocab_size // 2
        # keys come from the lower half of the vocabulary, values from the upper one, none of them twice
        keys = generator.choice(np.arange(1, half), config.pairs, replace=False)
        values = generator.choice(np.arange(half, config.vocab_size), config.pairs, replace=False)
        context = 2 * config.pairs
        queries = context + 2 * generator.choice(len(self.gaps), config.pairs, replace=False, p=self.gaps)
        tokens = np.zeros(config.length, np.int64)
        if config.random_fill:
            tokens[context:] = generator.integers(0, config.vocab_size, config.length - context)
        tokens[0:context:2], tokens[1:context:2] = keys, values
        tokens[queries] = keys
        labels = np.full(config.length, IGNORED, np.int64)
        labels[queries] = values
        return tokens, labels
