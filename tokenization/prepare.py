"""The preparation of data from nothing: a corpus, a tokenizer trained on it, and the token shards of each split."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Literal

from megamem.errors import ConfigError
from megamem.files import require_space
from tokenization import corpus, sources
from tokenization.characters import byte_tokenizer, train_characters
from tokenization.parts import Part
from tokenization.readers import InputFile
from tokenization.shards import files_of, write_shards
from tokenization.tokenizer import Tokenizer, check_unused
from tokenization.train import train
from tokenization.words import train_words

TOKENIZER_BYTES = 32 << 20
"""Room that a tokenizer may need on disk: the largest in use take about 20 MB."""
SPLITS = ("train", "validation", "test")

Progress = Callable[[str, int], AbstractContextManager[Callable[[int], None]]]
"""Shows progress: called with a label and the total of bytes, it gives a context with the function that advances it."""
Product = Literal["corpus", "tokenizer", "shards"]
TrainedKind = Literal["bpe", "word", "character", "byte"]
"""Tokenizers that are made here: byte-level BPE, words, characters, bytes."""
BPE_TOKENS = 32_000
"""Vocabulary of a BPE where none is asked for."""


def train_on_files(
    inputs: Sequence[str | Path],
    folder: Path,
    vocab_size: int | None,
    progress: Progress,
    field: str = "text",
    kind: TrainedKind = "bpe",
    min_count: int | None = None,
) -> Tokenizer:
    """Train a tokenizer on files, folders or patterns of text and write it to `folder`.

    See `train`, `train_words`, `train_characters` and `byte_tokenizer`, which reads no text.

    Raises: ConfigError or DataError naming what is wrong.
    """
    _check_options(kind, inputs, vocab_size, min_count)
    check_unused(folder)  # before the corpus is read
    require_space(folder, TOKENIZER_BYTES)
    if kind == "byte":
        return byte_tokenizer(folder)
    files = sources.input_files(inputs, field)

    def texts(advance: Callable[[int], None]) -> Iterator[str]:
        for document in sources.documents(files):
            yield document.text
            advance(document.source_bytes)

    with progress("reading", sum(file.size for file in files)) as advance:
        if kind == "word":
            return train_words(texts(advance), folder, vocab_size, min_count or 1)
        if kind == "character":
            return train_characters(texts(advance), folder, min_count or 1)
        return train(texts(advance), BPE_TOKENS if vocab_size is None else vocab_size, folder)


def _check_options(
    kind: TrainedKind, inputs: Sequence[str | Path], vocab_size: int | None, min_count: int | None
) -> None:
    """Raise ConfigError for an option that this kind of tokenizer has no use for, or text that it lacks."""
    if kind == "bpe" and min_count is not None:
        raise ConfigError(
            f"--min-count {min_count}: counts words or characters, and a BPE learns parts of words; "
            "give --kind word or --kind character"
        )
    if kind == "byte" and min_count is not None:
        raise ConfigError(f"--min-count {min_count}: --kind byte has all 256 bytes; leave it out")
    if kind in ("character", "byte") and vocab_size is not None:
        what = "all characters that occur --min-count times" if kind == "character" else "256 bytes and an end"
        raise ConfigError(f"--vocab-size {vocab_size}: --kind {kind} has {what}; leave it out")
    if kind == "byte" and inputs:
        raise ConfigError(f"{inputs[0]}: --kind byte reads no text; leave it out")
    if kind != "byte" and not inputs:
        raise ConfigError(f"--kind {kind}: needs text to read; name files or folders")


def write_from_files(
    inputs: Sequence[str | Path],
    tokenizer: Path,
    folder: Path,
    progress: Progress,
    workers: int = 1,
    shard_text_bytes: int | None = None,
    part: Part | None = None,
    field: str = "text",
) -> None:
    """Tokenize files, folders or patterns of text into shards in `folder`; see `write_shards`.

    Raises: ConfigError or DataError naming what is wrong.
    """
    files: Sequence[InputFile] = sources.input_files(inputs, field)
    total = sum(file.size for file in (files_of(part, files) if part else files))
    with progress("tokenizing", total) as advance:
        write_shards(
            inputs, tokenizer, folder, workers=workers, shard_text_bytes=shard_text_bytes, part=part, field=field,
            on_progress=advance,
        )  # fmt: skip


def prepare(
    folder: Path, corpus_name: str, vocab_size: int, workers: int, progress: Progress
) -> Iterator[tuple[Product, Path]]:
    """Make corpus/, tokenizer/ and shards/SPLIT in `folder`, and yield each with its folder when it is there.

    What is there already is checked and kept. Raises: MegamemError naming what is wrong.
    """
    texts, words = folder / "corpus", folder / "tokenizer"
    corpus.fetch(texts, corpus_name)
    yield "corpus", texts
    if words.exists():
        Tokenizer.load(words)
    else:
        train_on_files([texts / "train"], words, vocab_size, progress)
    yield "tokenizer", words
    for split in SPLITS:
        if (texts / split).is_dir():  # not every corpus has all
            write_from_files([texts / split], words, folder / "shards" / split, progress, workers)
            yield "shards", folder / "shards" / split
