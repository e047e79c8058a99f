"""Batches for training and held-out documents: the batch of any step is a pure function of configuration and step."""

import hashlib
import itertools
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from megamem.config.data import DataConfig
from megamem.data.batch import IGNORED, Batch, EvaluationDocument
from megamem.data.cache import ShardCache
from megamem.data.global_rows import GlobalRows, LaneRows, SequenceRows
from megamem.data.open_store import BareTokens, open_store
from megamem.data.prefetch import Prefetcher
from megamem.data.rows import DocumentSlice, Row, fill_row
from megamem.data.shard_store import ShardStore
from megamem.data.store import DocumentStore, Int64
from megamem.data.tasks.store import TaskStore
from megamem.errors import ConfigError, DataError
from tokenization.text_size import TextCounter
from tokenization.tokenizer import Tokenizer, load_meta


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
        first_sample: int = 0,
    ) -> None:
        """Open every source, held-out ones too, and check what belongs together. Shards are opened when they are read.

        Args:
            config: what is read, and how.
            chunk_size: tokens of a chunk; divides `config.sequence_length`.
            global_rows: rows of an optimizer step over all ranks.
            micro_batch_size: rows of a micro-batch.
            dp_rank: this rank's place among the data-parallel ranks.
            dp_size: number of data-parallel ranks.
            first_sample: number of the first sequence of step 0 in the order of the data; sequences only.

        Raises:
            DataError: a source is missing, damaged or foreign.
            ConfigError: sizes or shares do not fit together.
        """
        _check_sizes(config, chunk_size, global_rows, micro_batch_size, dp_size)
        self.config = config
        self.chunk_size = chunk_size
        self.global_rows = global_rows
        self.micro_batch_size = micro_batch_size
        self.dp_rank = dp_rank
        self.dp_size = dp_size
        self.first_sample = first_sample
        self.accumulation_steps = global_rows // (micro_batch_size * dp_size)
        """Micro-batches of this rank per optimizer step."""
        self.stores = _open_training(config)
        self.held_out = open_stores(config, config.validation)
        _check_same_tokenizer(config, [*self.stores, *self.held_out])
        _check_cache(config, self.stores, global_rows)
        self._vocab_size: int | None = None
        self._rows: GlobalRows = (
            LaneRows(config, self.stores, chunk_size, global_rows)
            if config.feeding == "streams"
            else SequenceRows(config, self.stores, chunk_size, global_rows, first_sample)
        )
        self.reports = self._rows.reports
        """What each training source gives, and what is left out of it."""
        self.padding = self._rows.padding
        """Expected share of padding among the positions of a step."""

    def check_files(self) -> None:
        """Raise DataError naming a local shard that is missing, truncated or foreign; one process does it for all."""
        for store in (*self.stores, *self.held_out):
            if isinstance(store, ShardStore):
                store.check_files()

    def batch(self, step: int, accumulation_index: int = 0) -> Batch:
        """Return micro-batch `accumulation_index` of optimizer step `step` (both from 0) for this rank."""
        assert 0 <= accumulation_index < self.accumulation_steps, accumulation_index
        length, exact = self.config.sequence_length, self.config.reset == "exact"
        first = (accumulation_index * self.dp_size + self.dp_rank) * self.micro_batch_size
        rows = [Row.empty(length, self.chunk_size, begins=exact) for _ in range(self.micro_batch_size)]
        for number, row in enumerate(rows, start=first):
            store = self.stores[self._rows.fill(step, number, row)]
            _check_ids(store, row.tokens, row.labels, self._vocab_size, "model")
        return Batch(
            tokens=torch.from_numpy(np.stack([row.tokens for row in rows], axis=1)),
            labels=torch.from_numpy(np.stack([row.labels for row in rows], axis=1)),
            starts=np.stack([row.starts for row in rows], axis=1),
            sample_ids=tuple(self.first_sample + step * self.global_rows + first + b for b in range(len(rows))),
            begins=np.stack([row.begins for row in rows if row.begins is not None], axis=1) if exact else None,
            padding=sum(row.padding for row in rows),
        )

    def prefetch(self, start_step: int = 0, *, pin_memory: bool = False) -> Prefetcher:
        """Return the endless batches from `start_step` on, in order (step, accumulation), read ahead by a thread.

        pin_memory: put them into page-locked memory, from which copies to a device do not block.
        """
        batches = (
            self.batch(step, accumulation_index)
            for step in itertools.count(start_step)
            for accumulation_index in range(self.accumulation_steps)
        )
        pinned = (batch.pin_memory() for batch in batches) if pin_memory else batches
        return Prefetcher(pinned, self.config.prefetch)

    def check_vocab(self, vocab_size: int) -> None:
        """Raise DataError where a source's token ids do not fit an embedding of `vocab_size` rows.

        The ids of sources that do not state theirs (Megatron's) are checked against this one as they are read, all
        others against their own.
        """
        for store in (*self.stores, *self.held_out):
            if store.vocab_size is not None and store.vocab_size > vocab_size:
                raise DataError(
                    f"{store.path}: its tokens come from a vocabulary of {store.vocab_size}, "
                    f"larger than the model's {vocab_size}"
                )
        self._vocab_size = vocab_size

    def fingerprint(self) -> str:
        """Return a SHA-256 over all training data and everything that decides their order, except the step."""
        config = self.config
        order: dict[str, object] = {
            "sources": [store.fingerprint for store in self.stores],
            "weights": [source.weight for source in config.sources],
            "feeding": config.feeding,
            "sequence_length": config.sequence_length,
            "documents": config.documents,
            "reset": config.reset,
            "seed": config.seed,
            "shuffle_shards": config.shuffle_shards,
            "chunk_size": self.chunk_size,
        }
        if config.feeding == "streams":
            order["lanes"] = self.global_rows
        return hashlib.sha256(json.dumps(order).encode()).hexdigest()


