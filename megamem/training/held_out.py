"""The held-out evaluation of a trained run, after and outside of its training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from rich.console import Console

from megamem.config.run import RunConfig
from megamem.data.batch import EvaluationDocument
from megamem.data.feeder import HeldOutDocuments
from megamem.errors import ConfigError, DataError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.losses import text_sha256
from megamem.evaluation.memory_length import LengthCurve, LengthLoss, length_fields
from megamem.evaluation.probe import memory_components
from megamem.evaluation.recovered import MeasuredModel, ModelLosses, RecoveredReport, check_same, recovered_share
from megamem.evaluation.remembered import RememberedReport, remembered
from megamem.evaluation.result import EvaluationResult
from megamem.evaluation.run import Passes, final_documents, final_evaluation
from megamem.model.stage import Stage
from megamem.parallel.topology import Topology
from megamem.training.build import held_out_documents, open_tokenizer
from tokenization.text_size import TextCounter
from tokenization.tokenizer import vocabulary_hash


class Trained(Protocol):
    """A trained model that lies somewhere, with the configuration that it is evaluated by."""

    @property
    def config(self) -> RunConfig:
        """The configuration of the run."""

    @property
    def origin(self) -> str:
        """Where it lies, for messages."""

    @property
    def title(self) -> str:
        """Its name, for people."""

    def load(self, dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu") -> Stage:
        """Return the whole model."""


def held_out_text(run: Trained) -> HeldOutDocuments:
    """Open a trained model's held-out documents. Raises ConfigError where its configuration names none."""
    if not run.config.data.validation:
        raise ConfigError(f"{run.origin}: its configuration names no held-out text; give data.validation='[SHARDS]'")
    return held_out_documents(run.config)


def evaluate_run(
    run: Trained,
    dtype: torch.dtype,
    device: torch.device,
    console: Console | None = None,
    folder: Path | None = None,
) -> EvaluationResult:
    """Evaluate a trained model on held-out text, in this process.

    console: where a progress bar is shown; none if not given. folder: where evaluation.json and the picture go, if
        anywhere.
    Raises: ConfigError where its configuration names no held-out text; CheckpointError, ConversionError or DataError
        for damaged files, or weights that do not fit the configuration.
    """
    documents = held_out_text(run)
    topology = Topology.start(device=str(device))
    return final_evaluation(
        Evaluator(run.load(dtype, topology.device), topology, run.config.evaluation.rows),
        lambda: documents,
        open_tokenizer(run.config),
        run.config,
        console=console,
        folder=folder,
    )


def evaluate_recovered(
    local: Trained | ModelLosses,
    full: Trained | ModelLosses,
    memory: Trained,
    dtype: torch.dtype,
    device: torch.device,
    console: Console | None = None,
) -> RecoveredReport:
    """Evaluate three models on the same held-out text, and report the recovered share, in this process.

    Args:
        local: the model with attention within chunks, or its losses as they were measured before.
        full: the model with full attention, likewise.
        memory: the model with the memory.
        dtype: of the weights.
        device: where models are read with.
        console: where a progress bar is shown for each model; none if not given.
    Raises: as `evaluate_run` and `recovered_share`, before anything is read where texts differ.
    """
    last = _Reading.of(memory)
    others = [model if isinstance(model, ModelLosses) else _Reading.of(model) for model in (local, full)]
    for other in others:
        check_same(other if isinstance(other, ModelLosses) else other.measured, last.measured)
    topology = Topology.start(device=str(device))
    with Passes(console) as passes:
        base, whole = (
            model if isinstance(model, ModelLosses) else model.losses(dtype, topology, passes, off=False)
            for model in others
        )
        recovered_share(base, whole, base, draws=1)  # says so now if there is no gap
        found = last.losses(dtype, topology, passes, off=True)
    return recovered_share(base, whole, found)


def evaluate_remembered(
    run: Trained, examples: int, dtype: torch.dtype, device: torch.device, console: Console | None = None
) -> RememberedReport:
    """Tell which held-out tokens a trained model's memory helps to predict, in this process.

    examples: tokens to show at most. Raises: as `evaluate_run` and `remembered`; ConfigError for a model without a
    memory, or without a tokenizer.
    """
    if not memory_components(run.config.model):
        raise ConfigError(f"{run.origin}: has no memory; nothing passes from chunk to chunk")
    tokenizer = open_tokenizer(run.config)
    if tokenizer is None:
        raise ConfigError(f"{run.origin}: its configuration names no tokenizer; give data.tokenizer=FOLDER")
    documents = _documents(run)
    topology = Topology.start(device=str(device))
    evaluator = Evaluator(run.load(dtype, topology.device), topology, run.config.evaluation.rows)
    with Passes(console) as passes:
        return remembered(evaluator, documents, tokenizer.decode, examples, passes.named)


