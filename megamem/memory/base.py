"""The memory contract: a mixer maps (hidden chunk, state) to (hidden chunk, new state).

The state is a plain pytree of tensors that belongs to the caller: a mixer never keeps it. `TensorSpec`s declare it, and
from the declarations alone states are made, counted, checked, sharded and saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, Literal, NamedTuple, TypeVar, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megamem.errors import ContractError
from megamem.ops.dropout import Dropout, DropoutKeys

Axis = int | str
"""The size of an axis: a number, or a name that `TensorSpec.shape` lists."""
State = dict[str, Any]
"""The state of one component (a layer's mixer, a memory of the whole model): tensors, and lists of dicts of tensors."""
States = dict[str, State]
"""The states of a model, or of a stage of it, by component: `layers.3`, `memory_tokens`."""
Losses = dict[str, Tensor]
"""Auxiliary losses by name, scalars."""
LABEL_IGNORED = -100
"""The label of tokens that no loss counts."""
Tree = TypeVar("Tree")
"""A tensor, or dicts and lists of tensors: the type of a state, of its parts or of the states of a model."""


@dataclass(frozen=True)
class TensorSpec:
    """The declaration of one state tensor."""

    shape: tuple[Axis, ...]
    """Numbers or names: `batch` (rows), `heads`, `kv_heads`, `hidden`, `chunk` (tokens of a chunk), `open` (tokens of
    the unfinished block, 0 at chunk borders)."""
    dtype: Literal["compute", "float32", "int64"] = "compute"
    """`compute` is the activations' dtype; `float32` is float32 in training and float64 where activations are."""
    shard: str | None = None
    """The name in `shape` that is split over tensor-parallel ranks, or None if the tensor is replicated."""
    kind: Literal["memory", "open"] = "memory"
    """`memory` is what papers' tables count; `open` is what token-by-token decoding needs besides."""
    long_term: bool = False
    """Whether it belongs to a long-term memory beside a shorter one, which gives nothing to read where it is zeros:
    evaluation can take that memory away alone."""
    host: bool = False
    """Whether it lies in host memory while a CUDA device reads text without gradients."""

    def sizes(self, names: Mapping[str, int], tp_size: int = 1) -> tuple[int, ...]:
        """Return the shape on one rank; names: the global size of each name."""
        return tuple(
            axis if isinstance(axis, int) else names[axis] // (tp_size if axis == self.shard else 1)
            for axis in self.shape
        )

    def torch_dtype(self, compute: torch.dtype) -> torch.dtype:
        """Return the dtype when activations have dtype `compute`."""
        return {"compute": compute, "int64": torch.int64, "float32": state_dtype(compute)}[self.dtype]

    def axis(self, name: str) -> int | None:
        """Return the index of the axis called `name`, or None."""
        return self.shape.index(name) if name in self.shape else None

    @property
    def shard_axis(self) -> int | None:
        """Index of the axis that is split over tensor-parallel ranks, or None."""
        return None if self.shard is None else self.axis(self.shard)


class HostReads(NamedTuple):
    """How much of what lies in host memory a row of a batch reads, over all heads; a call copies each memory once."""

    memories: int
    """Memories that one token selects at most."""
    entry: int
    """Memories that an entry holds."""


@dataclass(frozen=True)
class Growing:
    """The declaration of a list of entries that grows by one per chunk."""

    entry: Mapping[str, TensorSpec]
    """The tensors of an entry."""
    limit: int | None = None
    """Entries kept at most; None: as many as the context has chunks. Rows that do not share one grid of chunks (left
    padding) may need one entry more."""
    host: HostReads | None = None
    """How entries are read whose tensors lie in host memory (`TensorSpec.host`); None: they lie on the device."""


StateSpec = Mapping[str, "TensorSpec | Growing"]
"""The declaration of a mixer's state, by name."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""The dtypes of activations and exported weights, by the names that configurations and commands use."""


def state_dtype(compute: torch.dtype) -> torch.dtype:
    """Return float32, or float64 if the activations are: long accumulations never run in half precision."""
    return torch.float64 if compute == torch.float64 else torch.float32


@dataclass(frozen=True)
class Chunk:
    """The place of one call's tokens in their documents."""

    starts: tuple[int, ...]
    """The position of the call's first token in its document, for each batch row (host integers). 0: a document starts
    here, its memory is fresh. Negative: the row begins with that many tokens of left padding; mixers see calls in which
    such a row is padding only, and what they make of it is forgotten at position 0."""
    rows_before: int = 0
    """How many of the call's first places are no tokens but side rows, which some mixers take up through the layers
    (`MixerConfig.side_rows`): a fixed number of them in the call that begins a chunk, 0 in all others."""
    rows_behind: int = 0
    """How many of the call's last places are side rows: a fixed number in the call that ends a chunk, else 0."""
    borders: tuple[tuple[int, ...], ...] | None = None
    """The places inside the call, from 1 on and ascending, at which further documents begin in each batch row; their
    memory is fresh there. None: documents begin where chunks do, in this call and in all others."""
    # no part of equality: what is cached by place does not depend on it
    dropout: DropoutKeys | None = field(default=None, compare=False)
    """What dropout draws by: training fills it in where the model drops anything. None: nothing is dropped, whatever
    the model's configuration says."""
    prepared: Tensor | None = field(default=None, compare=False)
    """What an architecture has made of the chunk ahead of its reading, with others (`Stage.prepare`); None: nothing."""

    @property
    def rows(self) -> int:
        """Number of batch rows."""
        return len(self.starts)

    @property
    def begins_inside(self) -> bool:
        """Whether a document of some row begins inside the call."""
        return self.borders is not None and any(self.borders)

    def after(self, tokens: int) -> Chunk:
        """Return the place `tokens` later."""
        drops = None if self.dropout is None else self.dropout.after(tokens)
        if self.borders is None:
            return Chunk(tuple(start + tokens for start in self.starts), dropout=drops)
        latest = [max((place for place in row if place <= tokens), default=None) for row in self.borders]
        starts = (tokens + s if place is None else tokens - place for s, place in zip(self.starts, latest, strict=True))
        left = (tuple(place - tokens for place in row if place > tokens) for row in self.borders)
        return Chunk(tuple(starts), borders=tuple(left), dropout=drops)

    def part(self, begin: int, end: int) -> Chunk:
        """Return the place of the call's tokens `begin` to `end` - 1."""
        later = self.after(begin)
        if later.borders is None:
            return later
        inside = (tuple(place for place in row if place < end - begin) for row in later.borders)
        return replace(later, borders=tuple(inside))

    def unbroken(self, tokens: int) -> Chunk:
        """Return the place `tokens` later, for tokens among which no document begins."""
        return replace(self.after(tokens), borders=None)

    def inside(self, place: str) -> Chunk:
        """Return the same for a part of the model, whose dropout draws by its name."""
        return self if self.dropout is None else replace(self, dropout=self.dropout.inside(place))

    def drops(self, share: float, place: str, first: int = 0) -> Dropout | None:
        """Return which values are dropped at a place of the model; None if none are.

        Args:
            share: probability with which a value is dropped.
            place: name of the place, within the part of the model that this chunk is `inside`.
            first: number of this rank's first head or channel among all ranks'.
        """
        if not share or self.dropout is None:
            return None
        return Dropout(share, self.dropout.inside(place), self.rows_before, self.rows_behind, first)

    def positions(self, tokens: int) -> npt.NDArray[np.int64]:
        """Return the position in its document of each of `tokens` tokens, [tokens, batch], or [tokens, 1] if alike."""
        if not self.begins_inside and len(set(self.starts)) == 1:
            return np.arange(self.starts[0], self.starts[0] + tokens)[:, None]
        positions = np.arange(tokens)[:, None] + np.array(self.starts)
        for row, places in enumerate(self.borders or ()):
            for place in places:
                positions[place:, row] = np.arange(tokens - place)
        return positions

    def document_splits(self, tokens: int) -> list[slice]:
        """Cut `tokens` tokens where in some row a document begins, so that in each part no row holds two of them."""
        return _parts(tokens, (place for row in self.borders or () for place in row))

    def padding_splits(self, tokens: int) -> list[slice]:
        """Cut `tokens` tokens where a row's left padding ends, so that in each part a row is all padding or none."""
        return _parts(tokens, (-start for start in self.starts))

    def fresh(self) -> tuple[bool, ...]:
        """Return for each row whether no token of its document has been seen."""
        return tuple(start <= 0 for start in self.starts)


def _parts(tokens: int, cuts: Iterable[int]) -> list[slice]:
    """Cut `tokens` tokens at those of `cuts` that lie inside."""
    edges = sorted({0, tokens, *(cut for cut in cuts if 0 < cut < tokens)})
    return [slice(begin, end) for begin, end in pairwise(edges)]


def to_device(
    values: Sequence[int] | Sequence[Sequence[int]] | npt.NDArray[np.int64] | Tensor,
    device: torch.device,
    dtype: torch.dtype = torch.int64,
) -> Tensor:
    """Copy small host values to `device` without making the host wait.

    values: numbers of any shape, as [batch] or [batch, tokens]; the result has the same shape.
    """
    tensor = torch.as_tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Stateful:
    """A declarer of a state: a mixer, or a memory of the whole model. It never keeps the state itself."""

    specs: StateSpec
    """The declarations of the state's tensors."""
    sizes: dict[str, int]
    """The size of each name in their shapes, before any split over ranks."""
    tp_size: int
    """Number of tensor-parallel ranks."""

    def initial_state(self, rows: int, device: torch.device, dtype: torch.dtype) -> State:
        """Return the state before a document's first token: zeros and empty lists, for `rows` batch rows."""
        return {
            name: [] if isinstance(spec, Growing) else self.zeros(spec, rows, device, dtype)
            for name, spec in self.specs.items()
        }

    def zeros(self, spec: TensorSpec, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """Return zeros as `spec` declares them on this rank, for `rows` batch rows and activations of `dtype`."""
        names = {**self.sizes, "batch": rows, "open": 0}
        return torch.zeros(spec.sizes(names, self.tp_size), dtype=spec.torch_dtype(dtype), device=device)

    def without_long_term(self, state: State) -> State:
        """Return the state with zeros in what is declared as a long-term memory, as at a document's start."""
        specs = self.specs
        return {
            name: torch.zeros_like(value) if isinstance(spec := specs[name], TensorSpec) and spec.long_term else value
            for name, value in state.items()
        }

    def check_state(self, state: State, rows: int) -> None:
        """Raise ContractError if a tensor of `state`, as it stands at a chunk's border, is not as declared."""
        names = {**self.sizes, "batch": rows, "open": 0}
        for name, spec in self.specs.items():
            if isinstance(spec, TensorSpec):
                _check_tensor(name, spec, state[name], names, self.tp_size)
            else:
                for index, entry in enumerate(state[name]):
                    for part, tensor in entry.items():
                        _check_tensor(f"{name}[{index}].{part}", spec.entry[part], tensor, names, self.tp_size)

    def reset(self, state: State, chunk: Chunk, device: torch.device, dtype: torch.dtype) -> State:
        """Return the state with fresh rows where documents start.

        Lists and open tensors are left as they are: their mixers tell from positions what belongs to a row's document.
        """
        fresh = chunk.fresh()
        if not any(fresh):
            return state
        initial = self.initial_state(chunk.rows, device, dtype)
        if all(fresh):
            return initial
        new = dict(state)
        for name, spec in self.specs.items():
            if isinstance(spec, TensorSpec) and spec.kind == "memory" and (axis := spec.axis("batch")) is not None:
                shape = [1] * len(spec.shape)
                shape[axis] = chunk.rows
                rows = to_device(fresh, device, torch.bool).view(shape)
                new[name] = torch.where(rows, initial[name], state[name])
        return new

    def reset_inside(self, state: State, begin: int, starts: tuple[int, ...], like: Tensor) -> State:
        """Return the state with fresh rows where documents start at token `begin` of a call.

        What starts with the call is fresh already: the caller has seen to it.

        Args:
            starts: position in its document of token `begin`, for each batch row.
            like: activations of the call [tokens, ...], for device and dtype.
        """
        if not begin or 0 not in starts:
            return state
        return self.reset(state, Chunk(starts), like.device, like.dtype)


class Mixer(Stateful, nn.Module, ABC):
    """A layer's attention or memory mechanism.

    Every parameter must belong to a submodule that is called: mixers themselves are called by `.forward`, past the
    hooks by which ZeRO 3 gathers the parameters of a module.
    """

    differentiable_state = True
    """Whether gradients may flow into the incoming state; False where the paper stops them there."""
    trained_by: Mapping[str, str] = {}
    """The submodule that an auxiliary loss trains, by name, for each loss whose gradient stops at all else."""
    reads_borders = False
    """Whether `forward` takes calls inside which documents begin (`Chunk.borders`). If not, its layer is called for
    each part between them."""

    def __init__(self, specs: StateSpec, sizes: Mapping[str, int], tp_size: int) -> None:
        super().__init__()
        self.specs = specs
        self.sizes = dict(sizes)
        self.tp_size = tp_size

    @abstractmethod
    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Mix the tokens of one call.

        Args:
            hidden: [tokens, batch, hidden_size], any number of tokens; normalized already with
                `norm_position: pre`.
            state: as `initial_state` or as the previous call left it.
            chunk: where the tokens lie in their documents.
        Returns: output like `hidden` (without the residual), the new state, auxiliary losses by name.
        """

    def after_layer(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State]:
        """Take what the whole layer has made of a call: for memories that are written behind the MLP.

        Args:
            hidden: [tokens and side rows, batch, hidden_size], the residual stream after the MLP.
            state: as `forward` returned it.
            chunk: where the tokens lie in their documents.
        Returns: the residual stream for the next layer, and the new state.
        """
        return hidden, state


def select_state_rows(specs: StateSpec, state: State, index: Tensor) -> State:
    """Return the declared state of rows `index` [rows] int64, which may repeat rows or leave some out."""
    return {
        name: [{part: _rows(spec.entry[part], entry[part], index) for part in spec.entry} for entry in state[name]]
        if isinstance(spec, Growing)
        else _rows(spec, state[name], index)
        for name, spec in specs.items()
    }


def _rows(spec: TensorSpec, tensor: Tensor, index: Tensor) -> Tensor:
    """Return rows `index` [rows] of a tensor [batch, ...]; one without a batch axis is the same for all rows."""
    axis = spec.axis("batch")
    return tensor if axis is None else tensor.index_select(axis, index.to(tensor.device))


def _check_tensor(name: str, spec: TensorSpec, tensor: Tensor, names: Mapping[str, int], tp_size: int) -> None:
    """Raise ContractError if `tensor` [batch, ...] has not the shape that `spec` declares for a chunk's border."""
    declared = spec.sizes(names, tp_size)
    if spec.kind == "memory" and tuple(tensor.shape) != declared:
        raise ContractError(
            f"state {name} has shape {list(tensor.shape)}, but its TensorSpec declares {list(spec.shape)} = "
            f"{list(declared)} on this rank"
        )


def state_tensors(state: object) -> Iterator[Tensor]:
    """Yield all tensors of a state, or of a list of states, in order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from state_tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from state_tensors(value)


def map_state(function: Callable[[Tensor], Tensor], state: Tree) -> Tree:
    """Return a state, or a list of states, with `function` applied to each tensor [batch, ...]."""
    if isinstance(state, Tensor):
        return cast(Tree, function(state))
    if isinstance(state, Mapping):
        return cast(Tree, {key: map_state(function, value) for key, value in state.items()})
    assert isinstance(state, list | tuple)
    return cast(Tree, [map_state(function, value) for value in state])


def detach(state: Tree) -> Tree:
    """Return the state cut from the graph: where a window of backpropagation ends."""
    return map_state(Tensor.detach, state)
