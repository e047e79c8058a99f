"""The watchdog: finds the rank that is stuck, names it and ends the job.

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
from megamem.parallel.control import LOOPBACK, Messages, Signer, new_token, serve_store
from megamem.parallel.topology import Topology
from megamem.training.slow_rank import POLLS_PER_BEAT, WaitShares, slow_rank

_COLLECTIVES = (
    "torch/distributed/",
    "deepspeed/comm/",
    "megatron/core/tensor_parallel/",
    "megamem/pipeline/channels.py",
)
"""Parts of the paths of files whose functions wait for other ranks."""
SILENT, STUCK, ENDED = "stopped responding", "makes no progress", "ended"
_GRACE_S = 10.0
"""Seconds that the launcher has to end this rank after rank 0 has ended."""


@dataclass
class RankStatus:
    """What is known of a rank, and when that last changed (seconds of this host's monotonic clock)."""

    beat: int = 0
    """Count of its watchdog's beats, as published."""
    beat_at: float = 0.0
    """When that count last changed."""
    progress: int = 0
    """Count of its actions."""
    progress_at: float = 0.0
    """When that count last changed."""
    action: str = "starting"
    """What it last did, in a few words."""
    waiting: bool = False
    """True while it is inside a collective."""
    process: str = ""
    """host:pid"""
    wait_share: float | None = None
    """Share of the last minutes of training that it spent inside collectives; None until rank 0 knows enough."""


def diagnose(statuses: dict[int, RankStatus], now: float, timeout: float) -> tuple[int, str] | None:
    """Return the rank to blame and the reason, or None while all is well.

    One action may take no longer than `timeout` seconds. A silent thread is blamed first, then a rank that is not
    waiting for others, then the one furthest behind: once all are stuck, or one for twice the time.

    Args:
        statuses: what is known of every rank.
        now: seconds of the same clock.
        timeout: seconds without progress after which a rank is stuck.
    """
    stale = {rank: s for rank, s in statuses.items() if now - s.progress_at > timeout}
    silent = [rank for rank, s in stale.items() if now - s.beat_at > timeout / 2]
    if silent:
        return silent[0], SILENT
    suspects = [rank for rank, s in stale.items() if not s.waiting]
    if not suspects and (len(stale) == len(statuses) or any(now - s.progress_at > 2 * timeout for s in stale.values())):
        suspects = list(stale)
    if not suspects:
        return None
    return min(suspects, key=lambda rank: (statuses[rank].progress, rank)), STUCK


def beat_interval(timeout_s: float) -> float:
    """Return the seconds between beats where a rank may make no progress for `timeout_s`."""
    return min(5.0, max(0.1, timeout_s / 10))


class Watchdog:
    """Watches this rank and the others: a context manager around training, whose `progress` each new action calls."""

    def __init__(
        self,
        topology: Topology,
        timeout_s: float,
        end: Callable[[int], None] = os._exit,
        on_end: Callable[[int, str], None] = lambda code, message: None,
    ) -> None:
        """Meet the other ranks' watchdogs. All ranks must call it.

        Args:
            topology: this rank among the others.
            timeout_s: seconds without progress after which a rank is stuck.
            end: ends this process with an exit code.
            on_end: called with the exit code and the message just before `end`.
        """
        self.topology = topology
        self.timeout = timeout_s
        self.interval = beat_interval(timeout_s)
        now = time.monotonic()
        self.statuses = {rank: RankStatus(beat_at=now, progress_at=now) for rank in range(topology.world_size)}
        """What is known of every rank; the watch thread keeps it up to date."""
        self.slow: str | None = None
        """Message that names the rank that the others of its stage wait for, if there is one; known to rank 0."""
        self._end, self._on_end = end, on_end
        self._shares = WaitShares()
        self._polls = self._polls_waiting = 0
        self._reported_slow: set[int] = set()
        self._action = "starting"
        self._count = 0
        self._beats = 0
        self._process = f"{socket.gethostname()}:{os.getpid()}"
        self._others = [rank for rank in range(topology.world_size) if rank != topology.rank]
        self._states: dict[int, str] = {}
        self._store_lost = False
        self._failed = self._said_defect = False
        self._done = threading.Event()
        # a store whose process is stopped may never answer: one thread talks to it, another watches the clock
        self._threads = [threading.Thread(target=self._watch, name="watchdog", daemon=True)]
        self._messages = self._open() if topology.world_size > 1 else None
        if self._messages is not None:
            self._messages.write(f"rank/{topology.rank}", self._state())
            # from here on each rank finds the state of every other
            dist.barrier()
            self._read_states(self._messages)
            self._threads.append(threading.Thread(target=self._exchange, name="watchdog-store", daemon=True))

    def _open(self) -> Messages:
        """Open the store on rank 0, connect the other ranks to it, and give all of them a token to sign with."""
        on_one_machine = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) == self.topology.world_size
        # longer than it takes to find a silent rank: a store that gives up complains on stderr
        timeout = timedelta(seconds=4 * self.timeout)
        store, token = None, bytes.fromhex(new_token())
        told = torch.zeros(1 + len(token), dtype=torch.int64)
        if self.topology.rank == 0:
            store = serve_store(0, timeout, on_one_machine)
            told = torch.tensor([store.port, *token])
        dist.broadcast(told, src=0)
        if store is None:
            host = LOOPBACK if on_one_machine else os.environ.get("MASTER_ADDR", "localhost")
            store = TCPStore(host, int(told[0]), is_master=False, timeout=timeout)
        return Messages(store, Signer(bytes(told[1:].tolist()).hex()), "watchdog")

    def progress(self, action: str) -> None:
        """Note that this rank begins an action, described in a few words. Costs two assignments."""
        self._action = action
        self._count += 1

    def __enter__(self) -> Watchdog:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, kind: object, error: object, *_: object) -> None:
        # rank 0, and the store with it, may be gone
        self._failed = error is not None
        self._done.set()
        for thread in self._threads:
            thread.join(self.interval * 4)
        if isinstance(error, RuntimeError | MegamemError) and "by peer" in str(error):
            # gloo: the other process is gone
            if message := self._reported_message():
                self._on_end(StuckRankError.exit_code, message)
                self._end(StuckRankError.exit_code)
            name = self.topology.name() + self._on_host(self._process)
            raise MegamemError(
                f"{name} lost its connection to another rank, which has ended, at: {self._action}"
            ) from error
        if self._messages is not None and self.topology.rank == 0 and error is None:
            self._hold_store()

    def _hold_store(self) -> None:
        """Keep rank 0's store open until the others have left it."""
        deadline, world = time.monotonic() + self.interval * 4, self.topology.world_size
        assert self._messages is not None
        while time.monotonic() < deadline and self._messages.count("left", world) < world - 1:
            time.sleep(0.02)

    def _exchange(self) -> None:
        """Publish this rank's state and read the others', once a beat: the body of the store's thread."""
        assert self._messages is not None
        requested_at = time.monotonic()
        try:
            while not self._done.wait(self.interval):
                requested_at = time.monotonic()
                self._messages.write(f"rank/{self.topology.rank}", self._state())
                self._read_states(self._messages)
            if self.topology.rank != 0 and not self._failed:
                self._messages.write(f"left/{self.topology.rank}", "yes")
        except Exception:
            # refused at once: rank 0 has ended, and its store with it; no answer: it is silent, as `diagnose` will see
            self._store_lost = time.monotonic() - requested_at < self.timeout / 2

    def _read_states(self, messages: Messages) -> None:
        """Read what the other ranks have published; what no rank has signed is left out."""
        for rank in self._others:
            if (state := messages.awaited(f"rank/{rank}")) is not None:
                self._states[rank] = state

    def _watch(self) -> None:
        """Look for a rank that is stuck, once a beat: the body of the watching thread, which goes on whatever fails."""
        for seen in self.statuses.values():
            seen.beat_at = seen.progress_at = time.monotonic()
        while not self._done.is_set():
            try:
                if self._pause():
                    return
                self._look()
            except Exception as error:
                self._say_defect(error)
                self._done.wait(self.interval)

    def _look(self) -> None:
        """Take in what the ranks have published, and end the job if one of them is stuck."""
        self._beats += 1
        self._observe()
        self._find_slow()
        found = diagnose(self.statuses, time.monotonic(), self.timeout)
        if found is None and self._store_lost:
            # rank 0 reports what ended it, and the launcher ends this rank
            self._done.wait(_GRACE_S)
            found = 0, ENDED
        if found is not None and not self._done.is_set():
            self._report(*found)
            self._done.set()

    def _say_defect(self, error: Exception) -> None:
        """Say, once, that the watchdog itself fails."""
        if not self._said_defect:
            self._said_defect = True
            reason = " ".join(f"{type(error).__name__}: {error}".split())
            sys.stderr.write(f"megamem: {self.topology.name()}: the watchdog fails, and tries again ({reason})\n")
            sys.stderr.flush()

    def _pause(self) -> bool:
        """Wait for the next beat, polling whether this rank waits while it trains; return whether the watch is over."""
        for _ in range(POLLS_PER_BEAT):
            if self._done.wait(self.interval / POLLS_PER_BEAT):
                return True
            if self._action.startswith("step "):
                self._polls += 1
                self._polls_waiting += self._waits()
        return False

    def _state(self) -> str:
        """Return what is published: beats, actions, waiting, process, polls, those that found it waiting, action."""
        polls = f"{self._polls}|{self._polls_waiting}"
        return f"{self._beats}|{self._count}|{int(self._waits())}|{self._process}|{polls}|{self._action}"

    def _waits(self) -> bool:
        """Return whether this rank is inside a collective."""
        # any thread counts, as on CUDA the backward pass runs in threads of autograd's own; but that of a checkpoint
        # only while training waits for it
        apart = set() if self._action == WAITING else {t.ident for t in threading.enumerate() if t.name == THREAD}
        frames = sys._current_frames().items()
        files = [frame.f_code.co_filename for thread, frame in frames if thread not in apart]
        return any(part in file for file in files for part in _COLLECTIVES)

    def _observe(self) -> None:
        """Take the published states into `statuses`."""
        for rank, text in {**self._states, self.topology.rank: self._state()}.items():
            seen, now = self.statuses[rank], time.monotonic()
            beat, progress, waiting, process, polls, polls_waiting, action = text.split("|", 6)
            # an older message was put back by a stranger: beats only grow
            if int(beat) < seen.beat:
                continue
            seen.process = process
            seen.waiting = waiting == "1"
            if self.topology.rank == 0:
                seen.wait_share = self._shares.add(rank, int(polls), int(polls_waiting))
            if int(beat) != seen.beat:
                seen.beat, seen.beat_at = int(beat), now
            if int(progress) != seen.progress:
                seen.progress, seen.progress_at, seen.action = int(progress), now, action

    def _find_slow(self) -> None:
        """Find the rank that the others wait for, on rank 0; it is named on stderr once."""
        topology = self.topology
        if topology.rank != 0:
            return
        size = topology.tp_size * topology.dp_size
        found = slow_rank({rank: seen.wait_share for rank, seen in self.statuses.items()}, size)
        if found is None:
            self.slow = None
            return
        self.slow = f"{topology.name(found.rank)} ({self.statuses[found.rank].process}) {found}"
        if found.rank not in self._reported_slow:
            self._reported_slow.add(found.rank)
            sys.stderr.write(f"megamem: {self.slow}\n")
            sys.stderr.flush()

    def _report(self, rank: int, reason: str) -> None:
        """Name the rank to blame, and end this process."""
        seen = self.statuses[rank]
        idle = max(self.timeout, time.monotonic() - seen.progress_at)
        silence = "" if reason == ENDED else f" for {idle:.0f} s (parallel.stall_timeout_s {self.timeout:g})"
        message = f"{self.topology.name(rank)}{self._on_host(seen.process)} {reason}{silence}, last at: {seen.action}"
        if self._first_to_report(rank, reason, message):
            sys.stderr.write(f"megamem: {message}; the job ends\n")
            sys.stderr.flush()
        try:
            self._on_end(StuckRankError.exit_code, message)
        except Exception as error:  # of what is to be written at the end; the job ends none the less
            self._say_defect(error)
        host, _, pid = seen.process.rpartition(":")
        if reason == SILENT and host == socket.gethostname():
            # a launcher would ask it to end and wait for that
            with contextlib.suppress(OSError, ValueError):
                os.kill(int(pid), signal.SIGKILL)
        if reason == STUCK:
            # the others find the same; ended at once, they would lose their connections, and the store with rank 0
            time.sleep((4 if self.topology.rank == 0 else 2) * self.interval)
        self._end(StuckRankError.exit_code)

    def _on_host(self, process: str) -> str:
        """Return the host of `host:pid`, in words, where ranks are on several."""
        hosts = {state.split("|")[3].rpartition(":")[0] for state in [*self._states.values(), self._state()]}
        return f" on {process.rpartition(':')[0]}" if len(hosts) > 1 else ""

    def _reported_message(self) -> str | None:
        """Return the message by which a rank named a stuck one and ended, if one did."""
        # the store may be gone
        with contextlib.suppress(Exception):
            if self._messages is not None and (text := self._messages.read("message")) is not None:
                return text.partition("|")[2]
        return None

    def _first_to_report(self, rank: int, reason: str, message: str) -> bool:
        """Return whether this rank reports what all find. Where rank 0 and its store are lost, each does."""
        if self._messages is None or (rank == 0 and reason != STUCK):
            return True
        mine = f"{self.topology.rank}|{message}"
        try:
            return self._messages.write_first("message", mine) == mine
        except Exception:
            # the store is gone
            return True
