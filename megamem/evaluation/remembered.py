"""What a memory helps to predict: the gain of each held-out token by how long ago the same token was last read.

A token that occurs again after its first occurrence has left the chunk can be known from the memory alone, one that is
new to the document cannot. Where a memory holds what was read, it is the former that gain.

Letters of shapes: T tokens of a document.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from megamem.data.batch import IGNORED, EvaluationDocument
from megamem.errors import DataError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.reading import Bool, Float64, Int64, Progress
from megamem.evaluation.recovered import document_of
from megamem.evaluation.suites.result import ratio_and_error

FAR = 8
"""Chunks beyond which an occurrence counts as far."""
LEAST_LETTERS = 4
"""Letters that a token shown as an example has at least: a part of a name or a word, not a syllable or a comma."""
LEAST_BEFORE = 8
"""Tokens of its chunk before an example at least: without the memory, too, the model has a text to go by."""
_NEVER, _IN_CHUNK = -1, 0


@dataclass(frozen=True)
class RepeatedTokens:
    """Predicted tokens beyond the first chunks whose last occurrence lies in one range."""

    last_read: str
    """The range, as tables name it."""
    tokens: int
    loss: float
    """Nats per token, as the next three."""
    memory_off_loss: float
    """The same weights, with every chunk read as if its document began there."""
    gain: float
    """The difference."""
    stderr: float | None
    """Standard error of the gain over documents; None for a single one."""


@dataclass(frozen=True)
class Example:
    """One token that the memory makes more probable."""

    document: str
    before: str
    """Text of the chunk up to the token: all that the model sees without its memory."""
    token: str
    probability: float
    memory_off_probability: float
    distance: int
    """Tokens since the same token was last read, before the chunk."""


@dataclass(frozen=True)
class RememberedReport:
    """What a model's memory helps to predict."""

    chunk_size: int
    documents: int
    groups: tuple[RepeatedTokens, ...]
    """The last one is of all tokens."""
    examples: tuple[Example, ...]
    """Those that become more probable by the most first, one for each document and token."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)


def remembered(
    evaluator: Evaluator,
    documents: Sequence[EvaluationDocument],
    decode: Callable[[Sequence[int]], str],
    examples: int = 10,
    progress: Callable[[str], Progress] | None = None,
) -> RememberedReport:
    """Read documents with the memory and without it, and tell which tokens gain.

    Args:
        documents: in whole chunks.
        decode: returns the text of token ids.
        examples: how many to show at most.
        progress: gives the function that is told of the calls of a named pass.

    Raises: DataError where no document is longer than a chunk.
    """
    size = evaluator.stage.config.chunk_size
    on, off = (
        evaluator.token_losses(documents, forget=forget, progress=progress(name) if progress else None)
        for name, forget in (("held-out loss", False), ("memory off", True))
    )
    read = [_Document.of(*parts, size) for parts in zip(documents, on, off, strict=True)]
    read = [document for document in read if len(document.loss)]
    if not read:
        raise DataError(f"held-out text: no document is longer than a chunk of {size} tokens")
    return RememberedReport(
        chunk_size=size,
        documents=len({document_of(document.name) for document in read}),
        groups=tuple(group for name, chosen in _ranges(size) if (group := _group(name, chosen, read)) is not None),
        examples=tuple(_examples(read, decode, examples, size)),
    )


def last_read(tokens: Sequence[int], labels: Sequence[int], size: int) -> Int64:
    """Return for each label [T] how long ago the same token was last read: a distance in tokens, the next one being 1.

    0: it was read in the chunk that is being read. -1: it has not been read in this document.

    Args:
        tokens: ids that are read, [T].
        labels: ids that are predicted after each of them, [T].
        size: tokens of a chunk.
    """
    seen: dict[int, int] = {}
    found = np.empty(len(tokens), np.int64)
    for place, (token, label) in enumerate(zip(tokens, labels, strict=True)):
        seen[token] = place
        last = seen.get(label)
        if last is None:
            found[place] = _NEVER
        else:
            found[place] = _IN_CHUNK if last >= place - place % size else place + 1 - last
    return found


@dataclass(frozen=True)
class _Document:
    """Predicted tokens of one document, or of a piece of one, behind its first chunk, [N]."""

    name: str
    tokens: list[int]
    """All tokens of the document."""
    places: Int64
    labels: Int64
    distance: Int64
    """See `last_read`."""
    loss: Float64
    off: Float64

    @classmethod
    def of(cls, document: EvaluationDocument, loss: Float64, off: Float64, size: int) -> _Document:
        """Take losses [T] of a document's tokens."""
        tokens, labels = _ids(document.tokens), _ids(document.labels)
        distance = last_read(tokens, labels, size)
        places = np.array([place for place in range(size, len(labels)) if labels[place] != IGNORED], np.int64)
        return cls(
            document.name, tokens, places, np.array(labels, np.int64)[places], distance[places],
            loss[places], off[places],
        )  # fmt: skip


