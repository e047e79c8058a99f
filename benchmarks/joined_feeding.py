"""Feeding a corpus of web size from joined documents: start-up, memory and tokens per second of one process.

The corpus is made of holes: 100 million documents of log-normal lengths are listed in a real table of documents, but
their shards are sparse files with nothing but tar headers, so the disk is not filled; tokens are zeros. The rest is
what a run does. About 3 GB of disk and a minute to make.

    python -m benchmarks.joined_feeding /tmp/holes
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from pathlib import Path
from tarfile import TarInfo

import numpy as np

from megamem.config.data import DataConfig
from megamem.data.feeder import Feeder
from megamem.data.shard_store import ShardStore
from megamem.files import sha256_file
from tokenization.shard_format import (
    DOCUMENT,
    DOCUMENTS_FILE,
    INDEX_FILE,
    TAR_BLOCK,
    FileRecord,
    ShardHeader,
    ShardIndex,
    key_of,
)

MEAN, DEVIATION = 1000, 1.0
"""Mean tokens of a document, and standard deviation of the logarithm of their number."""
PER_SHARD = 8192
"""Documents of a shard: some 16 MB."""
SEQUENCE, CHUNK, ROWS = 4096, 2048, 8


def lengths(documents: int) -> Iterator[np.ndarray]:
    """Token counts of the documents of each shard."""
    generator = np.random.default_rng(0)
    for first in range(0, documents, PER_SHARD):
        drawn = generator.lognormal(np.log(MEAN) - DEVIATION**2 / 2, DEVIATION, min(PER_SHARD, documents - first))
        yield np.maximum(drawn, 2).astype(np.int64)


def make(folder: Path, documents: int) -> None:
    """Write the corpus of holes."""
    folder.mkdir(parents=True)
    table = np.lib.format.open_memmap(folder / DOCUMENTS_FILE, "w+", DOCUMENT, (documents,))
    records, first = [], 0
    for number, tokens in enumerate(lengths(documents)):
        # a header and the tokens, then a header and half a block of JSON, all in whole blocks
        sizes = TAR_BLOCK + -(-2 * tokens // TAR_BLOCK) * TAR_BLOCK + 2 * TAR_BLOCK
        starts = np.cumsum(sizes) - sizes
        part = table[first : first + len(tokens)]
        part["shard"], part["tokens"], part["offset"], part["text_bytes"] = (
            number,
            tokens,
            starts + TAR_BLOCK,
            4 * tokens,
        )
        path = folder / f"shard-{number:06d}.tar"
        with path.open("wb") as file:
            for document in (0, len(tokens) - 1):
                member = TarInfo(f"{key_of(first + document)}.tokens")
                member.size = 2 * int(tokens[document])
                file.seek(int(starts[document]))
                file.write(member.tobuf())
            file.truncate(int(sizes.sum()))
        records.append(FileRecord(path.name, int(sizes.sum()), "0" * 64))
        first += len(tokens)
    table.flush()
    size = (folder / DOCUMENTS_FILE).stat().st_size
    header = ShardHeader("uint16", "0" * 64, 50_000, 1, "0" * 64, 1 << 25)
    total = int(sum(int(tokens.sum()) for tokens in lengths(documents)))
    documents_file = FileRecord(DOCUMENTS_FILE, size, sha256_file(folder / DOCUMENTS_FILE))
    index = ShardIndex(header, tuple(records), documents_file, documents, total, 4 * total)
    (folder / INDEX_FILE).write_text(json.dumps(index.to_dict()))


def memory() -> dict[str, float]:
    """GiB that belong to this process alone, and GiB of mapped files, whose pages all processes share."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return {name: int(fields[key].split()[0]) / 2**20 for name, key in (("own", "RssAnon"), ("shared", "RssFile"))}


def measure(folder: Path, feeding: str, reset: str, shuffle_shards: int, seconds: float) -> None:
    """Print what one rank of 8 takes to start and to feed."""
    config = DataConfig.model_validate(
        {
            "sources": str(folder), "documents": "join", "feeding": feeding, "reset": reset,
            "sequence_length": SEQUENCE, "shuffle_shards": shuffle_shards,
        }
    )  # fmt: skip
    before, start, processor = memory(), time.perf_counter(), time.process_time()
    feeder = Feeder(config, chunk_size=CHUNK, global_rows=8 * ROWS, micro_batch_size=ROWS, dp_rank=3, dp_size=8)
    feeder.batch(0)
    started, started_processor, now = time.perf_counter() - start, time.process_time() - processor, memory()
    (store,) = feeder.stores
    assert isinstance(store, ShardStore)
    begin, processor = time.perf_counter(), time.process_time()
    for first in store.shard_borders[:-1].tolist():
        store.tokens(first, 0, 1)
    opened, opened_processor = time.perf_counter() - begin, time.process_time() - processor
    step, begin, processor, took = 1, time.perf_counter(), time.process_time(), []
    while time.perf_counter() - begin < seconds:
        batch_began = time.perf_counter()
        feeder.batch(step)
        took.append(time.perf_counter() - batch_began)
        step += 1
    millions = ROWS * SEQUENCE / 1e6
    print(
        f"{feeding}, reset {reset}, shuffle_shards {shuffle_shards}: first batch after {started:.2f} s "
        f"({started_processor:.2f} s of the processor), {now['own'] - before['own']:.3f} GiB own, "
        f"{now['shared'] - before['shared']:.2f} GiB shared; all shards opened once in {opened:.2f} s "
        f"({opened_processor:.2f}); then million tokens/s: "
        f"{millions / np.mean(took):.1f}, of the fastest tenth of the batches {millions / np.quantile(took, 0.1):.1f}, "
        f"a second of the processor {millions * len(took) / (time.process_time() - processor):.1f}"
    )


def main() -> None:
    """Make the corpus if it is not there, and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--documents", type=int, default=100_000_000)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--feeding", choices=["sequences", "streams"], default="sequences")
    parser.add_argument("--reset", choices=["none", "exact"], default="none")
    parser.add_argument("--shuffle-shards", type=int, default=0)
    given = parser.parse_args()
    if not given.folder.exists():
        make(given.folder, given.documents)
    measure(given.folder, given.feeding, given.reset, given.shuffle_shards, given.seconds)


if __name__ == "__main__":
    main()
