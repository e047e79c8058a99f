"""Delimiters before a copy: exact tables of tokens, held-out text, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from megamem.config.load import merge, parse_config
from megamem.config.run import RunConfig
from megamem.data.batch import IGNORED
from megamem.errors import ConfigError
from megamem.evaluation.objective import as_predicted
from megamem.model.objective import Objective, build_objective
from tests.unit.evaluation_helpers import CHUNK, VOCABULARY, document

LENGTH = 4 * CHUNK
MARK, BLANK, COUNT = 31, 30, 3
TREE: dict[str, Any] = {
    "name": "case",
    "model": {"layers": 1, "hidden_size": 8, "heads": 2, "vocab_size": VOCABULARY, "chunk_size": CHUNK},
    "data": {"sources": "none", "sequence_length": LENGTH},
    "training": {"steps": 10, "batch_tokens": LENGTH},
}
N = IGNORED


def config(objective: dict[str, Any]) -> RunConfig:
    return parse_config(RunConfig, merge(TREE, {"training": {"objective": objective}}), "file")


def built(kind: str, **delimiter: Any) -> Objective:
    blank = {"blank_token": BLANK} if kind == "blank_copy" else {}
    run = config({"kind": kind, "delimiter": {"token": MARK, **delimiter}, **blank})
    return build_objective(run.training.objective, run.model)


@pytest.mark.parametrize(
    ("kind", "placement", "read", "predicted"),
    [
        ("copy", "insert", [1, 2, 3, 4, 5, 31, 31, 1, 2, 3], [N, N, N, N, N, N, 1, 2, 3, N]),
        ("blank_copy", "insert", [1, 2, 3, 4, 5, 31, 31, 30, 30, 30], [N, N, N, N, N, N, 1, 2, 3, N]),
        ("copy", "overwrite", [1, 2, 3, 4, 5, 31, 31, 3, 4, 5], [N, N, N, N, N, N, 3, 4, 5, N]),
        ("blank_copy", "overwrite", [1, 2, 3, 4, 5, 31, 31, 30, 30, 30], [N, N, N, N, N, N, 3, 4, 5, N]),
    ],
)
def test_tables_by_hand(kind: str, placement: str, read: list[int], predicted: list[int]) -> None:
    """Two delimiters in a sequence of ten tokens."""
    tokens = torch.arange(1, 11)[:, None]
    inputs, labels = built(kind, count=2, placement=placement).inputs_and_labels(tokens, tokens + 1)
    assert inputs[:, 0].tolist() == read
    assert labels[:, 0].tolist() == predicted


@pytest.mark.parametrize("kind", ["copy", "blank_copy"])
@pytest.mark.parametrize("placement", ["insert", "overwrite"])
def test_all_but_as_many_tokens_as_there_are_delimiters_are_predicted(kind: str, placement: str) -> None:
    """Each copied token once, in its order, the first one behind the last delimiter."""
    tokens = torch.randint(MARK - 1, (LENGTH, 3), generator=torch.Generator().manual_seed(0))
    objective, half = built(kind, placement=placement), LENGTH // 2
    inputs, labels = objective.inputs_and_labels(tokens, tokens)
    assert inputs.shape == labels.shape == tokens.shape
    begin = half + COUNT - 1
    first = 0 if placement == "insert" else COUNT
    for row in range(3):
        assert inputs[begin - COUNT + 1 : begin + 1, row].tolist() == [MARK] * COUNT
        assert inputs[begin - COUNT, row] != MARK
        asked = [place for place in range(LENGTH) if labels[place, row] != IGNORED]
        assert asked == list(range(begin, begin + half - COUNT))
        assert labels[asked, row].tolist() == tokens[first : first + half - COUNT, row].tolist()
        if kind == "copy":
            # what is predicted at a place is read at the next one
            assert [inputs[place + 1, row] for place in asked] == labels[asked, row].tolist()


@pytest.mark.parametrize("placement", ["insert", "overwrite"])
def test_held_out_documents_are_cut_into_the_text_of_a_copy(placement: str) -> None:
    text = LENGTH // 2
    run = config({"kind": "copy", "delimiter": {"token": MARK, "placement": placement}})
    found = list(as_predicted([document(2 * text, 1)], run, None))
    assert [sequence.name for sequence in found] == [
        f"document 1, tokens 0 to {text - 1}", f"document 1, tokens {text} to {2 * text - 1}",
    ]  # fmt: skip
    for sequence in found:
        assert len(sequence.tokens) == LENGTH
        assert int((sequence.labels != IGNORED).sum()) == LENGTH // 2 - COUNT
        assert int((sequence.tokens == MARK).sum()) >= COUNT


@pytest.mark.parametrize(
    ("delimiter", "words"),
    [
        ({"token": VOCABULARY}, ["training.objective: copy's delimiter.token 32", "below model.vocab_size 32"]),
        (
            {"token": 3, "count": CHUNK},
            ["copy's delimiter.count 8 fills a whole chunk", "fewer than model.chunk_size 8"],
        ),
        ({"token": 3, "placement": "before"}, ["delimiter.placement", "'insert' or 'overwrite'", "got 'before'"]),
        ({"token": 3, "cuont": 2}, ["delimiter.cuont: unknown key; did you mean 'count'?"]),
        ({"count": 2}, ["delimiter.token: required"]),
    ],
)
def test_refusals(delimiter: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ConfigError) as error:
        config({"kind": "copy", "delimiter": delimiter})
    message = str(error.value)
    assert "\n" not in message.strip()
    for word in words:
        assert word in message