@dataclass(frozen=True)
class HeldOutDocuments:
    """Held-out documents, read anew whenever they are gone through: nobody holds all of them in memory."""

    documents: Sequence[tuple[DocumentStore, int, int]]
    """Store, number in it and first token of each."""
    read: Callable[[DocumentStore, int, int], EvaluationDocument]
    """Reads one."""

    def __len__(self) -> int:
        """Return the number of documents."""
        return len(self.documents)

    def __iter__(self) -> Iterator[EvaluationDocument]:
        """Read the documents in order."""
        return (self.read(store, document, start) for store, document, start in self.documents)


def evaluation_documents(
    config: DataConfig,
    *,
    chunk_size: int,
    sequence_length: int | None = None,
    rank: int = 0,
    ranks: int = 1,
) -> HeldOutDocuments:
    """Return the held-out documents in order, every `ranks`-th from `rank` on, read when they are gone through.

    The first token of a document is read but not predicted, so its bytes are not counted. Documents of fewer
    than two tokens are left out. Sources are opened and checked at once.

    Args:
        config: names the held-out sources and the tokenizer.
        chunk_size: tokens of a chunk; documents are padded to whole chunks.
        sequence_length: a text is cut into pieces of so many predictions, each a document of its own; examples of
            tasks are not. The first pieces of all documents come first, so that a bound on tokens takes some of each.
            Documents are whole if not given.
        rank: number of this reader.
        ranks: number of readers that share the documents.

    Raises:
        DataError: as for training, and where there is no held-out document.
    """
    stores = open_stores(config, config.validation)
    _check_same_tokenizer(config, stores)
    if not stores:
        raise DataError("data.validation: no held-out source is named")
    counter = TextCounter(Tokenizer.load(config.tokenizer).token_bytes()) if config.tokenizer else None
    readable = [
        (store, document, start)
        for store in stores
        for document in np.flatnonzero(store.lengths > 1).tolist()
        for start in _first_tokens(store, document, sequence_length)
    ]
    if not readable:
        raise DataError(f"{stores[0].path}: no held-out document has two tokens")
    readable.sort(key=lambda piece: piece[2])
    return HeldOutDocuments(
        readable[rank::ranks],
        lambda store, document, start: _evaluation_document(
            store, document, start, chunk_size, sequence_length, counter, named=len(stores) > 1
        ),
    )


def _first_tokens(store: DocumentStore, document: int, sequence_length: int | None) -> Sequence[int]:
    """Return where the pieces of a held-out document begin."""
    if sequence_length is None or isinstance(store, TaskStore):
        return (0,)
    return range(0, int(store.lengths[document]) - 1, sequence_length)


def open_stores(config: DataConfig, paths: Sequence[str], join: bool = False) -> list[DocumentStore]:
    """Open sources, remote ones through the configuration's cache of shards; join: documents are joined."""
    cache = ShardCache(Path(config.cache_folder), int(config.cache_gib * 2**30), 60 * config.retry_minutes)
    end = config.end_of_document
    if end is None and config.tokenizer is not None:
        end = load_meta(config.tokenizer).eos_id
    return [open_store(path, cache, BareTokens(end, join, config.raw_tokens)) for path in paths]


def _open_training(config: DataConfig) -> list[DocumentStore]:
    """Open the training sources. Raises DataError for one whose documents cannot be cut or joined as configured."""
    join = config.documents == "join"
    stores = open_stores(config, [source.path for source in config.sources], join)
    for store in stores:
        length = store.config.length if isinstance(store, TaskStore) else 0
        if join and length:
            raise DataError(f"{store.path}: examples of a task cannot be joined and cut; set data.documents: pad")
        if join and store.end_of_document is None:
            raise DataError(
                f"{store.path}: does not state the token that ends its documents, and without one they cannot be "
                "joined; give data.end_of_document or data.tokenizer, or set data.documents: pad"
            )
        if config.feeding == "sequences" and length > config.sequence_length:
            raise DataError(
                f"{store.path}: length {length} is more than data.sequence_length {config.sequence_length}, and its "
                f"examples would be cut; use at least {length}"
            )
    return stores


