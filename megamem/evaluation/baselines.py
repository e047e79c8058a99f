"""LZMA on exactly the text a model predicted: a figure that any model should beat."""

from __future__ import annotations

import lzma
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
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
    pieces = token_pieces(tokenizer)
    texts = [predicted_text(document, pieces) for document in documents]
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


def predicted_text(document: EvaluationDocument, pieces: Sequence[bytes]) -> bytes:
    """Return the bytes of the document's labels, even where its ends fall inside a UTF-8 sequence."""
    labels = document.labels[document.labels != IGNORED]
    return b"".join(pieces[i] for i in labels.tolist())


def token_pieces(tokenizer: Tokenizer) -> list[bytes]:
    """[vocabulary] the bytes of text each token stands for, as `Tokenizer.byte_lengths` counts them."""
    spell = _byte_level() if tokenizer.meta.byte_pieces else None
    return [_spelt(piece, spell) for piece in tokenizer.backend.pieces()]


def _spelt(piece: str, byte_level: dict[str, int] | None) -> bytes:
    if byte_level is not None:
        # a token added to the vocabulary by hand is spelt in plain text
        return bytes(map(byte_level.__getitem__, piece)) if byte_level.keys() >= set(piece) else piece.encode()
    if re.fullmatch(r"<0x[0-9A-F]{2}>", piece):
        return bytes([int(piece[3:5], 16)])
    return piece.replace("▁", " ").encode()


def _byte_level() -> dict[str, int]:
    """Byte of each letter of the byte-level alphabet: printable Latin-1 is itself, other bytes follow from U+0100."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = (byte for byte in range(256) if byte not in printable)
    return dict(
        chain(((chr(byte), byte) for byte in printable), ((chr(256 + n), byte) for n, byte in enumerate(others)))
    )


def _compressed_size(texts: Iterable[bytes]) -> int:
    compressor = lzma.LZMACompressor(preset=PRESET)
    size = 0
    for text in texts:
        for start in range(0, len(text), _PIECE_BYTES):
            size += len(compressor.compress(text[start : start + _PIECE_BYTES]))
    return size + len(compressor.flush())
