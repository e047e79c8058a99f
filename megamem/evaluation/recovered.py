"""Recovered share: how much of what local attention loses against full attention a memory wins back.

    share = (L_local - L_memory) / (L_local - L_full)

with L the held-out loss beyond the first chunk of three models on the same tokens: one that attends within chunks only,
one that attends to the whole document, and the one with a memory. 0: as if there were no memory; 1: as if nothing had
been cut off. A model that has learned more besides can lie above 1, one that has become worse below 0.

Intervals are of 95 %, by a bootstrap over documents (Efron, "Bootstrap Methods: Another Look at the Jackknife", 1979):
documents are drawn again with replacement, and the share is computed anew as a ratio of sums.

Letters of shapes: D documents, C chunks, K groups of chunks, B draws.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from megamem.errors import ConfigError, DataError
from megamem.evaluation.reading import Float64
from megamem.evaluation.report import REPORT
from megamem.files import read_json

DRAWS = 10_000
"""Draws of the bootstrap."""
COVERED = (0.025, 0.975)
"""Quantiles of the draws that an interval lies between."""
GAP = "recovered_gap"
"""Figure: what full attention gains on attention within chunks, L_local - L_full, in nats per token."""
OVER_CONTROL = "recovered_over_control"
"""Figure: the share that is recovered beyond that of a model trained alike without a memory."""
BLOCK = 256
"""Draws that are made at once: of 100,000 documents they take 0.2 GB."""
_PIECE = re.compile(r"(?:, tokens [\d,]+ to [\d,]+)+$")  # copies are read in pieces, which may be cut again


def document_of(name: str) -> str:
    """Return the name of a document: that of a piece is followed by where it lies (`evaluation.sequence_length`)."""
    return _PIECE.sub("", name)


class NoGapError(DataError):
    """Full attention is no better than attention within chunks, so that there is nothing to recover."""

    def __init__(self, message: str, gap: float) -> None:
        """Keep the gap. gap: L_local - L_full in nats per token, not above zero."""
        super().__init__(message)
        self.gap = gap


@dataclass(frozen=True)
class MeasuredModel:
    """A model, and the text that its losses are measured on."""

    origin: str
    """Where it or its losses lie, for messages."""
    title: str
    """The model's name, for people."""
    chunk_size: int
    tokenizer: str | None
    """Hash of the tokenizer's vocabulary, if it is known."""
    text_sha256: str
    """Hash of the tokens."""


@dataclass(frozen=True)
class ModelLosses(MeasuredModel):
    """Held-out losses of one model, as an evaluation keeps them."""

    names: tuple[str, ...]
    """Names of the documents; of pieces, that of the document they come from."""
    nats: Float64
    """[D, C] summed cross-entropy of each chunk; zeros where a document has ended."""
    tokens: Float64
    """[D, C] predicted tokens."""
    memory_off_nats: Float64
    """[D, C] the same sums with every chunk read as if its document began there."""

    @classmethod
    def of(cls, result: Mapping[str, Any], origin: str, title: str) -> ModelLosses:
        """Return the losses in an evaluation's result (`EvaluationResult.to_dict`, or its file)."""
        losses = result["losses"]
        documents, off = losses["documents"], result["memory"]["memory_off_documents"]
        return cls(
            origin=origin,
            title=title,
            chunk_size=result["chunk_size"],
            tokenizer=result["tokenizer"],
            text_sha256=losses["text_sha256"],
            names=tuple(document_of(document["name"]) for document in documents),
            nats=_padded([document["chunk_nats"] for document in documents]),
            tokens=_padded([document["chunk_tokens"] for document in documents]),
            memory_off_nats=_padded([document["chunk_nats"] for document in off]),
        )

    @property
    def beyond_first_chunk_loss(self) -> float:
        """Nats per token; not a number where no document is longer than a chunk."""
        return float(self.nats[:, 1:].sum() / self.tokens[:, 1:].sum())

    def by_document(self, called: Sequence[str]) -> ModelLosses:
        """Return the same with the sums of each document's pieces added up.

        called: names of the documents that pieces are of, those of one model for all that are compared.
        """
        names = tuple(dict.fromkeys(called))
        numbers = {name: number for number, name in enumerate(names)}
        rows = np.array([numbers[name] for name in called])

        def joined(table: Float64) -> Float64:
            """Return sums [documents, C] of a table [D, C] of pieces."""
            total = np.zeros((len(names), table.shape[1]))
            np.add.at(total, rows, table)
            return total

        return replace(
            self, names=names, nats=joined(self.nats), tokens=joined(self.tokens),
            memory_off_nats=joined(self.memory_off_nats),
        )  # fmt: skip


def _padded(rows: Sequence[Sequence[float]]) -> Float64:
    """Return rows of different lengths as an array [D, C], filled up with zeros."""
    table = np.zeros((len(rows), max(map(len, rows))))
    for row, values in zip(table, rows, strict=True):
        row[: len(values)] = values
    return table


