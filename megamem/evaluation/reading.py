"""Reads held-out text side by side in batch rows, memory carried from chunk to chunk, and sums up its losses.

Every figure of an evaluation is a sum over `Reading`s: stretches of a document that begin with a fresh memory. What
differs between figures is only where readings begin, how long they are and which of their tokens are scored.

Letters: L tokens of a chunk, R rows, S slots (one per chunk of all readings), B buckets of positions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from megamem.data.batch import IGNORED, EvaluationDocument
from megamem.memory.base import Chunk, to_device
from megamem.parallel.topology import Topology
from megamem.pipeline.reader import ChunkReader

Float64 = npt.NDArray[np.float64]
Int64 = npt.NDArray[np.int64]
Bool = npt.NDArray[np.bool_]
Progress = Callable[[int, int], None]
"""Called on every rank after each call of the model with the calls made and the calls of the pass."""

BUCKETS_PER_OCTAVE = 2


@dataclass(frozen=True)
class Reading:
    """A stretch of a document in whole chunks, read with a fresh memory at its first token."""

    document: EvaluationDocument
    begin: int
    """Position of the first token in its document."""
    chunks: int
    """Chunks read; the last may reach beyond the document's end."""
    slot: int
    """Where the first chunk's loss is summed up; the next chunks take the next slots."""
    scored: int | None = None
    """Only so many tokens at the end of a chunk are scored; all if not given."""
    first_scored: int | None = None
    """The same for the first chunk."""

    def chunk(self, index: int, size: int) -> tuple[Tensor, Tensor]:
        """Tokens and labels [L] of chunk `index`, padded with token 0, unscored labels ignored."""
        first = self.begin + index * size
        tokens = self.document.tokens[first : first + size]
        labels = self.document.labels[first : first + size]
        if missing := size - len(tokens):
            tokens, labels = F.pad(tokens, (0, missing)), F.pad(labels, (0, missing), value=IGNORED)
        scored = self.first_scored if index == 0 else self.scored
        if scored is not None and scored < size:
            labels = labels.clone()
            labels[: size - scored] = IGNORED
        return tokens, labels


_Unit = tuple[Reading, int]
"""A reading and one of its chunks."""


@dataclass(frozen=True)
class Sums:
    """What a pass gives, the same on all ranks. Row 0: summed nats, 1: scored tokens, 2: those predicted right."""

    slots: Float64
    """[3, S] by chunk of a reading."""
    within: Float64
    """[3, L] by position inside the chunk."""
    positions: Float64
    """[3, B] by position in the document, in the buckets that `edges` ends."""
    edges: Int64
    """[B] last position of each bucket. Position n is the prediction made after n tokens of the document."""
    tokens: Float64 | None = None
    """[S, L] nats of each token, 0 where none is scored; None if they were not asked for."""


def bucket_edges(chunk_size: int, longest: int) -> Int64:
    """Last positions of log-spaced buckets that cover 1..longest; the chunk's border is always one of them."""
    below = int(np.ceil(np.log2(chunk_size) * BUCKETS_PER_OCTAVE))
    above = int(np.ceil(max(np.log2(longest / chunk_size), 0) * BUCKETS_PER_OCTAVE))
    edges = np.rint(chunk_size * 2.0 ** (np.arange(-below, above + 1) / BUCKETS_PER_OCTAVE)).astype(np.int64)
    edges = np.unique(np.maximum(edges, 1))
    return edges[: int(np.searchsorted(edges, longest)) + 1]


def share_out(sizes: Sequence[int], lanes: int) -> list[list[int]]:
    """Return indices of `sizes` in `lanes` queues of about the same sum: longest first, each to the emptiest."""
    queues: list[list[int]] = [[] for _ in range(lanes)]
    loads = [0] * lanes
    for index in sorted(range(len(sizes)), key=lambda i: (-sizes[i], i)):
        lane = loads.index(min(loads))
        queues[lane].append(index)
        loads[lane] += sizes[index]
    return queues


