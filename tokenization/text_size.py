"""How much text tokens stand for, in bytes, characters, words and lines.

These are the divisors of figures that no tokenizer changes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt


@dataclass(frozen=True)
class TextSize:
    """The size of a text."""

    bytes: int
    """UTF-8 bytes."""
    characters: int
    """Unicode code points. Of a character that is cut by an end of the text, its first byte counts."""
    words: int
    """Longest runs of bytes without ASCII white space, as `bytes.split` gives them."""
    lines: int
    """Line breaks."""

    @classmethod
    def sum(cls, sizes: Iterable[TextSize | None]) -> TextSize | None:
        """Add the sizes of texts that are kept apart; None if one of them is not known."""
        known = list(sizes)
        if None in known:
            return None
        fields = ("bytes", "characters", "words", "lines")
        return cls(*(sum(getattr(size, field) for size in known) for field in fields))


class TextCounter:
    """Gives the size of the text of tokens from tables of the vocabulary; the text itself is never made."""

    def __init__(self, token_bytes: Sequence[bytes]) -> None:
        """token_bytes: the bytes that each token of the vocabulary stands for (`Tokenizer.token_bytes`)."""
        self.bytes = _table(map(len, token_bytes))
        """[vocab_size] bytes of each token."""
        # bytes 10xxxxxx continue a character
        self.characters = _table(sum(byte & 0xC0 != 0x80 for byte in token) for token in token_bytes)
        """[vocab_size] characters that begin in each token."""
        self.words = _table(len(token.split()) for token in token_bytes)
        """[vocab_size] words of each token on its own."""
        self.lines = _table(token.count(b"\n") for token in token_bytes)
        """[vocab_size] line breaks in each token."""
        self._first_in_word = np.array([not token[:1].isspace() for token in token_bytes])
        self._last_in_word = np.array([not token[-1:].isspace() for token in token_bytes])

    @property
    def vocab_size(self) -> int:
        """Tokens of the vocabulary."""
        return len(self.bytes)

    def count(self, ids: npt.NDArray[np.integer]) -> TextSize:
        """Return the size of the text that tokens stand for together. ids: [tokens]."""
        # special tokens stand for nothing, and part no words
        ids = ids[self.bytes[ids] > 0]
        # a word that goes on from one token into the next was counted in both
        joined = np.count_nonzero(self._last_in_word[ids[:-1]] & self._first_in_word[ids[1:]])
        return TextSize(
            bytes=int(self.bytes[ids].sum()),
            characters=int(self.characters[ids].sum()),
            words=int(self.words[ids].sum() - joined),
            lines=int(self.lines[ids].sum()),
        )


def _table(numbers: Iterable[int]) -> npt.NDArray[np.int64]:
    return np.fromiter(numbers, dtype=np.int64)
