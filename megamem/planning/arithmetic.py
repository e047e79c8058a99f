"""The arithmetic of a run as text."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from fractions import Fraction

from megamem.config.run import RunConfig
from megamem.costs.parameters import parameter_counts


def describe(config: RunConfig, dp_size: int, padding: Sequence[Fraction] | None = None) -> list[str]:
    """Return the arithmetic of a run: parameters, batch, sequence, budget and layout, a line each.

    padding: expected share of padding among all positions in each phase, None without data.
    """
    training, counts = config.training, parameter_counts(config.model)
    accumulation, readings = config.accumulation_steps(dp_size), training.objective.readings
    passes = config.micro_batches(dp_size) * config.chunks // config.bptt_chunks
    by_layer = ", which are read layer by layer" if training.window_order == "layers" else ""
    pipeline = f"PP {config.parallel.pp} x " if config.parallel.pp > 1 else ""
    base = config.model.base
    width = [] if config.model.mup is None else [f"muP over a base model {base.hidden_size} wide, {base.heads} heads"]
    mixers = [config.model.mixer_at(layer) for layer in range(config.model.layers)]
    notes = [config.model.architecture.summary(config.model)]
    notes += dict.fromkeys(mixer.summary(config.model, config.data.sequence_length) for mixer in mixers)
    return [
        f"parameters: {counts['total']:,} ({counts['non_embedding']:,} without embedding and head)",
        f"batch: {training.batch_tokens:,} tokens = {config.global_rows} sequences of {config.data.sequence_length:,}"
        f" = {dp_size} DP ranks x {accumulation} micro-batches x {training.micro_batch_size} rows"
        f"{f', read {readings} times ({training.objective.kind})' if readings > 1 else ''}",
        f"sequence: {config.chunks} chunks of {config.model.chunk_size:,}; gradients through memory over "
        f"{config.bptt_chunks} chunks{by_layer}, {passes} backward passes a step",
        _budget(config, padding),
        f"layout: {pipeline}TP {config.parallel.tp} x DP {dp_size}, ZeRO {config.parallel.zero_stage}, "
        f"{training.precision.upper()}",
        *_auto(config),
        *width,
        *filter(None, notes),
    ]


def _budget(config: RunConfig, padding: Sequence[Fraction] | None) -> str:
    """Return the line about the run's length, in steps and tokens."""
    ends = (*config.phase_starts, config.steps)
    steps = [end - start for start, end in itertools.pairwise(ends)]
    positions = [count * own.training.batch_tokens for count, own in zip(steps, config.phases, strict=True)]
    padded = sum(share * count for share, count in zip(padding or [], positions, strict=padding is not None))
    tokens, share = round(sum(positions) - padded), float(padded / sum(positions))
    words = " if nothing is padded" if padding is None else f" and {share:.1%} padding" if padded else ""
    return f"budget: {config.steps:,} steps = {tokens:,} tokens{words}"


def _auto(config: RunConfig) -> list[str]:
    """Return the line about what the planner chose, none where nothing was left to it."""
    if not config.auto.fields or config.auto.devices is None:
        return []
    values = " ".join(f"{field}={str(value).lower()}" for field, value in config.auto_values.items())
    return [f"auto: {values}, chosen for {config.auto.devices} device(s)"]
