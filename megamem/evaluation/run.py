"""The evaluation at the end of a run, and of `megamem evaluate`: all figures, their table's data, the picture."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from megamem.config.run import RunConfig
from megamem.data.batch import EvaluationDocument
from megamem.model.stage import Stage
from megamem.parallel.topology import Topology
from tokenization.tokenizer import Tokenizer

Watch = Callable[[str], None]
"""Told in a few words what comes next, often enough for a watchdog to see progress."""


def final_evaluation(
    stage: Stage,
    documents: Callable[[], Iterable[EvaluationDocument]],
    tokenizer: Tokenizer | None,
    config: RunConfig,
    topology: Topology,
    *,
    dtype: torch.dtype,
    folder: Path | None = None,
    console: Console | None = None,
    watch: Watch | None = None,
) -> dict[str, Any]:
    """All figures of `docs/evaluation.md`; the same dict on every rank, which all must call it.

    Args:
        stage: the whole model on `topology.device`.
        documents: gives the held-out documents, the same on each rank.
        tokenizer: for bits per byte and the LZMA baseline; without it they are None.
        dtype: of the activations (that of the parameters).
        folder: where rank 0 writes evaluation.json and the picture; nothing is written if not given. The training
            curve is read from metrics.jsonl in it.
        console: for the progress bar, shown on rank 0 only.
        watch: called before each call of the model with what is being done.
    Returns: `val_loss`, `val_perplexity`, `val_bits_per_byte`, `lzma_bits_per_byte`, `beyond_first_chunk_loss`,
        `memory_off_beyond_first_chunk_loss`, `sliding_perplexity`, `evaluation_tokens_per_second`, `picture` and the
        full reports under `losses`, `memory`, `sliding`, `lzma`.
    """
    raise NotImplementedError
