"""LZMA on exactly the text a model predicted: a figure that any model should beat."""

from __future__ import annotations

import lzma
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megamem.data.batch import IGNORED, EvaluationDocument
from tokenization.tokenizer import Tokenizer

PRESET = 9 | lzma.PRESET_EXTREME
_PIECE_BYTES = 1 << 18


@dataclass(frozen=True)
class LzmaDocument:
    """One document compressed on its own."""

    name: str
    text_bytes: int
    bits_per_byte: float


@dataclass(frozen=True)
class LzmaReport:
    """Sizes as `xz -9e` makes them, its container of some 60 bytes included."""

    text_bytes: int
    bits_per_byte: float
    """All documents joined into one stream: LZMA may use the earlier ones for the later ones."""
    separate_bits_per_byte: float
    """Each document compressed on its own."""
    documents: tuple[LzmaDocument, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)


def lzma_baseline(documents: Sequence[EvaluationDocument], tokenizer: Tokenizer) -> LzmaReport | None:
    """Compress what the documents' labels spell, joined and one by one; None if they spell nothing."""
    token_bytes = tokenizer.token_bytes()
    texts = [predicted_text(document, token_bytes) for document in documents]
    text_bytes = sum(map(len, texts))
    if not text_bytes:
        return None
    sizes = [_compressed_size([text]) for text in texts]
    joined = _compressed_size(texts) if len(texts) > 1 else sizes[0]
    return LzmaReport(
        text_bytes=text_bytes,
        bits_per_byte=8 * joined / text_bytes,
        separate_bits_per_byte=8 * sum(sizes) / text_bytes,
        documents=tuple(
            LzmaDocument(document.name, len(text), 8 * size / len(text))
            for document, text, size in zip(documents, texts, sizes, strict=True)
            if text
        ),
    )


def predicted_text(document: EvaluationDocument, token_bytes: Sequence[bytes]) -> bytes:
    """Return the bytes of the document's labels, even where its ends fall inside a UTF-8 sequence."""
    labels = document.labels[document.labels != IGNORED]
    return b"".join(token_bytes[i] for i in labels.tolist())


def _compressed_size(texts: Iterable[bytes]) -> int:
    compressor = lzma.LZMACompressor(preset=PRESET)
    size = 0
    for text in texts:
        for start in range(0, len(text), _PIECE_BYTES):
            size += len(compressor.compress(text[start : start + _PIECE_BYTES]))
    return size + len(compressor.flush())
