"""One exit code for many ranks and nodes: the one that says what was wrong."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from megamem.errors import STOPPED, MegamemError

if TYPE_CHECKING:
    from megamem.parallel.control import Messages


def code_of_ranks(codes: Mapping[int, int]) -> int:
    """Return one code for ranks that ended with `codes` (negative: killed by a signal), in the order in which they did.

    A code that says what was wrong goes before that of a killed rank, and that before any other: ranks fail as a
    consequence too.
    """
    failed = [code for code in codes.values() if code]
    found = [code for code in failed if names_cause(code)] or [128 - code for code in failed if code < 0] or failed
    return found[0] if found else 0


def code_of_stopped_ranks(codes: Mapping[int, int]) -> int:
    """Return one code for ranks that were told to stop: STOPPED, unless one names a cause or had to be killed."""
    causes = [code for code in codes.values() if code != STOPPED and names_cause(code)]
    if causes:
        return causes[0]
    return 128 + signal.SIGKILL if -signal.SIGKILL in codes.values() else STOPPED


def code_of_nodes(codes: Iterable[int]) -> int:
    """Return one code for nodes that ended with `codes`: 0 if all did, else the one that says most."""
    failed = [code for code in codes if code]
    return next((code for code in failed if names_cause(code)), max(failed, default=0))


def names_cause(code: int) -> bool:
    """Return whether a code says what was wrong; others may be those of ranks that failed as a consequence."""
    return code == STOPPED or code in {cls.exit_code for cls in _error_classes()} - {MegamemError.exit_code}


def report_killed_rank(codes: Mapping[int, int], code: int, host: str = "", reason: str = "") -> None:
    """Name on standard error the first rank that a signal killed, if `code` is that of one.

    Args:
        codes: what the ranks ended with, by rank.
        host: put after the rank's number.
        reason: put at the end of the line.
    """
    for rank, found in codes.items():
        if found < 0 and code == 128 - found:
            sys.stderr.write(f"megamem: rank {rank}{host} was killed by {signal.Signals(-found).name}{reason}\n")
            sys.stderr.flush()
            return


def first_reported_code(messages: Messages, own_code: Callable[[], tuple[int, float]]) -> int:
    """Return the first code that any node writes as the message `code`.

    own_code: gives this node's code as far as it is known, and for how many seconds to wait for one that says more.
    """
    begun = time.monotonic()
    while (reported := messages.read("code")) is None:
        code, patience = own_code()
        if time.monotonic() - begun >= patience:
            return int(messages.write_first("code", str(code)))
        time.sleep(0.05)
    return int(reported)


def _error_classes() -> Iterator[type[MegamemError]]:
    """Return MegamemError and all classes derived from it."""
    waiting = [MegamemError]
    while waiting:
        cls = waiting.pop()
        yield cls
        waiting += cls.__subclasses__()
