"""The results of a study's runs in one table: a row for each run and evaluation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow
import torch
from pyarrow import csv, parquet

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.parameters import parameter_counts
from megamem.costs.state_bytes import model_state_bytes
from megamem.errors import ConfigError, MegamemError
from megamem.evaluation.metrics import read_points
from megamem.evaluation.recovered import (
    GAP,
    OVER_CONTROL,
    ModelLosses,
    NoGapError,
    as_figures,
    check_same,
    read_losses,
    recovered_share,
    share_over_control,
)
from megamem.evaluation.report import METRICS, REPORT
from megamem.evaluation.run import validations_read_the_same
from megamem.evaluation.suites.result import read_suites
from megamem.runs.result import read_result
from megamem.study.config import EVALUATION, SEED, TRAINED, RecoveredConfig, StudyConfig
from megamem.study.grid import PlannedRun, describe
from megamem.study.tasks import changes_of, check_begun, figures
from megamem.training.phases import phases_of, training_flops

RUN = "run"
"""Column of the run's name."""


@dataclass(frozen=True)
class Record:
    """The numbers of one finished run, or of one evaluation of its model."""

    run: str
    """Name of the run."""
    labels: Mapping[str, str]
    """Value of each axis, the seed and the evaluation, by name."""
    figures: Mapping[str, float]
    """Every number of the result, of `planned_figures`, `training_figures` and, of the trained model,
    `suite_figures` and `recovered_figures`, by name."""
    incomparable: str = ""
    """Why there is no recovered share, although all models are evaluated; empty if there is one or none is asked."""

    @property
    def evaluation(self) -> str:
        """Name of the evaluation; `trained` for that of the training itself."""
        return self.labels[EVALUATION]

    @property
    def row(self) -> dict[str, float | str]:
        """All of it by name, as a row of a table."""
        return {**self.figures, **self.labels, RUN: self.run}


def records(study: StudyConfig, runs: Sequence[PlannedRun]) -> list[Record]:
    """Return a record for each finished run and evaluation.

    Raises: RunFolderError where a folder holds a run that was begun with another configuration.
    """
    check_begun(study, runs)
    found = []
    for run in runs:
        trained = read_result(run.folder)
        if trained is None or figures(run, TRAINED, None) is None:
            continue
        planned = {**planned_figures(run.config), **training_figures(run.config, trained.tokens, trained.tokens)}
        shares, incomparable = dict[str, float](), ""
        try:
            shares = recovered_figures(study.recovered, run, runs)
        except MegamemError as error:  # the runs are done, and have other figures
            incomparable = str(error)
        for evaluation, change in {TRAINED: None, **changes_of(study, run)}.items():
            if (result := figures(run, evaluation, change)) is not None:
                labels = {**run.labels, EVALUATION: evaluation}
                numbers = {name: value for name, value in _numbers(result).items() if name != "tokens"}
                own = {**shares, **suite_figures(run.folder, trained.steps)} if evaluation == TRAINED else {}
                found.append(Record(run.name, labels, {**numbers, **planned, **own}, incomparable))
    return found


def recovered_figures(against: RecoveredConfig | None, run: PlannedRun, runs: Sequence[PlannedRun]) -> dict[str, float]:
    """Return the gap and what a run's model recovers of it, with intervals.

    There is nothing before all models are evaluated, and the gap alone where full attention is no better than local.

    Args:
        against: where the other models' losses are.
        run: the run, which is trained.
        runs: all of the study.
    Raises: ConfigError where models were not evaluated on the same text; DataError as `recovered_share`.
    """
    if against is None:
        return {}
    folders = [_evaluated(named, run, runs) for named in (against.local, against.full, run.labels)]
    losses = [read_losses(folder) for folder in folders if folder is not None]
    if len(losses) < len(folders):
        return {}
    local, full, memory = losses
    try:
        shares = recovered_share(local, full, memory).figures()
    except NoGapError as error:  # the runs are done, and have other figures
        return {GAP: error.gap}
    control = None if against.control is None else _evaluated(against.control, run, runs)
    if control is not None:
        over = share_over_control(local, full, memory, read_losses(control))
        shares |= as_figures({OVER_CONTROL: over})
    return {name: value for name, value in shares.items() if value is not None and math.isfinite(value)}


