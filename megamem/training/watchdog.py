"""Names the rank that is stuck.

Every rank publishes what it is doing to a small store on rank 0, from a thread of its own, and watches the others.
A rank whose thread falls silent has been stopped or lost; else a rank that is not waiting for others holds them up.
After `stall_timeout_s` without progress the job ends with one line and the exit code of `StuckRankError`. A rank that
is only slow, so that the others spend their time waiting for it, is named and the job goes on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from checkpoints.saver import THREAD, WAITING
from megamem.errors import MegamemError, StuckRankError
from megamem.parallel.topology import Topology
from megamem.training.slow_rank import SAMPLES, WaitShares, slow_rank

_COLLECTIVES = (
    "torch/distributed/",
    "deepspeed/comm/",
    "megatron/core/tensor_parallel/",
    "megamem/pipeline/channels.py",
)
SILENT, STUCK, ENDED = "stopped responding", "makes no progress", "ended"
_GRACE_S = 10.0
"""What the launcher gets to end this rank after rank 0 has ended."""


@dataclass
class Sighting:
    """What is known of a rank, and when that last changed (host seconds)."""

    beat: str = ""
    beat_at: float = 0.0
    progress: int = 0
    progress_at: float = 0.0
    action: str = "starting"
    waiting: bool = False
    """It is inside a collective."""
    process: str = ""
    """host:pid"""
    waits: float | None = None
    """Share of the last minutes of training that it spent inside collectives; None until rank 0 knows enough."""


def diagnose(sightings: dict[int, Sighting], now: float, timeout: float) -> tuple[int, str] | None:
    """(rank, reason) of the rank to blame, or None while all is well.

    A rank may be long at one action only as long as `timeout`. A silent thread is blamed first, then a rank that is
    not waiting for others, then the one furthest behind: once all are stuck, or one for twice the time.
    """
    stale = {rank: s for rank, s in sightings.items() if now - s.progress_at > timeout}
    silent = [rank for rank, s in stale.items() if now - s.beat_at > timeout / 2]
    if silent:
        return silent[0], SILENT
    suspects = [rank for rank, s in stale.items() if not s.waiting]
    if not suspects and (
        len(stale) == len(sightings) or any(now - s.progress_at > 2 * timeout for s in stale.values())
    ):
        suspects = list(stale)
    if not suspects:
        return None
    return min(suspects, key=lambda rank: (sightings[rank].progress, rank)), STUCK


def beat_interval(timeout_s: float) -> float:
    """Seconds between beats where a rank may make no progress for `timeout_s`."""
    return min(5.0, max(0.1, timeout_s / 10))


class Watchdog:
    """Use as a context manager around training; call `at(...)` at each new action."""

    def __init__(
        self,
        topology: Topology,
        timeout_s: float,
        end: Callable[[int], None] = os._exit,
        ends: Callable[[int, str], None] = lambda code, line: None,
    ) -> None:
        """ends: told the exit code and the reason just before `end` is called."""
        self.topology = topology
        self.timeout = timeout_s
        self.interval = beat_interval(timeout_s)
        now = time.monotonic()
        self.sightings = {rank: Sighting(beat_at=now, progress_at=now) for rank in range(topology.world_size)}
        """By rank; the watch thread keeps them up to date."""
        self.slow: str | None = None
        """Names the rank that the others of its stage wait for, if there is one; known to rank 0."""
        self._end, self._ends = end, ends
        self._shares = WaitShares()
        self._samples = self._waited = 0
        self._named: set[int] = set()
        self._action = "starting"
        self._count = 0
        self._beats = 0
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self._others = [rank for rank in range(topology.world_size) if rank != topology.rank]
        self._heard: dict[int, str] = {}
        self._lost = False
        self._failed = False
        self._done = threading.Event()
        # a store whose process is stopped may never answer: asking it and watching the clock are two threads
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        self._store = self._open() if topology.world_size > 1 else None
        if self._store is not None:
            self._store.set(f"rank/{topology.rank}", self._state())
            dist.barrier()  # from now on each rank can be found
            self._heard = {rank: self._store.get(f"rank/{rank}").decode() for rank in self._others}
            self._threads.append(threading.Thread(target=self._talk, name="watchdog-store", daemon=True))

    def _open(self) -> TCPStore:
        host = os.environ.get("MASTER_ADDR", "localhost")
        # longer than it takes to find a silent rank: a store that gives up complains on stderr
        timeout = timedelta(seconds=4 * self.timeout)
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
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, *_: object) -> None:
        self._failed = error is not None  # rank 0, and the store with it, may be gone
        self._done.set()
        for thread in self._threads:
            thread.join(self.interval * 4)
        if isinstance(error, RuntimeError | MegamemError) and "by peer" in str(error):
            # gloo: the other process is gone
            if line := self._told():
                self._ends(StuckRankError.exit_code, line)
                self._end(StuckRankError.exit_code)
            name = self.topology.name() + self._where(self._process)
            raise MegamemError(
                f"{name} lost its connection to another rank, which has ended, at: {self._action}"
            ) from error
        if self._store is not None and self.topology.rank == 0 and error is None:
            self._linger()

    def _linger(self) -> None:
        """Rank 0 holds the store until the others have left it."""
        deadline = time.monotonic() + self.interval * 4
        assert self._store is not None
        while time.monotonic() < deadline and self._store.add("left", 0) < self.topology.world_size - 1:
            time.sleep(0.02)

    def _talk(self) -> None:
        """Tell the others what this rank is at and hear what they are."""
        assert self._store is not None
        asked = time.monotonic()
        try:
            while not self._done.wait(self.interval):
                asked = time.monotonic()
                self._store.set(f"rank/{self.topology.rank}", self._state())
                for rank in self._others:
                    self._heard[rank] = self._store.get(f"rank/{rank}").decode()
            if self.topology.rank != 0 and not self._failed:
                self._store.add("left", 1)
        except Exception:
            # refused at once: rank 0 has ended, and its store with it; no answer: it is silent, as `diagnose` will see
            self._lost = time.monotonic() - asked < self.timeout / 2

    def _watch(self) -> None:
        for seen in self.sightings.values():
            seen.beat_at = seen.progress_at = time.monotonic()
        while not self._pause():
            self._beats += 1
            self._observe(self.sightings)
            self._name_slow()
            found = diagnose(self.sightings, time.monotonic(), self.timeout)
            if found is None and self._lost:
                # whatever ended rank 0 is told there, and the launcher ends this rank
                self._done.wait(_GRACE_S)
                found = 0, ENDED
            if found is not None and not self._done.is_set():
                self._report(*found, self.sightings)
                return

    def _pause(self) -> bool:
        """Until the next beat; whether this is the end. Looks now and then whether this rank waits while it trains."""
        for _ in range(SAMPLES):
            if self._done.wait(self.interval / SAMPLES):
                return True
            if self._action.startswith("step "):
                self._samples += 1
                self._waited += self._waits()
        return False

    def _state(self) -> str:
        """What is published: beats, progress, waiting or not, process, looks and those that found it so, action."""
        samples = f"{self._samples}|{self._waited}"
        return f"{self._beats}|{self._count}|{int(self._waits())}|{self._process}|{samples}|{self._action}"

    def _waits(self) -> bool:
        # of any thread: on CUDA the backward runs in threads of autograd's own; but a save only where it is waited for
        apart = set() if self._action == WAITING else {t.ident for t in threading.enumerate() if t.name == THREAD}
        frames = sys._current_frames().items()
        files = [frame.f_code.co_filename for thread, frame in frames if thread not in apart]
        return any(part in file for file in files for part in _COLLECTIVES)

    def _observe(self, sightings: dict[int, Sighting]) -> None:
        for rank, text in {**self._heard, self.topology.rank: self._state()}.items():
            seen, now = sightings[rank], time.monotonic()
            beat, progress, waiting, seen.process, samples, waited, action = text.split("|", 6)
            seen.waiting = waiting == "1"
            if self.topology.rank == 0:
                seen.waits = self._shares.note(rank, int(samples), int(waited))
            if beat != seen.beat:
                seen.beat, seen.beat_at = beat, now
            if int(progress) != seen.progress:
                seen.progress, seen.progress_at, seen.action = int(progress), now, action

    def _name_slow(self) -> None:
        """On rank 0: find the rank that the others wait for; it is named on stderr once."""
        topology = self.topology
        if topology.rank != 0:
            return
        size = topology.tp_size * topology.dp_size
        found = slow_rank({rank: seen.waits for rank, seen in self.sightings.items()}, size)
        if found is None:
            self.slow = None
            return
        self.slow = f"{topology.name(found.rank)} ({self.sightings[found.rank].process}) {found}"
        if found.rank not in self._named:
            self._named.add(found.rank)
            sys.stderr.write(f"megamem: {self.slow}\n")
            sys.stderr.flush()

    def _report(self, rank: int, reason: str, sightings: dict[int, Sighting]) -> None:
        seen = sightings[rank]
        idle = max(self.timeout, time.monotonic() - seen.progress_at)
        silence = "" if reason == ENDED else f" for {idle:.0f} s (parallel.stall_timeout_s {self.timeout:g})"
        line = f"{self.topology.name(rank)}{self._where(seen.process)} {reason}{silence}, last at: {seen.action}"
        if self._first_to_tell(rank, reason, line):
            sys.stderr.write(f"megamem: {line}; the job ends\n")
            sys.stderr.flush()
        self._ends(StuckRankError.exit_code, line)
        host, _, pid = seen.process.rpartition(":")
        if reason == SILENT and host == socket.gethostname():
            # a launcher would ask it to end and wait for that
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(pid), signal.SIGKILL)
        if reason == STUCK:
            # the others find the same; ended at once, they would lose their connections, and the store with rank 0
            time.sleep((4 if self.topology.rank == 0 else 2) * self.interval)
        self._end(StuckRankError.exit_code)

    def _where(self, process: str) -> str:
        """The host of `host:pid`, in words, where ranks are on several."""
        hosts = {state.split("|")[3].rpartition(":")[0] for state in [*self._heard.values(), self._state()]}
        return f" on {process.rpartition(':')[0]}" if len(hosts) > 1 else ""

    def _told(self) -> str | None:
        """What a rank has said of one that is stuck, and ended for that."""
        with contextlib.suppress(Exception):  # the store may be gone
            if self._store is not None and self._store.add("told", 0) > 0:
                return self._store.get("line").decode()
        return None

    def _first_to_tell(self, rank: int, reason: str, line: str) -> bool:
        """All ranks find the same; one speaks. Where rank 0 is lost, and the store with it, each does."""
        if self._store is None or (rank == 0 and reason != STUCK):
            return True
        try:
            self._store.set("line", line)
            return self._store.add("told", 1) == 1
        except Exception:  # the store is gone
            return True
