"""Bytes of activations: a layer of each kind reads chunks on the CPU, and the ledger counts what it makes.

The layer is the one that trains, so that it runs the code that it runs in training. But large numbers are not computed
(`megamem.planning.ledger`), and the layer is the share of one of many tensor-parallel ranks, for two or three rows: so
this takes seconds. Bytes are linear in the number of rows and in a rank's share of the heads: four measurements decide
what any other share and number of rows takes.

Three steps, from the inside out: `_read_chunks` measures chunk after chunk of one part at one size, `_Measurements`
does so at four sizes and interpolates, `Activations` keeps the results by part.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.costs.devices import Precision
from megamem.memory.base import DTYPES, Chunk, Growing, States, detach, map_state, state_tensors
from megamem.model.stage import Stage, build_stage, typical_labels
from megamem.pipeline.freezing import Learning, freeze, learning_of
from megamem.pipeline.train_chunk import dropout_keys
from megamem.planning.ledger import Ledger, room
from megamem.planning.rank_linears import RankLinears, tp_sizes

Bytes = npt.NDArray[np.float64]
Outputs = tuple[Tensor | list[Tensor], States, dict[str, Tensor]]
"""Hidden vectors or losses, new states by component, auxiliary losses."""
ROWS = (2, 3)
"""Numbers of rows that are measured; with one row some operations need no copies that they need with more."""
END_TOKENS = 64
"""Tokens that embedding and head are measured with: their bytes depend on the number of tokens alone."""
MOST_CHUNKS = 8
"""Chunks after which a memory of fixed size has filled, or a growing one grows at its pace."""


class PartBytes(NamedTuple):
    """The bytes that a part of a stage (a layer, the embedding, the head) takes for one chunk of one micro-batch."""

    kept: float
    """Bytes from the chunk's forward to its backward: activations, the hidden chunk it hands on, new states."""
    forward: float
    """Most bytes while its forward runs, above those that there were before."""
    backward: float
    """Most bytes while its backward runs, above those that there were before; gradients of parameters are among the
    latter."""
    state_gradients: float
    """Bytes of gradients on the states that it read, from its backward to that of the chunk before."""


def end_tokens(model: ModelConfig) -> int:
    """Return the tokens that embedding and head are measured with, at most a chunk."""
    return min(END_TOKENS, model.chunk_size)


@dataclass(frozen=True)
class Share:
    """The share of a micro-batch that a rank computes, and how it does."""

    rows: float
    tp_size: int
    recompute: bool = False
    sequence_parallel: bool = False


class Activations:
    """The bytes of all parts of a model, in sequences of so many chunks; each part is measured at its first use."""

    def __init__(
        self,
        model: ModelConfig,
        precision: Precision,
        chunks: int,
        processes: int = 1,
        learning: Learning | None = None,
    ) -> None:
        """Measure nothing yet.

        processes: forked from this one to measure side by side; 1 where there are threads or a CUDA context.
        learning: what learns; everything if not given.
        """
        self.model, self.precision, self.chunks, self.processes = model, precision, chunks, processes
        self.learning = learning
        self.dtype = DTYPES[precision]
        # by part and by what changes the operations; rows and TP are interpolated
        self._measurements: dict[tuple[str, bool, bool], _Measurements] = {}
        self._interpolated: dict[tuple[str, Share], list[PartBytes]] = {}

    @classmethod
    def of_run(cls, config: RunConfig, processes: int = 1) -> Activations:
        """Return those of a run's model, in its precision, sequences and with what it freezes."""
        return cls(config.model, config.training.precision, config.chunks, processes, learning_of(config))

    def in_sequences(self, chunks: int) -> Activations:
        """Return the same for sequences of another number of chunks; this object if it is its own."""
        if chunks == self.chunks:
            return self
        return Activations(self.model, self.precision, chunks, self.processes, self.learning)

    def layer(self, layer: int, share: Share) -> list[PartBytes]:
        """Return the bytes of a layer for each chunk of a sequence."""
        # layers of one kind are measured once, if they learn alike
        name = self.model.layer_kind(layer)
        if self.learning is not None:
            name += f" {self.learning.reaches_input(layer)} {self.learning.of_layer(layer)}"
        return self._part(name, range(layer, layer + 1), share)

    def embedding(self, share: Share) -> list[PartBytes]:
        """Return the bytes of the embedding for each chunk of a sequence."""
        return self._end("embedding", range(0), share)

    def head(self, share: Share) -> list[PartBytes]:
        """Return the bytes of the last norm, the output head and the loss for each chunk of a sequence."""
        return self._end("head", range(self.model.layers, self.model.layers), share)

    def _end(self, name: str, layers: range, share: Share) -> list[PartBytes]:
        """Return the bytes of embedding or head, which are the same for every chunk.

        They are measured with few tokens: a chunk of many tokens counts as more rows.
        """
        rows = share.rows * self.model.chunk_size / end_tokens(self.model)
        return self._part(name, layers, replace(share, rows=rows)) * self.chunks

    def _part(self, name: str, layers: range, share: Share) -> list[PartBytes]:
        """Return the bytes of a part by chunk, measured or interpolated where they are not known yet."""
        key = name, share.recompute, share.sequence_parallel
        if key not in self._measurements:
            with _one_thread():
                self._measurements[key] = _Measurements(self, layers, share)
        if (name, share) not in self._interpolated:
            self._interpolated[name, share] = self._measurements[key].at(share)
        return self._interpolated[name, share]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: where next to nothing is computed, threads that wait for each other take most time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _MeasuredChunk(NamedTuple):
    """The measurement of one chunk of a part. See `PartBytes`; forward and backward are the bytes after each operation,
    above those at the beginning."""

    kept: float
    forward: Bytes
    backward: Bytes
    state_gradients: float


