"""Comparison of models that read the same held-out documents: their losses beyond the first chunk, paired by document.

What makes a document hard for both models cancels in a difference, so that its standard error, over documents, is far
below that of either loss. How much a difference depends on the seed of training is another matter.

Letters of shapes: D documents, C chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from megamem.errors import DataError
from megamem.evaluation.reading import Bool, Float64
from megamem.evaluation.recovered import ModelLosses, check_same, chunk_groups
from megamem.evaluation.suites.result import ratio_and_error


@dataclass(frozen=True)
class Estimate:
    """Nats per token, and how well they are known."""

    value: float
    stderr: float | None
    """Standard error over documents; None for a single one."""

    @classmethod
    def of(cls, nats: Float64, tokens: Float64) -> Estimate:
        """Return the mean of summed nats [D] over tokens [D]."""
        return cls(*ratio_and_error(nats.tolist(), tokens.tolist()))


@dataclass(frozen=True)
class PositionLosses:
    """Losses in a range of positions in documents, in nats per token."""

    first: int
    """Position: the prediction made after so many tokens of the document."""
    last: int
    """Inclusive."""
    loss: float
    memory_off_loss: float
    """The same weights, with every chunk read as if its document began there."""
    difference: Estimate
    """The loss less that of the reference."""


@dataclass(frozen=True)
class ComparedModel:
    """One model's losses beyond the first chunk, in nats per token."""

    title: str
    loss: float
    difference: Estimate
    """The loss less that of the reference: below 0, the model is better."""
    better: int
    """Documents whose loss is below the reference's."""
    memory_gain: Estimate
    """What the same weights lose when every chunk is read as if its document began there."""
    by_position: tuple[PositionLosses, ...]


@dataclass(frozen=True)
class Comparison:
    """Models beside a reference."""

    reference: str
    """Its name."""
    chunk_size: int
    documents: int
    """Documents that are longer than a chunk."""
    tokens: int
    """Predicted tokens beyond the first chunks."""
    models: tuple[ComparedModel, ...]
    """The reference first."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)


def compare(reference: ModelLosses, models: Sequence[ModelLosses]) -> Comparison:
    """Compare models with a reference, document by document.

    Raises: ConfigError where one was not measured on the same tokens in the same chunks; DataError where no document is
        longer than a chunk.
    """
    for model in models:
        check_same(reference, model)
    base = reference.by_document(reference.names)
    long = base.tokens[:, 1:].sum(1) > 0
    if not long.any():
        raise DataError(f"{reference.origin}: no document is longer than a chunk of {reference.chunk_size} tokens")
    others = [model.by_document(reference.names) for model in models]
    read = [base, *others]
    titles = [model.title for model in read]
    # two runs of one name lie in different folders
    told = [model.title if titles.count(model.title) == 1 else str(Path(model.origin).parent) for model in read]
    return Comparison(
        reference=told[0],
        chunk_size=reference.chunk_size,
        documents=int(long.sum()),
        tokens=int(base.tokens[:, 1:].sum()),
        models=tuple(_compared(model, title, base, long) for model, title in zip(read, told, strict=True)),
    )


def _compared(model: ModelLosses, title: str, base: ModelLosses, long: Bool) -> ComparedModel:
    # [D, C]: without the first chunks, and without documents that have no more
    nats, off, others, tokens = (
        table[long, 1:] for table in (model.nats, model.memory_off_nats, base.nats, base.tokens)
    )
    parts = []
    for begin, end in chunk_groups(tokens.shape[1]):
        own, without, other, count = (table[:, begin:end].sum(1) for table in (nats, off, others, tokens))
        here = count > 0
        if here.any():
            parts.append(
                PositionLosses(
                    first=(begin + 1) * model.chunk_size + 1,
                    last=(end + 1) * model.chunk_size,
                    loss=float(own.sum() / count.sum()),
                    memory_off_loss=float(without.sum() / count.sum()),
                    difference=Estimate.of((own - other)[here], count[here]),
                )
            )
    own, without, other, count = (table.sum(1) for table in (nats, off, others, tokens))
    return ComparedModel(
        title=title,
        loss=float(own.sum() / count.sum()),
        difference=Estimate.of(own - other, count),
        better=int((own < other).sum()),
        memory_gain=Estimate.of(without - own, count),
        by_position=tuple(parts),
    )
