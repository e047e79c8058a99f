"""The signals that ask a run to stop, on each of its ranks."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

from megamem.patience import stop_waiting, wait_again

SAME_SIGNAL_S = 1.0
"""Signals that follow one another within this many seconds are one signal."""


@contextmanager
def noted_signals(note: Callable[[], None]) -> Iterator[None]:
    """Call `note` at SIGTERM and SIGINT in the block; a later second signal acts at once.

    A job's signal may reach a rank several times, from its launcher and from whoever signals all processes of the job.
    What comes within `SAME_SIGNAL_S` is one signal. A rank that an agent has started (torchrun's or ours) takes all as
    one: on a busy machine the agent passes its own on seconds later, and it kills ranks that take too long to end.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    has_agent = "TORCHELASTIC_RUN_ID" in os.environ
    first: float | None = None

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal first
        first = first or time.monotonic()
        note()
        stop_waiting()
        if not has_agent and time.monotonic() - first > SAME_SIGNAL_S:
            signal.signal(number, before[signal.Signals(number)] or signal.SIG_DFL)
            signal.raise_signal(number)

    wait_again()
    for number in before:
        signal.signal(number, handle)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler or signal.SIG_DFL)
