"""Runs beside a reference: differences against a naive loop, pieces of documents, what is refused, the command."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from megamem.cli.main import app
from megamem.errors import ConfigError, DataError
from megamem.evaluation.comparison import Comparison, compare
from megamem.evaluation.comparison_report import (
    FEW,
    NUMBERS,
    PICTURE,
    comparison_figure,
    comparison_table,
    shown_estimate,
)
from megamem.evaluation.recovered import ModelLosses
from tests.unit.evaluation_helpers import CHUNK
from tests.unit.test_recovered import LOCAL, MEMORY, TOKENS


def naive_difference(ours: ModelLosses, theirs: ModelLosses) -> tuple[float, float]:
    """The difference per token beyond the first chunk, and its standard error, in plain numbers."""
    nats, tokens = [], []
    for row in range(len(TOKENS)):
        if count := sum(TOKENS[row][1:]):
            tokens.append(count)
            nats.append(sum(a - b for a, b in zip(ours.nats[row][1:], theirs.nats[row][1:], strict=True)))
    mean = sum(nats) / sum(tokens)
    rests = [nat - mean * count for nat, count in zip(nats, tokens, strict=True)]
    return mean, math.sqrt(len(rests)) * statistics.stdev(rests) / sum(tokens)


def test_differences_are_paired_by_document() -> None:
    found = compare(LOCAL, [MEMORY])
    reference, model = found.models
    mean, error = naive_difference(MEMORY, LOCAL)
    assert (model.difference.value, model.difference.stderr) == pytest.approx((mean, error), rel=1e-12)
    assert (found.documents, found.tokens) == (4, int(TOKENS[:, 1:].sum())), "one document is no longer than a chunk"
    assert model.better == 4
    assert model.loss - reference.loss == pytest.approx(mean, rel=1e-12)
    off = MEMORY.memory_off_nats[:, 1:].sum() / TOKENS[:, 1:].sum()
    assert model.memory_gain.value == pytest.approx(off - model.loss, rel=1e-12)
    assert (reference.difference.value, reference.better, reference.memory_gain.value) == (0, 0, 0)


def test_runs_of_one_name_are_told_apart_by_their_folders() -> None:
    there = [replace(MEMORY, title="books", origin=f"studies/{name}/books/evaluation.json") for name in "ab"]
    found = compare(LOCAL, there)
    assert [model.title for model in found.models] == [LOCAL.title, "studies/a/books", "studies/b/books"]
    assert compare(there[0], [LOCAL]).reference == "books"


def test_positions_add_up_to_the_whole() -> None:
    found = compare(LOCAL, [MEMORY]).models[1]
    assert [(part.first, part.last) for part in found.by_position] == [
        (CHUNK * k + 1, CHUNK * (k + 1)) for k in range(1, 5)
    ]
    counts = TOKENS[:, 1:].sum(0)
    losses = np.array([part.loss for part in found.by_position])
    assert (losses * counts).sum() / counts.sum() == pytest.approx(found.loss, rel=1e-12)
    assert found.by_position[3].difference.stderr is not None, "two documents"
    parts = compare(_only_last(LOCAL), [_only_last(MEMORY)]).models[1].by_position
    assert [part.difference.stderr is None for part in parts] == [False, False, False, True]


def _only_last(model: ModelLosses) -> ModelLosses:
    """The same with its first document one chunk shorter: the last chunk has one document left."""
    return replace(model, nats=_cut(model.nats), tokens=_cut(model.tokens), memory_off_nats=_cut(model.memory_off_nats))


def _cut(table: np.ndarray) -> np.ndarray:
    shorter = table.copy()
    shorter[0, -1] = 0
    return shorter


def test_pieces_of_a_document_are_one_draw() -> None:
    pieces = [replace(model, names=("a", "a", "b", "c", "b")) for model in (LOCAL, MEMORY)]
    found = compare(pieces[0], pieces[1:])
    sums = [np.add.reduceat(m.nats[[0, 1, 2, 4, 3], 1:].sum(1), [0, 2, 4]) for m in (LOCAL, MEMORY)]
    assert found.documents == 2
    assert found.models[1].better == int((sums[1] < sums[0])[:2].sum())
    mean, error = naive_difference(MEMORY, LOCAL)
    assert found.models[1].difference.value == pytest.approx(mean, rel=1e-12)
    # of two draws, not of the four pieces
    counts = np.add.reduceat(TOKENS[[0, 1, 2, 4, 3], 1:].sum(1), [0, 2, 4])[:2]
    rests = (sums[1] - sums[0])[:2] - mean * counts
    wanted = math.sqrt(2) * statistics.stdev(rests.tolist()) / counts.sum()
    assert found.models[1].difference.stderr == pytest.approx(wanted, rel=1e-12)
    assert wanted != pytest.approx(error, rel=0.01)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(ConfigError, match="are not evaluated on the same text"):
        compare(LOCAL, [replace(MEMORY, text_sha256="other")])
    short = replace(LOCAL, nats=LOCAL.nats[:, :1], tokens=TOKENS[:, :1], memory_off_nats=LOCAL.nats[:, :1])
    with pytest.raises(DataError, match="no document is longer than a chunk"):
        compare(short, [short])


def test_the_table_has_the_reference_first() -> None:
    found = compare(LOCAL, [MEMORY])
    columns = [list(column.cells) for column in comparison_table(found).columns]
    assert columns[0] == ["local", "memory"]
    assert columns[2] == ["", shown_estimate(found.models[1].difference)]
    assert columns[3] == ["", "4 of 4"]


def test_the_command_reads_what_evaluations_leave(tmp_path: Path) -> None:
    for model in (LOCAL, MEMORY):
        _write(tmp_path / model.title, model)
    out = tmp_path / "out"
    ran = CliRunner().invoke(app, ["compare", str(tmp_path / "local"), str(tmp_path / "memory"), "--out", str(out)])
    assert ran.exit_code == 0, ran.output
    found: Comparison = compare(LOCAL, [MEMORY])
    numbers = json.loads((out / NUMBERS).read_text())
    assert numbers["models"][1]["difference"]["value"] == pytest.approx(found.models[1].difference.value, rel=1e-12)
    assert (out / PICTURE).read_bytes().startswith(b"\x89PNG")
    again = CliRunner().invoke(app, ["compare", str(tmp_path / "local"), str(tmp_path / "memory"), "--out", str(out)])
    assert isinstance(again.exception, DataError), "nothing is overwritten"


def test_pictures_of_many_models_have_one_legend() -> None:
    models = [replace(MEMORY, title=f"memory {number}") for number in range(FEW)]
    few, many = (comparison_figure(compare(LOCAL, models[:count])).axes for count in (FEW - 1, FEW))
    assert [panel.get_legend() is None for panel in few] == [False, False]
    assert [panel.get_legend() is None for panel in many] == [True, False]
    assert [text.get_text() for text in many[1].get_legend().get_texts()] == ["local", *(m.title for m in models)]


def _write(folder: Path, model: ModelLosses) -> None:
    """Write the part of an evaluation that holds losses by document."""
    folder.mkdir()

    def rows(nats: np.ndarray) -> list[dict[str, object]]:
        return [
            {"name": name, "chunk_nats": list(own[count > 0]), "chunk_tokens": list(count[count > 0])}
            for name, own, count in zip(model.names, nats, model.tokens, strict=True)
        ]

    result = {
        "chunk_size": model.chunk_size, "tokenizer": model.tokenizer,
        "losses": {"documents": rows(model.nats), "text_sha256": model.text_sha256},
        "memory": {"memory_off_documents": rows(model.memory_off_nats)},
    }  # fmt: skip
    (folder / "evaluation.json").write_text(json.dumps(result), encoding="utf-8")
