"""One part of a model reads chunk after chunk on the CPU, and the ledger counts what it makes and asks of a device.

The part is the one that trains, so that it runs the code that it runs in training. But large numbers are not computed
(`megamem.planning.ledger`), and the part is the share of one of many tensor-parallel ranks, for a few rows: so this
takes seconds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import takewhile
from typing import Any, Literal, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.config.training import LayerPart, Recompute, TrainingConfig
from megamem.memory.base import Chunk, Losses, State, States, detach, map_state, state_tensors
from megamem.model.kernels import FLA, OPERATIONS
from megamem.model.layer import Layer
from megamem.model.stage import Stage, build_stage, typical_labels
from megamem.pipeline.freezing import Learning, freeze
from megamem.pipeline.train_chunk import dropout_keys
from megamem.planning.joined import join_kernels
from megamem.planning.ledger import Ledger, Storages, room
from megamem.planning.measured_chunk import MeasuredChunk, Moments, Saved, SeenChunk, SeenOperations
from megamem.planning.rank_linears import RankLinears

T = TypeVar("T")
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
    recompute: Recompute = False
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
    together: int = 1
    """Chunks that each layer reads before the next one does (`RunConfig.chunks_per_call`); what is measured of a chunk
    is of all of them."""


def measure_part(part: Part, chunks: int, growing: bool, share: Share) -> list[MeasuredChunk]:
    """Return the measurements of the first chunks as the share says; see `_read_chunks`."""
    return [chunk.plain for chunk in _read_twice(part, chunks, growing, share, forward_alone=False)]


def measure_chunks(part: Part, chunks: int, growing: bool, share: Share) -> list[SeenChunk]:
    """Return the measurements of the first chunks, of layers for recomputation of any kind; see `_read_chunks`."""
    if not part.layers:
        return _read_twice(part, chunks, growing, share, forward_alone=False)
    return _read_twice(part, chunks, growing, replace(share, recompute=False), forward_alone=True)


def _read_twice(part: Part, chunks: int, growing: bool, share: Share, forward_alone: bool) -> list[SeenChunk]:
    """Return what `_read_chunks` does, once all tables are made that are made at the first use and kept."""
    found, ledgers = _read_chunks(part, chunks, growing, share, forward_alone)
    # what still lives are such tables
    if any(ledger.live for ledger in ledgers):
        found, _ = _read_chunks(part, chunks, growing, share, forward_alone)
    return found


def _read_chunks(
    part: Part, chunks: int, growing: bool, share: Share, forward_alone: bool
) -> tuple[list[SeenChunk], list[Ledger]]:
    """Read the first chunks of a sequence, one after another, until one takes as much as was to be expected.

    Args:
        chunks: the most that are read.
        growing: whether the part's memory grows with each chunk.
        forward_alone: whether to run each forward pass once more as under recomputation.

    Returns: what was found of each chunk, and their ledgers.
    """
    model, dtype, layers, learning, _, together = part
    stage, rows = zero_stage(part, share), int(share.rows)
    size = model.chunk_size * together if layers else end_tokens(model)
    states = stage.initial_states(rows, torch.device("cpu"), dtype)
    labels = typical_labels(model, size, rows)
    # with a frozen base, hidden states and memories that no learning parameter is behind have no gradients
    enters = learning is None or learning.reaches_input(layers.start)
    leaf = _leaf if learning is None else _leaf_with_gradient
    ledgers: list[Ledger] = []
    found: list[SeenChunk] = []
    while len(found) < chunks:
        # as `StageExecutor` hands states from chunk to chunk: gradients stop at each, and are handed on by themselves
        reads = {name: map_state(leaf, state) for name, state in states.items()}
        keys = dropout_keys(model, 0, 0, range(rows))
        begins = range(len(found) * size, (len(found) + 1) * size, model.chunk_size)
        places = [Chunk((begin,) * rows, dropout=keys and keys.after(begin)) for begin in begins]
        if stage.first:
            entered = torch.zeros(size, rows, dtype=torch.int64)
        else:
            entered = torch.zeros(stage.border_shape(size, rows), dtype=dtype, requires_grad=enters)

        def forward(entered: Tensor = entered, reads: States = reads, places: list[Chunk] = places) -> Outputs:
            if len(places) > 1:
                hidden, new, losses = stage.read_window(entered, reads, places)
            else:
                hidden, new, losses = stage.read_chunk(entered, reads, places[0])
            # a list, so that the loss is an output of which gradients are taken
            return ([stage.token_losses(hidden, labels).sum()] if stage.last else hidden), new, losses

        ledgers.append(Ledger())
        (_, new, _), chunk, saved = _measure_chunk(ledgers[-1], stage, forward, reads)
        found.append(SeenChunk(chunk, saved, _forward_alone(stage, forward, reads) if forward_alone else None))
        states = detach(new) if learning is None else new
        # a line needs one chunk more than a constant, and the first chunk reads no memory
        if len(found) > (3 if growing else 2) and _is_steady([chunk.plain.kept for chunk in found], growing):
            break
    return found, ledgers


def _is_steady(kept: Sequence[float], growing: bool) -> bool:
    """Return whether the last chunk kept what the one before did, or grew as that had grown."""
    expected = 2 * kept[-2] - kept[-3] if growing else kept[-2]
    return abs(kept[-1] - expected) < 1e-3 * kept[-1]


def zero_stage(part: Part, share: Share) -> Stage:
    """Return a part as a rank holds it in training, with parameters that are zero and take no memory."""
    model, dtype, layers, learning, *_ = part
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
) -> tuple[Outputs, MeasuredChunk, dict[Recompute, Saved]]:
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
    return outputs, chunk, watch.saved(begin)


class _Watch:
    """Hooks for what a layer saves for its backward pass: they note what it is, and when it is needed."""

    def __init__(self, ledger: Ledger, keeps: bool = True) -> None:
        """Note nothing yet. keeps: whether the backward pass will get what is saved; if not, there must be none."""
        self.ledger, self.keeps = ledger, keeps
        self._seen: dict[Recompute, _Seen] = {}
        """By what may be computed again: the layer (True) and its parts."""
        self._until: list[tuple[LayerPart | None, int, int]] = []
        """Of what was saved: the part that did so, the place, and the moment at whose end it is needed no more."""
        self._part: LayerPart | None = None
        """The part that runs now."""

    def through(
        self, layer: Layer, read: Callable[..., tuple[Tensor, State, Losses]], *given: object
    ) -> tuple[Tensor, State, Losses]:
        """Let a layer read what it is given, hidden [tokens, batch, hidden] and more; see `Decoder.through`."""
        self._enter(True, *given)
        layer.run_part = self._run_part  # type: ignore[method-assign]
        try:
            with saved_tensors_hooks(cast(Any, self._pack), cast(Any, self._unpack)):
                return read(*given)
        finally:
            del layer.run_part

    def saved(self, begin: int) -> dict[Recompute, Saved]:
        """Return what was noted, once a backward pass has run from a moment on."""
        found: dict[Recompute, Saved] = {}
        for what, seen in self._seen.items():
            own: dict[int, int] = {}
            elsewhere: dict[int, int] = {}
            for part, place, moment in self._until:
                until = own if what in (True, part) else elsewhere
                until[place] = max(moment, until.get(place, 0))
            unneeded = 0 if seen.first_use is None else seen.first_use - begin
            operations = slice(seen.begin, seen.end)
            found[what] = Saved(operations, unneeded, seen.gone_before, own, elsewhere, seen.given)
        return found

    def _run_part(self, part: LayerPart, run: Callable[..., T], *given: object) -> T:
        """Run a part of a layer; see `Layer.run_part`."""
        self._enter(part, *given)
        self._part = part
        try:
            return run(*given)
        finally:
            self._part = None

    def _enter(self, what: Recompute, *given: object) -> None:
        """Begin to note what a layer or a part of it does, of which every chunk has one."""
        assert what not in self._seen, f"{what} of a layer ran twice in one chunk"
        places = map(self.ledger.place_of, state_tensors(given))
        self._seen[what] = _Seen(self.ledger.time, self.ledger.time, [at for at in places if at is not None])

    def _running(self, part: LayerPart | None) -> list[_Seen]:
        """Return what is noted of a layer, and of the part of it that runs."""
        return [self._seen[what] for what in (True, part) if what is not None]

    def _pack(self, tensor: Tensor) -> _Held | None:
        """Return what autograd keeps in the place of a tensor [...]."""
        for seen in self._running(self._part):
            seen.end = self.ledger.time
        return _Held(self, tensor, self._part) if self.keeps else None

    def _unpack(self, held: _Held) -> Tensor:
        """Return the tensor [...]."""
        for seen in self._running(held.part):
            if seen.first_use is None:
                seen.first_use = self.ledger.time
                now = takewhile(lambda gone: gone[1] == self.ledger.time, reversed(self.ledger.gone))
                seen.gone_before = [place for place, _ in now]
        return held.tensor

    def let_go(self, held: _Held) -> None:
        """Note that what is held is needed no more."""
        if held.place is not None:
            self._until.append((held.part, held.place, self.ledger.time))


@dataclass
class _Seen:
    """What was noted of a layer or a part of it."""

    begin: int
    """The moment of its first operation."""
    end: int
    """The moment after that which made or read the last tensor that its backward pass needs."""
    given: list[int]
    """See `Saved`."""
    first_use: int | None = None
    """The moment in which the backward pass first asks for what was saved; None if it does not."""
    gone_before: list[int] = field(default_factory=list)
    """See `Saved`."""


class _Held:
    """A tensor that a backward pass needs, for as long as autograd keeps it."""

    __slots__ = ("_watch", "part", "place", "tensor")

    def __init__(self, watch: _Watch, tensor: Tensor, part: LayerPart | None) -> None:
        """Hold a tensor [...] that a part of the layer saved, or what is around the parts."""
        self.tensor, self.part, self._watch, self.place = tensor, part, watch, watch.ledger.place_of(tensor)

    def __del__(self) -> None:
        """Note that it is needed no more."""
        self._watch.let_go(self)


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


def _forward_alone(stage: Stage, forward: Callable[[], Outputs], reads: States) -> Moments:
    """Run the forward pass of one chunk and save nothing; see `SeenChunk.unsaved` and `_measure_chunk`."""
    ledger = Ledger()
    _enter_given(ledger, stage, reads)
    watch = _Watch(ledger, keeps=False)
    with ledger, _watched(stage, watch):
        outputs = forward()
    # while its results live
    gone = Storages.of(ledger).gone
    del outputs
    return gone


def _leaf(tensor: Tensor) -> Tensor:
    """Return a state tensor [N, ...] as a leaf of autograd: a chunk reads so what the one before wrote."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _leaf_with_gradient(tensor: Tensor) -> Tensor:
    """Return a state tensor [N, ...] as a leaf that requires a gradient only if the chunk before gave it one."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