def _evaluation_document(
    store: DocumentStore,
    document: int,
    start: int,
    chunk_size: int,
    sequence_length: int | None,
    counter: TextCounter | None,
    named: bool = False,
) -> EvaluationDocument:
    """Read a held-out document, or a piece of one.

    counter: of the tokenizer of its text. named: whether the source is part of the name, as others may have the same.
    """
    name, predicted = store.name(document), int(store.lengths[document]) - 1 - start
    if named:
        name = f"{store.path}: {name}"
    if sequence_length is not None and not isinstance(store, TaskStore):
        predicted = min(predicted, sequence_length)
        name = f"{name}, tokens {start:,} to {start + predicted - 1:,}"
    chunks = -(-predicted // chunk_size)
    row = Row.empty(chunks * chunk_size, chunk_size)
    fill_row(store, [DocumentSlice(document, start=start, length=predicted, position=0)], chunk_size, row)
    _check_ids(store, row.tokens, row.labels, None if counter is None else counter.vocab_size, "tokenizer")
    predicted_labels = row.labels[row.labels != IGNORED]
    return EvaluationDocument(
        name=name,
        tokens=torch.from_numpy(row.tokens),
        labels=torch.from_numpy(row.labels),
        predicted_tokens=predicted,
        text_size=None if counter is None else counter.count(predicted_labels),
    )


def _check_sizes(config: DataConfig, chunk_size: int, global_rows: int, micro_batch_size: int, dp_size: int) -> None:
    """Raise ConfigError unless rows hold whole chunks and the batch whole micro-batches."""
    if config.sequence_length % chunk_size:
        raise ConfigError(
            f"data.sequence_length: {config.sequence_length} is not a multiple of the chunk of {chunk_size} tokens"
        )
    if global_rows % (micro_batch_size * dp_size):
        raise ConfigError(
            f"a global batch of {global_rows} rows does not divide into micro-batches of {micro_batch_size} rows "
            f"on {dp_size} data-parallel ranks"
        )


def _check_same_tokenizer(config: DataConfig, stores: Sequence[DocumentStore]) -> None:
    """Raise DataError unless all shards, and the tokenizer folder if one is named, are of one tokenizer."""
    known = [store for store in stores if store.tokenizer_hash is not None]
    if config.tokenizer is not None:
        expected, owner = load_meta(config.tokenizer).sha256, str(config.tokenizer)
    elif known:
        expected, owner = known[0].tokenizer_hash or "", known[0].path
    for store in known:
        if store.tokenizer_hash != expected:
            raise DataError(
                f"{store.path}: written with tokenizer {(store.tokenizer_hash or '')[:12]}, "
                f"but {owner} has {expected[:12]}"
            )


def _check_cache(config: DataConfig, stores: Sequence[DocumentStore], lanes: int) -> None:
    """Raise ConfigError for an order that would fetch remote shards again and again."""
    # groups of shards that are read at about the same time
    groups = lanes if config.feeding == "streams" else 2
    needed = 0
    for store in stores:
        if isinstance(store, ShardStore) and store.cache is not None:
            sizes = [record.size for record in store.index.shards]
            at_once = config.shuffle_shards * groups or len(sizes)
            needed += min(sum(sizes), at_once * max(sizes))
    if needed > config.cache_gib * 2**30:
        raise ConfigError(
            f"data.cache_gib: {config.cache_gib:g} GiB do not hold the {needed / 2**30:.3g} GiB of remote "
            f"shards read at a time; raise it or set a small data.shuffle_shards (now {config.shuffle_shards})"
        )


def _check_ids(store: DocumentStore, tokens: Int64, labels: Int64, vocab_size: int | None, whose: str) -> None:
    """Raise DataError where ids [tokens] are not in the vocabulary that the store states, or else in that of `whose`.

    A source that states its vocabulary has ids outside of it where a shard is damaged.
    """
    if store.vocab_size is not None:
        vocab_size, whose = store.vocab_size, "source"
    if vocab_size is None:
        return
    largest = max(int(tokens.max()), int(labels.max()))
    smallest = min(int(tokens.min()), int(labels[labels != IGNORED].min(initial=0)))
    if largest >= vocab_size or smallest < 0:
        wrong = largest if largest >= vocab_size else smallest
        raise DataError(f"{store.path}: token id {wrong} does not fit the {whose}'s vocabulary of {vocab_size}")
