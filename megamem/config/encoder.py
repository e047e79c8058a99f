"""The shape of an encoder: layers below those of a decoder, with widths of their own."""

from __future__ import annotations

from pydantic import PositiveInt

from megamem.config.base import ConfigModel
from megamem.config.model import AnyMixer, ModelConfig
from megamem.config.model_checks import check_heads, check_rotation


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
    """What mixes tokens in the encoder's layers."""

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
                f"memory.layers {listed} are the encoder's; their mixer is architecture.encoder.mixer, and the "
                f"decoder's layers are {self.layers} to {model.layers - 1}"
            )
        inside = self.inside(model)
        try:
            check_heads(inside.hidden_size, inside.heads, inside.resolved_kv_heads, inside.head_dim)
            check_rotation(inside.resolved_head_dim, (self.mixer or model.mixer).rotates())
        except ValueError as error:
            raise ValueError(f"architecture.encoder: {error}") from None

    def check_layout(self, tp: int, model: ModelConfig) -> None:
        """Raise ValueError if `tp` tensor-parallel ranks cannot share the encoder of `model`."""
        inside = self.inside(model)
        sizes = {"heads": inside.heads, "kv_heads": inside.resolved_kv_heads, "ffn_size": inside.resolved_ffn_size}
        for name, size in sizes.items():
            if size % tp:
                raise ValueError(f"architecture.encoder.{name} {size} is not divisible by parallel.tp {tp}")
