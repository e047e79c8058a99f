"""The configuration of held-out evaluation."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from megamem.config.base import ConfigModel


class CorruptionConfig(ConfigModel):
    """Noise in the place of keys and values of the local context; see docs/evaluation.md."""

    share: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of each block's tokens whose keys and values are replaced; 0 leaves everything as it is."""
    layers: Literal["memory", "all"] = "memory"
    """`memory`: layers that carry a state from chunk to chunk. `all`: the others too."""
    remembered: bool = False
    """Whether memories store the noise; if not, what they store is left alone."""


SuiteName = Literal["commonsense", "recall", "ruler", "longbench", "babilong", "perplexity"]
"""The suites of evaluation tasks; see docs/suites.md."""


class TasksConfig(ConfigModel):
    """Suites of evaluation tasks that the model is asked while it trains and at the end; see docs/suites.md."""

    suites: tuple[SuiteName, ...] = ()
    """Suites by name; none if empty. They need `data.tokenizer`, lm-eval, and data in `folder`."""
    every: Annotated[int, Field(ge=0)] = 0
    """Steps between evaluations while training; 0 evaluates only at the end."""
    limit: PositiveInt | None = None
    """Documents of each task while training; all if not given. At the end `final_limit` counts."""
    final_limit: PositiveInt | None = None
    """Documents of each task at the end; all if not given."""
    folder: Path = Path("runs/tasks")
    """Folder of the data, as `megamem tasks fetch` writes it."""
    lengths: tuple[Annotated[int, Field(ge=0)], ...] = ()
    """Tokens of contexts where a suite asks at several lengths; the suite's own if empty."""
    only: tuple[str, ...] = ()
    """Tasks whose names begin with one of these; all of a suite's if empty."""


class EvaluationConfig(ConfigModel):
    """Held-out evaluation, while training and at its end."""

    every: Annotated[int, Field(ge=0)] = 200
    """Steps between validations; 0 validates only at the end."""
    max_tokens: PositiveInt = 65_536
    """Tokens of each validation while training, taken from the start of the held-out documents."""
    final_max_tokens: PositiveInt | None = None
    """Tokens of the evaluation at the end; all held-out text if not given."""
    sequence_length: PositiveInt | None = None
    """Tokens of a held-out text: documents are cut into pieces of this length, each read as a document of its own, \
    which compares models at the length they were trained on. Documents are read whole if not given."""
    rows: PositiveInt = 8
    """Rows of a batch on each rank: documents read side by side."""
    sliding_stride: PositiveInt | None = None
    """Stride of sliding-window perplexity in tokens, computed at the end; a quarter of the chunk if not given."""
    sliding_max_tokens: PositiveInt = 32_768
    """Tokens of the sliding-window evaluation."""
    forget_every_chunk: bool = False
    """Read every chunk as if its document began there, in the evaluation at the end and in `megamem evaluate`: all
    losses are those of the model with its memory taken away."""
    forget_long_term: bool = False
    """Take away the long-term memory of the infinity-formers alone, which leaves them their short one, in the
    evaluation at the end and in `megamem evaluate`: all figures are those of the model without it."""
    tasks: TasksConfig = TasksConfig()
    """Suites of evaluation tasks."""
    corruption: CorruptionConfig = CorruptionConfig()
    """Noise in the evaluation at the end and in `megamem evaluate`, never in training."""
