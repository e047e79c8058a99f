"""Small corpora, tokenizers and stores for the tests of the data pipeline."""

from pathlib import Path

import numpy as np

from megamem.config.data import DataConfig
from megamem.data.feeder import Feeder
from tokenization.shards import write_shards
from tokenization.train import train

SEQUENCE, CHUNK = 32, 8
WORDS = ("memory", "window", "stream", "chunk", "token", "lane", "segment", "state", "reset", "gate", "head")


class ArrayStore:
    """Documents in memory: token i of document d is 1000 * d + i."""

    end_of_document = 1
    vocab_size = None
    tokenizer_hash = None
    path = "array"
    fingerprint = "array"

    def __init__(self, lengths, shard_ids=None):
        self.lengths = np.asarray(lengths, np.int64)
        shard_ids = np.zeros(len(lengths), np.int64) if shard_ids is None else np.asarray(shard_ids, np.int64)
        self.shard_borders = np.searchsorted(shard_ids, np.arange(shard_ids.max(initial=0) + 2))

    def __len__(self):
        return len(self.lengths)

    def tokens(self, document, start, stop):
        assert 0 <= start <= stop <= self.lengths[document]
        return 1000 * document + np.arange(start, stop, dtype=np.int64)

    def labels(self, document, start, stop):
        return self.tokens(document, start + 1, stop + 1)

    def name(self, document):
        return str(document)


def text_of(words: int, seed: int) -> str:
    generator = np.random.default_rng(seed)
    return " ".join(WORDS[i] for i in generator.integers(0, len(WORDS), words)) + ".\n"


def write_corpus(folder: Path, sizes, seed: int = 0) -> Path:
    """One .txt file per document of `sizes` words."""
    folder.mkdir(parents=True, exist_ok=True)
    for number, words in enumerate(sizes):
        (folder / f"document{number:03d}.txt").write_text(text_of(words, seed + number))
    return folder


def make_tokenizer(folder: Path, vocab_size: int = 300, seed: int = 0):
    return train([text_of(500, seed)], vocab_size, folder)


def make_shards(root: Path, sizes=(40, 700, 5, 300, 1200, 90), name: str = "shards", seed: int = 0, **options) -> Path:
    """Shards in `root/name`, written with the tokenizer in `root/tokenizer`."""
    if not (root / "tokenizer").exists():
        make_tokenizer(root / "tokenizer")
    corpus = write_corpus(root / f"{name}-text", sizes, seed)
    write_shards([corpus], root / "tokenizer", root / name, **{"shard_text_bytes": 4000} | options)
    return root / name


def config_of(root, **changes):
    values = {
        "sources": (str(root / "a"),),
        "sequence_length": SEQUENCE,
        "documents": "drop",
        "cache_folder": root / "cache",
        "seed": 3,
    }
    return DataConfig(**(values | changes))


def feeder_of(root, rows=8, micro=2, dp_rank=0, dp_size=1, chunk=CHUNK, **changes):
    return Feeder(
        config_of(root, **changes),
        chunk_size=chunk,
        global_rows=rows,
        micro_batch_size=micro,
        dp_rank=dp_rank,
        dp_size=dp_size,
    )