def _documents(run: Trained) -> list[EvaluationDocument]:
    """Return what the evaluation of a trained model reads.

    Raises: ConfigError for an evaluation that changes how the model is read, as only `evaluate_run` does; DataError
        where no document is longer than a chunk.
    """
    evaluation = run.config.evaluation
    for name, changed in (
        ("forget_every_chunk=false", evaluation.forget_every_chunk),
        ("forget_long_term=false", evaluation.forget_long_term),
        ("corruption.share=0", evaluation.corruption.share > 0),
    ):
        if changed:
            field = name.partition("=")[0]
            raise ConfigError(f"evaluation.{field}: is for `megamem evaluate` alone; give evaluation.{name}")
    tokenizer = open_tokenizer(run.config)
    counter = TextCounter(tokenizer.token_bytes()) if tokenizer else None
    found, size = final_documents(held_out_text(run), run.config, counter), run.config.model.chunk_size
    if all(document.predicted_tokens <= size for document in found):
        raise DataError(
            f"data.validation: no document is longer than a chunk of {size} tokens, where a memory begins to count; "
            "give longer ones, or a larger evaluation.sequence_length if it cuts them"
        )
    return found


@dataclass(frozen=True)
class _Reading:
    """A model, and the text that it is to read."""

    run: Trained
    documents: list[EvaluationDocument]
    measured: MeasuredModel

    @classmethod
    def of(cls, run: Trained) -> _Reading:
        """Open the text of a model. Raises as `evaluate_run`."""
        documents = _documents(run)
        measured = MeasuredModel(
            origin=run.origin,
            title=run.title,
            chunk_size=run.config.model.chunk_size,
            tokenizer=vocabulary_hash(run.config.data.tokenizer),
            text_sha256=text_sha256(documents),
        )
        return cls(run, documents, measured)

    def losses(self, dtype: torch.dtype, topology: Topology, passes: Passes, *, off: bool) -> ModelLosses:
        """Read the text with the model. off: with the memory off, too."""
        run, measured = self.run, self.measured
        evaluator = Evaluator(run.load(dtype, topology.device), topology, run.config.evaluation.rows)
        losses = evaluator.losses(self.documents, progress=passes.named(run.title))
        without = losses
        if off:
            without = evaluator.losses(self.documents, forget=True, progress=passes.named(f"{run.title}, off"))
        result = {
            "chunk_size": measured.chunk_size,
            "tokenizer": measured.tokenizer,
            "losses": losses.to_dict(),
            "memory": {"memory_off_documents": without.to_dict()["documents"]},
        }
        return ModelLosses.of(result, run.origin, run.title)


Open = Callable[[Sequence[str]], Trained]
"""Opens a trained model with overrides of its configuration (`key.path=value`)."""


def evaluate_lengths(
    models: Sequence[Open],
    segments: Sequence[int],
    overrides: Sequence[str],
    dtype: torch.dtype,
    device: torch.device,
    console: Console | None = None,
) -> list[LengthCurve]:
    """Evaluate trained models on the same held-out text with memories of several lengths, in this process.

    Args:
        models: open one each.
        segments: lengths of the memory, in chunks.
        overrides: of all models' configurations.
        dtype: of the weights.
        device: where models are read with.
        console: where a progress bar is shown for each model; none if not given.
    Raises: as `evaluate_run`; ConfigError for a model without a length of its memory, or with other held-out tokens
        than the first one has.
    """
    opened = [model(overrides) for model in models]
    # what is overridden may change the length that a run's own configuration gives by default, the chunk's
    trained = [length_fields(model([]).config.model, run.origin) for model, run in zip(models, opened, strict=True)]
    topology = Topology.start(device=str(device))
    first: tuple[Trained, list[EvaluationDocument]] | None = None
    curves = []
    with Passes(console) as passes:
        for model, run, as_trained in zip(models, opened, trained, strict=True):
            documents = _documents(run)
            first = first or (run, documents)
            _check_same(run, documents, *first)
            chunk, fields = run.config.model.chunk_size, length_fields(run.config.model, run.origin)
            progress = passes.named(run.title, len(segments))
            points, tokens = [], 0
            for count in segments:
                changed = model([*overrides, *(f"{field}={count * chunk}" for field in fields)])
                evaluator = Evaluator(changed.load(dtype, topology.device), topology, run.config.evaluation.rows)
                report = evaluator.losses(documents, progress=progress)
                points.append(LengthLoss.of(count, chunk, report))
                tokens = report.tokens
            curves.append(
                LengthCurve(
                    origin=run.origin,
                    title=run.title,
                    mixers=tuple(dict.fromkeys(mixer.kind for mixer in fields.values())),
                    chunk_size=chunk,
                    trained=tuple(sorted({mixer.length for mixer in as_trained.values()})),
                    tokens=tokens,
                    points=tuple(points),
                )
            )
    return curves


def _check_same(
    run: Trained, documents: Sequence[EvaluationDocument], other: Trained, others: Sequence[EvaluationDocument]
) -> None:
    """Raise ConfigError where two models' chunks or held-out documents differ: such losses cannot be compared."""
    same = len(documents) == len(others) and all(
        torch.equal(ours.tokens, theirs.tokens) and torch.equal(ours.labels, theirs.labels)
        for ours, theirs in zip(documents, others, strict=True)
    )
    if not same or run.config.model.chunk_size != other.config.model.chunk_size:
        raise ConfigError(
            f"{run.origin}: its held-out tokens are not those of {other.origin}, or not in the same chunks; models "
            "need the same data.validation, chunk_size, sequence_length and evaluation.final_max_tokens to be compared"
        )
