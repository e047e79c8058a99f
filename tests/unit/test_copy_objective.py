"""Copying: inputs and labels by a loop, refusals, held-out text as copies, and models that learn to copy or cannot."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from megamem.config.load import merge, parse_config
from megamem.config.model import ModelConfig
from megamem.config.run import RunConfig
from megamem.data.batch import IGNORED, Batch, EvaluationDocument
from megamem.errors import ConfigError, DataError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.losses import cut_documents
from megamem.evaluation.objective import as_predicted
from megamem.evaluation.run import final_documents
from megamem.memory.base import detach
from megamem.model.objective import Objective, build_objective
from megamem.model.objectives.next_token import NextToken
from megamem.model.stage import Stage, build_stage
from megamem.parallel.linears import PlainLinears, initialize_parameters
from megamem.pipeline.train_chunk import chunk_places
from megamem.pipeline.window import Window
from megamem.training import build
from tests.unit.evaluation_helpers import CHUNK, VOCABULARY, document, slow_logits
from tokenization.text_size import TextSize

LENGTH, ROWS = 4 * CHUNK, 3
COPY, BLANK_COPY = {"kind": "copy"}, {"kind": "blank_copy", "blank_token": 5}
SHAPE = {
    "layers": 2, "hidden_size": 32, "heads": 4, "vocab_size": VOCABULARY, "chunk_size": CHUNK,
    "mixer": "full_attention",
}  # fmt: skip
TREE: dict[str, Any] = {
    "name": "case",
    "model": SHAPE,
    "data": {"sources": "none", "sequence_length": LENGTH},
    "training": {"steps": 10, "batch_tokens": ROWS * LENGTH, "micro_batch_size": ROWS, "objective": COPY},
}


def config(**sections: Any) -> RunConfig:
    return parse_config(RunConfig, merge(TREE, sections), "file")


def built(kind: dict[str, Any], **model: Any) -> Objective:
    run = config(training={"objective": kind}, model=model)
    return build_objective(run.training.objective, run.model)


def text(length: int = LENGTH, rows: int = ROWS, seed: int = 0) -> tuple[Tensor, Tensor]:
    ids = torch.randint(VOCABULARY, (length + 1, rows), generator=torch.Generator().manual_seed(seed))
    return ids[:-1], ids[1:]


def by_loop(tokens: Tensor, blank: int | None) -> tuple[list[list[int]], list[list[int]]]:
    """Inputs and labels [rows][tokens]: what is read after a place is predicted there, if it is a copied token."""
    inputs, labels = [], []
    for row in tokens.T.tolist():
        first = row[: len(row) // 2]
        copied = [*first, *first]
        inputs.append([*first, *(first if blank is None else [blank] * len(first))])
        following = [
            copied[place + 1] if place + 1 >= len(first) and place + 1 < len(row) else IGNORED
            for place in range(len(row))
        ]
        labels.append(following)
    return inputs, labels


@pytest.mark.parametrize(("kind", "blank"), [(COPY, None), (BLANK_COPY, 5)])
def test_inputs_and_labels_are_those_of_a_loop(kind: dict[str, Any], blank: int | None) -> None:
    tokens, labels = text()
    before = tokens.clone(), labels.clone()
    inputs, wanted = built(kind).inputs_and_labels(tokens, labels)
    assert (inputs.T.tolist(), wanted.T.tolist()) == by_loop(tokens, blank)
    assert (wanted != IGNORED).sum() == ROWS * LENGTH // 2, "each copied token is predicted once"
    for kept, given in zip(before, (tokens, labels), strict=True):
        assert torch.equal(kept, given), "the batch stays as it is"
    for again, first in zip(
        built(kind).inputs_and_labels(tokens, torch.zeros_like(labels)), (inputs, wanted), strict=True
    ):
        assert torch.equal(again, first), "they depend on the tokens alone"


def test_next_token_is_as_it_was() -> None:
    tokens, labels = text()
    objective = built({"kind": "next_token"})
    assert isinstance(objective, NextToken)
    assert objective.held_out_text(LENGTH) is None
    assert all(a is b for a, b in zip(objective.inputs_and_labels(tokens, labels), (tokens, labels), strict=True))


class HandedLogits:
    """A last stage whose hidden vectors are logits."""

    def token_losses(self, hidden: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(hidden.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="none")


@pytest.mark.parametrize("kind", [COPY, BLANK_COPY])
def test_a_model_that_copies_has_no_loss(kind: dict[str, Any]) -> None:
    """And one that is wrong at a single place has the loss of that place, under the objective's name."""
    tokens, labels = text()
    objective = built(kind)
    _, wanted = objective.inputs_and_labels(tokens, labels)
    # what was read half a sequence before the token that follows; anything where nothing is asked
    remembered = tokens.roll(LENGTH // 2 - 1, 0)
    logits = 1000.0 * F.one_hot(remembered, VOCABULARY).float()
    (name,) = objective.names
    assert name == kind["kind"]
    assert objective.losses(HandedLogits(), logits, wanted) == {name: 0.0}  # type: ignore[arg-type]
    logits[LENGTH // 2 + 3, 1] = 0
    loss = objective.losses(HandedLogits(), logits, wanted)[name]  # type: ignore[arg-type]
    assert loss.item() == pytest.approx(np.log(VOCABULARY), rel=1e-6)


def stage_of(mixer: str, dtype: torch.dtype = torch.float64, **more: Any) -> Stage:
    stage = build_stage(ModelConfig.model_validate({**SHAPE, "mixer": mixer, "init_std": 0.3, **more}), PlainLinears())
    initialize_parameters(stage, 1)
    return stage.to(dtype)


def batch(objective: Objective, seed: int = 0, rows: int = ROWS) -> Batch:
    """Random tokens as the engines prepare them."""
    tokens, labels = objective.inputs_and_labels(*text(rows=rows, seed=seed))
    starts = np.arange(0, LENGTH, CHUNK)[:, None].repeat(rows, 1)
    return Batch(tokens, labels, starts, tuple(range(rows)))


def by_token(stage: Stage, own: EvaluationDocument) -> tuple[float, int]:
    """Nats, and right guesses, of a document's predicted tokens, read one by one."""
    asked = [(logits, int(own.labels[at])) for at, logits in slow_logits(stage, own) if own.labels[at] != IGNORED]
    nats = sum(float(torch.logsumexp(logits, 0) - logits[label]) for logits, label in asked)
    return nats, sum(int(logits.argmax()) == label for logits, label in asked)


@pytest.mark.parametrize("kind", [COPY, BLANK_COPY])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_windows_see_the_labels_of_their_chunks(kind: dict[str, Any], chunks: int) -> None:
    """The losses of all windows are those of documents that are read token by token."""
    objective, stage = built(kind), stage_of("full_attention")
    own = batch(objective)
    places, states, total = chunk_places(own), stage.initial_states(ROWS, torch.device("cpu"), torch.float64), 0.0
    window = Window(stage, objective)
    for first in range(0, len(places), chunks):
        part = slice(first * CHUNK, (first + chunks) * CHUNK)
        _, losses, states = window(
            own.tokens[part], own.labels[part], places[first : first + chunks], detach(states), torch.ones(())
        )
        total += losses[0].item()
    rows = [EvaluationDocument("row", own.tokens[:, r], own.labels[:, r], LENGTH, None) for r in range(ROWS)]
    assert total == pytest.approx(sum(by_token(stage, row)[0] for row in rows), rel=1e-10)


REFUSALS = {
    "a half of one chunk and a half": (
        {"data": {"sequence_length": 3 * CHUNK}, "training": {"batch_tokens": 3 * CHUNK, "micro_batch_size": 1}},
        ["data.sequence_length 24", "half is no whole number of chunks", "training.objective copy", "multiple of 16"],
    ),
    "documents that begin anywhere": (
        {"data": {"reset": "exact"}}, ["data.reset exact", "training.objective copy", "use none"],
    ),
    "padding": ({"data": {"documents": "pad"}}, ["data.documents pad", "padding would be copied", "use join or drop"]),
    "several documents a row": ({"data": {"documents": "pack"}}, ["data.documents pack", "use join or drop"]),
    "rows that read on": (
        {"data": {"feeding": "streams"}, "training": {"objective": "blank_copy"}},
        ["data.feeding streams", "training.objective blank_copy", "use sequences"],
    ),
    "a blank beyond the vocabulary": (
        {"training": {"objective": {"kind": "blank_copy", "blank_token": VOCABULARY}}},
        ["training.objective: blank_copy's blank_token 32", "below model.vocab_size 32"],
    ),
    "a phase with an odd half": (
        {"training": {"phases": [
            {"from_step": 5, "sequence_length": CHUNK, "batch_tokens": CHUNK, "micro_batch_size": 1},
        ]}},
        ["training.phases.0 (after step 5)", "data.sequence_length 8"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSALS)
def test_refusals(name: str) -> None:
    sections, words = REFUSALS[name]
    with pytest.raises(ConfigError) as error:
        config(**sections)
    message = str(error.value)
    assert "\n" not in message.strip()
    for word in words:
        assert word in message


@pytest.mark.parametrize("documents", ["join", "drop"])
def test_sequences_of_one_context_are_taken(documents: str) -> None:
    assert config(data={"documents": documents}).training.objective.kind == "copy"


# held-out text


class OneByteEach:
    """Counts every token as a byte."""

    def count(self, ids: Any) -> TextSize:
        return TextSize(bytes=len(ids), characters=len(ids), words=1, lines=0)


def test_held_out_documents_are_copied_piece_by_piece() -> None:
    """Every half sequence of text that is there in full; a document's last label is text as well."""
    half = LENGTH // 2
    documents = [document(2 * half - 1, 1), document(half - 2, 2), document(3 * half + 5, 3)]
    found = list(as_predicted(iter(documents), config(), OneByteEach()))  # type: ignore[arg-type]
    assert [len(sequence.tokens) for sequence in found] == [LENGTH] * 5
    assert [sequence.name for sequence in found][:3] == [
        "document 1, tokens 0 to 15", "document 1, tokens 16 to 31", "document 3, tokens 0 to 15",
    ]  # fmt: skip
    whole = torch.cat((documents[0].tokens[: 2 * half - 1], documents[0].labels[2 * half - 2 : 2 * half - 1]))
    for sequence, first in zip(found, (whole[:half], whole[half:], documents[2].tokens[:half]), strict=False):
        expected = by_loop(torch.cat((first, first))[:, None], None)
        assert ([sequence.tokens.tolist()], [sequence.labels.tolist()]) == expected
        assert sequence.text_size is not None
        assert sequence.text_size.bytes == half


def test_no_document_is_long_enough() -> None:
    with pytest.raises(DataError, match=r"no document has 16 tokens, of which training\.objective copy"):
        list(as_predicted([document(LENGTH // 2 - 2, 1)], config(), None))


def test_documents_of_the_next_token_stay_as_they_are() -> None:
    documents = [document(20, 1), document(3, 2)]
    run = config(training={"objective": "next_token"})
    for changed, own in zip(as_predicted(documents, run, None), documents, strict=True):
        assert torch.equal(changed.tokens, own.tokens)
        assert torch.equal(changed.labels, own.labels)
        assert (changed.name, changed.predicted_tokens, changed.text_size) == (
            own.name, own.predicted_tokens, own.text_size,
        )  # fmt: skip


@pytest.mark.parametrize("kind", [COPY, BLANK_COPY])
def test_held_out_figures_are_of_copied_tokens(kind: dict[str, Any]) -> None:
    """Loss and accuracy over the copied tokens alone, against reading token by token; a bound takes whole copies."""
    stage, run = stage_of("full_attention"), config(training={"objective": kind}, evaluation={"final_max_tokens": 70})
    documents = final_documents([document(100, 4)], run, None)
    assert len(documents) == 2, "70 tokens are two sequences of 32"
    report = Evaluator(stage, rows=ROWS).losses(documents)
    nats, right = np.sum([by_token(stage, own) for own in documents], axis=0)
    assert report.tokens == LENGTH
    assert report.loss == pytest.approx(nats / LENGTH, rel=1e-10)
    assert report.accuracy == right / LENGTH


def test_validations_while_training_read_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    run = config(data={"validation": ["held out"]}, evaluation={"max_tokens": 3 * LENGTH})
    monkeypatch.setattr(build, "held_out_documents", lambda _: [document(100, 4)])
    monkeypatch.setattr(build, "validate", lambda engine, texts, watch: texts)
    validation = build.build_validation(SimpleNamespace(config=run), [], lambda _: None)  # type: ignore[arg-type]
    assert validation is not None
    found: Any = validation.evaluate()
    wanted = list(as_predicted([document(100, 4)], run, None))[:3]
    for own, other in zip(found[0], wanted, strict=True):
        assert torch.equal(own.tokens, other.tokens)
        assert torch.equal(own.labels, other.labels)


# learning

STEPS = 200
"""Attention copies every token from here on, and more than half of them after 100 steps."""


def accuracy_after_training(kind: dict[str, Any], mixer: str, steps: int) -> float:
    """Train a small model on random tokens; return its share of copied tokens of others that it predicts."""
    objective = built(kind)
    stage = stage_of(mixer, torch.float32, init_std=0.05)
    window, rows = Window(stage, objective), 16
    optimizer = torch.optim.AdamW(stage.parameters(), lr=3e-3, weight_decay=0.0)
    for step in range(steps):
        own = batch(objective, seed=step, rows=rows)
        states = stage.initial_states(rows, torch.device("cpu"), torch.float32)
        scale = 1 / (own.labels != IGNORED).sum()
        loss, *_ = window(own.tokens, own.labels, chunk_places(own), states, scale)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    run = config(training={"objective": kind})
    text = document(16 * LENGTH, 10_000)
    report = Evaluator(stage, rows=16).losses(cut_documents(as_predicted([text], run, None), CHUNK, None))
    return report.accuracy


@pytest.mark.parametrize(("kind", "least"), [(COPY, 0.9), pytest.param(BLANK_COPY, 0.6, marks=pytest.mark.slow)])
def test_attention_over_the_sequence_learns_to_copy(kind: dict[str, Any], least: float) -> None:
    """Random tokens, of which only the first half says what comes; chance is 1 of 32, measured are 1.0 and 0.88."""
    assert accuracy_after_training(kind, "full_attention", STEPS) > least


def test_without_a_memory_blanks_say_nothing() -> None:
    """Within the chunk there are blanks alone, and in the chunk before the copy other tokens than its first one."""
    assert accuracy_after_training(BLANK_COPY, "local_attention", STEPS) < 0.1
