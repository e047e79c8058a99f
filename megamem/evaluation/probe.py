"""What a model's memory gives: its loss as trained against the same weights with the memory off."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from megamem.config.model import ModelConfig
from megamem.data.batch import EvaluationDocument
from megamem.evaluation.losses import Bucket, LossReport, cut_documents, first_slots, loss_report, whole_readings
from megamem.evaluation.reading import Int64, Progress, Reader, Reading
from megamem.memory.base import TensorSpec
from megamem.model.stage import Stage
from megamem.parallel.topology import Topology


@dataclass(frozen=True)
class MemoryReport:
    """Loss beyond the first chunk, nats per token; None where no document is longer than a chunk."""

    beyond_first_chunk_loss: float | None
    """Memory as trained."""
    memory_off_beyond_first_chunk_loss: float | None
    """Every chunk read as if its document began there."""
    gain: float | None
    """Off minus on: what the memory gives, nats per token."""
    memory_off_by_chunk: tuple[Bucket, ...]
    """Losses with the memory off, by index of the chunk in its document."""

    def as_dict(self) -> dict[str, Any]:
        """Plain numbers, for JSON."""
        return asdict(self)


def memory_components(model: ModelConfig) -> list[str]:
    """Return the components whose declared state passes from chunk to chunk, memories that span the model included."""
    return [
        name
        for name, specs in model.component_specs().items()
        if any(not isinstance(spec, TensorSpec) or spec.kind == "memory" for spec in specs.values())
    ]


def memory_layers(model: ModelConfig) -> list[int]:
    """Return the layers whose mixers declare a state which passes from chunk to chunk."""
    names = memory_components(model)
    return [int(name.removeprefix("layers.")) for name in names if name.startswith("layers.")]


def single_chunk_readings(documents: Sequence[EvaluationDocument], size: int) -> list[Reading]:
    """Each chunk on its own: position 0, fresh memory. Slots as in `whole_readings`."""
    return [
        Reading(document, index * size, 1, slot + index)
        for document, slot in zip(documents, first_slots(documents, size), strict=True)
        for index in range(len(document.tokens) // size)
    ]


def memory_use(
    stage: Stage,
    documents: Iterable[EvaluationDocument],
    *,
    topology: Topology | None,
    device: torch.device,
    dtype: torch.dtype,
    rows: int,
    max_tokens: int | None = None,
    token_bytes: Int64 | None = None,
    trained: LossReport | None = None,
    progress: Progress | None = None,
) -> MemoryReport:
    """Compare the model with itself when every chunk starts with a fresh memory at position 0.

    A collective call like `evaluate_losses`, whose arguments it shares. A model without memory is read once: off and
    on are the same computation.

    Args:
        trained: the report of the same documents and bound with the memory on, if it is there already.
    """
    size = stage.config.chunk_size
    chosen = cut_documents(documents, size, max_tokens, token_bytes)
    reader = Reader(stage, topology=topology, device=device, dtype=dtype, rows=rows, progress=progress)
    if trained is None:
        trained = loss_report(chosen, reader.read(whole_readings(chosen, size)), size)
    off = trained
    if memory_components(stage.config):
        off = loss_report(chosen, reader.read(single_chunk_readings(chosen, size)), size)
    if off.tokens != trained.tokens:
        raise ValueError(f"`trained` reports {trained.tokens} tokens, but these documents have {off.tokens}")
    on_loss, off_loss = trained.beyond_first_chunk_loss, off.beyond_first_chunk_loss
    return MemoryReport(
        beyond_first_chunk_loss=on_loss,
        memory_off_beyond_first_chunk_loss=off_loss,
        gain=None if on_loss is None or off_loss is None else off_loss - on_loss,
        memory_off_by_chunk=off.by_chunk,
    )
