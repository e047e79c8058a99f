"""One part of a model reads chunk after chunk on the CPU, and the ledger counts what it makes and asks of a device.

The part is the one that trains, so that it runs the code that it runs in training. But large numbers are not computed
(`megamem.planning.ledger`), and the part is the share of one of many tensor-parallel ranks, for a few rows: so this
takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.config.training import TrainingConfig
from megamem.memory.base import Chunk, Losses, State, States, detach, map_state, state_tensors
from megamem.model.kernels import FLA, OPERATIONS
from megamem.model.layer import Layer
from megamem.model.stage import Stage, build_stage, typical_labels
from megamem.pipeline.freezing import Learning, freeze
from megamem.pipeline.train_chunk import dropout_keys
from megamem.planning.joined import join_kernels
from megamem.planning.ledger import Ledger, Storages, room
from megamem.planning.measured_chunk import Kept, MeasuredChunk, Saved, SeenOperations, recomputed
from megamem.planning.rank_linears import RankLinears

Outputs = tuple[Tensor | list[Tensor], States, dict[str, Tensor]]
"""Hidden vectors or losses, new states by component, auxiliary losses."""
Kernels = Literal["separate", "cuda", "libraries", "compiled"]
"""What runs as one kernel: nothing (as on the CPU), norms (as torch does on CUDA), what libraries have kernels for
besides, or all that is compiled."""
END_TOKENS = 64
"""Tokens that embedding and head are measured with: their bytes depend on the number of tokens alone."""


def end_tokens(model: ModelConfig) -> int:
    """Return the tokens that embedding and head are measured with, at most a chunk."""
    return min(END_TOKENS, model.chunk_size)


def kernels_of(training: TrainingConfig, device: Literal["cuda", "cpu"]) -> Kernels:
    """Return what is taken to run as one kernel on such a device: what libraries have, if they are installed here."""
    if training.compile:
        return "compiled"
    if device == "cpu":
        return "separate"
    return "libraries" if training.kernels == "auto" and FLA.version is not None else "cuda"


def recurrence_of(config: RunConfig, device: Literal["cuda", "cpu"]) -> Literal["torch", "fla"]:
    """Return what is taken to compute recurrences of matrix memories: a library, if it is named or installed here."""
    named = config.model.recurrence_kernel
    if device == "cpu" or config.training.precision != "bf16" or named == "torch":
        return "torch"
    return "fla" if named == "fla" or FLA.version is not None else "torch"


def shown_kernels(kernels: Kernels, recurrence: Literal["torch", "fla"]) -> str:
    """Return in words what is taken to run as one kernel, and by whom recurrences are taken to be computed."""
    of_libraries = ", ".join(operation.name for operation in OPERATIONS)
    trial = f"{FLA.package} {FLA.version}, which is taken to pass its trial at the start of the run"
    words = {
        "separate": "each operation of torch's is a kernel",
        "cuda": "RMS norms are one kernel, as in torch; all other operations are kernels of their own",
        "libraries": f"RMS norms are one kernel, as in torch; {of_libraries} are too, by {trial}",
        "compiled": "all that training.compile compiles is one kernel each",
    }[kernels]
    if recurrence == "torch":
        return words
    return f"{words}; recurrences of matrix memories are kernels of {FLA.package}, which are taken to pass their trial"


@dataclass(frozen=True)
class Share:
    """The share of a micro-batch that a rank computes, and how it does."""

    rows: float
    tp_size: int
    recompute: bool = False
    sequence_parallel: bool = False
    loss_slices: int = 1
    """Slices of tokens in which the head computes losses, whatever the number of tokens that it is measured with."""

    @classmethod
    def of_run(cls, config: RunConfig, tp_size: int) -> Share:
        """Return the share of one of so many tensor-parallel ranks in a micro-batch of a run."""
        training = config.training
        split = config.parallel.sequence_parallel and tp_size > 1
        return cls(training.micro_batch_size, tp_size, training.recompute, split)


class Part(NamedTuple):
    """What is measured of a model."""

    model: ModelConfig
    dtype: torch.dtype
    layers: range
    """Its layers; an empty range is the embedding (at 0) or the head."""
    learning: Learning | None
    """What learns; None if everything does."""
    kernels: Kernels = "separate"


class Both(NamedTuple):
    """A chunk of layers as it was measured, and as it is with recomputation."""

    plain: MeasuredChunk
    recomputed: MeasuredChunk


def measure_part(part: Part, chunks: int, growing: bool, share: Share) -> list[MeasuredChunk]:
    """Return the measurements of the first chunks; see `_read_chunks`."""
    return [chunk for chunk, *_ in _read_twice(part, chunks, growing, share)]


def measure_both(part: Part, chunks: int, growing: bool, share: Share) -> list[Both]:
    """Return the measurements of the first chunks of layers, without recomputation and with it; see `_read_chunks`."""
    found = _read_twice(part, chunks, growing, replace(share, recompute=False), forward_alone=True)
    return [Both(chunk, recomputed(chunk, saved, kept)) for chunk, saved, kept in found]


Found = list[tuple[MeasuredChunk, Saved, Kept]]
"""Of each chunk what was seen, what its backward pass needed, and what its forward pass keeps under recomputation."""


def _read_twice(part: Part, chunks: int, growing: bool, share: Share, forward_alone: bool = False) -> Found:
    """Return what `_read_chunks` does, once all tables are made that are made at the first use and kept."""
    found, ledgers = _read_chunks(part, chunks, growing, share, forward_alone)
    # what still lives are such tables
    if any(ledger.live for ledger in ledgers):
        found, _ = _read_chunks(part, chunks, growing, share, forward_alone)
    return found


def _read_chunks(
    part: Part, chunks: int, growing: bool, share: Share, forward_alone: bool
) -> tuple[Found, list[Ledger]]:
    """Read the first chunks of a sequence, one after another, until one takes as much as was to be expected.

    Args:
        chunks: the most that are read.
        growing: whether the part's memory grows with each chunk.
        forward_alone: whether to run each forward pass once more as under recomputation.

    Returns: what was found of each chunk, and their ledgers.
    """
    model, dtype, layers, learning, _ = part
    stage, rows = zero_stage(part, share), int(share.rows)
    size = model.chunk_size if layers else end_tokens(model)
    states = stage.initial_states(rows, torch.device("cpu"), dtype)
    labels = typical_labels(model, size, rows)
    # with a frozen base, hidden states and memories that no learning parameter is behind have no gradients
    enters = learning is None or learning.reaches_input(layers.start)
    leaf = _leaf if learning is None else _leaf_with_gradient
    ledgers: list[Ledger] = []
    found: Found = []
    while len(found) < chunks:
        # as `StageExecutor` hands states from chunk to chunk: gradients stop at each, and are handed on by themselves
        reads = {name: map_state(leaf, state) for name, state in states.items()}
        keys = dropout_keys(model, 0, 0, range(rows))
        position = Chunk((len(found) * size,) * rows, dropout=keys and keys.after(len(found) * size))
        if stage.first:
            entered = torch.zeros(size, rows, dtype=torch.int64)
        else:
            entered = torch.zeros(stage.border_shape(size, rows), dtype=dtype, requires_grad=enters)

        def forward(entered: Tensor = entered, reads: States = reads, position: Chunk = position) -> Outputs:
            hidden, new, losses = stage.read_chunk(entered, reads, position)
            # a list, so that the loss is an output of which gradients are taken
            return ([stage.token_losses(hidden, labels).sum()] if stage.last else hidden), new, losses

        ledgers.append(Ledger())
        (_, new, _), chunk, saved = _measure_chunk(ledgers[-1], stage, forward, reads)
        kept = _forward_alone(stage, forward, reads) if forward_alone else Kept(np.zeros(0, dtype=np.int64), [])
        states = detach(new) if learning is None else new
        found.append((chunk, saved, kept))
        # a line needs one chunk more than a constant, and the first chunk reads no memory
        if len(found) > (3 if growing else 2) and _is_steady([chunk.kept for chunk, *_ in found], growing):
            break
    return found, ledgers


def _is_steady(kept: Sequence[float], growing: bool) -> bool:
    """Return whether the last chunk kept what the one before did, or grew as that had grown."""
    expected = 2 * kept[-2] - kept[-3] if growing else kept[-2]
    return abs(kept[-1] - expected) < 1e-3 * kept[-1]


def zero_stage(part: Part, share: Share) -> Stage:
    """Return a part as a rank holds it in training, with parameters that are zero and take no memory."""
    model, dtype, layers, learning, _ = part
    with torch.device("meta"):
        stage = build_stage(model, RankLinears(share.tp_size, share.sequence_parallel), layers).to(dtype)
    # embedding and head are parts of their own: a layer at an end of the model has neither
    stage.first, stage.last = stage.first and not layers, stage.last and not layers
    stage.recompute, stage.loss_slices = share.recompute, share.loss_slices
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(room(parameter)))
    if learning is not None:
        freeze(stage, learning.names)
    if part.kernels != "separate":
        fla = model.recurrence_kernel == "fla" and dtype == torch.bfloat16
        join_kernels(stage, part.kernels, "fla" if fla else "torch")
    return stage


def _measure_chunk(
    ledger: Ledger, stage: Stage, forward: Callable[[], Outputs], reads: States
) -> tuple[Outputs, MeasuredChunk, Saved]:
    """Run forward and backward of one chunk, and return what the forward returned and what was seen of both.

    Args:
        forward: reads the chunk.
        reads: the states that it reads, leaves of autograd.
    """
    _enter_given(ledger, stage, reads)
    watch = _Watch(ledger)
    with ledger, _watched(stage, watch):
        outputs = forward()
    forward_operations, ledger.operations = ledger.operations, []
    ledger.next_moment()
    begin = ledger.time
    # gradients come from the next layer, the loss and the next chunk: they are there when the backward begins
    roots = [tensor for tensor in state_tensors(outputs) if tensor.requires_grad]
    gradients = [room(root) for root in roots]
    for gradient in gradients:
        ledger.enter_storage(gradient, counted=False)
    with ledger:
        if roots:
            torch.autograd.backward(roots, gradients)
    state_gradients = sum(state.grad.nbytes for state in state_tensors(reads) if state.grad is not None)
    passes = SeenOperations.of(forward_operations), SeenOperations.of(ledger.operations)
    chunk = MeasuredChunk(Storages.of(ledger), *passes, state_gradients=float(state_gradients))
    unneeded = 0 if watch.first_use is None else watch.first_use - begin
    return outputs, chunk, Saved(watch.operations, unneeded, watch.until)


class _Watch:
    """Hooks for what a layer saves for its backward pass: they note what it is, and when it is needed."""

    def __init__(self, ledger: Ledger, keeps: bool = True) -> None:
        """Note nothing yet. keeps: whether the backward pass will get what is saved; if not, there must be none."""
        self.ledger, self.keeps = ledger, keeps
        self.operations = slice(0, 0)
        """See `Saved`; so `until`."""
        self.first_use: int | None = None
        """The moment in which the backward pass first asks for what was saved; None if it does not."""
        self.until: dict[int, int] = {}
        self.given: list[object] = []
        """What the layer was given, where nothing is kept: recomputation needs it."""

    def through(self, layer: Layer, hidden: Tensor, state: State, chunk: Chunk) -> tuple[Tensor, State, Losses]:
        """Take hidden [tokens, batch, hidden] through a layer; see `Decoder.through`."""
        self.operations = slice(self.ledger.time, self.ledger.time)
        if not self.keeps:
            self.given = [hidden, state]
        with saved_tensors_hooks(cast(Any, self._pack), cast(Any, self._unpack)):
            return layer.forward(hidden, state, chunk)

    def _pack(self, tensor: Tensor) -> _Held | None:
        """Return what autograd keeps in the place of a tensor [...]."""
        self.operations = slice(self.operations.start, self.ledger.time)
        return _Held(self, tensor) if self.keeps else None

    def _unpack(self, held: _Held) -> Tensor:
        """Return the tensor [...]."""
        if self.first_use is None:
            self.first_use = self.ledger.time
        return held.tensor


class _Held:
    """A tensor that a backward pass needs, for as long as autograd keeps it."""

    __slots__ = ("_place", "_watch", "tensor")

    def __init__(self, watch: _Watch, tensor: Tensor) -> None:
        """Hold a tensor [...]."""
        self.tensor, self._watch, self._place = tensor, watch, watch.ledger.place_of(tensor)

    def __del__(self) -> None:
        """Note that it is needed no more."""
        if self._place is not None:
            self._watch.until[self._place] = self._watch.ledger.time


@contextmanager
def _watched(stage: Stage, watch: _Watch) -> Iterator[None]:
    """Let a stage take hidden states through its layers by `watch`, unless it runs them again itself."""
    if stage.recompute:
        yield
        return
    stage.through = watch.through  # type: ignore[assignment]
    try:
        yield
    finally:
        del stage.through


def _enter_given(ledger: Ledger, stage: Stage, reads: States) -> None:
    """Let parameters, their gradients and the states cost nothing: they are counted elsewhere."""
    for parameter in stage.parameters():
        parameter.grad = room(parameter)
        ledger.enter_storage(parameter, counted=False)
        ledger.enter_storage(parameter.grad, counted=False)
    for state in state_tensors(reads):
        ledger.enter_storage(state, counted=False)


def _forward_alone(stage: Stage, forward: Callable[[], Outputs], reads: States) -> Kept:
    """Run the forward pass of one chunk as under recomputation; see `_measure_chunk`."""
    ledger = Ledger()
    _enter_given(ledger, stage, reads)
    watch = _Watch(ledger, keeps=False)
    with ledger, _watched(stage, watch):
        outputs = forward()
    # while its results live, and what it was given
    gone = Storages.of(ledger).gone
    del outputs
    places = map(ledger.place_of, state_tensors(watch.given))
    return Kept(gone, [place for place in places if place is not None])


def _leaf(tensor: Tensor) -> Tensor:
    """Return a state tensor [N, ...] as a leaf of autograd: a chunk reads so what the one before wrote."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _leaf_with_gradient(tensor: Tensor) -> Tensor:
    """Return a state tensor [N, ...] as a leaf that requires a gradient only if the chunk before gave it one."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
