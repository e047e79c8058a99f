"""What all models with an encoder have in common: the encoder's layers come first, and read chunks one by one.

Layers 0 .. E-1 of the model are the encoder's, with an embedding of their own width; layers E, E+1, ... the decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, cast

from torch import Tensor

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, Losses
from megamem.model.architectures.decoder import Decoder
from megamem.model.layer import Layer
from megamem.model.memory_model_settings import EncoderConfig
from megamem.model.memory_writer import MemoryWriter
from megamem.model.stage import add_losses
from megamem.ops.dropout import dropped
from megamem.parallel.linears import Linears, normal, token_share


class Embeddings(Protocol):
    """Where embeddings of a frozen encoder are kept, [memories, rows, width], by ids [chunk_size, rows]."""

    def find(self, ids: Tensor) -> Tensor | None:
        """Return the embeddings of these chunks [memories, rows, width]; None if one is not there."""

    def add(self, ids: Tensor, embeddings: Tensor) -> None:
        """Keep the embeddings of these chunks [memories, rows, width]."""


class EncoderStage(Decoder):
    """The layers `layers` of an encoder and a decoder."""

    kept_embeddings: Embeddings | None = None
    """Where those of a frozen encoder are kept from step to step; nowhere if None."""

    def __init__(self, model: ModelConfig, linears: Linears, layers: range, encoder: EncoderConfig | None) -> None:
        """Build the layers of both, and the encoder's embedding on the first stage; no encoder: the decoder's alone."""
        super().__init__(model, linears, layers)
        self.span = layers
        self.encoder_layers = 0 if encoder is None else encoder.layers
        if encoder is None:
            return
        inside = encoder.inside(model)
        self.encoder_width = inside.hidden_size
        self.encoder_has_losses = any(
            encoder.mixer_at(model, layer).auxiliary_losses() for layer in range(encoder.layers)
        )
        if self.first:
            start = normal(model.init_std)
            self.encoder_embedding = linears.embedding(model.resolved_padded_vocab_size, inside.hidden_size, start)

    def add_writer(self, inside: ModelConfig, count: int, widths: Sequence[int], back: int = 0) -> None:
        """Let the encoder's last layer, if it is this stage's, end with a `MemoryWriter`; see there."""
        if self.encoder_layers - 1 in self.span:
            writer = MemoryWriter(inside, self.linears, count, widths, back)
            self.layer(self.encoder_layers - 1).add_module("writer", writer)

    @property
    def own_layers(self) -> list[Layer]:
        """The decoder's layers of this stage, in order."""
        return [self.layer(i) for i in self.span if i >= self.encoder_layers]

    @property
    def encoder_part(self) -> list[Layer]:
        """The encoder's layers of this stage, in order."""
        return [self.layer(i) for i in self.span if i < self.encoder_layers]

    def layer(self, number: int) -> Layer:
        """Return layer `number` of the model, which is this stage's."""
        return cast(Layer, self.layers[str(number)])

    def embed_for_encoder(self, ids: Tensor, chunk: Chunk) -> Tensor:
        """Embed ids [tokens, batch] for the encoder: this rank's [tokens, batch, encoder's width]."""
        embedded: Tensor = self.encoder_embedding(ids)
        if self.config.scale_embedding:
            embedded = embedded * embedded.shape[-1] ** 0.5
        drops = chunk.drops(self.config.dropout, "encoder_embedding")
        return dropped(embedded, drops, *token_share(self.linears))

    def encode(self, encoded: Tensor, chunk: Chunk) -> tuple[Tensor, Losses]:
        """Take a chunk through the encoder's layers of this stage: the chunk, or its memories behind the last layer.

        encoded: this rank's tokens of the chunk [chunk_size, batch, encoder's width].
        """
        encoded, losses = self._embed_chunk(encoded, chunk)
        return (encoded if self.writer is None else self.writer.memories(encoded)), losses

    def memories_of(self, ids: Tensor) -> Tensor:
        """Return the memories [memories, rows, hidden_size] of whole chunks of ids [chunk_size, rows], one in each row.

        Where embeddings are kept, the encoder runs unless those of all these chunks are there. For stages that hold the
        whole encoder.
        """
        assert self.writer is not None
        embeddings = self.kept_embeddings.find(ids) if self.kept_embeddings is not None else None
        if embeddings is None:
            here = Chunk((0,) * ids.shape[1])
            embeddings, _ = self._embed_chunk(self.embed_for_encoder(ids, here), here)
            if self.kept_embeddings is not None:
                self.kept_embeddings.add(ids, embeddings)
        return self.writer.memories(embeddings)

    def _embed_chunk(self, encoded: Tensor, chunk: Chunk) -> tuple[Tensor, Losses]:
        """Take a chunk through the encoder's layers of this stage: the chunk, or its embeddings behind the last layer.

        encoded: this rank's tokens of the chunk [chunk_size, batch, encoder's width].
        """
        dropout = chunk.dropout
        if dropout is not None:
            dropout = dropout.at(dropout.offset - chunk.starts[0] % self.config.chunk_size)
        here = Chunk((0,) * chunk.rows, dropout=dropout)
        encoded, losses = self.through_fresh(self.encoder_part, encoded, here)
        return (encoded if self.writer is None else self.writer.embeddings(encoded)), losses

    @property
    def embeddings_shape(self) -> tuple[int, int]:
        """The shape of a chunk's embeddings: [memories, encoder's width]."""
        assert self.writer is not None
        return self.writer.count, self.encoder_width

    @property
    def writer(self) -> MemoryWriter | None:
        """What makes memories of an encoded chunk, on the stage with the encoder's last layer."""
        if self.encoder_layers == 0 or self.encoder_layers - 1 not in self.span:
            return None
        return cast(MemoryWriter, self.layer(self.encoder_layers - 1).get_submodule("writer"))

    def through_fresh(self, layers: Sequence[Layer], hidden: Tensor, chunk: Chunk) -> tuple[Tensor, Losses]:
        """Take a whole chunk [rows, batch, width] through layers that have read nothing before and keep nothing."""
        losses: Losses = {}
        for layer in layers:
            fresh = layer.mixer.initial_state(chunk.rows, hidden.device, hidden.dtype)
            hidden, _, extra = self.through(layer, layer.forward, hidden, fresh, chunk)
            losses = add_losses(losses, extra)
        return hidden, losses
