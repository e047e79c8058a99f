"""Sliding-window perplexity of models that read text in chunks and carry a memory from chunk to chunk."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megamem.data.batch import EvaluationDocument
from megamem.errors import ConfigError
from megamem.evaluation.losses import (
    bits_per_byte,
    bits_per_character,
    first_slots,
    perplexity,
    word_perplexity,
    word_perplexity_with_line_ends,
)
from megamem.evaluation.reading import Reading, Sums
from tokenization.text_size import TextSize


@dataclass(frozen=True)
class SlidingReport:
    """Every token scored once, with at least `chunk - stride` tokens of local context besides the memory."""

    stride: int
    chunk: int
    tokens: int
    text_size: TextSize | None
    loss: float
    """Nats per token."""
    perplexity: float
    bits_per_byte: float | None
    bits_per_character: float | None
    word_perplexity: float | None
    word_perplexity_with_line_ends: float | None
    plain_loss: float
    """The same tokens read once from start to end."""
    plain_perplexity: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)


def check_stride(stride: int, chunk: int) -> None:
    """Raise ConfigError unless `stride` divides `chunk`."""
    if stride < 1 or chunk % stride:
        raise ConfigError(f"evaluation.sliding_stride {stride} does not divide model.chunk_size {chunk}")


def default_stride(chunk: int) -> int:
    """Return a quarter of the chunk; the nearest shorter divisor where four does not divide it."""
    return next(stride for stride in range(max(chunk // 4, 1), 0, -1) if chunk % stride == 0)


def sliding_readings(documents: Sequence[EvaluationDocument], size: int, stride: int) -> list[Reading]:
    """Return, for each document and each offset 0, stride, .., size - stride, the document from there on.

    Only the last `stride` tokens of a chunk are scored, at offset 0 the whole first chunk too. All chunks of a
    document are summed up in its own run of slots.
    """
    readings = []
    for document, slot in zip(documents, first_slots(documents, size), strict=True):
        for offset in range(0, size, stride):
            chunks = -(-(document.predicted_tokens - offset) // size)
            # a last chunk that ends before its scored part begins is not read
            end = document.predicted_tokens - offset - (chunks - 1) * size
            if end <= size - stride and not (offset == 0 and chunks == 1):
                chunks -= 1
            if chunks > 0:
                readings.append(Reading(document, offset, chunks, slot, stride, size if offset == 0 else stride))
    return readings


def sliding_report(
    documents: Sequence[EvaluationDocument], plain: Sums, sliding: Sums, size: int, stride: int
) -> SlidingReport:
    """Return the report from the sums over `whole_readings` and over `sliding_readings` of the documents."""
    plain_nats, plain_tokens, _ = (float(x) for x in plain.slots.sum(1))
    nats, tokens, _ = (float(x) for x in sliding.slots.sum(1))
    assert tokens == plain_tokens, "every token is scored once"
    text_size = TextSize.sum(document.text_size for document in documents)
    return SlidingReport(
        stride=stride,
        chunk=size,
        tokens=int(tokens),
        text_size=text_size,
        loss=nats / tokens,
        perplexity=perplexity(nats / tokens),
        bits_per_byte=bits_per_byte(nats, text_size),
        bits_per_character=bits_per_character(nats, text_size),
        word_perplexity=word_perplexity(nats, text_size),
        word_perplexity_with_line_ends=word_perplexity_with_line_ends(nats, text_size),
        plain_loss=plain_nats / plain_tokens,
        plain_perplexity=perplexity(plain_nats / plain_tokens),
    )
