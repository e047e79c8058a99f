"""Continues prompts token by token, memory carried along: the same calls as training, on any layout.

Letters: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor

from megamem.memory.base import LABEL_IGNORED, Chunk
from megamem.model.stage import Stage
from megamem.parallel.gather import gather_shards
from megamem.parallel.topology import Topology
from megamem.pipeline.reader import ChunkReader, RowGroup


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen."""

    temperature: float = 0.0
    """0 takes the likeliest token."""
    top_k: int | None = None
    """Only so many of the likeliest tokens; all if not given."""
    top_p: float = 1.0
    """Only the likeliest tokens that together reach this probability (Holtzman et al. 2020)."""
    seed: int = 0

    def __post_init__(self) -> None:
        """Raise ValueError naming the value that makes no sense."""
        if self.temperature < 0:
            raise ValueError(f"temperature {self.temperature} is negative")
        if self.top_k is not None and self.top_k < 1:
            raise ValueError(f"top_k {self.top_k} leaves no token")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p {self.top_p} is not in (0, 1]")

    def choose(self, logits: Tensor, generator: torch.Generator) -> Tensor:
        """Next token of each row [B] from logits [B, V], float32 on the CPU."""
        if self.temperature == 0:
            return logits.argmax(-1)
        logits = logits.double() / self.temperature
        if self.top_k is not None:
            least = logits.topk(min(self.top_k, logits.shape[-1])).values[:, -1:]
            logits = logits.masked_fill(logits < least, -torch.inf)
        if self.top_p < 1:
            ordered, index = logits.softmax(-1).sort(-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # the first token that reaches it is kept
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, index, beyond), -torch.inf)
        return torch.multinomial(logits.softmax(-1), 1, generator=generator).squeeze(-1)


def generate(
    stage: Stage,
    prompts: Sequence[Sequence[int]],
    new_tokens: int,
    *,
    topology: Topology | None,
    device: torch.device,
    dtype: torch.dtype,
    sampling: Sampling | None = None,
    end_token: int | None = None,
    stop: Callable[[int, list[int]], bool] | None = None,
) -> list[list[int]]:
    """Continue each prompt by at most `new_tokens` tokens.

    A collective call: all tensor-parallel ranks and stages of a model make it with the same arguments (data-parallel
    ranks may each have prompts of their own) and get the same answer.

    Args:
        stage: a whole model, or this rank's part of a pipeline.
        prompts: token ids, of any lengths; read side by side, the shorter ones padded on the left.
        topology: None in a single process.
        dtype: of the activations (that of the parameters).
        sampling: the likeliest token if not given.
        end_token: a row ends with it.
        stop: told a row's index and its new tokens after each of them; True ends the row.
    Returns: the new tokens of each row, the end token included.
    Raises: ValueError for an empty prompt.
    """
    if not prompts or not all(prompts):
        raise ValueError("generation needs at least one prompt, and none may be empty")
    decoder = _Decoder(stage, topology, device, dtype, len(prompts))
    sampling = sampling or Sampling()
    generator = torch.Generator().manual_seed(sampling.seed)
    longest = max(map(len, prompts))
    padded = torch.tensor([[0] * (longest - len(prompt)) + list(prompt) for prompt in prompts]).T
    chunk = Chunk(tuple(len(prompt) - longest for prompt in prompts))
    rows: list[list[int]] = [[] for _ in prompts]
    with _generating(stage):
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


