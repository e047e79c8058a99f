"""Inputs of text by pattern and by URL, from stores that answer and from such as fail for a while."""

import random
import re
import socket
import string

import fsspec.implementations.memory
import pytest

from megamem import patience
from megamem.errors import DataError, StoreError
from tests.unit.test_sources import FORMATS, TEXTS, write
from tests.unit.web_server import Server, serving
from tokenization import remote_file
from tokenization.sources import documents, input_files


@pytest.fixture
def corpus(tmp_path):
    """Two languages with a file of every format, and one that is no text."""
    for language in ("de", "en"):
        folder = tmp_path / "web" / language
        folder.mkdir(parents=True)
        for name in FORMATS:
            write(folder / name)
        (folder / "README.md").write_text("no text to train on")
    return tmp_path / "web"


def read(*inputs):
    return [(document.name, document.text) for document in documents(input_files(inputs))]


def test_patterns_of_local_files(corpus):
    found = read(f"{corpus}/*/a.parquet")
    assert [text for _, text in found] == TEXTS * 2
    assert [name for name, _ in found][::3] == ["web/de/a.parquet:1", "web/en/a.parquet:1"]
    assert read(f"{corpus}/**/*.jsonl.zst") == read(f"{corpus}/*/*.jsonl.zst")
    with pytest.raises(DataError, match=r"\*\.warc: no such file or folder"):
        read(f"{corpus}/*.warc")


@pytest.fixture(params=["memory", "file", "http"])
def url(request, corpus):
    """URL of the corpus in stores of several kinds."""
    if request.param == "file":
        yield f"file://{corpus}"
    elif request.param == "memory":
        store = fsspec.filesystem("memory")
        store.put(str(corpus), "/bucket/web", recursive=True)
        yield "memory://bucket/web"
        store.rm("/bucket", recursive=True)
    else:
        with serving(corpus.parent) as address:
            yield f"{address}/web"


def test_remote_inputs_read_like_local_ones(corpus, url):
    """Folder, pattern and single file: same names, texts and sizes, in the same order."""
    assert read(url) == read(corpus)
    assert [f.size for f in input_files([url])] == [f.size for f in input_files([corpus])]
    for name in FORMATS:
        assert read(f"{url}/*/{name}") == read(f"{corpus}/*/{name}")
        assert read(f"{url}/de/{name}") == read(corpus / "de" / name)
    with pytest.raises(DataError, match=r"nowhere.*: no such file or folder"):
        read(f"{url}/nowhere/*.parquet")
    with pytest.raises(DataError, match=r"nowhere\.parquet: no such file or folder"):
        read(f"{url}/nowhere.parquet")


def test_stores_that_refuse_are_named_in_one_line(corpus, monkeypatch):
    with pytest.raises(DataError, match=r"unknown://x/\*\.parquet: cannot be listed \(ValueError: Protocol not known"):
        read("unknown://x/*.parquet")
    store = fsspec.filesystem("memory")
    store.put(str(corpus / "de" / "a.jsonl"), "/bucket/a.jsonl")

    def refused(*arguments, **options):
        raise PermissionError("not yours\nand more")

    files = input_files(["memory://bucket/a.jsonl"])
    monkeypatch.setattr(type(store), "_open", refused)
    with pytest.raises(DataError, match=r"a\.jsonl: cannot be read \(PermissionError: not yours\)$"):
        list(documents(files))
    store.rm("/bucket", recursive=True)


# Stores that fail for a while


class Failing(fsspec.implementations.memory.MemoryFile):
    """A file whose store breaks off after every few bytes, and does not answer the request after that either."""

    left, asked = 40, 0

    def read(self, size=-1):
        """Read what the connection still gives."""
        cls = type(self)
        cls.asked += 1
        if cls.left <= 0:
            cls.left = 40 if cls.left < 0 else -1
            raise ConnectionError("reset by peer")
        data = super().read(min(size, cls.left) if size >= 0 else cls.left)
        cls.left -= len(data)
        return data


