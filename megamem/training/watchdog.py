"""Names the rank that is stuck.

Every rank publishes what it is doing to a small store on rank 0, from a thread of its own, and watches the others.
A rank whose thread falls silent has been stopped or lost; else the rank whose work is furthest behind holds the
others up. After `stall_timeout_s` without progress the job ends with a message and exit code of `StuckRankError`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from megamem.errors import StuckRankError
from megamem.parallel.topology import Topology

log = logging.getLogger(__name__)


@dataclass
class Sighting:
    """What is known of a rank, and when that last changed (host seconds)."""

    beat: str = ""
    beat_at: float = 0.0
    progress: int = 0
    progress_at: float = 0.0
    action: str = "starting"


def diagnose(sightings: dict[int, Sighting], now: float, timeout: float) -> tuple[int, str] | None:
    """(rank, reason) of the rank to blame, or None while all is well.

    A rank may be long at one action only as long as `timeout`; a silent thread is blamed before a slow one.
    """
    stale = {rank: s for rank, s in sightings.items() if now - s.progress_at > timeout}
    if not stale:
        return None
    silent = [rank for rank, s in stale.items() if now - s.beat_at > timeout / 2]
    if silent:
        return silent[0], "stopped responding"
    rank = min(stale, key=lambda r: (stale[r].progress, r))
    return rank, "makes no progress"


class Watchdog:
    """Use as a context manager around training; call `at(...)` at each new action."""

    def __init__(self, topology: Topology, timeout_s: float, end: Callable[[int], None] = os._exit) -> None:
        self.topology = topology
        self.timeout = timeout_s
        self.interval = min(5.0, max(0.1, timeout_s / 10))
        self._end = end
        self._action = "starting"
        self._count = 0
        self._beats = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._store = self._open() if topology.world_size > 1 else None

    def _open(self) -> TCPStore:
        host = os.environ.get("MASTER_ADDR", "localhost")
        timeout = timedelta(seconds=self.timeout)
        store = None
        port = torch.zeros((), dtype=torch.int64)
        if self.topology.rank == 0:
            store = TCPStore(host, 0, is_master=True, wait_for_workers=False, timeout=timeout)
            port += store.port
        dist.broadcast(port, src=0)
        return store or TCPStore(host, int(port), is_master=False, timeout=timeout)

    def at(self, action: str) -> None:
        """Note progress; costs an assignment."""
        self._action = action
        self._count += 1

    def __enter__(self) -> Watchdog:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        if self._store is not None and self.topology.rank == 0:
            self._linger()

    def _linger(self) -> None:
        """Rank 0 holds the store until the others have left it."""
        deadline = time.monotonic() + self.interval * 4
        assert self._store is not None
        while time.monotonic() < deadline and self._store.add("left", 0) < self.topology.world_size - 1:
            time.sleep(0.02)

    def _watch(self) -> None:
        now = time.monotonic()
        sightings = {rank: Sighting(beat_at=now, progress_at=now) for rank in range(self.topology.world_size)}
        while not self._done.wait(self.interval):
            try:
                self._publish()
                self._observe(sightings)
            except Exception as error:  # the store is gone or silent: so is rank 0
                if not self._done.is_set():
                    log.error(
                        "%s stopped responding: its store did not answer %s for %.0f s (%s). Ending the job.",
                        self.topology.name(0), self.topology.name(), self.timeout, error,
                    )  # fmt: skip
                    self._end(StuckRankError.exit_code)
                return
            found = diagnose(sightings, time.monotonic(), self.timeout)
            if found is not None and not self._done.is_set():
                self._report(*found, sightings)
                return
        if self._store is not None and self.topology.rank != 0:
            self._store.add("left", 1)

    def _publish(self) -> None:
        self._beats += 1
        if self._store is not None:
            self._store.set(f"rank/{self.topology.rank}", f"{self._beats}|{self._count}|{self._action}")

    def _observe(self, sightings: dict[int, Sighting]) -> None:
        now = time.monotonic()
        for rank, seen in sightings.items():
            if rank == self.topology.rank:
                text = f"{self._beats}|{self._count}|{self._action}"
            elif self._store is not None and self._store.check([f"rank/{rank}"]):
                text = self._store.get(f"rank/{rank}").decode()
            else:
                continue
            beat, progress, action = text.split("|", 2)
            if beat != seen.beat:
                seen.beat, seen.beat_at = beat, now
            if int(progress) != seen.progress:
                seen.progress, seen.progress_at, seen.action = int(progress), now, action

    def _report(self, rank: int, reason: str, sightings: dict[int, Sighting]) -> None:
        log.error(
            "%s %s for %.0f s, last at: %s. Ending the job (parallel.stall_timeout_s).",
            self.topology.name(rank), reason, self.timeout, sightings[rank].action,
        )  # fmt: skip
        self._end(StuckRankError.exit_code)
