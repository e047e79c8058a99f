"""The word-level tokenizer of WikiText-103: its vocabulary is the words of the training text.

A word is what stands between white space, and the end of a line is a token, as in Transformer-XL. Pieces are spelt as
WikiText's files are laid out, each word after a space and each line break too, so that such a file comes back from
decoding byte by byte, and bits per byte divide by its size.
"""

from collections import Counter
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Regex, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as FastTokenizer

from megamem.errors import ConfigError, DataError
from tokenization.tokenizer import END_OF_LINE, Tokenizer, save
from tokenization.train import EOS

UNKNOWN = "<unk>"
"""The word in the place of unknown ones; WikiText-103 itself has it where a word is rare."""
SMALLEST = 3
"""Smallest vocabulary: the end of a document, the end of a line and the unknown word."""
# what str.split() splits at, so that the tokens are the words that were counted; \s lacks U+001C to U+001F
_WORD_OR_LINE = Regex(r"\n|[^\s\x1c-\x1f]+")
_BYTE_LEVEL = pre_tokenizers.ByteLevel(add_prefix_space=True, use_regex=False)


def train_words(texts: Iterable[str], folder: Path, vocab_size: int | None = None, min_count: int = 1) -> Tokenizer:
    """Write the tokenizer of the words of `texts` to `folder`; the same texts give the same file.

    Ids: the end of a document is 0, the end of a line 1, then come the words, frequent ones first. All words that are
    left out, or that other texts have, are `<unk>`.

    Args:
        texts: the training text.
        folder: where the tokenizer goes.
        vocab_size: most tokens, the end of a document, the end of a line and `<unk>` included; no limit if not given.
        min_count: times that a word must occur.

    Raises:
        ConfigError: the vocabulary is smaller than 3.
        DataError: no word in the texts, or a folder in use.
    """
    if vocab_size is not None and vocab_size < SMALLEST:
        raise ConfigError(f"vocab_size: {vocab_size} is too small; a word-level tokenizer needs at least {SMALLEST}")
    counts: Counter[str] = Counter()
    for text in texts:
        counts.update(text.split())
    if not counts:
        raise DataError("the corpus is empty: no word to make a tokenizer of")
    vocabulary = [EOS, END_OF_LINE, *map(_spelt, _kept(counts, vocab_size, min_count))]
    tokenizer = FastTokenizer(
        models.WordLevel({piece: i for i, piece in enumerate(vocabulary)}, unk_token=_spelt(UNKNOWN))
    )
    words_and_lines = pre_tokenizers.Split(_WORD_OR_LINE, "removed", invert=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words_and_lines, _BYTE_LEVEL])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([EOS])
    data = tokenizer.to_str(pretty=True).encode("utf-8")
    return save(folder, "word-level", data, ".json", eos_id=0, bos_id=None)


def _kept(counts: Counter[str], vocab_size: int | None, min_count: int) -> list[str]:
    """Return the words of the vocabulary, frequent ones first, `<unk>` with all that it stands for among them."""
    # by spelling where counts are equal: the order of the texts changes nothing
    words = sorted(
        (word for word, count in counts.items() if count >= min_count and word != UNKNOWN),
        key=lambda word: (-counts[word], word),
    )
    if vocab_size is not None:
        words = words[: vocab_size - SMALLEST]
    unknown = counts.total() - sum(counts[word] for word in words)
    place = sum(counts[word] >= unknown for word in words)
    return [*words[:place], UNKNOWN, *words[place:]]


def _spelt(word: str) -> str:
    """Return a word and the space before it in the byte-level alphabet."""
    return _BYTE_LEVEL.pre_tokenize_str(f" {word}")[0][0]