def sum_readings(
    reader: ChunkReader,
    readings: Sequence[Reading],
    rows: int,
    progress: Progress | None = None,
    keep_tokens: bool = False,
) -> Sums:
    """Run readings through a model and return their loss sums over all ranks.

    Readings are shared out over rows and data-parallel ranks by length; a row takes its next reading at the next chunk
    border, where position 0 gives it a fresh memory. All ranks make the same number of calls, with padding where their
    own work has ended: under ZeRO-3 each call gathers parameters from all of them. The host waits for the device once,
    at the end.

    Args:
        rows: readings side by side on each data-parallel rank.
        keep_tokens: keep the loss of each token, too.
    """
    stage, topology = reader.stage, reader.topology
    size = reader.chunk_size
    ranks, rank = (topology.dp_size, topology.dp_rank) if topology else (1, 0)
    rows = min(rows, -(-len(readings) // ranks))
    queues = share_out([reading.chunks for reading in readings], ranks * rows)
    calls = max(sum(readings[i].chunks for i in queue) for queue in queues)
    lanes = [_units(readings, queue) for queue in queues[rank::ranks]]
    slots = max(reading.slot + reading.chunks for reading in readings)
    edges = bucket_edges(size, max(reading.begin + reading.chunks * size for reading in readings))
    totals = _Totals(slots, size, edges, reader.device, keep_tokens)
    training = stage.training
    stage.eval()
    try:
        with torch.no_grad():
            _run(reader, lanes, calls, totals, progress)
    finally:
        stage.train(training)
    return totals.sums(topology)


def _run(
    reader: ChunkReader,
    lanes: list[Iterator[_Unit]],
    calls: int,
    totals: _Totals,
    progress: Progress | None,
) -> None:
    size = reader.chunk_size
    groups = reader.begin(Chunk((0,) * len(lanes)))
    borders = reader.open(calls, len(lanes))
    for call, (units, tokens, labels, chunk) in enumerate(_calls(reader, lanes, calls)):
        hidden = reader.read(tokens, chunk, groups, borders=borders)
        if hidden is not None:
            totals.add(
                *reader.stage.token_scores(hidden, labels),
                labels != IGNORED,
                [unit[0].slot + unit[1] if unit else totals.unused for unit in units],
                [unit[0].begin + unit[1] * size if unit else 0 for unit in units],
            )
        if progress:
            progress(call + 1, calls)
    if borders:
        borders.flush()


def _calls(
    reader: ChunkReader, lanes: Sequence[Iterator[_Unit]], calls: int
) -> Iterator[tuple[Sequence[_Unit | None], Tensor, Tensor, Chunk]]:
    """Yield for each call what each row reads, tokens and labels [L, R], and their place (`ChunkReader.prepare`)."""
    size, device = reader.chunk_size, reader.device
    nothing = (torch.zeros(size, dtype=torch.int64), torch.full((size,), IGNORED))
    left = islice(zip(*(_endless(lane) for lane in lanes), strict=True), calls)
    while now := list(islice(left, reader.chunks_ahead(len(lanes)))):
        # of all calls of `now` one after the other
        texts = [[unit[0].chunk(unit[1], size) if unit else nothing for unit in units] for units in now]
        tokens, labels = (
            to_device(torch.cat([torch.stack([text[part] for text in row], dim=1) for row in texts]), device)
            for part in (0, 1)
        )
        places = [Chunk(tuple(unit[1] * size if unit else 0 for unit in units)) for units in now]
        prepared = reader.prepare(tokens, places)
        yield from zip(now, tokens.split(size), labels.split(size), prepared, strict=True)


def _units(readings: Sequence[Reading], queue: Sequence[int]) -> Iterator[_Unit]:
    """Yield (reading, chunk) in the order a row reads them."""
    return ((readings[i], chunk) for i in queue for chunk in range(readings[i].chunks))


def _endless(units: Iterator[_Unit]) -> Iterator[_Unit | None]:
    yield from units
    yield from repeat(None)


class _Totals:
    """Sums in float64 on the device."""

    def __init__(
        self, slots: int, chunk_size: int, edges: Int64, device: torch.device, keep_tokens: bool = False
    ) -> None:
        self.unused = slots
        """Slot of rows without work; not reported."""
        self.device = device
        self.host_edges = edges
        self.edges = to_device(edges, device)
        self.offsets = torch.arange(1, chunk_size + 1, device=device)[:, None]
        self.slots, self.within, self.positions = (
            torch.zeros(3, size, dtype=torch.float64, device=device) for size in (slots + 1, chunk_size, len(edges))
        )
        kept = (slots + 1, chunk_size) if keep_tokens else (0, chunk_size)
        self.tokens = torch.zeros(kept, dtype=torch.float64, device=device)

    def add(self, losses: Tensor, correct: Tensor, scored: Tensor, slots: list[int], begins: list[int]) -> None:
        """Add a call: `losses`, `correct`, `scored` [L, R]; per row its slot and the position of its first token."""
        rows = torch.stack((losses.double(), scored.double(), correct.double()))
        self.within += rows.sum(2)
        chosen = to_device(slots, self.device)
        self.slots.index_add_(1, chosen, rows.sum(1))
        if len(self.tokens):
            self.tokens[chosen] = rows[0].T
        buckets = torch.bucketize(self.offsets + to_device(begins, self.device), self.edges)
        # positions behind a document's end carry no loss; the last bucket takes them
        buckets.clamp_(max=len(self.host_edges) - 1)
        self.positions.index_add_(1, buckets.flatten(), rows.flatten(1))

    def sums(self, topology: Topology | None) -> Sums:
        """Return the sums over data-parallel ranks (and stages: all but the last have zeros), on the host."""
        parts = (self.slots[:, : self.unused], self.within, self.positions, self.tokens[: self.unused])
        flat = torch.cat([part.flatten() for part in parts])
        if topology is not None and topology.dp_size > 1:
            dist.all_reduce(flat, group=topology.dp_group)
        if topology is not None and topology.pp_size > 1:
            dist.all_reduce(flat, group=topology.pp_group)
        slots, within, positions, tokens = flat.cpu().split([part.numel() for part in parts])
        return Sums(
            slots.view(3, -1).numpy(), within.view(3, -1).numpy(), positions.view(3, -1).numpy(), self.host_edges,
            tokens.view(-1, self.tokens.shape[1]).numpy() if len(self.tokens) else None,
        )  # fmt: skip
