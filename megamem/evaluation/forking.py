"""Scores and continuations of many requests: what they share is read once, and its state forked for each of them.

A state is a plain tree of tensors, so forking is a selection of batch rows. All rows of a batch stand at the same place
of their documents: those that go on from a shared prefix are padded on the right where they are scored, and where they
are continued, a row whose prompt is longer reads its next tokens while the others already write.

Letters: N requests, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.evaluation.decoding import Decoder, generating, side_by_side
from megamem.evaluation.reading import Progress
from megamem.evaluation.shared_prefixes import Batch, plan_batches
from megamem.memory.base import LABEL_IGNORED, Chunk
from megamem.pipeline.reader import ChunkReader, RowGroup, select_rows

SPREAD = 32
"""Tokens by which prompts of one batch may differ in length: read one by one beside the others' first new tokens."""
LOGIT_POSITIONS = 4096
"""Positions whose logits are in memory at once, at most."""
Stop = Callable[[int, list[int]], bool]
"""Told the index of a prompt and its new tokens after each of them; True ends it."""


class ForkedReader:
    """Reads requests through a model, on one process or on all ranks of it.

    A collective object: every rank makes the same calls with the same requests and gets the same answers.
    Data-parallel ranks share each batch, and make the same calls of the model on their parts.
    """

    def __init__(self, reader: ChunkReader, rows: int, progress: Progress | None = None) -> None:
        """Read `rows` requests side by side on each data-parallel rank.

        progress: told how many batches are done, after each batch and, so that a watchdog hears of long texts, after
            each call of the model.
        """
        self.reader, self.stage, self.topology = reader, reader.stage, reader.topology
        self.rows, self.progress = rows, progress
        self.rank, self.ranks = (self.topology.dp_rank, self.topology.dp_size) if self.topology else (0, 1)
        self._kept: tuple[tuple[int, tuple[tuple[int, ...], ...]], list[RowGroup]] | None = None
        """Prefixes of the last batch (their number of tokens, their sources on each rank) and this rank's states."""
        self._next: Batch | None = None
        """The batch after the one that is being read."""

    def score(self, sequences: Sequence[Sequence[int]], scored: Sequence[int]) -> list[tuple[float, bool]]:
        """Return the log-probability of the last tokens of each sequence in nats, and whether each is the likeliest.

        Args:
            sequences: token ids.
            scored: how many tokens of each are scored; fewer than it has.
        Raises: ValueError for a sequence that has no token before those that are scored.
        """
        for sequence, count in zip(sequences, scored, strict=True):
            if not 0 < count < len(sequence):
                raise ValueError(f"{count} tokens of {len(sequence)} cannot be scored; the first follows no token")
        most = [len(sequence) - count - 1 for sequence, count in zip(sequences, scored, strict=True)]
        # nats, and tokens that are not the likeliest
        found = torch.zeros(2, len(sequences), dtype=torch.float64, device=self.reader.device)
        batches = plan_batches(sequences, most, self.rows * self.ranks)
        with self._reading():
            for done, batch in enumerate(batches):
                with self._telling(done, batches):
                    self._score_batch(batch, sequences, scored, found)
        nats, wrong = self._over_ranks(found).tolist()
        return [(value, count == 0) for value, count in zip(nats, wrong, strict=True)]

    def _score_batch(
        self, batch: Batch, sequences: Sequence[Sequence[int]], scored: Sequence[int], found: Tensor
    ) -> None:
        """Add the scores of a batch to `found` [2, N], which only the last stage has."""
        rests = [len(sequences[i]) - batch.shared for i in batch.members]
        first = min(rest - scored[i] - 1 for i, rest in zip(batch.members, rests, strict=True))
        own = batch.part(self.rank, self.ranks)
        decoder = self._forked(batch, own, sequences)
        tokens, labels = side_by_side(
            [sequences[i][batch.shared :] for i in own.members], [scored[i] for i in own.members], max(rests) - 1
        )
        if first:
            decoder.read_hidden(tokens[:first], self._place(batch.shared, own), keep=0)
        index = torch.tensor(own.members, device=found.device)
        size = self.stage.config.chunk_size
        for begin in range(first, len(tokens), size):
            part, wanted = tokens[begin : begin + size], labels[begin : begin + size].to(found.device)
            hidden = decoder.read_hidden(part, self._place(batch.shared + begin, own), keep=len(part))
            if hidden is None:
                continue
            # the same calls on all data-parallel ranks: the output head may be gathered in each
            step = max(LOGIT_POSITIONS * self.ranks // len(batch.members), 1)
            for some, known in zip(hidden.split(step), wanted.split(step), strict=True):
                losses, correct = self.stage.token_scores(some, known)
                wrong = (known != LABEL_IGNORED) & ~correct
                sums = torch.stack((-losses.double().sum(0), wrong.double().sum(0)))
                if self._owns(batch):
                    found.index_add_(1, index, sums)

    def continue_greedily(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        end_token: int | None = None,
        stop: Stop | None = None,
    ) -> list[list[int]]:
        """Return the likeliest tokens behind each prompt, one after the other; the end token is among them.

        Args:
            prompts: token ids.
            limits: new tokens of each prompt at most.
            end_token: a prompt's continuation ends with it.
            stop: ends continuations too.
        Raises: ValueError for an empty prompt.
        """
        if not all(prompts):
            raise ValueError("generation needs at least one token of each prompt")
        most = [len(prompt) - 1 for prompt in prompts]
        batches = plan_batches(prompts, most, self.rows * self.ranks, SPREAD)
        # new tokens + 1, so that 0 is where nothing was written
        written = torch.zeros(len(prompts), max(limits, default=0), dtype=torch.int64)
        with self._reading():
            for done, batch in enumerate(batches):
                own = batch.part(self.rank, self.ranks)
                with self._telling(done, batches):
                    new = self._continue_batch(batch, own, prompts, limits, end_token, stop)
                if self._owns(batch):
                    for index, row in zip(own.members, new, strict=True):
                        written[index, : len(row)] = torch.tensor(row, dtype=torch.int64) + 1
        written = self._over_data_parallel(written.to(self.reader.device)).cpu()
        return [[token - 1 for token in row if token] for row in written.tolist()]

    def _continue_batch(
        self,
        batch: Batch,
        own: Batch,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        end_token: int | None,
        stop: Stop | None,
    ) -> list[list[int]]:
        """Return the new tokens of each of this rank's members."""
        shortest = min(len(prompts[i]) for i in batch.members)
        rows: list[list[int]] = [[] for _ in own.members]
        ended = [limits[i] < 1 for i in own.members]
        decoder = self._forked(batch, own, prompts)
        tokens = torch.tensor([list(prompts[i][batch.shared : shortest]) for i in own.members]).T
        logits = decoder.read(tokens, self._place(batch.shared, own))
        at, going = shortest, not self._all_agree(all(ended))
        while going:
            likeliest = decoder.agree(None if logits is None else logits[0].argmax(-1).cpu()).tolist()
            for row, index in enumerate(own.members):
                if at < len(prompts[index]):
                    likeliest[row] = prompts[index][at]
                elif not ended[row]:
                    rows[row].append(likeliest[row])
                    ended[row] = (
                        len(rows[row]) == limits[index]
                        or likeliest[row] == end_token
                        or (stop is not None and stop(index, rows[row]))
                    )
            going = not self._all_agree(all(ended))
            if going:
                logits = decoder.read(torch.tensor([likeliest]), self._place(at, own))
            at += 1
        return rows

    def _forked(self, batch: Batch, own: Batch, sequences: Sequence[Sequence[int]]) -> Decoder:
        """Return what reads this rank's members on from position `batch.shared`; prefixes are read once."""
        decoder = Decoder(self.reader, len(own.members))
        parts = [batch.part(rank, self.ranks) for rank in range(self.ranks)]
        most_rows = max(len(part.members) for part in parts)
        if not batch.shared:
            self.reader.most_rows = most_rows
            return decoder
        sources = own.prefixes
        key = self._key(batch)
        if self._kept is None or self._kept[0] != key:
            self._kept = None  # the last one's states are given back before others are made
            self.reader.most_rows = max(len(part.prefixes) for part in parts)
            tokens = torch.tensor([list(sequences[i][: batch.shared]) for i in sources]).T
            prefixes = Decoder(self.reader, len(sources))
            prefixes.read_hidden(tokens, Chunk((0,) * len(sources)), keep=0)
            assert prefixes.groups is not None
            self._kept = key, prefixes.groups
        rows = [sources.index(source) for source in own.sources]
        groups = self._kept[1]
        if self._next is None or self._key(self._next) != key:
            self._kept = None  # on all ranks; where no prefix has several members here, its states are handed over
        once = self._kept is None and rows == list(range(len(sources)))
        decoder.groups = groups if once else select_rows(self.stage.state_specs, groups, rows)
        self.reader.most_rows = most_rows
        return decoder

    def _key(self, batch: Batch) -> tuple[int, tuple[tuple[int, ...], ...]]:
        """Return what prefixes all ranks read for a batch, so that they read anew, or not, together."""
        return batch.shared, tuple(batch.part(rank, self.ranks).prefixes for rank in range(self.ranks))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        """Read requests inside a `with` statement; states that were kept meanwhile are given back at its end."""
        try:
            with generating(self.stage):
                yield
        finally:
            self._kept, self.reader.most_rows = None, 0

    @contextmanager
    def _telling(self, done: int, batches: Sequence[Batch]) -> Iterator[None]:
        """Read a batch inside a `with` statement, after `done` of all `batches`, and report progress."""
        progress = self.progress or (lambda done, of: None)
        self._next = batches[done + 1] if done + 1 < len(batches) else None
        with self.reader.telling(partial(progress, done, len(batches))):
            yield
        progress(done + 1, len(batches))

    @staticmethod
    def _place(position: int, batch: Batch) -> Chunk:
        """Return where the batch's rows stand: all at the same position of their documents."""
        return Chunk((position,) * len(batch.members))

    def _owns(self, batch: Batch) -> bool:
        """Return whether this data-parallel rank has members of a batch, or only reads along."""
        return self.rank * -(-len(batch.members) // self.ranks) < len(batch.members)

    def _over_data_parallel(self, values: Tensor) -> Tensor:
        """Return the sum of values [...] over data-parallel ranks."""
        if self.topology is not None and self.ranks > 1:
            dist.all_reduce(values, group=self.topology.dp_group)
        return values

    def _over_ranks(self, values: Tensor) -> Tensor:
        """Return the sum of values [...] over data-parallel ranks and stages, of which all but the last have zeros."""
        values = self._over_data_parallel(values)
        if self.topology is not None and self.topology.pp_size > 1:
            dist.all_reduce(values, group=self.topology.pp_group)
        return values

    def _all_agree(self, done: bool) -> bool:
        """Return whether all data-parallel ranks are done: they make the same calls of the model until then."""
        if self.ranks == 1:
            return done
        waiting = self._over_data_parallel(torch.tensor(0 if done else 1, device=self.reader.device))
        return int(waiting) == 0
