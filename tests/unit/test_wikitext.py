"""WikiText-103 and PG-19 in their own layouts, and the word-level tokenizer."""

import json
from collections import Counter
from itertools import chain

import fsspec
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
from tokenization.importing import import_tokenizer
from tokenization.sources import documents, input_files
from tokenization.text_size import TextCounter
from tokenization.tokenizer import SAMPLES, Tokenizer
from tokenization.words import train_words

SPECIAL = 2
"""Tokens that are no words: the end of a document and the end of a line. `<unk>` is a word of the text."""
ARTICLES = [
    # sections of two depths, paragraphs, unknown words
    " \n = Valkyria Chronicles III = \n \n Senjō no Valkyria 3 : <unk> Chronicles . \n It met the . \n \n"
    " = = Gameplay = = \n \n As with the previous games , @-@ . \n \n = = = Story = = = \n \n The end . \n \n",
    " = E = mc ² = \n \n A title that holds the sign of titles . \n \n",
    " = The sign = : = \n \n a \n = no title , as no empty line is before it = \n the . \n \n",
    " = 1 = \n \n",
    " = The title alone = \n \n \n",
    " = . = \n \n = three words that do not end as a title \n \n = = \n \n = \n \n the end . \n",
]
"""Articles as WikiText lays them out; laid end to end, they are its file."""

app = typer.Typer()
app.add_typer(tokenizer_app, name="tokenizer")
app.add_typer(shards_app, name="shards")


