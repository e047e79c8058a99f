"""The words of a document, as runs of its tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from megamem.evaluation.stream_text import INCOMPLETE

Decode = Callable[[Sequence[int]], str]
"""The function from token ids to text."""


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f\ud800-\udfff\ufffe\uffff]")
"""Characters that HTML, JSON and fonts have no place for."""


def clean(text: str) -> str:
    """Return a text with a replacement character for each one that cannot be shown."""
    return _CONTROL.sub("\ufffd", text)


@dataclass(frozen=True)
class Word:
    """A stretch of the text between white space, or one token."""

    begin: int
    """Number in its document of the first token."""
    end: int
    """Number of the token after the last one."""
    text: str
    """The text as it stands, white space before it included, but for what `clean` replaces."""

    def __post_init__(self) -> None:
        """Replace what cannot be shown."""
        object.__setattr__(self, "text", clean(self.text))


def split_words(ids: Sequence[int], decode: Decode) -> list[Word]:
    """Return the words of a document; together they hold all its tokens."""
    words: list[Word] = []
    for piece in split_pieces(ids, decode):
        last = words[-1] if words else None
        # white space on its own belongs to the word after it
        if last is None or (last.text.strip() and (piece.text[:1].isspace() or last.text[-1:].isspace())):
            words.append(piece)
        else:
            words[-1] = Word(last.begin, piece.end, last.text + piece.text)
    return words


def split_pieces(ids: Sequence[int], decode: Decode) -> list[Word]:
    """Return the tokens of a document with their text; those that share a character are taken together."""
    pieces: list[Word] = []
    before: Sequence[int] = ()
    start = 0
    while start < len(ids):
        # decoded behind the piece before, as some tokenizers drop the space in front of what comes first
        context = decode(before)
        for end in range(start + 1, min(start + 4, len(ids)) + 1):
            text = decode([*before, *ids[start:end]]).removeprefix(context)
            if not text.endswith(INCOMPLETE):
                break
        else:
            # no character at all: one token on its own
            end = start + 1
            text = decode([*before, *ids[start:end]]).removeprefix(context)
        pieces.append(Word(start, end, text))
        before, start = (ids[start:end] if text else before), end
    return pieces


def number_tokens(ids: Sequence[int]) -> list[Word]:
    """Return the tokens of a document that has no text, each with its id."""
    return [Word(number, number + 1, f" {token}") for number, token in enumerate(ids)]


def between(words: Sequence[Word], begin: int, end: int) -> list[Word]:
    """Return the words with tokens from `begin` to `end` - 1; of one that goes beyond, the tokens in between count."""
    return [
        Word(max(word.begin, begin), min(word.end, end), word.text)
        for word in words
        if word.begin < end and word.end > begin
    ]
