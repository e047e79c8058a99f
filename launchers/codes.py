"""One exit code for many ranks and nodes: that which says what was wrong."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING

from megamem.errors import STOPPED, MegamemError

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


def of_ranks(codes: Mapping[int, int], where: str = "") -> int:
    """One code for ranks that ended with `codes` (negative: killed by a signal), the first to fail first.

    A code that says what was wrong goes before one of ranks that failed as a consequence. A rank killed by a signal is
    named, with `where`.
    """
    telling = _telling()
    for code in codes.values():
        if code in telling:
            return code
    for rank, code in codes.items():
        if code < 0:
            sys.stderr.write(f"megamem: rank {rank}{where} was killed by {signal.Signals(-code).name}\n")
            sys.stderr.flush()
            return 128 - code
    return next(iter(codes.values()), MegamemError.exit_code)


def of_nodes(codes: Iterable[int]) -> int:
    """One code for nodes that ended with `codes`: 0 if all did, else that which says most."""
    failed = [code for code in codes if code]
    telling = _telling()
    return next((code for code in failed if code in telling), max(failed, default=0))


def first_told(store: Store, code: int, seconds: float) -> int:
    """`code`, unless another node has told `store` a better one, or does within `seconds` while this one is plain 1."""
    if code != MegamemError.exit_code:
        return int(store.compare_set("code", "", str(code)))
    deadline = time.monotonic() + seconds
    while not store.check(["code"]):
        if time.monotonic() > deadline:
            return int(store.compare_set("code", "", str(code)))
        time.sleep(0.05)
    return int(store.get("code"))


def _telling() -> set[int]:
    return {cls.exit_code for cls in _error_classes()} - {MegamemError.exit_code} | {STOPPED}


def _error_classes() -> Iterator[type[MegamemError]]:
    waiting = [MegamemError]
    while waiting:
        cls = waiting.pop()
        yield cls
        waiting += cls.__subclasses__()
