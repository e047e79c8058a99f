"""One layer of a model: a mixer and an MLP, each added to the residual stream and normalized before or behind."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.memory.base import Chunk, Losses, State
from megamem.model.mlp import make_mlp
from megamem.model.norm import make_norm
from megamem.model.stage import add_losses
from megamem.ops.dropout import dropped
from megamem.parallel.linears import Linears, token_share


class Layer(nn.Module):
    """Layer `layer` of the model, counted from 0."""

    def __init__(self, model: ModelConfig, linears: Linears, layer: int) -> None:
        """Build the layer; model: as its layers see it (`ModelConfig.layer_model`)."""
        super().__init__()
        self.linears = linears
        self.mixer_norm = make_norm(model, linears)
        config = model.mixer_at(layer)
        self.mixer = config.build(model, linears, layer)
        self.takes_side_rows = config.side_rows(model) > 0
        self.mlp_norm = make_norm(model, linears)
        self.mlp = make_mlp(model, linears)
        self.norms_behind = model.norm_position == "post"
        self.dropout = model.dropout
        self.place = f"layers.{layer}"

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Read one call's tokens.

        Args:
            hidden: [tokens and side rows, batch, hidden_size], the residual stream.
            state: of the mixer.
            chunk: where the tokens lie in their documents.
        Returns: the residual stream after the layer, the mixer's new state and auxiliary losses.
        """
        if chunk.begins_inside and not self.mixer.reads_borders:
            return self._document_by_document(hidden, state, chunk)
        if chunk.side_rows and not self.takes_side_rows:
            return self._beside_side_rows(hidden, state, chunk)
        here = chunk.inside(self.place)
        if self.norms_behind:
            mixed, state, losses = self.mixer.forward(hidden, state, here)
            hidden = self.mixer_norm(hidden + self._dropped(mixed, here, "mixer"))
            hidden = self.mlp_norm(hidden + self._dropped(self.mlp.forward(hidden, here), here, "mlp"))
        else:
            mixed, state, losses = self.mixer.forward(self.mixer_norm(hidden), state, here)
            hidden = hidden + self._dropped(mixed, here, "mixer")
            hidden = hidden + self._dropped(self.mlp.forward(self.mlp_norm(hidden), here), here, "mlp")
        hidden, state = self.mixer.after_layer(hidden, state, here)
        return hidden, state, losses

    def _dropped(self, x: Tensor, chunk: Chunk, place: str) -> Tensor:
        """Drop values of what is added to the residual stream, x [this rank's tokens and side rows, batch, width]."""
        return dropped(x, chunk.drops(self.dropout, place), *token_share(self.linears))

    def _document_by_document(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Read hidden [tokens, batch, hidden_size] in parts in which no row holds two documents."""
        if self.linears.sequence_parallel:
            kind = type(self.mixer).__name__
            raise ValueError(f"calls of {kind} are cut where documents begin, which needs all tokens on every rank")
        outputs: list[Tensor] = []
        losses: Losses = {}
        for part in chunk.document_splits(hidden.shape[0]):
            here = chunk.unbroken(part.start)
            state = self.mixer.reset_inside(state, part.start, here.starts, hidden)
            output, state, of_part = self.forward(hidden[part], state, here)
            outputs.append(output)
            # each is a mean over the tokens of its call
            share = output.shape[0] / hidden.shape[0]
            losses = add_losses(losses, {name: loss * share for name, loss in of_part.items()})
        return torch.cat(outputs), state, losses

    def _beside_side_rows(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Read the tokens alone; the side rows of hidden [tokens and side rows, batch, hidden_size] pass unchanged."""
        whole = self.linears.join_tokens(hidden)
        tokens, side = whole.split((whole.shape[0] - chunk.side_rows, chunk.side_rows))
        own, state, losses = self.forward(self.linears.split_tokens(tokens), state, replace(chunk, side_rows=0))
        return self.linears.split_tokens(torch.cat((self.linears.join_tokens(own), side))), state, losses
