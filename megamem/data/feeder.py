"""Feeds batches to training: the batch of any step is a pure function of the configuration and the step."""

from collections.abc import Iterator

from megamem.config.data import DataConfig
from megamem.data.batch import Batch, EvaluationDocument


class Feeder:
    """The training batches of one data-parallel rank.

    Rows of the global batch are numbered `accumulation * (dp_size * micro) + dp_rank * micro + b`, so another
    data-parallel size sees the same global batches in the same order.
    """

    def __init__(
        self,
        config: DataConfig,
        *,
        chunk_size: int,
        global_rows: int,
        micro_batch_size: int,
        dp_rank: int = 0,
        dp_size: int = 1,
    ) -> None:
        """Open and check every source. Raises DataError or ConfigError with one clear line."""
        raise NotImplementedError

    def batch(self, step: int, accumulation_index: int = 0) -> Batch:
        """Micro-batch `accumulation_index` of optimizer step `step` (both from 0) for this rank."""
        raise NotImplementedError

    def prefetch(self, start_step: int = 0, *, pin_memory: bool = False) -> "Prefetcher":
        """Batches from `start_step` on, in order (step, accumulation), read ahead by a thread. Endless."""
        raise NotImplementedError

    def check_vocab(self, vocab_size: int) -> None:
        """Raise DataError where a source's token ids do not fit an embedding of `vocab_size` rows."""
        raise NotImplementedError

    def fingerprint(self) -> str:
        """SHA-256 over all training data and everything that decides their order, except the step."""
        raise NotImplementedError


class Prefetcher:
    """Context manager and endless iterator over batches read ahead by one background thread."""

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """The next batch; raises what the thread raised."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop the thread."""
        raise NotImplementedError


def evaluation_documents(
    config: DataConfig,
    *,
    chunk_size: int,
    max_tokens: int | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> Iterator[EvaluationDocument]:
    """Held-out documents in order, every `ranks`-th from `rank` on, each cut to `max_tokens` predictions."""
    raise NotImplementedError
