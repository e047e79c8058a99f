"""Rows of the global batch: which source each comes from, and what fills it."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from fractions import Fraction

import numpy as np

from megamem.config.data import DataConfig
from megamem.data.joined_rows import JoinedSequences, JoinedStreams
from megamem.data.order import Mixture, quotas
from megamem.data.rows import Row, SourceReport
from megamem.data.sequences import SequencePlan
from megamem.data.store import DocumentStore, Int64
from megamem.data.streams import StreamPlan
from megamem.errors import ConfigError


class GlobalRows(ABC):
    """All rows of all steps, as a pure function of the configuration, the step and the row's number."""

    reports: tuple[SourceReport, ...]
    """What each source gives, and what is left out of it."""
    shares: tuple[Fraction, ...]
    """The share of the rows that each source has."""

    @property
    def padding(self) -> Fraction:
        """The expected share of padding among the positions of a step: that of the sources' epochs, by their shares."""
        pairs = zip(self.shares, self.reports, strict=True)
        return sum((share * report.padding_share for share, report in pairs), Fraction(0))

    @abstractmethod
    def fill(self, step: int, number: int, row: Row) -> int:
        """Read row `number` of the global batch of `step` into `row`; return the number of its source."""


class SequenceRows(GlobalRows):
    """Sequences, mixed from the sources by weight."""

    def __init__(
        self,
        config: DataConfig,
        stores: Sequence[DocumentStore],
        chunk_size: int,
        global_rows: int,
        first_sample: int = 0,
    ) -> None:
        """Cut the sources into sequences. Raises DataError where one gives none, ConfigError for too small a share.

        first_sample: number of the first sequence of step 0 in the mixture.
        """
        self.global_rows = global_rows
        self.first_sample = first_sample
        self._mixture = Mixture([source.weight for source in config.sources], config.seed)
        self.shares = _shares(self._mixture.quotas)
        self._sources = [_sequences(config, store, chunk_size, source) for source, store in enumerate(stores)]
        self.reports = tuple(source.report for source in self._sources)

    def fill(self, step: int, number: int, row: Row) -> int:
        """See `GlobalRows.fill`."""
        source, sample = self._mixture.locate(self.first_sample + step * self.global_rows + number)
        self._sources[source].fill(sample, row)
        return source


class LaneRows(GlobalRows):
    """Lanes, shared out to the sources by weight."""

    def __init__(self, config: DataConfig, stores: Sequence[DocumentStore], chunk_size: int, global_rows: int) -> None:
        """Deal the sources out to lanes. Raises DataError for a source too small, ConfigError for too small a share."""
        counts = quotas([source.weight for source in config.sources], global_rows)
        if not counts.all():
            empty = config.sources[int(np.argmin(counts))].path
            raise ConfigError(
                f"data.sources: with {global_rows} lanes, {empty} gets none; use more rows or a larger weight"
            )
        self.shares = _shares(counts)
        self._lanes = [(source, lane) for source, count in enumerate(counts) for lane in range(int(count))]
        self._sources = [
            _streams(config, store, chunk_size, source, int(counts[source])) for source, store in enumerate(stores)
        ]
        self.reports = tuple(source.report for source in self._sources)

    def fill(self, step: int, number: int, row: Row) -> int:
        """See `GlobalRows.fill`."""
        source, lane = self._lanes[number]
        self._sources[source].fill(lane, step, row)
        return source


def _shares(counts: Int64) -> tuple[Fraction, ...]:
    """Return what each of [sources] counts is of their sum."""
    return tuple(Fraction(count, int(counts.sum())) for count in counts.tolist())


def _sequences(
    config: DataConfig, store: DocumentStore, chunk_size: int, source: int
) -> JoinedSequences | SequencePlan:
    """Cut a source into sequences."""
    length, seed, shards = config.sequence_length, (config.seed, source), config.shuffle_shards
    if config.documents == "join":
        return JoinedSequences(
            store,
            sequence_length=length,
            chunk_size=chunk_size,
            reset=config.reset == "exact",
            seed=seed,
            shuffle_shards=shards,
        )
    return SequencePlan(
        store,
        sequence_length=length,
        chunk_size=chunk_size,
        documents=config.documents,
        seed=seed,
        shuffle_shards=shards,
    )


def _streams(
    config: DataConfig, store: DocumentStore, chunk_size: int, source: int, lanes: int
) -> JoinedStreams | StreamPlan:
    """Deal a source out to lanes."""
    length, seed, shards = config.sequence_length, (config.seed, source), config.shuffle_shards
    if config.documents == "join":
        return JoinedStreams(
            store,
            sequence_length=length,
            chunk_size=chunk_size,
            lanes=lanes,
            reset=config.reset == "exact",
            seed=seed,
            shuffle_shards=shards,
        )
    return StreamPlan(
        store,
        chunk_size=chunk_size,
        chunks_per_step=length // chunk_size,
        lanes=lanes,
        seed=seed,
        shuffle_shards=shards,
    )
