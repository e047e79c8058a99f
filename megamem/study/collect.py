"""What a study's runs have found, in one table: a row for each run and reading."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow
import torch
from pyarrow import csv, parquet

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.flops import flops_per_token
from megamem.costs.parameters import parameter_counts
from megamem.costs.state_bytes import model_state_bytes
from megamem.evaluation.metrics import read_points
from megamem.evaluation.report import METRICS
from megamem.study.config import READING, SEED, TRAINED, StudyConfig
from megamem.study.grid import PlannedRun
from megamem.study.tasks import changes_of, check_begun, figures

RUN = "run"
Record = dict[str, Any]


def records(study: StudyConfig, runs: Sequence[PlannedRun]) -> list[Record]:
    """One flat record per finished run and reading: every number of its result and of `planned_figures`, then labels
    and `reading`.

    Raises: RunFolderError where a folder holds a run that was begun with another configuration.
    """
    check_begun(study, runs)
    found = []
    for run in runs:
        planned = planned_figures(run.config)
        for reading, change in {TRAINED: None, **changes_of(study, run)}.items():
            if (result := figures(run, reading, change)) is not None:
                record: Record = {**_numbers(result), **planned}
                found.append({**record, **run.labels, READING: reading, RUN: run.name})
    return found


def _numbers(result: Mapping[str, Any]) -> Record:
    """Every number of a result; the largest of those that ranks have each."""
    found = {k: v for k, v in result.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    if peaks := result.get("memory_gib_by_rank"):
        found["peak_memory_gib"] = max(peaks)
    return found


def planned_figures(config: RunConfig) -> dict[str, float]:
    """What follows from a run's configuration alone.

    `parameters`, `non_embedding_parameters`, `training_tokens`, `training_flops` and `memory_floats`: numbers that the
    memories of all layers hold for one row at the end of a training sequence.
    """
    counts, tokens = parameter_counts(config.model), config.steps * config.training.batch_tokens
    return {
        "parameters": counts["total"],
        "non_embedding_parameters": counts["non_embedding"],
        "training_tokens": tokens,
        "training_flops": tokens * training_flops(config),
        "memory_floats": memory_floats(config.model, config.data.sequence_length),
    }


def training_flops(config: RunConfig) -> float:
    """Of both passes, per token."""
    return flops_per_token(config.model, config.data.sequence_length)["training"]


def memory_floats(model: ModelConfig, context_tokens: int) -> int:
    """Numbers that all layers' memories hold for one row after `context_tokens`; counters are none."""
    double, single = (
        model_state_bytes(model, 1, dtype, context_tokens=context_tokens)["memory"]
        for dtype in (torch.float64, torch.float32)
    )
    return (double - single) // 4  # integers take as many bytes in both


def write_table(study: StudyConfig, found: Sequence[Record], folder: Path) -> None:
    """Write records.csv and records.parquet: labels first, then figures; empty where a row has none."""
    labels = [RUN, *study.axes, SEED, READING]
    names = [*labels, *dict.fromkeys(name for record in found for name in record if name not in labels)]
    columns = {
        name: pyarrow.array([record.get(name) for record in found], pyarrow.string() if name in labels else None)
        for name in names
    }
    table = pyarrow.table(columns)
    parquet.write_table(table, folder / "records.parquet")
    csv.write_csv(table, folder / "records.csv")


def curve(run: PlannedRun, figure: str) -> dict[float, float]:
    """A figure of a run's metrics.jsonl by tokens trained on, as far as it got; empty without the file."""
    return dict(read_points(run.folder / METRICS, figure))
