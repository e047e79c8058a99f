"""What the benchmarks share: model variants, interleaved timing, tables, records."""

from __future__ import annotations

import json
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from megamem.config.load import parse_config, read_yaml
from megamem.config.model import ModelConfig
from megamem.config.training import Recompute, WindowOrder
from megamem.data.batch import Batch
from megamem.model.compiled import compile_pointwise
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.train_chunk import chunk_places
from megamem.pipeline.window import Window

ROOT = Path(__file__).resolve().parents[1]
OUTPUT = Path("runs/benchmarks")


def shipped_model(name: str) -> Path:
    """Return the file of configs/models with this name, such as `elastic-100m`."""
    (path,) = (ROOT / "configs" / "models").glob(f"*/{name}.yaml")
    return path


def model_from(path: Path, **changes: Any) -> ModelConfig:
    """The `model` section of a YAML file of configs/, with fields changed."""
    return parse_config(ModelConfig, {**read_yaml(path)["model"], **changes}, str(path))


def without_memory(model: ModelConfig, mixer: str = "local_attention") -> ModelConfig:
    """The same shape with `mixer` at every layer."""
    return parse_config(ModelConfig, {**model.model_dump(mode="json"), "memory": [], "mixer": mixer}, "benchmark")


def random_batch(
    model: ModelConfig, chunks: int, rows: int, seed: int = 0, begin: Sequence[int] | None = None
) -> Batch:
    """Random tokens, on the CPU; the document of row r starts at chunk begin[r] (0) and at the row's first token."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(model.vocab_size, (chunks * model.chunk_size + 1, rows), generator=generator)
    starts = np.arange(0, chunks * model.chunk_size, model.chunk_size, dtype=np.int64)[:, None].repeat(rows, axis=1)
    for row, chunk in enumerate(begin or ()):
        starts[chunk:, row] -= chunk * model.chunk_size
    return Batch(tokens[:-1].contiguous(), tokens[1:].contiguous(), starts, tuple(range(rows)))


def model_run(
    model: ModelConfig,
    chunks: int,
    rows: int = 1,
    order: WindowOrder = "chunks",
    recompute: Recompute = False,
    compiled: bool = False,
) -> Callable[[], float]:
    """Return a function that takes random sequences of so many chunks through a new model, see `window_run`.

    compiled: as with `training.compile`.
    """
    stage = build_stage(model, PlainLinears())
    stage.recompute = recompute
    initialize_parameters(stage, seed=0)
    if compiled:
        compile_pointwise(stage)
    return window_run(stage, random_batch(model, chunks, rows), order)


def window_run(stage: Stage, batch: Batch, order: WindowOrder = "chunks") -> Callable[[], float]:
    """Return a function that takes a batch forward and backward in one window, and returns the loss per token."""
    window = Window(stage, NextToken(stage.config), order=order)
    scale, dtype = torch.tensor(1.0 / batch.tokens.numel()), next(stage.parameters()).dtype

    def run() -> float:
        stage.zero_grad(set_to_none=True)
        states = stage.initial_states(batch.tokens.shape[1], torch.device("cpu"), dtype)
        loss, _, _ = window(batch.tokens, batch.labels, chunk_places(batch), states, scale)
        loss.backward()
        return loss.item()

    return run


@dataclass(frozen=True)
class Times:
    """Seconds of each repetition of one run."""

    wall: list[float]
    processor: list[float]
    """Of all threads of this process: what other processes take is not in it."""


def interleaved(
    runs: Mapping[str, Callable[[], object]], repetitions: int, budget_s: float = float("inf"), warmup: bool = True
) -> dict[str, Times]:
    """Times of each run, taken in turns (A B, B A, A B, ...) so that a busy machine slows all of them alike.

    Ends after whole turns once `budget_s` is spent, but not before one turn. Warm-up turns are not recorded.
    """
    times = {name: Times([], []) for name in runs}
    begun = time.perf_counter()
    if warmup:
        for run in runs.values():
            run()
    for turn in range(repetitions):
        order = list(runs) if turn % 2 == 0 else list(reversed(runs))
        for name in order:
            start = time.perf_counter(), time.process_time()
            runs[name]()
            times[name].wall.append(time.perf_counter() - start[0])
            times[name].processor.append(time.process_time() - start[1])
        spent = time.perf_counter() - begun
        if spent * (turn + 2) / (turn + 1) > budget_s:
            break
    return times


def summary(values: Sequence[float]) -> dict[str, float]:
    """Median, first and last quartile."""
    low, middle, high = statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else [values[0]] * 3
    return {"median": middle, "low": low, "high": high}


def ratio(numerator: Sequence[float], denominator: Sequence[float]) -> dict[str, float]:
    """Median and quartiles of the ratios of values measured in the same turn."""
    return summary([a / b for a, b in zip(numerator, denominator, strict=True)])


def fix_threads(count: int | None = None) -> int:
    """Fix torch's number of threads, all usable cores if not given; returns it."""
    count = count or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def publish(record: Mapping[str, Any], path: Path) -> None:
    """Write a record as JSON to `path` and print it as the last line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(record, indent=2) + "\n", encoding="utf-8")
    print(f"\nwritten to {path}")
    print(json.dumps(record))
