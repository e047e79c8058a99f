"""Synthetic tasks as sources: each example is a document made when it is read, a pure function of seed and number.

A source whose path ends in .yaml describes one (docs/tasks.md). Training and held-out examples differ in their `seed`.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, Protocol

import numpy as np
from pydantic import Field, PositiveInt, model_validator

from megamem.config.base import ConfigModel
from megamem.config.load import parse_config, read_yaml
from megamem.data.batch import IGNORED
from megamem.data.needle import NeedleConfig
from megamem.data.readers import Int64
from megamem.errors import ConfigError, DataError


class Task(Protocol):
    """Makes examples."""

    @property
    def fingerprint(self) -> str:
        """Of what examples are made of, besides the configuration."""

    @property
    def vocab_size(self) -> int:
        """Bound of the token ids."""

    @property
    def tokenizer_hash(self) -> str | None:
        """SHA-256 of the tokenizer's file, if there is one."""

    def make(self, generator: np.random.Generator) -> tuple[Int64, Int64]:
        """Tokens and labels [length] of one example; labels that are not asked for are `IGNORED`."""


class RecallConfig(ConfigModel):
    """Multi-query associative recall (MQAR): pairs of keys and values, then keys again, whose values are asked for.

    Arora et al., "Zoology", 2023. Values are labels only; the token after a query is filled like any other.
    """

    kind: Literal["mqar"] = "mqar"
    """`mqar`"""
    vocab_size: Annotated[int, Field(ge=4)] = 8192
    """Keys are 1 to half of it, values the other half."""
    length: PositiveInt = 256
    """Tokens of an example."""
    pairs: PositiveInt = 16
    """Key-value pairs, each asked for once."""
    power: Annotated[float, Field(gt=0)] = 0.01
    """Gaps between the pairs and their queries follow a i^(a-1): the smaller, the sooner most are asked for."""
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
        """The maker of examples."""
        return Recall(self)


class Recall:
    """Examples of MQAR."""

    fingerprint = "mqar-1"
    tokenizer_hash = None

    def __init__(self, config: RecallConfig) -> None:
        self.config = config
        self.vocab_size = config.vocab_size
        places = (config.length - 2 * config.pairs) // 2
        weights = np.arange(1, places + 1) ** (config.power - 1.0)
        self.gaps = weights / weights.sum()

    def make(self, generator: np.random.Generator) -> tuple[Int64, Int64]:
        """See `Task.make`."""
        config, half = self.config, self.config.vocab_size // 2
        keys = generator.choice(np.arange(1, half), config.pairs, replace=False)
        values = generator.choice(np.arange(half, config.vocab_size), config.pairs, replace=False)
        context = 2 * config.pairs
        asked = context + 2 * generator.choice(len(self.gaps), config.pairs, replace=False, p=self.gaps)
        tokens = np.zeros(config.length, np.int64)
        if config.random_fill:
            tokens[context:] = generator.integers(0, config.vocab_size, config.length - context)
        tokens[0:context:2], tokens[1:context:2] = keys, values
        tokens[asked] = keys
        labels = np.full(config.length, IGNORED, np.int64)
        labels[asked] = values
        return tokens, labels


KINDS: dict[str, type[RecallConfig | NeedleConfig]] = {"mqar": RecallConfig, "niah": NeedleConfig}


class TaskStore:
    """A `DocumentStore` of a task's examples, each one token longer than is read, as windows need a token after it."""

    text_bytes: Int64 | None = None

    def __init__(self, path: str) -> None:
        self.path = path
        self.config = read_task(Path(path))
        try:
            self.task: Task = self.config.open()
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
        self.lengths = np.full(self.config.examples, self.config.length + 1)
        self.shard_ids = np.zeros(self.config.examples, np.int64)
        self.vocab_size: int | None = self.task.vocab_size
        self.tokenizer_hash: str | None = self.task.tokenizer_hash
        made_of = self.config.model_dump_json() + self.task.fingerprint
        self.fingerprint = hashlib.sha256(made_of.encode()).hexdigest()
        # tokens and labels are asked for one after the other
        self._example = lru_cache(2)(self._make_example)

    def __len__(self) -> int:
        """Number of examples."""
        return self.config.examples

    def tokens(self, document: int, start: int, stop: int) -> Int64:
        """Tokens [stop - start] of an example from `start` on."""
        return np.append(self._example(document)[0], 0)[start:stop]

    def labels(self, document: int, start: int, stop: int) -> Int64:
        """What is asked for at each of these tokens."""
        return self._example(document)[1][start:stop]

    def name(self, document: int) -> str:
        """Kind and number of the example."""
        return f"{self.config.kind}:{document}"

    def _make_example(self, document: int) -> tuple[Int64, Int64]:
        return self.task.make(np.random.default_rng((self.config.seed, document)))


def read_task(path: Path) -> RecallConfig | NeedleConfig:
    """A task's description. Raises DataError in one line naming file and field."""
    try:
        tree = read_yaml(path)
        kind = tree.get("kind")
        if kind not in KINDS:
            raise ConfigError(f"{path}: kind: {kind!r} is none of {', '.join(KINDS)}")
        return parse_config(KINDS[kind], tree, str(path))
    except ConfigError as error:
        raise DataError(str(error)) from None
