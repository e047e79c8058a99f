"""The parts of a run, built from its configuration."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from megamem.config.extensions import CallbackConfig
from megamem.config.run import RunConfig
from megamem.costs.devices import device_name, device_peak
from megamem.data.batch import EvaluationDocument
from megamem.data.feeder import HeldOutDocuments, evaluation_documents
from megamem.errors import ConfigError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.losses import cut_documents
from megamem.evaluation.objective import as_predicted
from megamem.evaluation.result import further_figures
from megamem.evaluation.run import Watch
from megamem.parallel.topology import Topology
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.engine import PipelineEngine
from megamem.runs.sinks.base import LogRecord, Sink
from megamem.training.callbacks.metrics import Metrics
from megamem.training.callbacks.profiler import Profiler
from megamem.training.callbacks.schedule_recorder import ScheduleRecorder
from megamem.training.callbacks.task_evaluations import Suites, TaskEvaluations, open_suites
from megamem.training.callbacks.validation import Validation
from megamem.training.loop import Callback
from megamem.training.phases import training_flops
from tokenization.text_size import TextCounter
from tokenization.tokenizer import Tokenizer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


def start_topology(config: RunConfig) -> Topology:
    """Join the job's processes."""
    parallel = config.parallel
    return Topology.start(
        parallel.tp,
        parallel.dp,
        parallel.pp,
        device=parallel.device,
        timeout_s=parallel.timeout_s,
        tied=config.model.tie_embeddings,
        memories=config.interleaved,
    )


def open_tokenizer(config: RunConfig) -> Tokenizer | None:
    """Open the run's tokenizer, if it names one."""
    return Tokenizer.load(config.data.tokenizer) if config.data.tokenizer else None


def held_out_documents(config: RunConfig) -> HeldOutDocuments:
    """Open the held-out documents; they are read when they are gone through."""
    return evaluation_documents(
        config.data, chunk_size=config.model.chunk_size, sequence_length=config.evaluation.sequence_length
    )


def build_callbacks(config: RunConfig) -> list[Callback]:
    """Build the callbacks that `training.callbacks` names. Raises ConfigError for a kind that builds something else."""
    return [_built(callback) for callback in config.training.callbacks]


def _built(config: CallbackConfig) -> Callback:
    callback = config.build()
    if not isinstance(callback, Callback):
        raise ConfigError(
            f"training.callbacks: {config.kind} builds a {type(callback).__name__}; "
            "expected a megamem.training.loop.Callback"
        )
    return callback


def build_metrics(config: RunConfig, topology: Topology, sinks: Sequence[Sink]) -> Metrics:
    """Build the callback that fills and writes the records of log lines."""
    peak = device_peak(device_name(topology.device), config.training.precision)
    return Metrics(config.logging.every, sinks, training_flops(config), peak)


def build_validation(engine: TrainingEngine, sinks: Sequence[Sink], watch: Watch) -> Validation | None:
    """Build the callback that validates while training, where there is held-out text and `evaluation.every` is set."""
    config = engine.config
    if not config.data.validation or not config.evaluation.every:
        return None
    tokenizer = open_tokenizer(config)
    counter = TextCounter(tokenizer.token_bytes()) if tokenizer else None
    held_out = held_out_documents(config)
    texts = [
        cut_documents(
            as_predicted(held_out, config, counter, reading),
            config.model.chunk_size,
            config.evaluation.max_tokens,
            counter,
        )
        for reading in range(config.training.objective.readings)
    ]
    return Validation(config.evaluation.every, lambda: validate(engine, texts, watch), sinks)


def open_task_suites(config: RunConfig, tokenizer: Tokenizer | None, group: ProcessGroup) -> Suites:
    """Open the suites that `evaluation.tasks` names; none where it names none. A collective call.

    tokenizer: the run's, if it names one; group: all ranks.
    Raises: ConfigError without a tokenizer, and what `open_suites` raises.
    """
    if not config.evaluation.tasks.suites:
        return {}
    if tokenizer is None:
        raise ConfigError("evaluation.tasks.suites: tasks are text; they need data.tokenizer")
    return open_suites(config.evaluation.tasks, tokenizer, group)


def build_task_evaluations(
    engine: TrainingEngine, suites: Suites, tokenizer: Tokenizer | None, sinks: Sequence[Sink], watch: Watch
) -> TaskEvaluations | None:
    """Build the callback that asks the suites of `open_task_suites`; None where there are none."""
    return TaskEvaluations(engine, suites, tokenizer, sinks, watch) if suites and tokenizer else None


def build_instruments(engine: TrainingEngine) -> list[Callback]:
    """Build the callbacks that record schedules and traces, as far as `logging` names them."""
    config = engine.config
    callbacks: list[Callback] = []
    if config.logging.record_step and isinstance(engine, PipelineEngine):
        callbacks.append(ScheduleRecorder(config.logging.record_step, engine))
    if config.logging.profile_steps:
        callbacks.append(Profiler(*config.logging.profile_steps, config.run_folder))
    return callbacks


def validate(engine: TrainingEngine, texts: Sequence[Sequence[EvaluationDocument]], watch: Watch) -> LogRecord:
    """Return the losses of a validation while training. A collective of all ranks.

    texts: documents cut to its bound, as each reading of the objective has them.
    """
    evaluator = Evaluator(engine.stage, engine.topology, engine.config.evaluation.rows)
    report, *further = (
        evaluator.losses(documents, progress=lambda done, of: watch(f"validation, call {done} of {of}"))
        for documents in texts
    )
    names = [objective.names[0] for objective, _ in engine.objective.readings[1:]]
    return {
        "val_loss": report.loss,
        "val_accuracy": report.accuracy,
        "val_bits_per_byte": report.bits_per_byte,
        "val_beyond_first_chunk_loss": report.beyond_first_chunk_loss,
        **further_figures(dict(zip(names, further, strict=True))),
    }
