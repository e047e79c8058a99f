"""What every architecture is to those who run it: a pipeline stage that reads chunks and never keeps a state.

A model is one stage, or a row of stages on several ranks. Training, evaluation, generation and exports all call
`Stage.read_chunk`; what a state is made of they know by component only.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import cast

import torch
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.config.training import Recompute
from megamem.errors import ConfigError, ContractError
from megamem.memory.base import LABEL_IGNORED, Chunk, Losses, Mixer, State, Stateful, States, StateSpec
from megamem.parallel.linears import Linears, PlainLinears, token_share


def build_stage(model: ModelConfig, linears: Linears, layers: range | None = None) -> Stage:
    """Build the stage that holds `layers` of a model, all of them if not given; its weights have no values yet."""
    built = model.architecture.build(model, linears, range(model.layers) if layers is None else layers)
    return cast(Stage, built)


def meta_stage(model: ModelConfig) -> Stage:
    """Build the whole model with torch's own layers and parameters without values: for their names and shapes."""
    with torch.device("meta"):
        return build_stage(model, PlainLinears())


def typical_labels(model: ModelConfig, tokens: int, rows: int) -> Tensor:
    """Return labels [tokens, rows] int64 to measure losses with.

    What an adaptive softmax costs depends on them: each row has as many words of each cluster as Zipf's law says.
    """
    if model.adaptive is None:
        return torch.zeros(tokens, rows, dtype=torch.int64)
    column = torch.tensor(model.adaptive.typical_tokens(model.vocab_size, tokens))
    return column[:, None].expand(-1, rows).contiguous()


def add_losses(total: Losses, more: Losses) -> Losses:
    """Add losses of the same name; each is a scalar."""
    return {
        **total,
        **{name: total[name] + value if name in total else value for name, value in more.items()},
    }


class ModelMemory(Stateful):
    """A declared state that belongs to no layer.

    It is one of a memory that spans the model, written by the last stage and read by the first, or one that the first
    stage alone keeps.
    """

    def __init__(self, specs: StateSpec, sizes: Mapping[str, int]) -> None:
        """Declare the tensors. They are not split over tensor-parallel ranks: every rank holds them whole."""
        self.specs, self.sizes, self.tp_size = specs, dict(sizes), 1


