"""Reads a document with a model and notes what each of its long-term memories was attended to with.

Letters of shapes: T tokens of a chunk, H heads, M samples, B batch rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from megamem.config.model import MIXERS
from megamem.errors import ConfigError
from megamem.evaluation.decoding import generating
from megamem.evaluation.long_term_memory.cells import (
    Cells,
    Float64,
    Samples,
    equal_samples,
    first_cells,
    later_cells,
    sticky_samples,
)
from megamem.memory.base import Chunk, to_device
from megamem.memory.continuous.infinity_former import InfinityFormer, InfinityFormerConfig
from megamem.model.stage import Stage
from megamem.pipeline.reader import ChunkReader


@dataclass(frozen=True)
class Read:
    """The densities with which the tokens of one chunk have read one layer's memory, and what it held."""

    begin: int
    """Number in its document of the chunk's first token."""
    cells: Cells
    """What the tokens in the memory occupy."""
    equal: Cells
    """What they would occupy had each update read the old signal at equal distances."""
    mean: Float64
    """[H, T] of the queries' normal densities."""
    deviation: Float64
    """[H, T], their standard deviations."""

    @property
    def end(self) -> int:
        """Number in its document of the token after the chunk's last one."""
        return self.begin + self.mean.shape[1]


def long_term_layers(stage: Stage) -> dict[str, InfinityFormer]:
    """Return the mixers of a whole model that have a continuous long-term memory, by their names in the model.

    Raises: ConfigError where there is none, or where its chunks hold more than the document's tokens.
    """
    found = {name: module for name, module in stage.named_modules() if isinstance(module, InfinityFormer)}
    if not found:
        kinds = [kind for kind, config in MIXERS.kinds().items() if issubclass(config, InfinityFormerConfig)]
        used = sorted({stage.config.mixer_at(layer).kind for layer in range(stage.config.layers)})
        raise ConfigError(
            f"model: {', '.join(used)} has no continuous long-term memory; the mixers that have one: {', '.join(kinds)}"
        )
    if stage.config.architecture.kind != "decoder":
        raise ConfigError(
            f"model.architecture: {stage.config.architecture.kind} writes rows of its own into the long-term memories, "
            "whose places belong to no token; only those of a decoder can be analyzed"
        )
    return found


class _Notes:
    """Follows the memory of one layer through one document in row 0."""

    def __init__(self, layer: InfinityFormer) -> None:
        self.memory, self.begin = layer.long_term, 0
        self.reads: list[Read] = []
        self.cells: Cells | None = None
        self.equal: Cells | None = None

    def updated(self, written: Sequence[int], begins: Sequence[bool], samples: Tensor | None) -> None:
        """See `Observer.updated`; samples: [M, B]."""
        if not begins[0] or not written[0]:
            return
        regression, number = self.memory.regression, written[0] - 1
        old, equal = self.cells, self.equal
        if old is None or equal is None or (self.memory.restart_after and number % self.memory.restart_after == 0):
            self.cells = self.equal = first_cells(regression, number * regression.tokens)
            return
        even = equal_samples(regression)
        self.equal = later_cells(regression, equal, even)
        self.cells = later_cells(regression, old, even if samples is None else self._sticky(samples))

    def _sticky(self, samples: Tensor) -> Samples:
        """Return where the old signal was read; samples: [M, B]."""
        return sticky_samples(self.memory.places, samples[:, 0].double().cpu().numpy())

    def attended(self, mean: Tensor, variance: Tensor, written: Sequence[int]) -> None:
        """See `Observer.attended`; mean, variance: [B, H, T]."""
        if self.cells is None or self.equal is None:
            return
        looks = (mean[0].double().cpu().numpy(), np.sqrt(variance[0].double().cpu().numpy()))
        self.reads.append(Read(self.begin, self.cells, self.equal, *looks))


def read_document(stage: Stage, tokens: Tensor) -> dict[str, list[Read]]:
    """Read a document chunk by chunk from its start.

    Args:
        stage: a whole model.
        tokens: ids [tokens] int64, any number of them.
    Returns: by layer, in the order of the text, what each chunk has read that found something in the memory.
    Raises: see `long_term_layers`.
    """
    notes = {name: _Notes(layer) for name, layer in long_term_layers(stage).items()}
    reader = ChunkReader(stage)
    with ExitStack() as stack:
        for note in notes.values():
            stack.enter_context(note.memory.observed_by(note))
        stack.enter_context(generating(stage))
        groups = reader.begin(Chunk((0,)))
        for begin in range(0, len(tokens), reader.chunk_size):
            for note in notes.values():
                note.begin = begin
            part = to_device(tokens[begin : begin + reader.chunk_size, None], reader.device)
            reader.read(part, Chunk((begin,)), groups, keep=1)
    return {name: note.reads for name, note in notes.items()}
