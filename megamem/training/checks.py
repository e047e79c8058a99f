"""The checks that refuse a run before processes start and the libraries of parallel training are imported."""

from __future__ import annotations

from collections.abc import Sequence
from fractions import Fraction
from importlib.util import find_spec

from checkpoints.folder import checkpoints_in
from checkpoints.location import run_checkpoints
from megamem.config.budget import HALF, steps_for
from megamem.config.run import RunConfig
from megamem.data.feeder import Feeder
from megamem.errors import ConfigError, DataError, DependencyError
from megamem.evaluation.corruption import corrupted
from megamem.ops.attention.softmax import check_backend
from megamem.ops.deep_memory.kernels import check_kernel
from megamem.ops.linear_recurrence.fla import check_recurrence
from megamem.parallel.topology import data_parallel_size
from megamem.pipeline.distillation import check_teacher
from megamem.pipeline.freezing import check_learns
from megamem.pipeline.start_weights import check_start, whole_model
from megamem.planning.auto import divided
from megamem.planning.plan import checkpoint_bytes
from megamem.runs.folder import check_run_folder
from megamem.runs.result import read_result
from megamem.training.phases import phases_of
from tokenization.tokenizer import Tokenizer, vocabulary_hash

MUCH_PADDING, REFUSED_PADDING = Fraction(1, 10), HALF
"""Shares of padding among all positions above which a run warns, and above which it does not start."""
REMEDY = "join documents (data.documents: join)"


def check_kernels(config: RunConfig) -> None:
    """Raise ConfigError where the kernels that the run names do not exist on this machine."""
    check_backend(config.model.attention_kernel)
    check_recurrence(config.model.recurrence_kernel)
    check_kernel(config.model.deep_memory_kernel)


def check_layout(config: RunConfig, processes: int) -> int:
    """Return the data-parallel size of `processes` processes. Raises ConfigError if model and batch do not fit it."""
    dp = data_parallel_size(processes, config.parallel.tp, config.parallel.pp, config.parallel.dp)
    for number, phase in enumerate(config.phases):
        try:
            phase.accumulation_steps(dp)
        except ValueError as error:
            raise ConfigError(f"training.phases.{number - 1}: {error}" if number else str(error)) from None
    return dp


def check_run(config: RunConfig, processes: int) -> None:
    """Refuse what can be refused before processes start, but for what `check_kernels` does.

    Where fields are still left to the planner, any layout stands for the one that it will choose.

    Raises:
        MegamemError: layout, data, run folder or an optional package; the message is one line.
    """
    config = divided(config, processes)
    dp = check_layout(config, processes)
    mode = config.logging.wandb.mode
    if mode != "disabled" and find_spec("wandb") is None:
        raise DependencyError(
            f"logging.wandb.mode {mode} needs the package wandb, which is missing; install it or set "
            "logging.wandb.mode=disabled"
        )
    feeders = open_feeders(config, dp_rank=0, dp_size=dp)
    for feeder in feeders:
        feeder.check_files()
    check_learns(config)
    if config.evaluation.corruption.share:
        with corrupted(whole_model(config.model), config.evaluation.corruption):
            pass  # raises where the evaluation at the end could not be made
    starts = config.training.init_from is not None and _begins(config)
    taught = config.training.distill is not None and read_result(config.run_folder) is None
    if starts or taught:
        tokenizer = vocabulary_hash(config.data.tokenizer)
        if taught:
            check_teacher(config, tokenizer)
        if starts:
            check_start(config, tokenizer)
    config = with_steps(config, feeders)
    check_run_folder(config, checkpoint_bytes(config))


def _begins(config: RunConfig) -> bool:
    """Return whether a run has no checkpoint to go on from; its own one has weights that files may no longer have."""
    if config.checkpoint.resume != "auto":
        return config.checkpoint.resume == "none"
    return not checkpoints_in(run_checkpoints(config))


