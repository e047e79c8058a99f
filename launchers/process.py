"""What an agent's process needs around torchrun: signals, threads, and patience with stores that may never answer."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.distributed.elastic.multiprocessing import SignalException

from launchers.signals import STOPS, heeded
from megamem.hardware import cores

SAME_SIGNAL_S = 1.0


class Signals:
    """Signals to stop become exceptions, as torchrun makes them; what comes within a second is one signal.

    A scheduler may signal this process, its parent and its ranks at once.
    """

    NUMBERS = (*STOPS, signal.SIGQUIT)

    def __init__(self) -> None:
        self._last = -SAME_SIGNAL_S
        self._heeded = heeded(self.NUMBERS)

    def take(self) -> None:
        """Handle them here from now on, but for those that were ignored before."""
        if threading.current_thread() is threading.main_thread():
            for number in self.NUMBERS:
                signal.signal(number, self._raise if number in self._heeded else signal.SIG_IGN)

    def __enter__(self) -> Signals:
        self._before = {number: signal.getsignal(number) for number in self.NUMBERS}
        self.take()
        return self

    def __exit__(self, *_: object) -> None:
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        before, self._last = self._last, time.monotonic()
        if self._last - before >= SAME_SIGNAL_S:
            raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))


def within(seconds: float, work: Callable[[], Any]) -> Any:
    """What `work` returns, None if it fails or takes longer: a store on a lost machine may never answer."""
    found: list[Any] = []

    def run() -> None:
        with contextlib.suppress(Exception):
            found.append(work())

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None


def open_to_signals(work: Callable[[], Any], gives_up: Callable[[], bool]) -> Any:
    """What `work` returns or raises, done in a thread, so that a signal ends the waiting for it.

    Raises: TimeoutError once `gives_up` says so.
    """
    found: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            found.append((work(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    while thread.is_alive():
        thread.join(0.1)
        if gives_up():
            raise TimeoutError
    result, error = found[0]
    if error is not None:
        raise error
    return result


@contextmanager
def threads_shared(processes: int) -> Iterator[None]:
    """Without OMP_NUM_THREADS, each rank gets its share of the cores."""
    given = "OMP_NUM_THREADS" in os.environ
    if not given:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // processes))
    try:
        yield
    finally:
        if not given:
            del os.environ["OMP_NUM_THREADS"]
