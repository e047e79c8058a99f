"""Stores that do not answer for a while: a server on this machine that answers 503, as a busy one does."""

from __future__ import annotations

import hashlib
import socket
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from megamem import patience
from megamem.config.data import DataConfig
from megamem.data.cache import ShardCache, read_remote
from megamem.data.feeder import open_stores
from megamem.errors import FINAL, STOPPED, DataError, StoppedError, StoreError
from tokenization.shard_format import FileRecord

CONTENTS = b"tokens" * 50


class Store(ThreadingHTTPServer):
    """Serves one file, after it has answered `failures` requests with `status`."""

    failures, status, asked = 0, 503, 0

    @property
    def url(self) -> str:
        """Address of the file."""
        return f"http://127.0.0.1:{self.server_address[1]}/shard.tar"


class Handler(BaseHTTPRequestHandler):
    server: Store

    def do_GET(self) -> None:
        self.server.asked += 1
        wrong = self.server.asked <= self.server.failures
        self.send_response(self.server.status if wrong else 200)
        self.send_header("Content-Length", str(0 if wrong else len(CONTENTS)))
        self.end_headers()
        if not wrong:
            self.wfile.write(CONTENTS)

    def do_HEAD(self) -> None:
        self.send_response(200)
        self.send_header("Content-Length", str(len(CONTENTS)))
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


@pytest.fixture
def store(monkeypatch) -> Iterator[Store]:
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 0.05)
    server = Store(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    patience.wait_again()
    server.shutdown()
    server.server_close()


def test_a_store_that_answers_again_is_read(store) -> None:
    store.failures = 3
    assert read_remote(store.url, retry_s=20) == CONTENTS
    assert store.asked == 4


def test_a_shard_is_fetched_once_the_store_answers_again(store, tmp_path) -> None:
    store.failures = 3
    record = FileRecord("shard.tar", len(CONTENTS), hashlib.sha256(CONTENTS).hexdigest())
    with ShardCache(tmp_path, 1 << 20, retry_s=20).open(store.url, record) as file:
        assert file.read() == CONTENTS


def test_a_store_that_never_answers_ends_the_run_with_a_code_that_is_tried_again(store) -> None:
    store.failures = 10**6
    begun = time.monotonic()
    with pytest.raises(StoreError, match=r"shard\.tar: does not answer for 1 s \(.*503.*\); try again later"):
        read_remote(store.url, retry_s=1)
    assert 0.9 < time.monotonic() - begun < 10
    assert store.asked > 3
    assert StoreError.exit_code not in FINAL


@pytest.mark.parametrize("status", [401, 403, 404])
def test_what_is_refused_is_not_asked_for_again(store, status: int) -> None:
    store.failures, store.status = 10**6, status
    with pytest.raises(DataError, match=r"shard\.tar: cannot be read"):
        read_remote(store.url, retry_s=20)
    assert store.asked == 1


def test_a_signal_to_stop_does_not_wait_for_a_store(store) -> None:
    store.failures = 10**6
    threading.Timer(0.5, patience.stop_waiting).start()
    begun = time.monotonic()
    with pytest.raises(StoppedError, match="stopped by a signal while it was read"):
        read_remote(store.url, retry_s=600)
    assert time.monotonic() - begun < 10
    assert StoppedError.exit_code == STOPPED


@pytest.mark.parametrize("wanted", ["index", "shard"])
def test_a_signal_to_stop_does_not_wait_for_a_connection_that_says_nothing(
    store, tmp_path, monkeypatch, wanted: str
) -> None:
    """It is open, and no byte comes: there is nothing to try again, and nothing to end."""
    monkeypatch.setattr(patience, "STOP_S", 0.5)
    record = FileRecord("shard.tar", len(CONTENTS), hashlib.sha256(CONTENTS).hexdigest())

    def read(url: str) -> None:
        if wanted == "index":
            read_remote(url, retry_s=600)
        else:
            ShardCache(tmp_path, 1 << 20, retry_s=600).open(url, record)

    with socket.create_server(("127.0.0.1", 0)) as silent:
        threading.Timer(0.5, patience.stop_waiting).start()
        begun = time.monotonic()
        with pytest.raises(StoppedError, match="stopped by a signal while it was read"):
            read(f"http://127.0.0.1:{silent.getsockname()[1]}/shard.tar")
    assert 0.9 < time.monotonic() - begun < 10
    assert not list(tmp_path.glob("*.part"))


def test_a_configuration_says_how_long_its_stores_may_be_silent(store, tmp_path) -> None:
    store.failures = 10**6
    config = DataConfig(sources=[store.url], cache_folder=str(tmp_path), retry_minutes=0.01)
    begun = time.monotonic()
    with pytest.raises(StoreError, match="does not answer for 1 s"):
        open_stores(config, [store.url])
    assert time.monotonic() - begun < 10


def test_waits_grow_up_to_a_limit_and_end_in_time(monkeypatch) -> None:
    """Each is twice the one before, none longer than the longest nor than what is left."""
    now, waits = [0.0], []

    class Clock(threading.Event):
        def wait(self, timeout: float | None = None) -> bool:
            assert timeout is not None
            waits.append(timeout)
            now[0] += timeout
            return False

    monkeypatch.setattr(patience, "_stopping", Clock())
    monkeypatch.setattr(patience.time, "monotonic", lambda: now[0])

    def work() -> None:
        raise ConnectionError("reset")

    with pytest.raises(StoreError, match="does not answer for 100 s"):
        patience.patiently("a store", work, 100.0)
    assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0, 8.5]
