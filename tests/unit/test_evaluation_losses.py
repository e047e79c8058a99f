"""Losses of held-out documents against a loop that reads token by token."""

import json
import math
import time
import weakref
from dataclasses import replace

import numpy as np
import pytest
import torch

from megamem.data.batch import IGNORED
from megamem.errors import DataError
from megamem.evaluation.evaluator import Evaluator
from megamem.evaluation.losses import (
    LEAST_CHUNKS,
    bits_per_byte,
    bits_per_character,
    cut_documents,
    first_slots,
    perplexity,
    word_perplexity,
    word_perplexity_with_line_ends,
)
from megamem.evaluation.reading import bucket_edges, share_out
from tests.unit.evaluation_helpers import (
    CHUNK,
    MIXERS,
    ROWS,
    TOLERANCE,
    VOCABULARY,
    document,
    documents,
    make_stage,
    slow_guesses,
    slow_losses,
)
from tokenization.text_size import TextCounter, TextSize
from tokenization.words import train_words

NOTHING = TextSize(0, 0, 0, 0)
LENGTHS = (5, 50, 19, 32, 8, 1, 27)


@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("kind", MIXERS)
def test_totals_and_documents_equal_the_slow_loop(kind, rows):
    stage, texts = make_stage(kind), documents(*LENGTHS)
    slow = [slow_losses(stage, text) for text in texts]
    report = Evaluator(stage, rows=rows).losses(texts)
    nats = sum(losses.sum() for losses in slow)
    assert report.tokens == sum(LENGTHS)
    assert report.nats == pytest.approx(nats, rel=TOLERANCE)
    assert report.loss == pytest.approx(nats / sum(LENGTHS), rel=TOLERANCE)
    assert report.perplexity == pytest.approx(math.exp(nats / sum(LENGTHS)), rel=TOLERANCE)
    words, lines = sum(n // 2 + 1 for n in LENGTHS), sum(n // 4 + 2 for n in LENGTHS)
    assert report.text_size == TextSize(3 * sum(LENGTHS), 2 * sum(LENGTHS), words, lines)
    assert report.bits_per_byte == pytest.approx(nats / math.log(2) / (3 * sum(LENGTHS)), rel=TOLERANCE)
    assert report.bits_per_character == pytest.approx(nats / math.log(2) / (2 * sum(LENGTHS)), rel=TOLERANCE)
    assert report.word_perplexity == pytest.approx(math.exp(nats / words), rel=TOLERANCE)
    assert report.word_perplexity_with_line_ends == pytest.approx(math.exp(nats / (words + lines)), rel=TOLERANCE)
    assert [(d.name, d.tokens) for d in report.documents] == [(t.name, n) for t, n in zip(texts, LENGTHS, strict=True)]
    assert [d.loss for d in report.documents] == pytest.approx([losses.mean() for losses in slow], rel=TOLERANCE)
    assert [d.bits_per_byte for d in report.documents] == pytest.approx(
        [losses.mean() / math.log(2) / 3 for losses in slow], rel=TOLERANCE
    )


def test_words_and_ends_of_lines_are_the_tokens_of_a_word_level_tokenizer(tmp_path):
    """So that perplexities of sub-words compare with its perplexity, which counts the ends of documents too."""
    articles = [
        " \n = A Title = \n \n one two three . \n four five six seven , eight nine . \n \n",
        " \n = Another = \n \n one nine nine , two . \n",
        " = = three = = \n",
    ]
    tokenizer = train_words(articles, tmp_path / "words")
    assert tokenizer.vocab_size <= VOCABULARY
    counter, texts = TextCounter(tokenizer.token_bytes()), []
    for number, article in enumerate(articles):
        ids = np.append(tokenizer.encode(article), tokenizer.eos_id)
        text = document(len(ids) - 1, number, counter.count(ids[1:]))
        text.tokens[: len(ids) - 1], text.labels[: len(ids) - 1] = torch.tensor(ids[:-1]), torch.tensor(ids[1:])
        texts.append(text)
    report = Evaluator(make_stage("elastic_memory"), rows=ROWS).losses(texts)
    words, lines = report.text_size.words, report.text_size.lines
    # the first token of an article, an empty line of two of them, is read and not predicted
    assert words == sum(len(article.split()) for article in articles) - 1
    assert lines == sum(article.count("\n") for article in articles) - 2
    ends = len(articles)
    assert report.tokens == words + lines + ends
    assert math.exp(report.nats / (words + lines + ends)) == pytest.approx(report.perplexity, rel=TOLERANCE)
    # ends of documents cost nats and count for nothing
    above = report.perplexity ** (report.tokens / (words + lines))
    assert report.word_perplexity_with_line_ends == pytest.approx(above, rel=TOLERANCE)
    assert report.word_perplexity > report.word_perplexity_with_line_ends > report.perplexity


def padded(tokens, text):
    """Labels of a document."""
    return torch.tensor(tokens + [IGNORED] * (len(text.labels) - len(tokens)))


def asked(text, every):
    """The document with a label at every `every`-th of its tokens only."""
    labels = text.labels.clone()
    labels[torch.arange(len(labels)) % every != 0] = IGNORED
    return replace(text, labels=labels, text_size=None)


@pytest.mark.parametrize("every", [1, 3])
def test_accuracy_and_exact_match_equal_the_slow_loop(every):
    stage, texts = make_stage("elastic_memory"), documents(*LENGTHS)
    guesses = [slow_guesses(stage, text) for text in texts]
    # two documents that ask for what the model says, one of them with a wrong token at its end
    texts += [replace(text, labels=padded(guess, text)) for text, guess in zip(texts[:2], guesses[:2], strict=True)]
    texts[-1].labels[texts[-1].predicted_tokens - 1 - (texts[-1].predicted_tokens - 1) % every] += 1
    texts = [asked(text, every) for text in texts]
    pairs = zip(texts, [*guesses, *guesses[:2]], strict=True)
    right = [[g == want for g, want in zip(guess, t.labels.tolist(), strict=False) if want >= 0] for t, guess in pairs]
    report = Evaluator(stage, rows=ROWS).losses(texts)
    assert report.tokens == sum(map(len, right)) == sum(len(range(0, n, every)) for n in (*LENGTHS, 5, 50))
    assert report.accuracy == sum(sum(row) for row in right) / report.tokens
    assert [document.correct for document in report.documents] == [sum(row) for row in right]
    assert report.exact_match == sum(map(all, right)) / len(texts)
    assert all(right[-2])
    assert not all(right[-1])


@pytest.mark.parametrize("kind", MIXERS)
def test_bfloat16_models(kind):
    texts = documents(*LENGTHS)
    exact = Evaluator(make_stage(kind), rows=ROWS).losses(texts)
    report = Evaluator(make_stage(kind, torch.bfloat16), rows=ROWS).losses(texts)
    # weights and activations carry 8 bits, 0.4 % each; a mean over 142 tokens of losses of about 4 nats
    assert report.loss == pytest.approx(exact.loss, rel=0.01)
    assert report.tokens == exact.tokens


@pytest.mark.parametrize("kind", MIXERS)
def test_losses_by_chunk_and_position_equal_the_slow_loop(kind):
    stage, texts = make_stage(kind), documents(*LENGTHS)
    slow = [slow_losses(stage, text) for text in texts]
    report = Evaluator(stage, rows=ROWS).losses(texts)

    def expect(buckets, of):
        """`of`: the bucket coordinate of a token read at position `at`."""
        assert sum(bucket.tokens for bucket in buckets) == sum(LENGTHS)
        for bucket in buckets:
            inside = [x for losses in slow for at, x in enumerate(losses) if bucket.first <= of(at) <= bucket.last]
            assert bucket.tokens == len(inside)
            assert bucket.loss == (pytest.approx(np.mean(inside), rel=TOLERANCE) if inside else None)

    expect(report.by_chunk, lambda at: at // CHUNK)
    expect(report.by_position, lambda at: at + 1)
    expect(report.within_chunk, lambda at: at % CHUNK + 1)
    assert len(report.by_chunk) == -(-max(LENGTHS) // CHUNK)
    assert report.first_chunk_loss == report.by_chunk[0].loss
    beyond = np.concatenate([losses[CHUNK:] for losses in slow])
    assert report.beyond_first_chunk_loss == pytest.approx(beyond.mean(), rel=TOLERANCE)


def test_without_a_second_chunk_there_is_no_loss_beyond_the_first():
    report = Evaluator(make_stage("elastic_memory"), rows=ROWS).losses(documents(3, CHUNK))
    assert report.beyond_first_chunk_loss is None
    assert len(report.by_chunk) == 1


def test_a_document_does_not_feel_its_neighbours():
    stage, texts = make_stage("elastic_memory"), documents(*LENGTHS)
    alone = Evaluator(stage, rows=ROWS).losses(texts[1:2])
    assert Evaluator(stage, rows=ROWS).losses(texts).documents[1].loss == pytest.approx(alone.loss, rel=TOLERANCE)


def test_the_model_is_left_as_it_was():
    stage = make_stage("elastic_memory").train()
    Evaluator(stage, rows=ROWS).losses(documents(20))
    assert stage.training
    assert all(parameter.grad is None for parameter in stage.parameters())
    Evaluator(stage.eval(), rows=ROWS).losses(documents(20))
    assert not stage.training


def test_the_mode_is_restored_after_a_failure():
    stage = make_stage("local_attention").train()
    bad = replace(document(8, 0), tokens=torch.full((8,), VOCABULARY))
    with pytest.raises(IndexError):
        Evaluator(stage, rows=ROWS).losses([bad])
    assert stage.training


def test_progress_counts_calls():
    seen = []
    evaluator = Evaluator(make_stage("local_attention"), rows=1)
    evaluator.losses(documents(40, 8), progress=lambda *call: seen.append(call))
    assert seen == [(i, 6) for i in range(1, 7)]


def test_the_report_is_plain_json():
    report = Evaluator(make_stage("local_attention"), rows=ROWS).losses(documents(20, 9))
    assert json.loads(json.dumps(report.to_dict())) == json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert report.to_dict()["by_chunk"][0]["loss"] == report.first_chunk_loss


def test_losses_by_text_need_the_size_of_every_document():
    texts = [document(9, 0), replace(document(9, 1), text_size=None)]
    report = Evaluator(make_stage("local_attention"), rows=ROWS).losses(texts)
    assert report.bits_per_byte is report.bits_per_character is None
    assert report.word_perplexity is report.word_perplexity_with_line_ends is None
    assert report.documents[0].bits_per_byte is not None
    assert report.documents[1].bits_per_byte is None


def test_a_diverged_model_gives_a_report():
    stage = make_stage("local_attention")
    torch.nn.init.constant_(stage.head.weight, math.nan)
    assert math.isnan(Evaluator(stage, rows=ROWS).losses(documents(9)).perplexity)
    assert perplexity(1e4) == math.inf
    assert bits_per_byte(1.0, NOTHING) is bits_per_character(1.0, NOTHING) is None
    assert word_perplexity(1.0, NOTHING) is word_perplexity_with_line_ends(1.0, NOTHING) is None
    # empty lines alone
    assert word_perplexity(1.0, TextSize(2, 2, 0, 2)) is None
    assert word_perplexity_with_line_ends(1.0, TextSize(2, 2, 0, 2)) == math.exp(0.5)


COUNTER = TextCounter([b"x" * i for i in range(VOCABULARY)])


def check_cut(original, cut, tokens):
    assert cut.predicted_tokens == tokens
    assert len(cut.tokens) == len(cut.labels) == tokens
    assert torch.equal(cut.tokens, original.tokens[:tokens])
    assert torch.equal(cut.labels, original.labels[:tokens])
    assert cut.text_size.bytes == original.labels[:tokens].sum()  # token i stands for i bytes


def test_a_bound_cuts_all_documents_to_one_depth():
    texts = documents(200, 20, 100)
    cut = cut_documents(texts, CHUNK, 200, COUNTER)
    assert cut[1] is texts[1]
    # 20 + 2 * 88 = 196; another chunk would be 212
    check_cut(texts[0], cut[0], 88)
    check_cut(texts[2], cut[2], 88)
    report = Evaluator(make_stage("local_attention"), rows=ROWS).losses(texts, max_tokens=200, counter=COUNTER)
    assert report.tokens == 196
    assert report.text_size == TextSize.sum(text.text_size for text in cut)


def test_many_documents_are_left_out_rather_than_cut_short():
    texts = documents(*[200] * 20)
    cut = cut_documents(texts, CHUNK, 300, COUNTER)
    assert len(cut) == 300 // (LEAST_CHUNKS * CHUNK)
    for original, shorter in zip(texts, cut, strict=False):
        check_cut(original, shorter, LEAST_CHUNKS * CHUNK)


def asking_at_the_end(length, seed):
    whole = document(length, seed)
    labels = whole.labels.clone()
    labels[: length - 1] = IGNORED
    return replace(whole, labels=labels)


def test_questions_are_not_cut_off():
    """Tasks ask at their end: whole documents are taken while they fit, at least one."""
    texts = [asking_at_the_end(100, seed) for seed in range(5)]
    assert cut_documents(texts, CHUNK, 350, COUNTER) == texts[:3]
    assert cut_documents(texts, CHUNK, 50, COUNTER) == texts[:1]
    report = Evaluator(make_stage("local_attention"), rows=ROWS).losses(texts, max_tokens=250)
    assert (len(report.documents), report.tokens) == (2, 2)


def test_documents_that_ask_for_nothing_are_not_solved():
    silent = replace(document(40, 9), labels=torch.full((40,), IGNORED))
    asking = asking_at_the_end(40, 3)
    alone = Evaluator(make_stage("local_attention"), rows=ROWS).losses([asking])
    assert Evaluator(make_stage("local_attention"), rows=ROWS).losses([asking, silent]).exact_match == alone.exact_match


def test_a_bound_below_the_least_depth():
    texts = documents(200, 200)
    assert [d.predicted_tokens for d in cut_documents(texts, CHUNK, 3 * CHUNK + 1, COUNTER)] == [3 * CHUNK]
    assert [d.predicted_tokens for d in cut_documents(texts, CHUNK, 1, COUNTER)] == [CHUNK]


@pytest.mark.parametrize("bound", [60, 90, 128, 200, 500, 5000])
def test_the_bound_is_kept(bound):
    texts = documents(7, 90, 200, 3, 64, 65)
    taken = sum(d.predicted_tokens for d in cut_documents(texts, CHUNK, bound, COUNTER))
    assert 0 < taken <= bound
    assert taken == sum((7, 90, 200, 3, 64, 65)) or bound < 429


def test_without_a_counter_the_size_of_a_cut_document_is_unknown():
    (cut,) = cut_documents(documents(200), CHUNK, 80)
    assert cut.text_size is None


def test_bad_documents_are_refused():
    with pytest.raises(DataError, match="no held-out document has a token to predict"):
        cut_documents([], CHUNK, None)
    odd = replace(document(16, 0), tokens=torch.zeros(12, dtype=torch.int64))
    with pytest.raises(ValueError, match="not whole chunks of 8"):
        cut_documents([odd], CHUNK, None)


@pytest.mark.parametrize("lanes", [1, 2, 5, 30])
def test_work_is_shared_out_evenly(lanes):
    sizes = np.random.default_rng(0).integers(1, 50, 23).tolist()
    queues = share_out(sizes, lanes)
    assert sorted(index for queue in queues for index in queue) == list(range(23))
    loads = [sum(sizes[index] for index in queue) for queue in queues]
    # Graham's bound for longest-first: 4/3 of the best possible, which is at least the mean and the longest
    assert max(loads) <= 4 / 3 * max(sum(sizes) / lanes, max(sizes)) + 1


@pytest.mark.parametrize("chunk", [1, 2, 8, 48, 100, 256])
@pytest.mark.parametrize("longest", [1, 7, 256, 10_000])
def test_position_buckets(chunk, longest):
    edges = bucket_edges(chunk, longest)
    assert edges[0] == 1
    assert (np.diff(edges) > 0).all()
    assert edges[-1] >= longest
    assert len(edges) == 1 or edges[-2] < longest
    assert chunk in edges or longest < chunk


def test_documents_that_are_not_read_are_not_kept():
    """100 documents are gone through and at most 3 are alive at a time: what is kept, what is cut and the next."""
    alive: list[weakref.ref] = []
    most = 0

    class Documents:
        def __iter__(self):
            nonlocal most
            for seed in range(100):
                made = document(3 * CHUNK, seed)
                alive.append(weakref.ref(made.tokens))
                most = max(most, sum(ref() is not None for ref in alive))
                yield made

    (kept,) = cut_documents(Documents(), CHUNK, CHUNK, COUNTER, least=1)
    assert kept.predicted_tokens == CHUNK
    assert kept.tokens.untyped_storage().nbytes() == CHUNK * kept.tokens.element_size()
    assert len(alive) == 100 + 1
    assert most <= 3


def test_the_chunks_before_each_of_many_documents():
    """Held-out web text has 100,000 documents: a sum over all documents before each would take a minute."""
    assert first_slots([], CHUNK) == []
    few = documents(*LENGTHS)
    chunks = [len(text.tokens) // CHUNK for text in few]
    assert first_slots(few, CHUNK) == [sum(chunks[:i]) for i in range(len(chunks))]
    begun = time.process_time()
    assert first_slots([few[0]] * 100_000, CHUNK)[-1] == chunks[0] * 99_999
    assert time.process_time() - begun < 5
