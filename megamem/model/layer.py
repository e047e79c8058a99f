"""One layer of a model: a mixer and an MLP, each normalized before and added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, Losses, State
from megamem.model.mlp import make_mlp
from megamem.model.norm import make_norm
from megamem.parallel.linears import Linears


class Layer(nn.Module):
    """Layer `layer` of the model, counted from 0."""

    def __init__(self, model: ModelConfig, linears: Linears, layer: int) -> None:
        """Build the layer; model: as its layers see it (`ModelConfig.layer_model`)."""
        super().__init__()
        self.mixer_norm = make_norm(model, linears)
        self.mixer = model.mixer_at(layer).build(model, linears, layer)
        self.mlp_norm = make_norm(model, linears)
        self.mlp = make_mlp(model, linears)

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Read one call's tokens.

        Args:
            hidden: [tokens, batch, hidden_size], the residual stream.
            state: of the mixer.
            chunk: where the tokens lie in their documents.
        Returns: the residual stream after the layer, the mixer's new state and auxiliary losses.
        """
        mixed, state, losses = self.mixer.forward(self.mixer_norm(hidden), state, chunk)
        hidden = hidden + mixed
        return hidden + self.mlp(self.mlp_norm(hidden)), state, losses
