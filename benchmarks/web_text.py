"""From documents of web size to token shards: tokens per second of a core, and bytes of a token on disk.

The texts of a folder are cut into documents of log-normal lengths (mean 5,000 characters, about 1,000 tokens), written
as parquet and as .jsonl.zst, read, tokenized and written to shards in one process. Times are those of the processor.

    megamem corpus fetch runs/corpus
    python -m benchmarks.web_text runs/corpus/train
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TypeVar

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from benchmarks.common import table
from tokenization.shards import write_shards
from tokenization.sources import documents, input_files
from tokenization.train import train

MEAN, DEVIATION = 5000, 1.0
"""Mean characters of a document, and standard deviation of the logarithm of their number."""
T = TypeVar("T")


def cut(texts: Sequence[str]) -> list[str]:
    """The texts, cut into documents."""
    generator, cuts = np.random.default_rng(0), []
    for text in texts:
        first = 0
        while first < len(text):
            size = int(generator.lognormal(np.log(MEAN) - DEVIATION**2 / 2, DEVIATION)) + 1
            cuts.append(text[first : first + size])
            first += size
    return cuts


def timed(function: Callable[[], T]) -> tuple[T, float]:
    """What the function returns, and the seconds of the processor that it took."""
    start = time.process_time()
    return function(), time.process_time() - start


def _count(source: Path) -> int:
    """The number of documents, all of them read."""
    return sum(1 for _ in documents(input_files([source])))


def measure(folder: Path, texts: Sequence[str], vocab_size: int) -> list[list[str]]:
    """Rows of the table, one for each format."""
    pq.write_table(pa.table({"text": texts}), folder / "web.parquet", compression="zstd")
    lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (folder / "web.jsonl.zst").write_bytes(zstandard.compress(lines.encode()))
    _, seconds = timed(lambda: train(texts, vocab_size, folder / "tokenizer"))
    size = sum(len(text.encode()) for text in texts)
    rows = [["training the tokenizer (MB of text/s of the processor)", f"{size / seconds / 1e6:.2f}"]]
    for name in ("web.parquet", "web.jsonl.zst"):
        source, shards = folder / name, folder / f"{name}-shards"
        count, reading = timed(partial(_count, source))
        index, writing = timed(partial(write_shards, [source], folder / "tokenizer", shards))
        assert count == index.documents
        stored = sum(path.stat().st_size for path in shards.iterdir())
        rows += [
            [f"`{name}`: reading alone, MB of text/s of a core", f"{size / reading / 1e6:.0f}"],
            [f"`{name}`: tokens/s of a core, from file to shards", f"{index.tokens / writing:,.0f}"],
            [f"`{name}`: bytes of a token in the file", f"{source.stat().st_size / index.tokens:.2f}"],
            [f"`{name}`: bytes of a token in the shards", f"{stored / index.tokens:.2f}"],
        ]
    rows += [
        ["documents", f"{index.documents:,}"],
        ["tokens, with ends", f"{index.tokens:,}"],
        ["bytes of text a token", f"{size / index.tokens:.2f}"],
    ]
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("corpus", type=Path, help="folder of .txt files")
    parser.add_argument("--vocab-size", type=int, default=32_000)
    options = parser.parse_args(arguments)
    texts = cut([document.text for document in documents(input_files([options.corpus]))])
    with tempfile.TemporaryDirectory() as folder:
        print(table(["", ""], measure(Path(folder), texts, options.vocab_size)))


if __name__ == "__main__":
    main()
