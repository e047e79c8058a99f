"""Bytes of activations: a layer of each kind reads chunks on the CPU, and what it makes is counted.

The layer is the one that trains, so that it takes the paths that it takes in training; but large numbers are not
computed (`megamem.planning.ledger`), and it is the share of one of many tensor-parallel ranks, for two or three rows:
so this takes seconds. Bytes grow with rows and with a rank's share of the heads along straight lines: four measurements
say what any other share and number of rows takes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from megamem.config.model import ModelConfig
from megamem.costs.devices import Precision
from megamem.memory.base import DTYPES, Chunk, Growing, States, detach, map_state, state_tensors
from megamem.model.stage import Stage, build_stage
from megamem.planning.ledger import Ledger, room
from megamem.planning.rank_linears import RankLinears, tp_sizes

Bytes = npt.NDArray[np.float64]
ROWS = (2, 3)
"""Rows that are measured; with one row some operations need no copies that they need with more."""
END_TOKENS = 64
"""Tokens that embedding and head are measured with: what they take depends on the number of tokens alone."""
MOST_CHUNKS = 8
"""Chunks after which a memory of fixed size has filled, or a growing one grows at its pace."""


class PartBytes(NamedTuple):
    """What a part of a stage (a layer, the embedding, the head) takes for one chunk of one micro-batch."""

    kept: float
    """From the chunk's forward to its backward: activations, the hidden chunk it hands on, new states."""
    forward: float
    """Most while its forward runs, above what there was before."""
    backward: float
    """Most while its backward runs, above what there was before; gradients of parameters are held by then."""
    handed_back: float
    """Gradients on the states that it read, from its backward to that of the chunk before."""


@dataclass(frozen=True)
class Share:
    """What a rank takes of a micro-batch, and how."""

    rows: float
    tp_size: int
    recompute: bool = False
    sequence_parallel: bool = False


class Activations:
    """Of the parts of one model in sequences of so many chunks; each is measured when it is first asked for."""

    def __init__(self, model: ModelConfig, precision: Precision, chunks: int, processes: int = 1) -> None:
        """processes: forked from this one to measure side by side; 1 where there are threads or a CUDA context."""
        self.model, self.dtype, self.chunks, self.processes = model, DTYPES[precision], chunks, processes
        self._found: dict[tuple[str, bool, bool], _Lines] = {}
        self._read_off: dict[tuple[str, Share], list[PartBytes]] = {}

    def layer(self, layer: int, share: Share) -> list[PartBytes]:
        """Of a layer, for each chunk of a sequence."""
        return self._part(self.model.mixer_at(layer).model_dump_json(), range(layer, layer + 1), share)

    def embedding(self, share: Share) -> list[PartBytes]:
        """Of the embedding."""
        return self._end("embedding", range(0), share)

    def head(self, share: Share) -> list[PartBytes]:
        """Of the last norm, the output head and the loss."""
        return self._end("head", range(self.model.layers, self.model.layers), share)

    def _end(self, name: str, layers: range, share: Share) -> list[PartBytes]:
        """Many tokens are many rows of few."""
        rows = share.rows * self.model.chunk_size / END_TOKENS
        return self._part(name, layers, replace(share, rows=rows)) * self.chunks

    def _part(self, name: str, layers: range, share: Share) -> list[PartBytes]:
        key = name, share.recompute, share.sequence_parallel
        if key not in self._found:
            with _one_thread():
                self._found[key] = _Lines(self, layers, share)
        if (name, share) not in self._read_off:
            self._read_off[name, share] = self._found[key].at(share)
        return self._read_off[name, share]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Threads that wait for each other would take most of the time: next to nothing is computed."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Measured(NamedTuple):
    """One chunk of a part, measured. A course has the bytes after each operation, above those at its start."""

    kept: float
    forward: Bytes
    backward: Bytes
    handed_back: float