def read_losses(path: Path) -> ModelLosses:
    """Read the losses that an evaluation has left. path: its file evaluation.json, or the folder of it.

    Raises: DataError where there is no such file, or one that does not hold them.
    """
    file = path / REPORT if path.is_dir() else path
    found = read_json(file)
    try:
        return ModelLosses.of(found, str(file), file.parent.name)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{file}: holds no losses of documents by chunk ({error}); evaluate the model again") from None


@dataclass(frozen=True)
class Interval:
    """A share of the gap, and how well it is known."""

    share: float | None
    """(L_local - L_memory) / (L_local - L_full); None where there is no gap."""
    low: float | None
    """Where 95 % of the draws lie; None for a single document, or if some draw has no gap."""
    high: float | None


@dataclass(frozen=True)
class SharePart:
    """The recovered share of a range of positions in documents."""

    first: int
    """Position: the prediction made after so many tokens of the document."""
    last: int
    """Inclusive."""
    tokens: int
    """Predicted tokens."""
    local_loss: float
    """Nats per token, as the next three."""
    full_loss: float
    memory_loss: float
    memory_off_loss: float
    """The model with the memory, every chunk read as if its document began there."""
    recovered: Interval
    memory_off: Interval
    """What the same model recovers with its memory off: the part that is no memory's, as what it has learned of the
    text's kind."""
    by_memory: Interval
    """The difference of the two: what its memory alone recovers."""


@dataclass(frozen=True)
class RecoveredReport:
    """The recovered share of one model."""

    local: str
    """Names of the three models."""
    full: str
    memory: str
    chunk_size: int
    documents: int
    """Documents that are longer than a chunk: what the bootstrap draws from."""
    beyond_first_chunk: SharePart
    by_position: tuple[SharePart, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)

    def figures(self) -> dict[str, float | None]:
        """Return the single numbers by the names that docs/evaluation.md explains."""
        total = self.beyond_first_chunk
        shares = as_figures(
            {
                "recovered_share": total.recovered,
                "memory_off_recovered_share": total.memory_off,
                "memory_recovered_share": total.by_memory,
            }
        )
        return {GAP: total.local_loss - total.full_loss, **shares}


def as_figures(named: Mapping[str, Interval]) -> dict[str, float | None]:
    """Return shares by name, and the ends of their intervals as NAME_low and NAME_high."""
    return {
        key: value
        for name, found in named.items()
        for key, value in ((name, found.share), (f"{name}_low", found.low), (f"{name}_high", found.high))
    }


def recovered_share(local: ModelLosses, full: ModelLosses, memory: ModelLosses, draws: int = DRAWS) -> RecoveredReport:
    """Return what the model with a memory recovers, overall and by position.

    Raises: ConfigError where the three were not measured on the same tokens in the same chunks; DataError where no
        document is longer than a chunk, or (NoGapError) full attention is no better than local.
    """
    for other in (full, memory):
        check_same(local, other)
    if local.tokens.shape[1] < 2:
        raise DataError(f"{local.origin}: no document is longer than a chunk of {local.chunk_size} tokens")
    sums = _Sums.of(local, full, memory)
    gap = (sums.local - sums.full).sum()
    if not gap > 0:
        beyond = sums.tokens.sum()
        raise NoGapError(
            f"{full.origin}: its loss beyond the first chunk, {sums.full.sum() / beyond:.4f}, is not below the "
            f"{sums.local.sum() / beyond:.4f} of {local.origin}, so there is no gap to recover",
            gap=float(gap / beyond),
        )
    chunks = sums.tokens.shape[1]
    ranges = [slice(0, chunks), *(slice(*ends) for ends in chunk_groups(chunks) if sums.tokens[:, slice(*ends)].any())]
    # all positions from the same draws
    drawn = np.split(_drawn_sums(np.hstack([sums.won(part) for part in ranges]), draws), len(ranges), axis=1)
    whole, *parts = (sums.part(part, local.chunk_size, own) for part, own in zip(ranges, drawn, strict=True))
    return RecoveredReport(
        local=local.title,
        full=full.title,
        memory=memory.title,
        chunk_size=local.chunk_size,
        documents=len(sums.tokens),
        beyond_first_chunk=whole,
        by_position=tuple(parts),
    )


def share_over_control(
    local: ModelLosses, full: ModelLosses, memory: ModelLosses, control: ModelLosses, draws: int = DRAWS
) -> Interval:
    """Return how much more of the gap a model recovers than another one, as one trained alike without a memory.

    Both are measured on the same documents: what makes a document hard for both cancels in the interval.

    Raises: as `recovered_share`, of the control too.
    """
    check_same(local, control)
    # the control takes the place of the model with its memory off
    other = replace(memory, memory_off_nats=control.nats)
    return recovered_share(local, full, other, draws).beyond_first_chunk.by_memory


