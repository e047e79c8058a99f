"""The model's shape: `ModelConfig`, and `MixerConfig`, which every attention or memory mechanism extends."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import BeforeValidator, Field, PositiveInt, SerializeAsAny, model_validator

from megamem.config import model_checks as checks
from megamem.config.adaptive import check_vocabulary
from megamem.config.base import ConfigModel
from megamem.config.cost import Flops
from megamem.config.kernels import KernelsConfig
from megamem.config.layers import LayersConfig
from megamem.config.mup import MupConfig, check_base
from megamem.config.parts import ModelPart
from megamem.config.registry import Registry
from megamem.config.rope import RopeScaling
from megamem.config.side_rows import SideRows, check_side_rows

if TYPE_CHECKING:
    from torch import nn

    from megamem.config.data import DataConfig
    from megamem.config.parallel import ParallelConfig
    from megamem.memory.base import Mixer, StateSpec
    from megamem.parallel.linears import Linears


class MixerConfig(ConfigModel):
    """What mixes tokens in a layer: attention or a memory mechanism. Subclasses add their own fields."""

    kind: str
    """Name of the mechanism; `megamem mechanisms` lists them."""

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError if this mixer does not fit `model`, naming field, value and what would be valid."""

    @abstractmethod
    def state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the state of one layer: a dict of `TensorSpec` (or `Growing` lists of them)."""

    @abstractmethod
    def mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """Return the FLOPs per token of one layer besides its projections, by name, averaged over a sequence.

        A layer that takes side rows counts them among its tokens, and `rising_flops` apart.
        causal: a query counts the keys it may see; False: whole rectangles of queries by keys.
        """

    def projection_parameters(self, model: ModelConfig) -> int:
        """Return the number of parameters of one layer's query, key, value and output projections."""
        return 2 * model.hidden_size * (model.heads + model.resolved_kv_heads) * model.resolved_head_dim

    def projection_biases(self, model: ModelConfig) -> int:
        """Return the number of biases of one layer's projections with `model.bias`."""
        of_output = model.hidden_size if model.all_biases else 0
        return (model.heads + 2 * model.resolved_kv_heads) * model.resolved_head_dim + of_output

    def extra_parameters(self, model: ModelConfig) -> int:
        """Return the number of parameters of one layer besides those projections."""
        return 0

    def shared_parameters(self, model: ModelConfig) -> int:
        """Return how many of these are one layer's u and v, of which the model has one pair for all such layers."""
        return 0

    def rotates(self) -> bool:
        """Return whether queries and keys are rotated where `model.positions` is rotary, which needs an even width."""
        return True

    def auxiliary_losses(self) -> tuple[str, ...]:
        """Return the names of the losses that the mixer returns besides its output; most have none."""
        return ()

    def query_key_norms(self) -> int:
        """Return how many pairs of norms of queries and keys a layer has with `model.qk_norm`; 0 without softmax."""
        return 0

    def rising_parameters(self, model: ModelConfig) -> int:
        """Return how many of these write side rows for a layer above, which the topmost such layer does without."""
        return 0

    def shared_rising_parameters(self, model: ModelConfig) -> int:
        """Return how many of these the model has once for all such layers."""
        return 0

    def rising_flops(self, model: ModelConfig) -> Flops:
        """Return the FLOPs per token of writing side rows for a layer above."""
        return Flops(0.0, 0.0)

    def side_rows(self, model: ModelConfig) -> SideRows | None:
        """Return the rows that go up through such layers beside the tokens of each chunk; most take none.

        All layers that take side rows share one set of them, and others let it pass by.
        """
        return None

    def entry_specs(self, model: ModelConfig) -> StateSpec:
        """Declare what the first stage keeps of a document's tokens to make side rows of."""
        return {}

    def top_state_specs(self, model: ModelConfig) -> StateSpec:
        """Declare the state of the topmost layer that takes side rows, where it differs from the others'."""
        return self.state_specs(model)

    def top_mixing_flops(self, model: ModelConfig, sequence_length: int, causal: bool) -> dict[str, Flops]:
        """Return `mixing_flops` of the topmost layer that takes side rows, where it differs from the others'."""
        return self.mixing_flops(model, sequence_length, causal)

    def training_window(self, model: ModelConfig) -> int:
        """Return the fewest chunks a window must span for every parameter of one layer to get a gradient."""
        return 1

    def summary(self, model: ModelConfig, sequence_length: int) -> str | None:
        """Return one line of what a person should know of such a layer before a run starts; None for nothing."""
        return None

    @abstractmethod
    def build(self, model: ModelConfig, linears: Linears, layer: int) -> Mixer:
        """Build the module of layer `layer` (0-based), its projections made by `linears`."""


