"""LZMA over exactly the predicted bytes."""

import lzma
import random
from dataclasses import replace

import pytest
import torch
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import models

from megamem.data.batch import IGNORED, EvaluationDocument
from megamem.evaluation.baselines import lzma_baseline, predicted_text
from tokenization.text_size import TextCounter
from tokenization.tokenizer import FastBackend, Tokenizer, TokenizerMeta
from tokenization.train import train

TEXT = "Señor Ünal déjà vu, 日本語 and 🙂 emoji; plain words too.\n" * 3


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return train([TEXT], 300, tmp_path_factory.mktemp("tokenizer"))


def as_document(ids, name="text"):
    """Reads ids[:-1] and predicts ids[1:], with padding behind."""
    ids = torch.as_tensor(ids)
    pad = torch.tensor([IGNORED] * 5)
    return EvaluationDocument(name, torch.cat((ids[:-1], 0 * pad)), torch.cat((ids[1:], pad)), len(ids) - 1, None)


def test_pieces_spell_the_text_byte_for_byte(tokenizer):
    ids = tokenizer.encode(TEXT)
    pieces = tokenizer.token_bytes()
    assert b"".join(pieces[i] for i in ids) == TEXT.encode()
    assert [len(piece) for piece in pieces] == TextCounter(tokenizer.token_bytes()).bytes.tolist()
    assert pieces[tokenizer.eos_id] == b""
    assert sorted(piece for piece in pieces if len(piece) == 1) == [bytes([i]) for i in range(256)]


def test_a_cut_inside_a_character_keeps_its_bytes(tokenizer):
    pieces = tokenizer.token_bytes()
    ids = [pieces.index(bytes([byte])) for byte in "a日b".encode()]
    for end in range(2, len(ids) + 1):
        assert predicted_text(as_document(ids[:end]), pieces) == "a日b".encode()[1:end]


def test_sentencepiece_pieces():
    """Pieces of other tokenizers: bytes in angle brackets, spaces as ▁."""
    vocabulary = {"<unk>": 0, "▁the": 1, "<0xE6>": 2, "é": 3, "▁": 4}
    backend = FastBackend(FastTokenizer(models.BPE(vocabulary, [], unk_token="<unk>")))
    meta = TokenizerMeta("sentencepiece", "", 5, 0, None, "", byte_pieces=False, divisible=False)
    tokenizer = Tokenizer(backend, meta)
    assert tokenizer.token_bytes()[1:] == [b" the", b"\xe6", "é".encode(), b" "]
    assert [len(piece) for piece in tokenizer.token_bytes()] == TextCounter(tokenizer.token_bytes()).bytes.tolist()


def test_the_baseline_is_what_xz_makes_of_the_predicted_bytes(tokenizer):
    generator = random.Random(0)
    words = TEXT.split()
    texts = [" ".join(generator.choices(words, k=400)) for _ in range(3)]
    documents = [as_document(tokenizer.encode(text), str(i)) for i, text in enumerate(texts)]
    pieces = tokenizer.token_bytes()
    predicted = [text.encode()[len(pieces[tokenizer.encode(text)[0]]) :] for text in texts]
    report = lzma_baseline(documents, tokenizer)

    def size(data):
        return len(lzma.compress(data, preset=9 | lzma.PRESET_EXTREME))

    total = sum(map(len, predicted))
    assert report.text_bytes == total
    assert report.bits_per_byte == 8 * size(b"".join(predicted)) / total
    assert report.separate_bits_per_byte == 8 * sum(map(size, predicted)) / total
    assert report.bits_per_byte < report.separate_bits_per_byte, "the joined stream knows the earlier documents"
    assert [(d.name, d.text_bytes) for d in report.documents] == [(str(i), len(p)) for i, p in enumerate(predicted)]
    assert [d.bits_per_byte for d in report.documents] == [8 * size(p) / len(p) for p in predicted]


def test_text_bytes_agree_with_the_divisor_of_bits_per_byte(tokenizer):
    ids = tokenizer.encode(TEXT)
    document = replace(as_document(ids), text_size=TextCounter(tokenizer.token_bytes()).count(ids[1:]))
    assert lzma_baseline([document], tokenizer).text_bytes == document.text_size.bytes


def test_nothing_to_compress(tokenizer):
    assert lzma_baseline([as_document([1, tokenizer.eos_id])], tokenizer) is None
    assert lzma_baseline([], tokenizer) is None
