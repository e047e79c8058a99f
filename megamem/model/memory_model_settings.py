"""The configuration of memory models: an encoder's shape, what it makes of a chunk, and where a decoder reads that."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Literal

from pydantic import PositiveInt

from megamem.config.base import ConfigModel
from megamem.config.cost import product
from megamem.config.data import DataConfig
from megamem.config.model import AnyMixer, ArchitectureConfig, LayerMixer, LayerPart, MixerConfig, ModelConfig
from megamem.config.model_checks import check_heads, check_layers, check_rotation
from megamem.config.parallel import ParallelConfig
from megamem.config.parts import ModelPart, decoder_part, encoder_part
from megamem.memory.base import StateSpec, TensorSpec

MEMORIES = "memories"
"""The component of the decoder's first layer that holds memories, and the tensor in it."""
OPEN_CHUNK = "open_chunk"
"""The component of the first stage that holds the encoder's embeddings of a chunk that has not ended."""


class EncoderConfig(ConfigModel):
    """The encoder's shape. What is not given is the model's own, as everything that is not listed."""

    layers: PositiveInt
    """How many of `model.layers` are the encoder's: the first ones."""
    hidden_size: PositiveInt | None = None
    """Width of the encoder's residual stream."""
    heads: PositiveInt | None = None
    """Query heads of the encoder."""
    kv_heads: PositiveInt | None = None
    """Key/value heads of the encoder; as many as its `heads` if these are given."""
    head_dim: PositiveInt | None = None
    """Width of a head; hidden_size / heads if one of these is given."""
    ffn_size: PositiveInt | None = None
    """Inner width of the encoder's MLPs; by the rule of `model.ffn_size` if hidden_size is given."""
    mixer: AnyMixer | None = None
    """What mixes tokens in the encoder's layers but those that `memory` lists."""
    memory: list[LayerMixer] = []
    """Layers of the encoder with another mixer, as `model.memory`."""

    def inside(self, model: ModelConfig) -> ModelConfig:
        """Return the model as the encoder's layers see it."""
        changes: dict[str, int | None] = {}
        if self.hidden_size or self.heads:
            changes = {
                "hidden_size": self.hidden_size or model.hidden_size,
                "heads": self.heads or model.heads,
                "kv_heads": self.kv_heads if self.heads else self.kv_heads or model.kv_heads,
                "head_dim": self.head_dim,
            }
        if self.hidden_size or self.ffn_size:
            changes["ffn_size"] = self.ffn_size
        return model.model_copy(update=changes)

    def mixer_at(self, model: ModelConfig, layer: int) -> MixerConfig:
        """Return the mixer of the encoder's layer `layer` (0-based)."""
        own = next((entry.mixer for entry in self.memory if layer in entry.layers), self.mixer)
        return own or model.mixer

    def memory_widths(self, model: ModelConfig, compressed_size: int | None) -> list[int]:
        """Return the widths between which memories are projected, from the encoder's to the decoder's."""
        width = self.inside(model).hidden_size
        widths = [width] if compressed_size is None else [width, compressed_size, width]
        return widths if width == model.hidden_size else [*widths, model.hidden_size]

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError if this encoder does not fit `model`, naming field, value and what would be valid."""
        if self.layers >= model.layers:
            raise ValueError(
                f"architecture.encoder.layers {self.layers} leaves no layer of model.layers {model.layers} to "
                "the decoder"
            )
        listed = sorted(layer for entry in model.memory for layer in entry.layers if layer < self.layers)
        if listed:
            raise ValueError(
                f"memory.layers {listed} are the encoder's; their mixers are those of architecture.encoder, and the "
                f"decoder's layers are {self.layers} to {model.layers - 1}"
            )
        inside = self.inside(model)
        try:
            check_heads(inside.hidden_size, inside.heads, inside.resolved_kv_heads, inside.head_dim)
            check_layers(self.layers, (layer for entry in self.memory for layer in entry.layers))
            rotates = any(self.mixer_at(model, layer).rotates() for layer in range(self.layers))
            check_rotation(inside.resolved_head_dim, rotates)
        except ValueError as error:
            raise ValueError(f"architecture.encoder: {error}") from None

    def layer_part(self, model: ModelConfig, layer: int) -> LayerPart:
        """Return what the encoder's layer `layer` is: it reads whole chunks, each as a document of its own."""
        mixer, section = self.mixer_at(model, layer), "model.architecture.encoder"
        return LayerPart(self.inside(model), mixer, section, "encoder", restarts=True, keeps_state=False)


