"""The signals that ask a job to stop."""

from __future__ import annotations

import signal
from collections.abc import Iterable

STOPS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


def not_ignored(numbers: Iterable[signal.Signals] = STOPS) -> list[signal.Signals]:
    """Return those that this process was not told to ignore, as `nohup` does with SIGHUP."""
    return [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
