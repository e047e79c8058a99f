"""Bytes, characters, words and line breaks of tokens' text, against Python's own count of the whole text."""

import random

import numpy as np
import pytest

from tokenization.characters import byte_tokenizer, train_characters
from tokenization.text_size import TextCounter, TextSize
from tokenization.train import train
from tokenization.words import train_words

TEXT = "Señor Ünal déjà vu,  日本語 and 🙂 emoji;\tplain\u00a0words\n\ntoo. "


def kinds(folder):
    return {
        "bpe": train([TEXT * 3], 300, folder / "bpe"),
        "bytes": byte_tokenizer(folder / "bytes"),
        "characters": train_characters([TEXT], folder / "characters"),
        "words": train_words([TEXT], folder / "words"),
    }


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    return kinds(tmp_path_factory.mktemp("tokenizers"))


@pytest.mark.parametrize("kind", ["bpe", "bytes", "characters"])
def test_sizes_are_those_of_the_text_wherever_it_is_cut(tokenizers, kind):
    """Every part of the tokens, from each one to each other: also parts that cut a word or a character."""
    tokenizer = tokenizers[kind]
    token_bytes, ids = tokenizer.token_bytes(), tokenizer.encode(TEXT)
    counter = TextCounter(token_bytes)
    assert counter.vocab_size == tokenizer.vocab_size
    for start in range(len(ids)):
        for end in range(start, len(ids) + 1):
            text = b"".join(token_bytes[i] for i in ids[start:end])
            begun = sum(1 for byte in text if not 0x80 <= byte < 0xC0)
            assert counter.count(ids[start:end]) == TextSize(len(text), begun, len(text.split()), text.count(b"\n"))
    assert counter.count(ids) == TextSize(len(TEXT.encode()), len(TEXT), len(TEXT.encode().split()), 2)


def test_a_token_of_a_word_level_tokenizer_is_a_word(tokenizers):
    words = tokenizers["words"]
    line = " the cat sat on the mat \n"
    size = TextCounter(words.token_bytes()).count(words.encode(line))
    assert (size.words, size.lines) == (6, 1)
    assert len(words.encode(line)) == 7, "and the end of a line is a token, not a word"


def test_tokens_that_stand_for_nothing_part_no_words():
    counter = TextCounter([b"", b"a", b" b ", b"  "])
    assert counter.count(np.array([0, 1, 0, 1, 0])) == TextSize(2, 2, 1, 0)
    assert counter.count(np.array([1, 2, 1, 3, 1, 1])) == TextSize(9, 9, 4, 0)
    assert counter.count(np.array([], dtype=np.int64)) == counter.count(np.array([0])) == TextSize(0, 0, 0, 0)


def test_random_tokens_of_random_bytes():
    generator = random.Random(1)
    for _ in range(200):
        tokens = [bytes(generator.choices(b"ab \n\xc3\xa9", k=generator.randrange(4))) for _ in range(6)]
        ids = np.array(generator.choices(range(6), k=20))
        text = b"".join(tokens[i] for i in ids)
        size = TextCounter(tokens).count(ids)
        assert (size.bytes, size.words, size.lines) == (len(text), len(text.split()), text.count(b"\n"))


def test_sums_of_sizes():
    one, two = TextSize(3, 2, 1, 4), TextSize(5, 5, 2, 1)
    assert TextSize.sum([one, two]) == TextSize(8, 7, 3, 5)
    assert TextSize.sum([one, None]) is None
    assert TextSize.sum([]) == TextSize(0, 0, 0, 0)
