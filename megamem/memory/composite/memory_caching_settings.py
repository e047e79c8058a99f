"""The configuration of Memory Caching: what is kept of a recurrent memory, how tokens weigh it, and what that costs."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from megamem.config.cost import Flops, product
from megamem.config.model import AnyMixer, ModelConfig
from megamem.memory.base import Growing, StateSpec, TensorSpec
from megamem.memory.composite.segmented import SegmentedConfig
from megamem.memory.recurrent.matrix import MatrixConfig


class MemoryCachingSettings(SegmentedConfig):
    """Fields, state and cost of Memory Caching."""

    memory: AnyMixer
    """The recurrent memory: linear_attention, retnet, delta_net, ssd, dla, titans or memora, with its own fields."""
    combine: Literal["residual", "grm", "soup", "ssc"] = "grm"
    """How kept memories take part, by the paper's names: Residual Memory sums their answers; Gated Residual Memory sums
    them with gates; Memory Soup mixes their weights before a query reads them; Sparse Selective Caching sums, with
    gates, the answers of the `top_k` best-fitting ones alone."""
    segment: PositiveInt = 256
    """Tokens after which the memory's state is kept. Divides model.chunk_size."""
    scores: Literal["context", "token"] = "context"
    """What a segment's score is made from: the token and the segment's keys (the paper's choice), or the token alone,
    by a projection to one score for each age of a segment (the paper's ablation)."""
    ages: PositiveInt = 32
    """Scores that a token has with `scores: token`: for the open segment, the one before it, and so on. Older segments
    share the last."""
    gate: Literal["softmax", "sigmoid", "raw", "none"] = "softmax"
    """How scores become shares: by a softmax over the kept segments and the open one, by sigmoids, or unchanged; with
    `none` what `ssc` selects counts fully."""
    temperature: PositiveFloat = 1.0
    """What scores are divided by before the softmax: above 1 shares are more even, below 1 more decided."""
    pooling: Literal["mean", "sum"] = "mean"
    """How a segment's keys become the vector that tokens are scored against."""
    router: Literal["own", "query"] = "own"
    """What a token is scored with: a projection of its own, or its query."""
    write: Literal["independent", "continued"] = "independent"
    """Whether each segment starts from a fresh memory, or from the one that the segment before it ended with."""
    top_k: PositiveInt = 2
    """Kept memories that a token reads with `ssc`."""
    max_chunks: PositiveInt | None = None
    """Past chunks whose memories are kept, the oldest dropped first; all if not given. Bound it in streams mode."""

    def kept_specs(
        self, model: ModelConfig, memories: int | str, kind: Literal["memory", "open"]
    ) -> dict[str, TensorSpec]:
        """Declare what is kept of `memories` segments: weights, pooled keys, and whose segment ended there."""
        shapes = {**self.recurrent.snapshot_shapes(model), "pool": (model.resolved_head_dim,)}
        specs = {
            name: TensorSpec(("batch", "kv_heads", memories, *shape), "float32", shard="kv_heads", kind=kind)
            for name, shape in shapes.items()
        }
        return {**specs, "filled": TensorSpec(("batch", memories), "int64", kind=kind)}

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the open memory, the sum of its segment's keys, and kept memories: by chunk, of the open chunk."""
        kept = Growing(self.kept_specs(model, model.chunk_size // self.segment, "memory"), self.max_chunks)
        closed = self.kept_specs(model, "open", "open")
        return {
            **self.recurrent.state_specs(model),
            "key_sum": TensorSpec(("batch", "kv_heads", model.resolved_head_dim), "float32", shard="kv_heads"),
            "kept": kept,
            **{f"closed_{name}": spec for name, spec in closed.items()},
        }

    def reach(self, start: int, chunk_size: int) -> int:
        """Return how many segments before its open one a row at position `start` may read."""
        if start <= 0:
            return 0
        if self.max_chunks is None:
            return start // self.segment
        return min(start, start % chunk_size + self.max_chunks * chunk_size) // self.segment

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        super().check(model)
        if self.gate == "none" and self.combine != "ssc":
            raise ValueError(f"gate none is for combine ssc; {self.combine} without gates is combine residual")
        if self.gate == "none" and (self.router == "own" or self.scores == "token"):
            raise ValueError("gate none leaves nothing to train scores with; it needs router: query, scores: context")
        if self.scores == "token" and self.router == "query":
            raise ValueError("router query scores segments by their keys, scores token does not; leave one of them out")
        if self.temperature != 1.0 and self.gate != "softmax":
            raise ValueError(f"temperature {self.temperature} is the softmax's; gate {self.gate} has none")

    @property
    def routed(self) -> bool:
        """Whether scores are made with a projection of their own."""
        return self.combine != "residual" and self.router == "own"

    def router_width(self, model: ModelConfig) -> int:
        """Return how many channels a head's router makes of a token."""
        return self.ages if self.scores == "token" else model.resolved_head_dim

    def projection_parameters(self, model: ModelConfig) -> int:
        """Count those of the memory, and the router's."""
        router = model.hidden_size * model.heads * self.router_width(model) if self.routed else 0
        return self.recurrent.projection_parameters(model) + router

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count those of the memory."""
        return self.recurrent.extra_parameters(model)

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`.

        Beside the memory's own, `memory_routing` counts the scores and `memory_caching` what kept memories answer.

        Each token reads all segments before its own, within reach; with `ssc` `top_k` of them at most.
        """
        begun = min(self.segment, sequence_length) if self.write == "independent" else sequence_length
        several = self.side_by_side() and self.segment < min(model.chunk_size, sequence_length)
        # the end of a sequence's last segment, which nobody reads, is computed with those of the segments beside it
        length = math.inf if several else sequence_length
        parts = self.recurrent.memory_flops(model, length, causal, begun)
        within, read = self.kept_and_read(model, sequence_length)
        sizes = sum(rows * columns for rows, columns in self.recurrent.snapshot_shapes(model).values())
        if self.combine != "residual" and self.scores == "context":
            parts["memory_routing"] = product(2 * model.heads * model.resolved_head_dim * within)
        parts["memory_caching"] = product(2 * model.heads * sizes * read)
        return parts

    def side_by_side(self) -> bool:
        """Return whether the segments of a call are written at the same time, as rows of a batch.

        They are where no segment knows of another's memory, and none has others mixed in while it is written.
        """
        return self.write == "independent" and not self.mixes()

    def mixes(self) -> bool:
        """Return whether networks are mixed matrix by matrix. A mixture of single matrices is that of their answers."""
        return self.combine == "soup" and not isinstance(self.recurrent, MatrixConfig)

    def kept_and_read(self, model: ModelConfig, sequence_length: int) -> tuple[float, float]:
        """Return the kept memories within a token's reach, and those of them that it reads; means over a sequence."""
        segments = range(-(-sequence_length // self.segment))
        within = [self.reach(segment * self.segment, model.chunk_size) for segment in segments]
        read = [min(count, self.top_k) for count in within] if self.combine == "ssc" else within
        return sum(within) / len(segments), sum(read) / len(segments)

    def summary(self, model: ModelConfig, sequence_length: int) -> str | None:
        """See `MixerConfig.summary`: the share of the kept memories that is read."""
        within, read = self.kept_and_read(model, sequence_length)
        share = f", {read / within:.0%}" if within else ""
        return f"memory caching ({self.combine}): a token reads {read:.2f} of {within:.2f} kept memories{share}"