@pytest.fixture
def failing(corpus, monkeypatch):
    """A store in memory with the corpus, whose connections last for 40 bytes."""
    store = fsspec.filesystem("memory")
    store.put(str(corpus), "/bucket/web", recursive=True)
    opened = type(store)._open

    def broken(self, path, *arguments, **options):
        whole = opened(self, path, *arguments, **options)
        return Failing(self, path, whole.getvalue())

    monkeypatch.setattr(patience, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(patience, "LONGEST_WAIT_S", 0.0)
    monkeypatch.setattr(type(store), "_open", broken)
    Failing.left = Failing.asked = 0
    yield store
    monkeypatch.undo()
    store.rm("/bucket", recursive=True)


@pytest.mark.parametrize("name", FORMATS)
def test_files_are_read_on_where_their_store_broke_off(corpus, failing, name):
    assert read(f"memory://bucket/web/de/{name}") == read(corpus / "de" / name)
    assert Failing.asked > 10


@pytest.mark.parametrize("name", FORMATS)
def test_a_store_that_fails_for_ever_is_named_in_one_line(corpus, failing, monkeypatch, name):
    """With the exit code that says: try again later."""
    files = input_files([f"memory://bucket/web/de/{name}"])
    monkeypatch.setattr(remote_file, "RETRY_S", 0.0)
    monkeypatch.setattr(remote_file.open_remote, "__defaults__", (0.0,))
    with pytest.raises(StoreError) as caught:
        list(documents(files))
    assert str(caught.value) == (
        f"memory:///bucket/web/de/{name}: does not answer (ConnectionError: reset by peer); try again later"
    )


def test_listing_is_tried_again(corpus, failing, monkeypatch):
    found, asked = type(failing).find, []

    def after_two(self, *arguments, **options):
        asked.append(1)
        if len(asked) < 3:
            raise ConnectionError("reset by peer")
        return found(self, *arguments, **options)

    monkeypatch.setattr(type(failing), "find", after_two)
    assert len(input_files(["memory://bucket/web"])) == 2 * len(FORMATS)
    assert len(asked) == 3


def test_a_file_that_changed_while_its_store_failed_is_named(corpus, failing):
    """It is another file: what was read of the first one does not go on in it."""
    (file,) = input_files(["memory://bucket/web/de/a.jsonl"])
    raw = file.open()
    raw.read(20)
    failing.pipe("/bucket/web/de/a.jsonl", b"another text")
    with pytest.raises(DataError, match=rf"had {file.size} bytes when it was listed and has 12 now; start again"):
        raw.read()


@pytest.fixture
def server(tmp_path, monkeypatch):
    """The URL of a folder behind a server, and the folder."""
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 0.0)
    (tmp_path / "web").mkdir()
    with serving(tmp_path / "web") as url:
        yield url, tmp_path / "web"


LARGE = 8 << 20
"""Bytes of a file that fsspec would fetch in parts."""


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl", "a.parquet", "a.arrow"])
@pytest.mark.parametrize("broken", [0, 2])
def test_a_server_without_ranges_is_read_again_from_the_start(server, name, broken):
    """What was read before it broke off is passed over, and not read twice."""
    url, folder = server
    letters = random.Random(0).choices(string.ascii_letters, k=LARGE // 8)  # columns are compressed
    texts = ["".join(letters[number:]) for number in range(8)]
    write(folder / name, texts)
    files = input_files([f"{url}/{name}"])
    Server.broken = broken
    found = [document.text for document in documents(files)]
    assert found == ([(folder / name).read_text()] if name == "a.txt" else texts)
    assert Server.sent > broken


def test_a_busy_server_is_asked_again(server):
    """Whether it lists, opens or goes on; what is not there is known at once."""
    url, folder = server
    write(folder / "a.jsonl")
    Server.busy = 5
    files = input_files([f"{url}/a.jsonl"])
    assert Server.busy == 0
    Server.busy = 5
    assert [document.text for document in documents(files)] == TEXTS
    assert Server.busy == 0
    with pytest.raises(DataError, match=r"b\.jsonl: no such file or folder"):
        input_files([f"{url}/b.jsonl"])


def test_a_server_that_stays_busy_is_named(server, monkeypatch):
    url, folder = server
    write(folder / "a.jsonl")
    (file,) = input_files([f"{url}/a.jsonl"])
    Server.busy = 1000
    with pytest.raises(StoreError, match=r"a\.jsonl: does not answer \(.*503"):
        remote_file.open_remote(file.path, file.size, 0.0)
    monkeypatch.setattr("tokenization.sources.RETRY_S", 0.0)
    with pytest.raises(StoreError, match=r"a\.jsonl: does not answer \(.*503"):
        input_files([f"{url}/a.jsonl"])


@pytest.mark.parametrize("input", ["a.jsonl", "nowhere.jsonl", "de", "de/*.jsonl"])
def test_a_server_that_refuses_does_not_say_that_a_file_is_missing(server, input):
    url, folder = server
    write(folder / "a.jsonl")
    Server.refusing = True
    with pytest.raises(DataError, match=rf"{re.escape(input)}: cannot be listed \(ClientResponseError: 403"):
        input_files([f"{url}/{input}"])


@pytest.mark.parametrize("input", ["a.jsonl", "de", "de/*.jsonl"])
def test_a_server_that_is_not_there_is_asked_again(input, monkeypatch):
    monkeypatch.setattr("tokenization.sources.RETRY_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with pytest.raises(StoreError, match=rf"{re.escape(input)}: does not answer \(ClientConnector"):
        input_files([f"http://127.0.0.1:{port}/{input}"])


def test_an_empty_file_in_the_place_of_another_is_named(corpus, failing):
    (file,) = input_files(["memory://bucket/web/de/a.jsonl"])
    failing.pipe("/bucket/web/de/a.jsonl", b"")
    with pytest.raises(DataError, match=rf"had {file.size} bytes when it was listed and has 0 now; start again"):
        file.open()
