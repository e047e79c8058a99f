"""The training of a byte-level BPE tokenizer."""

from collections.abc import Iterable, Iterator
from pathlib import Path

from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers, trainers

from megamem.errors import ConfigError, DataError
from tokenization.tokenizer import Tokenizer, save

EOS = "<|endoftext|>"
SMALLEST = 257
"""Smallest vocabulary: 256 bytes and the end of a document."""


def train(texts: Iterable[str], vocab_size: int, folder: Path) -> Tokenizer:
    """Train on `texts` and write the tokenizer to `folder`; the same texts give the same file.

    `decode(encode(text)) == text` for any text. Fewer tokens than `vocab_size` result where the texts hold too few
    pairs.

    Raises:
        ConfigError: the vocabulary is smaller than 257.
        DataError: an empty corpus, or a folder in use.
    """
    if vocab_size < SMALLEST:
        raise ConfigError(f"vocab_size: {vocab_size} is too small; byte-level BPE needs at least {SMALLEST}")
    tokenizer = FastTokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[EOS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    count = _Counted(texts)
    tokenizer.train_from_iterator(count, trainer)
    if count.characters == 0:
        raise DataError("the corpus is empty: no text to train a tokenizer on")
    # special tokens come first
    assert tokenizer.token_to_id(EOS) == 0
    data = tokenizer.to_str(pretty=True).encode("utf-8")
    return save(folder, "byte-level-bpe", data, ".json", eos_id=0, bos_id=None)


class _Counted:
    """Passes texts on and counts their characters."""

    def __init__(self, texts: Iterable[str]) -> None:
        """Begin to count at 0."""
        self.texts = texts
        self.characters = 0

    def __iter__(self) -> Iterator[str]:
        for text in self.texts:
            self.characters += len(text)
            yield text
