"""Sliding-window perplexity of models that read text in chunks and carry a memory from chunk to chunk."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megamem.data.batch import EvaluationDocument
from megamem.errors import ConfigError
from megamem.evaluation.losses import (
    LEAST_CHUNKS,
    bits_per_byte,
    cut_documents,
    first_slots,
    perplexity,
    total_bytes,
    whole_readings,
)
from megamem.evaluation.reading import Int64, Progress, Reader, Reading
from megamem.model.stage import Stage
from megamem.parallel.topology import Topology


@dataclass(frozen=True)
class SlidingReport:
    """Every token scored once, with at least `chunk - stride` tokens of local context besides the memory."""

    stride: int
    chunk: int
    tokens: int
    text_bytes: int | None
    loss: float
    """Nats per token."""
    perplexity: float
    bits_per_byte: float | None
    plain_loss: float
    """The same tokens read once from start to end."""
    plain_perplexity: float

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
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


def sliding_losses(
    stage: Stage,
    documents: Iterable[EvaluationDocument],
    *,
    topology: Topology | None,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    stride: int | None = None,
    max_tokens: int | None = None,
    token_bytes: Int64 | None = None,
    least: int = LEAST_CHUNKS,
    progress: Progress | None = None,
) -> SlidingReport:
    """Score each token late in its chunk: the documents are read once per offset, from that token on.

    A collective call like `evaluate_losses`, whose arguments it shares; costs about chunk / stride + 1 of its passes.

    Args:
        stride: scored tokens per chunk; divides the chunk. A quarter of it if not given.
        least: chunks below which no document is cut while documents can be left out instead.
        progress: called with (calls made, calls of all), first for the plain reading, then for the sliding one.
    Raises: ConfigError where the stride does not divide the chunk.
    """
    size = stage.config.chunk_size
    stride = stride or default_stride(size)
    check_stride(stride, size)
    chosen = cut_documents(documents, size, max_tokens, token_bytes, least)
    reader = Reader(stage, topology=topology, device=device, dtype=dtype, rows=rows, progress=progress)
    plain = reader.read(whole_readings(chosen, size)).slots.sum(1)
    nats, tokens, _ = (float(x) for x in reader.read(sliding_readings(chosen, size, stride)).slots.sum(1))
    assert tokens == plain[1], "every token is scored once"
    text_bytes = total_bytes(chosen)
    return SlidingReport(
        stride=stride,
        chunk=size,
        tokens=int(tokens),
        text_bytes=text_bytes,
        loss=nats / tokens,
        perplexity=perplexity(nats / tokens),
        bits_per_byte=bits_per_byte(nats, text_bytes),
        plain_loss=float(plain[0] / plain[1]),
        plain_perplexity=perplexity(float(plain[0] / plain[1])),
    )
