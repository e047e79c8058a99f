"""What all models with an encoder have in common: the encoder's layers come first, and read chunks one by one.

Layers 0 .. E-1 of the model are the encoder's, with an embedding of their own width; layers E, E+1, ... the decoder's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

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


class EncoderStage(Decoder):
    """The layers `layers` of an encoder and a decoder."""

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
        dropout = chunk.dropout
        if dropout is not None:
            dropout = dropout.at(dropout.offset - chunk.starts[0] % self.config.chunk_size)
        here = Chunk((0,) * chunk.rows, dropout=dropout)
        encoded, losses = self.through_fresh(self.encoder_part, encoded, here)
        if self.encoder_layers - 1 in self.span:
            encoded = self.layer(self.encoder_layers - 1).get_submodule("writer")(encoded)
        return encoded, losses

    def through_fresh(self, layers: Sequence[Layer], hidden: Tensor, chunk: Chunk) -> tuple[Tensor, Losses]:
        """Take a whole chunk [rows, batch, width] through layers that have read nothing before and keep nothing."""
        losses: Losses = {}
        for layer in layers:
            fresh = layer.mixer.initial_state(chunk.rows, hidden.device, hidden.dtype)
            hidden, _, extra = self.through(layer, hidden, fresh, chunk)
            losses = add_losses(losses, extra)
        return hidden, losses