class _Part(NamedTuple):
    """What is measured of a model."""

    model: ModelConfig
    dtype: torch.dtype
    layers: range
    """Its layers; an empty range is the embedding (at 0) or the head."""
    learning: Learning | None
    """What learns; None if everything does."""


class _Measurements:
    """Measurements of one part at two numbers of rows and two TP sizes, and the straight lines through them."""

    def __init__(self, activations: Activations, layers: range, share: Share) -> None:
        """Measure the part that holds `layers`. share: what changes its operations; rows and TP size are replaced."""
        model = activations.model
        part = _Part(model, activations.dtype, layers, activations.learning)
        stage = _zero_stage(part, share)
        # TP sizes into which the part divides; with sequence parallelism its tokens must divide too, alone and with
        # the rows around them
        tokens = model.chunk_size if layers else end_tokens(model)
        split = math.gcd(tokens, sum(stage.rows_around(0, tokens))) if share.sequence_parallel else 0
        sizes = [size for size in tp_sizes(model) if split % size == 0]
        # the largest two: the smallest shares are measured fastest. As with rows, with a single head some operations
        # need no copies that they need with more: such sizes are taken only if there are no others
        several_heads = [size for size in sizes if model.resolved_kv_heads // size > 1]
        self.sizes = several_heads[-2:] if len(several_heads) > 1 else sizes[-2:]
        self.chunks = activations.chunks if layers else 1
        self.grows_for = _growing_chunks(stage, self.chunks)

        corners = list(product(ROWS, self.sizes))
        shares = [replace(share, rows=rows, tp_size=tp_size) for rows, tp_size in corners]
        chunks = min(self.chunks, MOST_CHUNKS)
        measure = partial(_measure_part, part, chunks, self.grows_for > 0)
        if activations.processes > 1:
            # everything is read there: once this process had run a backward pass, its children could not where torch
            # sees a CUDA device
            import torch._dynamo  # torch's functions of shapes need it: once here, not in each process  # noqa: F401

            # objects that exist now need not be looked through by the collector, which would copy their pages
            gc.freeze()
            with ProcessPoolExecutor(min(activations.processes, len(shares)), get_context("fork")) as pool:
                results = list(pool.map(measure, shares))
        else:
            results = list(map(measure, shares))
        self.measured = dict(zip(corners, results, strict=True))

    def at(self, share: Share) -> list[PartBytes]:
        """Return the bytes at any number of rows and TP size, by chunk."""
        # bilinear in rows and in 1 / TP: each corner's weight is a product of two
        weights = {
            (rows, tp): _weight(rows, ROWS, share.rows)
            * _weight(1 / tp, [1 / size for size in self.sizes], 1 / share.tp_size)
            for rows, tp in self.measured
        }
        # a corner may have become steady after fewer chunks than the others
        known = min(len(chunks) for chunks in self.measured.values())
        measured = np.array([self._chunk(chunk, weights) for chunk in range(known)])
        return [PartBytes(*map(float, row)) for row in _extended(measured, self.chunks, self.grows_for)]

    def _chunk(self, chunk: int, weights: Mapping[tuple[int, int], float]) -> PartBytes:
        """Return the weighted bytes of one chunk. weights: of the corners."""
        corners = [(chunks[chunk], weights[corner]) for corner, chunks in self.measured.items()]
        return PartBytes(
            sum(weight * measured.kept for measured, weight in corners),
            _highest([(measured.forward, weight) for measured, weight in corners]),
            _highest([(measured.backward, weight) for measured, weight in corners]),
            sum(weight * measured.state_gradients for measured, weight in corners),
        )


def _highest(corners: Sequence[tuple[Bytes, float]]) -> float:
    """Return the highest point of the weighted sum of bytes over operations.

    Which operation holds most may change with the size, so operations are summed before the highest is taken. Where
    choices made the corners run different operations, their own highest points are summed.
    """
    if len({len(over_operations) for over_operations, _ in corners}) > 1:
        return float(sum(weight * over_operations.max() for over_operations, weight in corners))
    return float(np.sum([weight * over_operations for over_operations, weight in corners], axis=0).max())


def _weight(point: float, points: Sequence[float], wanted: float) -> float:
    """Return the weight of the value at `point` in the straight line through the values at `points` (one or two)."""
    if len(points) == 1:
        return 1.0
    (other,) = (candidate for candidate in points if candidate != point)
    return (wanted - other) / (point - other)


def _measure_part(part: _Part, chunks: int, growing: bool, share: Share) -> list[_MeasuredChunk]:
    """Return the measurements of the first chunks; see `_read_chunks`."""
    measured, ledgers = _read_chunks(part, chunks, growing, share)
    # what still lives are tables that are made at the first use and kept: the second time they are there already
    if any(ledger.live for ledger in ledgers):
        measured, _ = _read_chunks(part, chunks, growing, share)
    return measured


def _read_chunks(part: _Part, chunks: int, growing: bool, share: Share) -> tuple[list[_MeasuredChunk], list[Ledger]]:
    """Read the first chunks of a sequence, one after another, until one takes as much as was to be expected.

    Args:
        chunks: the most that are read.
        growing: whether the part's memory grows with each chunk.

    Returns: measurements by chunk, and their ledgers.
    """
    model, dtype, layers, learning = part
    stage, rows = _zero_stage(part, share), int(share.rows)
    size = model.chunk_size if layers else end_tokens(model)
    states = stage.initial_states(rows, torch.device("cpu"), dtype)
    labels = typical_labels(model, size, rows)
    # with a frozen base, hidden states and memories that no learning parameter is behind have no gradients
    enters = learning is None or learning.reaches_input(layers.start)
    leaf = _leaf if learning is None else _leaf_with_gradient
    ledgers: list[Ledger] = []
    measured: list[_MeasuredChunk] = []
    while len(measured) < chunks:
        # as `StageExecutor` hands states from chunk to chunk: gradients stop at each, and are handed on by themselves
        reads = {name: map_state(leaf, state) for name, state in states.items()}
        keys = dropout_keys(model, 0, 0, range(rows))
        position = Chunk((len(measured) * size,) * rows, dropout=keys and keys.after(len(measured) * size))
        if stage.first:
            entered = torch.zeros(size, rows, dtype=torch.int64)
        else:
            entered = torch.zeros(stage.border_shape(size, rows), dtype=dtype, requires_grad=enters)

        def forward(entered: Tensor = entered, reads: States = reads, position: Chunk = position) -> Outputs:
            hidden, new, losses = stage.read_chunk(entered, reads, position)
            # a list, so that the loss is an output of which gradients are taken
            return ([stage.token_losses(hidden, labels).sum()] if stage.last else hidden), new, losses

        ledgers.append(Ledger())
        (_, new, _), chunk = _measure_chunk(ledgers[-1], stage, forward, reads)
        states = detach(new) if learning is None else new
        measured.append(chunk)
        # a line needs one chunk more than a constant, and the first chunk reads no memory
        if len(measured) > (3 if growing else 2) and _is_steady([chunk.kept for chunk in measured], growing):
            break
    return measured, ledgers


def _is_steady(kept: Sequence[float], growing: bool) -> bool:
    """Return whether the last chunk kept what the one before did, or grew as that had grown."""
    expected = 2 * kept[-2] - kept[-3] if growing else kept[-2]
    return abs(kept[-1] - expected) < 1e-3 * kept[-1]


def _extended(measured: Bytes, chunks: int, grows_for: int) -> Bytes:
    """Return the measured chunks [chunks, fields] and those after them, which grow as the last measured ones did.

    grows_for: number of chunks over which anything grows.
    """
    extended = list(measured)
    while len(extended) < chunks:
        grows = 0 < len(extended) <= grows_for and len(measured) > 1
        extended.append(extended[-1] + (measured[-1] - measured[-2] if grows else 0))
    return np.stack(extended)


def _growing_chunks(stage: Stage, chunks: int) -> int:
    """Return the number of chunks over which the part's memory grows; 0 if its size is fixed."""
    lists = [spec for specs in stage.state_specs.values() for spec in specs.values() if isinstance(spec, Growing)]
    return max((chunks if spec.limit is None else min(chunks, spec.limit) for spec in lists), default=0)


def _zero_stage(part: _Part, share: Share) -> Stage:
    """Return a part as a rank holds it in training, with parameters that are zero and take no memory."""
    model, dtype, layers, learning = part
    with torch.device("meta"):
        stage = build_stage(model, RankLinears(share.tp_size, share.sequence_parallel), layers).to(dtype)
    # embedding and head are parts of their own: a layer at an end of the model has neither
    stage.first, stage.last = stage.first and not layers, stage.last and not layers
    stage.recompute = share.recompute
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(room(parameter)))
    if learning is not None:
        freeze(stage, learning.names)
    return stage


