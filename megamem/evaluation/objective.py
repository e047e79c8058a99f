"""Held-out documents as the objective of a run has them read and predicted."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.config.run import RunConfig
from megamem.data.batch import IGNORED, EvaluationDocument
from megamem.errors import DataError
from megamem.model.objective import Objective, build_objective
from tokenization.text_size import TextCounter


def as_predicted(
    documents: Iterable[EvaluationDocument], config: RunConfig, counter: TextCounter | None, reading: int = 0
) -> Iterable[EvaluationDocument]:
    """Return what evaluation reads of held-out documents under `training.objective`, and predicts there.

    Args:
        documents: as their sources have them.
        config: of the run; `data.sequence_length` says how long a copy and its original are.
        counter: measures the text of other labels than the documents'; without it the size is not known.
        reading: number of the objective's reading.
    """
    objective = build_objective(config.training.objective, config.model).readings[reading].objective
    return _Predicted(documents, objective, config, counter)


class _Predicted(Iterable[EvaluationDocument]):
    """Documents under an objective, made anew whenever they are gone through."""

    def __init__(
        self,
        documents: Iterable[EvaluationDocument],
        objective: Objective,
        config: RunConfig,
        counter: TextCounter | None,
    ) -> None:
        self.documents = list(documents) if isinstance(documents, Iterator) else documents
        self.objective, self.kind, self.counter = objective, config.training.objective.kind, counter
        self.length = config.data.sequence_length

    def __iter__(self) -> Iterator[EvaluationDocument]:
        text = self.objective.held_out_text(self.length)
        if text is None:
            yield from map(self._changed, self.documents)
            return
        found = False
        for document in self.documents:
            for sequence in _sequences(document, text, self.length):
                found = True
                yield self._changed(sequence)
        if not found:
            raise DataError(
                f"data.validation: no document has {text:,} tokens, of which training.objective {self.kind} makes a "
                f"sequence of data.sequence_length {self.length:,}"
            )

    def _changed(self, document: EvaluationDocument) -> EvaluationDocument:
        """Return a document, or tokens of one, with the objective's inputs and labels."""
        tokens, labels = self.objective.inputs_and_labels(document.tokens[:, None], document.labels[:, None])
        tokens, labels = tokens[:, 0], labels[:, 0]
        size = document.text_size
        if not torch.equal(labels, document.labels):
            size = None if self.counter is None else self.counter.count(labels[labels != IGNORED].numpy())
        return replace(document, tokens=tokens, labels=labels, text_size=size)


def _sequences(document: EvaluationDocument, text: int, length: int) -> Iterator[EvaluationDocument]:
    """Yield each `text` tokens of a document that are there in full, with padding up to `length`."""
    whole = _text(document)
    for begin in range(0, len(whole) - text + 1, text):
        yield EvaluationDocument(
            name=f"{document.name}, tokens {begin:,} to {begin + text - 1:,}",
            tokens=F.pad(whole[begin : begin + text], (0, length - text)),
            labels=torch.full((length,), IGNORED),
            predicted_tokens=length,
            text_size=None,
        )


def _text(document: EvaluationDocument) -> Tensor:
    """Return all tokens of a document, [tokens]: those that are read, and what its last label says besides."""
    read = document.predicted_tokens
    last = document.labels[read - 1 : read]
    return torch.cat((document.tokens[:read], last[last != IGNORED]))
