"""The memory contract: a mixer maps (hidden chunk, state) to (hidden chunk, new state).

State is a plain pytree of tensors, declared by `TensorSpec`s, that belongs to the caller: a mixer never keeps it.
From the declarations alone states are made, counted, checked, sharded and saved.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from megamem.errors import ContractError

Axis = int | str
State = dict[str, Any]
"""The state of one component (a layer's mixer, a memory of the whole model): tensors, and lists of dicts of tensors."""
States = dict[str, State]
"""The states of a model, or of a stage of it, by component: `layers.3`, `memory_tokens`."""
Losses = dict[str, Tensor]
LABEL_IGNORED = -100


@dataclass(frozen=True)
class TensorSpec:
    """Declares one state tensor.

    shape: ints or names: `batch` (rows), `heads`, `kv_heads`, `hidden`, `open` (tokens of the unfinished block;
        0 at chunk borders), `chunk` (tokens of a chunk).
    dtype: `compute` is the activations' dtype; `float32` is float32 in training and float64 in float64 tests.
    shard: the name in `shape` that is split over tensor-parallel ranks, or None for replicated.
    kind: `memory` is what a paper's tables count; `open` is what token-by-token decoding needs besides.
    """

    shape: tuple[Axis, ...]
    dtype: Literal["compute", "float32", "int64"] = "compute"
    shard: str | None = None
    kind: Literal["memory", "open"] = "memory"

    def sizes(self, names: Mapping[str, int], tp_size: int = 1) -> tuple[int, ...]:
        """The local shape, names resolved by `names` (global sizes)."""
        return tuple(
            axis if isinstance(axis, int) else names[axis] // (tp_size if axis == self.shard else 1)
            for axis in self.shape
        )

    def torch_dtype(self, compute: torch.dtype) -> torch.dtype:
        """The dtype when activations have dtype `compute`."""
        return {"compute": compute, "int64": torch.int64, "float32": state_dtype(compute)}[self.dtype]

    def axis(self, name: str) -> int | None:
        """Index of the axis called `name`, or None."""
        return self.shape.index(name) if name in self.shape else None

    @property
    def shard_axis(self) -> int | None:
        """Index of the axis that is split over tensor-parallel ranks, or None."""
        return None if self.shard is None else self.axis(self.shard)


@dataclass(frozen=True)
class Growing:
    """Declares a list of entries that grows by one per chunk.

    limit: entries kept at most; None means as many as the context has chunks. Rows that do not share one grid of
        chunks (left padding) may need one entry more.
    """

    entry: Mapping[str, TensorSpec]
    limit: int | None = None


StateSpec = Mapping[str, "TensorSpec | Growing"]


DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
"""Of activations and exported weights, by the names that configurations and commands use."""


def state_dtype(compute: torch.dtype) -> torch.dtype:
    """float32, or float64 if the activations are float64: long accumulations never run in half precision."""
    return torch.float64 if compute == torch.float64 else torch.float32


@dataclass(frozen=True)
class Chunk:
    """Where the tokens of one call lie in their documents.

    starts: for each batch row, the position of the call's first token in its document (host integers). 0: a document
        starts here, its memory is fresh. Negative: the row begins with that many tokens of left padding; mixers see
        calls in which such a row is padding only, and what they make of it is forgotten at position 0.
    """

    starts: tuple[int, ...]

    @property
    def rows(self) -> int:
        """Number of batch rows."""
        return len(self.starts)

    def after(self, tokens: int) -> Chunk:
        """The place `tokens` later."""
        return Chunk(tuple(start + tokens for start in self.starts))

    def padding_splits(self, tokens: int) -> list[slice]:
        """Cut `tokens` tokens where a row's left padding ends, so that in each part a row is all padding or none."""
        cuts = sorted({0, tokens, *(-start for start in self.starts if 0 < -start < tokens)})
        return [slice(begin, end) for begin, end in zip(cuts[:-1], cuts[1:], strict=True)]

    def fresh(self) -> tuple[bool, ...]:
        """Per row: no token of its document has been seen."""
        return tuple(start <= 0 for start in self.starts)


def to_device(values: Any, device: torch.device, dtype: torch.dtype = torch.int64) -> Tensor:
    """A small host array on `device`, copied without making the host wait."""
    tensor = torch.as_tensor(values, dtype=dtype, device="cpu")
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Stateful:
    """What declares a state: a mixer, or a memory of the whole model. It never keeps the state itself.

    `specs` declares the tensors, `sizes` gives the named sizes of their shapes before any split over ranks.
    """

    specs: StateSpec
    sizes: dict[str, int]
    tp_size: int

    def initial_state(self, rows: int, device: torch.device, dtype: torch.dtype) -> State:
        """The state before a document's first token: zeros and empty lists, for `rows` batch rows."""
        return {
            name: [] if isinstance(spec, Growing) else self.zeros(spec, rows, device, dtype)
            for name, spec in self.specs.items()
        }

    def zeros(self, spec: TensorSpec, rows: int, device: torch.device, dtype: torch.dtype) -> Tensor:
        """A tensor as `spec` declares it on this rank, for `rows` batch rows and activations of `dtype`."""
        names = {**self.sizes, "batch": rows, "open": 0}
        return torch.zeros(spec.sizes(names, self.tp_size), dtype=spec.torch_dtype(dtype), device=device)

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
        """The state with fresh rows where documents start. Lists are left: their mixers look at positions."""
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


class Mixer(Stateful, nn.Module, ABC):
    """A layer's attention or memory mechanism.

    `differentiable_state`: whether gradients may flow into the incoming state (False where the paper stops them).
    """

    differentiable_state = True

    def __init__(self, specs: StateSpec, sizes: Mapping[str, int], tp_size: int) -> None:
        super().__init__()
        self.specs = specs
        self.sizes = dict(sizes)
        self.tp_size = tp_size

    @abstractmethod
    def forward(self, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Mix the tokens of one call.

        Args:
            hidden: [tokens, batch, hidden_size], any number of tokens; normalized already.
            state: as `initial_state` or as the previous call left it.
            chunk: where the tokens lie in their documents.
        Returns: output like `hidden` (without the residual), the new state, auxiliary losses by name.
        """


def select_state_rows(specs: StateSpec, state: State, index: Tensor) -> State:
    """The declared state of rows `index` [rows] int64, which may repeat rows or leave some out."""
    return {
        name: [{part: _rows(spec.entry[part], entry[part], index) for part in spec.entry} for entry in state[name]]
        if isinstance(spec, Growing)
        else _rows(spec, state[name], index)
        for name, spec in specs.items()
    }


def _rows(spec: TensorSpec, tensor: Tensor, index: Tensor) -> Tensor:
    """The rows `index` [rows] of a tensor of the declared shape; tensors without a batch axis are the same for all."""
    axis = spec.axis("batch")
    return tensor if axis is None else tensor.index_select(axis, index.to(tensor.device))


def _check_tensor(name: str, spec: TensorSpec, tensor: Tensor, names: Mapping[str, int], tp_size: int) -> None:
    declared = spec.sizes(names, tp_size)
    if spec.kind == "memory" and tuple(tensor.shape) != declared:
        raise ContractError(
            f"state {name} has shape {list(tensor.shape)}, but its TensorSpec declares {list(spec.shape)} = "
            f"{list(declared)} on this rank"
        )


def state_tensors(state: Any) -> Iterator[Tensor]:
    """All tensors of a state pytree, in order."""
    if isinstance(state, Tensor):
        yield state
    elif isinstance(state, Mapping):
        for value in state.values():
            yield from state_tensors(value)
    elif isinstance(state, list | tuple):
        for value in state:
            yield from state_tensors(value)


def map_state(function: Any, state: Any) -> Any:
    """A state pytree with `function` applied to each tensor."""
    if isinstance(state, Tensor):
        return function(state)
    if isinstance(state, Mapping):
        return {key: map_state(function, value) for key, value in state.items()}
    return [map_state(function, value) for value in state]


def detach(state: Any) -> Any:
    """The state cut from the graph: where a window of backpropagation ends."""
    return map_state(Tensor.detach, state)
