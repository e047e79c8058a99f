"""One transformer block: a mixer and an MLP, each normalized before and added to the residual stream."""

from __future__ import annotations

from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, Losses, State
from megamem.model.layers import make_mlp, make_norm
from megamem.parallel.linears import Linears


class Block(nn.Module):
    """Layer `layer` of the model."""

    def __init__(self, model: ModelConfig, linears: Linears, layer: int) -> None:
        super().__init__()
        self.mixer_norm = make_norm(model, linears)
        self.mixer = model.mixer_at(layer).build(model, linears, layer)
        self.mlp_norm = make_norm(model, linears)
        self.mlp = make_mlp(model, linears)

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """The contract of a mixer (`megamem.memory.base.Mixer.forward`), residual included."""
        mixed, state, losses = self.mixer.forward(self.mixer_norm(hidden), state, chunk)
        hidden = hidden + mixed
        return hidden + self.mlp(self.mlp_norm(hidden)), state, losses
