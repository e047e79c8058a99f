"""Compressive Transformer: what leaves the cache is compressed and kept behind it.

Rae et al., "Compressive Transformers for Long-Range Sequence Modelling", 2020, over the attention of Transformer-XL. A
query sees the compressed memory, the cache and its chunk; each compressed vector counts as one position. When a chunk
of L tokens is finished, the oldest L vectors of the cache leave it:

    E   = the oldest L of m;    m' = the newest `memory_length` of [m; h]
    C   = f(E), L / ratio vectors;    c' = the newest `compressed_length` of [c; C]

f is a convolution, a mean or a maximum of each `ratio` vectors, or a choice of those that got most attention. A learned
f is trained by attention reconstruction alone (the paper's algorithm 2): what the chunk's queries read of E without
positions, they shall read of C. Nothing else learns from that loss, and no other loss trains f.

Letters of shapes: T tokens, L tokens of a chunk, R ratio, B batch rows, H local heads, D head_dim, W hidden_size.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Literal, cast

import torch
import torch.nn.functional as F
from pydantic import Field, PositiveInt
from torch import Tensor, nn

from megamem.config.cost import Flops
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, State, StateSpec, TensorSpec, detach, state_dtype, to_device
from megamem.memory.shared.blocks import BlockSlice, block_slices, split_tokens
from megamem.memory.shared.row_by_row import read_rows
from megamem.memory.shared.segment_attention import (
    SegmentAttention,
    bias_parameters,
    segment_flops,
    segment_parameters,
    segment_specs,
)
from megamem.ops.attention.softmax import Past, past_attention
from megamem.parallel.linears import Linears, constant, declare, normal

LEARNED = ("convolution", "dilated")
"""The compressions that have weights."""


@MIXERS.register
class CompressiveTransformerConfig(MixerConfig):
    """Attention to the chunk, to the hidden states of the tokens before it and to compressed older ones."""

    kind: Literal["compressive_transformer"] = "compressive_transformer"
    """`compressive_transformer`"""
    memory_length: PositiveInt | None = None
    """Tokens before the chunk whose hidden states are kept, a multiple of the chunk; as many as it has if not given."""
    compressed_length: PositiveInt | None = None
    """Compressed vectors kept, the oldest dropped first; as many as the chunk has tokens if not given."""
    ratio: PositiveInt = 4
    """Vectors that become one. Divides the chunk."""
    compression: Literal["convolution", "dilated", "mean", "max", "most_used"] = "convolution"
    """How: a `convolution` over each `ratio` vectors, one with gaps over twice as many (`dilated`), their `mean` or
    `max`, or of the whole chunk those that got most attention (`most_used`)."""
    reconstruction_weight: float = Field(default=1.0, gt=0)
    """Weight of the attention-reconstruction loss, from which alone the convolutions learn."""
    clamp_length: PositiveInt | None = None
    """Distances beyond are taken for this one."""
    shared_biases: bool = False
    """Whether all layers share one pair of u and v, as Transformer-XL's; if not, each has its own."""

    def lengths(self, model: ModelConfig) -> tuple[int, int]:
        """Return the vectors of the cache and of the compressed memory."""
        return self.memory_length or model.chunk_size, self.compressed_length or model.chunk_size

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        chunk, (cached, _) = model.chunk_size, self.lengths(model)
        if chunk % self.ratio:
            raise ValueError(
                f"ratio {self.ratio} does not divide model.chunk_size {chunk}, which leaves the cache at once"
            )
        if cached % chunk:
            raise ValueError(
                f"memory_length {cached} is no multiple of model.chunk_size {chunk}: parts of chunks would leave the "
                f"cache; use {max(cached // chunk, 1) * chunk}"
            )

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare cache, compressed memory (the newest last, zeros where nothing has come yet) and the open chunk.

        With `most_used` also the attention that each vector of the cache has got.
        """
        cached, compressed = self.lengths(model)
        specs = {**segment_specs(cached), "compressed": TensorSpec((compressed, "batch", "hidden"))}
        if self.compression == "most_used":
            specs["attention"] = TensorSpec((cached, "batch"), dtype="float32")
        return specs

    def shared_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.shared_parameters`."""
        return bias_parameters(model) if self.shared_biases else 0

    def rotates(self) -> bool:
        """See `MixerConfig.rotates`: positions are distances."""
        return False

    def auxiliary_losses(self) -> tuple[str, ...]:
        """See `MixerConfig.auxiliary_losses`."""
        return ("reconstruction",) if self.compression in LEARNED else ()

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`; every chunk compresses, those that nothing leaves the cache in too."""
        chunk, (cached, compressed) = model.chunk_size, self.lengths(model)

        def columns(begin: int) -> int:
            return min(begin, cached) + min(max(begin - cached, 0) // self.ratio, compressed)

        parts = segment_flops(model, sequence_length, causal, columns, None)
        if self.compression not in LEARNED:
            return parts
        ends = sequence_length // chunk * chunk / sequence_length  # a chunk that is not finished compresses nothing
        width, heads = model.hidden_size, model.heads * model.resolved_head_dim
        kv_heads = 2 * model.resolved_kv_heads * model.resolved_head_dim
        convolution = 2.0 * width * width * ends
        # queries, keys and values of what leaves the cache are only read; those of what it becomes hand one gradient on
        read = 2 * width * (heads + kv_heads) + 4 * heads * chunk
        made = (2 * width * kv_heads / self.ratio, 4 * heads * chunk / self.ratio)
        return {
            **parts,
            "compression": Flops(convolution, convolution),
            "reconstruction": Flops((read + sum(made)) * ends, (made[0] + 1.5 * made[1]) * ends),
        }

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count the projection of distances, u and v, and the convolution."""
        convolution = model.hidden_size * (self.ratio * model.hidden_size + 1)
        return segment_parameters(model) + convolution * (self.compression in LEARNED)

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> CompressiveTransformer:
        """See `MixerConfig.build`."""
        return CompressiveTransformer(self, model, linears)


class Convolution(nn.Module):
    """One vector of each `ratio`: a convolution over as many, taken from every token or every second one."""

    def __init__(self, model: ModelConfig, linears: Linears, ratio: int, dilation: int) -> None:
        super().__init__()
        self.linears, self.ratio, self.dilation = linears, ratio, dilation
        weight = nn.Parameter(torch.empty(model.hidden_size, ratio * model.hidden_size))
        self.weight = declare(weight, normal(model.init_std), fan_in=1)
        self.bias = declare(nn.Parameter(torch.empty(model.hidden_size)), constant(0.0))

    def forward(self, evicted: Tensor) -> Tensor:
        """[L, B, W] -> [L / R, B, W], each ending with the last of its R vectors."""
        reach = self.dilation * (self.ratio - 1) + 1
        padded = F.pad(evicted, (0, 0, 0, 0, reach - self.ratio, 0))
        # [L / R, B, W, reach], then the vectors that the kernel takes: [L / R, B, R, W]
        taken = padded.unfold(0, reach, self.ratio)[..., :: self.dilation].transpose(2, 3)
        # every rank compresses the same vectors; the gradient of the weights comes from each rank's heads
        return F.linear(taken.flatten(2), self.linears.shared(self.weight), self.linears.shared(self.bias))


class CompressiveTransformer(SegmentAttention):
    """Attention to the chunk, a cache of hidden vectors and a compressed memory of older ones."""

    trained_by = MappingProxyType({"reconstruction": "compressor"})

    def __init__(self, config: CompressiveTransformerConfig, model: ModelConfig, linears: Linears) -> None:
        cached, self.compressed_length = config.lengths(model)
        super().__init__(
            model,
            linears,
            config.state_specs(model),
            memory_length=cached,
            clamp_length=config.clamp_length,
            shares_biases=config.shared_biases,
        )
        self.config = config
        self.counts_attention = config.compression == "most_used"
        self.compressor = (
            Convolution(model, linears, config.ratio, 2 if config.compression == "dilated" else 1)
            if config.compression in LEARNED
            else None
        )

    def columns_before(self, finished_tokens: int) -> int:
        """See `SegmentAttention.columns_before`."""
        evicted = max(finished_tokens - self.memory_length, 0) // self.config.ratio
        return min(finished_tokens, self.memory_length) + min(evicted, self.compressed_length)

    def kept(self, state: State) -> Tensor:
        """See `SegmentAttention.kept`."""
        return torch.cat((state["compressed"], state["memory"]))

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        x, state = self.linears.enter(hidden), detach(state)
        terms: list[Tensor] = []
        mixed, state = read_rows(
            self.specs, state, chunk, self.segment,
            lambda rows, own, here: self._read_segments(x[:, rows], own, here, terms),
        )  # fmt: skip
        if self.compressor is None:
            return self.output(mixed.flatten(2)), state, {}
        # a mean over the call's tokens and rows, of which those of finished chunks count
        loss = sum(terms, mixed.new_zeros((), dtype=state_dtype(mixed.dtype))) / (x.shape[0] * chunk.rows)
        return self.output(mixed.flatten(2)), state, {"reconstruction": self.config.reconstruction_weight * loss}

    def _read_segments(self, x: Tensor, state: State, chunk: Chunk, terms: list[Tensor]) -> tuple[Tensor, State]:
        """Read a call chunk by chunk: what the heads put out [T, B, H, D], and the new state.

        x: [T, B, W]; terms: gets the reconstruction losses, each a sum over tokens and rows.
        """
        outputs = []
        parts = block_slices(chunk, x.shape[0], self.segment)
        for part, (tokens,) in zip(parts, split_tokens(parts, x), strict=True):
            state = self.reset_inside(state, part.begin, part.starts, x)
            here = chunk.part(part.begin, part.end)
            mixed, new, received = self.mix(tokens, self.queries(tokens), state, here)
            outputs.append(mixed)
            if received is not None:
                state = {**state, "attention": state["attention"] + self.linears.sum_over_ranks(received)}
                new["attention"] = state["attention"]
            if any(part.closing):
                new |= self._compress(state, new["memory"][-self.segment :], part, terms)
            state = {**state, **new}
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state

    def _compress(self, state: State, segment: Tensor, part: BlockSlice, terms: list[Tensor]) -> State:
        """Return the compressed memory after a finished chunk, in rows whose chunk ends with `part`.

        Args:
            state: with the cache as the chunk saw it.
            segment: the chunk's hidden vectors [L, B, W].
            part: the slice that ends the chunk.
            terms: gets the reconstruction loss.
        """
        full = [
            closing and tokens >= self.memory_length
            for closing, tokens in zip(part.closing, part.finished_tokens, strict=True)
        ]
        evicted = state["memory"][: self.segment]
        made = self._compressed(evicted, state)
        if self.compressor is not None:
            # of a chunk that this very call has read, the loss gets a copy without gradients
            own = self._compressed(evicted.detach(), state) if evicted.requires_grad else made
            terms.append(self._reconstruction(segment, evicted, own, full))
        appended = torch.cat((state["compressed"], made))[-self.compressed_length :]
        new = {"compressed": appended}
        if self.counts_attention:
            # vectors of the chunk enter the cache without any attention
            new["attention"] = F.pad(state["attention"][self.segment :], (0, 0, 0, self.segment))
        chosen = to_device(full, evicted.device, torch.bool)
        closed = to_device(part.closing, evicted.device, torch.bool)
        rows = {"compressed": chosen[:, None], "attention": closed}
        return {name: torch.where(rows[name], value, state[name]) for name, value in new.items()}

    def _compressed(self, evicted: Tensor, state: State) -> Tensor:
        """Return f(E) [L / R, B, W] of the vectors E [L, B, W] that leave the cache of `state`."""
        if self.compressor is not None:
            return cast(Tensor, self.compressor(evicted))
        grouped = evicted.unflatten(0, (-1, self.config.ratio))
        if self.config.compression == "mean":
            return grouped.mean(1)
        if self.config.compression == "max":
            return grouped.amax(1)
        most = state["attention"][: self.segment].T.topk(self.segment // self.config.ratio).indices
        chosen = most.sort().values.T  # they stay in order
        return evicted.gather(0, chosen[..., None].expand(-1, -1, evicted.shape[2]))

    def _reconstruction(self, segment: Tensor, evicted: Tensor, made: Tensor, full: list[bool]) -> Tensor:
        """Return the squared error of what a chunk's queries read of C for what they read of E, a mean over heads.

        Args:
            segment: the chunk's hidden vectors, [L, B, W].
            evicted, made: E [L, B, W] and C [L / R, B, W].
            full: for each row whether E left a full cache; the others count nothing.
        Returns: the sum over the L tokens and all rows, in float32 at least.
        """
        with torch.no_grad():
            query = self.scaled_query(self.queries(segment))
            target = past_attention(query, Past(self.keys(evicted), self.heads_of(self.value, evicted)), self.backend)
        keys, values = (
            self.linears.fixed(layer, made).unflatten(-1, (-1, self.width)) for layer in (self.key, self.value)
        )
        if self.key_norm is not None:
            keys = self.key_norm(keys, fixed=True)
        error = past_attention(query, Past(keys, values), self.backend) - target
        error = error.to(state_dtype(error.dtype)).square()
        counted = error.sum((0, 2, 3)) / (self.linears.tp_size * error.shape[2] * error.shape[3])
        return self.linears.sum_over_ranks(counted.where(to_device(full, error.device, torch.bool), 0.0).sum())
