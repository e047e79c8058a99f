"""The store of a synthetic task: each example is a document made when it is read, a pure function of seed and number.

A source whose path ends in .yaml describes one (docs/tasks.md). Training and held-out examples differ in their `seed`.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from pathlib import Path

import numpy as np

from megamem.config.load import parse_config, read_yaml
from megamem.data.store import Int64
from megamem.data.tasks.base import TASKS, Task, TaskConfig
from megamem.errors import ConfigError, DataError


class TaskStore:
    """A `DocumentStore` of a task's examples, each one token longer than is read: documents end in a token that is not.

    Tokens and labels come from the task; the token after an example is padding.
    """

    end_of_document: int | None = None

    def __init__(self, path: str) -> None:
        """Read a task's description and open it. Raises DataError naming file and field."""
        self.path = path
        self.config = read_task(Path(path))
        try:
            self.task: Task = self.config.open()
        except DataError as error:
            raise DataError(f"{path}: {error}") from None
        self.lengths = self.config.lengths() + 1
        self.shard_borders = np.array([0, self.config.examples])
        self.vocab_size: int | None = self.task.vocab_size
        self.tokenizer_hash: str | None = self.task.tokenizer_hash
        made_of = self.config.model_dump_json() + self.task.fingerprint
        self.fingerprint = hashlib.sha256(made_of.encode()).hexdigest()
        # tokens and labels of an example are read one after the other
        self._example = lru_cache(2)(self._make_example)

    def __len__(self) -> int:
        """Return the number of examples."""
        return self.config.examples

    def tokens(self, document: int, start: int, stop: int) -> Int64:
        """See `DocumentStore.tokens`."""
        return np.append(self._example(document)[0], 0)[start:stop]

    def labels(self, document: int, start: int, stop: int) -> Int64:
        """Return what is to be predicted after each of these tokens, [stop - start]; `IGNORED` where nothing is."""
        return self._example(document)[1][start:stop]

    def name(self, document: int) -> str:
        """Return kind and number of the example."""
        return f"{self.config.kind}:{document}"

    def _make_example(self, document: int) -> tuple[Int64, Int64]:
        return self.task.make(self.config.generator(document))


def read_task(path: Path) -> TaskConfig:
    """Read a task's description. Raises DataError in one line naming file and field."""
    try:
        tree = read_yaml(path)
        if "kind" not in tree:
            raise ConfigError(f"{path}: kind: required, but not given; valid: {', '.join(TASKS.kinds())}")
        try:
            config_type = TASKS.find(str(tree["kind"]))
        except ConfigError as error:
            raise ConfigError(f"{path}: {error}") from None
        return parse_config(config_type, tree, str(path))
    except ConfigError as error:
        raise DataError(str(error)) from None