def run(*arguments):
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if isinstance(result.exception, MegamemError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def texts_of(*inputs):
    return [document.text for document in documents(input_files(inputs))]


@pytest.fixture
def wikitext(tmp_path):
    """The folder of WikiText-103, with another file beside the three."""
    folder = tmp_path / "wikitext-103"
    folder.mkdir()
    for name, articles in (("train", ARTICLES), ("valid", ARTICLES[:2]), ("test", ARTICLES[1:2])):
        (folder / f"wiki.{name}.tokens").write_bytes("".join(articles).encode())
    (folder / "notes.tokens").write_text("another program's")
    return folder


@pytest.fixture
def words(tmp_path):
    return train_words(ARTICLES, tmp_path / "words")


# Readers


def test_an_article_is_a_document(wikitext):
    found = list(documents(input_files([wikitext / "wiki.train.tokens"])))
    assert [document.text for document in found] == ARTICLES
    assert [document.name for document in found] == [f"wiki.train.tokens:{i}" for i in range(1, 7)]
    assert [document.source_bytes for document in found] == [len(article.encode()) for article in ARTICLES]
    # the three splits, in the order of their names
    assert texts_of(wikitext) == [*ARTICLES[1:2], *ARTICLES, *ARTICLES[:2]]


def test_raw_files_and_urls_are_read_alike(wikitext):
    (wikitext / "wiki.test.raw").write_bytes("".join(ARTICLES).encode())
    assert texts_of(wikitext / "wiki.test.raw") == ARTICLES
    store = fsspec.filesystem("memory")
    store.put(str(wikitext), "/wikitext", recursive=True)
    assert texts_of("memory://wikitext/wiki.train.tokens") == ARTICLES
    assert texts_of("memory://wikitext/wiki.t*.tokens") == [*ARTICLES[1:2], *ARTICLES]
    store.rm("/wikitext", recursive=True)


@pytest.mark.parametrize(
    ("text", "articles"),
    [
        ("", []),
        (" \n", [" \n"]),
        ("the rest of an article . \n \n = B = \n", ["the rest of an article . \n \n", " = B = \n"]),
        (" = A = \n \n a \r\n\r\n = B = \r\n", [" = A = \n \n a \r\n\r\n", " = B = \r\n"]),
        ("= A =\n\na\n\n= B =\n\nb", ["= A =\n\na\n\n", "= B =\n\nb"]),
    ],
)
def test_files_that_begin_and_end_elsewhere(tmp_path, text, articles):
    (tmp_path / "wiki.x.tokens").write_bytes(text.encode())
    assert texts_of(tmp_path) == articles


def test_wikitext_that_is_not_utf8_is_named_with_its_article(tmp_path):
    (tmp_path / "wiki.train.raw").write_bytes(b" = A = \n \n = B = \n \xff \n")
    with pytest.raises(DataError, match=r"wiki\.train\.raw, article 2: not UTF-8 at byte 9"):
        texts_of(tmp_path)


def test_the_books_of_pg19(tmp_path):
    """A folder for each split, a file for each book; the list of metadata is no text."""
    for split, books in (("train", (10001, 2, 300)), ("validation", (4,)), ("test", (5, 6))):
        (tmp_path / split).mkdir()
        for book in books:
            (tmp_path / split / f"{book}.txt").write_bytes(f"Book {book}\r\n\n = No title here = \n".encode())
    (tmp_path / "metadata.csv").write_text("10001,Title,1887,http://example.org\n")
    found = list(documents(input_files([tmp_path / "train"])))
    assert [document.name for document in found] == ["train/10001.txt", "train/2.txt", "train/300.txt"]
    assert found[1].text == "Book 2\r\n\n = No title here = \n"
    assert len(texts_of(tmp_path)) == 6


# Tokenizer


def test_the_vocabulary_is_the_words_of_the_text(words):
    """As many as a naive count finds, in the order of their counts."""
    counts = Counter(word for article in ARTICLES for line in article.split("\n") for word in line.split())
    pieces = [piece.decode() for piece in words.token_bytes()]
    assert pieces[:SPECIAL] == ["", " \n"]
    assert sorted(pieces[SPECIAL:]) == sorted(f" {word}" for word in counts)
    assert words.vocab_size == len(counts) + SPECIAL
    found = [counts[piece[1:]] for piece in pieces[SPECIAL:]]
    assert found == sorted(found, reverse=True)
    ids = np.bincount(np.concatenate([words.encode(article) for article in ARTICLES]), minlength=words.vocab_size)
    assert ids.tolist() == [0, "".join(ARTICLES).count("\n"), *found]
    assert (words.eos_id, words.meta.kind) == (0, "word-level")


def test_rare_words_are_left_out(tmp_path):
    text = ["d c b a <unk> a b c a b a"]  # a 4, b 3, c 2, d and <unk> 1
    kept = {
        (None, 1): " a b c <unk> d", (None, 2): " a b c <unk>", (None, 3): " a <unk> b", (None, 9): " <unk>",
        (5, 1): " a <unk> b", (3, 1): " <unk>", (5, 4): " <unk> a", (7, 1): " a b c <unk> d", (90, 1): " a b c <unk> d",
    }  # fmt: skip
    for (size, count), expected in kept.items():
        tokenizer = train_words(text, tmp_path / f"{size}-{count}", size, count)
        pieces = [piece.decode() for piece in tokenizer.token_bytes()][SPECIAL:]
        # <unk> stands where the count of all that it stands for puts it, behind words as frequent
        assert "".join(sorted(pieces)) == "".join(sorted(f" {word}" for word in expected.split()))
        counts = Counter(tokenizer.encode(text[0]).tolist())
        assert sum(counts.values()) == 11
        assert [counts[i + SPECIAL] for i in range(len(pieces))] == sorted(counts.values(), reverse=True)


def test_a_text_in_the_layout_of_wikitext_comes_back(words):
    for article in [*ARTICLES, "".join(ARTICLES)]:
        ids = words.encode(article)
        assert words.decode(ids) == article
        assert TextCounter(words.token_bytes()).bytes[ids].sum() == len(article.encode())
        assert len(ids) == len(article.split()) + article.count("\n")
        assert b"".join(words.token_bytes()[i] for i in ids) == article.encode()


def test_unknown_words_are_one_token(words):
    unknown = words.encode("<unk>").tolist()
    assert len(unknown) == 1
    assert words.encode("Zyzzyva").tolist() == unknown
    assert words.encode("the").tolist() != unknown
    text = "the Zyzzyva <|endoftext|> end\n"
    assert words.decode(words.encode(text)) == " the <unk> <unk> end \n"
    assert words.decode([*words.encode(text), words.eos_id]) == " the <unk> <unk> end \n"
    assert words.eos_id not in words.encode(text)
    assert TextCounter(words.token_bytes()).bytes[words.eos_id] == 0


def test_a_word_that_spells_the_end_of_a_document_is_a_word(tmp_path):
    tokenizer = train_words(["a <|endoftext|> Ġ Ċ ĠĊ \n"], tmp_path / "a")
    ids = tokenizer.encode("<|endoftext|> Ġ ĠĊ Ċ\n")
    assert tokenizer.eos_id not in ids
    assert tokenizer.decode(ids) == " <|endoftext|> Ġ ĠĊ Ċ \n"
    assert len(set(ids.tolist())) == 5


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_any_text_is_words_and_lines(any_words, text):
    """Split as Python splits at white space, whatever the writing system; what is left is the number of spaces."""
    expected = list(chain.from_iterable((*line.split(), "\n") for line in text.split("\n")))[:-1]
    known = {piece.decode().removeprefix(" "): i for i, piece in enumerate(any_words.token_bytes()) if piece}
    assert any_words.encode(text).tolist() == [known.get(word, known["<unk>"]) for word in expected]


@pytest.fixture(scope="module")
def any_words(tmp_path_factory):
    return train_words([*SAMPLES, "0 1 a b A ~ \x1c \x1f \x85 \u3000"], tmp_path_factory.mktemp("words"))


def test_same_texts_give_the_same_file(words, tmp_path):
    assert train_words(reversed(ARTICLES), tmp_path / "b").hash == words.hash
    assert Tokenizer.load(tmp_path / "b").meta == words.meta
    with pytest.raises(DataError, match="already holds a tokenizer"):
        train_words(ARTICLES, tmp_path / "b")


def test_long_texts_are_cut_where_no_token_changes(words, monkeypatch):
    text = "".join(ARTICLES)
    whole = words.encode(text).tolist()
    assert words.meta.divisible
    monkeypatch.setattr(tokenizer_module, "PART_CHARACTERS", 5)
    assert words.encode(text).tolist() == whole


def test_text_that_is_generated_goes_on_from_its_prompt(words):
    """Each decoded beginning begins the next one, and the first word is parted from the prompt."""
    ids = words.encode("met the end . \n the previous games")
    shown = [words.decode(ids[:stop]) for stop in range(len(ids) + 1)]
    assert shown[1] == " met"
    assert all(after.startswith(before) for before, after in zip(shown, shown[1:], strict=False))


def test_export_and_import_keep_words_and_bytes(words, tmp_path):
    export_tokenizer(tmp_path / "words", words, tmp_path / "export")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "export")
    text = ARTICLES[0] + "Zyzzyva\n"
    assert theirs(text)["input_ids"] == words.encode(text).tolist()
    assert theirs.decode(words.encode(ARTICLES[0])) == ARTICLES[0]
    imported = import_tokenizer(tmp_path / "export", tmp_path / "import")
    assert imported.encode(text).tolist() == words.encode(text).tolist()
    assert imported.eos_id == words.eos_id
    np.testing.assert_array_equal(TextCounter(imported.token_bytes()).bytes, TextCounter(words.token_bytes()).bytes)