def continuation_scores(
    stage: Stage,
    sequences: Sequence[Sequence[int]],
    scored: Sequence[int],
    *,
    topology: Topology | None,
    device: torch.device,
    dtype: torch.dtype,
) -> list[tuple[float, bool]]:
    """Log-probability of the last tokens of each sequence given those before, and whether each is the likeliest.

    A collective call as `generate`, with the same answer on all ranks of a model.

    Args:
        sequences: token ids, of any lengths; read side by side, padded on the right.
        scored: how many tokens of each are scored; fewer than it has.
    Returns: per sequence the sum in nats, and the flag.
    """
    rows, size = len(sequences), stage.config.chunk_size
    longest = max(map(len, sequences)) - 1
    tokens, labels = torch.zeros(longest, rows, dtype=torch.int64), torch.full((longest, rows), LABEL_IGNORED)
    for row, (sequence, count) in enumerate(zip(sequences, scored, strict=True)):
        assert 0 < count < len(sequence)
        ids = torch.tensor(sequence)
        tokens[: len(ids) - 1, row] = ids[:-1]
        labels[len(ids) - 1 - count : len(ids) - 1, row] = ids[-count:]
    decoder = _Decoder(stage, topology, device, dtype, rows)
    found = torch.zeros(2, rows, dtype=torch.float64)  # nats, and tokens that are not the likeliest
    with _generating(stage):
        for begin in range(0, longest, size):
            part = slice(begin, min(begin + size, longest))
            wanted = labels[part]
            known = wanted != LABEL_IGNORED
            logits = decoder.read(tokens[part], Chunk((begin,) * rows), keep=len(wanted) if known.any() else 0)
            if logits is None:
                continue
            known = known.to(logits.device)
            target = wanted.clamp(min=0).to(logits.device)
            nats = logits.log_softmax(-1).gather(-1, target[..., None])[..., 0]
            found[0] += (nats.double() * known).sum(0).cpu()
            found[1] += ((logits.argmax(-1) != target) & known).sum(0).cpu()
        found = decoder.agree(found)
    return [(nats, wrong == 0) for nats, wrong in found.T.tolist()]


def read_logits(
    stage: Stage, tokens: Tensor, *, topology: Topology | None, device: torch.device, dtype: torch.dtype
) -> Tensor | None:
    """Logits [tokens, B, V] in float32 of documents read from their start, chunk by chunk; None but on the last stage.

    A collective call as `generate`. tokens: ids [tokens, B].
    """
    decoder, parts = _Decoder(stage, topology, device, dtype, tokens.shape[1]), []
    begin = 0
    with _generating(stage):
        for part in tokens.split(stage.config.chunk_size):
            parts.append(decoder.read(part, Chunk((begin,) * tokens.shape[1]), keep=len(part)))
            begin += len(part)
    found = [part for part in parts if part is not None]
    return torch.cat(found) if found else None


@contextmanager
def _generating(stage: Stage) -> Iterator[None]:
    """Enter evaluation mode, without gradients and with tokens whole on every rank: single ones cannot be split."""
    training, split = stage.training, stage.linears.sequence_parallel
    stage.eval()
    stage.linears.sequence_parallel = False
    try:
        with torch.no_grad():
            yield
    finally:
        stage.linears.sequence_parallel = split
        stage.train(training)


class _Decoder:
    """Runs calls through this rank's layers and keeps their states."""

    def __init__(
        self, stage: Stage, topology: Topology | None, device: torch.device, dtype: torch.dtype, rows: int
    ) -> None:
        self.stage, self.topology, self.device, self.rows = stage, topology, device, rows
        self.reader = ChunkReader(stage, topology, device, dtype)
        self.groups: list[RowGroup] | None = None

    def read(self, tokens: Tensor, chunk: Chunk, keep: int = 1) -> Tensor | None:
        """Read tokens [tokens, B]; logits [keep, B, V] of the last ones in float32 on the last stage, None if 0."""
        self.groups = self.groups or self.reader.begin(chunk)
        hidden = self.reader.read(tokens, chunk, self.groups, keep)
        if hidden is None or not keep:
            return None
        local = self.stage.logits(hidden).float()
        return gather_shards(local, 2, self.topology.tp_group) if self.topology else local

    def agree(self, value: Tensor | None) -> Tensor:
        """Return the last stage's value on every stage, on the CPU; tokens [B] where other stages have None."""
        if self.topology is None or self.topology.pp_size == 1:
            assert value is not None
            return value
        value = torch.zeros(self.rows, dtype=torch.int64) if value is None else value
        on_device = value.to(self.device)
        dist.broadcast(on_device, group=self.topology.pp_group, group_src=self.topology.pp_size - 1)
        return on_device.cpu()
