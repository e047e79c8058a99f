"""The thread that reads batches ahead: bounded, closed at once, its errors passed on."""

import threading
import time

import numpy as np
import pytest
import torch

from megamem import patience
from megamem.data import prefetch
from megamem.data.batch import Batch
from megamem.data.prefetch import Prefetcher
from megamem.errors import DataError, StoppedError


def endless(read):
    while True:
        read.append(len(read))
        yield Batch(torch.zeros(1), torch.zeros(1), np.zeros(1), (len(read),))


def test_the_queue_is_bounded():
    read = []
    with Prefetcher(endless(read), depth=3) as batches:
        assert next(batches).sample_ids == (1,)
        time.sleep(0.2)
        assert len(read) <= 1 + 3 + 1  # taken, waiting, in hand


def test_errors_of_the_thread_reach_the_consumer():
    def failing():
        yield Batch(torch.zeros(1), torch.zeros(1), np.zeros(1), (7,))
        raise DataError("shard 3 is gone")

    batches = Prefetcher(failing(), depth=2)
    assert next(batches).sample_ids == (7,)
    for _ in range(2):
        with pytest.raises(DataError, match="shard 3 is gone"):
            next(batches)
    batches.close()


def test_prefetching_ends_with_the_batches():
    batches = Prefetcher((batch for batch, _ in zip(endless([]), range(3), strict=False)), depth=1)
    assert [batch.sample_ids[0] for batch in batches] == [1, 2, 3]
    batches.close()


def test_closing_does_not_wait_for_a_full_queue():
    batches = Prefetcher(endless([]), depth=1)
    start = time.monotonic()
    batches.close()
    batches.close()
    assert time.monotonic() - start < 1


def test_a_stop_does_not_wait_for_a_batch_that_never_comes(monkeypatch):
    """A store whose connection stands and says nothing: the thread cannot be interrupted."""
    monkeypatch.setattr(prefetch, "STOP_S", 0.5)
    silent = threading.Event()

    def hanging():
        silent.wait(60)
        yield from endless([])

    batches = Prefetcher(hanging(), depth=2)
    threading.Timer(0.2, patience.stop_waiting).start()
    begun = time.monotonic()
    try:
        with pytest.raises(StoppedError, match="the next batch: stopped by a signal while it was read"):
            next(batches)
        batches.close()
        assert 0.5 < time.monotonic() - begun < 10
    finally:
        patience.wait_again()
        silent.set()
