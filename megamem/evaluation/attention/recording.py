"""Reads documents with a model and records what its layers attend to by distance, and what memory rows are mixed of.

Ji et al., "LaMemo: Language Modeling with Look-Ahead Memory", 2022, section 6, figures 1 and 6.

Letters of shapes: T tokens of a chunk, M columns or rows of the memory, C columns of keys, B batch rows, H heads.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from megamem.data.batch import EvaluationDocument
from megamem.errors import ConfigError
from megamem.evaluation.attention.by_distance import ByDistance, DistanceSums, Float64, pooled
from megamem.evaluation.decoding import generating
from megamem.evaluation.reading import Progress
from megamem.evaluation.texts import Text, long_texts
from megamem.memory.attention.lamemo import LaMemo
from megamem.memory.base import Chunk, to_device
from megamem.memory.shared.segment_attention import SegmentAttention
from megamem.model.stage import Stage
from megamem.pipeline.reader import ChunkReader

KINDS = "lamemo, transformer_xl"
"""Mixers whose columns of keys are tokens, so that a distance is one in the text."""


@dataclass(frozen=True)
class LayerAttention:
    """What one layer attends to, a mean over heads and what was read."""

    name: str
    """Name of the mixer in the model."""
    title: str
    """Its name in pictures."""
    memory_length: int
    """Columns or rows in front of each chunk."""
    tokens: ByDistance
    """What tokens give to those at each distance before them, in the chunk and in the memory."""
    memory_share: float
    """What tokens give to the memory: a mean over tokens, so that it is small where chunks are long."""
    ahead: ByDistance | None
    """What memory rows give to the places at each distance behind them; None where none look ahead."""
    alpha: Float64 | None
    """[M] the share of what memory rows have read before in what they put out, the oldest row first; None where
    nothing is mixed."""


@dataclass(frozen=True)
class Attention:
    """What all layers attend to."""

    documents: int
    """Documents read."""
    tokens: int
    """Tokens whose attention is recorded: all those that have read a full memory."""
    chunk_size: int
    layers: tuple[LayerAttention, ...]
    all_layers: ByDistance
    """What tokens give to those before them, a mean over layers too."""


def attention_layers(stage: Stage) -> dict[str, SegmentAttention]:
    """Return the mixers of a whole model that can be looked at, by their names in the model.

    Raises: ConfigError where there is none.
    """
    found = {
        name: module
        for name, module in stage.named_modules()
        if isinstance(module, LaMemo) or type(module) is SegmentAttention
    }
    if not found:
        used = sorted({stage.config.mixer_at(layer).kind for layer in range(stage.config.layers)})
        raise ConfigError(
            f"model: {', '.join(used)} has no attention by distance to look at; the mixers that have it: {KINDS}"
        )
    if stage.config.architecture.kind != "decoder":
        raise ConfigError(
            f"model.architecture: {stage.config.architecture.kind} puts rows of its own among the tokens, whose "
            "distances are none of the text; only the attention of a decoder can be looked at"
        )
    return found


def filling_chunks(stage: Stage) -> int:
    """Return after how many chunks of a document all memories are full. Raises: see `attention_layers`."""
    longest = max(layer.memory_length for layer in attention_layers(stage).values())
    return -(-longest // stage.config.chunk_size)


def held_out_texts(documents: Iterable[EvaluationDocument], stage: Stage, chunks: int, count: int) -> list[Text]:
    """Return `count` documents, of each as many chunks as fill the memories and at most `chunks` more to record.

    The first ones that have them; where there are fewer, the longest besides. Raises: DataError where no document fills
    the memories and has another chunk; see `attention_layers`.
    """
    size, filling = stage.config.chunk_size, filling_chunks(stage)
    # the last token is predicted and not read
    least, most = ((filling + more) * size + 1 for more in (1, chunks))
    return [replace(text, ids=text.ids[:most]) for text in long_texts(documents, least, most, count)]


class _Notes:
    """Sums of what one layer attends to."""

    def __init__(self, layer: SegmentAttention) -> None:
        self.length, self.recording, self.queries = layer.memory_length, False, 0
        self.tokens, self.ahead = DistanceSums(), DistanceSums()
        self.memory: Tensor | None = None
        self.alpha: Tensor | None = None

    def attended(self, shares: Tensor, unseen: Tensor) -> None:
        """See `Observer.attended`; shares: [B, H, T, C]."""
        if not self.recording:
            return
        batch, heads, tokens, columns = shares.shape
        assert columns == self.length + tokens, "memories are full, and calls are whole chunks"
        places = torch.arange(columns, device=shares.device)
        self.tokens.add(shares, unseen, places[self.length :, None] - places)
        memory = shares[..., : self.length].double().sum()
        self.memory = memory if self.memory is None else self.memory + memory
        self.queries += batch * heads * tokens

    def looked_ahead(self, shares: Tensor, unseen: Tensor) -> None:
        """See `Observer.looked_ahead`; shares: [B, H, M, C]."""
        if self.recording:
            rows, columns = shares.shape[2:]
            places = torch.arange(rows + 1, device=shares.device)
            self.ahead.add(shares, unseen, places[rows + 1 - columns :] - places[:rows, None])

    def mixed(self, share: Tensor) -> None:
        """See `Observer.mixed`; share: [M, B, H]."""
        if self.recording:
            # summed over chunks, of as many rows and heads each
            share = share.double().mean((1, 2))
            self.alpha = share if self.alpha is None else self.alpha + share

    def layer(self, name: str, title: str, chunks: int) -> LayerAttention:
        """Return the means over so many chunks."""
        tokens = self.tokens.mean()
        assert tokens is not None
        assert self.memory is not None
        return LayerAttention(
            name=name,
            title=title,
            memory_length=self.length,
            tokens=tokens,
            memory_share=float(self.memory) / self.queries,
            ahead=self.ahead.mean(),
            alpha=None if self.alpha is None else np.asarray(self.alpha.cpu().numpy() / chunks),
        )


def record_attention(stage: Stage, texts: Sequence[Text], progress: Progress | None = None) -> Attention:
    """Read documents chunk by chunk from their start, and record what those chunks attend to that find full memories.

    Args:
        stage: a whole model.
        texts: the documents. Their last token is predicted and not read, and so is what fills no chunk; in each of them
            some chunk must find full memories (`filling_chunks`).
        progress: called with (calls made, calls of all).
    Raises: see `attention_layers`.
    """
    layers, filling = attention_layers(stage), filling_chunks(stage)
    notes = {name: _Notes(layer) for name, layer in layers.items()}
    reader, size = ChunkReader(stage), stage.config.chunk_size
    counts = [(len(text.ids) - 1) // size for text in texts]
    assert min(counts) > filling, "a document is too short"
    made = 0
    with ExitStack() as stack:
        for name, note in notes.items():
            stack.enter_context(layers[name].observed_by(note))
        stack.enter_context(generating(stage))
        for text, count in zip(texts, counts, strict=True):
            tokens = torch.tensor(text.ids[: count * size])[:, None]
            groups = reader.begin(Chunk((0,)))
            for number, part in enumerate(tokens.split(size)):
                for note in notes.values():
                    note.recording = number >= filling
                reader.read(to_device(part, reader.device), Chunk((number * size,)), groups, keep=1)
                made += 1
                if progress is not None:
                    progress(made, sum(counts))
    chunks = sum(counts) - filling * len(texts)
    found = tuple(note.layer(name, _title(name, list(notes)), chunks) for name, note in notes.items())
    return Attention(
        documents=len(texts),
        tokens=chunks * size,
        chunk_size=size,
        layers=found,
        all_layers=pooled([layer.tokens for layer in found]),
    )


def _title(name: str, names: Sequence[str]) -> str:
    """Return what a picture calls the mixer `name` (`layers.3.mixer`): its layer, if that has no other in `names`."""
    number = name.split(".")[1]
    alone = sum(other.split(".")[1] == number for other in names) == 1
    return f"layer {number}" if alone else name
