"""The checks that refuse a run before processes start and the libraries of parallel training are imported."""

from __future__ import annotations

from importlib.util import find_spec

from megamem.config.run import RunConfig
from megamem.costs.parameters import parameter_counts
from megamem.data.feeder import Feeder
from megamem.errors import ConfigError, DependencyError
from megamem.ops.attention.softmax import check_backend
from megamem.ops.linear_recurrence.fla import check_recurrence
from megamem.parallel.topology import data_parallel_size
from megamem.planning.auto import divided
from megamem.runs.folder import check_run_folder
from megamem.training.phases import phases_of


def check_kernels(config: RunConfig) -> None:
    """Raise ConfigError where the kernels that the run names do not exist on this machine."""
    check_backend(config.model.attention_kernel)
    check_recurrence(config.model.recurrence_kernel)


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
    for feeder in open_feeders(config, dp_rank=0, dp_size=dp):
        feeder.check_files()
    # FP32 weights and two moments
    check_run_folder(config, 12 * parameter_counts(config.model)["total"])


def open_feeders(config: RunConfig, dp_rank: int, dp_size: int) -> list[Feeder]:
    """Open the data of each phase of a run; see `open_feeder`."""
    return [open_feeder(phase.config, dp_rank, dp_size, phase.first_sample) for phase in phases_of(config)]


def open_feeder(config: RunConfig, dp_rank: int, dp_size: int, first_sample: int = 0) -> Feeder:
    """Open the data of one data-parallel rank, checked against the model. Raises DataError or ConfigError."""
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
    return feeder