def recovered_curve(against: RecoveredConfig | None, run: PlannedRun, runs: Sequence[PlannedRun]) -> dict[float, float]:
    """Return the recovered share of a run by training tokens, from its validations while training.

    Empty where these read other text than the evaluation at the end, or that is not the text of local and full
    attention (which is known as soon as the run has ended); where those are not evaluated; or without a gap between
    them.

    Args:
        against: where the losses of local and full attention are.
        run: the run, finished or not.
        runs: all of the study.
    """
    if against is None or not validations_read_the_same(run.config):
        return {}
    try:
        folders = [_evaluated(named, run, runs) for named in (against.local, against.full, run.labels)]
        losses = [read_losses(folder) for folder in folders if folder is not None]
        for other in losses[1:]:  # the run's own last, if it has ended
            check_same(losses[0], other)
    except MegamemError:
        return {}
    if None in folders[:2] or losses[0].chunk_size != run.config.model.chunk_size:
        return {}
    local, full = (each.beyond_first_chunk_loss for each in losses[:2])
    if not local > full:
        return {}
    points = curve(run, "val_beyond_first_chunk_loss")
    return {tokens: (local - loss) / (local - full) for tokens, loss in points.items()}


def check_recovered(against: RecoveredConfig | None, runs: Sequence[PlannedRun]) -> None:
    """Check what others are measured against, before any run is trained.

    Raises: ConfigError where a run or a file is missing, or where chunks or texts are others; DataError for a damaged
        file.
    """
    if against is None:
        return
    files: list[ModelLosses] = []
    for side, named in (("local", against.local), ("full", against.full), ("control", against.control)):
        if isinstance(named, Mapping):
            for run in runs:
                _reference(named, run, runs)
        elif named is not None:
            if not (named / REPORT).is_file():
                raise ConfigError(
                    f"recovered.{side}: {named} has no {REPORT}; `megamem evaluate MODEL --out {named}` writes it"
                )
            files.append(read_losses(named))
    sizes = sorted({run.config.model.chunk_size for run in runs})
    for file in files:
        check_same(files[0], file)
        if file.chunk_size not in sizes:  # where only some runs have others, these have no recovered share
            raise ConfigError(
                f"recovered: {file.origin} has chunks of {file.chunk_size} tokens, the study's runs of "
                f"{', '.join(map(str, sizes))}; evaluate it with model.chunk_size={sizes[0]}"
            )


def _evaluated(named: Path | Mapping[str, str], run: PlannedRun, runs: Sequence[PlannedRun]) -> Path | None:
    """Return the folder of an evaluation: the given one, or that of the run whose labels differ as `named` says.

    None where there is no evaluation, or none of the run as the study has it now. Raises: as `_reference`.
    """
    if isinstance(named, Path):
        folder = named
    else:
        other = _reference(named, run, runs)
        if figures(other, TRAINED, None) is None:
            return None
        folder = other.folder
    return folder if (folder / REPORT).exists() else None


def _reference(named: Mapping[str, str], run: PlannedRun, runs: Sequence[PlannedRun]) -> PlannedRun:
    """Return the run whose labels differ from those of `run` as `named` says.

    Raises: ConfigError where the study has no such run.
    """
    wanted = {**run.labels, **named}
    for other in runs:
        if other.labels == wanted:
            return other
    raise ConfigError(f"recovered: {run.name} is compared with {describe(wanted)}, which the study leaves out")


