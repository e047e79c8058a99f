"""One memory mechanism for use in somebody else's model: batch first, its state in one object that the caller keeps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from megamem.config.load import parse_config
from megamem.config.model import ModelConfig
from megamem.errors import ConfigError
from megamem.memory.base import Chunk, Losses, Mixer, State, detach
from megamem.parallel.linears import PlainLinears, initialize_parameters


@dataclass(frozen=True)
class MixerState:
    """What a mechanism remembers of the rows it reads, and how far each has been read. A value: never written to."""

    tensors: State
    """The mechanism's tensors, as `Mixer.specs` declares them."""
    positions: tuple[int, ...]
    """The position of each row's next token in its document."""
    losses: Losses = field(default_factory=dict)
    """The mechanism's auxiliary losses of the last call by name; most have none."""

    def detach(self) -> MixerState:
        """Return the same state without its history: gradients end here."""
        return MixerState(detach(self.tensors), self.positions)

    def with_new_documents(self, rows: Mapping[int, bool] | list[bool]) -> MixerState:
        """Return the state after the documents of some rows have ended: their next token begins another one."""
        ended = rows if isinstance(rows, Mapping) else dict(enumerate(rows))
        return MixerState(self.tensors, tuple(0 if ended.get(row) else p for row, p in enumerate(self.positions)))


class StandaloneMixer(nn.Module):
    """A mechanism with projections of its own: (hidden, state) to (mixed, state), without norm and residual."""

    def __init__(self, mixer: Mixer) -> None:
        """Wrap a mixer that was built with plain linear layers."""
        super().__init__()
        self.mixer = mixer

    def forward(self, hidden: Tensor, state: MixerState | None = None) -> tuple[Tensor, MixerState]:
        """Read tokens on from where `state` stands, or from the start of documents.

        Args:
            hidden: [batch, tokens, hidden_size], normalized; any number of tokens.
            state: of the call before; None where documents begin in all rows.
        Returns: mixed tokens [batch, tokens, hidden_size], to be added to the residual stream, and the new state.
        Raises: ValueError where the state has another number of rows.
        """
        rows = hidden.shape[0]
        if state is None:
            fresh = self.mixer.initial_state(rows, hidden.device, hidden.dtype)
            state = MixerState(fresh, (0,) * rows)
        if len(state.positions) != rows:
            raise ValueError(f"{rows} rows cannot continue a state of {len(state.positions)}")
        chunk = Chunk(state.positions)
        tensors = self.mixer.reset(state.tensors, chunk, hidden.device, hidden.dtype)
        mixed, tensors, losses = self.mixer(hidden.transpose(0, 1), tensors, chunk)
        return mixed.transpose(0, 1), MixerState(tensors, chunk.after(hidden.shape[1]).starts, losses)


def make_standalone(mixer: Mapping[str, Any], sizes: Mapping[str, Any], layer: int, seed: int) -> StandaloneMixer:
    """Make a mechanism from its configuration, with initial weights drawn from `seed`.

    Args:
        mixer: `kind` and the mechanism's options.
        sizes: hidden_size, heads, kv_heads and chunk_size, as in `ModelConfig`.
        layer: number of the layer.
    Raises: ConfigError naming what is not valid.
    """
    tree = {**sizes, "layers": layer + 1, "mixer": dict(mixer)}
    model = parse_config(ModelConfig, {k: v for k, v in tree.items() if v is not None}, "megamem.mixer")
    if model.side_rows:
        raise ConfigError(
            f"megamem.mixer: {mixer['kind']} with these options hands rows from layer to layer and cannot stand alone; "
            "build a whole model with megamem.build_model"
        )
    built = StandaloneMixer(model.mixer_at(layer).build(model, PlainLinears(), layer))
    initialize_parameters(built, seed)
    return built
