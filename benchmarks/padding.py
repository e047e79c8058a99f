"""Padding of the ways in which documents become rows, for documents of log-normal lengths.

python -m benchmarks.padding
"""

from __future__ import annotations

import argparse

import numpy as np

from megamem.config.data import DataConfig
from megamem.data.global_rows import LaneRows, SequenceRows

CASES = (("sequences", ("join", "pack", "pad", "drop")), ("streams", ("join", "pad")))


class Lengths:
    """A store of documents that have a length and no tokens."""

    path, fingerprint, vocab_size, tokenizer_hash, end_of_document = "lengths", "", None, None, 1

    def __init__(self, lengths: np.ndarray) -> None:
        """Take [documents] token counts."""
        self.lengths = lengths
        self.shard_borders = np.array([0, len(lengths)])

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.lengths)


def main() -> None:
    """Print a line for each feeding and each way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--mean", type=float, default=1000.0)
    parser.add_argument("--deviation", type=float, default=1.0, help="of the logarithm of the lengths")
    parser.add_argument("--chunk", type=int, default=2048)
    parser.add_argument("--sequence", type=int, default=4096)
    parser.add_argument("--rows", type=int, default=128)
    given = parser.parse_args()
    location = np.log(given.mean) - given.deviation**2 / 2
    drawn = np.random.default_rng(0).lognormal(location, given.deviation, given.documents)
    store = Lengths(np.maximum(drawn, 2).astype(np.int64))
    for feeding, ways in CASES:
        for documents in ways:
            config = DataConfig(
                sources="lengths",  # type: ignore[arg-type]
                feeding=feeding,  # type: ignore[arg-type]
                documents=documents,  # type: ignore[arg-type]
                sequence_length=given.sequence,
            )
            kind = LaneRows if feeding == "streams" else SequenceRows
            (report,) = kind(config, [store], given.chunk, given.rows).reports  # type: ignore[list-item]
            left_out = report.dropped_tokens / report.tokens
            print(f"{feeding:9s} {documents:4s}  padding {report.padding_share:6.1%}  left out {left_out:6.1%}")


if __name__ == "__main__":
    main()
