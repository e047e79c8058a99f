"""Parts of a model that can start from weights of their own and be frozen by themselves: an encoder, a decoder.

Each parameter of a part has a *plain* name, as a decoder that stands alone has it: layers numbered from 0,
`embedding.`, `norm.`, `head.`. So parts of any two models can take each other's weights, and those of a plain decoder:

    encoder of 6 layers        plain               decoder behind it
    encoder_embedding.weight   embedding.weight    embedding.weight
    layers.0.mlp.up.weight     layers.0.mlp...     layers.6.mlp.up.weight
    layers.5.writer.norm...    norm...             norm.weight
                               head.weight         head.weight

What only joins two parts, a *bridge*, belongs to neither: the projections of memories to the decoder's width.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from pydantic import BeforeValidator

from megamem.config.base import ConfigModel


def _paths(value: object) -> object:
    """Return what was given as start weights. Raises ValueError for what is neither a path nor paths by part."""
    named = list(value.values()) if isinstance(value, Mapping) else [value]
    if named and all(isinstance(path, str | Path) for path in named):
        return value
    raise ValueError("expected a path, or paths by part as {encoder: FILE, decoder: FILE}")


BASE = "base"
"""In the place of a part: a pretrained decoder, to which the model adds memories."""
StartWeights = Path | dict[str, Path]
"""A weights file of the whole model, one for each part by its name, or one of the `base` alone."""
AnyStartWeights = Annotated[StartWeights, BeforeValidator(_paths)]


class ModelPart(ConfigModel):
    """Which parameters of a model are a part's, and how a plain decoder names them. Weights files carry it."""

    first_layer: int
    """Its first layer in the whole model."""
    layers: int
    """Number of its layers."""
    names: dict[str, str]
    """Beginnings of its names that are not numbered layers alone, each with that of the plain name."""
    bridge_before: str | None = None
    """Beginning of the names of what stands in front of its first layer, and belongs to no part."""
    bridge_behind: str | None = None
    """Beginning of the names of what stands behind its last layer, and belongs to no part."""
    left_out: tuple[str, ...] = ()
    """Beginnings of plain names that the part does without, whoever's weights they are."""
    width_field: str
    """The key of a configuration that says how wide its layers are."""
    layers_field: str
    """The key of a configuration that says how many layers it has."""

    def is_bridge(self, name: str) -> bool:
        """Return whether a parameter of the model stands in the part's layers and belongs to no part."""
        return name.startswith(tuple(filter(None, (self.bridge_before, self.bridge_behind))))

    def plain_name(self, name: str) -> str | None:
        """Return the plain name of a parameter of the model; None if it is not the part's."""
        for own, plain in self.names.items():
            if name.startswith(own):
                return plain + name.removeprefix(own)
        found = re.fullmatch(r"layers\.(\d+)\.(.+)", name)
        number = int(found[1]) - self.first_layer if found else -1
        if found is None or number not in range(self.layers) or self.is_bridge(name):
            return None
        return f"layers.{number}.{found[2]}"

    def needs(self, plain: str) -> bool:
        """Return whether a plain name is of a parameter that the part has a use for."""
        return not plain.startswith(self.left_out)


def encoder_part(layers: int) -> ModelPart:
    """Return the encoder of a model whose first layers it is: its embedding, layers and last norm."""
    last = f"layers.{layers - 1}.writer."
    return ModelPart(
        first_layer=0,
        layers=layers,
        names={"encoder_embedding.": "embedding.", f"{last}norm.": "norm."},
        bridge_behind=f"{last}projections.",
        left_out=("head.",),
        width_field="model.architecture.encoder.hidden_size",
        layers_field="model.architecture.encoder.layers",
    )


def decoder_part(layers: range, embeds_tokens: bool = True) -> ModelPart:
    """Return the decoder behind an encoder: its layers, last norm and output head, and its embedding if it has one."""
    names = ("norm.", "head.", "score_biases.", *(("embedding.",) if embeds_tokens else ()))
    return ModelPart(
        first_layer=layers.start,
        layers=len(layers),
        names={name: name for name in names},
        bridge_before=f"layers.{layers.start}.expansion.",
        left_out=() if embeds_tokens else ("embedding.",),
        width_field="model.hidden_size",
        layers_field="model.layers",
    )


def check_parts(kind: str, parts: Mapping[str, ModelPart], init_from: StartWeights | None, freeze: str | None) -> None:
    """Raise ValueError where `training.init_from` or `training.freeze` names a part that the model has not.

    kind, parts: of the model's architecture.
    """
    if isinstance(init_from, dict) and set(init_from) == {BASE} and not parts:
        init_from = None
    known = f"architecture {kind} has {' and '.join(parts)}" if parts else f"architecture {kind} has no parts"
    named = {f"training.init_from.{part}": part for part in (init_from if isinstance(init_from, dict) else ())}
    if not parts:  # of a model without parts, the base is all
        named.pop(f"training.init_from.{BASE}", None)
    if freeze not in (None, "base"):
        named[f"training.freeze {freeze}"] = str(freeze)
    for where, part in named.items():
        if part not in parts:
            raise ValueError(f"{where}: the model has no such part; {known}")