class _Lines:
    """Measurements of one part at two numbers of rows and two shares, and the lines through them."""

    def __init__(self, of: Activations, layers: range, how: Share) -> None:
        # the same goes for one head
        split = END_TOKENS if not layers else of.model.chunk_size
        sizes = [size for size in tp_sizes(of.model) if not how.sequence_parallel or split % size == 0]
        several = [size for size in sizes if of.model.resolved_kv_heads // size > 1]
        self.sizes = several[-2:] if len(several) > 1 else sizes[-2:]
        self.chunks = of.chunks if layers else 1
        stage = _stage(of.model, of.dtype, layers, how)
        self.limit = _grows_to(stage, self.chunks)

        corners = list(product(ROWS, self.sizes))
        shares = [replace(how, rows=rows, tp_size=tp_size) for rows, tp_size in corners]
        measure = partial(_measure_part, of.model, of.dtype, layers, min(self.chunks, MOST_CHUNKS), self.limit > 0)
        if of.processes > 1 and layers:
            import torch._dynamo  # torch's functions of shapes need it: once here, not in each process  # noqa: F401

            gc.freeze()  # what there is need not be looked through again and again, nor copied
            with ProcessPoolExecutor(min(of.processes, len(shares)), get_context("fork")) as pool:
                found = list(pool.map(measure, shares))
        else:
            found = list(map(measure, shares))
        self.measured = dict(zip(corners, found, strict=True))

    def at(self, share: Share) -> list[PartBytes]:
        """By chunk."""
        weights = {
            (rows, tp): _weight(rows, ROWS, share.rows)
            * _weight(1 / tp, [1 / size for size in self.sizes], 1 / share.tp_size)
            for rows, tp in self.measured
        }
        known = min(len(found) for found in self.measured.values())
        found = np.array([self._chunk(chunk, weights) for chunk in range(known)])
        return [PartBytes(*map(float, row)) for row in _continued(found, self.chunks, self.limit)]

    def _chunk(self, chunk: int, weights: Mapping[tuple[int, int], float]) -> PartBytes:
        here = [(found[chunk], weights[place]) for place, found in self.measured.items()]
        return PartBytes(
            sum(weight * found.kept for found, weight in here),
            _most([(found.forward, weight) for found, weight in here]),
            _most([(found.backward, weight) for found, weight in here]),
            sum(weight * found.handed_back for found, weight in here),
        )


def _most(courses: Sequence[tuple[Bytes, float]]) -> float:
    """The highest point of the line through courses. Where choices made them differ in length, of their own highest."""
    if len({len(course) for course, _ in courses}) > 1:
        return float(sum(weight * course.max() for course, weight in courses))
    return float(np.sum([weight * course for course, weight in courses], axis=0).max())


def _weight(at: float, points: Sequence[float], wanted: float) -> float:
    """Of the value at the point `at` in the straight line through the values at `points` (one or two)."""
    if len(points) == 1:
        return 1.0
    (other,) = (point for point in points if point != at)
    return (wanted - other) / (at - other)


def _measure_part(
    model: ModelConfig, dtype: torch.dtype, layers: range, chunks: int, growing: bool, share: Share
) -> list[_Measured]:
    """The first chunks, at most so many, until one costs what was to be expected."""
    found, ledgers = _read_chunks(model, dtype, layers, chunks, growing, share)
    if any(ledger.live for ledger in ledgers):  # tables that are made once and kept: now they are there
        found, _ = _read_chunks(model, dtype, layers, chunks, growing, share)
    return found


def _read_chunks(
    model: ModelConfig, dtype: torch.dtype, layers: range, chunks: int, growing: bool, share: Share
) -> tuple[list[_Measured], list[Ledger]]:
    stage, rows = _stage(model, dtype, layers, share), int(share.rows)
    size = model.chunk_size if layers else END_TOKENS
    states = stage.initial_states(rows, torch.device("cpu"), dtype)
    labels = torch.zeros(size, rows, dtype=torch.int64)
    ledgers = []
    found: list[_Measured] = []
    while len(found) < chunks:
        reads = {name: map_state(_alias, state) for name, state in states.items()}
        where = Chunk((len(found) * size,) * rows)
        if stage.first:
            entered = torch.zeros(size, rows, dtype=torch.int64)
        else:
            entered = torch.zeros(stage.border_shape(size, rows), dtype=dtype, requires_grad=True)

        def forward(entered: Tensor = entered, reads: States = reads, where: Chunk = where) -> Any:
            hidden, new, losses = stage.read_chunk(entered, reads, where)
            out = [stage.token_losses(hidden, labels).sum()] if stage.last else hidden
            return out, new, losses

        ledgers.append(Ledger())
        (_, new, _), part = _measured(ledgers[-1], stage, forward, reads)
        states = detach(new)
        found.append(part)
        if len(found) > (3 if growing else 2) and _steady([chunk.kept for chunk in found], growing):
            break
    return found, ledgers


def _steady(kept: list[float], growing: bool) -> bool:
    """Whether the last chunk kept what the one before did, or grew as that had grown."""
    expected = 2 * kept[-2] - kept[-3] if growing else kept[-2]
    return abs(kept[-1] - expected) < 1e-3 * kept[-1]


def _continued(found: Bytes, chunks: int, limit: int) -> Bytes:
    """The chunks that were not measured: growing as the last ones did, as long as anything grows."""
    out = list(found)
    while len(out) < chunks:
        grows = 0 < len(out) <= limit and len(found) > 1
        out.append(out[-1] + (found[-1] - found[-2] if grows else 0))
    return np.stack(out)


def _grows_to(stage: Stage, chunks: int) -> int:
    """Chunks over which the part's memory grows; 0 if its size is fixed."""
    lists = [spec for specs in stage.state_specs.values() for spec in specs.values() if isinstance(spec, Growing)]
    return max((chunks if spec.limit is None else min(chunks, spec.limit) for spec in lists), default=0)


def _stage(model: ModelConfig, dtype: torch.dtype, layers: range, share: Share) -> Stage:
    """Some layers as a rank holds them, in training; all parameters are zero."""
    with torch.device("meta"):
        stage = build_stage(model, RankLinears(share.tp_size, share.sequence_parallel), layers).to(dtype)
    stage.first, stage.last = stage.first and not layers, stage.last and not layers
    stage.recompute = share.recompute
    for module in stage.modules():
        for name, parameter in module.named_parameters(recurse=False):
            setattr(module, name, nn.Parameter(room(parameter)))
    return stage


def _measured(ledger: Ledger, stage: Stage, forward: Callable[[], Any], reads: States) -> tuple[Any, _Measured]:
    """What the forward returned, and what it and its backward take.

    Gradients that come from outside, and those of parameters, are there before the backward is counted.
    """
    for parameter in stage.parameters():
        parameter.grad = room(parameter)
        ledger.enter_storage(parameter, counted=False)
        ledger.enter_storage(parameter.grad, counted=False)
    for state in state_tensors(reads):
        ledger.enter_storage(state, counted=False)
    with ledger:
        results = forward()
    kept, up = ledger.live, ledger.course
    roots = [tensor for tensor in state_tensors(results) if tensor.requires_grad]
    gradients = [room(root) for root in roots]
    for gradient in gradients:
        ledger.enter_storage(gradient, counted=False)
    ledger.course = []
    with ledger:
        torch.autograd.backward(roots, gradients)
    handed_back = sum(state.grad.nbytes for state in state_tensors(reads) if state.grad is not None)
    down = np.array(ledger.course, dtype=np.float64) - kept
    return results, _Measured(kept, np.array(up, dtype=np.float64), down, handed_back)


def _alias(tensor: Tensor) -> Tensor:
    """As a chunk reads what the one before wrote (`StageExecutor`)."""
    return tensor.detach().requires_grad_() if tensor.is_floating_point() else tensor
