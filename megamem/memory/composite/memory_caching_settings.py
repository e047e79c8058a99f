"""The configuration of Memory Caching: what is kept of a recurrent memory, how tokens weigh it, and what that costs."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import PositiveFloat, PositiveInt

from megamem.config.cost import Flops, product
from megamem.config.model import MIXERS, AnyMixer, MixerConfig, ModelConfig
from megamem.memory.base import Growing, HostReads, StateSpec, TensorSpec
from megamem.memory.composite.levels import Levels
from megamem.memory.composite.segmented import SegmentedConfig
from megamem.memory.recurrent.deep_config import DeepConfig
from megamem.memory.recurrent.linear_attention import LinearAttentionConfig
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
    lengths: Literal["constant", "logarithmic"] = "constant"
    """Lengths of kept segments: `segment` tokens each, so that their number grows with the text; or 1, 2, 4 ... times
    `segment`, the oldest longest, as the binary digits of the number read: two of one length become one."""
    levels: PositiveInt = 8
    """How many lengths there are with `lengths: logarithmic`: 1, 2, 4 ... times `segment`; the longest takes in all
    that is older."""
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
    kept_on: Literal["device", "host"] = "device"
    """Where memories of past chunks lie while text is read without gradients, as in evaluation and generation: on the
    device, or in pinned host memory, from which those that `combine: ssc` selects are copied in each call."""

    def kept_specs(
        self, model: ModelConfig, memories: int | str, kind: Literal["memory", "open"]
    ) -> dict[str, TensorSpec]:
        """Declare what is kept of `memories` segments: weights, pooled keys, and whose segment ended there."""
        shapes = {**self.recurrent.snapshot_shapes(model), "pool": (model.resolved_head_dim,)}
        # the router needs pools of all memories
        hosted = {name for name in shapes if name != "pool" and kind == "memory" and self.kept_on == "host"}
        specs = {
            name: TensorSpec(
                ("batch", "kv_heads", memories, *shape), "float32", shard="kv_heads", kind=kind, host=name in hosted
            )
            for name, shape in shapes.items()
        }
        return {**specs, "filled": TensorSpec(("batch", memories), "int64", kind=kind)}

    def level_specs(self, model: ModelConfig) -> dict[str, TensorSpec]:
        """Declare what is kept of one merged segment: weights, the sum of its keys, and what its decays leave."""
        shapes: dict[str, tuple[int, ...]] = {
            **self.recurrent.snapshot_shapes(model),
            "key_sum": (model.resolved_head_dim,),
            **({"log_kept": ()} if self.fades else {}),
        }
        return {
            name: TensorSpec(("batch", "kv_heads", *shape), "float32", shard="kv_heads")
            for name, shape in shapes.items()
        }

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the open memory, the sum of its segment's keys, and kept memories.

        Those of constant length by chunk, and of the open chunk; merged ones by level.
        """
        own = self.recurrent.state_specs(model)
        key_sum = TensorSpec(("batch", "kv_heads", model.resolved_head_dim), "float32", shard="kv_heads")
        if self.lengths == "logarithmic":
            level = self.level_specs(model)
            fading = {"log_kept": level["log_kept"]} if self.fades else {}
            levels = {f"level_{n}_{name}": spec for n in range(self.levels) for name, spec in level.items()}
            return {**own, "key_sum": key_sum, **fading, **levels}
        per_chunk = model.chunk_size // self.segment
        reads = HostReads(model.heads * self.top_k, model.resolved_kv_heads * per_chunk)
        hosted = reads if self.kept_on == "host" else None
        kept = Growing(self.kept_specs(model, per_chunk, "memory"), self.max_chunks, hosted)
        closed = self.kept_specs(model, "open", "open")
        return {**own, "key_sum": key_sum, "kept": kept, **{f"closed_{name}": spec for name, spec in closed.items()}}

    @property
    def fades(self) -> bool:
        """Whether merging has to know what the decays of a segment's tokens leave of the memory before it."""
        merges = self.lengths == "logarithmic" and self.write == "independent"
        return merges and isinstance(self.recurrent, DeepConfig) and self.recurrent.decay

    @property
    def placed(self) -> Levels:
        """The levels of merged segments, as what says which segments are in which."""
        return Levels(self.levels, "weak")

    def merged_segments(self, segments: int, level: int) -> int:
        """Return how many of so many segments a level holds, if it holds any."""
        return segments >> level << level if level == self.levels - 1 else 1 << level

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
        if self.mixes() and self.gate == "raw" and isinstance(self.recurrent, MatrixConfig):
            raise ValueError(
                "gate raw may be negative, and combine soup weighs normalizers by it; use softmax or sigmoid"
            )
        if self.kept_on == "host" and self.combine != "ssc":
            raise ValueError(f"kept_on host is for combine ssc, which selects; {self.combine} reads every kept memory")
        if self.lengths == "logarithmic":
            self._check_merging()

    def _check_merging(self) -> None:
        """Raise ValueError if kept segments cannot be merged."""
        if self.kept_on == "host":
            raise ValueError("kept_on host is for lengths: constant; of lengths: logarithmic few memories are kept")
        if self.max_chunks is not None:
            raise ValueError(
                f"max_chunks {self.max_chunks} is for lengths: constant; lengths: logarithmic is bounded by `levels`"
            )
        if self.write == "independent" and not _adds_up(type(self.recurrent)):
            valid = ", ".join(kind for kind, config in MIXERS.kinds().items() if _adds_up(config))
            raise ValueError(
                f"memory {self.recurrent.kind} of two segments cannot be merged; lengths: logarithmic needs write: "
                f"continued, or one of {valid}"
            )

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
        scored, read = self.kept_and_read(model, sequence_length)
        sizes = sum(rows * columns for rows, columns in self.recurrent.snapshot_shapes(model).values())
        if several and self.lengths == "constant":
            scored = self._scored_together(model, sequence_length)
        if self.combine != "residual" and self.scores == "context":
            parts["memory_routing"] = product(2 * model.heads * model.resolved_head_dim * scored)
        parts["memory_caching"] = product(2 * model.heads * sizes * read)
        return parts

    def side_by_side(self) -> bool:
        """Return whether the segments of a call are written at the same time, as rows of a batch.

        They are where no segment knows of another's memory, and none has others mixed in while it is written.
        """
        return self.write == "independent" and not self.mixes()

    def mixes(self) -> bool:
        """Return whether memories are mixed matrix by matrix; not where this is the mixture of their answers."""
        return self.combine == "soup" and not self.recurrent.answers_add_up()

    def step(self) -> int:
        """Return the tokens that are read in one go at most: a segment, or a block where networks are mixed.

        A single matrix is read by all tokens of a segment, mixed or not.
        """
        deep = not isinstance(self.recurrent, MatrixConfig)
        return self.recurrent.block() if self.mixes() and deep else self.segment

    def kept_and_read(self, model: ModelConfig, sequence_length: int) -> tuple[float, float]:
        """Return the kept memories within a token's reach, and those of them that it reads; means over a sequence."""
        segments = range(-(-sequence_length // self.segment))
        if self.lengths == "logarithmic":
            within = [len(self.placed.holding(segment)) for segment in segments]
        else:
            within = [self.reach(segment * self.segment, model.chunk_size) for segment in segments]
        read = [min(count, self.top_k) for count in within] if self.combine == "ssc" else within
        return sum(within) / len(segments), sum(read) / len(segments)

    def _scored_together(self, model: ModelConfig, sequence_length: int) -> float:
        """Return the segments that a token has scores of where those of a chunk ask together; mean over a sequence.

        All of a chunk's have scores, whichever come before the token.
        """
        total, segments = 0, -(-sequence_length // self.segment)
        for begin in range(0, segments, model.chunk_size // self.segment):
            together = min(segments - begin, model.chunk_size // self.segment)
            total += together * (self.reach(begin * self.segment, model.chunk_size) + together)
        return total / segments

    def summary(self, model: ModelConfig, sequence_length: int) -> str | None:
        """See `MixerConfig.summary`: the share of the kept memories that is read."""
        within, read = self.kept_and_read(model, sequence_length)
        share = f", {read / within:.0%}" if within else ""
        return f"memory caching ({self.combine}): a token reads {read:.2f} of {within:.2f} kept memories{share}"


def _adds_up(memory: type[MixerConfig]) -> bool:
    """Return whether the memory of two segments is the sum that `logarithmic_segments.py` makes of theirs."""
    return issubclass(memory, LinearAttentionConfig) or (issubclass(memory, DeepConfig) and memory.mergeable)
