"""Training, importing and using tokenizers."""

import io
import json

import numpy as np
import pytest
import sentencepiece
from data_helpers import make_tokenizer, text_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as FastTokenizer
from tokenizers import decoders, models, pre_tokenizers

from megamem.errors import ConfigError, DataError
from tokenization import tokenizer as module
from tokenization.importing import import_tokenizer
from tokenization.text_size import TextCounter
from tokenization.tokenizer import SAMPLES, Tokenizer, cut
from tokenization.train import train


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder, 320)
    return Tokenizer.load(folder)


def train_sentencepiece(path, model_type, **options):
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter([text_of(30, seed) for seed in range(40)] + list(SAMPLES)),
        model_writer=model,
        model_type=model_type,
        vocab_size=420,
        byte_fallback=True,
        hard_vocab_limit=False,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_decoding_gives_the_text_back(trained, text):
    ids = trained.encode(text)
    assert ids.dtype == np.int64
    assert trained.decode(ids) == text
    assert TextCounter(trained.token_bytes()).bytes[ids].sum() == len(text.encode())


@pytest.mark.parametrize("text", SAMPLES)
def test_samples_round_trip(trained, text):
    assert trained.decode(trained.encode(text)) == text


def test_text_that_spells_eos_is_text(trained):
    text = "end<|endoftext|>end"
    ids = trained.encode(text)
    assert trained.eos_id not in ids
    assert trained.decode(ids) == text
    assert trained.decode([*ids, trained.eos_id]) == text
    assert TextCounter(trained.token_bytes()).bytes[trained.eos_id] == 0


def test_batches_are_the_texts_one_by_one(trained):
    texts = [text_of(20, 1), "", text_of(3, 2)]
    for text, ids in zip(texts, trained.encode_batch(texts), strict=True):
        np.testing.assert_array_equal(ids, trained.encode(text))


def test_same_texts_give_the_same_file(tmp_path):
    first, second = (make_tokenizer(tmp_path / name) for name in "ab")
    assert first.hash == second.hash
    assert first.vocab_size == 300
    assert first.meta.kind == "byte-level-bpe"
    assert make_tokenizer(tmp_path / "c", seed=7).hash != first.hash


def test_long_texts_are_cut_where_no_token_changes(trained, monkeypatch):
    text = " ".join(SAMPLES * 3) + text_of(300, 3)
    whole = trained.backend.encode(text)
    assert trained.meta.divisible
    for size in (1, 7, 100):
        parts = list(cut(text, size))
        assert "".join(parts) == text
        assert len(parts) > len(text) // (size + 400)
        monkeypatch.setattr(module, "PART_CHARACTERS", size)
        assert trained.encode(text).tolist() == whole


def test_too_small_vocabulary_and_empty_corpus(tmp_path):
    with pytest.raises(ConfigError, match="vocab_size: 200 is too small; byte-level BPE needs at least 257"):
        train(["text"], 200, tmp_path / "a")
    with pytest.raises(DataError, match="the corpus is empty"):
        train([], 300, tmp_path / "b")
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_is_never_overwritten(tmp_path):
    make_tokenizer(tmp_path)
    with pytest.raises(DataError, match="already holds a tokenizer"):
        make_tokenizer(tmp_path)


def test_damaged_folders_are_named(tmp_path):
    with pytest.raises(DataError, match=r"meta\.json: missing; not a tokenizer folder"):
        Tokenizer.load(tmp_path)
    make_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: changed since it was written"):
        Tokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(DataError, match=r"tokenizer\.json: missing"):
        Tokenizer.load(tmp_path)
    meta = json.loads((tmp_path / "meta.json").read_text())
    for value, message in ((meta | {"format_version": 9}, "format_version 9"), ({"format_version": 1}, "not the desc")):
        (tmp_path / "meta.json").write_text(json.dumps(value))
        with pytest.raises(DataError, match=message):
            Tokenizer.load(tmp_path)
    (tmp_path / "meta.json").write_text("{")
    with pytest.raises(DataError, match=r"meta\.json: not valid JSON"):
        Tokenizer.load(tmp_path)


