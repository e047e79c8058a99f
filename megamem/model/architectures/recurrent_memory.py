"""Recurrent Memory Transformer: a decoder that hands a few hidden vectors from the end of each chunk to the next one.

Bulatov et al., "Recurrent Memory Transformer" (2022). Two forms:

    read_write   layers read [memory + r | tokens of the chunk | w]; the new memory is what they make of w
    overwrite    layers read [memory | tokens, the last one replaced by the memory]; the new memory is what they make
                 of that last place (the baseline of the paper on memory models; its first memory is all ones)

r and w are learned rows. `read_write` follows the public package recurrent-memory-transformer-pytorch, but for the
attention among the memory rows themselves: here it is causal as everywhere, so that any mixer may be inside. Tokens see
the rows before them and never those behind; the rows behind see all.

    layers       m0  m1 | t0 t1 t2 t3 | w0  w1          chunk c, as its layers see it
                  ▲                      │
                  └── next chunk's ──────┘              state `memory_tokens`, [memory_tokens, batch, hidden_size]

Every token is predicted, with `overwrite` also the one after a replaced token (from the memory's place): so losses are
those of a whole text. The paper on memory models leaves those out of its loss.

Gradients flow through the memory as far as the window of backpropagation reaches. In a pipeline the memory leaves the
last stage and enters the first one (`megamem/pipeline/schedule.py`, interleaved).
"""

from __future__ import annotations

from typing import Literal

import torch
from pydantic import PositiveInt
from torch import Tensor, nn

from megamem.config.model import ARCHITECTURES, ArchitectureConfig, LayerPart, ModelConfig
from megamem.memory.base import Chunk, Losses, States, StateSpec, TensorSpec, to_device
from megamem.model.architectures.decoder import Decoder
from megamem.model.layer import tied
from megamem.parallel.linears import Linears, declare, normal

MEMORY = "memory_tokens"
"""Name of the component, and of the tensor in it."""


@ARCHITECTURES.register
class RecurrentMemoryConfig(ArchitectureConfig):
    """Recurrent Memory Transformer: memory tokens leave the top of the model and enter its bottom one chunk later."""

    kind: Literal["recurrent_memory"] = "recurrent_memory"
    """`recurrent_memory`"""
    memory_tokens: PositiveInt = 16
    """Hidden vectors that pass from chunk to chunk; 1 with `overwrite`."""
    form: Literal["read_write", "overwrite"] = "read_write"
    """`read_write`: the memory stands before the chunk, learned write rows behind it. `overwrite`: it stands before the
    chunk and in the place of its last token, which the model never reads."""

    def check(self, model: ModelConfig) -> None:
        """See `ArchitectureConfig.check`."""
        if self.form == "overwrite" and self.memory_tokens != 1:
            raise ValueError(f"architecture.memory_tokens {self.memory_tokens} does not go with form overwrite; use 1")
        if self.form == "overwrite" and model.chunk_size == 1:
            raise ValueError("architecture.form overwrite leaves no token to read with chunk_size 1; use at least 2")
        if model.positions == "learned":
            raise ValueError("architecture recurrent_memory adds rows without a place; it needs rotary positions")

    @property
    def rows_before(self) -> int:
        """Rows in front of each chunk's tokens."""
        return self.memory_tokens

    @property
    def rows_behind(self) -> int:
        """Rows behind each chunk's tokens."""
        return self.memory_tokens if self.form == "read_write" else 0

    def layer_part(self, model: ModelConfig, layer: int) -> LayerPart:
        """See `ArchitectureConfig.layer_part`: chunks have the memory's rows too."""
        rows = self.rows_before + model.chunk_size + self.rows_behind
        return LayerPart(model.model_copy(update={"chunk_size": rows}), model.configured_mixer(layer))

    def state_specs(self, model: ModelConfig) -> dict[str, StateSpec]:
        """Declare the memory: hidden vectors, whole on every tensor-parallel rank."""
        return {MEMORY: {MEMORY: TensorSpec((self.memory_tokens, "batch", "hidden"))}}

    def extra_parameters(self, model: ModelConfig) -> int:
        """Return the number of parameters of the learned rows r and w."""
        return 2 * self.memory_tokens * model.hidden_size if self.form == "read_write" else 0

    def unread_places(self, model: ModelConfig) -> range:
        """See `ArchitectureConfig.unread_places`: the one that the memory takes with `overwrite`."""
        return range(model.chunk_size - 1, model.chunk_size) if self.form == "overwrite" else range(0)

    def training_window(self, model: ModelConfig) -> int:
        """See `ArchitectureConfig.training_window`: what w becomes is read in the next chunk only."""
        return 2 if self.form == "read_write" else 1

    def summary(self, model: ModelConfig) -> str:
        """See `ArchitectureConfig.summary`."""
        rows = self.rows_before + self.rows_behind
        return (
            f"recurrent memory: {self.memory_tokens} tokens pass from chunk to chunk; layers read {rows} more rows with"
            f" each {model.chunk_size:,} tokens"
        )

    def build(self, model: ModelConfig, linears: Linears, layers: range) -> RecurrentMemory:
        """See `ArchitectureConfig.build`."""
        return RecurrentMemory(model, linears, layers, self)