def suite_figures(folder: Path, step: int) -> dict[str, float]:
    """Return the figures of the suites that a run's model was asked, such as `commonsense.average`.

    Of several of one name those of whole suites count, then those of the most documents.

    Args:
        folder: of the run.
        step: steps of the trained model: results of earlier checkpoints do not count.
    """
    found = [suite for suite in read_suites(folder) if suite.step == step and not suite.unfinished]
    found.sort(key=lambda suite: (not suite.differs, suite.limit or math.inf))
    # a perplexity beyond a float is none that could be averaged
    return {name: value for suite in found for name, value in suite.figures().items() if math.isfinite(value)}


def _numbers(result: Mapping[str, object]) -> dict[str, float]:
    """Return every number of a result; of those that each rank has one of, the largest."""
    numbers = {k: v for k, v in result.items() if isinstance(v, int | float) and not isinstance(v, bool)}
    peaks = result.get("memory_gib_by_rank")
    if isinstance(peaks, list) and peaks:
        numbers["peak_memory_gib"] = max(peaks)
    return numbers


def planned_figures(config: RunConfig) -> dict[str, float]:
    """Return the figures that follow from a run's configuration alone.

    `parameters`, `non_embedding_parameters` and `memory_floats`: numbers that the memories of all layers hold for one
    row at the end of a training sequence.
    """
    counts = parameter_counts(config.model)
    return {
        "parameters": counts["total"],
        "non_embedding_parameters": counts["non_embedding"],
        "memory_floats": memory_floats(config.model, config.data.sequence_length),
    }


def training_figures(config: RunConfig, tokens: float, final_tokens: float | None = None) -> dict[str, float]:
    """Return `training_tokens` and `training_flops` of a run after `tokens` tokens, as it logged them.

    final_tokens: those of the whole run, which are fewer than its positions where it has padding; if they are known.
    """
    positions = _positions(config)
    of_a_position = 1.0 if final_tokens is None else final_tokens / sum(positions)
    left, flops = tokens / of_a_position, 0.0
    costs = training_flops(config)
    for number, per_token in zip(positions, costs, strict=True):
        read = min(left, number)
        flops, left = flops + read * per_token, left - read
    # a run may have been made longer than its configuration says
    return {"training_tokens": tokens, "training_flops": of_a_position * (flops + left * costs[-1])}


def mean_training_flops(config: RunConfig) -> float:
    """Return the FLOPs per token of forward and backward pass, a mean over the phases of the run."""
    positions = _positions(config)
    return training_figures(config, sum(positions))["training_flops"] / sum(positions)


def _positions(config: RunConfig) -> list[int]:
    """Return the positions that each phase of a run reads."""
    return [phase.steps * phase.config.training.batch_tokens for phase in phases_of(config)]


def memory_floats(model: ModelConfig, context_tokens: int) -> int:
    """Return how many numbers all layers' memories hold for one row after `context_tokens`, without counters."""
    double, single = (
        model_state_bytes(model, 1, dtype, context_tokens=context_tokens)["memory"]
        for dtype in (torch.float64, torch.float32)
    )
    return (double - single) // 4  # integers take as many bytes in both


def write_table(study: StudyConfig, found: Sequence[Record], folder: Path) -> None:
    """Write records.csv and records.parquet: labels first, then figures; empty where a record has no such figure."""
    rows = [record.row for record in found]
    labels = [RUN, *study.axes, SEED, EVALUATION]
    names = [*labels, *dict.fromkeys(name for row in rows for name in row if name not in labels)]
    columns = {
        name: pyarrow.array([row.get(name) for row in rows], pyarrow.string() if name in labels else None)
        for name in names
    }
    table = pyarrow.table(columns)
    parquet.write_table(table, folder / "records.parquet")
    csv.write_csv(table, folder / "records.csv")


def curve(run: PlannedRun, figure: str) -> dict[float, float]:
    """Return a figure of a run's metrics.jsonl by training tokens, as far as the run got; empty without the file."""
    return dict(read_points(run.folder / METRICS, figure))
