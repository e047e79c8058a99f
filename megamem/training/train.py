"""One rank of a training job, from its configuration to the result of the run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import suppress

import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import ProcessGroup

from checkpoints.folder import Checkpoint
from checkpoints.location import run_checkpoints
from checkpoints.records import RunFacts
from checkpoints.resume import all_agree, load_initial_weights
from checkpoints.saver import Saver
from checkpoints.weights import WeightsHeader, save_weights
from megamem.config.run import RunConfig
from megamem.data.feeder import Feeder
from megamem.errors import CheckpointError, NonFiniteError, StoreError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.report import finite, result_table
from megamem.evaluation.run import final_evaluation
from megamem.parallel.topology import Topology
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.embedding_cache import keep_embeddings
from megamem.pipeline.engine import build_engine
from megamem.pipeline.start_weights import shown_files
from megamem.planning.arithmetic import describe
from megamem.runs.folder import RunLock, create_run_folder, lock_patience
from megamem.runs.heartbeat import Heartbeat
from megamem.runs.result import Figure, RunResult, read_result, write_result
from megamem.runs.sinks.base import Sink
from megamem.runs.sinks.build import build_sinks, closing
from megamem.training.build import (
    build_callbacks,
    build_instruments,
    build_metrics,
    build_task_evaluations,
    build_validation,
    held_out_documents,
    open_task_suites,
    open_tokenizer,
    start_topology,
)
from megamem.training.callbacks.bad_steps import BadSteps
from megamem.training.callbacks.memory_sizes import MemorySizes
from megamem.training.callbacks.metrics import Throughput, peak_memory_by_rank
from megamem.training.callbacks.objective_terms import ObjectiveTerms
from megamem.training.callbacks.task_evaluations import TaskEvaluations, missing_tasks
from megamem.training.checkpointing import (
    Checkpoints,
    check_folder_everywhere,
    cpu_group,
    on_rank_0,
    placed_as_before,
    resume,
    resume_point,
    run_facts,
)
from megamem.training.checks import open_feeders, padding_warnings, with_steps
from megamem.training.description import describe_learning, describe_phases, describe_stages, describe_start
from megamem.training.loop import Callback, Trainer
from megamem.training.watchdog import Watchdog, beat_interval

_log = logging.getLogger("megamem")


def train(config: RunConfig, console: Console) -> RunResult | None:
    """Run a whole training on this rank.

    Returns:
        The result of the run; None if it was stopped before its last step. Figures that one rank measures for all
        (LZMA's, the picture) are None on other ranks than 0.

    Raises:
        MegamemError: the run cannot start, or had to be given up.
    """
    topology = start_topology(config)
    group = cpu_group(config.parallel.timeout_s)
    interval = beat_interval(config.parallel.stall_timeout_s)
    heartbeat = Heartbeat(config.run_folder if topology.rank == 0 else None, interval)
    result = None
    try:
        with RunLock(config.run_folder) as lock, heartbeat:
            on_rank_0(lambda: lock.take(lock_patience()), group)
            result = _train_in_folder(config, console, topology, group, heartbeat)
    except NonFiniteError:
        dist.barrier(group)  # as below
        raise
    if result is None:
        # a launcher that sees one rank end with a failure, or STOPPED, ends the others: none may still be closing then
        dist.barrier(group)
    dist.destroy_process_group(group)
    return result


def _train_in_folder(
    config: RunConfig, console: Console, topology: Topology, group: ProcessGroup, heartbeat: Heartbeat
) -> RunResult | None:
    """Train and evaluate in the run folder, which this job holds."""
    is_rank_0 = topology.rank == 0
    feeders = open_feeders(config, topology.dp_rank, topology.dp_size)
    config = with_steps(config, feeders)
    tokenizer = open_tokenizer(config)
    fingerprints = [feeder.fingerprint() for feeder in feeders]
    facts = run_facts(config, fingerprints, tokenizer)

    check_folder_everywhere(config, group)
    checkpoint, skipped = resume_point(config, facts, group)
    on_rank_0(lambda: create_run_folder(config), group)
    if checkpoint is not None and (result := _finished(config, checkpoint)):
        if is_rank_0:
            console.print(f"{config.run_folder}: ended after step {checkpoint.step} already; these are its figures")
        return result
    heartbeat.begin(config.steps)

    config = placed_as_before(config, checkpoint)
    suites = open_task_suites(config, tokenizer, group)
    engine = build_engine(config, topology, draw=checkpoint is None)
    if is_rank_0:
        start = describe_start(config) if checkpoint is None else []
        more = [*start, *describe_learning(config), *skipped, *missing_tasks(suites)]
        _print_facts(engine, feeders, checkpoint, more, console)
    # nothing of ours draws from the global generators; what libraries drew while they were imported differs by process
    torch.manual_seed(config.training.seed + topology.rank)

    sinks: list[Sink] = []
    if is_rank_0:
        resumed_at = checkpoint.step if checkpoint else 0
        sinks = [heartbeat, *build_sinks(config, config.run_folder, console, resumed_at)]
    with closing(sinks), Watchdog(topology, config.parallel.stall_timeout_s, on_end=heartbeat.failed) as watchdog:
        saver = Saver(
            run_checkpoints(config), config.checkpoint, group, lambda line: console.print(line, highlight=False)
        )
        bad_steps, throughput = BadSteps(config.training.max_bad_steps), Throughput()
        tasks = build_task_evaluations(engine, suites, tokenizer, sinks, watchdog.progress)
        callbacks = _callbacks(engine, sinks, saver, facts, bad_steps, throughput, watchdog)
        callbacks += [tasks] if tasks else []
        trainer = Trainer(config, topology, engine, feeders, callbacks, watchdog.progress)
        heartbeat.follow(trainer, watchdog)
        _load_start(trainer, checkpoint, bad_steps, group)

        _fit(trainer, saver, facts, group)
        if trainer.stopped:
            # while all are watched: nobody leaves before rank 0 has written
            dist.barrier(group)
            return None
        result = _evaluate(trainer, throughput, sinks, console, tasks)
    engine.close()
    return result


def _finished(config: RunConfig, checkpoint: Checkpoint) -> RunResult | None:
    """Return the result of a run that has nothing left to do, None if it has."""
    result = read_result(config.run_folder) if checkpoint.step >= config.steps else None
    return result if result is not None and result.steps == config.steps else None


def _print_facts(
    engine: TrainingEngine,
    feeders: Sequence[Feeder],
    checkpoint: Checkpoint | None,
    more: Sequence[str],
    console: Console,
) -> None:
    """Print the arithmetic of the run, its sources, its stages, where it resumes, and before that what `more` says."""
    lines = [
        *describe(engine.config, engine.topology.dp_size, [feeder.padding for feeder in feeders]),
        *(report.summary() for report in feeders[0].reports),
        *describe_phases(engine.config, feeders),
        *padding_warnings(feeders),
        *describe_stages(engine),
        *more,
        *([f"goes on from {checkpoint.path}"] if checkpoint else []),
    ]
    for line in lines:
        console.print(line, highlight=False)


def _callbacks(
    engine: TrainingEngine,
    sinks: Sequence[Sink],
    saver: Saver,
    facts: RunFacts,
    bad_steps: BadSteps,
    throughput: Throughput,
    watchdog: Watchdog,
) -> list[Callback]:
    """Build the callbacks of a run, in the order they act: each log record passes all of them."""
    validation = build_validation(engine, sinks, watchdog.progress)
    return [
        throughput,
        bad_steps,
        *([ObjectiveTerms(names)] if len(names := engine.loss_names) > 1 else []),
        MemorySizes(engine.config.model.component_specs(), engine.config.logging.every),
        *build_callbacks(engine.config),
        build_metrics(engine.config, engine.topology, sinks),
        *([validation] if validation else []),
        *build_instruments(engine),
        Checkpoints(engine, saver, facts, bad_steps, lambda: validation.last if validation else None),
    ]


def _load_start(trainer: Trainer, checkpoint: Checkpoint | None, bad_steps: BadSteps, group: ProcessGroup) -> None:
    """Load what the run starts from: its own checkpoint, else weights that its configuration names."""
    files = trainer.config.training.init_from
    if checkpoint is not None:
        trainer.watch(f"loading {checkpoint.path}")
        resume(trainer, checkpoint, bad_steps, group)
    elif files is not None:
        trainer.watch(f"loading {shown_files(files)}")
        load_initial_weights(trainer.engine, group)
    if trainer.config.training.embedding_cache is not None:
        keep_embeddings(trainer.engine, trainer.config.training.embedding_cache)


def _fit(trainer: Trainer, saver: Saver, facts: RunFacts, group: ProcessGroup) -> None:
    """Train, and save the weights whatever comes of it.

    Raises: NonFiniteError if the run had to be given up; on all ranks CheckpointError if weights cannot be written.
    """

    def save() -> str | None:
        """Save the weights; return in one line why this rank could not."""
        trainer.watch("saving the weights")
        path = trainer.config.weights
        header = WeightsHeader.of_model(trainer.config.model, facts.get("vocabulary_sha256"))
        try:
            save_weights(trainer.engine.parameters(), trainer.topology, path, header)
        except OSError as error:
            return f"{path}: cannot be written ({error.strerror}); once it can, the same command writes it"
        return None

    try:
        trainer.fit()
    except NonFiniteError:
        # all ranks raise it in the same step, with the weights as they were before the bad steps
        if (failure := save()) is not None:
            _log.warning(failure)
        # a save under way uses the group; that it failed is not what ends the run
        with suppress(CheckpointError, StoreError):
            saver.wait(trainer.watch)
        # while all are watched: nobody leaves before rank 0 has written
        dist.barrier(group)
        raise
    all_agree(save(), group)


def _evaluate(
    trainer: Trainer,
    throughput: Throughput,
    sinks: Sequence[Sink],
    console: Console,
    tasks: TaskEvaluations | None,
) -> RunResult:
    """Evaluate the trained model on held-out text and on suites of tasks; rank 0 writes the result and shows it."""
    config, topology, engine = trainer.config, trainer.topology, trainer.engine
    memory = peak_memory_by_rank(topology)
    figures: dict[str, Figure] = {}
    if config.data.validation:
        found = final_evaluation(
            Evaluator(engine.stage, topology, config.evaluation.rows),
            lambda: held_out_documents(config),
            open_tokenizer(config),
            trainer.phase.config,
            folder=config.run_folder,
            console=console,
            watch=trainer.watch,
        )
        # the full reports are in evaluation.json
        figures = finite(found.figures())
    if tasks is not None:
        figures = {**figures, **finite(tasks.final(trainer, console))}
    result = RunResult(
        run_dir=str(config.run_folder),
        steps=trainer.step,
        tokens=trainer.tokens,
        tokens_per_second=throughput.tokens_per_second(),
        memory_gib_by_rank=tuple(round(peak / 2**30, 3) for peak in memory),
        evaluation=figures,
    )
    if topology.rank == 0:
        write_result(config.run_folder, result)
        console.print(result_table(result.to_dict(), title=config.name))
        console.print(f"picture: {figures.get('picture')}", highlight=False)
        for sink in sinks:
            sink.finish(result)
    return result
