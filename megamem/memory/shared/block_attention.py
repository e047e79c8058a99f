"""Causal attention within blocks, with whatever a mechanism puts in front of each block.

The base of plain local attention and of memories beside it: they override `recall` (what the queries of a block may
see besides the block) or `mix` (what joins the output of local attention), and `remember` (what a finished block
leaves behind).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megamem.config.cost import Flops, attention_flops
from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, Losses, Mixer, State, StateSpec, TensorSpec
from megamem.memory.shared.blocks import Span, phase_tables, spans, waiting_visible
from megamem.ops.attention.softmax import Past, attention
from megamem.ops.rotary import turn
from megamem.parallel.linears import Linears, normal


def open_specs(model: ModelConfig) -> dict[str, TensorSpec]:
    """Keys (before rotation) and values of the unfinished block."""
    spec = TensorSpec(("open", "batch", "kv_heads", model.resolved_head_dim), shard="kv_heads", kind="open")
    return {"open_keys": spec, "open_values": spec}


def resolve_block(block: int | None, model: ModelConfig) -> int:
    """A mixer's `block` field, the chunk if not given. Raises ValueError unless it divides the chunk."""
    size = block or model.chunk_size
    if model.chunk_size % size:
        raise ValueError(f"block {size} does not divide model.chunk_size {model.chunk_size}")
    return size


def local_attention_flops(block: int, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
    """FLOPs per token of attention within blocks: on average (block + 1) / 2 keys, or all of the block's."""
    block = min(block, sequence_length)
    return {"attention": attention_flops(model.heads, model.resolved_head_dim, (block + 1) / 2 if causal else block)}


def last_columns(x: Tensor, count: int) -> Tensor:
    """The last `count` tokens of x [tokens, ...]; none of x's memory is kept alive for an empty answer."""
    return x[x.shape[0] - count :] if count else x.new_zeros((0, *x.shape[1:]))


def unturned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """In the place of `turn` where positions are learned: the embedding has them already."""
    return x


class AttentionProjections(Mixer):
    """Query, key, value and output projections shared by attention mixers; heads are split over ranks."""

    def __init__(self, model: ModelConfig, linears: Linears, specs: StateSpec) -> None:
        sizes = {
            "heads": model.heads,
            "kv_heads": model.resolved_kv_heads,
            "hidden": model.hidden_size,
            "chunk": model.chunk_size,
        }
        super().__init__(specs, sizes, linears.tp_size)
        self.linears = linears
        self.width = model.resolved_head_dim
        self.theta = model.rope_theta
        self.backend = model.attention
        self.score_scale = model.score_scale
        self.rotates = model.positions == "rotary"
        self.turn = turn if self.rotates else unturned
        init = normal(model.init_std)
        self.query = linears.column(model.hidden_size, model.heads * model.resolved_head_dim, init, model.bias)
        self.key = linears.column(
            model.hidden_size, model.resolved_kv_heads * model.resolved_head_dim, init, model.bias
        )
        self.value = linears.column(
            model.hidden_size, model.resolved_kv_heads * model.resolved_head_dim, init, model.bias
        )
        back = normal(model.init_std / (2 * model.layers) ** 0.5)
        self.output = linears.row(model.heads * model.resolved_head_dim, model.hidden_size, back, model.bias)

    def project(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Query, key and value [tokens, batch, local heads, width] before rotation."""
        x = self.linears.enter(hidden)
        query, key, value = (layer(x).unflatten(-1, (-1, self.width)) for layer in (self.query, self.key, self.value))
        return query, key, value

    def asking(self, query: Tensor) -> Tensor:
        """Queries as softmax attention gets them: it divides scores by sqrt(head_dim), the rest is done here."""
        return query if self.score_scale == 1.0 else query * self.score_scale

    def local(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values [tokens, batch, local kv heads, width] of the present block as its queries see them.

        As they are; `megamem.evaluation.corruption` replaces this to ask what a model knows without its local context.
        """
        return keys, values


class BlockAttention(AttentionProjections):
    """Softmax attention, causal inside each block of `block` tokens; rotary positions restart with the block."""

    def __init__(self, model: ModelConfig, linears: Linears, specs: StateSpec, block: int) -> None:
        super().__init__(model, linears, specs)
        self.block = block

    def recall(self, state: State, span: Span, like: Tensor) -> list[Past]:
        """What every query of the span's blocks may see of the past; `like` are the queries, rotated."""
        return []

    def mix(self, output: Tensor, query: Tensor, state: State, span: Span) -> Tensor:
        """The output of attention joined with what a memory answers to the same queries.

        output, query (before rotation): [tokens, batch, local heads, width].
        """
        return output

    def remember(self, state: State, span: Span, keys: Tensor, values: Tensor) -> State:
        """New memory tensors after a span that closes the block of some rows (`span.closing`).

        keys (before rotation), values: [block, batch, local kv heads, width]; only closing rows hold a whole block.
        """
        return {}

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """See `Mixer.forward`."""
        projections = self.project(hidden)
        outputs = []
        for span in spans(chunk.starts, projections[0].shape[0], self.block):
            query, key, value = (x[span.begin : span.end] for x in projections)
            output, state = self._attend(query, key, value, state, span)
            outputs.append(output)
        mixed = outputs[0] if len(outputs) == 1 else torch.cat(outputs)
        return self.output(mixed.flatten(2)), state, {}

    def _attend(self, query: Tensor, key: Tensor, value: Tensor, state: State, span: Span) -> tuple[Tensor, State]:
        waiting = state["open_keys"].shape[0]
        keys = torch.cat((state["open_keys"], key)) if waiting else key
        values = torch.cat((state["open_values"], value)) if waiting else value
        cos, sin = phase_tables(span, waiting, self.width, self.theta, keys)
        seen_keys, seen_values = self.local(keys, values)
        rotated = self.turn(seen_keys, cos, sin)
        turned = self.turn(query, cos[waiting:], sin[waiting:])
        past = self.recall(state, span, turned)
        if waiting:
            visible = waiting_visible(span, waiting, key.device)
            past = [*past, Past(rotated[:waiting], seen_values[:waiting], visible)]
        output = attention(self.asking(turned), rotated[waiting:], seen_values[waiting:], past, self.backend)
        output = self.mix(output, query, state, span)
        new = dict(state)
        if any(span.closing):
            new |= self.remember(state, span, keys[-self.block :], values[-self.block :])
        new["open_keys"], new["open_values"] = (
            last_columns(keys, span.remaining),
            last_columns(values, span.remaining),
        )
        return output, new
