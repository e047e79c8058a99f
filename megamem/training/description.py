"""The lines that a run prints about itself before its first step."""

from __future__ import annotations

from collections.abc import Sequence

from megamem.config.run import RunConfig
from megamem.costs.flops import flop_costs
from megamem.costs.parameters import parameter_costs
from megamem.data.feeder import Feeder
from megamem.pipeline.balancing import chunk_flops
from megamem.pipeline.base import TrainingEngine
from megamem.pipeline.comparison import compare
from megamem.pipeline.freezing import backward_pass_of, learning_of
from megamem.pipeline.schedule import peak_units
from megamem.pipeline.start_weights import new_parameters, shown_files, whole_model
from megamem.training.phases import phases_of


def describe_phases(config: RunConfig, feeders: Sequence[Feeder]) -> list[str]:
    """Describe what each phase after the first one reads, a line for its portions and one for each of its sources."""
    lines = []
    for phase, feeder in list(zip(phases_of(config), feeders, strict=True))[1:]:
        own = phase.config
        lines.append(
            f"phase {phase.number + 1}: steps {phase.first_step + 1:,}-{phase.end:,}, {own.training.batch_tokens:,} "
            f"tokens = {own.global_rows} sequences of {own.data.sequence_length:,}, micro-batches of "
            f"{own.training.micro_batch_size} rows, gradients through memory over {own.bptt_chunks} chunks"
        )
        lines += [report.summary() for report in feeder.reports]
    return lines


def describe_start(config: RunConfig) -> list[str]:
    """Describe in a line what weights a run starts from, where they are files of parts of the model."""
    files = config.training.init_from
    if not isinstance(files, dict):
        return []
    names = new_parameters(config)
    new = sum(parameter.numel() for name, parameter in whole_model(config.model).named_parameters() if name in names)
    return [f"weights: {shown_files(files)}; {new:,} parameters are new"]


def describe_learning(config: RunConfig) -> list[str]:
    """Describe in a line how many parameters learn, where some do not."""
    learning = learning_of(config)
    if learning is None:
        return []
    total = sum(parameter.numel() for parameter in whole_model(config.model).parameters())
    base = config.training.freeze == "base"
    return [
        f"learning: {learning.total:,} {'new ' if base else ''}of {total:,} parameters ({learning.total / total:.2%}); "
        f"{'the others are' if base else f'the {config.training.freeze} is'} frozen"
    ]


def describe_stages(engine: TrainingEngine) -> list[str]:
    """Describe what each stage of a pipeline holds and how long it idles, a line each; nothing without a pipeline."""
    config, stages = engine.config, len(engine.placement)
    if stages == 1:
        return []
    layers_per_stage = [len(layers) for layers in engine.placement]
    costs = flop_costs(config.model, config.data.sequence_length, backward_pass_of(config)).by_stage(layers_per_stage)
    parameters = parameter_costs(config.model).by_stage(layers_per_stage)
    units = engine.micro_batches, config.chunks, config.bptt_chunks
    lines = [
        f"stage {stage}: layers {layers.start}-{layers.stop - 1}{', embedding' if stage == 0 else ''}"
        f"{', head' if stage == stages - 1 else ''}: {parameters[stage]:,.0f} parameters, "
        f"{costs[stage] / sum(costs):.1%} of the operations, at most "
        f"{peak_units(stage, stages, *units, config.interleaved)} chunks in flight"
        for stage, layers in enumerate(engine.placement)
    ]
    cost = chunk_flops(config.model, config.chunks, layers_per_stage, backward_pass_of(config))
    plan = compare(stages, *units, cost, config.interleaved)
    if config.interleaved and engine.micro_batches < stages:
        lines.append(
            f"warning: {engine.micro_batches} micro-batches cannot keep {stages} stages busy: a memory that spans the "
            f"model goes through all stages before the next chunk; use at least {stages} micro-batches"
        )
    return [
        *lines,
        f"bubble: {plan.ours.bubble:.1%} of the working time, {plan.one_f_one_b.bubble:.1%} over whole sequences "
        "(simulated with each stage's operations)",
    ]
