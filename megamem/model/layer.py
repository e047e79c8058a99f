"""One layer of a model: a mixer and an MLP, each added to the residual stream, with a norm before, behind or between.

norm_position   of the mixer, likewise of the MLP
pre             x + mixer(norm(x))
output          x + norm(mixer(x))
post            norm(x + mixer(x))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamem.config.model import ModelConfig
from megamem.config.training import LayerPart
from megamem.errors import ConfigError
from megamem.memory.base import Chunk, Losses, Mixer, State, state_tensors
from megamem.model.mlp import make_mlp
from megamem.model.norm import make_norm
from megamem.model.stage import add_losses
from megamem.ops.dropout import dropped
from megamem.ops.slices import parts
from megamem.parallel.linears import Linears, token_share

T = TypeVar("T")
Read = Callable[[Tensor, State, Chunk], tuple[Tensor, State, Losses]]
"""Takes hidden states [tokens, batch, hidden_size], a mixer's state and the place, as `Layer.forward`."""


class Layer(nn.Module):
    """Layer `layer` of the model, counted from 0."""

    def __init__(self, model: ModelConfig, linears: Linears, layer: int) -> None:
        """Build the layer; model: as its layers see it (`ModelConfig.layer_model`)."""
        super().__init__()
        self.linears = linears
        self.mixer_norm = make_norm(model, linears)
        config = model.mixer_at(layer)
        self.mixer = config.build(model, linears, layer)
        side_rows = config.side_rows(model)
        self.takes_side_rows = side_rows is not None
        self.only_reads_rows = side_rows is not None and side_rows.place == "begin" and model.rows_end_at(layer)
        self.mlp_norm = make_norm(model, linears)
        self.mlp = make_mlp(model, linears)
        self.norm_position = model.norm_position
        self.dropout = model.dropout
        self.place = f"layers.{layer}"
        self.recomputed_part: LayerPart | None = None
        """The part that is computed again in the backward pass; None if none is, or the whole layer, by its stage."""

    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Read one call's tokens.

        Args:
            hidden: [tokens and side rows, batch, hidden_size], the residual stream.
            state: of the mixer.
            chunk: where the tokens lie in their documents.
        Returns: the residual stream after the layer, the mixer's new state and auxiliary losses.
        """
        if chunk.begins_inside and not self.mixer.reads_borders:
            return self._document_by_document(self.forward, hidden, state, chunk)
        if (chunk.rows_before or chunk.rows_behind) and not self.takes_side_rows:
            return self._beside_side_rows(hidden, state, chunk)
        here = chunk.inside(self.place)
        if chunk.rows_before and self.only_reads_rows:
            return self._reading_side_rows(hidden, state, here)
        mixed, state, losses = self.run_part("mixer", self._mixed, hidden, state, here)
        hidden = self._added(hidden, mixed, self.mixer_norm, here, "mixer")
        made = self.run_part("mlp", self._made, hidden, here)
        hidden = self._added(hidden, made, self.mlp_norm, here, "mlp")
        hidden, state = self.mixer.after_layer(hidden, state, here)
        return hidden, state, losses

    def read_window(
        self, hidden: Tensor, state: State, chunks: Sequence[Chunk], ties_resets: bool
    ) -> tuple[Tensor, State, Losses]:
        """Read the chunks of a window: norms and MLP the tokens of all at once, the mixer those of as many as it may.

        Args:
            hidden: [tokens of all chunks, batch, hidden_size], the residual stream; of each chunk this rank's tokens.
            state: of the mixer before the first chunk.
            chunks: where their tokens lie in their documents.
            ties_resets: see `Stage.ties_resets`.
        Returns: as `forward`; each auxiliary loss is the mean of the chunks'.
        Raises: ConfigError for a mixer that takes what the whole layer has made of a chunk before the next chunk.
        """
        if type(self.mixer).after_layer is not Mixer.after_layer:
            raise ConfigError(
                f"training.window_order layers does not go with {type(self.mixer).__name__} (model.{self.place}), "
                "whose after_layer takes what the layer has made of each chunk before the next; use chunks"
            )
        mixed, state, losses = self.run_part("mixer", self._mixed_in_calls, hidden, state, chunks, ties_resets)
        # nothing is dropped here (`check_window_order`), so that it does not matter whose place is given
        hidden = self._added(hidden, mixed, self.mixer_norm, chunks[0], "mixer")
        made = self.run_part("mlp", self._made, hidden, chunks[0])
        return self._added(hidden, made, self.mlp_norm, chunks[0], "mlp"), state, losses

    def _mixed_in_calls(
        self, hidden: Tensor, state: State, chunks: Sequence[Chunk], ties_resets: bool
    ) -> tuple[Tensor, State, Losses]:
        """Return what the mixer makes of the chunks in hidden [this rank's tokens, batch, width]; see `read_window`."""
        outputs: list[Tensor] = []
        losses: Losses = {}
        given = self._given(hidden, self.mixer_norm)
        # under ZeRO 3 all ranks call the same modules in the same order, whatever their documents
        size, calls = given.shape[0] // len(chunks), self._calls(chunks, one_by_one=ties_resets)
        for call, tokens in zip(calls, parts(given, [len(call) * size for call in calls]), strict=True):
            left, chunk = state, chunks[call.start]
            state = self.mixer.reset(left, chunk, hidden.device, hidden.dtype)
            output, state, of_call = self._mixed_by_document(tokens, state, chunk.inside(self.place))
            outputs.append(tied(output, left) if ties_resets and all(chunk.fresh()) else output)
            # each is a mean over the tokens of its call
            share = len(call) / len(chunks)
            losses = add_losses(losses, {name: loss * share for name, loss in of_call.items()})
        return torch.cat(outputs) if len(outputs) > 1 else outputs[0], state, losses

    def _calls(self, chunks: Sequence[Chunk], one_by_one: bool) -> list[range]:
        """Return which chunks of a window the mixer reads in one call: as many as possible.

        Each call begins where its first chunk does, so documents begin with a call, or inside the only chunk of one. A
        mixer that stops gradients does so between calls; and where ranks split the tokens of each chunk, they can put
        together those of one chunk only. one_by_one: make a call of each chunk anyway.
        """
        one_by_one = one_by_one or self.linears.sequence_parallel or not self.mixer.differentiable_state
        begins = [
            number
            for number, chunk in enumerate(chunks)
            if not number or one_by_one or any(chunk.fresh()) or chunk.begins_inside or chunks[number - 1].begins_inside
        ]
        return [range(*call) for call in pairwise((*begins, len(chunks)))]

    def _mixed_by_document(self, given: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Return what the mixer makes of given [tokens, batch, width]; in parts if it must, see `reads_borders`."""
        if not chunk.begins_inside or self.mixer.reads_borders:
            return self.mixer.forward(given, state, chunk)
        return self._document_by_document(self.mixer.forward, given, state, chunk)

    def run_part(self, part: LayerPart, run: Callable[..., T], *given: object) -> T:
        """Return what a part makes of what it is given, and let it do so again in the backward pass if it is to."""
        if self.recomputed_part == part and torch.is_grad_enabled():
            return cast(T, checkpoint(run, *given, use_reentrant=False))
        return run(*given)

    def _mixed(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Return what the mixer makes of the residual stream [this rank's tokens, batch, width], state and losses."""
        return self.mixer.forward(self._given(hidden, self.mixer_norm), state, chunk)

    def _made(self, hidden: Tensor, chunk: Chunk) -> Tensor:
        """Return what the MLP makes of the residual stream [this rank's tokens, batch, width]."""
        return self.mlp.forward(self._given(hidden, self.mlp_norm), chunk)

    def _given(self, hidden: Tensor, norm: nn.Module) -> Tensor:
        """Return what mixer or MLP are given of the residual stream [this rank's tokens, batch, width]."""
        given: Tensor = norm(hidden) if self.norm_position == "pre" else hidden
        return given

    def _added(self, hidden: Tensor, made: Tensor, norm: nn.Module, chunk: Chunk, place: str) -> Tensor:
        """Return the residual stream with what mixer or MLP made of it, [this rank's tokens, batch, width]."""
        if self.norm_position == "output":
            made = norm(made)
        added = hidden + self._dropped(made, chunk, place)
        behind: Tensor = norm(added) if self.norm_position == "post" else added
        return behind

    def _dropped(self, x: Tensor, chunk: Chunk, place: str) -> Tensor:
        """Drop values of what is added to the residual stream, x [this rank's tokens and side rows, batch, width]."""
        return dropped(x, chunk.drops(self.dropout, place), *token_share(self.linears))

    def _document_by_document(
        self, read: Read, hidden: Tensor, state: State, chunk: Chunk
    ) -> tuple[Tensor, State, Losses]:
        """Read hidden [tokens, batch, hidden_size] in parts in which no row holds two documents.

        read: the layer, or its mixer.
        """
        if self.linears.sequence_parallel:
            kind = type(self.mixer).__name__
            raise ValueError(f"calls of {kind} are cut where documents begin, which needs all tokens on every rank")
        outputs: list[Tensor] = []
        losses: Losses = {}
        for part in chunk.document_splits(hidden.shape[0]):
            here = chunk.unbroken(part.start)
            state = self.mixer.reset_inside(state, part.start, here.starts, hidden)
            output, state, of_part = read(hidden[part], state, here)
            outputs.append(output)
            # each is a mean over the tokens of its call
            share = output.shape[0] / hidden.shape[0]
            losses = add_losses(losses, {name: loss * share for name, loss in of_part.items()})
        return torch.cat(outputs), state, losses

    def _beside_side_rows(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Read the tokens alone; the side rows of hidden [tokens and side rows, batch, hidden_size] pass unchanged."""
        before, tokens, behind = self._parted(hidden, chunk)
        alone = replace(chunk, rows_before=0, rows_behind=0)
        own, state, losses = self.forward(self.linears.split_tokens(tokens), state, alone)
        return self.linears.split_tokens(torch.cat((before, self.linears.join_tokens(own), behind))), state, losses

    def _reading_side_rows(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Read hidden [side rows and tokens, batch, hidden_size]; the mixer reads the rows, nobody reads them above."""
        before, tokens, _ = self._parted(hidden, chunk)
        mixed, state, losses = self.run_part("mixer", self._mixed, hidden, state, chunk)
        # what is left of the call are its tokens
        own, alone = self.linears.split_tokens(tokens), replace(chunk, rows_before=0)
        own = self._added(own, mixed, self.mixer_norm, alone, "mixer")
        made = self.run_part("mlp", self._made, own, alone)
        own = self._added(own, made, self.mlp_norm, alone, "mlp")
        hidden = self.linears.split_tokens(torch.cat((before, self.linears.join_tokens(own))))
        hidden, state = self.mixer.after_layer(hidden, state, chunk)
        return hidden, state, losses

    def _parted(self, hidden: Tensor, chunk: Chunk) -> tuple[Tensor, Tensor, Tensor]:
        """Return side rows, tokens and side rows of hidden [tokens and side rows, batch, hidden_size], on all ranks."""
        whole = self.linears.join_tokens(hidden)
        before, behind = chunk.rows_before, chunk.rows_behind
        first, tokens, last = whole.split((before, whole.shape[0] - before - behind, behind))
        return first, tokens, last


def tied(hidden: Tensor, state: State) -> Tensor:
    """Make the tensors of `state` part of the backward pass of `hidden` [tokens, batch, hidden], gradients zero."""
    for tensor in state_tensors(state):
        if tensor.requires_grad:
            left = tensor.flatten()[:1].sum()  # chosen away, not multiplied by zero: it need not be finite
            hidden = hidden + torch.where(torch.ones_like(left, dtype=torch.bool), torch.zeros_like(left), left)
    return hidden
