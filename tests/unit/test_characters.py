"""The tokenizers of characters and of bytes."""

import json
import math
from collections import Counter
from itertools import chain

import numpy as np
import pytest
import typer
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from typer.testing import CliRunner

from megamem.cli.shards import shards_app
from megamem.cli.tokenizer import tokenizer_app
from megamem.data.shard_store import ShardStore
from megamem.errors import ConfigError, DataError, MegamemError
from megamem.hf.tokenizer import export_tokenizer
from tokenization import tokenizer as tokenizer_module
from tokenization.characters import byte_tokenizer, train_characters
from tokenization.importing import import_tokenizer
from tokenization.text_size import TextCounter
from tokenization.tokenizer import SAMPLES, Tokenizer

TEXTS = ["Abba  ba\r\n\n\tcafé\u0301 ▁<0x41>", "中\u2028🙂a <|endoftext|> \x00\x1c ", " lines\n"]
"""White space of every sort, signs that other tokenizers give a meaning, one to four bytes a character."""
SPECIAL = 2
"""Tokens before the first character: the end of a document and the unknown character."""

app = typer.Typer()
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(shards_app, name="shards")


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, MegamemError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


@pytest.fixture(scope="module")
def characters(tmp_path_factory):
    return train_characters([*TEXTS, *SAMPLES], tmp_path_factory.mktemp("characters"))


@pytest.fixture(scope="module")
def raw_bytes(tmp_path_factory):
    return byte_tokenizer(tmp_path_factory.mktemp("bytes"))


# Characters


def test_the_vocabulary_is_the_characters_of_the_text(characters):
    known = sorted(set("".join([*TEXTS, *SAMPLES])))
    pieces = [piece.decode() for piece in characters.token_bytes()]
    assert pieces == ["", "\ufffd", *known]
    assert (characters.vocab_size, characters.eos_id) == (len(known) + SPECIAL, 0)
    assert (characters.meta.kind, characters.meta.byte_pieces) == ("character-level", True)
    assert TextCounter(characters.token_bytes()).bytes.tolist() == [
        0,
        3,
        *(len(character.encode()) for character in known),
    ]
    text = "".join(TEXTS)
    assert characters.encode(text).tolist() == [known.index(character) + SPECIAL for character in text]


@pytest.mark.parametrize("text", [*TEXTS, *SAMPLES, "".join(TEXTS), ""])
def test_known_characters_come_back(characters, text):
    ids = characters.encode(text)
    assert len(ids) == len(text)
    assert characters.decode(ids) == text
    assert characters.decode([*ids, characters.eos_id]) == text
    assert TextCounter(characters.token_bytes()).bytes[ids].sum() == len(text.encode())


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_keeps_its_number_of_characters(characters, text):
    known = {piece.decode() for piece in characters.token_bytes()[SPECIAL:]}
    expected = "".join(character if character in known else "\ufffd" for character in text)
    ids = characters.encode(text)
    assert len(ids) == len(text)
    assert characters.decode(ids) == expected
    assert TextCounter(characters.token_bytes()).bytes[ids].sum() == len(expected.encode())


def test_a_text_without_a_space_has_bytes_as_well(tmp_path):
    """The space is how other tokenizers' pieces are seen to be spelt in the byte-level alphabet."""
    tokenizer = train_characters(["é▁a\n"], tmp_path / "a")
    assert TextCounter(tokenizer.token_bytes()).bytes.tolist() == [0, 3, 1, 1, 2, 3]
    assert b"".join(tokenizer.token_bytes()[SPECIAL:]).decode() == "\naé▁"
    assert tokenizer.decode(tokenizer.encode("▁é\n")) == "▁é\n"


def test_rare_characters_are_unknown(tmp_path):
    text = "abracadabra \ufffd"  # a 5, b 2, r 2, others 1
    for count, known in ((1, " abcdr"), (2, "abr"), (3, "a"), (9, "")):
        tokenizer = train_characters([text[:4], text[4:]], tmp_path / str(count), count)
        assert tokenizer.vocab_size == len(known) + SPECIAL
        assert tokenizer.decode(tokenizer.encode(text)) == "".join(c if c in known else "\ufffd" for c in text)


def test_same_characters_give_the_same_file(characters, tmp_path):
    again = train_characters(reversed([*TEXTS, *SAMPLES]), tmp_path / "a")
    assert again.hash == characters.hash
    assert Tokenizer.load(tmp_path / "a").meta == characters.meta
    with pytest.raises(DataError, match="already holds a tokenizer"):
        train_characters(TEXTS, tmp_path / "a")
    with pytest.raises(DataError, match="the corpus is empty: no character to make a tokenizer of"):
        train_characters(["", ""], tmp_path / "b")
    assert not (tmp_path / "b").exists()


# Bytes


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_tokens_are_the_bytes_of_any_text(raw_bytes, text):
    ids = raw_bytes.encode(text)
    assert ids.tolist() == [byte + 1 for byte in text.encode()]
    assert raw_bytes.decode(ids) == text
    assert TextCounter(raw_bytes.token_bytes()).bytes[ids].sum() == len(text.encode())


