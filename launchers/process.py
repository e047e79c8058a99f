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
from typing import TypeVar

from torch.distributed.elastic.multiprocessing import SignalException

from launchers.signals import STOPS, not_ignored
from megamem.hardware import cores
from megamem.threads import Background

SAME_SIGNAL_S = 1.0
"""Signals that come within so many seconds count as one."""
T = TypeVar("T")


class Signals:
    """A context in which signals to stop become exceptions, as torchrun makes them.

    A scheduler may signal this process, its parent and its ranks at once; what comes within a second is one signal.
    """

    NUMBERS = (*STOPS, signal.SIGQUIT)

    def __init__(self) -> None:
        """Remember which signals were ignored before."""
        self._last = -SAME_SIGNAL_S
        self._not_ignored = not_ignored(self.NUMBERS)

    def install(self) -> None:
        """Handle the signals here from now on, but for those that were ignored before."""
        if threading.current_thread() is threading.main_thread():
            for number in self.NUMBERS:
                signal.signal(number, self._raise if number in self._not_ignored else signal.SIG_IGN)

    def __enter__(self) -> Signals:
        """Install the handlers."""
        self._before = {number: signal.getsignal(number) for number in self.NUMBERS}
        self.install()
        return self

    def __exit__(self, *_: object) -> None:
        """Put the former handlers back."""
        if threading.current_thread() is threading.main_thread():
            for number, handler in self._before.items():
                signal.signal(number, handler)

    def _raise(self, number: int, frame: FrameType | None) -> None:
        """Raise SignalException, unless the signal comes right after another."""
        before, self._last = self._last, time.monotonic()
        if self._last - before >= SAME_SIGNAL_S:
            raise SignalException(f"got {signal.Signals(number).name}", signal.Signals(number))


def result_within(seconds: float, work: Callable[[], T]) -> T | None:
    """Return what `work` returns, None if it fails or takes longer: a store on a lost machine may never answer."""
    working = Background(work)
    working.join(seconds)
    if working.is_alive():
        return None
    with contextlib.suppress(Exception):
        return working.result()
    return None


def run_interruptibly(work: Callable[[], T], give_up: Callable[[], bool]) -> T:
    """Return or raise what `work` does, in a thread, so that a signal ends the waiting for it.

    Raises: TimeoutError once `give_up` returns true.
    """
    working = Background(work)
    while working.is_alive():
        working.join(0.1)
        if give_up():
            raise TimeoutError
    return working.result()


@contextmanager
def shared_cores(processes: int) -> Iterator[None]:
    """Give each rank started in the block its share of the cores, unless OMP_NUM_THREADS says how many threads."""
    given = "OMP_NUM_THREADS" in os.environ
    if not given:
        os.environ["OMP_NUM_THREADS"] = str(max(1, cores() // processes))
    try:
        yield
    finally:
        if not given:
            del os.environ["OMP_NUM_THREADS"]
