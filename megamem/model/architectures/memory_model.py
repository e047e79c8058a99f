"""Memory model: an encoder makes a few vectors of each chunk, a decoder reads them in the place of earlier chunks.

Badger, "Language Model Memory and Memory Models for Language". Both are rows of layers; the encoder's come first:

    decoder   layers E, E+1, ...    [ m0 | m1 | - | t0 t1 t2 t3 ]      chunk 2: memories of chunks 0 and 1, an empty
                                      ▲    ▲                           slot, the chunk's tokens
    encoder   layers 0 .. E-1       t0 t1 t2 t3   t0 t1 t2 t3          each chunk by itself, with its own embedding

A chunk is encoded in the call that ends it. Its memories are what the encoder's last norm makes of the last token (of
the last token of each of `memories_per_chunk` equal parts), projected to the decoder's width. From the next chunk on
they stand in front of the tokens (state `memories`), and gradients reach them as far as the window of backpropagation
goes. Without an encoder all slots stay empty: the control of the paper's comparisons.

In a pipeline the encoder's stages come before the decoder's. What goes up, for each call:

    into an encoder's layer       [ the chunk, if the call ends it | the tokens' embeddings for the decoder ]
    into the decoder's first      [ the chunk's memories, if the call ends it | the tokens' embeddings ]
    into the decoder's others     [ slots, if the call begins a chunk | tokens ]
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal, cast

import torch
from torch import Tensor

from megamem.config.model import ARCHITECTURES, ModelConfig
from megamem.memory.base import Chunk, Losses, Stateful, States
from megamem.model.encoder_rows import apart, finished_chunk, joined
from megamem.model.encoder_stage import EncoderStage
from megamem.model.layer import tied
from megamem.model.memory_model_settings import MEMORIES, OPEN_CHUNK, MemoryModelSettings
from megamem.model.memory_writer import filled_slots, with_memories
from megamem.model.stage import add_losses
from megamem.parallel.linears import Linears, token_share


@ARCHITECTURES.register
class MemoryModelConfig(MemoryModelSettings):
    """Memory model: the decoder reads a few vectors in the place of each earlier chunk, which an encoder makes."""

    kind: Literal["memory_model"] = "memory_model"
    """`memory_model`"""

    def build(self, model: ModelConfig, linears: Linears, layers: range) -> MemoryModel:
        """See `ArchitectureConfig.build`."""
        return MemoryModel(model, linears, layers, self)


class MemoryModel(EncoderStage):
    """The layers `layers` of encoder and decoder; all rows of a call stand at the same place of a chunk."""

    def __init__(self, model: ModelConfig, linears: Linears, layers: range, settings: MemoryModelSettings) -> None:
        super().__init__(model, linears, layers, settings.encoder)
        self.settings = settings
        self.rows_before = settings.rows_before
        if settings.encoder is not None:
            widths = settings.encoder.memory_widths(model, settings.compressed_size)
            self.add_writer(settings.encoder.inside(model), settings.memories_per_chunk, widths)

    @property
    def one_grid(self) -> bool:
        """See `Stage.one_grid`: chunks are encoded, and memories join them, where they end and begin."""
        return True

    @property
    def layer_components(self) -> Mapping[str, Stateful]:
        """See `Stage.layer_components`: the decoder's mixers. The encoder reads whole chunks and keeps nothing."""
        return {f"layers.{i}": self.layer(i).mixer for i in self.span if i >= self.encoder_layers}

    def grid_place(self, start: int) -> int:
        """See `Stage.grid_place`; where empty slots are left out, rows of a call have as many memories as others.

        Rows in left padding of other lengths come to other numbers of memories, and so have other places.
        """
        size = self.config.chunk_size
        place, chunks = start % size, min(start // size, self.settings.slots)
        return place + chunks * size if self.settings.positions == "variable" else place

    def _finished(self, start: int) -> int:
        """Return how many chunks a document has behind it at position `start`, at most as many as there are slots."""
        return min(max(start // self.config.chunk_size, 0), self.settings.slots)

    def _ends(self, start: int, tokens: int) -> bool:
        """Return whether a call ends a chunk. Raises ValueError if it runs across the end of one."""
        self.rows_around(start, tokens)
        return (start + tokens) % self.config.chunk_size == 0

    def _border(self, layer: int, tokens: int, rows: int, start: int) -> tuple[int, int, int]:
        """Return the shape of what comes to `layer` from the stage below; see `border_shape`."""
        split = token_share(self.linears)[1]
        size, width, ends = self.config.chunk_size, self.config.hidden_size, self._ends(start, tokens)
        if layer < self.encoder_layers:
            width = max(width, self.encoder_width)
            return (tokens + (size if ends else 0)) // split, rows, width
        if layer == self.encoder_layers:
            return tokens // split + (self.settings.memories_per_chunk if ends else 0), rows, width
        return (tokens + (0 if start % size else self.rows_before)) // split, rows, width

    def border_shape(self, tokens: int, rows: int, start: int = 0) -> tuple[int, int, int]:
        """See `Stage.border_shape`."""
        return self._border(self.span.start, tokens, rows, start)

    def shape_above(self, tokens: int, rows: int, start: int = 0) -> tuple[int, int, int]:
        """See `Stage.shape_above`."""
        return self._border(self.span.stop, tokens, rows, start)

    def tokens_of(self, entered: Tensor, chunk: Chunk) -> int:
        """See `Stage.tokens_of`."""
        if self.first:
            return entered.shape[0]
        start, count = chunk.starts[0], entered.shape[0] * token_share(self.linears)[1]
        place = start % self.config.chunk_size
        if self.span.start > self.encoder_layers:
            return count - (0 if place else self.rows_before)
        left = self.config.chunk_size - place
        # a call that ends its chunk has rows beside its tokens, and so more of them than any other
        return left if entered.shape[0] == self.border_shape(left, chunk.rows, start)[0] else count

    def layer_chunk(self, chunk: Chunk) -> Chunk:
        """Return where a call lies as the decoder's layers see it.

        With fixed places every chunk of a document is longer by the slots; else each is a document of its own, longer
        by the memories that there are.
        """
        size, start, fixed = self.config.chunk_size, chunk.starts[0], self.settings.positions == "fixed"
        long, place = self.rows_before + size, start % size
        before = self.rows_before if fixed else self._finished(start) * self.settings.memories_per_chunk
        inside = before + place if place else 0
        dropout = chunk.dropout
        if dropout is not None:
            # apart enough that the rows of no two chunks have one place, wherever documents begin
            dropout = dropout.at((dropout.offset - place) * long + inside)
        begins = (each // size * long if fixed else 0 for each in chunk.starts)
        return Chunk(tuple(begin + inside for begin in begins), dropout=dropout)

    def prepare(self, tokens: Tensor, places: Sequence[Chunk]) -> Sequence[Chunk]:
        """See `Stage.prepare`: chunks are encoded side by side.

        Not where documents begin inside chunks, which then are not encoded whole; where dropout draws by the place of a
        call; or where layers have losses of their own, which belong to one chunk.
        """
        size, count, rows = self.config.chunk_size, len(places), tokens.shape[1]
        inside = any(place.begins_inside or any(start % size for start in place.starts) for place in places)
        if not self.encoder_layers or count == 1 or inside:
            return places
        if self.encoder_has_losses or places[0].dropout is not None:
            return places
        beside_each_other = tokens.view(count, size, rows).transpose(0, 1).reshape(size, count * rows)
        memories = self.memories_of(beside_each_other)
        each = memories.unflatten(1, (count, rows)).unbind(1)
        return [replace(place, prepared=own) for place, own in zip(places, each, strict=True)]

    def read_chunk(self, x: Tensor, states: States, chunk: Chunk) -> tuple[Tensor, States, Losses]:
        """See `Stage.read_chunk`; x: ids [tokens, batch], or rows as the module's documentation says."""
        tokens, start = self.tokens_of(x, chunk), chunk.starts[0]
        ends, new_states = self._ends(start, tokens), cast(States, {})
        losses: Losses = {}
        hidden, beside = x, x[:0]
        if self.first:
            hidden = self.embed(x, chunk)
            if chunk.prepared is not None:
                nothing = states[OPEN_CHUNK]["embeddings"][:0]
                beside, new_states = chunk.prepared, {OPEN_CHUNK: {"embeddings": nothing}}
            elif self.encoder_layers:
                beside, new_states = self._enter_encoder(x, states, chunk, ends)
        elif self.span.start <= self.encoder_layers:
            # memories have the decoder's width already
            width = self.encoder_width if self.span.start < self.encoder_layers else self.config.hidden_size
            beside, hidden = apart(x, tokens // token_share(self.linears)[1], width, self.config.hidden_size)
        if ends and self.encoder_part and chunk.prepared is None:
            beside, losses = self.encode(beside, chunk)
        if not self.own_layers and not self.last:
            # only encoder layers
            return joined(beside, hidden) if self.encoder_layers else hidden, new_states, losses
        if self.span.start <= self.encoder_layers:
            hidden, slots = self._with_slots(beside if ends else None, hidden, states, chunk)
            new_states = {**new_states, **slots}
        layers = {name: states[name] for name in self.layer_components}
        hidden, layer_states, more = self._decode(hidden, layers, chunk, tokens)
        if self.last and not start % self.config.chunk_size:
            hidden = self.linears.split_tokens(self.linears.join_tokens(hidden)[self.rows_before :])
        written = {**layer_states, **new_states}
        return hidden, {name: written[name] for name in self.components}, add_losses(losses, more)

    def _decode(self, hidden: Tensor, states: States, chunk: Chunk, tokens: int) -> tuple[Tensor, States, Losses]:
        """Take slots and tokens [rows, batch, hidden_size] through the decoder's layers of this stage.

        states, chunk: as for `read_chunk`; tokens: how many the call reads. Raises: ValueError for rows at different
        places of their chunks or, inside chunks, with different numbers of memories without fixed places.
        """
        if self.settings.positions == "fixed":
            self.check_grid(chunk)
            return self.run_layers(hidden, states, self.layer_chunk(chunk))
        if len(set(map(self.grid_place, chunk.starts))) == 1:
            return self._decode_without_empty_slots(hidden, states, chunk, tokens)
        if tokens < self.config.chunk_size:
            self.check_grid(chunk)
        outputs: list[Tensor] = []
        losses: Losses = {}
        for row, start in enumerate(chunk.starts):
            own, dropout = slice(row, row + 1), chunk.dropout
            here = Chunk((start,), dropout=None if dropout is None else dropout.of_rows(own))
            # a whole chunk is a document of its own, which begins with a fresh state
            output, _, extra = self._decode_without_empty_slots(hidden[:, own], states, here, tokens)
            outputs.append(output)
            losses = add_losses(losses, {name: loss / chunk.rows for name, loss in extra.items()})
        return torch.cat(outputs, dim=1), self._fresh(states, chunk, hidden), losses

    def _decode_without_empty_slots(
        self, hidden: Tensor, states: States, chunk: Chunk, tokens: int
    ) -> tuple[Tensor, States, Losses]:
        """Do what `_decode` does for rows with equally many memories; hidden: [rows, batch, hidden_size].

        Empty slots come back as zeros.
        """
        start, size = chunk.starts[0], self.config.chunk_size
        known = self.rows_before if start % size else self._finished(start) * self.settings.memories_per_chunk
        empty = 0 if start % size else self.rows_before - known
        seen = torch.cat((hidden[:known], hidden[known + empty :])) if empty else hidden
        output, states, losses = self.run_layers(seen, states, self.layer_chunk(chunk))
        if empty:
            output = torch.cat((output[:known], hidden.new_zeros(empty, *hidden.shape[1:]), output[known:]))
        if (start + tokens) % size == 0:
            states = self._fresh(states, chunk, hidden)
        return output, states, losses

    def _fresh(self, states: States, chunk: Chunk, like: Tensor) -> States:
        """Return states of decoder layers that have read nothing; like: activations [rows, batch, hidden_size]."""
        components = self.layer_components
        return {
            name: components[name].initial_state(chunk.rows, self.device_of(components[name], like.device), like.dtype)
            for name in states
        }

    def _enter_encoder(self, ids: Tensor, states: States, chunk: Chunk, ends: bool) -> tuple[Tensor, States]:
        """Embed a call's tokens for the encoder, which reads them when the chunk ends.

        ids: [tokens, batch]. Returns: this rank's tokens of the chunk [chunk_size, batch, encoder's width] if the call
        ends it; the new state of the open chunk.
        """
        embedded = self.embed_for_encoder(ids, chunk)
        memory = self.entry_memories[OPEN_CHUNK]
        open_before = memory.reset(states[OPEN_CHUNK], chunk, embedded.device, embedded.dtype)["embeddings"]
        encoded, left = finished_chunk(embedded, open_before, self.config.chunk_size if ends else None, self.linears)
        return encoded, {OPEN_CHUNK: {"embeddings": left}}

    def _with_slots(
        self, written: Tensor | None, hidden: Tensor, states: States, chunk: Chunk
    ) -> tuple[Tensor, States]:
        """Put slots in front of the tokens that begin a chunk, and the memories of one that ends into the state.

        Args:
            written: memories of this chunk [memories_per_chunk, batch, hidden_size], which later ones read.
            hidden: this rank's tokens [tokens, batch, hidden_size].
            states, chunk: as for `read_chunk`.
        Returns: this rank's rows and tokens; the new state of the slots.
        """
        finished = tuple(map(self._finished, chunk.starts))
        fill = 1.0 if self.settings.fill == "ones" else 0.0
        new_states: States = {}
        if MEMORIES in self.beside_layers:
            if self.ties_resets and all(chunk.fresh()):
                hidden = tied(hidden, states[MEMORIES])
            own = self.beside_layers[MEMORIES]
            memories: Tensor = own.reset(states[MEMORIES], chunk, hidden.device, hidden.dtype)[MEMORIES]
            slots = filled_slots(memories, finished, self.settings.memories_per_chunk, fill)
            kept = memories if written is None else with_memories(memories, written, finished)
            new_states = {MEMORIES: {MEMORIES: kept}}
        else:
            slots = hidden.new_full((self.rows_before, *hidden.shape[1:]), fill)
        if chunk.starts[0] % self.config.chunk_size == 0:
            hidden = self.linears.split_tokens(torch.cat((slots, self.linears.join_tokens(hidden))))
        return hidden, new_states