def check_same(ours: MeasuredModel, theirs: MeasuredModel) -> None:
    """Raise ConfigError where two models are not measured on the same tokens in the same chunks."""
    pair = f"{theirs.origin} and {ours.origin}"
    if ours.tokenizer != theirs.tokenizer:
        hashes = [(own or "no tokenizer")[:12] for own in (theirs.tokenizer, ours.tokenizer)]
        raise ConfigError(
            f"{pair}: have different tokenizers ({' and '.join(hashes)}); losses per token can be compared where "
            "tokens are the same"
        )
    if ours.chunk_size != theirs.chunk_size:
        raise ConfigError(
            f"{pair}: have chunks of {theirs.chunk_size} and {ours.chunk_size} tokens; evaluate both with the same "
            "model.chunk_size"
        )
    if ours.text_sha256 != theirs.text_sha256:
        raise ConfigError(
            f"{pair}: are not evaluated on the same text; both need the same data.validation, "
            "evaluation.sequence_length and evaluation.final_max_tokens"
        )


def chunk_groups(chunks: int) -> list[tuple[int, int]]:
    """Group the chunks behind the first by their distance from the document's start, as half octaves of positions.

    Returns: first chunk and the one behind the last, counted from the second chunk of a document, which is 0.
    """
    borders = {round(2 ** (half / 2)) for half in range(2 * (chunks + 1).bit_length() + 1)}
    edges = sorted({border - 1 for border in borders if border - 1 < chunks} | {chunks})
    return list(zip(edges[:-1], edges[1:], strict=True))


@dataclass(frozen=True)
class _Sums:
    """Sums of documents [D, C] over their chunks behind the first: nats of each model, and tokens."""

    local: Float64
    full: Float64
    memory: Float64
    off: Float64
    tokens: Float64

    @classmethod
    def of(cls, local: ModelLosses, full: ModelLosses, memory: ModelLosses) -> _Sums:
        """Add up the pieces of each document, and leave out its first chunk and documents that have no more."""
        local, full, memory = (model.by_document(memory.names) for model in (local, full, memory))
        tables = (local.nats, full.nats, memory.nats, memory.memory_off_nats, local.tokens)
        long = local.tokens[:, 1:].sum(1) > 0
        return cls(*(table[long, 1:] for table in tables))

    def won(self, chunks: slice) -> Float64:
        """Return what some of the chunks of each document lose less than with local attention, in nats, [D, 3].

        With full attention, with the memory, and with the memory off.
        """
        local, full, memory, off = (table[:, chunks].sum(1) for table in (self.local, self.full, self.memory, self.off))
        return np.stack((local - full, local - memory, local - off), axis=1)

    def part(self, chunks: slice, size: int, drawn: Float64) -> SharePart:
        """Return the share of some of the chunks. size: tokens of a chunk; drawn: [B, 3], sums of `won`."""
        local, full, memory, off, tokens = (
            table[:, chunks].sum(1) for table in (self.local, self.full, self.memory, self.off, self.tokens)
        )
        count = tokens.sum()
        return SharePart(
            first=(chunks.start + 1) * size + 1,
            last=(chunks.stop + 1) * size,
            tokens=int(count),
            local_loss=float(local.sum() / count),
            full_loss=float(full.sum() / count),
            memory_loss=float(memory.sum() / count),
            memory_off_loss=float(off.sum() / count),
            recovered=_interval(local - memory, local - full, drawn[:, 1], drawn[:, 0]),
            memory_off=_interval(local - off, local - full, drawn[:, 2], drawn[:, 0]),
            by_memory=_interval(off - memory, local - full, drawn[:, 1] - drawn[:, 2], drawn[:, 0]),
        )


def _drawn_sums(table: Float64, draws: int) -> Float64:
    """Return the sums [B, K] of a table [D, K] over documents drawn with replacement, the same in every call."""
    documents, generator = len(table), np.random.default_rng(0)
    chance = np.full(documents, 1 / documents)
    blocks = [min(BLOCK, draws - begin) for begin in range(0, draws, BLOCK)]
    # how often each document is drawn, times what it has
    return np.concatenate([generator.multinomial(documents, chance, size=block) @ table for block in blocks])


def _interval(won: Float64, gap: Float64, won_drawn: Float64, gap_drawn: Float64) -> Interval:
    """Return the ratio of the sums of `won` [D] and `gap` [D], and where most of the ratios of drawn sums [B] lie."""
    if not gap.sum() > 0:
        return Interval(None, None, None)
    share = float(won.sum() / gap.sum())
    if len(gap) < 2 or not (gap_drawn > 0).all():
        return Interval(share, None, None)
    low, high = np.quantile(won_drawn / gap_drawn, COVERED)
    return Interval(share, float(low), float(high))
