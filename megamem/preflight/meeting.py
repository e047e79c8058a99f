"""Meetings of ranks through the job's store, which answers while a link or a rank does not."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from typing import Any, TypeVar

from torch._C._distributed_c10d import Store
from torch.distributed import DistStoreError

from megamem.errors import MegamemError
from megamem.threads import Background

T = TypeVar("T")
MARGIN_S = 30.0
"""Seconds by which others may come earlier to a meeting than rank 0 does."""


class LateError(Exception):
    """The error of work that did not end in time."""


def within(seconds: float, work: Callable[[], T]) -> T:
    """Return what `work` returns.

    Raises: LateError after `seconds`; the thread is left behind, as there is no way to end it.
    """
    working = Background(work)
    working.join(seconds)
    if working.is_alive():
        raise LateError(f"did not end within {seconds:g} s")
    return working.result()


class Meeting:
    """A place where ranks gather plain data of all that answer. All ranks make the same calls."""

    def __init__(self, store: Store, rank: int, world: int) -> None:
        """Meet through `store`, which nobody else uses under the same prefix."""
        self.store, self.rank = store, rank
        self.present = set(range(world))
        """Ranks that have answered every time."""
        self._count = 0

    def gather(self, value: T, timeout_s: float) -> dict[int, T]:
        """Return every rank's value, plain data for JSON, by rank, on every rank.

        Nobody goes on before all are there, or the time is up.
        Ranks that rank 0 has not heard of within `timeout_s` are left out, now and at all later meetings.

        Raises: MegamemError if this rank was left out or rank 0 does not answer.
        """
        self._count += 1
        self.store.set(f"{self._count}/{self.rank}", json.dumps(value))
        every = f"{self._count}/all"
        if self.rank == 0:
            found: dict[int, T] = self._collect(timeout_s)
            self.store.set(every, json.dumps(found))
        else:
            try:
                self.store.wait([every], timedelta(seconds=timeout_s + MARGIN_S))
            except DistStoreError:
                raise MegamemError(f"rank 0 does not answer for {timeout_s + MARGIN_S:g} s") from None
            found = self._of_all(self.store.get(every))
        if self.rank not in found:
            raise MegamemError(f"rank {self.rank} was too late: rank 0 went on without it after {timeout_s:g} s")
        self.present = set(found)
        return found

    def _collect(self, timeout_s: float) -> dict[int, T]:
        """Return the values of the ranks that are present, on rank 0."""
        deadline = time.monotonic() + timeout_s
        found = {}
        for rank in sorted(self.present):
            key = f"{self._count}/{rank}"
            try:
                self.store.wait([key], timedelta(seconds=max(0.01, deadline - time.monotonic())))
            except DistStoreError:
                continue
            # what is no JSON was written by a stranger: the rank counts as one that has not come
            with suppress(ValueError, RecursionError):
                found[rank] = json.loads(self.store.get(key))
        return found

    def _of_all(self, raw: bytes) -> dict[int, Any]:
        """Return what rank 0 has gathered, by rank. Raises MegamemError for what it cannot have written."""
        try:
            return {int(rank): theirs for rank, theirs in json.loads(raw).items()}
        except (ValueError, AttributeError, RecursionError):
            raise MegamemError(
                "what stands for rank 0's answer in the job's store is not its: others reach the port"
            ) from None