def test_there_are_256_bytes_and_an_end(raw_bytes):
    assert raw_bytes.token_bytes() == [b"", *(bytes([byte]) for byte in range(256))]
    assert TextCounter(raw_bytes.token_bytes()).bytes.tolist() == [0] + [1] * 256
    assert (raw_bytes.vocab_size, raw_bytes.eos_id, raw_bytes.meta.kind) == (257, 0, "byte-level")
    # half a character
    assert raw_bytes.decode([0xC3 + 1]) == "\ufffd"
    text = "<|endoftext|>"
    assert raw_bytes.decode([*raw_bytes.encode(text), raw_bytes.eos_id]) == text


# Both


@pytest.mark.parametrize("kind", ["characters", "raw_bytes"])
def test_long_texts_are_cut_where_no_token_changes(kind, request, monkeypatch):
    tokenizer = request.getfixturevalue(kind)
    text = " ".join([*TEXTS, *SAMPLES])
    whole = tokenizer.encode(text).tolist()
    assert tokenizer.meta.divisible
    monkeypatch.setattr(tokenizer_module, "PART_CHARACTERS", 5)
    parts = [part.tolist() for part in tokenizer.encode_parts(text)]
    assert len(parts) > 20
    assert list(chain.from_iterable(parts)) == tokenizer.encode(text).tolist() == whole


@pytest.mark.parametrize("kind", ["characters", "raw_bytes"])
def test_export_and_import_keep_tokens_and_bytes(kind, request, tmp_path):
    tokenizer = request.getfixturevalue(kind)
    folder = tmp_path / "ours"
    made = train_characters([*TEXTS, *SAMPLES], folder) if kind == "characters" else byte_tokenizer(folder)
    assert made.hash == tokenizer.hash
    export_tokenizer(folder, tokenizer, tmp_path / "export")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    text = "".join(SAMPLES[:6])
    assert theirs(text)["input_ids"] == tokenizer.encode(text).tolist()
    assert theirs.decode(tokenizer.encode(text), clean_up_tokenization_spaces=False) == text
    imported = import_tokenizer(tmp_path / "export", tmp_path / "import")
    assert imported.encode(text).tolist() == tokenizer.encode(text).tolist()
    np.testing.assert_array_equal(TextCounter(imported.token_bytes()).bytes, TextCounter(tokenizer.token_bytes()).bytes)
    assert imported.eos_id == tokenizer.eos_id


# As typed


def test_from_text_to_shards(tmp_path):
    text = "".join(TEXTS)
    (tmp_path / "train.txt").write_bytes(text.encode())
    output = run("tokenizer", "train", tmp_path / "train.txt", "-o", tmp_path / "a", "--kind", "character")
    assert "character-level" in output
    assert "only" not in output
    run("tokenizer", "train", "-o", tmp_path / "b", "--kind", "byte")
    counts = Counter(text)
    entropy = -sum(n * math.log2(n / len(text)) for n in counts.values())
    for name, tokens in (("a", len(text)), ("b", len(text.encode()))):
        tokenizer, shards = Tokenizer.load(tmp_path / name), tmp_path / f"shards-{name}"
        run("shards", "write", tmp_path / "train.txt", "-t", tmp_path / name, "-o", shards, "--workers", 1)
        index = json.loads((shards / "index.json").read_text())
        assert (index["documents"], index["tokens"], index["text_bytes"]) == (1, tokens + 1, len(text.encode()))
        store = ShardStore(str(shards))
        ids = store.tokens(0, 0, tokens + 1)
        assert ids[-1] == tokenizer.eos_id
        assert tokenizer.decode(ids) == text
        if name == "a":  # bits per byte of a model that knows the characters' shares, from tokens and from text
            found = Counter(ids[:-1].tolist())
            bits = (
                -sum(n * math.log2(n / tokens) for n in found.values())
                / TextCounter(tokenizer.token_bytes()).bytes[ids].sum()
            )
            assert bits == pytest.approx(entropy / len(text.encode()), rel=1e-12)  # sums of doubles in another order


def test_options(tmp_path):
    (tmp_path / "train.txt").write_text("aab")
    train = ("tokenizer", "train", tmp_path / "train.txt", "-o", tmp_path / "a", "--kind")
    for arguments, message in (
        ((*train, "character", "--vocab-size", 9), "--vocab-size 9: --kind character has all characters that occur"),
        ((*train, "byte"), r"train\.txt: --kind byte reads no text; leave it out"),
        (("tokenizer", "train", "-o", tmp_path / "a", "--kind", "byte", "--min-count", 2), "--min-count 2: --kind by"),
        (("tokenizer", "train", "-o", tmp_path / "a", "--kind", "byte", "--vocab-size", 2), "--vocab-size 2: --kind"),
        (("tokenizer", "train", "-o", tmp_path / "a"), "--kind bpe: needs text to read; name files or folders"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(*arguments)
    assert not (tmp_path / "a").exists()
    run(*train, "character", "--min-count", 2)
    assert Tokenizer.load(tmp_path / "a").vocab_size == 1 + SPECIAL
