"""Bytes of activations: a layer of each kind reads chunks on the CPU, and the ledger counts what it makes.

The layer is the one that trains, so that it runs the code that it runs in training. But large numbers are not computed
(`megamem.planning.ledger`), and the layer is the share of one of many tensor-parallel ranks, for two rows and for five:
so this takes seconds. Each number is a multiple of the rows or does not depend on them, and is linear in a rank's share
of the heads: two measurements decide what any other share and number of rows takes (`megamem.planning.measured_chunk`).

Three steps, from the inside out: `measure_chunks` measures chunk after chunk of one part at one size, `_Measurements`
does so at two sizes and finds what lies between, `Activations` keeps the results by part.
"""

from __future__ import annotations

import gc
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from functools import cached_property, partial
from multiprocessing import get_context
from typing import Literal, TypeVar

import numpy as np
import torch

from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.config.training import Recompute
from megamem.costs.devices import Precision
from megamem.memory.base import DTYPES, Growing
from megamem.model.stage import Stage
from megamem.ops.linear_cross_entropy import slice_count
from megamem.pipeline.freezing import Learning, learning_of
from megamem.planning.measured_chunk import Lines, Pair, PartBytes, PartWork, SeenChunk
from megamem.planning.measured_part import (
    Kernels,
    Part,
    Share,
    end_tokens,
    kernels_of,
    measure_chunks,
    recurrence_of,
    zero_stage,
)
from megamem.planning.rank_linears import tp_sizes
from megamem.planning.roofline import Work

T = TypeVar("T")
Wanted = tuple[str, range, Share]
"""A part by name and layers (none: embedding or head), and the share of it that is asked for."""
_Key = tuple[str, bool, bool, int]
FEWEST_ROWS = 2
"""Rows of the first measurement; with one row some operations need no copies that they need with more."""
MOST_CHUNKS = 8
"""Chunks after which a memory of fixed size has filled, or a growing one grows at its pace."""