def test_import_of_a_hugging_face_file_and_folder(trained, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    (source / "tokenizer.json").write_text(trained.backend.tokenizer.to_str())
    from_file = import_tokenizer(source / "tokenizer.json", tmp_path / "a")
    from_folder = import_tokenizer(source, tmp_path / "b")
    text = text_of(50, 5) + SAMPLES[4]
    assert from_file.hash == from_folder.hash
    assert from_file.meta.kind == "hugging-face"
    assert from_file.eos_id == trained.eos_id
    np.testing.assert_array_equal(from_folder.encode(text), trained.encode(text))
    assert Tokenizer.load(tmp_path / "b").decode(from_folder.encode(text)) == text


def test_import_finds_eos(trained, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    tokenizer = FastTokenizer.from_str(trained.backend.tokenizer.to_str())
    tokenizer.add_special_tokens(["<stop>", "<other>"])
    (source / "tokenizer.json").write_text(tokenizer.to_str())
    assert import_tokenizer(source, tmp_path / "a").eos_id == trained.eos_id
    (source / "tokenizer_config.json").write_text('{"eos_token": {"content": "<stop>"}}')
    assert import_tokenizer(source, tmp_path / "b").eos_id == trained.vocab_size
    assert import_tokenizer(source, tmp_path / "c", eos="<other>").eos_id == trained.vocab_size + 1
    with pytest.raises(DataError, match="eos token '<none>' is not in the vocabulary"):
        import_tokenizer(source, tmp_path / "d", eos="<none>")


def test_import_of_gpt2_files(trained, tmp_path):
    source = tmp_path / "source"
    source.mkdir()
    state = json.loads(trained.backend.tokenizer.to_str())["model"]
    (source / "encoder.json").write_text(json.dumps(state["vocab"]))
    merges = "".join(f"{left} {right}\n" for left, right in state["merges"])
    (source / "vocab.bpe").write_text("#version: 0.2\n" + merges)
    imported = import_tokenizer(source, tmp_path / "a")
    text = " ".join(SAMPLES)
    np.testing.assert_array_equal(imported.encode(text), trained.encode(text))
    assert imported.decode(imported.encode(text)) == text
    assert imported.eos_id == trained.eos_id


def test_import_without_eos_asks_for_it(tmp_path):
    tokenizer = FastTokenizer(models.BPE({"a": 0, "b": 1}, []))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(DataError, match="names no token that ends a document; state one with --eos"):
        import_tokenizer(tmp_path, tmp_path / "a")
    assert import_tokenizer(tmp_path, tmp_path / "b", eos="b").eos_id == 1


@pytest.mark.parametrize(
    ("model_type", "rule", "file"),
    [("bpe", "identity", "tokenizer.json"), ("unigram", "nmt_nfkc", "tokenizer.model")],
)
def test_import_of_sentencepiece_encodes_like_the_library(tmp_path, model_type, rule, file):
    keep_spaces = {"remove_extra_whitespaces": False} if model_type == "bpe" else {}
    reference = train_sentencepiece(
        tmp_path / "m.model", model_type, normalization_rule_name=rule, split_by_whitespace=False, **keep_spaces
    )
    imported = import_tokenizer(tmp_path / "m.model", tmp_path / "a")
    assert imported.meta.file == file
    assert imported.meta.kind == "sentencepiece"
    assert (imported.eos_id, imported.meta.bos_id) == (2, 1)
    assert imported.vocab_size == reference.get_piece_size()
    loaded = Tokenizer.load(tmp_path / "a")
    for text in (*SAMPLES, text_of(200, 9)):
        ids = loaded.encode(text)
        assert ids.tolist() == reference.encode(text)
        assert loaded.decode(ids) == reference.decode(reference.encode(text))
        if model_type == "bpe" and "▁" not in text:  # SentencePiece's own sign for a space
            assert loaded.decode(ids) == text
            assert TextCounter(loaded.token_bytes()).bytes[ids].sum() == len(text.encode()) + 1  # the space put before


@settings(max_examples=50, deadline=None)
@given(text=st.text(max_size=40))
def test_converted_sentencepiece_agrees_on_any_text(converted_pair, text):
    imported, reference = converted_pair
    assert imported.encode(text).tolist() == reference.encode(text)


@pytest.fixture(scope="module")
def converted_pair(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sentencepiece")
    reference = train_sentencepiece(
        folder / "m.model", "bpe", normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    return import_tokenizer(folder / "m.model", folder / "a"), reference


@pytest.mark.parametrize("name", ["tokenizer.json", "m.model"])
def test_foreign_files_are_refused(tmp_path, name):
    (tmp_path / name).write_text("something else")
    with pytest.raises(DataError, match=name.replace(".", r"\.") + ": not a "):
        import_tokenizer(tmp_path / name, tmp_path / "a")


def test_missing_sources_are_named(tmp_path):
    with pytest.raises(DataError, match="nowhere: no such file"):
        import_tokenizer(tmp_path / "nowhere", tmp_path / "a")
    with pytest.raises(DataError, match=r"no tokenizer\.json, no vocab\.json"):
        import_tokenizer(tmp_path, tmp_path / "a")
