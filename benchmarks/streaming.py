"""A million tokens through trained models as one document: does the loss drift, does memory grow, is anything NaN?

    python -m benchmarks.streaming RUN [RUN ...] [--tokens 1000000]

RUN: folders of finished runs (`runs/studies/elastic_comparison/runs/books-melodi-0`). The text is that of the run's
training and held-out shards, one document after the other without a reset of the memory, which no model has seen in
training: its sequences were thousands of tokens long. The same weights read the same text once more with a fresh memory
at every chunk; the difference, by tenths of the text, is what the memory gives there, free of how hard the text is.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

os.environ.setdefault("MEGAMEM_BANK_GIB", "0.1")  # no position comes back: matrices of old ones are of no use

from benchmarks.charts import beside
from benchmarks.common import OUTPUT, fix_threads, publish, table
from benchmarks.generation import resident_bytes
from checkpoints.trained import open_run
from megamem.config.run import RunConfig
from megamem.data.batch import EvaluationDocument
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.losses import Bucket
from megamem.training.build import held_out_documents

PARTS = 10
"""The text is looked at in tenths."""


@dataclass
class Watched:
    """Resident memory after each call of the model."""

    resident: list[int] = field(default_factory=list)

    def __call__(self, done: int, total: int) -> None:
        self.resident.append(resident_bytes())


def one_document(config: RunConfig, tokens: int) -> EvaluationDocument:
    """The first `tokens` tokens of the run's shards as one document."""
    paths = [source.path for source in config.data.sources]
    everything = config.model_copy(
        update={"data": config.data.model_copy(update={"validation": (*config.data.validation, *paths), "sources": ()})}
    )
    parts, count = [], 0
    for document in held_out_documents(everything):
        parts.append(document.tokens[: document.predicted_tokens])
        count += document.predicted_tokens
        if count > tokens:
            break
    text = torch.cat(parts)[: tokens + 1]
    length = (len(text) - 1) // config.model.chunk_size * config.model.chunk_size
    return EvaluationDocument("everything", text[:length], text[1 : length + 1], length, None)


def tenths(chunks: Sequence[Bucket]) -> list[float]:
    """Mean loss by tenth of the text, from those of its chunks."""
    losses = np.array([bucket.loss for bucket in chunks])
    return [float(part.mean()) for part in np.array_split(losses, PARTS)]


def measure(run: Path, tokens: int) -> dict[str, Any]:
    """One model's reading of the text."""
    trained = open_run(run)
    config = trained.config
    document = one_document(config, tokens)
    evaluator = Evaluator(trained.load(), rows=16)
    watched = Watched()
    begin = time.perf_counter()
    read = evaluator.losses([document], progress=watched)
    seconds = time.perf_counter() - begin
    resets = evaluator.memory_use([document], trained=read).memory_off_by_chunk
    steady = watched.resident[len(watched.resident) // 50 :]
    return {
        "tokens": document.predicted_tokens,
        "finite": all(np.isfinite([bucket.loss for bucket in read.by_chunk])),
        "loss_by_tenth": tenths(read.by_chunk),
        "gain_by_tenth": [off - on for on, off in zip(tenths(read.by_chunk), tenths(resets), strict=True)],
        "resident_most_over_least": max(steady) / min(steady),
        "tokens_per_second": document.predicted_tokens / seconds,
    }


def main() -> None:
    """Parse, read, print a table, write JSON."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--output", type=Path, default=OUTPUT / "streaming.json")
    arguments = parser.parse_args()
    threads = fix_threads()
    found = {run.name: measure(run, arguments.tokens) for run in arguments.runs}
    rows = [
        [
            name,
            f"{r['loss_by_tenth'][0]:.3f}",
            f"{r['loss_by_tenth'][-1]:.3f}",
            f"{r['gain_by_tenth'][0]:+.4f}",
            f"{r['gain_by_tenth'][-1]:+.4f}",
            f"{r['resident_most_over_least']:.3f}",
            f"{r['tokens_per_second']:,.0f}",
        ]
        for name, r in found.items()
    ]
    heads = ["run", "loss, 1st tenth", "last", "gain, 1st tenth", "last", "memory, most over least", "tokens/s"]
    print(table(heads, rows))
    picture = arguments.output.with_suffix(".png")
    gains = {name: {f"{i + 1}": gain for i, gain in enumerate(r["gain_by_tenth"])} for name, r in found.items()}
    beside(picture, "What the memory gives, by tenths of the text", "nats per token", gains)
    publish({"threads": threads, "runs": found, "picture": str(picture)}, arguments.output)


if __name__ == "__main__":
    main()