class Activations:
    """The bytes of all parts of a model, in sequences of so many chunks; each part is measured at its first use.

    Where windows are read layer by layer, what is said of a chunk holds for those of a window together (`together`).
    """

    def __init__(
        self,
        model: ModelConfig,
        precision: Precision,
        chunks: int,
        processes: int = 1,
        learning: Learning | None = None,
        kernels: Kernels = "separate",
        together: int = 1,
    ) -> None:
        """Measure nothing yet.

        processes: forked from this one to measure side by side; 1 where there are threads or a CUDA context.
        learning: what learns; everything if not given.
        kernels: what the device runs as one kernel.
        together: chunks that each layer reads before the next one does (`RunConfig.chunks_per_call`).
        """
        self.model, self.precision, self.chunks, self.processes = model, precision, chunks, processes
        self.learning, self.kernels, self.together = learning, kernels, together
        self.calls = chunks // together
        """How often a layer is called for a sequence."""
        self._of_lengths = {(chunks, together): self}
        """By chunks of a sequence and `together`, see `of_phase`."""
        self.dtype = DTYPES[precision]
        # by part and by what changes the operations (the slices of a loss among it); rows and TP are interpolated
        self._measurements: dict[_Key, _Measurements] = {}
        self._bytes_found: dict[tuple[str, Share], list[PartBytes]] = {}
        self._work_found: dict[tuple[str, Share], list[PartWork]] = {}

    @classmethod
    def of_run(cls, config: RunConfig, processes: int = 1, device: Literal["cuda", "cpu"] = "cuda") -> Activations:
        """Return those of a run's model, in its precision, sequences and with what it freezes, on such a device."""
        training = config.training
        kernels = kernels_of(training, device)
        model = config.model.model_copy(update={"recurrence_kernel": recurrence_of(config, device)})
        learning, together = learning_of(config), config.chunks_per_call
        return cls(model, training.precision, config.chunks, processes, learning, kernels, together)

    def of_phase(self, phase: RunConfig) -> Activations:
        """Return those for the sequences and windows of a phase of the run, or of the run with another order of them.

        They are made once, and keep what has been measured.
        """
        chunks, together = phase.chunks, phase.chunks_per_call
        if (chunks, together) not in self._of_lengths:
            other = Activations(
                self.model, self.precision, chunks, self.processes, self.learning, self.kernels, together
            )
            other._of_lengths = self._of_lengths
            self._of_lengths[chunks, together] = other
        return self._of_lengths[chunks, together]

    def prepare(self, shares: Iterable[Share]) -> None:
        """Measure now, all side by side, what such shares of the model's parts need; the rest at its first use."""
        layers = {kind: layer for layer, kind in enumerate(self.kinds)}.values()
        self._measure(
            part
            for share in shares
            for part in (*(self._layer(layer, share) for layer in layers), self._embedding(share), self._head(share))
        )

    def layer(self, layer: int, share: Share) -> list[PartBytes]:
        """Return the bytes of a layer for each chunk of a sequence."""
        return self._bytes(*self._layer(layer, share))

    def embedding(self, share: Share) -> list[PartBytes]:
        """Return the bytes of the embedding for each chunk of a sequence."""
        return self._bytes(*self._embedding(share)) * self.calls

    def head(self, share: Share) -> list[PartBytes]:
        """Return the bytes of the last norm, the output head and the loss for each chunk of a sequence."""
        return self._bytes(*self._head(share)) * self.calls

    def layer_work(self, layer: int, share: Share) -> list[PartWork]:
        """Return the operations of a layer for each chunk of a sequence."""
        return self._works(*self._layer(layer, share))

    def embedding_work(self, share: Share) -> list[PartWork]:
        """Return the operations of the embedding for each chunk of a sequence."""
        return self._works(*self._embedding(share)) * self.calls

    def head_work(self, share: Share) -> list[PartWork]:
        """Return the operations of the last norm, the output head and the loss for each chunk of a sequence."""
        return self._works(*self._head(share)) * self.calls

    def _layer(self, layer: int, share: Share) -> Wanted:
        """Return the part that is a layer. Layers of one kind are measured once, if they learn alike."""
        return self.kinds[layer], range(layer, layer + 1), share

    @cached_property
    def kinds(self) -> list[str]:
        """The kind of each layer: how it is built, and what of it learns."""
        kinds = [self.model.layer_kind(layer) for layer in range(self.model.layers)]
        if (learning := self.learning) is None:
            return kinds
        return [f"{kind} {learning.reaches_input(n)} {learning.of_layer(n)}" for n, kind in enumerate(kinds)]

    def _embedding(self, share: Share) -> Wanted:
        """Return the part that is the embedding."""
        return "embedding", range(0), self._of_end(share)

    def _head(self, share: Share) -> Wanted:
        """Return the part that is last norm, head and loss."""
        slices = 1
        if self.model.adaptive is None or not self.model.adaptive.softmax:
            rows = self.model.resolved_padded_vocab_size // share.tp_size
            # no fewer than two tokens in a slice where it is measured
            most = end_tokens(self.model)
            tokens = round(share.rows * self.model.chunk_size * self.together)
            slices = min(slice_count(tokens, rows), most)
        return "head", range(self.model.layers, self.model.layers), replace(self._of_end(share), loss_slices=slices)

    def _of_end(self, share: Share) -> Share:
        """Return the share of embedding or head, which are the same for every chunk.

        They are measured with few tokens: a chunk of many tokens counts as more rows.
        """
        return replace(share, rows=share.rows * self.model.chunk_size * self.together / end_tokens(self.model))

    def _bytes(self, name: str, layers: range, share: Share) -> list[PartBytes]:
        """Return the bytes of a part by chunk, measured if they are not known yet."""
        if (name, share) not in self._bytes_found:
            self._bytes_found[name, share] = self._measured(name, layers, share).bytes(share)
        return self._bytes_found[name, share]

    def _works(self, name: str, layers: range, share: Share) -> list[PartWork]:
        """Return the operations of a part by chunk, measured if they are not known yet."""
        if (name, share) not in self._work_found:
            self._work_found[name, share] = self._measured(name, layers, share).work(share)
        return self._work_found[name, share]

    def _measured(self, name: str, layers: range, share: Share) -> _Measurements:
        """Return the measurements of a part, made at its first use."""
        self._measure([(name, layers, share)])
        return self._measurements[_key(name, layers, share)]

    def _measure(self, parts: Iterable[Wanted]) -> None:
        """Measure those parts that are not yet, all side by side where this process may fork."""
        new: dict[_Key, _Measurements] = {}
        for name, layers, share in parts:
            key = _key(name, layers, share)
            if key not in self._measurements and key not in new:
                new[key] = _Measurements(self, layers, share)
        if not new:
            return
        wanted = [measure for made in new.values() for measure in made.to_measure()]
        with _one_thread():
            results = iter(_side_by_side(wanted, self.processes))
        for made in new.values():
            made.measured = next(results), next(results)
        self._measurements |= new


def _key(name: str, layers: range, share: Share) -> _Key:
    """Return what tells measurements apart: the part, and what changes its operations.

    Layers are measured for recomputation of any kind at once; of a head it matters whether whole layers are computed
    again.
    """
    return name, share.recompute is True and not layers, share.sequence_parallel, share.loss_slices


def _side_by_side(measure: Sequence[Callable[[], T]], processes: int) -> list[T]:
    """Return what each of `measure` returns, in so many processes forked from this one if there are several."""
    if processes == 1:
        return [each() for each in measure]
    # all of it in children: once this process had run a backward pass itself, they could not where torch sees a CUDA
    # device. Objects that exist now need not be looked through by the collector, which would copy their pages
    gc.freeze()
    with ProcessPoolExecutor(min(processes, len(measure)), get_context("fork")) as pool:
        return [result.result() for result in [pool.submit(each) for each in measure]]