def _measure_chunk(
    ledger: Ledger, stage: Stage, forward: Callable[[], Outputs], reads: States
) -> tuple[Outputs, _MeasuredChunk]:
    """Run forward and backward of one chunk, and return what the forward returned and the bytes of both.

    Args:
        forward: reads the chunk.
        reads: the states that it reads, leaves of autograd.
    """
    # parameters, their gradients and the states are counted elsewhere: here they cost nothing
    for parameter in stage.parameters():
        parameter.grad = room(parameter)
        ledger.enter_storage(parameter, counted=False)
        ledger.enter_storage(parameter.grad, counted=False)
    for state in state_tensors(reads):
        ledger.enter_storage(state, counted=False)
    with ledger:
        outputs = forward()
    kept, forward_bytes = ledger.live, ledger.live_after
    # gradients come from the next layer, the loss and the next chunk: they are there when the backward begins
    roots = [tensor for tensor in state_tensors(outputs) if tensor.requires_grad]
    gradients = [room(root) for root in roots]
    for gradient in gradients:
        ledger.enter_storage(gradient, counted=False)
    ledger.live_after = []
    with ledger:
        if roots:
            torch.autograd.backward(roots, gradients)
    state_gradients = sum(state.grad.nbytes for state in state_tensors(reads) if state.grad is not None)
    # where nothing learns there is no backward pass
    backward_bytes = np.array(ledger.live_after or [kept], dtype=np.float64) - kept
    return outputs, _MeasuredChunk(kept, np.array(forward_bytes, dtype=np.float64), backward_bytes, state_gradients)


def _leaf(tensor: Tensor) -> Tensor:
    """Return a state tensor [N, ...] as a leaf of autograd: a chunk reads so what the one before wrote."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor


def _leaf_with_gradient(tensor: Tensor) -> Tensor:
    """Return a state tensor [N, ...] as a leaf that requires a gradient only if the chunk before gave it one."""
    return tensor.detach().requires_grad_(tensor.requires_grad)