def _ids(tokens: Tensor) -> list[int]:
    """Return token ids [T] as plain numbers."""
    return [int(token) for token in tokens.tolist()]


def _ranges(size: int) -> list[tuple[str, Callable[[Int64], Bool]]]:
    """Return where a token can have been read last: names, and which distances they stand for."""
    near, far = 2 * size, FAR * size
    return [
        ("in the same chunk", lambda distance: distance == _IN_CHUNK),
        (f"before it, up to {near:,} ago", lambda distance: (distance > 0) & (distance <= near)),
        (f"{near + 1:,} to {far:,} ago", lambda distance: (distance > near) & (distance <= far)),
        (f"more than {far:,} ago", lambda distance: distance > far),
        ("never", lambda distance: distance == _NEVER),
        ("all", lambda distance: distance >= _NEVER),
    ]


def _group(name: str, chosen: Callable[[Int64], Bool], documents: Sequence[_Document]) -> RepeatedTokens | None:
    """Return the figures of chosen tokens; None where there are none."""
    masks = [chosen(document.distance) for document in documents]
    pairs = [(document, mask) for document, mask in zip(documents, masks, strict=True) if mask.any()]
    if not pairs:
        return None
    counts = [float(mask.sum()) for _, mask in pairs]
    loss, off = (
        sum(float(getattr(document, what)[mask].sum()) for document, mask in pairs) / sum(counts)
        for what in ("loss", "off")
    )
    # pieces of one document are no independent draws
    sums: dict[str, list[float]] = {}
    for (document, mask), count in zip(pairs, counts, strict=True):
        row = sums.setdefault(document_of(document.name), [0.0, 0.0])
        row[0] += float((document.off - document.loss)[mask].sum())
        row[1] += count
    return RepeatedTokens(name, int(sum(counts)), loss, off, *ratio_and_error(*zip(*sums.values(), strict=True)))


def _examples(
    documents: Sequence[_Document], decode: Callable[[Sequence[int]], str], count: int, size: int
) -> list[Example]:
    """Return words that were read before their chunk and become more probable by the most."""
    best: dict[tuple[str, int], tuple[float, _Document, int]] = {}
    for document in documents:
        gains = np.exp(-document.loss) - np.exp(-document.off)
        for index in np.flatnonzero((document.distance > 0) & (document.places % size >= LEAST_BEFORE - 1)).tolist():
            gain, key = float(gains[index]), (document_of(document.name), int(document.labels[index]))
            if gain > best.get(key, (0.0,))[0]:
                best[key] = (gain, document, index)
    shown: list[Example] = []
    for _, document, index in sorted(best.values(), key=lambda entry: -entry[0]):
        if len(shown) == count:
            break
        token, place = decode([int(document.labels[index])]), int(document.places[index])
        if sum(map(str.isalpha, token)) >= LEAST_LETTERS:
            shown.append(
                Example(
                    document=document.name,
                    before=decode(document.tokens[place - place % size : place + 1]),
                    token=token,
                    probability=float(np.exp(-document.loss[index])),
                    memory_off_probability=float(np.exp(-document.off[index])),
                    distance=int(document.distance[index]),
                )
            )
    return shown
