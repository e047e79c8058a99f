"""Files written whole or not at all, and what is said of those that cannot be read or written."""

import hashlib
import json
import os
from contextlib import contextmanager

import pytest
from data_helpers import make_tokenizer, text_of, write_corpus

from megamem.errors import DataError
from megamem.files import read_json, require_space, sha256_file, write_bytes, write_json
from tokenization import corpus
from tokenization.prepare import prepare, train_on_files, write_from_files
from tokenization.tokenizer import Tokenizer


def test_json_comes_back_and_nothing_temporary_is_left(tmp_path):
    value = {"text": "ä 🙂", "list": [1, None, 2.5], "nested": {"a": True}}
    write_json(tmp_path / "new" / "a.json", value)
    assert read_json(tmp_path / "new" / "a.json") == value
    assert "ä" in (tmp_path / "new" / "a.json").read_text(), "readable"
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["a.json"]


def test_a_write_that_fails_leaves_the_file_as_it_was(tmp_path, monkeypatch):
    path = tmp_path / "a"
    write_bytes(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_bytes(path, b"new")
    assert path.read_bytes() == b"old"


def test_hashes_are_sha256(tmp_path):
    data = bytes(range(256)) * 5000
    (tmp_path / "a").write_bytes(data)
    assert sha256_file(tmp_path / "a") == hashlib.sha256(data).hexdigest()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, "a.json: missing"),
        (b"{", "a.json: not valid JSON ("),
        (b"[" * 10**5, "a.json: not valid JSON (maximum recursion depth exceeded"),
        (b"\xff{}", "a.json: not valid JSON ("),
        (b"[1]", "a.json: not a JSON object"),
        ("folder", "a.json: cannot be read (Is a directory)"),
    ],
)
def test_json_that_cannot_be_read_is_named_in_one_line(tmp_path, data, said):
    path = tmp_path / "a.json"
    if data == "folder":
        path.mkdir()
    elif data is not None:
        path.write_bytes(data)
    with pytest.raises(DataError) as refused:
        read_json(path)
    assert f"{tmp_path}/{said}" in str(refused.value)
    assert "\n" not in str(refused.value)


def test_space_is_that_of_the_nearest_folder(tmp_path):
    require_space(tmp_path / "new" / "deep", 1)
    assert not (tmp_path / "new").exists()
    with pytest.raises(
        DataError, match=r"deep: not enough disk space: 9,000,000,000,000,000 bytes needed, [\d,]+ bytes"
    ):
        require_space(tmp_path / "new" / "deep", 9 * 10**15)


@pytest.mark.parametrize("below", ["", "tokenizer"])
def test_a_file_in_the_place_of_a_folder_is_named(tmp_path, below):
    """As where a path to write to and one to read from were mixed up."""
    file = tmp_path / "text.txt"
    file.write_text(text_of(50, 0))
    for work in (
        lambda: corpus.fetch(file / below),
        lambda: train_on_files([file], file / below, 300, no_progress),
        lambda: require_space(file / below, 0),
    ):
        with pytest.raises(DataError, match=rf"^{file}: is a file, not a folder; choose another folder$"):
            work()
    with pytest.raises(DataError, match=r"text\.txt/meta\.json: cannot be read \(Not a directory\)"):
        Tokenizer.load(file)


# data from nothing


@contextmanager
def no_progress(label, total):
    yield lambda done: None


class Progress:
    """What was shown: label, total, and the steps of each bar."""

    def __init__(self):
        self.bars = []

    @contextmanager
    def __call__(self, label, total):
        steps = []
        self.bars.append((label, total, steps))
        yield steps.append


@pytest.fixture
def fetched(tmp_path, monkeypatch):
    """A corpus of two splits in the place of one that is downloaded; counts how often it was asked for."""
    asked = []

    def fetch(folder, name):
        asked.append(name)
        write_corpus(folder / "train", (300, 200))
        write_corpus(folder / "validation", (50,), seed=9)

    monkeypatch.setattr(corpus, "fetch", fetch)
    return asked


def test_data_is_prepared_once_and_then_checked(tmp_path, fetched):
    progress = Progress()
    made = [
        (part, path.relative_to(tmp_path).as_posix()) for part, path in prepare(tmp_path, "books", 300, 1, progress)
    ]
    assert made == [
        ("corpus", "corpus"),
        ("tokenizer", "tokenizer"),
        ("shards", "shards/train"),
        ("shards", "shards/validation"),
    ]
    sizes = {
        split: sum(path.stat().st_size for path in (tmp_path / "corpus" / split).iterdir())
        for split in ("train", "validation")
    }
    assert [bar[:2] for bar in progress.bars] == [
        ("reading", sizes["train"]), ("tokenizing", sizes["train"]), ("tokenizing", sizes["validation"]),
    ]  # fmt: skip
    assert all(sum(steps) == total for _, total, steps in progress.bars), "every bar goes to its end"
    index = json.loads((tmp_path / "shards" / "train" / "index.json").read_text())
    assert (index["documents"], index["text_bytes"]) == (2, sizes["train"])
    assert index["header"]["tokenizer_sha256"] == Tokenizer.load(tmp_path / "tokenizer").hash
    before = {path: path.stat().st_mtime_ns for path in tmp_path.glob("[ts]*/**/[!.]*") if path.is_file()}
    again = Progress()
    assert len(list(prepare(tmp_path, "books", 300, 1, again))) == 4
    assert [label for label, _, _ in again.bars] == ["tokenizing"] * 2
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert fetched == ["books", "books"]


def test_a_damaged_tokenizer_stops_the_preparation(tmp_path, fetched):
    list(prepare(tmp_path, "books", 300, 1, no_progress))
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer\.json: "):
        list(prepare(tmp_path, "books", 300, 1, no_progress))


def test_a_tokenizer_that_is_there_is_found_before_the_corpus_is_read(tmp_path):
    make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "bad.txt").write_bytes(b"\xff")
    with pytest.raises(DataError, match="tokenizer: already holds a tokenizer; choose another folder"):
        train_on_files([tmp_path / "bad.txt"], tmp_path / "tokenizer", 300, no_progress)


def test_progress_counts_the_bytes_of_files_as_they_lie(tmp_path):
    make_tokenizer(tmp_path / "tokenizer")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text_of(90, seed)}) + "\n" for seed in range(8)))
    progress = Progress()
    write_from_files(
        [tmp_path / "a.jsonl"], tmp_path / "tokenizer", tmp_path / "shards", progress, shard_text_bytes=1000
    )
    ((label, total, steps),) = progress.bars
    assert (label, total) == ("tokenizing", (tmp_path / "a.jsonl").stat().st_size)
    # a file is read in larger pieces than lines: the last bytes may be counted with the first
    assert sum(steps) == total
    assert len(steps) > 2