# As typed


def test_from_wikitext_to_shards(wikitext, tmp_path):
    train = wikitext / "wiki.train.tokens"
    tokenizer, shards = tmp_path / "tokenizer", tmp_path / "shards"
    output = run("tokenizer", "train", train, "-o", tokenizer, "--kind", "word")
    text = "".join(ARTICLES)
    assert "word-level" in output
    assert "only" not in output
    loaded = Tokenizer.load(tokenizer)
    assert loaded.vocab_size == len(set(text.split())) + SPECIAL
    run("shards", "write", train, "-t", tokenizer, "-o", shards, "--workers", 1)
    index = json.loads((shards / "index.json").read_text())
    tokens = len(text.split()) + text.count("\n") + len(ARTICLES)
    assert (index["documents"], index["tokens"], index["text_bytes"]) == (6, tokens, len(text.encode()))
    store = ShardStore(str(shards))
    for number, article in enumerate(ARTICLES):
        ids = store.tokens(number, 0, int(store.lengths[number]))
        assert ids[-1] == loaded.eos_id
        assert loaded.decode(ids) == article
    assert "1 shards are whole" in run("shards", "verify", shards)


def test_options_of_the_word_level_tokenizer(wikitext, tmp_path):
    train = ("tokenizer", "train", wikitext / "wiki.train.tokens", "-o")
    run(*train, tmp_path / "a", "--kind", "word", "--min-count", 3)
    counts = Counter("".join(ARTICLES).split())
    # <unk> occurs once
    assert Tokenizer.load(tmp_path / "a").vocab_size == sum(n >= 3 for n in counts.values()) + 1 + SPECIAL
    run(*train, tmp_path / "b", "--kind", "word", "--vocab-size", 7)
    assert Tokenizer.load(tmp_path / "b").vocab_size == 7
    size = len(counts) + SPECIAL
    output = run(*train, tmp_path / "c", "--kind", "word", "--vocab-size", 5000)
    assert f"The text holds words for {size} tokens only, not for 5,000." in output
    with pytest.raises(ConfigError, match=r"--min-count 2: counts words or characters, .* give --kind word"):
        run(*train, tmp_path / "d", "--min-count", 2)
    with pytest.raises(ConfigError, match="vocab_size: 2 is too small; a word-level tokenizer needs at least 3"):
        run(*train, tmp_path / "d", "--kind", "word", "--vocab-size", 2)
    assert not (tmp_path / "d").exists()


def test_texts_without_words_are_refused(tmp_path):
    with pytest.raises(DataError, match="the corpus is empty: no word to make a tokenizer of"):
        train_words([" \n \n", ""], tmp_path / "a")
    assert list(tmp_path.iterdir()) == []
