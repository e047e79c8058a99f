"""Memory on against memory off."""

import numpy as np
import pytest

from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.probe import memory_layers
from tests.unit.evaluation_helpers import CHUNK, MIXERS, ROWS, TOLERANCE, documents, make_stage, slow_losses

LENGTHS = (5, 30, 17, 8)


@pytest.mark.parametrize("kind", MIXERS)
def test_memory_off_is_every_chunk_read_from_a_fresh_memory(kind):
    stage, texts = make_stage(kind), documents(*LENGTHS)
    report = Evaluator(stage, rows=ROWS).memory_use(texts)
    off = [
        slow_losses(stage, text, begin, begin + CHUNK)
        for text in texts
        for begin in range(CHUNK, text.predicted_tokens, CHUNK)
    ]
    on = np.concatenate([slow_losses(stage, text)[CHUNK:] for text in texts])
    assert report.memory_off_beyond_first_chunk_loss == pytest.approx(np.concatenate(off).mean(), rel=TOLERANCE)
    assert report.beyond_first_chunk_loss == pytest.approx(on.mean(), rel=TOLERANCE)
    assert report.gain == pytest.approx(np.concatenate(off).mean() - on.mean(), abs=TOLERANCE)
    assert (abs(report.gain) > 1e-4) == (kind != "local_attention"), "chunk-local attention has no memory to lose"
    assert [bucket.tokens for bucket in report.memory_off_by_chunk] == [29, 16, 9, 6]
    assert report.memory_off_by_chunk[0].loss == pytest.approx(
        Evaluator(stage, rows=ROWS).losses(texts).first_chunk_loss, rel=TOLERANCE
    )


def test_a_report_at_hand_saves_the_first_pass():
    stage, texts = make_stage("elastic_memory"), documents(*LENGTHS)
    evaluator = Evaluator(stage, rows=ROWS)
    trained = evaluator.losses(texts)
    passes = []
    report = evaluator.memory_use(texts, trained=trained, progress=lambda done, total: passes.append(done == total))
    assert sum(passes) == 1
    assert report == evaluator.memory_use(texts)


def test_a_model_without_memory_is_not_read_twice():
    stage, texts = make_stage("local_attention"), documents(*LENGTHS)
    assert memory_layers(stage.config) == []
    assert memory_layers(make_stage("elastic_memory").config) == [1]
    assert memory_layers(make_stage("full_attention").config) == [1]
    evaluator = Evaluator(stage, rows=ROWS)
    trained = evaluator.losses(texts)
    report = evaluator.memory_use(texts, trained=trained, progress=lambda *_: pytest.fail("no call is needed"))
    assert report.gain == 0
    assert report.memory_off_by_chunk == trained.by_chunk


def test_single_chunks_have_nothing_to_compare():
    report = Evaluator(make_stage("elastic_memory"), rows=ROWS).memory_use(documents(3, CHUNK))
    assert report.gain is None
    assert report.beyond_first_chunk_loss is None


def test_a_report_of_other_documents_is_refused():
    stage = make_stage("elastic_memory")
    trained = Evaluator(stage, rows=ROWS).losses(documents(9))
    for others in (documents(20), documents(5, 9)[1:]):
        with pytest.raises(ValueError, match=r"`trained` is of other documents: of 9 tokens, these have (20|9)"):
            Evaluator(stage, rows=ROWS).memory_use(others, trained=trained)
