"""Masked mixer: a learned lower-triangular map over the tokens of a chunk, in the place of attention.

Badger, "Masked Mixers for Language Generation and Retrieval", 2025. Each token's output is a weighted sum of the tokens
of its chunk up to itself. The weights are parameters: they depend on where two tokens stand in the chunk, not on what
the tokens are.

    out[t, c] = b[t] + sum_{s <= t} sum_k W[t, s, k] x[s, c + k - (K - 1) // 2]

The flat form has one W for all channels of the residual stream, the headed form one for each head of projected values.

Letters of shapes: T tokens of the call, O open tokens before them, B batch rows, G groups of channels that have a map
of their own (local heads, or one), C channels of a group, L tokens of the map, K kernel width.
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import PositiveInt
from torch import Tensor, nn

from megamem.config.cost import Flops, product
from megamem.config.model import MIXERS, MixerConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State, StateSpec, TensorSpec
from megamem.memory.shared.block_attention import last_columns
from megamem.memory.shared.blocks import block_slices
from megamem.memory.shared.row_by_row import apart, row_chunk
from megamem.ops.slices import slices
from megamem.ops.token_map import map_tokens
from megamem.parallel.linears import Linears, constant, declare, normal


@MIXERS.register
class MaskedMixerConfig(MixerConfig):
    """A learned lower-triangular map over the tokens of a chunk; nothing passes from chunk to chunk."""

    kind: Literal["masked_mixer"] = "masked_mixer"
    """`masked_mixer`"""
    form: Literal["flat", "headed"] = "flat"
    """`flat`: one map for all channels of the residual stream, without projections. `headed`: a map for each of
    model.heads, between a projection to values and one back."""
    kernel_width: PositiveInt = 1
    """Neighboring channels that a weight spans, as the kernel of a convolution over channels does."""
    map_size: PositiveInt | None = None
    """Tokens that the map has weights for; as many as the chunk has if not given. Shorter chunks use its first ones."""

    def tokens(self, model: ModelConfig) -> int:
        """Return the tokens that the map has weights for, given or not."""
        return self.map_size or model.chunk_size

    def groups(self, model: ModelConfig) -> tuple[int, int]:
        """Return how many groups of channels have a map of their own, and the channels of each."""
        return (1, model.hidden_size) if self.form == "flat" else (model.heads, model.resolved_head_dim)

    def check(self, model: ModelConfig) -> None:
        """See `MixerConfig.check`."""
        if model.chunk_size > self.tokens(model):
            raise ValueError(
                f"map_size {self.map_size} is less than model.chunk_size {model.chunk_size}, whose last tokens would "
                f"have no weights; use at least {model.chunk_size}, or chunks of at most {self.map_size} tokens"
            )

    def state_specs(self, model: ModelConfig) -> StateSpec:
        """See `MixerConfig.state_specs`: what the maps are applied to, of the unfinished chunk's tokens."""
        if self.form == "flat":
            return {"open_hidden": TensorSpec(("open", "batch", "hidden"), kind="open")}
        spec = TensorSpec(("open", "batch", "heads", model.resolved_head_dim), shard="heads", kind="open")
        return {"open_values": spec}

    def rotates(self) -> bool:
        """See `MixerConfig.rotates`: places in the chunk are all the positions there are."""
        return False

    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """See `MixerConfig.mixing_flops`: weights of the map, each for all channels."""
        tokens = min(model.chunk_size, sequence_length)
        groups, channels = self.groups(model)
        used = (tokens + 1) / 2 if causal else tokens
        return {"token_map": product(2 * used * self.kernel_width * groups * channels)}

    def projection_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.projection_parameters`: values and output of the headed form."""
        return 0 if self.form == "flat" else 2 * model.hidden_size * model.heads * model.resolved_head_dim

    def projection_biases(self, model: ModelConfig) -> int:
        """See `MixerConfig.projection_biases`."""
        if self.form == "flat" or not model.all_biases:
            return 0
        return model.heads * model.resolved_head_dim + model.hidden_size

    def extra_parameters(self, model: ModelConfig) -> int:
        """See `MixerConfig.extra_parameters`: the maps, their masked half included, and their biases."""
        size = self.tokens(model)
        return self.groups(model)[0] * (size * size * self.kernel_width + size)

    def build(self, model: ModelConfig, linears: Linears, layer: int) -> Mixer:
        """See `MixerConfig.build`."""
        return (FlatMixer if self.form == "flat" else HeadedMixer)(self, model, linears)


class TokenMap(nn.Module):
    """Lower-triangular maps over the tokens of a chunk, one for each group of channels, and a bias per output token."""

    def __init__(self, config: MaskedMixerConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__()
        self.linears, self.chunk = linears, model.chunk_size
        self.replicated = config.form == "flat"
        self.size, kernel = config.tokens(model), config.kernel_width
        groups, axis = (1, None) if self.replicated else (model.heads // linears.tp_size, 0)
        # like a Conv1d whose channels are tokens: output, input, kernel
        shape = (self.size, self.size, kernel) if self.replicated else (groups, self.size, self.size, kernel)
        # the deviation that a convolution starts with in torch: a whole row keeps a third of its inputs' variance
        start = normal((3 * self.size * kernel) ** -0.5)
        self.weight = declare(nn.Parameter(torch.empty(shape)), start, axis, fan_in=len(shape) - 2)
        # one vector for all groups: what has two axes is taken for a matrix, and decays
        self.bias = declare(nn.Parameter(torch.empty(groups * self.size)), constant(0.0), axis)

    def forward(self, history: Tensor, tokens: int, chunk: Chunk) -> Tensor:
        """Map the last `tokens` tokens of history [O + T, B, G, C + K - 1], which lie at `chunk`, to [T, B, G, C].

        The O tokens before them are those of unfinished chunks, aligned in time: a row at offset o wrote the last o.
        """
        weight, bias = (self.linears.shared(p) if self.replicated else p for p in (self.weight, self.bias))
        weight, bias = weight.view(-1, *weight.shape[-3:]), bias.view(-1, self.size)
        if not apart(chunk):
            return self._map(weight, bias, history, tokens, chunk)
        rows = [
            self._map(weight, bias, history[:, row : row + 1], tokens, row_chunk(chunk, row))
            for row in range(chunk.rows)
        ]
        return torch.cat(rows, dim=1)

    def _map(self, weight: Tensor, bias: Tensor, history: Tensor, tokens: int, chunk: Chunk) -> Tensor:
        """See `forward`; weight [G, L, L, K], bias [G, L]."""
        open_tokens = history.shape[0] - tokens
        outputs = []
        parts = block_slices(chunk, tokens, self.chunk)
        # from where a row's chunk begins that is open for longest
        columns = [slice(open_tokens + part.begin - max(part.offsets), open_tokens + part.end) for part in parts]
        for part, seen in zip(parts, slices(history, columns), strict=True):
            # rows at one place of their chunks share a product
            same = len(set(part.offsets)) == 1
            mapped = [
                map_tokens(
                    causal_part(weight, offset, part.tokens),
                    bias[:, offset : offset + part.tokens],
                    seen[max(part.offsets) - offset :, slice(None) if same else slice(row, row + 1)],
                )
                for row, offset in enumerate(part.offsets[:1] if same else part.offsets)
            ]
            outputs.append(mapped[0] if same else torch.cat(mapped, dim=1))
        return outputs[0] if len(outputs) == 1 else torch.cat(outputs)


def causal_part(weight: Tensor, offset: int, tokens: int) -> Tensor:
    """Return the rows of weight [G, L, L, K] for `tokens` output tokens from `offset` on, masked to [G, T, o + T, K].

    The mask is no part of the parameter: what lies above the diagonal gets no gradient, and no moments from one.
    """
    rows = weight[:, offset : offset + tokens, : offset + tokens]
    return rows.movedim(-1, 1).tril(offset).movedim(1, -1)


def with_open(open_tokens: Tensor, x: Tensor) -> Tensor:
    """Return the open tokens [O, B, ...] and those of the call behind them, x [T, B, ...]."""
    return torch.cat((open_tokens, x)) if open_tokens.shape[0] else x


def padded(x: Tensor, left: int, right: int) -> Tensor:
    """Return x [..., channels] with so many channels of zeros in front and behind; x itself if there are none."""
    return F.pad(x, (left, right)) if left or right else x


class MaskedMixer(Mixer):
    """What both forms share: tokens in, tokens of the unfinished chunk kept as they are, their maps."""

    reads_borders = True

    def __init__(self, config: MaskedMixerConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config.state_specs(model), model.state_sizes, linears.tp_size)
        self.linears = linears
        # channels that a kernel spans before and behind its own: those of torch's padding="same"
        self.before = (config.kernel_width - 1) // 2
        self.behind = config.kernel_width - 1 - self.before
        self.token_map = TokenMap(config, model, linears)

    def open_after(self, history: Tensor, tokens: int, chunk: Chunk) -> Tensor:
        """Return the newest of history [O + T, B, ...] that unfinished chunks hold after the call's `tokens` tokens."""
        size = self.sizes["chunk"]
        return last_columns(history, max(end % size if end > 0 else 0 for end in chunk.after(tokens).starts))


class HeadedMixer(MaskedMixer):
    """A map over tokens for each head of projected values; heads are split over tensor-parallel ranks."""

    def __init__(self, config: MaskedMixerConfig, model: ModelConfig, linears: Linears) -> None:
        super().__init__(config, model, linears)
        self.width = model.resolved_head_dim
        width = model.heads * self.width
        self.value = linears.column(model.hidden_size, width, normal(model.init_std), model.all_biases)
        back = normal(model.init_std / (2 * model.layers) ** 0.5)
        self.output = linears.row(width, model.hidden_size, back, model.all_biases)

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        values = self.value(self.linears.enter(hidden)).unflatten(-1, (-1, self.width))
        history, tokens = with_open(state["open_values"], values), values.shape[0]
        mapped = self.token_map(padded(history, self.before, self.behind), tokens, chunk)
        return self.output(mapped.flatten(2)), {"open_values": self.open_after(history, tokens, chunk)}, {}


class FlatMixer(MaskedMixer):
    """One map over tokens for all channels; each tensor-parallel rank maps a run of them."""

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        x = self.linears.enter(hidden)
        history, (tokens, _, channels) = with_open(state["open_hidden"], x), x.shape
        rank = self.linears.tp_rank
        begin, end = channels * rank // self.tp_size, channels * (rank + 1) // self.tp_size
        mapped = self.token_map(self.neighborhood(history, begin, end).unsqueeze(2), tokens, chunk)
        # zeros where other ranks have mapped
        mixed = self.linears.leave(padded(mapped.squeeze(2), begin, channels - end))
        return mixed, {"open_hidden": self.open_after(history, tokens, chunk)}, {}

    def neighborhood(self, x: Tensor, begin: int, end: int) -> Tensor:
        """Return channels `begin` to `end` - 1 of x [O + T, B, hidden_size], and those that kernels span besides.

        Zeros stand for what lies before the first channel or behind the last one.

        Returns: [O + T, B, end - begin + K - 1].
        """
        first, last = begin - self.before, end + self.behind
        return padded(x[..., max(first, 0) : last], max(-first, 0), max(last - x.shape[-1], 0))
