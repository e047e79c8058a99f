"""Inputs of text by pattern and by URL, from stores that answer and from such as fail for a while."""

import functools
import http.server
import threading

import fsspec.implementations.memory
import pytest

from megamem import patience
from megamem.errors import DataError, StoreError
from tests.unit.test_sources import FORMATS, TEXTS, write
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
        handler = functools.partial(http.server.SimpleHTTPRequestHandler, directory=str(corpus.parent))
        handler.func.log_message = lambda *arguments: None
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
            threading.Thread(target=server.serve_forever, daemon=True).start()
            yield f"http://127.0.0.1:{server.server_port}/web"
            server.shutdown()


def test_remote_inputs_read_like_local_ones(corpus, url):
    """Folder, pattern and single file: same names, texts and sizes, in the same order."""
    # the server of the standard library sends no ranges, so columns are not read through it
    formats = ["a.jsonl", "a.jsonl.zst"] if url.startswith("http:") else FORMATS
    if len(formats) == len(FORMATS):
        assert read(url) == read(corpus)
        assert [f.size for f in input_files([url])] == [f.size for f in input_files([corpus])]
    for name in formats:
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
    with pytest.raises(DataError, match=rf"had {file.size} bytes and has 12 now; it changed while it was read"):
        raw.read()


class Halves(http.server.SimpleHTTPRequestHandler):
    """A server without ranges that breaks off every other answer in the middle."""

    asked = 0

    def copyfile(self, source, outputfile):
        """Send half of the file, or all of it."""
        Halves.asked += 1
        data = source.read()
        outputfile.write(data[: len(data) // 2] if Halves.asked % 2 else data)

    def log_message(self, *arguments):
        """Say nothing."""


def test_a_server_without_ranges_is_read_again_from_the_start(corpus, monkeypatch):
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 0.0)
    monkeypatch.setattr(remote_file, "READ_BYTES", 16)
    with http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Halves, directory=str(corpus.parent))
    ) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/web/de/a.jsonl"
        assert read(url) == read(corpus / "de" / "a.jsonl")
        server.shutdown()
    assert Halves.asked > 1