class MemoryModelSettings(ArchitectureConfig):
    """Encoder, memories and slots of a memory model: all of its configuration but what builds it."""

    encoder: EncoderConfig | None = None
    """The encoder; without one every slot stays empty, the control without a memory."""
    memories_per_chunk: PositiveInt = 1
    """Vectors that stand for a chunk: of the last token of each of so many equal parts of it."""
    slots: PositiveInt
    """Chunks whose memories the decoder sees at most."""
    overflow: Literal["refuse", "drop_oldest"] = "refuse"
    """Training on sequences of more chunks than `slots` hold before the last one: refused, or the oldest memories are
    dropped and the others move down. Evaluation and generation read documents of any length and always drop them."""
    positions: Literal["fixed", "variable"] = "fixed"
    """`fixed`: the same chunk's memories stand in the same place, and empty slots are filled. `variable`: there are as
    many memories as there are earlier chunks, and the tokens follow at once."""
    fill: Literal["ones", "zeros"] = "ones"
    """What empty slots hold."""
    compressed_size: PositiveInt | None = None
    """Width to which memories are compressed before they are expanded again; none if not given."""

    @property
    def encoder_layers(self) -> int:
        """How many of the model's layers are the encoder's."""
        return 0 if self.encoder is None else self.encoder.layers

    @property
    def rows_before(self) -> int:
        """Rows in front of each chunk's tokens in the decoder, at most."""
        return self.slots * self.memories_per_chunk

    def check(self, model: ModelConfig) -> None:
        """See `ArchitectureConfig.check`."""
        if model.positions == "learned":
            raise ValueError("architecture memory_model adds rows without a place; it needs rotary positions")
        if model.mup is not None:
            raise ValueError("architecture memory_model does not go with mup, which knows one width; leave it out")
        if model.chunk_size % self.memories_per_chunk:
            count, size = self.memories_per_chunk, model.chunk_size
            raise ValueError(f"architecture.memories_per_chunk {count} does not divide chunk_size {size}")
        if self.encoder is not None:
            self.encoder.check(model)
        elif self.compressed_size is not None:
            raise ValueError("architecture.compressed_size: there is no architecture.encoder whose memories it is")

    def check_layout(self, parallel: ParallelConfig, model: ModelConfig) -> None:
        """See `ArchitectureConfig.check_layout`."""
        wrong = "parallel.zero_stage 3" if parallel.zero_stage == 3 else "parallel.sequence_parallel"
        if self.positions == "variable" and (parallel.zero_stage == 3 or parallel.sequence_parallel):
            raise ValueError(
                f"{wrong} does not go with architecture.positions variable, which reads another number of rows in each "
                "chunk; use fixed"
            )

    def check_sequences(self, model: ModelConfig, data: DataConfig) -> None:
        """See `ArchitectureConfig.check_sequences`: what is trained on has no more memories than slots."""
        if self.encoder is None or self.overflow == "drop_oldest":
            return
        remedy = "or drop the oldest ones with architecture.overflow drop_oldest"
        if data.feeding == "streams":
            raise ValueError(
                f"data.feeding streams reads documents of any number of chunks, and architecture.slots {self.slots} "
                f"hold the memories of so many: use sequences, {remedy}"
            )
        chunks = data.sequence_length // model.chunk_size
        if chunks - 1 > self.slots:
            raise ValueError(
                f"architecture.slots {self.slots} cannot hold the memories of all {chunks - 1} chunks before the last "
                f"of a sequence of {chunks} (data.sequence_length {data.sequence_length}): use {chunks - 1} slots, "
                f"{remedy}"
            )

    def layer_part(self, model: ModelConfig, layer: int) -> LayerPart:
        """See `ArchitectureConfig.layer_part`."""
        if self.encoder is None or layer >= self.encoder.layers:
            size = model.chunk_size
            longer = model.model_copy(update={"chunk_size": self.rows_before + size})
            reads = self.encoder is not None and layer == self.encoder.layers
            slots = {MEMORIES: {MEMORIES: TensorSpec((self.rows_before, "batch", "hidden"))}}
            part = LayerPart(longer, model.configured_mixer(layer))
            if self.positions == "variable":
                growing = range(size, self.rows_before + size, self.memories_per_chunk)
                part = replace(part, restarts=True, growing=growing)
            return replace(part, role="reads memories", beside=slots) if reads else part
        part = self.encoder.layer_part(model, layer)
        if layer < self.encoder.layers - 1:
            return part
        widths = self.encoder.memory_widths(model, self.compressed_size)
        matrices = sum(inputs * outputs for inputs, outputs in pairwise(widths))
        vectors = part.model.last_norm_vectors + (sum(widths[1:]) if model.all_biases else 0)
        flops = product(2 * matrices * self.memories_per_chunk / model.chunk_size)
        costs = {"memory_projection": flops} if matrices else {}
        return replace(part, role="encoder, writes memories", extra_parameters=vectors + matrices, extra_flops=costs)

    def entry_specs(self, model: ModelConfig) -> dict[str, StateSpec]:
        """See `ArchitectureConfig.entry_specs`: embeddings of a chunk that has not ended, whole on every rank."""
        if self.encoder is None:
            return {}
        width = self.encoder.inside(model).hidden_size
        return {OPEN_CHUNK: {"embeddings": TensorSpec(("open", "batch", width), kind="open")}}

    def extra_parameters(self, model: ModelConfig) -> int:
        """See `ArchitectureConfig.extra_parameters`: the encoder's embedding."""
        if self.encoder is None:
            return 0
        return model.resolved_padded_vocab_size * self.encoder.inside(model).hidden_size

    def parts(self, model: ModelConfig) -> dict[str, ModelPart]:
        """See `ArchitectureConfig.parts`."""
        decoder = {"decoder": decoder_part(range(self.encoder_layers, model.layers))}
        return decoder if self.encoder is None else {"encoder": encoder_part(self.encoder.layers), **decoder}

    def training_window(self, model: ModelConfig) -> int:
        """See `ArchitectureConfig.training_window`: memories are read from the next chunk on."""
        return 1 if self.encoder is None else 2

    def summary(self, model: ModelConfig) -> str:
        """See `ArchitectureConfig.summary`."""
        if self.encoder is None:
            return f"memory model without an encoder, the control: {self.rows_before} rows stay empty"
        rows = f"{self.memories_per_chunk} memories a chunk, of the newest {self.slots} chunks"
        return f"memory model: {self.encoder.layers} layers encode, {model.layers - self.encoder.layers} decode; {rows}"
