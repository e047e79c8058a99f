"""The one object that reads with a model: losses on documents, continuations of prompts, scores of given tokens.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from megamem.data.batch import EvaluationDocument
from megamem.evaluation.decoding import Decoder, generating
from megamem.evaluation.forking import ForkedReader
from megamem.evaluation.losses import (
    LEAST_CHUNKS,
    LossReport,
    cut_documents,
    first_slots,
    loss_report,
    whole_readings,
)
from megamem.evaluation.probe import MemoryReport, memory_components, memory_report, single_chunk_readings
from megamem.evaluation.reading import Float64, Progress, Reading, Sums, sum_readings
from megamem.evaluation.sampling import Sampling
from megamem.evaluation.sliding import SlidingReport, check_stride, default_stride, sliding_readings, sliding_report
from megamem.memory.base import Chunk
from megamem.model.stage import Stage
from megamem.parallel.topology import Topology
from megamem.pipeline.reader import ChunkReader
from tokenization.text_size import TextCounter


class Evaluator:
    """A model to read with, in one process or on all ranks of a job.

    Each method is a collective call: every rank makes it with the same arguments and gets the same answer. Documents
    are shared out over data-parallel ranks, and so are the requests of `score` and `continue_greedily`; the prompts of
    `generate` may differ between these, as each rank reads all of its own.
    """

    def __init__(self, stage: Stage, topology: Topology | None = None, rows: int = 8) -> None:
        """Take a model as it lies, on the device and in the dtype of its parameters.

        Args:
            stage: a whole model, or this rank's stage of one.
            topology: None in a single process.
            rows: documents of each data-parallel rank, or requests of a task, that are read side by side.
        """
        self.stage, self.topology, self.rows = stage, topology, rows
        self.reader = ChunkReader(stage, topology)

    @property
    def is_rank_0(self) -> bool:
        """Whether this is the rank that writes and shows what all found."""
        return self.topology is None or self.topology.rank == 0

    def losses(
        self,
        documents: Iterable[EvaluationDocument],
        *,
        max_tokens: int | None = None,
        counter: TextCounter | None = None,
        forget: bool = False,
        progress: Progress | None = None,
    ) -> LossReport:
        """Read documents from their start, memory carried from chunk to chunk, and report their loss.

        Args:
            max_tokens: bound of the predicted tokens, see `cut_documents`.
            counter: measures the text of documents that are cut; without it their size is not known.
            forget: read every chunk as if its document began there: position 0, fresh memory.
            progress: called with (calls made, calls of all).
        Raises: DataError without a document to predict; ValueError for documents not in whole chunks.
        """
        size = self.stage.config.chunk_size
        chosen = cut_documents(documents, size, max_tokens, counter)
        readings = single_chunk_readings(chosen, size) if forget else whole_readings(chosen, size)
        return loss_report(chosen, self._read(readings, progress), size)

    def memory_use(
        self,
        documents: Iterable[EvaluationDocument],
        *,
        max_tokens: int | None = None,
        counter: TextCounter | None = None,
        trained: LossReport | None = None,
        progress: Progress | None = None,
    ) -> MemoryReport:
        """Compare the model with itself when every chunk starts with a fresh memory at position 0.

        Takes the arguments of `losses`. A model without memory is read once: off and on are the same computation.

        Args:
            trained: the report of the same documents and bound with the memory on, if it is there already.
        Raises: as `losses`; ValueError where `trained` is of other documents.
        """
        size = self.stage.config.chunk_size
        chosen = cut_documents(documents, size, max_tokens, counter)
        if trained is None:
            trained = loss_report(chosen, self._read(whole_readings(chosen, size), progress), size)
        off = trained
        if memory_components(self.stage.config):
            off = loss_report(chosen, self._read(single_chunk_readings(chosen, size), progress), size)
        return memory_report(trained, off)

    def sliding_losses(
        self,
        documents: Iterable[EvaluationDocument],
        *,
        stride: int | None = None,
        max_tokens: int | None = None,
        counter: TextCounter | None = None,
        least: int = LEAST_CHUNKS,
        progress: Progress | None = None,
    ) -> SlidingReport:
        """Score each token late in its chunk: the documents are read once per offset, from that token on.

        Takes the arguments of `losses`; costs about chunk / stride + 1 of its passes.

        Args:
            stride: scored tokens per chunk; divides the chunk. A quarter of it if not given.
            least: chunks below which no document is cut while documents can be left out instead.
            progress: called with (calls made, calls of all), first for the plain reading, then for the sliding one.
        Raises: as `losses`; ConfigError where the stride does not divide the chunk.
        """
        size = self.stage.config.chunk_size
        stride = stride or default_stride(size)
        check_stride(stride, size)
        chosen = cut_documents(documents, size, max_tokens, counter, least)
        plain = self._read(whole_readings(chosen, size), progress)
        sliding = self._read(sliding_readings(chosen, size, stride), progress)
        return sliding_report(chosen, plain, sliding, size, stride)

    def token_losses(
        self, documents: Sequence[EvaluationDocument], *, forget: bool = False, progress: Progress | None = None
    ) -> list[Float64]:
        """Return the loss of each document's tokens, [T] in nats, 0 where nothing is predicted.

        Takes the arguments of `losses`, and documents as they are, in whole chunks.
        """
        size = self.stage.config.chunk_size
        readings = single_chunk_readings(documents, size) if forget else whole_readings(documents, size)
        found = self._read(readings, progress, keep_tokens=True).tokens
        assert found is not None
        ends = [*first_slots(documents, size)[1:], len(found)]
        return [part.reshape(-1) for part in np.split(found, ends[:-1])]

    def _read(self, readings: Sequence[Reading], progress: Progress | None, keep_tokens: bool = False) -> Sums:
        """Loss sums over all ranks."""
        return sum_readings(self.reader, readings, self.rows, progress, keep_tokens)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        new_tokens: int,
        *,
        sampling: Sampling | None = None,
        end_token: int | None = None,
        stop: Callable[[int, list[int]], bool] | None = None,
    ) -> list[list[int]]:
        """Continue each prompt by at most `new_tokens` tokens.

        Args:
            prompts: token ids, of any lengths; all are read side by side, the shorter ones padded on the left.
            sampling: the likeliest token if not given.
            end_token: a row ends with it.
            stop: told a row's index and its new tokens after each of them; True ends the row.
        Returns: the new tokens of each row, the end token included.
        Raises: ValueError for an empty prompt.
        """
        if not prompts or not all(prompts):
            raise ValueError("generation needs at least one prompt, and none may be empty")
        decoder = Decoder(self.reader, len(prompts))
        sampling = sampling or Sampling()
        generator = torch.Generator().manual_seed(sampling.seed)
        longest = max(map(len, prompts))
        padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]).T
        chunk = Chunk(tuple(len(prompt) - longest for prompt in prompts))
        rows: list[list[int]] = [[] for _ in prompts]
        with generating(self.stage):
            logits = decoder.read(padded, chunk)
            ended = [False] * len(rows)
            for made in range(new_tokens):
                tokens = decoder.agree(None if logits is None else sampling.choose(logits[0].cpu(), generator))
                for index, token in enumerate(tokens.tolist()):
                    if not ended[index]:
                        rows[index].append(token)
                        ended[index] = token == end_token or (stop is not None and stop(index, rows[index]))
                if made == new_tokens - 1 or all(ended):
                    break
                logits = decoder.read(tokens[None], chunk.after(longest + made))
        return rows

    def score(
        self, sequences: Sequence[Sequence[int]], scored: Sequence[int], *, progress: Progress | None = None
    ) -> list[tuple[float, bool]]:
        """Log-probability of the last tokens of each sequence given those before, and whether each is the likeliest.

        Sequences are read `rows` at a time on each data-parallel rank, tokens that several begin with once.

        Args:
            sequences: token ids, the same on all ranks.
            scored: how many tokens of each are scored; fewer than it has.
            progress: told how many batches are done.
        Returns: per sequence the sum in nats, and the flag.
        Raises: ValueError for a sequence that has no token before those that are scored.
        """
        return ForkedReader(self.reader, self.rows, progress).score(sequences, scored)

    def continue_greedily(
        self,
        prompts: Sequence[Sequence[int]],
        limits: Sequence[int],
        *,
        end_token: int | None = None,
        stop: Callable[[int, list[int]], bool] | None = None,
        progress: Progress | None = None,
    ) -> list[list[int]]:
        """Likeliest tokens behind each prompt, at most `limits` of them; the same as `generate` gives one by one.

        Prompts are read `rows` at a time on each data-parallel rank, tokens that several begin with once.

        Args:
            prompts: token ids, the same on all ranks.
            limits: new tokens of each prompt at most.
            end_token: a continuation ends with it.
            stop: told a prompt's index and its new tokens after each of them; True ends the continuation.
            progress: told how many batches are done.
        Returns: the new tokens of each prompt, the end token included.
        Raises: ValueError for an empty prompt.
        """
        return ForkedReader(self.reader, self.rows, progress).continue_greedily(prompts, limits, end_token, stop)

    def logits(self, tokens: Tensor) -> Tensor | None:
        """Logits [tokens, B, V] in float32 of documents read from their start; None but on the last stage.

        tokens: ids [tokens, B], read chunk by chunk.
        """
        decoder, parts = Decoder(self.reader, tokens.shape[1]), []
        begin = 0
        with generating(self.stage):
            for part in tokens.split(self.stage.config.chunk_size):
                parts.append(decoder.read(part, Chunk((begin,) * tokens.shape[1]), keep=len(part)))
                begin += len(part)
        found = [part for part in parts if part is not None]
        return torch.cat(found) if found else None