class Stage(nn.Module, ABC):
    """A rank's part of a model: some layers, the embedding on the first stage, the output head on the last.

    Parameters carry global names (`layers.7.mixer.query.weight`) whatever the stage.

    What passes states (stage, layer, mixer) is called by its method, past module hooks: ZeRO 3 counts the gradients of
    every hooked output, and where documents begin, those of states come and go, differently on each rank.
    """

    layers: nn.ModuleDict
    """The layers of this stage by their number in the whole model."""
    embedding: nn.Module
    """The token embedding: on the first stage, and on the last one where the output head is tied to it."""
    rows_before = 0
    """Rows that layers read in front of each chunk's tokens."""
    rows_behind = 0
    """Rows that layers read behind each chunk's tokens, in the call that ends it."""

    def __init__(self, model: ModelConfig, linears: Linears, layers: range) -> None:
        """Note the configuration; subclasses build the modules. layers: those of this stage."""
        super().__init__()
        self.config = model
        self.linears = linears
        self.first, self.last = layers.start == 0, layers.stop == model.layers
        self._recompute: Recompute = False
        self.loss_slices: int | None = None
        """Slices of tokens in which losses are computed; as many as `slice_count` says if None."""
        self.ties_resets = False
        """Whether states that a new document leaves behind keep their place in the backward pass, with gradients of
        zero: ZeRO 3 wants all ranks to run the same modules backward, wherever their documents begin."""
        sizes = {"hidden": model.hidden_size}
        specs = model.architecture.state_specs(model)
        self.model_memories = {name: ModelMemory(spec, sizes) for name, spec in specs.items()}
        """Components that leave the last stage and enter the first one before the next chunk."""
        self.entry_memories = {name: ModelMemory(spec, sizes) for name, spec in model.entry_specs.items() if self.first}
        """Components that the first stage alone reads and writes: what side rows are made of, or an encoder's chunk."""
        self.beside_layers = {name: ModelMemory(spec, sizes) for name, spec in model.specs_beside(layers).items()}
        """Components that this stage alone reads and writes besides its layers' states."""

    @property
    def recompute(self) -> Recompute:
        """What of each layer is computed again in the backward pass."""
        return self._recompute

    @recompute.setter
    def recompute(self, what: Recompute) -> None:
        """Set it, on each layer too where a part of it is meant."""
        self._recompute = what
        for layer in self.layers.values():
            layer.recomputed_part = None if isinstance(what, bool) else what  # type: ignore[assignment]

    @property
    @abstractmethod
    def layer_components(self) -> Mapping[str, Stateful]:
        """The components that this stage both reads and writes: one for each layer that keeps a state, in order."""

    @property
    def auxiliary_losses(self) -> tuple[str, ...]:
        """The names of the losses that layers of the model return, those of other stages among them."""
        return self.config.auxiliary_losses

    @property
    def tied_parameters(self) -> list[nn.Parameter]:
        """The parameters that first and last stage both hold where embeddings are tied, in the same order on both."""
        return list(self.embedding.parameters()) if self.config.tie_embeddings else []

    @property
    def shared_parameters(self) -> list[nn.Parameter]:
        """The parameters that layers of several stages use together, as far as layers of this stage do."""
        return []

    @property
    def repeated_parameters(self) -> list[nn.Parameter]:
        """Those of `shared_parameters` that an earlier stage holds too."""
        return []

    @property
    def sharing_layers(self) -> list[int]:
        """The layers of the whole model that share parameters, in order."""
        model = self.config
        layers = range(model.layers)
        return [layer for layer in layers if model.mixer_at(layer).shared_parameters(model.layer_model(layer))]

    @property
    def components(self) -> dict[str, Stateful]:
        """The components whose states `read_chunk` takes; those it returns differ in `model_memories` alone.

        The first stage takes the states of memories that span the model, the last one returns them.
        """
        own = {**self.layer_components, **self.beside_layers, **self.entry_memories}
        return {**own, **(self.model_memories if self.first else {})}

    @property
    def state_specs(self) -> dict[str, StateSpec]:
        """The declared states that this stage takes, by component."""
        return {name: component.specs for name, component in self.components.items()}

    @staticmethod
    def device_of(component: Stateful, default: torch.device) -> torch.device:
        """Return the device of a component's parameters, `default` if it has none: layers may lie on several."""
        parameter = next(component.parameters(), None) if isinstance(component, nn.Module) else None
        return default if parameter is None or parameter.is_meta else parameter.device

    def initial_states(self, rows: int, device: torch.device, dtype: torch.dtype) -> States:
        """Return the states of `rows` documents that have not begun, for activations of `dtype`.

        Each lies on the device of its component's parameters, since layers of one model may be spread over several;
        `device` is for those without.
        """
        return {
            name: component.initial_state(rows, self.device_of(component, device), dtype)
            for name, component in self.components.items()
        }

    def reset(self, states: States, chunk: Chunk, device: torch.device, dtype: torch.dtype) -> States:
        """Return the states with fresh rows where documents start (`Stateful.reset`)."""
        return {
            name: component.reset(states[name], chunk, self.device_of(component, device), dtype)
            for name, component in self.components.items()
        }

    def check_reads_borders(self) -> None:
        """Raise ConfigError naming a mixer that needs all tokens on a rank, to cut calls where documents begin."""
        for name, component in self.layer_components.items():
            if isinstance(component, Mixer) and not component.reads_borders:
                kind = self.config.mixer_at(int(name.removeprefix("layers."))).kind
                raise ConfigError(
                    f"parallel.sequence_parallel does not go with data.reset exact for {kind} (model.{name}), whose "
                    "calls are cut where documents begin; switch it off or use data.documents pack"
                )

    def check_states(self, states: States, rows: int) -> None:
        """Raise ContractError naming the component whose state at a chunk's border is not as declared."""
        for name, component in self.layer_components.items():
            self._check(name, component, states[name], rows)
        for name, memory in {**self.beside_layers, **self.entry_memories, **self.model_memories}.items():
            if name in states:
                self._check(name, memory, states[name], rows)

    def _check(self, name: str, component: Stateful, state: State, rows: int) -> None:
        try:
            component.check_state(state, rows)
        except ContractError as error:
            kind = self.config.architecture.kind
            if name.startswith("layers."):
                kind = self.config.mixer_at(int(name.removeprefix("layers."))).kind
            raise ContractError(f"model.{name} ({kind}): {error}") from None

    @property
    def one_grid(self) -> bool:
        """Whether all rows of a call must be at the same place of their chunks (documents may begin in any of them)."""
        return self.rows_before + self.rows_behind > 0

    def rows_around(self, start: int, tokens: int) -> tuple[int, int]:
        """Rows before and behind `tokens` tokens from position `start` on: where a chunk begins, and where it ends.

        Raises: ValueError if a chunk ends inside the call and rows would have to stand there.
        """
        if not self.one_grid:
            return 0, 0
        size = self.config.chunk_size
        place = start % size
        if place + tokens > size:
            raise ValueError(f"{tokens} tokens from place {place} of a chunk of {size} run across its end")
        ends = place + tokens == size
        return (0 if place else self.rows_before), (self.rows_behind if ends else 0)

    def tokens_of(self, entered: Tensor, chunk: Chunk) -> int:
        """Return how many tokens a call reads, all ranks' together.

        entered: what `read_chunk` takes, ids [tokens, batch] or hidden [tokens and rows around, batch, hidden_size].
        """
        if self.first:
            return entered.shape[0]
        count = entered.shape[0] * (self.linears.tp_size if self.linears.sequence_parallel else 1)
        if not self.one_grid:
            return count
        size = self.config.chunk_size
        place = chunk.starts[0] % size
        count -= 0 if place else self.rows_before
        return count - self.rows_behind if place + count > size else count

    def grid_place(self, start: int) -> int:
        """Return what rows that are read in one call must have in common, of a row at position `start`."""
        return start % self.config.chunk_size if self.one_grid else 0

    def check_grid(self, chunk: Chunk) -> None:
        """Raise ValueError if batch rows stand at different places of their chunks where they must not."""
        places = set(map(self.grid_place, chunk.starts))
        if len(places) > 1:
            raise ValueError(f"rows at places {sorted(places)} of their chunks cannot be read in one call")

    def border_shape(self, tokens: int, rows: int, start: int = 0) -> tuple[int, int, int]:
        """Shape of what this stage takes from the one below, where `tokens` from position `start` on are read."""
        split = self.linears.tp_size if self.linears.sequence_parallel else 1
        return (tokens + sum(self.rows_around(start, tokens))) // split, rows, self.config.hidden_size

    def shape_above(self, tokens: int, rows: int, start: int = 0) -> tuple[int, int, int]:
        """Shape of what this stage hands to the one above; see `border_shape`."""
        return self.border_shape(tokens, rows, start)

    def memories_change(self, start: int, tokens: int) -> bool:
        """Whether the last stage writes the memories that span the model when it reads `tokens` from `start` on."""
        return True

    def prepare(self, tokens: Tensor, places: Sequence[Chunk]) -> Sequence[Chunk]:
        """Compute ahead what chunks that are read one after another need, but do not need each other for.

        Args:
            tokens: ids [chunks * chunk_size, batch] int64 of all of them, on a stage that holds the whole model.
            places: where each chunk's tokens lie in their documents.
        Returns: the places, with what was computed (`Chunk.prepared`).
        """
        return places

    @abstractmethod
    def read_chunk(self, x: Tensor, states: States, chunk: Chunk) -> tuple[Tensor, States, Losses]:
        """Read one call's tokens, at most a chunk.

        Args:
            x: token ids [tokens, batch] int64 on the first stage, else hidden [tokens, batch, hidden_size] with the
                rows around them (`border_shape`).
            states: of `components`. They belong to the caller and are not written to.
            chunk: where the tokens lie in their documents; rows at position 0 start afresh.
        Returns: hidden (on the last stage of the tokens alone, after the final norm), new states, auxiliary losses
            summed over layers.
        Raises: ValueError if left padding ends inside the call while tokens are split over ranks.
        """

    def read_documents(self, x: Tensor, states: States, chunk: Chunk) -> tuple[Tensor, States, Losses]:
        """Read a call inside which documents may begin wherever `chunk.borders` says.

        Where all rows of a call must be at the same place of their chunks (`one_grid`), it is read in parts that end
        with the documents and with their chunks: for one batch row, on a stage that holds the whole model.

        x: as for `read_chunk`, ids [tokens, batch] or hidden [tokens, batch, hidden_size]; so are the others.
        Returns: as `read_chunk`.
        Raises: ValueError for several rows, or for a part of a model, on one grid.
        """
        if not self.one_grid or chunk.borders is None:
            return self.read_chunk(x, states, chunk)
        if chunk.rows > 1 or not (self.first and self.last):
            raise ValueError(
                "rows beside the tokens go with documents that begin inside chunks for one batch row "
                "and without a pipeline"
            )
        size, tokens = self.config.chunk_size, x.shape[0]
        outputs: list[Tensor] = []
        losses: Losses = {}
        for part in chunk.document_splits(tokens):
            begin = part.start
            while begin < part.stop:
                here = chunk.unbroken(begin)
                end = min(begin + size - here.starts[0] % size, part.stop)
                output, states, extra = self.read_chunk(x[begin:end], states, here)
                outputs.append(output)
                # each is a mean over the tokens of its call
                losses = add_losses(losses, {name: loss * ((end - begin) / tokens) for name, loss in extra.items()})
                begin = end
        return torch.cat(outputs), states, losses

    def read_window(self, x: Tensor, states: States, chunks: Sequence[Chunk]) -> tuple[Tensor, States, Losses]:
        """Read the chunks of a window layer by layer, which decoders can (`check_window_order`).

        x: as for `read_chunk`, of all chunks [tokens, batch, ...], as `in_window_order` has them.
        chunks: where their tokens lie in their documents.
        Returns: as `read_chunk`; auxiliary losses are means over the chunks.
        Raises: ValueError for rows with left padding; ConfigError for layers that cannot be read so.
        """
        raise NotImplementedError(f"{type(self).__name__} reads chunk by chunk")

    def in_window_order(self, x: Tensor, chunks: int) -> Tensor:
        """Return what lies beside tokens, x [tokens of all chunks, ...], as `read_window` takes them.

        Where ranks split the tokens of each chunk, those of a window are sorted by rank, then by chunk.
        """
        ranks = token_share(self.linears)[1]
        return x if ranks == 1 else x.unflatten(0, (chunks, ranks, -1)).transpose(0, 1).flatten(0, 2)

    def forward(self, x: Tensor, states: States, chunk: Chunk) -> tuple[Tensor, States, Losses]:
        """See `Stage.read_documents`."""
        return self.read_documents(x, states, chunk)

    @abstractmethod
    def logits(self, hidden: Tensor) -> Tensor:
        """Return the last stage's local logits [tokens, batch, padded vocabulary / tp], -inf beyond the vocabulary.

        hidden: [tokens, batch, hidden_size] as the last stage's `read_chunk` returns it.
        """

    @abstractmethod
    def label_scores(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logarithms of the sums that probabilities are normalized by, and the logits of the labels.

        Both are [tokens, batch] in float32 or float64, the same on all tensor-parallel ranks: their difference is the
        cross-entropy. An adaptive softmax has several such sums, and no such figures.

        hidden: [tokens, batch, hidden_size] of the last stage; labels: [tokens, batch] int64, none ignored.
        """

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Return the cross-entropy of each token [tokens, batch] in float32 nats; 0 where the label is ignored.

        hidden: [tokens, batch, hidden_size] of the last stage; labels: [tokens, batch] int64.
        """
        ignored = labels == LABEL_IGNORED
        return self._token_losses(hidden, labels.masked_fill(ignored, 0)).masked_fill(ignored, 0.0)

    def token_losses_and_normalizers(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """Return `token_losses`, and each token's logarithm of the sum of exponentials of its logits.

        Both are [tokens, batch] in float32, and 0 where the label is ignored. Arguments: see `token_losses`.
        """
        ignored = labels == LABEL_IGNORED
        normalizers, label_logits = self.label_scores(hidden, labels.masked_fill(ignored, 0))
        return (normalizers - label_logits).masked_fill(ignored, 0.0), normalizers.masked_fill(ignored, 0.0)

    def token_scores(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """`token_losses`, and where the label is the most probable token [tokens, batch] bool; for evaluation.

        hidden: [tokens, batch, hidden_size] of the last stage; labels: [tokens, batch] int64.
        """
        ignored = labels == LABEL_IGNORED
        losses, correct = self._token_scores(hidden, labels.masked_fill(ignored, 0))
        return losses.masked_fill(ignored, 0.0), correct & ~ignored

    def _token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """Losses [tokens, batch] of hidden [tokens, batch, hidden_size]; labels: [tokens, batch], none ignored."""
        normalizers, label_logits = self.label_scores(hidden, labels)
        return normalizers - label_logits

    @abstractmethod
    def _token_scores(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        """See `token_scores`; hidden: [tokens, batch, hidden_size], labels: [tokens, batch], none ignored."""
