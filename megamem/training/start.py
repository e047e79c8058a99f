"""From a configuration to a running job: check everything that can be checked first, then build, train, evaluate."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from torch.distributed import ProcessGroup

from checkpoints.folder import FOLDER, Checkpoint
from checkpoints.resume import start_from
from checkpoints.saver import Saver
from checkpoints.weights import new_parameter_names, save_weights
from megamem.config.load import dump_yaml
from megamem.config.run import RunConfig
from megamem.costs.devices import device_name, device_peak
from megamem.costs.flops import flop_costs, flops_per_token
from megamem.costs.parameters import parameter_costs
from megamem.data.batch import Batch, EvaluationDocument
from megamem.data.feeder import evaluation_documents
from megamem.errors import CheckpointError, NonFiniteError
from megamem.evaluation.losses import evaluate_losses
from megamem.evaluation.report import finite, result_table
from megamem.evaluation.run import Watch, final_evaluation
from megamem.files import write_bytes
from megamem.parallel.topology import Topology
from megamem.pipeline.balancing import chunk_flops
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.comparison import compare
from megamem.pipeline.engine import PipelineEngine, build_engine
from megamem.pipeline.schedule import peak_units
from megamem.planning.arithmetic import describe
from megamem.runs.folder import RunLock, create_run_folder, lock_patience
from megamem.runs.heartbeat import Heartbeat
from megamem.runs.sinks import Sink, Wandb, open_sinks
from megamem.training.callbacks import (
    BadSteps,
    Metrics,
    Profiler,
    ScheduleRecorder,
    Validation,
    peak_memory,
    peak_memory_by_rank,
)
from megamem.training.checkpointing import (
    Checkpoints,
    cpu_group,
    go_on,
    on_rank_0,
    placed_as_before,
    resume_point,
    run_facts,
)
from megamem.training.checks import open_feeder
from megamem.training.loop import Callback, Trainer
from megamem.training.watchdog import Watchdog, beat_interval
from tokenization.tokenizer import Tokenizer


def describe_stages(engine: TrainingEngine) -> list[str]:
    """What each stage of a pipeline holds and idles, a line each; nothing without a pipeline."""
    config, stages = engine.config, len(engine.placement)
    if stages == 1:
        return []
    costs = flop_costs(config.model, config.data.sequence_length).by_stage([len(layers) for layers in engine.placement])
    parameters = parameter_costs(config.model).by_stage([len(layers) for layers in engine.placement])
    lines = [
        f"stage {stage}: layers {layers.start}-{layers.stop - 1}{', embedding' if stage == 0 else ''}"
        f"{', head' if stage == stages - 1 else ''}: {parameters[stage]:,.0f} parameters, "
        f"{costs[stage] / sum(costs):.1%} of the operations, at most "
        f"{peak_units(stage, stages, engine.accumulation, config.chunks, config.bptt_chunks)} chunks in flight"
        for stage, layers in enumerate(engine.placement)
    ]
    cost = chunk_flops(config.model, config.chunks, [len(layers) for layers in engine.placement])
    plan = compare(stages, engine.accumulation, config.chunks, config.bptt_chunks, cost)
    return [
        *lines,
        f"bubble: {plan.ours.bubble:.1%} of the working time, {plan.one_f_one_b.bubble:.1%} over whole sequences "
        "(simulated with each stage's operations)",
    ]


def dry_run(config: RunConfig, console: Console) -> None:
    """Print the resolved configuration and its arithmetic, then one optimizer step on random tokens."""
    topology = start_topology(config)
    if topology.rank == 0:
        console.print(dump_yaml(config), highlight=False)
        for line in describe(config, topology.dp_size):
            console.print(line, highlight=False)
    engine = build_engine(config, topology)
    if topology.rank == 0:
        for line in describe_stages(engine):
            console.print(line, highlight=False)
    begun = time.monotonic()
    result = engine.step(mock_batches(config, topology), config.optimizer.lr)
    loss, predicted, bad = torch.stack([result.loss_sum, result.predicted, result.bad.double()]).tolist()
    if topology.rank == 0:
        local = predicted / topology.dp_size
        console.print(
            f"mock step on {topology.world_size} process(es): loss {loss / local:.4f} nats/token, "
            f"{time.monotonic() - begun:.2f} s, peak memory {peak_memory(topology.device) / 2**30:.2f} GiB on rank 0"
            f"{'' if not bad else ', NOT FINITE'}",
            highlight=False,
        )


def mock_batches(config: RunConfig, topology: Topology) -> list[Batch]:
    """A step's batches of random tokens on the device, all documents starting at position 0."""
    length, rows = config.data.sequence_length, config.training.micro_batch_size
    generator = torch.Generator().manual_seed(topology.dp_rank)
    starts = np.repeat(np.arange(0, length, config.model.chunk_size)[:, None], rows, axis=1)
    batches = []
    for _ in range(config.accumulation_steps(topology.dp_size)):
        tokens = torch.randint(config.model.vocab_size, (length + 1, rows), generator=generator)
        batches.append(Batch(tokens[:-1], tokens[1:], starts, tuple(range(rows))).to(topology.device))
    return batches


