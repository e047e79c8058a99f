"""One exit code for many ranks and nodes: that which says what was wrong."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from megamem.errors import STOPPED, MegamemError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def of_ranks(codes: Mapping[int, int]) -> int:
    """One code for ranks that ended with `codes` (negative: killed by a signal), in the order in which they did.

    A code that says what was wrong goes before one of a killed rank, and that before any other: ranks fail as a
    consequence too.
    """
    failed = [code for code in codes.values() if code]
    found = [code for code in failed if says_why(code)] or [128 - code for code in failed if code < 0] or failed
    return found[0] if found else 0


def of_stopped(codes: Mapping[int, int]) -> int:
    """One code for ranks that were asked to stop: STOPPED, unless one says what went wrong or had to be killed."""
    wrong = [code for code in codes.values() if code != STOPPED and says_why(code)]
    if wrong:
        return wrong[0]
    return 128 + signal.SIGKILL if -signal.SIGKILL in codes.values() else STOPPED


def of_nodes(codes: Iterable[int]) -> int:
    """One code for nodes that ended with `codes`: 0 if all did, else that which says most."""
    failed = [code for code in codes if code]
    return next((code for code in failed if says_why(code)), max(failed, default=0))


def says_why(code: int) -> bool:
    """Whether a code says what was wrong; others may be those of ranks that failed as a consequence."""
    return code == STOPPED or code in {cls.exit_code for cls in _error_classes()} - {MegamemError.exit_code}


def say_killed(codes: Mapping[int, int], code: int, where: str = "", more: str = "") -> None:
    """If `code` is that of a rank killed by a signal, name the first such on standard error."""
    for rank, found in codes.items():
        if found < 0 and code == 128 - found:
            sys.stderr.write(f"megamem: rank {rank}{where} was killed by {signal.Signals(-found).name}{more}\n")
            sys.stderr.flush()
            return


def first_told(store: Store, verdict: Callable[[], tuple[int, float]]) -> int:
    """The first code that any node tells `store`.

    verdict: this node's code as far as it is known, and for how many seconds a better word is waited for.
    """
    begun = time.monotonic()
    while not store.check(["code"]):
        code, patience = verdict()
        if time.monotonic() - begun >= patience:
            return int(store.compare_set("code", "", str(code)))
        time.sleep(0.05)
    return int(store.get("code"))


def _error_classes() -> Iterator[type[MegamemError]]:
    waiting = [MegamemError]
    while waiting:
        cls = waiting.pop()
        yield cls
        waiting += cls.__subclasses__()