MIXERS: Registry[MixerConfig] = Registry("mixer", "megamem.memory", "megamem.mixers")
"""Every mechanism there is. A new one registers its configuration with `@MIXERS.register`."""

AnyMixer = Annotated[SerializeAsAny[MixerConfig], BeforeValidator(MIXERS.parse)]


@dataclass(frozen=True)
class LayerPart:
    """One layer as its architecture has it: by default a decoder's, with the model's own shape and mixer."""

    model: ModelConfig
    """The model as the layer sees it: its widths, and the rows that it reads with each chunk as `chunk_size`."""
    mixer: MixerConfig
    """What mixes tokens in the layer."""
    section: str = "model"
    """Where a configuration has the layer's sizes."""
    role: str = ""
    """A name that layers which are built alike have in common, besides equal mixers."""
    restarts: bool = False
    """Whether the layer reads every chunk as a document of its own."""
    growing: range = range(0)
    """Rows of each of a text's first chunks, where these are fewer than those of later ones, `model.chunk_size`."""
    keeps_state: bool = True
    """Whether a state of its mixer passes from call to call; if not, the layer reads whole chunks only."""
    beside: Mapping[str, StateSpec] = field(default_factory=dict)
    """Components that the stage with this layer keeps besides its mixer's state."""
    extra_parameters: int = 0
    """Parameters of the architecture that lie with the layer."""
    extra_flops: Mapping[str, Flops] = field(default_factory=dict)
    """FLOPs per token of what these parameters do, by name."""


class ArchitectureConfig(ConfigModel):
    """How layers, output head and memories that span the model make a model. Subclasses add their own fields."""

    causal: ClassVar[bool] = True
    """Whether a token's output depends on no later one; what is not so can neither predict text nor write it."""
    embeds_tokens: ClassVar[bool] = True
    """Whether the layers behind an encoder, or all where there is none, read embedded tokens."""

    kind: str
    """Name of the architecture."""

    def check(self, model: ModelConfig) -> None:
        """Raise ValueError if this architecture does not fit `model`, naming field, value and what would be valid."""

    def check_layout(self, parallel: ParallelConfig, model: ModelConfig) -> None:
        """Raise ValueError if ranks cannot share `model` as `parallel` says; see `check`."""

    def check_sequences(self, model: ModelConfig, data: DataConfig) -> None:
        """Raise ValueError if `model` is not to be trained on sequences such as those of `data`; see `check`."""

    def layer_part(self, model: ModelConfig, layer: int) -> LayerPart:
        """Return what the architecture makes of layer `layer`: a shape of its own, more rows in each chunk, ..."""
        return LayerPart(model, model.configured_mixer(layer))

    @property
    def rows_before(self) -> int:
        """Rows that layers read in front of each chunk's tokens."""
        return 0

    def entry_specs(self, model: ModelConfig) -> dict[str, StateSpec]:
        """Declare what the first stage alone reads and writes, by component."""
        return {}

    def state_specs(self, model: ModelConfig) -> dict[str, StateSpec]:
        """Declare the states besides those of layers, by component.

        They are read by the first stage of a pipeline and written by the last one: each carries what leaves the top
        of the model after one chunk to its bottom before the next.
        """
        return {}

    def extra_parameters(self, model: ModelConfig) -> int:
        """Return the number of parameters besides embedding, layers, last norm and output head."""
        return 0

    def parts(self, model: ModelConfig) -> dict[str, ModelPart]:
        """Return the parts that weights and freezing can be named for (`training.init_from`); most models have none."""
        return {}

    def unread_places(self, model: ModelConfig) -> range:
        """Return the places of each chunk whose tokens the model never reads, only predicts."""
        return range(0)

    def training_window(self, model: ModelConfig) -> int:
        """Return the fewest chunks a window must span for every parameter of the architecture to get a gradient."""
        return 1

    def summary(self, model: ModelConfig) -> str | None:
        """Return one line of what a person should know of such a model before a run starts; None for nothing."""
        return None

    @abstractmethod
    def build(self, model: ModelConfig, linears: Linears, layers: range) -> nn.Module:
        """Build the `megamem.model.stage.Stage` that holds `layers` of the model, its projections made by `linears`."""


ARCHITECTURES: Registry[ArchitectureConfig] = Registry(
    "architecture", "megamem.model.architectures", "megamem.architectures"
)
"""Every architecture there is. A new one registers its configuration with `@ARCHITECTURES.register`."""

