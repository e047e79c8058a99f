"""infinity-former: attention to the chunk beside continuous attention to a signal that holds the whole past.

Martins, Marinho and Martins, "infinity-former: Infinite Memory Transformer", 2022. The long-term memory
(`long_term_memory.py`) stands beside one of two kinds of local attention, whose queries it shares:

    short_memory given   Transformer-XL: what leaves its cache is added to the signal at the next chunk
    not given            attention within the chunk: each chunk is added to the signal at the next one

    output = W_o z_local + W_long z_long                                                          (equation 12)

Gradients stop at what is added and at the old signal; gate and projections learn from reading the new one.

Letters of shapes: T tokens, B batch rows, H local heads, D head_dim, W hidden_size.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Annotated, Literal

import torch
from pydantic import Field, PositiveInt
from torch import Tensor

from megamem.config.cost import Flops, product
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, State, StateSpec, TensorSpec, detach, to_device
from megamem.memory.continuous.gaussian_basis import Basis, Padding, Regression, condition_number
from megamem.memory.continuous.long_term_memory import LongTermMemory, Places, long_term_specs
from megamem.memory.shared.block_attention import (
    AttentionProjections,
    BlockAttention,
    last_columns,
    local_attention_flops,
    open_specs,
)
from megamem.memory.shared.blocks import BlockSlice, block_slices, split_tokens
from megamem.memory.shared.gate import MemoryGate
from megamem.memory.shared.row_by_row import read_rows
from megamem.memory.shared.segment_attention import (
    SegmentAttention,
    bias_parameters,
    segment_flops,
    segment_parameters,
    segment_specs,
)
from megamem.parallel.linears import Linears, constant, normal

WORST_CONDITION = 1e10
"""Largest condition number of the regression: beyond, float64 leaves fewer than six digits of the coefficients."""


@MIXERS.register
class InfinityFormerConfig(MixerConfig):
    """A long-term memory of Gaussian bumps, read by continuous attention beside local attention."""

    kind: Literal["infinity_former"] = "infinity_former"
    """`infinity_former`"""
    basis: PositiveInt = 512
    """Basis functions N: a multiple of the number of `widths`."""
    widths: tuple[Annotated[float, Field(gt=0)], ...] = (0.01, 0.05)
    """Standard deviations of the basis functions; at each center stands one of every width."""
    ridge: float = Field(default=0.5, gt=0)
    """Penalty lambda of the regression (the authors' code has 1 for sorting and 0.5 for GPT-2)."""
    samples: PositiveInt = 512
    """Places M at which the old signal is read when it is fitted anew."""
    tau: float = 0.5
    """Share of [0, 1] that the old signal keeps, between 0 and 1; what is new gets the rest."""
    padding: Padding = "none"
    """`none` fits the signal to the vectors alone, as the paper; `zeros` to zeros around [0, 1] too, as the authors'
    code."""
    short_memory: PositiveInt | None = None
    """Tokens before the chunk whose hidden states are kept as they are (Transformer-XL), a multiple of the chunk; if
    not given, attention is local to the chunk."""
    shared_biases: bool = False
    """Whether all layers share one pair of u and v, as Transformer-XL's, where there is a short memory."""
    restart_after: PositiveInt | None = None
    """Tokens in the long-term memory after which it begins again (the paper's memory threshold); never if not given."""
    sticky: Literal["none", "spread", "random"] = "none"
    """Where the old signal is read: at equal distances; where the chunk before attended, at equal shares of its
    attention (`spread`), or at random draws (`random`, the paper's)."""
    bins: int = Field(default=128, ge=0)
    """Intervals of the histogram of attention that sticky memories draw from, 2 or more."""
    bin_place: float = Field(default=0.5, ge=0, le=1)
    """Where in its interval the signal is read: 0.5 in the middle; 0 at the left edge, as the authors' code."""
    seed: int = Field(default=0, ge=0)
    """Seed of the random draws."""
    kl_weight: float = Field(default=1e-5, ge=0)
    """Weight of the divergence between attention and a normal distribution of width `kl_width`."""
    kl_width: float = Field(default=0.05, gt=0)
    """sigma_0 of the divergence."""
    kl_mean: float | None = None
    """mu_0 of the divergence; if not given, only the width of attention counts."""
    min_variance: float = Field(default=1e-6, gt=0)
    """Smallest variance of attention."""
    gate_init: float | None = None
    """Start value of a gate for each head before its sigmoid, by which the long-term memory's output is multiplied; no
    gate if not given, as in the paper."""
    output_init: Literal["normal", "zero"] = "normal"
    """How the projection of the long-term memory's output starts: `normal` as others; at `zero` the memory adds nothing
    until it has learned to, as a memory that is added to a pretrained model should."""

    def regression(self, model: ModelConfig) -> Regression:
        """Return how the vectors of a chunk become a signal."""
        basis = Basis(self.basis, self.widths)
        return Regression(basis, self.ridge, model.chunk_size, self.samples, self.tau, self.padding)

    @property
    def places(self) -> Places:
        """Where the old signal is sampled."""
        return Places(self.sticky, self.bins, self.bin_place, self.seed)

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        chunk = model.chunk_size
        if not 0 < self.tau < 1:
            raise ValueError(f"tau {self.tau:g} is not between 0 and 1: old signal and new vectors both need a share")
        if not self.widths or self.basis % len(self.widths) or self.basis == len(self.widths):
            raise ValueError(
                f"basis {self.basis} with {len(self.widths)} widths; give widths, and for basis at least twice as many "
                "functions, a multiple of their number"
            )
        if self.short_memory is not None and self.short_memory % chunk:
            raise ValueError(
                f"short_memory {self.short_memory} is no multiple of model.chunk_size {chunk}: parts of chunks would "
                f"leave it; use {max(self.short_memory // chunk, 1) * chunk}"
            )
        if self.shared_biases and self.short_memory is None:
            raise ValueError("shared_biases true needs a short_memory: local attention has rotary positions, no biases")
        changed = [n for n in ("bins", "bin_place", "seed") if getattr(self, n) != type(self).model_fields[n].default]
        if self.sticky == "none" and changed:
            raise ValueError(f"{changed[0]} is for sticky memories, but sticky is none; use spread or random")
        if self.sticky != "none" and self.bins < 2:
            raise ValueError(
                f"sticky {self.sticky} with bins {self.bins}: sticky memories draw from a histogram of attention; give "
                "at least 2 bins (the paper's code has 128)"
            )
        condition = condition_number(self.regression(model))
        if not condition < WORST_CONDITION:
            raise ValueError(
                f"basis {self.basis} with widths {list(self.widths)} and ridge {self.ridge:g} makes the regression "
                f"ill-conditioned (condition number {condition:.1e}, at most {WORST_CONDITION:.0e}); use fewer "
                "functions, narrower widths or a larger ridge"
            )

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the signal, what is added to it next, and the state of local attention."""
        long_term = long_term_specs(self.regression(model), self.places)
        if self.short_memory is not None:
            return {**segment_specs(self.short_memory), **long_term}
        hidden = TensorSpec(("open", "batch", "hidden"), kind="open")
        return {**open_specs(model), "open_hidden": hidden, **long_term}

    def shared_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.shared_parameters`."""
        return bias_parameters(model) if self.shared_biases else 0

    def rotates(self) -> bool:
        """See `MixerConfig.rotates`: with a short memory positions are distances."""
        return self.short_memory is None

    def auxiliary_losses(self) -> tuple[str, ...]:
        """See `MixerConfig.auxiliary_losses`."""
        return ("attention_divergence",) if self.kl_weight else ()

    def query_key_norms(self) -> int:
        """See `MixerConfig.query_key_norms`."""
        return 1

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`; every chunk reads the memory, those before it is written too."""
        chunk = min(model.chunk_size, sequence_length)
        short = self.short_memory
        if short is None:
            parts = local_attention_flops(chunk, model, sequence_length, causal)
        else:
            parts = segment_flops(model, sequence_length, causal, lambda begin: min(begin, short), None)
        return {**parts, **self._long_term_flops(model, chunk, sequence_length)}

    def _long_term_flops(self, model: ModelConfig, chunk: int, sequence_length: int) -> dict[str, Flops]:
        """Count regression, keys and values of the signal, and continuous attention, per token."""
        width, heads, count = model.hidden_size, model.heads * model.resolved_head_dim, self.basis
        chunks = -(-sequence_length // chunk)
        old = range(max(chunks - 1 - (self.short_memory or 0) // chunk, 0))
        cycle = -(-self.restart_after // chunk) if self.restart_after else len(old) + 1
        first = sum(number % cycle == 0 for number in old) / chunks / chunk
        later = sum(number % cycle > 0 for number in old) / chunks / chunk
        fit = 2.0 * count * chunk * width  # of L vectors
        again = 2.0 * count * width * (count if self.sticky == "none" else 2 * self.samples)
        gate = 2.0 * 3 * width * width
        keys = 2.0 * width * heads * 2 / chunk
        read = 2.0 * width * (heads + 2) * count / chunk  # values, and the weights over basis functions
        written = first + later
        return {
            "memory_gate": Flops(gate, gate),
            "memory_update": Flops(fit * written + again * later, fit * written),
            "memory_keys_values": product(keys + read),
            "memory_attention": product(2.0 * heads * (2 + count)),
            "memory_output": product(2.0 * heads * width),
        }

    def extra_parameters(self, model: ModelConfig) -> int:
        """Count gate, focus, keys, values and output of the memory, and what Transformer-XL adds."""
        width, heads = model.hidden_size, model.heads * model.resolved_head_dim
        long_term = width * (3 * width + 1) + 2 * self.basis + 3 * width * heads
        gates = model.heads * (self.gate_init is not None)
        return long_term + gates + segment_parameters(model) * (self.short_memory is not None)

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> InfinityFormer:
        """See `MixerConfig.build`."""
        made = InfinityFormerXL if self.short_memory is not None else InfinityFormerLocal
        return made(self, model, linears, layer)


class InfinityFormer(AttentionProjections):
    """Local attention, which subclasses bring, beside a long-term memory that the same queries read."""

    reads_borders = True
    differentiable_state = False
    remembers_keys = False
    segment: int
    """Tokens of a chunk."""

    def add_long_term(self, config: InfinityFormerConfig, model: ModelConfig, linears: Linears, layer: int) -> None:
        """Build the long-term memory of layer `layer`, behind the parts of local attention."""
        self.config, self.segment = config, model.chunk_size
        restart = config.restart_after
        self.long_term = LongTermMemory(
            model,
            linears,
            config.regression(model),
            config.places,
            layer=layer,
            restart_after=None if restart is None else -(-restart // model.chunk_size),
            min_variance=config.min_variance,
            prior=(config.kl_width, config.kl_mean),
        )
        back = normal(model.init_std / (2 * model.layers) ** 0.5) if config.output_init == "normal" else constant(0.0)
        self.long_output = linears.row(model.heads * self.width, model.hidden_size, back)
        self.gate = None if config.gate_init is None else MemoryGate(model, linears, config.gate_init)

    @abstractmethod
    def attend(self, x: Tensor, query: Tensor, state: State, part: BlockSlice, chunk: Chunk) -> tuple[Tensor, State]:
        """Attend locally from tokens that lie in one chunk of each row.

        x: the tokens [T, B, W]; query: `queries` of them, [T, B, H, D]; part, chunk: where they lie.
        Returns: [T, B, H, D]; the new tensors of local attention's state.
        """

    @abstractmethod
    def becomes_old(self, x: Tensor, state: State) -> Tensor:
        """Return the vectors [L, B, W] that the next chunk adds to the signal, in rows whose chunk ends with x."""

    def written(self, part: BlockSlice) -> list[int]:
        """Return how many chunks of each row's document have become old before the chunk of a slice."""
        return [max(tokens - (self.config.short_memory or 0), 0) // self.segment for tokens in part.finished_tokens]

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        x, state = self.linears.enter(hidden), detach(state)
        divergences: list[Tensor] = []
        both, state = read_rows(
            self.specs, state, chunk, self.segment,
            lambda rows, own, here: self._read_segments(x[:, rows], own, here, divergences),
        )  # fmt: skip
        local, long_term = both.chunk(2, dim=2)
        if self.gate is not None:
            long_term = long_term * self.gate().to(long_term.dtype)
        mixed = self.linears.row_sum([(self.output, local.flatten(2)), (self.long_output, long_term.flatten(2))])
        if not self.config.kl_weight:
            return mixed, state, {}
        # a mean over the call's tokens and rows, of which those with a memory count
        divergence = torch.cat(divergences).sum() / (x.shape[0] * chunk.rows)
        return mixed, state, {"attention_divergence": self.config.kl_weight * divergence}

    def _read_segments(self, x: Tensor, state: State, chunk: Chunk, divergences: list[Tensor]) -> tuple[Tensor, State]:
        """Read a call chunk by chunk.

        x: [T, B, W]; divergences: gets the regularizer of each row and chunk, summed over tokens.
        Returns: what the heads put out, local and then long-term [T, B, 2 H, D], and the new state.
        """
        outputs = []
        parts = block_slices(chunk, x.shape[0], self.segment)
        for part, (tokens,) in zip(parts, split_tokens(parts, x), strict=True):
            state = self.reset_inside(state, part.begin, part.starts, x)
            here = chunk.part(part.begin, part.end)
            query, written = self.queries(tokens), self.written(part)
            coefficients = self.long_term.update(state, written, [offset == 0 for offset in part.offsets])
            reading = self.long_term.read(self.scaled_query(query), coefficients, written)
            mixed, new = self.attend(tokens, query, state, part, here)
            outputs.append(torch.cat((mixed, reading.values), dim=2))
            divergences.append(reading.divergence)
            new["coefficients"] = coefficients
            if reading.histogram is not None:
                new["histogram"] = state["histogram"] + reading.histogram
            if any(part.closing):
                new |= self._close(tokens, state, new, part, written)
            state = {**state, **new}
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs), state

    def _close(self, x: Tensor, state: State, new: State, part: BlockSlice, written: list[int]) -> State:
        """Return what the next chunk adds and where it samples the signal, in rows whose chunk ends with a slice.

        x: the slice's tokens [T, B, W]; state, new: before it, and what it has changed so far.
        """
        closing = to_device(part.closing, x.device, torch.bool)
        closed = {"evicted": torch.where(closing[:, None], self.becomes_old(x, state), state["evicted"])}
        if "histogram" in new:
            samples = self.long_term.samples(new["histogram"], written)
            closed["samples"] = torch.where(closing, samples, state["samples"])
            closed["histogram"] = new["histogram"].where(~closing, 0.0)
        return closed


class InfinityFormerXL(InfinityFormer, SegmentAttention):
    """Transformer-XL with a long-term memory of what leaves its cache."""

    def __init__(self, config: InfinityFormerConfig, model: ModelConfig, linears: Linears, layer: int) -> None:
        assert config.short_memory is not None
        specs, length, shares = config.state_specs(model), config.short_memory, config.shared_biases
        SegmentAttention.__init__(self, model, linears, specs, memory_length=length, shares_biases=shares)
        self.add_long_term(config, model, linears, layer)

    def attend(self, x: Tensor, query: Tensor, state: State, part: BlockSlice, chunk: Chunk) -> tuple[Tensor, State]:
        """See `InfinityFormer.attend`; x: [T, B, W]; query: [T, B, H, D]."""
        mixed, new, _ = self.mix(x, query, state, chunk)
        return mixed, new

    def becomes_old(self, x: Tensor, state: State) -> Tensor:
        """See `InfinityFormer.becomes_old`: the oldest of the cache, zeros where it is not full; x: [T, B, W]."""
        cache: Tensor = state["memory"]
        return cache[: self.segment]


class InfinityFormerLocal(InfinityFormer, BlockAttention):
    """Attention local to the chunk with a long-term memory of the chunks before."""

    def __init__(self, config: InfinityFormerConfig, model: ModelConfig, linears: Linears, layer: int) -> None:
        BlockAttention.__init__(self, model, linears, config.state_specs(model), model.chunk_size)
        self.add_long_term(config, model, linears, layer)

    def attend(self, x: Tensor, query: Tensor, state: State, part: BlockSlice, chunk: Chunk) -> tuple[Tensor, State]:
        """See `InfinityFormer.attend`; x: [T, B, W]; query: [T, B, H, D]."""
        mixed, new = self._attend(query, self.keys(x), self.heads_of(self.value, x), state, part)
        columns = torch.cat((state["open_hidden"], x))
        # a copy: a view would keep all columns alive
        return mixed, {**new, "open_hidden": last_columns(columns, part.open_tokens_after).clone()}

    def becomes_old(self, x: Tensor, state: State) -> Tensor:
        """See `InfinityFormer.becomes_old`: the chunk itself, its open tokens and x [T, B, W]."""
        columns = torch.cat((state["open_hidden"], x))
        return columns[-self.segment :]