class MemoryRows(nn.Module):
    """The learned rows around a chunk: r, added to the memory that is read, and w, which becomes the new memory."""

    def __init__(self, model: ModelConfig, linears: Linears, count: int) -> None:
        super().__init__()
        self.linears = linears
        start = normal(model.init_std)
        self.read = declare(nn.Parameter(torch.empty(count, model.hidden_size)), start)
        self.write = declare(nn.Parameter(torch.empty(count, model.hidden_size)), start)

    def forward(self, memory: Tensor) -> tuple[Tensor, Tensor]:
        """Rows before and behind the chunk, [count, batch, hidden] each, from the memory [count, batch, hidden]."""
        return memory + self.read[:, None], self.write[:, None].expand_as(memory)


class RecurrentMemory(Decoder):
    """The layers `layers` of a decoder between memory rows; all rows of a call stand at the same place of a chunk."""

    def __init__(self, model: ModelConfig, linears: Linears, layers: range, settings: RecurrentMemoryConfig) -> None:
        super().__init__(model, linears, layers)
        self.settings = settings
        self.rows_before, self.rows_behind = settings.rows_before, settings.rows_behind
        if self.first and settings.form == "read_write":
            self.memory_rows = MemoryRows(model, linears, settings.memory_tokens)

    def memories_change(self, start: int, tokens: int) -> bool:
        """See `Stage.memories_change`: where a chunk ends."""
        return (start + tokens) % self.config.chunk_size == 0

    def layer_chunk(self, chunk: Chunk) -> Chunk:
        """Where a call lies as its layers see it: every chunk of a document is longer by the memory's rows.

        Raises: ValueError if rows stand at different places of their chunks.
        """
        size = self.config.chunk_size
        long = self.settings.rows_before + size + self.settings.rows_behind
        self.check_grid(chunk)
        place = chunk.starts[0] % size
        inside = self.settings.rows_before + place if place else 0
        dropout = chunk.dropout
        if dropout is not None:
            # apart enough that the rows of no two chunks have one place, wherever documents begin
            dropout = dropout.at((dropout.offset - place) * long + inside)
        return Chunk(tuple(start // size * long + inside for start in chunk.starts), dropout=dropout)

    def read_chunk(self, x: Tensor, states: States, chunk: Chunk) -> tuple[Tensor, States, Losses]:
        """See `Stage.read_chunk`; x: ids [tokens, batch], or hidden [rows and tokens, batch, hidden_size]."""
        inside = self.layer_chunk(chunk)
        tokens = self.tokens_of(x, chunk)
        before, behind = self.rows_around(chunk.starts[0], tokens)
        hidden = x
        if self.first:
            embedded = self.linears.join_tokens(self.embed(x, chunk))
            if self.ties_resets and all(chunk.fresh()):
                embedded = tied(embedded, states[MEMORY])
            memory = self.model_memories[MEMORY].reset(states[MEMORY], chunk, embedded.device, embedded.dtype)
            states = {**states, MEMORY: memory}
            hidden = self._with_rows(embedded, memory[MEMORY], chunk, before, behind)
        layers = {name: states[name] for name in self.layer_components}
        hidden, new_states, losses = self.run_layers(hidden, layers, inside)
        if self.last:
            # with tokens split over ranks, rows and tokens are told apart on the whole call
            whole = self.linears.join_tokens(hidden)
            hidden = self.linears.split_tokens(whole[before : before + tokens])
            if self.memories_change(chunk.starts[0], tokens):
                # a copy: a view would keep the whole call alive
                written = whole[whole.shape[0] - self.settings.memory_tokens :].clone()
                return hidden, {**new_states, MEMORY: {MEMORY: written}}, losses
        if self.first:  # the memory stands until the chunk ends, or until the last stage sends a new one
            new_states[MEMORY] = states[MEMORY]
        return hidden, new_states, losses

    def _with_rows(self, embedded: Tensor, memory: Tensor, chunk: Chunk, before: int, behind: int) -> Tensor:
        """Put the memory's rows around the tokens: this rank's [rows and tokens, batch, hidden].

        Args:
            embedded: [tokens, batch, hidden], all tokens of the call.
            memory: [memory_tokens, batch, hidden], zeros in rows whose document begins.
            before, behind: how many rows go where (`rows_around`).
        """
        if self.settings.form == "read_write":
            read, write = self.memory_rows(memory)
            parts = [read, embedded, write] if behind else [read, embedded]
            return self.linears.split_tokens(torch.cat(parts[0 if before else 1 :]))
        # the first memory of a document is all ones, and stands there for its whole first chunk
        first = to_device([start < self.config.chunk_size for start in chunk.starts], memory.device, torch.bool)
        memory = memory.masked_fill(first[:, None], 1.0)
        if self.memories_change(chunk.starts[0], embedded.shape[0]):
            embedded = torch.cat((embedded[:-1], memory))
        return self.linears.split_tokens(torch.cat((memory, embedded)) if before else embedded)
