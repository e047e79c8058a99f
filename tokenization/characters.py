"""Tokenizers without learning: one of the characters that occur in a text, and one of the 256 bytes.

Pieces are spelt in the byte-level alphabet, so that bits per byte divide by the UTF-8 of what is decoded.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from megamem.errors import DataError
from tokenization.tokenizer import Tokenizer, save
from tokenization.train import EOS

UNKNOWN = "\ufffd"
"""Character in the place of unknown ones, Unicode's replacement character: a text keeps its number of characters."""
_CHARACTER = Regex(r"[\s\S]")
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def train_characters(texts: Iterable[str], folder: Path, min_count: int = 1) -> Tokenizer:
    """Write the tokenizer of the characters of `texts` to `folder`; the same texts give the same file.

    Ids: the end of a document is 0, the unknown character 1, then come the characters, sorted by code point.

    Args:
        texts: the training text.
        folder: where the tokenizer goes.
        min_count: times that a character must occur; others are unknown.

    Raises:
        DataError: no text, or a folder in use.
    """
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text)
    if not counts:
        raise DataError("the corpus is empty: no character to make a tokenizer of")
    kept = sorted(character for character, count in counts.items() if count >= min_count and character != UNKNOWN)
    vocabulary = [EOS, *map(_spelt, [UNKNOWN, *kept])]
    tokenizer = FastTokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token=_spelt(UNKNOWN))
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(_CHARACTER, "isolated"), _BYTE_LEVEL])
    return _saved(tokenizer, folder, "character-level")


def byte_tokenizer(folder: Path) -> Tokenizer:
    """Write the tokenizer of the 256 bytes to `folder`: the end of a document is 0, byte b is b + 1."""
    # a BPE that merges nothing leaves the bytes
    tokenizer = FastTokenizer(models.BPE({piece: i for i, piece in enumerate([EOS, *_letters()])}, []))
    tokenizer.pre_tokenizer = _BYTE_LEVEL
    return _saved(tokenizer, folder, "byte-level")


def _saved(tokenizer: FastTokenizer, folder: Path, kind: Literal["character-level", "byte-level"]) -> Tokenizer:
    """Write a tokenizer whose pieces are in the byte-level alphabet and whose first one is the end of a document."""
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    return save(folder, kind, tokenizer.to_str(pretty=True).encode("utf-8"), ".json", eos_id=0, bos_id=None)


def _spelt(character: str) -> str:
    """Return a character in the byte-level alphabet."""
    return _BYTE_LEVEL.pre_tokenize_str(character)[0][0]


def _letters() -> list[str]:
    """Return the letter of each byte in the byte-level alphabet: its own in Latin-1, or the next one from U+0100 on."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    others = iter(sorted(letter for letter in alphabet if ord(letter) > 255))
    return [chr(byte) if chr(byte) in alphabet else next(others) for byte in range(256)]