def open_feeders(config: RunConfig, dp_rank: int, dp_size: int) -> list[Feeder]:
    """Open the data of each phase of a run; see `open_feeder`. An error names the phase."""
    feeders = []
    for number, phase in enumerate(phases_of(config)):
        try:
            feeders.append(open_feeder(phase.config, dp_rank, dp_size, phase.first_sample))
        except (ConfigError, DataError) as error:
            if not number:
                raise
            raise type(error)(f"training.phases.{number - 1}: {error}") from None
    return feeders


def open_feeder(config: RunConfig, dp_rank: int, dp_size: int, first_sample: int = 0) -> Feeder:
    """Open the data of one data-parallel rank.

    Raises:
        DataError: a source is missing or damaged, or does not fit the model.
        ConfigError: sizes or shares do not fit, or most of what would be read is padding.
    """
    feeder = Feeder(
        config.data,
        chunk_size=config.model.chunk_size,
        global_rows=config.global_rows,
        micro_batch_size=config.training.micro_batch_size,
        dp_rank=dp_rank,
        dp_size=dp_size,
        first_sample=first_sample,
    )
    feeder.check_vocab(config.model.vocab_size)
    if feeder.padding > REFUSED_PADDING and not config.data.allow_padding:
        raise ConfigError(f"{_padding(feeder)}; {REMEDY}, or set data.allow_padding: true to train all the same")
    return feeder


def with_steps(config: RunConfig, feeders: Sequence[Feeder]) -> RunConfig:
    """Return the configuration with the number of steps that its budget of tokens takes, beside the budget.

    Every part of a run finds the same number, as it follows from configuration and data alone. (Runs of several phases
    have no such budget.)

    Raises:
        ConfigError: it names both steps and tokens, and the tokens take another number of steps; or it names steps
            beyond the last one.
    """
    training = config.training
    if training.tokens is None:
        return config
    steps = steps_for(training.tokens, training.batch_tokens, feeders[0].padding)
    if training.steps not in (None, steps):
        raise ConfigError(
            f"training: steps {training.steps:,} and tokens {training.tokens:,} do not agree: that many tokens of this "
            f"data take {steps:,} steps; give either steps or tokens"
        )
    resolved = config.model_copy(update={"training": training.model_copy(update={"steps": steps})})
    try:
        resolved.check_steps()
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return resolved


def steps_of(config: RunConfig, tokens: int) -> int:
    """Return the number of steps that a budget of tokens takes of the data of the run's phases, the last one as long as
    it takes. The data are opened.

    Raises: DataError or ConfigError as `open_feeder`.
    """
    left, phases = Fraction(tokens), phases_of(config)
    for phase in phases:
        feeder, positions = open_feeder(phase.config, 0, 1, phase.first_sample), phase.config.training.batch_tokens
        steps = steps_for(left, positions, feeder.padding)
        if steps <= phase.steps:
            break
        left -= phase.steps * positions * (1 - feeder.padding)
    return phase.first_step + steps


def data_identity(config: RunConfig) -> tuple[list[str], str | None]:
    """Return the fingerprints of the data of each phase, and the tokenizer's hash. The data are opened.

    Raises: DataError or ConfigError as `open_feeder`.
    """
    tokenizer = Tokenizer.load(config.data.tokenizer) if config.data.tokenizer else None
    return [feeder.fingerprint() for feeder in open_feeders(config, 0, 1)], tokenizer.hash if tokenizer else None


def padding_warnings(feeders: Sequence[Feeder]) -> list[str]:
    """Return a line for each phase in which padding wastes much of the work."""
    lines = [f"warning: {_padding(feeder)}; {REMEDY}" for feeder in feeders if feeder.padding > MUCH_PADDING]
    return list(dict.fromkeys(lines))


def _padding(feeder: Feeder) -> str:
    """Return how much padding a run will read, and which source brings most of its own."""
    worst = max(feeder.reports, key=lambda report: report.padding_share)
    return (
        f"data: {float(feeder.padding):.0%} of all positions are padding "
        f"({float(worst.padding_share):.0%} of those of {worst.path})"
    )
