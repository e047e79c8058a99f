"""What a memory helps to predict: distances and losses against naive loops, groups, examples, the report."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from megamem.data.batch import IGNORED
from megamem.errors import ConfigError, DataError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.reading import Float64
from megamem.evaluation.remembered import LEAST_BEFORE, last_read, remembered
from megamem.evaluation.remembered_report import NUMBERS, PICTURE, remembered_tables, write_remembered
from megamem.training import held_out
from tests.unit.evaluation_helpers import CHUNK, CPU, ROWS, TOLERANCE, documents, make_stage, slow_losses


def test_distances_are_those_of_a_search_through_the_text() -> None:
    draws = np.random.default_rng(0)
    tokens = draws.integers(0, 9, 60).tolist()
    labels = [*tokens[1:], 3]
    found = last_read(tokens, labels, size=8)
    for place, label in enumerate(labels):
        chunk = tokens[place - place % 8 : place + 1]
        read = tokens[: place + 1]
        if label not in read:
            assert found[place] == -1
        elif label in chunk:
            assert found[place] == 0
        else:
            assert found[place] == read[::-1].index(label) + 1
    assert set(np.sign(found).tolist()) == {-1, 0, 1}, "all kinds occur"


def decode(tokens: Sequence[int]) -> str:
    """Each token is a word of five letters."""
    return "".join(f" {'abcdefgh'[token // 8] * 4}{'stuvwxyz'[token % 8]}" for token in tokens)


TEXTS = documents(8 * CHUNK, 7 * CHUNK - 2, 8 * CHUNK, CHUNK)


def losses_one_by_one(kind: str) -> list[tuple[Float64, Float64]]:
    """Losses [T] of each text with the memory and without it, token by token."""
    stage = make_stage(kind)
    found = []
    for text in TEXTS:
        count = text.predicted_tokens
        on = slow_losses(stage, text)[:count]
        parts = [slow_losses(stage, text, begin, min(begin + CHUNK, count)) for begin in range(0, count, CHUNK)]
        found.append((np.asarray(on), np.concatenate(parts)))
    return found


@pytest.mark.parametrize("kind", ["elastic_memory", "infini_attention"])
def test_losses_of_tokens_are_those_of_a_token_by_token_reading(kind: str) -> None:
    """Documents of different lengths side by side, memory on and off; padding has no loss."""
    evaluator = Evaluator(make_stage(kind), rows=ROWS)
    both = [evaluator.token_losses(TEXTS, forget=forget) for forget in (False, True)]
    for text, on, off, wanted in zip(TEXTS, *both, losses_one_by_one(kind), strict=True):
        assert len(on) == len(off) == len(text.tokens)
        count = text.predicted_tokens
        np.testing.assert_allclose(on[:count], wanted[0], rtol=0, atol=TOLERANCE)
        np.testing.assert_allclose(off[:count], wanted[1], rtol=0, atol=TOLERANCE)
        assert not on[count:].any()
        assert not off[count:].any()


def naive_groups(kind: str) -> dict[str, list[tuple[int, float]]]:
    """(document, gain) of every token beyond the first chunk, by where it was last read."""
    groups: dict[str, list[tuple[int, float]]] = {}
    for number, (text, (on, off)) in enumerate(zip(TEXTS, losses_one_by_one(kind), strict=True)):
        tokens, labels = text.tokens.tolist(), text.labels.tolist()
        for place in range(CHUNK, text.predicted_tokens):
            assert labels[place] != IGNORED
            read = tokens[: place + 1]
            name = "never"
            if labels[place] in read:
                ago = read[::-1].index(labels[place]) + 1
                name = "before it, up to 16 ago" if ago <= 2 * CHUNK else "17 to 64 ago"
                if ago <= place % CHUNK + 1:
                    name = "in the same chunk"
            for own in (name, "all"):
                groups.setdefault(own, []).append((number, off[place] - on[place]))
    return groups


def test_groups_are_means_of_their_tokens_with_errors_over_documents() -> None:
    report = remembered(Evaluator(make_stage("elastic_memory"), rows=ROWS), TEXTS, decode)
    wanted = naive_groups("elastic_memory")
    assert [group.last_read for group in report.groups] == [
        "in the same chunk", "before it, up to 16 ago", "17 to 64 ago", "never", "all",
    ]  # fmt: skip
    assert report.documents == 3, "one text is a chunk long"
    for group in report.groups:
        gains = wanted[group.last_read]
        mean = sum(gain for _, gain in gains) / len(gains)
        assert group.tokens == len(gains)
        assert group.gain == pytest.approx(mean, abs=TOLERANCE)
        assert group.memory_off_loss - group.loss == pytest.approx(mean, abs=TOLERANCE)
        numbers = sorted({number for number, _ in gains})
        rests = [sum(gain - mean for number, gain in gains if number == own) for own in numbers]
        spread = math.sqrt(sum(rest**2 for rest in rests) / (len(rests) - 1))
        assert group.stderr == pytest.approx(math.sqrt(len(rests)) * spread / len(gains), rel=1e-6)


def test_pieces_of_a_document_are_no_draws_of_their_own() -> None:
    """Two pieces count as their document: one draw, of all their tokens."""
    names = ["a, tokens 1 to 64", "b", "a, tokens 65 to 128", "c"]
    pieces = [replace(text, name=name) for text, name in zip(TEXTS, names, strict=True)]
    evaluator = Evaluator(make_stage("elastic_memory"), rows=ROWS)
    report, whole = remembered(evaluator, pieces, decode), remembered(evaluator, TEXTS, decode)
    assert (report.documents, whole.documents) == (2, 3)
    gains = naive_groups("elastic_memory")["all"]
    mean = sum(gain for _, gain in gains) / len(gains)
    rests = [sum(gain - mean for number, gain in gains if number in own) for own in ({0, 2}, {1})]
    error = math.sqrt(2) * math.sqrt(sum(rest**2 for rest in rests)) / len(gains)
    assert report.groups[-1].stderr == pytest.approx(error, rel=1e-6)
    assert report.groups[-1].gain == whole.groups[-1].gain


def test_examples_were_read_before_their_chunk_and_have_a_text_before_them() -> None:
    report = remembered(Evaluator(make_stage("elastic_memory"), rows=ROWS), TEXTS, decode, examples=4)
    assert 0 < len(report.examples) <= 4
    steps = [example.probability - example.memory_off_probability for example in report.examples]
    assert steps == sorted(steps, reverse=True)
    texts = {text.name: text for text in TEXTS}
    for example in report.examples:
        words = [decode([token]) for token in texts[example.document].tokens.tolist()]
        before = example.before.count(" ")
        assert before >= LEAST_BEFORE
        # chunks are no longer than the least text before a token: it is the chunk's last prediction
        place = next(
            end for end in range(CHUNK, len(words) + 1, CHUNK) if "".join(words[end - before : end]) == example.before
        )
        assert words[place - example.distance] == example.token
        assert example.token not in words[place - example.distance + 1 : place]


def test_words_of_few_letters_are_no_examples() -> None:
    evaluator = Evaluator(make_stage("elastic_memory"), rows=ROWS)
    assert remembered(evaluator, TEXTS, lambda tokens: "abc" * len(tokens)).examples == ()


def test_texts_of_one_chunk_are_refused() -> None:
    with pytest.raises(DataError, match="no document is longer than a chunk of 8 tokens"):
        remembered(Evaluator(make_stage("elastic_memory")), TEXTS[3:], decode)


def test_a_model_without_a_memory_is_refused_before_it_is_loaded() -> None:
    class Trained:
        origin = "runs/local"
        config = type("Config", (), {"model": make_stage("local_attention").config})

    local: Any = Trained()
    with pytest.raises(ConfigError, match="runs/local: has no memory"):
        held_out.evaluate_remembered(local, 10, np.float32, CPU)  # type: ignore[arg-type]


def test_the_report(tmp_path: Path) -> None:
    report = remembered(Evaluator(make_stage("elastic_memory"), rows=ROWS), TEXTS, decode)
    write_remembered(tmp_path / "out", report)
    numbers = json.loads((tmp_path / "out" / NUMBERS).read_text())
    assert numbers["groups"][-1]["gain"] == report.groups[-1].gain
    assert (tmp_path / "out" / PICTURE).read_bytes().startswith(b"\x89PNG")
    console = Console(width=100, record=True, file=None, quiet=False)
    with console.capture() as shown:
        for table in remembered_tables(report):
            console.print(table)
    for group in report.groups:
        assert f"{group.gain:+.3f} ± {group.stderr:.3f}" in shown.get()
    assert report.examples[0].token in shown.get()
    assert len(remembered_tables(report)) == 2
    write_again = pytest.raises(DataError, match="exists already")
    with write_again:
        write_remembered(tmp_path / "out", report)
