"""The configuration of log-linear attention: its levels, how they are read, its state and what it costs."""

from __future__ import annotations

from functools import lru_cache
from typing import ClassVar, Literal

import numpy as np
from pydantic import PositiveInt

from megamem.config.cost import Flops, product
from megamem.config.model import AnyMixer, MixerConfig, ModelConfig
from megamem.memory.base import StateSpec, TensorSpec
from megamem.memory.composite.levels import Levels
from megamem.memory.composite.segmented import SegmentedConfig
from megamem.memory.recurrent.base import RecurrentConfig
from megamem.memory.recurrent.matrix import MatrixConfig


class LogLinearSettings(SegmentedConfig):
    """Fields, state and cost of log-linear attention."""

    unfit: ClassVar[str] = "cannot be merged"
    memory: AnyMixer
    """The recurrent memory: linear_attention, retnet, ssd, delta_net, dla or titans, with its own fields."""
    segment: PositiveInt = 64
    """Tokens of the shortest segments. Divides model.chunk_size."""
    levels: PositiveInt = 8
    """Lengths of merged segments: 1, 2, 4 ... times `segment`; the last level takes in all that is older."""
    closed: Literal["kept", "faded"] = "kept"
    """What merged segments go on as while others are read: `kept` as they were at their ends, or `faded` by the decays
    and the delta rule of every token behind them, as the paper of log-linear attention has it."""
    admissibility: Literal["weak", "strong"] = "weak"
    """Which segments may be merged, as in hierarchical matrices. `weak`: any that are neighbors, as a counter carries
    (Fenwick tree). `strong`: those that lie at least as far back as they are long."""

    @classmethod
    def fits(cls, memory: type[MixerConfig]) -> bool:
        """See `SegmentedConfig.fits`."""
        return issubclass(memory, RecurrentConfig) and memory.mergeable

    @property
    def placed(self) -> Levels:
        """The levels, as what says which segments are in which."""
        return Levels(self.levels, self.admissibility)

    def fades(self) -> bool:
        """Return whether the levels are faded matrices, which are read with many segments' tokens at once."""
        return self.closed == "faded" and isinstance(self.recurrent, MatrixConfig)

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the open memory and the levels; where levels are kept, the transitions of both besides."""
        own = self.recurrent.state_specs(model)
        merged: dict[str, TensorSpec] = {}
        for name in self.recurrent.snapshot_shapes(model):
            spec = own[name]
            assert isinstance(spec, TensorSpec)
            merged[name] = spec
        specs: dict[str, TensorSpec] = {}
        size = self.recurrent.transition_size(model)
        if self.closed == "kept" and size:
            specs["transition"] = TensorSpec(("batch", "kv_heads", size, size), "float32", shard="kv_heads")
        for name, spec in {**merged, **specs}.items():
            shape = (*spec.shape[:2], self.levels, *spec.shape[2:])
            specs[f"level_{name}"] = TensorSpec(shape, spec.dtype, spec.shard)
        return {**own, **specs}

    def projection_parameters(self, model: ModelConfig) -> int:
        """Count those of the memory, and of the gates."""
        gates = model.hidden_size * model.heads * (self.levels + 1)
        return self.recurrent.projection_parameters(model) + gates

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count those of the memory, and the factors of the gates."""
        return self.recurrent.extra_parameters(model) + model.heads * (self.levels + 1)

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`.

        `memory_levels` counts what merged segments answer, and of matrices that fade what the open one does besides;
        `memory_transitions` the matrices by which the delta rule changes kept levels when they are merged.
        """
        if isinstance(self.recurrent, MatrixConfig) and self.closed == "faded":
            return faded_flops(self, self.recurrent, model, sequence_length, causal)
        parts = self.recurrent.memory_flops(model, sequence_length, causal, min(self.segment, sequence_length))
        segments = -(-sequence_length // self.segment)
        read = sum(len(self.placed.holding(n)) for n in range(segments)) / segments
        sizes = sum(rows * columns for rows, columns in self.recurrent.snapshot_shapes(model).values())
        size = self.recurrent.transition_size(model)
        # a deep memory that fades is read together with the one that documents start from
        networks = 2 if self.closed == "faded" and size else 1
        parts["memory_levels"] = product(2 * model.heads * networks * sizes * read)
        if isinstance(self.recurrent, MatrixConfig) and size > 1:
            parts["memory_transitions"] = transition_flops(self, self.recurrent, model, segments, causal)
        return parts


def faded_flops(
    config: LogLinearSettings, memory: MatrixConfig, model: ModelConfig, sequence_length: int, causal: bool
) -> dict[str, Flops]:
    """Return the FLOPs per token of levels that are faded matrices, see `LogLinearSettings.mixing_flops`.

    What the last inner chunk writes is read by nobody and has no backward pass, nor has what the first one would read.
    """
    tokens = min(memory.inner_chunk, model.chunk_size, sequence_length)
    chunks = -(-sequence_length // tokens)
    held, receiving = held_and_receiving(config.placed, config.segment, tokens, chunks)
    heads, kv_heads, keys, values = model.heads, model.resolved_kv_heads, model.resolved_head_dim, memory.values(model)
    seen = (tokens + 1) / 2 if causal else tokens
    # shares of the inner chunks: those with something before them, those whose writes are read afterwards, and both
    older, newer, between = sum(map(bool, held)) / chunks, 1 - 1 / chunks, sum(map(bool, held[:-1])) / chunks
    attention = product(2 * heads * seen * (keys + values))
    write = 2 * kv_heads * keys * values
    update = Flops(write * sum(receiving) / chunks, 2 * write * sum(receiving[:-1]) / chunks)
    if memory.transition_size(model) > 1:
        # scores times the inverse, and the solve for it
        solve, asked = kv_heads * seen * tokens, 2 * heads * seen * keys
        attention += product(2 * kv_heads * seen * keys + 2 * heads * seen * tokens) + Flops(solve, 3 * solve)
        attention += Flops(asked, 2 * asked * older)
        written, transition = 2 * kv_heads * seen * keys, 2 * kv_heads * keys**2
        passing = transition * values / tokens
        update += Flops(written, 2 * written * newer) + Flops(transition, 2 * transition * between)
        update += Flops(passing * sum(held) / chunks, 2 * passing * sum(held[:-1]) / chunks)
    levels = product(2 * heads * keys * values * sum(held) / chunks)
    return {"memory_attention": attention, "memory_update": update, "memory_levels": levels}


@lru_cache(maxsize=256)
def held_and_receiving(levels: Levels, segment: int, tokens: int, chunks: int) -> tuple[list[int], list[int]]:
    """Return for each inner chunk how many memories hold something before it, and how many its tokens end up in.

    tokens: of an inner chunk; chunks: how many there are. The open memory counts as the levels do.
    """
    held, receiving = [], []
    for begin in range(0, tokens * chunks, tokens):
        held.append(len(levels.holding(begin // segment)) + bool(begin % segment))
        numbers = np.arange(begin, begin + tokens) // segment
        receiving.append(len(np.unique(levels.places(np.array((begin + tokens) // segment), numbers))))
    return held, receiving


def transition_flops(
    config: LogLinearSettings, memory: MatrixConfig, model: ModelConfig, segments: int, causal: bool
) -> Flops:
    """Return the FLOPs per token of matrices that say what a segment's tokens leave of earlier ones.

    Each has a backward pass, but for those that no later segment is read with: counted is never less than computed.
    """
    keys, values, tokens = model.resolved_head_dim, memory.values(model), min(memory.inner_chunk, config.segment)
    seen = (tokens + 1) / 2 if causal else tokens
    target = [config.placed.target(n) for n in range(segments)]
    last = config.placed.last
    merged = segments if config.admissibility == "strong" else sum(level + (level == last) for level in target)
    solve = seen * tokens
    # transitions of inner chunks, one after the other; levels and their transitions when they are merged
    joined = 2 * keys**3 / tokens + merged / segments * 2 * keys**2 * (keys + values) / config.segment
    return (product(2 * seen * 2 * keys + 2 * keys**2 + joined) + Flops(solve, 3 * solve)).times(
        model.resolved_kv_heads
    )