def start_topology(config: RunConfig) -> Topology:
    """Join the job's processes."""
    parallel = config.parallel
    return Topology.start(parallel.tp, parallel.dp, parallel.pp, device=parallel.device, timeout_s=parallel.timeout_s)


def held_out(config: RunConfig) -> list[EvaluationDocument]:
    """The held-out documents."""
    return list(evaluation_documents(config.data, chunk_size=config.model.chunk_size))


def open_tokenizer(config: RunConfig) -> Tokenizer | None:
    """The run's tokenizer, if it names one."""
    return Tokenizer.load(config.data.tokenizer) if config.data.tokenizer else None


def validate(engine: TrainingEngine, documents: list[EvaluationDocument], watch: Watch) -> dict[str, Any]:
    """Losses of a validation while training."""
    topology, settings, tokenizer = engine.topology, engine.config.evaluation, open_tokenizer(engine.config)
    report = evaluate_losses(
        engine.stage,
        documents,
        topology=topology,
        device=topology.device,
        dtype=engine.dtype,
        rows=settings.rows,
        max_tokens=settings.max_tokens,
        token_bytes=tokenizer.byte_lengths() if tokenizer else None,
        progress=lambda done, of: watch(f"validation, call {done} of {of}"),
    )
    return {
        "val_loss": report.loss,
        "val_bits_per_byte": report.bits_per_byte,
        "val_beyond_first_chunk_loss": report.beyond_first_chunk_loss,
    }


class Progress(Callback):
    """Remembers the first log record's step and the steady rate, for the final report."""

    def __init__(self) -> None:
        self.rates: list[float] = []

    def at_log(self, trainer: Trainer, record: dict[str, Any]) -> None:
        """See `Callback.at_log`."""
        self.rates.append(record["tokens_per_second"])

    def tokens_per_second(self) -> float:
        """Median over log lines, the first (warm-up) left out where there are others."""
        rates = self.rates[1:] or self.rates
        return float(np.median(rates)) if rates else 0.0


def train(config: RunConfig, console: Console) -> dict[str, Any] | None:
    """Run a whole training on this rank. Returns rank 0's final figures, None if the run was stopped by a signal."""
    topology = start_topology(config)
    group = cpu_group(config.parallel.timeout_s)
    interval = beat_interval(config.parallel.stall_timeout_s)
    heartbeat = Heartbeat(config.run_folder if topology.rank == 0 else None, config.steps, interval)
    figures = None
    try:
        with RunLock(config.run_folder) as lock, heartbeat:
            on_rank_0(lambda: lock.take(lock_patience()), group)
            figures = _train(config, console, topology, group, heartbeat)
    except NonFiniteError:
        dist.barrier(group)  # as below
        raise
    if figures is None:
        # a launcher that sees one rank end with a failure, or STOPPED, ends the others: none may still be closing then
        dist.barrier(group)
    return figures


