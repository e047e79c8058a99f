"""Autoencoder: an encoder makes one vector of each chunk, and a decoder makes all tokens of the chunk of that vector.

Badger, "Language Model Memory and Memory Models for Language", section 4.2 (equation 4). How well that succeeds
measures what the vector, the chunk's *embedding*, retains of the chunk:

    decoder   layers E, E+1, ...      p0 p1 p2 p3   ->   predicts t0 t1 t2 t3, each at its own place
                                       ▲  ▲  ▲  ▲
    expansion                          one embedding
                                                ▲
    encoder   layers 0 .. E-1         t0 t1 t2 t3

The embedding is what the encoder's last norm makes of the chunk's last token, or of the one before. It is expanded to
the places of the chunk:

    repeat    every place gets W e + b
    unroll    place i gets W e[i : i + d_e / 2] + b, a window of the embedding's channels that begins again at its start

Every chunk is a text of its own, so nothing is kept between calls, and no token is told what came before it: an
autoencoder reads whole chunks, and is no model of language. In a pipeline, chunks go up as far as the encoder goes,
then one row, then chunks again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from megamem.config.cost import product
from megamem.config.model import ARCHITECTURES, ArchitectureConfig, LayerPart, ModelConfig
from megamem.config.parts import ModelPart, decoder_part, encoder_part
from megamem.errors import ContractError
from megamem.memory.base import Chunk, Losses, Stateful, States
from megamem.model.encoder_stage import EncoderStage
from megamem.model.memory_model_settings import EncoderConfig
from megamem.model.memory_writer import MemoryProjection
from megamem.model.stage import add_losses
from megamem.parallel.linears import Linears, token_share

EMBEDDED_TOKENS = {"last": 0, "last_but_one": 1}
"""How many tokens lie behind the one whose hidden vector is the embedding."""


@ARCHITECTURES.register
class AutoencoderConfig(ArchitectureConfig):
    """Autoencoder: all tokens of a chunk are predicted from one vector that an encoder makes of it."""

    causal: ClassVar[bool] = False
    embeds_tokens: ClassVar[bool] = False

    kind: Literal["autoencoder"] = "autoencoder"
    """`autoencoder`"""
    encoder: EncoderConfig
    """The encoder; the other layers are the decoder's."""
    embedded_token: Literal["last", "last_but_one"] = "last"
    """The token of each chunk whose last hidden vector is the chunk's embedding. `last_but_one` suits encoders that
    were trained to predict next tokens: there the last one is about what comes after the chunk."""
    expansion: Literal["unroll", "repeat"] = "unroll"
    """How the decoder's input is made of the embedding: a window of its channels for each place, or all of them."""

    def check(self, model: ModelConfig) -> None:
        """See `ArchitectureConfig.check`."""
        for name, wrong in {
            "positions learned": model.positions == "learned",
            "tie_embeddings true": model.tie_embeddings,
            "mup": model.mup is not None,
            "adaptive": model.adaptive is not None,
        }.items():
            if wrong:
                raise ValueError(f"{name} does not go with architecture autoencoder; leave it out")
        if model.chunk_size <= (back := EMBEDDED_TOKENS[self.embedded_token]):
            raise ValueError(
                f"architecture.embedded_token {self.embedded_token}: a chunk (chunk_size {model.chunk_size}) has no "
                f"such token; use at least {back + 1}"
            )
        self.encoder.check(model)
        width = self.encoder.inside(model).hidden_size
        if self.expansion == "unroll" and width % 2:
            raise ValueError(
                f"architecture.expansion unroll takes half of the encoder's width {width}; use an even one"
            )

    def expansion_widths(self, model: ModelConfig) -> tuple[int, int]:
        """Return how many channels of the embedding the expansion takes at a place, and how many it makes of them."""
        width = self.encoder.inside(model).hidden_size
        return (width // 2 if self.expansion == "unroll" else width), model.hidden_size

    def layer_part(self, model: ModelConfig, layer: int) -> LayerPart:
        """See `ArchitectureConfig.layer_part`: the encoder's last norm, and the expansion with the decoder's first."""
        if layer < self.encoder.layers:
            part = self.encoder.layer_part(model, layer)
            if layer < self.encoder.layers - 1:
                return part
            return replace(part, role="encoder, embeds", extra_parameters=part.model.last_norm_vectors)
        part = LayerPart(model, model.configured_mixer(layer), restarts=True, keeps_state=False)
        if layer > self.encoder.layers:
            return part
        taken, made = self.expansion_widths(model)
        places = model.chunk_size if self.expansion == "unroll" else 1
        flops = {"expansion": product(2 * taken * made * places / model.chunk_size)}
        return replace(part, role="expands", extra_parameters=taken * made + made, extra_flops=flops)

    def extra_parameters(self, model: ModelConfig) -> int:
        """See `ArchitectureConfig.extra_parameters`: the encoder's embedding."""
        return model.resolved_padded_vocab_size * self.encoder.inside(model).hidden_size

    def parts(self, model: ModelConfig) -> dict[str, ModelPart]:
        """See `ArchitectureConfig.parts`: the expansion belongs to neither."""
        count = self.encoder.layers
        return {"encoder": encoder_part(count), "decoder": decoder_part(range(count, model.layers), False)}

    def summary(self, model: ModelConfig) -> str:
        """See `ArchitectureConfig.summary`."""
        decoder = model.layers - self.encoder.layers
        width = self.encoder.inside(model).hidden_size
        return (
            f"autoencoder: {self.encoder.layers} layers make {width:,} numbers of {model.chunk_size:,} tokens, "
            f"{decoder} layers the tokens of these"
        )

    def build(self, model: ModelConfig, linears: Linears, layers: range) -> Autoencoder:
        """See `ArchitectureConfig.build`."""
        return Autoencoder(model, linears, layers, self)


class Expansion(nn.Module):
    """The decoder's input, made of one embedding for each batch row.

    Letters of shapes: N places, B batch rows, D_e the embedding's width, D the decoder's.
    """

    def __init__(self, model: ModelConfig, settings: AutoencoderConfig) -> None:
        super().__init__()
        self.places, self.unrolls = model.chunk_size, settings.expansion == "unroll"
        self.projection = MemoryProjection(*settings.expansion_widths(model), model.init_std, bias=True)

    def forward(self, embedding: Tensor) -> Tensor:
        """[1, B, D_e] -> [N, B, D], the same on every tensor-parallel rank."""
        if not self.unrolls:
            repeated: Tensor = self.projection(embedding)
            return repeated.expand(self.places, -1, -1)
        width = embedding.shape[-1]
        # the channels again behind the last one, and a window that begins at each: [B, D_e, D_e / 2]
        around = torch.cat((embedding, embedding[..., : width // 2 - 1]), dim=-1)
        windows = around[0].unfold(-1, width // 2, 1).transpose(0, 1)
        begins = torch.arange(self.places, device=embedding.device) % width
        expanded: Tensor = self.projection(windows[begins])
        return expanded


class Autoencoder(EncoderStage):
    """The layers `layers` of an autoencoder."""

    def __init__(self, model: ModelConfig, linears: Linears, layers: range, settings: AutoencoderConfig) -> None:
        super().__init__(model, linears, layers, settings.encoder)
        inside = settings.encoder.inside(model)
        self.add_writer(inside, 1, [inside.hidden_size], EMBEDDED_TOKENS[settings.embedded_token])
        if self.encoder_layers in layers:
            self.layer(self.encoder_layers).add_module("expansion", Expansion(model, settings))

    @property
    def layer_components(self) -> Mapping[str, Stateful]:
        """See `Stage.layer_components`: there are none."""
        return {}

    def _border(self, layer: int, tokens: int, rows: int) -> tuple[int, int, int]:
        """Return the shape of what comes to `layer` from the stage below; see `border_shape`."""
        if layer == self.encoder_layers:
            return 1, rows, self.encoder_width
        width = self.encoder_width if layer < self.encoder_layers else self.config.hidden_size
        return tokens // token_share(self.linears)[1], rows, width

    def border_shape(self, tokens: int, rows: int, start: int = 0) -> tuple[int, int, int]:
        """See `Stage.border_shape`."""
        return self._border(self.span.start, tokens, rows)

    def shape_above(self, tokens: int, rows: int, start: int = 0) -> tuple[int, int, int]:
        """See `Stage.shape_above`."""
        return self._border(self.span.stop, tokens, rows)

    def tokens_of(self, entered: Tensor, chunk: Chunk) -> int:
        """See `Stage.tokens_of`: a chunk."""
        return self.config.chunk_size

    def read_chunk(self, x: Tensor, states: States, chunk: Chunk) -> tuple[Tensor, States, Losses]:
        """See `Stage.read_chunk`; x: ids [chunk_size, batch], or what `border_shape` says.

        Raises: ContractError for less than a chunk.
        """
        size = self.config.chunk_size
        if (self.first and x.shape[0] != size) or chunk.begins_inside or any(start % size for start in chunk.starts):
            raise ContractError(f"an autoencoder reads whole chunks of {size} tokens, and a call had something else")
        hidden = self.embed_for_encoder(x, chunk) if self.first else x
        losses: Losses = {}
        if self.encoder_part:
            hidden, losses = self.encode(hidden, chunk)
        if self.encoder_layers in self.span:
            expansion = self.layer(self.encoder_layers).get_submodule("expansion")
            hidden = self.linears.split_tokens(expansion(hidden))
        if self.own_layers:
            here = Chunk((0,) * chunk.rows, dropout=chunk.dropout)
            hidden, more = self.through_fresh(self.own_layers, hidden, here)
            losses = add_losses(losses, more)
        return (self.norm(hidden) if self.last else hidden), {}, losses