AnyArchitecture = Annotated[SerializeAsAny[ArchitectureConfig], BeforeValidator(ARCHITECTURES.parse)]


class LayerMixer(ConfigModel):
    """Another mixer for some layers."""

    layers: list[Annotated[int, Field(ge=0)]]
    """0-based indices of the layers that get it (the ninth layer of a paper is 8)."""
    mixer: AnyMixer
    """The mixer of these layers."""


class ModelConfig(LayersConfig, KernelsConfig):
    """A Llama-3-type decoder: RMSNorm, SwiGLU, rotary positions, grouped-query attention, a mixer per layer.

    Norm, MLP, biases and positions can be GPT-2's.
    """

    architecture: AnyArchitecture = Field(default="decoder", validate_default=True)
    """How layers make a model: a `decoder`, or one of the architectures with a memory that spans the model."""
    mixer: AnyMixer = Field(default="local_attention", validate_default=True)
    """The mixer of every layer not listed in `memory`."""
    memory: list[LayerMixer] = []
    """Layers with another mixer, usually a memory mechanism."""
    positions: Literal["rotary", "learned"] = "rotary"
    """Rotations of queries and keys, or a table that is added to the embedding."""
    max_positions: PositiveInt | None = None
    """Rows of that table, a multiple of chunk_size. Positions beyond begin at its first row again."""
    tie_embeddings: bool = False
    """Use the embedding's weight as the output head's too."""
    scale_embedding: bool = False
    """Multiply embeddings by sqrt(hidden_size), as the first Transformers did."""
    rope_theta: float = Field(default=10_000.0, gt=1)
    """Base of the rotary frequencies."""
    rope_scaling: RopeScaling | None = None
    """Slower rotations for texts longer than those that a model began with; none if not given."""
    init_std: float = Field(default=0.02, gt=0)
    """Standard deviation of all weight matrices at the start; projections back into the residual stream (mixer
    output, MLP down) get init_std / sqrt(2 * layers), norms get ones."""
    mup: MupConfig | None = None
    """Scale start values, learning rates, attention and logits by the width over that of a base model
    (docs/mup.md); the standard parametrization if not given."""

    @property
    def base(self) -> ModelConfig:
        """The base model of `mup`, in the standard parametrization; this one if there is none.

        Raises: ValueError naming the field if its sizes are no whole numbers.
        """
        if self.mup is None:
            return self
        sizes = self.mup.base_sizes(
            self.hidden_size, self.heads, self.resolved_kv_heads, self.resolved_head_dim, self.ffn_size
        )
        return self.model_copy(update={**sizes, "mup": None})

    @property
    def score_scale(self) -> float:
        """The factor of queries of softmax attention: scores go as 1 / head_dim beyond the base model's."""
        return 1.0 if self.mup is None else (self.base.resolved_head_dim / self.resolved_head_dim) ** 0.5

    @property
    def logit_scale(self) -> float:
        """The factor of logits: a tied head is an embedding, whose start and learning rate do not change with width."""
        return self.mup.base_width / self.hidden_size if self.mup is not None and self.tie_embeddings else 1.0

    def configured_mixer(self, layer: int) -> MixerConfig:
        """Return the mixer that `mixer` and `memory` give to layer `layer` (0-based)."""
        return next((entry.mixer for entry in self.memory if layer in entry.layers), self.mixer)

    def part(self, layer: int) -> LayerPart:
        """Return what the architecture makes of layer `layer` (0-based)."""
        return self.architecture.layer_part(self, layer)

    def mixer_at(self, layer: int) -> MixerConfig:
        """Return the mixer's configuration of layer `layer` (0-based)."""
        return self.part(layer).mixer

    def layer_model(self, layer: int) -> ModelConfig:
        """Return the model as layer `layer` sees it, which is the one that its mixer is given."""
        return self.part(layer).model

    def side_rows_at(self, layer: int) -> SideRows | None:
        """Return the side rows that the mixer of layer `layer` takes; None if it takes none."""
        return self.mixer_at(layer).side_rows(self.layer_model(layer))

    @property
    def side_rows(self) -> SideRows | None:
        """The side rows that go up the layers with the tokens of each chunk; None where no mixer takes any."""
        found = map(self.side_rows_at, range(self.layers))
        return next((rows for rows in found if rows is not None), None)

    @property
    def auxiliary_losses(self) -> tuple[str, ...]:
        """The names of all mixers' own losses, in alphabetical order."""
        return tuple(sorted({name for layer in range(self.layers) for name in self.mixer_at(layer).auxiliary_losses()}))

    def rows_rise_from(self, layer: int) -> bool:
        """Return whether `layer` takes side rows and a layer above reads what it makes of them."""
        takes = (self.side_rows_at(i) is not None for i in range(layer, self.layers))
        return next(takes) and any(takes)

    def rows_end_at(self, layer: int) -> bool:
        """Return whether `layer` is the topmost of those that take side rows."""
        return self.side_rows_at(layer) is not None and not self.rows_rise_from(layer)

    def rows_through(self, layer: int) -> int:
        """Return the rows of each chunk that go through all of `layer`: tokens, the architecture's and side rows."""
        side = self.side_rows_at(layer)
        only_read = side is not None and side.place == "begin" and self.rows_end_at(layer)
        return self.layer_model(layer).chunk_size + (0 if side is None or only_read else side.count)

    def layer_kind(self, layer: int) -> str:
        """Return a text that is the same for layers that are built alike: equal mixers, with rows to hand up or not."""
        return f"{self.mixer_at(layer).model_dump_json()} {self.rows_rise_from(layer)} {self.part(layer).role}"

    @property
    def rows_per_chunk(self) -> int:
        """The rows that stages hand up for each chunk: tokens, rows of the architecture and side rows."""
        longest = max(self.layer_model(layer).chunk_size for layer in range(self.layers))
        return longest + (self.side_rows.count if self.side_rows else 0)

    @property
    def entry_specs(self) -> dict[str, StateSpec]:
        """The declared states of what the first stage alone keeps, by component."""
        found = (self.mixer_at(layer).entry_specs(self.layer_model(layer)) for layer in range(self.layers))
        recent = next(filter(None, found), None)
        return ({"recent_tokens": recent} if recent else {}) | self.architecture.entry_specs(self)

    def specs_beside(self, layers: range) -> dict[str, StateSpec]:
        """Return the declared states of what a stage with `layers` keeps besides their mixers' states."""
        return {name: specs for layer in layers for name, specs in self.part(layer).beside.items()}

    def component_specs(self, layers: range | None = None) -> dict[str, StateSpec]:
        """Return declared states by component, of the model or of a stage; the first stage has what spans the model."""
        layers, specs = range(self.layers) if layers is None else layers, {}
        for layer in (layer for layer in layers if self.part(layer).keeps_state):
            mixer, inner = self.mixer_at(layer), self.layer_model(layer)
            of_layer = mixer.top_state_specs if self.rows_end_at(layer) else mixer.state_specs
            specs[f"layers.{layer}"] = of_layer(inner)
        spanning = {**self.entry_specs, **self.architecture.state_specs(self)} if layers.start == 0 else {}
        return {**specs, **self.specs_beside(layers), **spanning}

    @model_validator(mode="after")
    def _fits(self) -> ModelConfig:
        """Raise ValueError where sizes, layers or mixers do not fit each other."""
        checks.check_heads(self.hidden_size, self.heads, self.resolved_kv_heads, self.head_dim)
        check_vocabulary(self.vocab_size, self.padded_vocab_size, self.adaptive)
        if self.adaptive:
            self.adaptive.check(self.vocab_size, self.hidden_size, self.tie_embeddings, self.mup)
        checks.check_positions(self.positions, self.max_positions, self.chunk_size)
        checks.check_layers(self.layers, (layer for entry in self.memory for layer in entry.layers))
        mixers = [self.mixer_at(layer) for layer in range(self.layers)]
        rotated = self.positions == "rotary" and any(mixer.rotates() for mixer in mixers)
        checks.check_rotation(self.resolved_head_dim, rotated)
        checks.check_scaling(self.rope_scaling is not None, rotated)
        if self.scale_embedding and self.mup:
            raise ValueError("scale_embedding true does not go with mup, which keeps embeddings as in the base model")
        norms = [(mixer.kind, mixer.query_key_norms()) for mixer in mixers]
        checks.check_softmax(norms, self.qk_norm, self.attention_dropout, self.bias)
        self.architecture.check(self)
        side_rows = [self.side_rows_at(layer) for layer in range(self.layers)]
        check_side_rows([m.kind for m in mixers], side_rows, self.architecture.kind)
        for layer, mixer in enumerate(mixers):
            inner = self.layer_model(layer)
            added = inner.chunk_size - self.chunk_size
            checks.check_mixer(partial(mixer.check, inner), self.chunk_size, added, self.architecture.kind)
        if self.mup is not None:
            check_base(self.mup, lambda: ModelConfig.model_validate(dict(self.base)))
        return self
