"""The model, or the run of layers of it that one pipeline stage holds. It never keeps a memory state."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamem.config.model import ModelConfig
from megamem.errors import ContractError
from megamem.memory.base import LABEL_IGNORED, Chunk, Losses, State, state_tensors, to_device
from megamem.model.block import Block
from megamem.model.layers import make_norm
from megamem.model.mup import follow_width
from megamem.parallel.linears import Linears, PlainLinears, declare, normal


def add_losses(total: Losses, more: Losses) -> Losses:
    """Sums by name."""
    return {
        **total,
        **{name: total[name] + value if name in total else value for name, value in more.items()},
    }


def tied(hidden: Tensor, state: State) -> Tensor:
    """`hidden`, of whose backward pass the tensors of `state` are part with gradients of zero."""
    for tensor in state_tensors(state):
        if tensor.requires_grad:
            left = tensor.flatten()[:1].sum()  # chosen away, not multiplied by zero: it need not be finite
            hidden = hidden + torch.where(torch.ones_like(left, dtype=torch.bool), torch.zeros_like(left), left)
    return hidden


def meta_stage(model: ModelConfig) -> Stage:
    """The whole model with torch's own layers, its parameters without values: for their names and shapes."""
    with torch.device("meta"):
        return Stage(model, PlainLinears())


