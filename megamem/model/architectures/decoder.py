"""The decoder: embedding, layers, final norm and output head, as in Llama 3 or GPT-2; memory lives in its layers.

Where mixers take side rows (`ModelConfig.side_rows`), a set of rows joins the first or the last tokens of each chunk at
the bottom and goes up with them, across the borders of pipeline stages too; above the last layer it is dropped:

    layer 2     x x x x | u u      m m m | x x x x      u, m: side rows, in the call that ends, or begins, a chunk
    layer 1     x x x x | u u      m m m | x x x x      a layer that takes them changes them, others let them pass by
    embedding   t t t t | w w      e e e | t t t t      w: learned, the same in every chunk
                                                        e: what tokens before the chunk were embedded as, no gradient
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from megamem.config.model import ARCHITECTURES, ArchitectureConfig, ModelConfig
from megamem.memory.base import Chunk, Losses, State, Stateful, States
from megamem.memory.shared.blocks import token_positions
from megamem.memory.shared.recent_tokens import RECENT_EMBEDDINGS
from megamem.memory.shared.segment_attention import ScoreBiases, SegmentAttention
from megamem.model.adaptive_vocabulary import AdaptiveEmbedding, AdaptiveSoftmax
from megamem.model.layer import Layer, tied
from megamem.model.mup import follow_width
from megamem.model.norm import make_norm
from megamem.model.stage import Stage, add_losses, meta_stage
from megamem.ops.dropout import dropped
from megamem.ops.linear_cross_entropy import label_scores, label_scores_and_best, slice_count
from megamem.parallel.linears import Initializer, Linears, declare, normal, token_share

T = TypeVar("T")


@ARCHITECTURES.register
class DecoderConfig(ArchitectureConfig):
    """A plain decoder: a row of layers, whose states are all the memory there is."""

    kind: Literal["decoder"] = "decoder"
    """`decoder`"""

    def build(self, model: ModelConfig, linears: Linears, layers: range) -> Decoder:
        """See `ArchitectureConfig.build`."""
        return Decoder(model, linears, layers)


class SideRows(nn.Module):
    """The learned rows that enter the bottom layer beside the tokens of each chunk.

    A module of its own, which is called: ZeRO 3 gathers a parameter by hooks of the module that owns it.
    """

    def __init__(self, count: int, width: int, start: Initializer) -> None:
        super().__init__()
        self.weight = declare(nn.Parameter(torch.empty(count, width)), start)

    def forward(self, batch: int) -> Tensor:
        """Return the rows, the same for all batch rows: [side rows, batch, width]."""
        return self.weight[:, None].expand(-1, batch, -1)


class Decoder(Stage):
    """The layers `layers` of a decoder; the first stage embeds tokens, the last one has the output head."""

    def __init__(self, model: ModelConfig, linears: Linears, layers: range) -> None:
        super().__init__(model, linears, layers)
        vocabulary, start = model.resolved_padded_vocab_size, normal(model.init_std)
        adaptive = model.adaptive
        if model.architecture.embeds_tokens and (self.first or (self.last and model.tie_embeddings)):
            if adaptive and adaptive.input:
                self.embedding = AdaptiveEmbedding(model, linears, self.first or adaptive.tie_projections)
            else:
                self.embedding = linears.embedding(vocabulary, model.hidden_size, start)
        if self.first and model.max_positions is not None:
            table = torch.empty(model.max_positions, model.hidden_size)
            self.positions = declare(nn.Parameter(table), start)
        side = model.side_rows
        if side is not None:
            self.rows_before, self.rows_behind = side.before, side.behind
        if self.first and side is not None and side.source == "learned":
            self.side_rows = SideRows(side.count, model.hidden_size, start)
        self.layers = nn.ModuleDict({str(i): Layer(model.layer_model(i), linears, i) for i in layers})
        if any(layer in layers for layer in self.sharing_layers):
            self.score_biases = ScoreBiases(
                model.heads // linears.tp_size,
                model.resolved_head_dim,
                model.init_std,
                ahead=any(layer in layers for layer in self.sharing_ahead),
            )
            for module in self.layers.modules():
                if isinstance(module, SegmentAttention) and module.shares_biases:
                    module.share_biases(self.score_biases)
        if self.last:
            # layers that normalize behind themselves have done so already
            self.norm = make_norm(model, linears) if model.norm_position != "post" else nn.Identity()
            if adaptive and adaptive.softmax:
                self.head: nn.Module = AdaptiveSoftmax(model, linears)
            elif not model.tie_embeddings:
                self.head = linears.column(model.hidden_size, vocabulary, start)
        if model.mup is not None:
            follow_width(self, meta_stage(model.model_copy(update={"mup": None})), meta_stage(model.base))

    @property
    def tied_parameters(self) -> list[nn.Parameter]:
        """See `Stage.tied_parameters`; the projections of an adaptive embedding are tied by themselves."""
        tied = super().tied_parameters
        if tied and self.config.adaptive and not self.config.adaptive.tie_projections:
            return list(cast(AdaptiveEmbedding, self.embedding).clusters.parameters())
        return tied

    @property
    def shared_parameters(self) -> list[nn.Parameter]:
        """See `Stage.shared_parameters`: u and v of segment attention."""
        return list(self.score_biases.parameters()) if hasattr(self, "score_biases") else []

    @property
    def repeated_parameters(self) -> list[nn.Parameter]:
        """See `Stage.repeated_parameters`."""
        if not hasattr(self, "score_biases"):
            return []
        *pair, last = self.shared_parameters
        pair, ahead = (pair, [last]) if self.score_biases.ahead is not None else ([*pair, last], [])
        repeated = pair if str(self.sharing_layers[0]) not in self.layers else []
        return [*repeated, *(ahead if ahead and str(self.sharing_ahead[0]) not in self.layers else [])]

    @property
    def sharing_ahead(self) -> list[int]:
        """The layers of the whole model that share a v of rows that look ahead, in order."""
        model = self.config
        layers = (layer for layer in range(model.layers) if model.rows_rise_from(layer))
        return [layer for layer in layers if model.mixer_at(layer).shared_rising_parameters(model.layer_model(layer))]

    @property
    def own_layers(self) -> list[Layer]:
        """The layers of this stage, in order."""
        return cast(list[Layer], list(self.layers.values()))

    @property
    def layer_components(self) -> Mapping[str, Stateful]:
        """See `Stage.layer_components`: the mixers."""
        return {f"layers.{i}": cast(Layer, layer).mixer for i, layer in self.layers.items()}

    def read_chunk(self, x: Tensor, states: States, chunk: Chunk) -> tuple[Tensor, States, Losses]:
        """See `Stage.read_chunk`; x: ids [tokens, batch] or hidden [tokens, batch, hidden_size]."""
        hidden, tokens = self.embed(x, chunk) if self.first else x, self.tokens_of(x, chunk)
        if self.one_grid:
            return self._read_with_side_rows(hidden, states, chunk, tokens)
        parts = chunk.padding_splits(tokens)
        if len(parts) == 1:
            return self.run_layers(hidden, states, chunk)
        if self.linears.sequence_parallel:
            raise ValueError(
                f"left padding that ends inside a call (starts {chunk.starts}) does not go with sequence parallelism; "
                "end the call there or switch parallel.sequence_parallel off"
            )
        outputs: list[Tensor] = []
        losses: Losses = {}
        for part in parts:
            output, states, extra = self.run_layers(hidden[part], states, chunk.part(part.start, part.stop))
            outputs.append(output)
            # each is a mean over the tokens of its call
            share = (part.stop - part.start) / tokens
            losses = add_losses(losses, {name: loss * share for name, loss in extra.items()})
        return torch.cat(outputs), states, losses

    def _read_with_side_rows(
        self, hidden: Tensor, states: States, chunk: Chunk, tokens: int
    ) -> tuple[Tensor, States, Losses]:
        """Read a call that side rows join where a chunk begins, or where it ends.

        Args:
            hidden: [tokens, batch, hidden_size] on the first stage; with the side rows on the others.
            states, chunk: as for `read_chunk`.
            tokens: how many the call reads.
        Returns: as `read_chunk`.
        """
        self.check_grid(chunk)
        before, behind = self.rows_around(chunk.starts[0], tokens)
        entries: States = {}
        if self.first:
            hidden, entries = self._with_side_rows(hidden, states, chunk, before, behind)
        hidden, states, losses = self.run_layers(hidden, states, replace(chunk, rows_before=before, rows_behind=behind))
        if (before or behind) and self.last:
            hidden = self.linears.split_tokens(self.linears.join_tokens(hidden)[before : before + tokens])
        return hidden, {**states, **entries}, losses

    def _with_side_rows(
        self, embedded: Tensor, states: States, chunk: Chunk, before: int, behind: int
    ) -> tuple[Tensor, States]:
        """Put side rows around the tokens of a call: this rank's [rows and tokens, batch, hidden_size].

        Args:
            embedded: this rank's tokens, [tokens, batch, hidden_size].
            states, chunk: as for `read_chunk`.
            before, behind: how many rows go where (`rows_around`).
        Returns: the rows and tokens; the new states of `entry_memories`.
        """
        if not (self.entry_memories or before or behind):
            return embedded, {}
        # with tokens split over ranks, rows are added on the whole call
        whole = self.linears.join_tokens(embedded)
        if not self.entry_memories:
            rows = self.side_rows(whole.shape[1]) if before or behind else whole[:0]
            parts = (rows, whole) if before else (whole, rows)
            return self.linears.split_tokens(torch.cat(parts)), {}
        ((name, memory),) = self.entry_memories.items()
        recent = memory.reset(states[name], chunk, whole.device, whole.dtype)[RECENT_EMBEDDINGS]
        # gradients stop at what was recorded; a copy, as a view would keep the whole call alive
        own = whole.detach()[-recent.shape[0] :]
        kept = torch.cat((recent[own.shape[0] :], own))
        if before or behind:
            whole = torch.cat((recent, whole) if before else (whole, recent))
        return self.linears.split_tokens(whole), {name: {RECENT_EMBEDDINGS: kept}}

    def embed(self, tokens: Tensor, chunk: Chunk) -> Tensor:
        """Embed ids [tokens, batch], with learned positions if there are any: this rank's [tokens, batch, hidden]."""
        hidden: Tensor = self.embedding(tokens)
        if self.config.scale_embedding:
            hidden = hidden * self.config.hidden_size**0.5
        rank, ranks = token_share(self.linears)
        if self.config.positions == "learned":
            own = slice(rank * hidden.shape[0], (rank + 1) * hidden.shape[0])
            places = token_positions(chunk, tokens.shape[0], hidden.device)[own] % self.positions.shape[0]
            hidden = hidden + self.linears.outside(self.positions)[places]
        return dropped(hidden, chunk.drops(self.config.dropout, "embedding"), rank, ranks)

    def run_layers(self, hidden: Tensor, states: States, chunk: Chunk) -> tuple[Tensor, States, Losses]:
        """Take hidden [tokens, batch, hidden] through this stage's layers, and on the last stage the final norm.

        States are reset where documents start. No row's left padding may end inside the call.
        """
        new_states: States = {}
        losses: Losses = {}
        for name, layer in zip(self.layer_components, self.own_layers, strict=True):
            left = states[name]
            state = layer.mixer.reset(left, chunk, self.device_of(layer.mixer, hidden.device), hidden.dtype)
            hidden, state, extra = self.through(layer, layer.forward, hidden, state, chunk)
            if self.ties_resets and all(chunk.fresh()):
                # behind the layer: with a frozen base what enters it may have no gradient, on any rank
                hidden = tied(hidden, left)
            new_states[name] = state
            losses = add_losses(losses, extra)
        if self.last:
            hidden = self.norm(hidden)
            if self.config.norm_position == "post":
                # as Transformer-XL; behind the norm of other models GPT-2 drops nothing
                hidden = dropped(hidden, chunk.drops(self.config.dropout, "last"), *token_share(self.linears))
        return hidden, new_states, losses

    def read_window(self, x: Tensor, states: States, chunks: Sequence[Chunk]) -> tuple[Tensor, States, Losses]:
        """See `Stage.read_window`; x: ids [tokens of all chunks, batch], as `in_window_order` has them."""
        if any(start < 0 for chunk in chunks for start in chunk.starts):
            raise ValueError("rows with left padding are read chunk by chunk")
        # where tokens lie in their documents does not matter to the embedding (`check_window_order`)
        hidden = self.embed(x, chunks[0]) if self.first else x
        new_states: States = {}
        losses: Losses = {}
        for name, layer in zip(self.layer_components, self.own_layers, strict=True):
            given = hidden, states[name], chunks, self.ties_resets
            hidden, new_states[name], extra = self.through(layer, layer.read_window, *given)
            losses = add_losses(losses, extra)
        return (self.norm(hidden) if self.last else hidden), new_states, losses

    def through(
        self, layer: Layer, read: Callable[..., tuple[Tensor, State, Losses]], *given: object
    ) -> tuple[Tensor, State, Losses]:
        """Let a layer read what it is given: hidden [tokens, batch, hidden], its state and places.

        read: `Layer.forward` or `Layer.read_window`.
        """
        if self.recompute is True and torch.is_grad_enabled():
            return cast(tuple[Tensor, State, Losses], checkpoint(read, *given, use_reentrant=False))
        return read(*given)

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Stage.logits`; hidden: [tokens, batch, hidden_size]."""
        if (adaptive := self._adaptive_softmax) is not None:
            return adaptive.logits(hidden, self._tied_embedding)
        x = self._entered(hidden)
        logits = self._with_tied_weight(F.linear, x) if self.config.tie_embeddings else self.head(x)
        words = self._words(logits.shape[-1])
        if words < logits.shape[-1]:  # rows that only fill up the ranks' shares
            spare = torch.arange(logits.shape[-1], device=logits.device) >= words
            logits = logits.masked_fill(spare, -torch.inf)
        return logits

    def label_scores(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See `Stage.label_scores`; hidden: [tokens, batch, hidden_size], labels: [tokens, batch]."""
        scores = partial(label_scores, keep=self.recompute is not True)
        log_sums, label_logits = self._scores(scores, hidden, labels)
        return self.linears.log_normalizer(log_sums[..., None]), self.linears.sum_over_ranks(label_logits)

    def _scores(self, scores: Callable[..., tuple[Tensor, ...]], hidden: Tensor, labels: Tensor) -> list[Tensor]:
        """Return what `scores` finds among this rank's rows of the vocabulary, each [tokens, batch].

        scores: see `megamem.ops.linear_cross_entropy`; hidden: [tokens, batch, hidden_size]; labels: [tokens, batch].
        """

        def of_rank(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
            """Return the scores, [tokens * batch] each; x: [tokens, batch, hidden_size], weight: [rows, ...]."""
            rows = len(weight)
            own = labels.flatten() - self.linears.tp_rank * rows
            slices = self.loss_slices or slice_count(len(own), rows)
            return scores(x.flatten(0, 1), weight, own, self._words(rows), slices)

        x = self._entered(hidden)
        tied = self.config.tie_embeddings
        found = self._with_tied_weight(of_rank, x) if tied else self.linears.with_weight(self.head, of_rank, x)
        return [each.view_as(labels) for each in found]

    def _entered(self, hidden: Tensor) -> Tensor:
        """Return what the head projects, [tokens, batch, hidden_size], of this rank's hidden [tokens, batch, ...]."""
        scale = self.config.logit_scale
        return self.linears.enter(hidden if scale == 1.0 else hidden * scale)

    def _with_tied_weight(self, function: Callable[[Tensor, Tensor], T], x: Tensor) -> T:
        """Return function(x, weight) of x [tokens, batch, hidden_size] and the embedding's weight.

        It lies on another device where layers are spread over several.
        """
        weight = cast(Tensor, self.embedding.weight)
        return function(x.to(weight.device), weight)

    def _words(self, rows: int) -> int:
        """Return how many of this rank's rows of the vocabulary stand for words; the others fill up the shares."""
        return min(max(self.config.vocab_size - self.linears.tp_rank * rows, 0), rows)

    @property
    def _adaptive_softmax(self) -> AdaptiveSoftmax | None:
        """The output head where it is in clusters, else None."""
        adaptive = self.config.adaptive
        return cast(AdaptiveSoftmax, self.head) if adaptive and adaptive.softmax else None

    @property
    def _tied_embedding(self) -> AdaptiveEmbedding | None:
        """The embedding whose vectors an adaptive softmax uses; None if it has its own."""
        return cast(AdaptiveEmbedding, self.embedding) if self.config.tie_embeddings else None

    def _token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """See `Stage._token_losses`; hidden: [tokens, batch, hidden_size], labels: [tokens, batch]."""
        if (adaptive := self._adaptive_softmax) is None:
            return super()._token_losses(hidden, labels)
        if self.recompute is True and torch.is_grad_enabled():
            given = hidden, labels, self._tied_embedding
            return cast(Tensor, checkpoint(adaptive.token_losses, *given, use_reentrant=False))
        return adaptive.token_losses(hidden, labels, self._tied_embedding)

    def _token_scores(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See `Stage._token_scores`; hidden: [tokens, batch, hidden_size], labels: [tokens, batch]."""
        if (adaptive := self._adaptive_softmax) is not None:
            return adaptive.token_scores(hidden, labels, self._tied_embedding)
        log_sums, label_logits, best, row = self._scores(label_scores_and_best, hidden, labels)
        losses = self.linears.log_normalizer(log_sums[..., None]) - self.linears.sum_over_ranks(label_logits)
        # the first of the ranks with the largest logit has the most probable token: of equals the vocabulary's first
        rank = self.linears.largest(best[..., None])[1]
        rows = self.config.resolved_padded_vocab_size // self.linears.tp_size
        here = (rank == self.linears.tp_rank) & (row + self.linears.tp_rank * rows == labels)
        return losses, self.linears.sum_over_ranks(here.float()) > 0
