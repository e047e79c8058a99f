"""What a model's memory gives: its loss as trained against the same weights with the memory off."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from megamem.config.model import ModelConfig
from megamem.data.batch import EvaluationDocument
from megamem.evaluation.losses import Bucket, DocumentLoss, LossReport, first_slots
from megamem.evaluation.reading import Reading
from megamem.memory.base import TensorSpec


@dataclass(frozen=True)
class MemoryReport:
    """Loss beyond the first chunk, nats per token; None where no document is longer than a chunk."""

    beyond_first_chunk_loss: float | None
    """Memory as trained."""
    memory_off_beyond_first_chunk_loss: float | None
    """Every chunk read as if its document began there."""
    memory_off_loss: float
    """The same over all predicted tokens, those of first chunks included."""
    gain: float | None
    """Off minus on: what the memory gives, nats per token."""
    memory_off_by_chunk: tuple[Bucket, ...]
    """Losses with the memory off, by index of the chunk in its document."""
    memory_off_documents: tuple[DocumentLoss, ...]
    """The same of each document."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain data, for JSON."""
        return asdict(self)


def memory_components(model: ModelConfig) -> list[str]:
    """Return the components whose declared state passes from chunk to chunk, memories that span the model included."""
    return [
        name
        for name, specs in model.component_specs().items()
        if any(not isinstance(spec, TensorSpec) or spec.kind == "memory" for spec in specs.values())
    ]


def memory_layers(model: ModelConfig) -> list[int]:
    """Return the layers whose mixers declare a state which passes from chunk to chunk, or read rows of such layers."""
    names = memory_components(model)
    return [
        layer for layer in range(model.layers) if f"layers.{layer}" in names or model.side_rows_at(layer) is not None
    ]


def single_chunk_readings(documents: Sequence[EvaluationDocument], size: int) -> list[Reading]:
    """Each chunk on its own: position 0, fresh memory. Slots as in `whole_readings`."""
    return [
        Reading(document, index * size, 1, slot + index)
        for document, slot in zip(documents, first_slots(documents, size), strict=True)
        for index in range(len(document.tokens) // size)
    ]


def memory_report(trained: LossReport, off: LossReport) -> MemoryReport:
    """Compare two reports of the same documents. Raises ValueError if they are of others.

    off: of the `single_chunk_readings`.
    """
    if off.text_sha256 != trained.text_sha256:
        raise ValueError(f"`trained` is of other documents: of {trained.tokens} tokens, these have {off.tokens}")
    on_loss, off_loss = trained.beyond_first_chunk_loss, off.beyond_first_chunk_loss
    return MemoryReport(
        beyond_first_chunk_loss=on_loss,
        memory_off_beyond_first_chunk_loss=off_loss,
        memory_off_loss=off.loss,
        gain=None if on_loss is None or off_loss is None else off_loss - on_loss,
        memory_off_by_chunk=off.by_chunk,
        memory_off_documents=off.documents,
    )