class Stage(nn.Module):
    """Layers `layers` of the model; the first stage embeds tokens, the last one has the output head.

    Parameters carry global names (`layers.7.mixer.query.weight`) whatever the stage.

    What passes states (block, mixer) is called by `.forward`, past module hooks: ZeRO-3 counts the gradients of every
    hooked output, and where documents begin, those of states come and go, differently on each rank.
    """

    def __init__(self, model: ModelConfig, linears: Linears, layers: range | None = None) -> None:
        super().__init__()
        layers = range(model.layers) if layers is None else layers
        self.config = model
        self.linears = linears
        self.first, self.last = layers.start == 0, layers.stop == model.layers
        self.recompute = False
        self.ties_resets = False
        """Whether states that a new document leaves behind keep their place in the backward pass, with gradients of
        zero: ZeRO 3 wants all ranks to run the same modules backward, wherever their documents begin."""
        if self.first or (self.last and model.tie_embeddings):
            self.embedding = linears.embedding(
                model.resolved_padded_vocab_size, model.hidden_size, normal(model.init_std)
            )
        if self.first and model.max_positions is not None:
            table = torch.empty(model.max_positions, model.hidden_size)
            self.positions = declare(nn.Parameter(table), normal(model.init_std))
        self.layers = nn.ModuleDict({str(i): Block(model, linears, i) for i in layers})
        if self.last:
            self.norm = make_norm(model, linears)
            if not model.tie_embeddings:
                self.head = linears.column(model.hidden_size, model.resolved_padded_vocab_size, normal(model.init_std))
        if model.mup is not None:
            follow_width(self, meta_stage(model.model_copy(update={"mup": None})), meta_stage(model.base))

    @property
    def blocks(self) -> list[Block]:
        """The blocks in order."""
        return cast(list[Block], list(self.layers.values()))

    def initial_states(self, rows: int, device: torch.device, dtype: torch.dtype) -> list[State]:
        """Fresh states of this stage's layers."""
        return [block.mixer.initial_state(rows, device, dtype) for block in self.blocks]

    def check_states(self, states: Sequence[State], rows: int) -> None:
        """Raise ContractError naming the layer whose state, as it stands at a chunk's border, is not as declared."""
        for (layer, block), state in zip(self.layers.items(), states, strict=True):
            try:
                cast(Block, block).mixer.check_state(state, rows)
            except ContractError as error:
                kind = self.config.mixer_at(int(layer)).kind
                raise ContractError(f"model.layers.{layer} ({kind}): {error}") from None

    def border_shape(self, tokens: int, rows: int) -> tuple[int, int, int]:
        """Shape of the hidden chunk that passes from stage to stage, on this rank."""
        split = self.linears.tp_size if self.linears.sequence_parallel else 1
        return tokens // split, rows, self.config.hidden_size

    def forward(self, x: Tensor, states: Sequence[State], chunk: Chunk) -> tuple[Tensor, list[State], Losses]:
        """One call over some tokens.

        Args:
            x: token ids [tokens, batch] int64 on the first stage, else hidden [tokens, batch, hidden].
            states: one per layer of this stage.
            chunk: where the tokens lie in their documents; rows at position 0 start afresh.
        Returns: hidden (on the last stage after the final norm), new states, auxiliary losses summed over layers.
        Raises: ValueError if left padding ends inside the call while tokens are split over ranks.
        """
        hidden = self._embedded(x, chunk) if self.first else x
        split = self.linears.sequence_parallel
        pieces = chunk.pieces(x.shape[0] * (self.linears.tp_size if split and not self.first else 1))
        if len(pieces) == 1:
            return self._run(hidden, states, chunk)
        if split:
            raise ValueError(
                f"left padding that ends inside a call (starts {chunk.starts}) does not go with sequence parallelism; "
                "end the call there or switch parallel.sequence_parallel off"
            )
        outputs: list[Tensor] = []
        losses: Losses = {}
        new = list(states)
        for piece in pieces:
            output, new, extra = self._run(hidden[piece], new, chunk.after(piece.start))
            outputs.append(output)
            losses = add_losses(losses, extra)
        return torch.cat(outputs), new, losses

    def _embedded(self, tokens: Tensor, chunk: Chunk) -> Tensor:
        """This rank's tokens' embeddings, with those of their positions where they are learned."""
        hidden: Tensor = self.embedding(tokens)
        if self.config.positions == "rotary":
            return hidden
        own = hidden.shape[0]
        first = self.linears.tp_rank * own if self.linears.sequence_parallel else 0
        steps = torch.arange(first, first + own, device=hidden.device)[:, None]
        places = (to_device(chunk.starts, hidden.device) + steps) % self.positions.shape[0]
        return hidden + self.linears.outside(self.positions)[places]

    def _run(self, hidden: Tensor, states: Sequence[State], chunk: Chunk) -> tuple[Tensor, list[State], Losses]:
        new_states: list[State] = []
        losses: Losses = {}
        for block, state in zip(self.blocks, states, strict=True):
            device = next(state_tensors(state), hidden).device  # of the layer, where they are spread over several
            if self.ties_resets and all(chunk.fresh()):
                hidden = tied(hidden, state)
            state = block.mixer.reset(state, chunk, device, hidden.dtype)
            if self.recompute and torch.is_grad_enabled():
                hidden, state, extra = checkpoint(block.forward, hidden, state, chunk, use_reentrant=False)
            else:
                hidden, state, extra = block.forward(hidden, state, chunk)
            new_states.append(state)
            losses = add_losses(losses, extra)
        if self.last:
            hidden = self.norm(hidden)
        return hidden, new_states, losses

    def logits(self, hidden: Tensor) -> Tensor:
        """Local logits [tokens, batch, rows / tp] of the last stage's hidden; -inf beyond the vocabulary."""
        scale = self.config.logit_scale
        x = self.linears.enter(hidden if scale == 1.0 else hidden * scale)
        if self.config.tie_embeddings:  # which lies on another device where layers are spread over several
            weight = cast(Tensor, self.embedding.weight)
            logits = F.linear(x.to(weight.device), weight)
        else:
            logits = self.head(x)
        real = self.config.vocab_size - self.linears.tp_rank * logits.shape[-1]
        if real < logits.shape[-1]:  # rows that only fill up the ranks' shares
            spare = torch.arange(logits.shape[-1], device=logits.device) >= real
            logits = logits.masked_fill(spare, -torch.inf)
        return logits

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Cross-entropy of each token [tokens, batch] in float32 nats; 0 where the label is ignored."""
        ignored = labels == LABEL_IGNORED
        if self.recompute and torch.is_grad_enabled():
            losses = checkpoint(self._token_losses, hidden, labels.masked_fill(ignored, 0), use_reentrant=False)
        else:
            losses = self._token_losses(hidden, labels.masked_fill(ignored, 0))
        return cast(Tensor, losses).masked_fill(ignored, 0.0)

    def token_scores(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """`token_losses`, and where the label is the most probable token [tokens, batch] bool. For evaluation."""
        ignored = labels == LABEL_IGNORED
        logits, known = self.logits(hidden), labels.masked_fill(ignored, 0)
        hits = self.linears.hits(logits, known) & ~ignored
        return self.linears.cross_entropy(logits, known).masked_fill(ignored, 0.0), hits

    def _token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return self.linears.cross_entropy(self.logits(hidden), labels)