@contextmanager
def _one_thread() -> Iterator[None]:
    """Let torch use one thread: where next to nothing is computed, threads that wait for each other take most time."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


class _Measurements:
    """Two measurements of one part, and what follows from them at any number of rows and TP size."""

    def __init__(self, activations: Activations, layers: range, share: Share) -> None:
        """Say what to measure of the part that holds `layers`; `measured` is filled in by who does.

        share: what changes its operations; rows and TP size are replaced.
        """
        model = activations.model
        together = activations.together if layers else 1
        part = Part(model, activations.dtype, layers, activations.learning, activations.kernels, together)
        stage = zero_stage(part, share)
        # TP sizes into which the part divides; with sequence parallelism its tokens must divide too, alone and with
        # the rows around them
        tokens = model.chunk_size if layers else end_tokens(model)
        split = math.gcd(tokens, sum(stage.rows_around(0, tokens))) if share.sequence_parallel else 0
        sizes = [size for size in tp_sizes(model) if split % size == 0]
        if share.sequence_parallel and len(sizes) > 1:
            sizes.remove(1)  # one rank runs other operations: there is nothing to gather
        # the largest two: the smallest shares are measured fastest. As with rows, with a single head some operations
        # need no copies that they need with more: such sizes are taken only if there are no others
        several_heads = [size for size in sizes if model.resolved_kv_heads // size > 1]
        fewer, more = ([sizes[0], *sizes] if len(several_heads) < 2 else several_heads)[-2:]
        # so many rows that what is made of rows grows from the first to the second, though a rank has fewer heads
        self.lines = Lines((FEWEST_ROWS, FEWEST_ROWS * more // fewer + 1), (fewer, more))
        self.chunks = activations.calls if layers else 1
        self.grows_for = -(-_growing_chunks(stage, self.chunks * together) // together)
        self.measured: tuple[Sequence[SeenChunk], Sequence[SeenChunk]] = [], []
        """By chunk."""
        self._pairs_found: dict[Recompute, list[Pair]] = {}
        self._plain_work: dict[tuple[float, int], list[PartWork]] = {}
        """By rows and TP size, by chunk, without recomputation."""
        self._part, self._share = part, share

    def to_measure(self) -> Iterator[Callable[[], Sequence[SeenChunk]]]:
        """Yield what measures the part, for one half of `measured` after the other."""
        chunks, growing = min(self.chunks, MOST_CHUNKS), self.grows_for > 0
        for rows, tp_size in zip(self.lines.rows, self.lines.tp_sizes, strict=True):
            share = replace(self._share, rows=rows, tp_size=tp_size)
            yield partial(measure_chunks, self._part, chunks, growing, share)

    def bytes(self, share: Share) -> list[PartBytes]:
        """Return the bytes at any number of rows and TP size, by chunk."""
        found = [np.array(self.lines.bytes(pair, share.rows, share.tp_size)) for pair in self._pairs(share.recompute)]
        extended = _extended(found, self.chunks, self.grows_for, lambda last, new, before: last + (new - before))
        return [PartBytes(*map(float, size)) for size in extended]

    def work(self, share: Share) -> list[PartWork]:
        """Return the operations at any number of rows and TP size, by chunk."""
        size = share.rows, share.tp_size
        if size not in self._plain_work:
            self._plain_work[size] = [self.lines.work(pair, *size) for pair in self._pairs(False)]
        # the operations of both measurements are in one order
        seen = zip(self._plain_work[size], self.measured[1], strict=False)
        found = [chunk.work_under(share.recompute, work) for work, chunk in seen]
        return _extended(found, self.chunks, self.grows_for, lambda *each: PartWork(*map(_grown, *each)))

    def _pairs(self, recompute: Recompute) -> list[Pair]:
        """Return both measurements of each chunk, where so much of each layer is computed again."""
        if recompute not in self._pairs_found:
            # one measurement may have become steady after fewer chunks than the other
            self._pairs_found[recompute] = [
                (first.under(recompute), second.under(recompute)) for first, second in zip(*self.measured, strict=False)
            ]
        return self._pairs_found[recompute]


def _grown(last: Work, new: Work, before: Work) -> Work:
    """Return operations that are to `last` as `new` is to `before`; `last` itself where these are different ones."""
    if not np.array_equal(new.kinds, before.kinds):
        return last
    flops, moved = (last[field] + new[field] - before[field] for field in (1, 2))
    return last._replace(flops=flops, moved=moved)


def _extended(measured: Sequence[T], chunks: int, grows_for: int, grown: Callable[[T, T, T], T]) -> list[T]:
    """Return the measured chunks and those after them, which grow as the last measured ones did.

    Args:
        grows_for: number of chunks over which anything grows.
        grown: takes the last chunk, and the last two that were measured, the newer one first; returns the next chunk.
    """
    extended = list(measured)
    while len(extended) < chunks:
        grows = 0 < len(extended) <= grows_for and len(measured) > 1
        extended.append(grown(extended[-1], measured[-1], measured[-2]) if grows else extended[-1])
    return extended


def _growing_chunks(stage: Stage, chunks: int) -> int:
    """Return the number of chunks over which the part's memory grows; 0 if its size is fixed."""
    lists = [spec for specs in stage.state_specs.values() for spec in specs.values() if isinstance(spec, Growing)]
    return max((chunks if spec.limit is None else min(chunks, spec.limit) for spec in lists), default=0)
