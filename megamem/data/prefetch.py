"""Reads batches ahead in a background thread."""

import queue
import threading
from collections.abc import Iterable, Iterator
from contextlib import suppress

from megamem.data.batch import Batch
from megamem.errors import StoppedError
from megamem.patience import STOP_S, check_not_stopped

POLL_SECONDS = 0.05
"""Seconds between looks whether the reader was closed or the process asked to stop."""
_BATCH = "the next batch"


class Prefetcher:
    """Context manager and iterator over `batches`: one thread reads at most `depth` of them ahead."""

    def __init__(self, batches: Iterable[Batch], depth: int) -> None:
        """Start the thread. depth: most batches that wait to be taken."""
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue(depth)
        self._stopped = threading.Event()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._read, args=(batches,), name="prefetch", daemon=True)
        self._thread.start()

    def __enter__(self) -> "Prefetcher":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        """Return the next batch.

        Raises: what the thread raised, StopIteration at the end or after `close`; StoppedError where the process was
        asked to stop and the batch does not come, as from a store that says nothing.
        """
        if self._error is None:
            item = StopIteration() if self._stopped.is_set() else self._take()
            if isinstance(item, Batch):
                return item
            self._error = item
        raise self._error

    def close(self) -> None:
        """Stop the thread and wait for it, but not for a store that says nothing once the process was asked to stop.

        Batches read ahead are dropped.
        """
        self._stopped.set()
        with suppress(StoppedError):
            while self._thread.is_alive():
                self._thread.join(POLL_SECONDS)
                check_not_stopped(_BATCH, STOP_S)

    def _take(self) -> Batch | BaseException:
        """Wait for what the thread puts into the queue. Raises StoppedError, see `__next__`."""
        while True:
            try:
                return self._queue.get(timeout=POLL_SECONDS)
            except queue.Empty:
                check_not_stopped(_BATCH, STOP_S)

    def _read(self, batches: Iterable[Batch]) -> None:
        """Put batches into the queue: the body of the thread."""
        try:
            for batch in batches:
                if not self._put(batch):
                    return
            self._put(StopIteration())
        except BaseException as error:  # handed to the consumer, whatever it is
            self._put(error)

    def _put(self, item: Batch | BaseException) -> bool:
        """Wait for room in the queue; return False once stopped."""
        while not self._stopped.is_set():
            try:
                self._queue.put(item, timeout=POLL_SECONDS)
                return True
            except queue.Full:
                continue
        return False