def _train(
    config: RunConfig, console: Console, topology: Topology, group: ProcessGroup, heartbeat: Heartbeat
) -> dict[str, Any] | None:
    folder, is_rank_0 = config.run_folder, topology.rank == 0
    feeder = open_feeder(config, topology.dp_rank, topology.dp_size)
    facts = run_facts(config, feeder.fingerprint(), tokenizer.hash if (tokenizer := open_tokenizer(config)) else None)
    checkpoint, skipped = resume_point(config, facts, group)
    on_rank_0(lambda: create_run_folder(config), group)
    if checkpoint is not None and (done := finished(config, checkpoint)):
        if is_rank_0:
            console.print(f"{folder}: ended after step {checkpoint.step} already; these are its figures")
        return done
    heartbeat.begin()
    config = placed_as_before(config, checkpoint)
    engine = build_engine(config, topology, new_parameters(config))
    if is_rank_0:
        lines = [*describe(config, topology.dp_size), *(report.summary() for report in feeder.reports)]
        goes_on = [*skipped, *([f"goes on from {checkpoint.path}"] if checkpoint else [])]
        for line in [*lines, *describe_stages(engine), *goes_on]:
            console.print(line, highlight=False)
    # nothing of ours draws from the global generators; what libraries drew while they were imported differs by process
    torch.manual_seed(config.training.seed + topology.rank)
    begun_at = checkpoint.step if checkpoint else 0
    sinks: list[Sink] = [heartbeat, *open_sinks(config, folder, console, begun_at)] if is_rank_0 else []
    timeout = config.parallel.stall_timeout_s
    with closing_all(sinks), Watchdog(topology, timeout, ends=heartbeat.failed) as watchdog:
        progress, bad_steps = Progress(), BadSteps(config.training.max_bad_steps)
        saver = Saver(folder / FOLDER, config.checkpoint, group)
        callbacks = [progress, bad_steps, *standard_callbacks(config, engine, sinks, watchdog.at)]
        validations = [callback for callback in callbacks if isinstance(callback, Validation)]
        callbacks.append(
            Checkpoints(engine, saver, facts, bad_steps, lambda: validations[0].last if validations else None)
        )
        trainer = Trainer(config, topology, engine, feeder, callbacks, watchdog.at)
        heartbeat.follow(trainer, watchdog)
        if checkpoint is not None:
            watchdog.at(f"loading {checkpoint.path}")
            go_on(trainer, checkpoint, bad_steps, group)
        elif config.training.init_from is not None:
            watchdog.at(f"loading {config.training.init_from}")
            start_from(engine, config.training.init_from, group)
        try:
            trainer.fit()
        except NonFiniteError:  # of all ranks in the same step, with the weights as they were before the bad steps
            watchdog.at("saving the weights")
            save_weights(engine.parameters(), topology, folder / "model.safetensors")
            with suppress(CheckpointError):  # of a save under way, which uses the group
                saver.wait(watchdog.at)
            dist.barrier(group)  # while all are watched: nobody leaves before rank 0 has written
            raise
        watchdog.at("saving the weights")
        save_weights(engine.parameters(), topology, folder / "model.safetensors")
        if trainer.stopped:
            dist.barrier(group)  # as above
            return None
        figures = {
            "run_dir": str(folder),
            "steps": trainer.step,
            "tokens_per_second": progress.tokens_per_second(),
            "memory_gib_by_rank": [round(peak / 2**30, 3) for peak in peak_memory_by_rank(topology)],
        }
        return _evaluate(figures, engine, sinks, console, watchdog.at)


def new_parameters(config: RunConfig) -> set[str]:
    """Return the names of the parameters that learn at `optimizer.new_parameters_lr`.

    Raises: CheckpointError for an unreadable file.
    """
    if config.optimizer.new_parameters_lr is None or config.training.init_from is None:
        return set()
    return new_parameter_names(config.training.init_from)


def finished(config: RunConfig, checkpoint: Checkpoint) -> dict[str, Any] | None:
    """The figures of a run that has nothing left to do, None if it has."""
    path = config.run_folder / "result.json"
    if checkpoint.step < config.steps or not path.exists():
        return None
    figures: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return figures if figures.get("steps") == config.steps else None


@contextmanager
def closing_all(sinks: Sequence[Sink]) -> Iterator[None]:
    """Close the sinks at the end, whatever happens."""
    try:
        yield
    finally:
        for sink in sinks:
            sink.close()


def standard_callbacks(
    config: RunConfig, engine: TrainingEngine, sinks: Sequence[Sink], watch: Watch
) -> list[Callback]:
    """What a run does around its steps, in order: each log record passes all of them."""
    peak = device_peak(device_name(engine.topology.device), config.training.precision)
    flops = flops_per_token(config.model, config.data.sequence_length)["training"]
    callbacks: list[Callback] = [Metrics(config.logging.every, sinks, flops, peak)]
    if config.data.validation and config.evaluation.every:
        documents = held_out(config)
        callbacks.append(Validation(config.evaluation.every, lambda: validate(engine, documents, watch), sinks))
    if config.logging.record_step and isinstance(engine, PipelineEngine):
        callbacks.append(ScheduleRecorder(config.logging.record_step, engine))
    if config.logging.profile_steps:
        callbacks.append(Profiler(*config.logging.profile_steps, config.run_folder))
    return callbacks


def _evaluate(
    figures: dict[str, Any], engine: TrainingEngine, sinks: Sequence[Sink], console: Console, watch: Watch
) -> dict[str, Any]:
    """Final evaluation and report; the figures of the run on rank 0."""
    config, topology, folder = engine.config, engine.topology, engine.config.run_folder
    if config.data.validation:
        figures |= final_evaluation(
            engine.stage,
            lambda: held_out(config),
            open_tokenizer(config),
            config,
            topology,
            dtype=engine.dtype,
            folder=folder,
            console=console,
            watch=watch,
        )
    if topology.rank == 0:
        figures = {name: value for name, value in finite(figures).items() if not isinstance(value, dict)}
        write_bytes(folder / "result.json", (json.dumps(figures, indent=2) + "\n").encode())  # whole or not at all
        console.print(result_table(figures, title=config.name))
        console.print(f"picture: {figures.get('picture')}", highlight=False)
        for sink in sinks:
            if isinstance(sink, Wandb):
                sink.evaluation(figures)
    return figures
