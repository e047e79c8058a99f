"""Sliding-window perplexity: each token once, enough context, and the values of a slow loop."""

import math

import numpy as np
import pytest

from megamem.data.batch import IGNORED
from megamem.errors import ConfigError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.sliding import default_stride, sliding_readings
from tests.unit.evaluation_helpers import (
    CHUNK,
    MIXERS,
    ROWS,
    TOLERANCE,
    documents,
    make_stage,
    slow_losses,
    text_size_of,
)
from tokenization.text_size import TextSize

LENGTHS = (1, 3, 7, 8, 9, 15, 16, 17, 31, 40)
STRIDES = [1, 2, 4, 8]


@pytest.mark.parametrize("stride", STRIDES)
def test_every_token_is_scored_once_with_enough_context(stride):
    texts = documents(*LENGTHS)
    scored = [np.zeros(text.predicted_tokens, dtype=int) for text in texts]
    number = {text.name: index for index, text in enumerate(texts)}
    for reading in sliding_readings(texts, CHUNK, stride):
        for chunk in range(reading.chunks):
            tokens, labels = reading.chunk(chunk, CHUNK)
            assert tokens.shape == labels.shape == (CHUNK,)
            hits = np.flatnonzero(labels != IGNORED)
            assert len(hits), "a chunk in which nothing is scored is not read"
            positions = reading.begin + chunk * CHUNK + hits
            scored[number[reading.document.name]][positions] += 1
            assert (labels[hits] == reading.document.labels[positions]).all()
            assert (tokens[hits] == reading.document.tokens[positions]).all()
            whole_first = reading.begin == 0 and chunk == 0
            assert whole_first or (hits >= CHUNK - stride).all()
    assert all((counts == 1).all() for counts in scored)


@pytest.mark.parametrize("kind", ["local_attention", "elastic_memory"])
def test_the_full_stride_is_the_plain_loss(kind):
    stage, texts = make_stage(kind), documents(*LENGTHS)
    report = Evaluator(stage, rows=ROWS).sliding_losses(texts, stride=CHUNK)
    plain = Evaluator(stage, rows=ROWS).losses(texts)
    assert report.loss == pytest.approx(plain.loss, rel=TOLERANCE)
    assert report.plain_loss == pytest.approx(plain.loss, rel=TOLERANCE)
    assert report.tokens == plain.tokens
    nats, size = plain.loss * sum(LENGTHS), report.text_size
    assert size == TextSize.sum(map(text_size_of, LENGTHS))
    assert report.bits_per_byte == pytest.approx(nats / math.log(2) / size.bytes, rel=TOLERANCE)
    assert report.bits_per_character == pytest.approx(nats / math.log(2) / size.characters, rel=TOLERANCE)
    assert report.word_perplexity == pytest.approx(math.exp(nats / size.words), rel=TOLERANCE)
    with_line_ends = math.exp(nats / (size.words + size.lines))
    assert report.word_perplexity_with_line_ends == pytest.approx(with_line_ends, rel=TOLERANCE)


@pytest.mark.parametrize("stride", [2, 4])
@pytest.mark.parametrize("kind", MIXERS)
def test_values_equal_the_slow_loop(kind, stride):
    stage, texts = make_stage(kind), documents(3, 13, 26)
    losses = []
    for text in texts:
        readings = {offset: slow_losses(stage, text, offset) for offset in range(0, CHUNK, stride)}
        for at in range(text.predicted_tokens):
            # the offset at which `at` falls into the last tokens of a chunk
            offset = 0 if at < CHUNK else ((at - (CHUNK - stride)) // stride * stride) % CHUNK
            losses.append(readings[offset][at - offset])
    report = Evaluator(stage, rows=ROWS).sliding_losses(texts, stride=stride)
    assert report.tokens == len(losses) == 42
    assert report.loss == pytest.approx(np.mean(losses), rel=TOLERANCE)
    assert report.perplexity == pytest.approx(math.exp(np.mean(losses)), rel=TOLERANCE)


def test_full_attention_needs_no_sliding_window_beyond_the_tokens_it_misses():
    """With one document of one chunk all offsets but the first have nothing to score."""
    (text,) = documents(CHUNK)
    assert [reading.begin for reading in sliding_readings([text], CHUNK, 2)] == [0]


def test_the_bound_limits_the_tokens():
    evaluator = Evaluator(make_stage("local_attention"), rows=ROWS)
    report = evaluator.sliding_losses(documents(200, 200), stride=4, max_tokens=150)
    assert report.tokens == 144  # nine chunks of each


def test_strides():
    assert [default_stride(chunk) for chunk in (1, 2, 3, 6, 8, 100, 256)] == [1, 1, 1, 1, 2, 25, 64]
    with pytest.raises(ConfigError, match=r"evaluation\.sliding_stride 3 does not divide model\.chunk_size 8"):
        Evaluator(make_stage("local_attention"), rows=ROWS).sliding_losses(documents(9), stride=3)
