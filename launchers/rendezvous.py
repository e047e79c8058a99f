"""How the nodes of a job come together: torchrun's rendezvous, with a word between them about how each round ended.

What the store is asked for while ranks run is asked from a thread: a head node that is gone must not hold this one up.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from launchers.codes import first_told
from launchers.process import open_to_signals, within
from megamem.errors import ConfigError, NodesMissingError

TELL_S = 5.0
"""Within this, ranks and nodes that fail together say what was wrong."""
END_S = 10.0
"""What ranks get to say and do after those of another node have failed for good."""
_LATE_S = 60.0
"""Beyond `join_s`: nodes that joined in time are waited for, and torchrun asks every second."""
_STORE_S = 30.0
"""What the store gets to answer."""


@dataclass(frozen=True)
class Node:
    """How a node takes part in a job."""

    processes: int
    """Ranks on this node."""
    job: str
    """What the nodes of one job have in common."""
    fits: tuple[int, ...] = (1,)
    """Numbers of nodes that batch and layout fit, ascending. The last is how many are expected."""
    head: str = "localhost"
    """Name or address of the head node."""
    port: int = 0
    """Of the rendezvous on the head node; any free one if 0."""
    is_head: bool = True
    """Whether this is the head node, which must outlive the others."""
    address: str | None = None
    """By which the other nodes reach this one; the host's full name if not given."""
    max_restarts: int = 0
    join_s: int = 600
    stop_s: int = 30
    """What ranks get to end after a signal."""


class Rendezvous(DynamicRendezvousHandler):
    """torchrun's rendezvous, with a word between the nodes about how each round ended."""

    def prepare(self, node: Node) -> None:
        """To be called once, before anything else."""
        self.node = node
        self.told: int | None = None
        """What another node's ranks ended with in this round."""
        self.told_at = 0.0
        self.lost_at: float | None = None
        """Since when the head node does not answer."""
        self._waiting = 0
        self._busy = threading.Lock()
        self._ended = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="rendezvous-listener", daemon=True)

    @property
    def round(self) -> int:
        """How often the nodes have come together before."""
        return int(self._state_holder.state.round)

    @property
    def failures(self) -> int:
        """In how many of those rounds ranks failed; the others made room for a node that joined."""
        found = within(_STORE_S, lambda: sum(self._words(before).check(["code"]) for before in range(self.round)))
        return self.round if found is None else int(found)

    def next_rendezvous(self) -> RendezvousInfo:
        """Wait for the other nodes. Raises NodesMissingError if too few join, or a number that does not fit."""
        node = self.node
        deadline = time.monotonic() + node.join_s + _LATE_S
        if not self._busy.acquire(timeout=_STORE_S):
            raise NodesMissingError(f"{node.head}:{node.port}: the head node does not answer")
        try:
            # each round has a store of its own, on whichever node has rank 0 now
            self._bootstrap_store_info = self._shared_tcp_store_server = None
            try:
                found: RendezvousInfo = open_to_signals(
                    super().next_rendezvous, lambda: time.monotonic() > deadline and not self._spare()
                )
            except TimeoutError:
                raise NodesMissingError(f"{node.head}:{node.port}: the head node does not answer") from None
            except RendezvousTimeoutError:
                there = {str(peer.addr) for peer in self._state_holder.state.participants} | {self._this_node.addr}
                raise NodesMissingError(
                    f"nodes: the job needs {_or(node.fits)}, but within {node.join_s} s (join_seconds) only "
                    f"{', '.join(sorted(there))} joined at {node.head}:{node.port}"
                ) from None
            self.told, self._waiting, self.lost_at = None, 0, None
        finally:
            self._busy.release()
        if found.world_size not in node.fits:
            self._heard()
            self.linger(found.world_size)
            raise NodesMissingError(
                f"nodes: {found.world_size} joined, but batch and layout fit {_or(node.fits)}; "
                "start as many or change training.batch_tokens"
            )
        if node.fits[-1] > 1 and found.rank == 0:
            failures = self.failures
            again = f", restart {failures} of at most {node.max_restarts}" if failures else ""
            sys.stderr.write(f"megamem: {found.world_size} node(s) x {node.processes} rank(s) start{again}\n")
            sys.stderr.flush()
        if not self._listener.is_alive() and node.fits[-1] > 1:
            self._listener.start()
        return found

    def num_nodes_waiting(self) -> int:
        """How many nodes wanted to join when the store was last asked; none where they would not fit healthy ranks."""
        fits = len(self._state_holder.state.participants) + self._waiting in self.node.fits
        return self._waiting if fits or self.told is not None else 0

    def agree(self, verdict: Callable[[], tuple[int, float]]) -> int:
        """What the round's ranks ended with, on all nodes; `first_told` says what `verdict` is."""
        found = within(TELL_S + 1, lambda: first_told(self._words(), verdict))
        if found is None:
            return verdict()[0]
        self._heard()
        return int(found)

    def say_joined(self) -> None:
        """Before ranks are stopped because a node has joined: what they end with is no stop then."""
        within(TELL_S, lambda: self._words().set("joined", "yes"))

    def has_joined(self) -> bool:
        """Whether some node has said so in this round."""
        return self.node.fits[-1] > 1 and bool(within(TELL_S, lambda: self._words().check(["joined"])))

    def linger(self, nodes: int) -> None:
        """The head node holds the store until the others have heard how the round ended."""
        deadline = time.monotonic() + END_S
        if self.node.is_head:
            with contextlib.suppress(Exception):  # of a store: what cannot be told is not waited for
                while self._words().add("heard", 0) < nodes - 1 and time.monotonic() < deadline:
                    time.sleep(0.05)

    def shutdown(self) -> bool:
        """Leave for good, and let nobody join any more."""
        self._ended.set()
        return bool(within(END_S, super().shutdown))

    def _heard(self) -> None:
        """Tell the head node that it need not hold the store for this one."""
        if not self.node.is_head:
            within(1, lambda: self._words().add("heard", 1))

    def _spare(self) -> bool:
        """Whether the job has all the nodes it takes, and this one waits for as long as it may."""
        return self._this_node in self._state_holder.state.redundancy_list

    def _words(self, number: int | None = None) -> Store:
        """What the nodes have said in a round, the present one if not given."""
        return PrefixStore(f"megamem/{self._settings.run_id}/{self.round if number is None else number}", self._store)

    def _listen(self) -> None:
        while not self._ended.wait(1.0):
            with self._busy:
                try:
                    self._waiting = super().num_nodes_waiting()
                    words = self._words()
                    if self.told is None and words.check(["code"]):
                        self.told, self.told_at = int(words.get("code")), time.monotonic()
                        if not self.node.is_head:
                            words.add("heard", 1)
                    self.lost_at = None
                except Exception:  # of the store's connection
                    self.lost_at = self.lost_at or time.monotonic()


def join(node: Node) -> Rendezvous:
    """The rendezvous, hosted by the head node.

    Raises: NodesMissingError if the head node does not answer, ConfigError if the port is taken.
    """
    try:
        store = TCPStore(
            node.head,
            node.port,
            is_master=node.is_head,
            multi_tenant=True,
            wait_for_workers=False,
            timeout=timedelta(seconds=node.join_s),
        )
    except SignalException:
        raise
    except Exception as error:
        if node.is_head:
            raise ConfigError(f"port: {node.port} cannot be used on {node.head} ({error}); choose another") from None
        raise NodesMissingError(
            f"{node.head}:{node.port}: no answer from the head node within {node.join_s} s (join_seconds)"
        ) from None
    store.set_timeout(timedelta(seconds=_STORE_S))
    found: Rendezvous = Rendezvous.from_backend(
        node.job,
        store,
        C10dRendezvousBackend(store, node.job),
        node.fits[0],
        node.fits[-1],
        local_addr=node.address or ("localhost" if node.fits[-1] == 1 else None),
        timeout=RendezvousTimeout(join=timedelta(seconds=node.join_s)),
    )
    found.prepare(node)
    return found


def _or(numbers: Sequence[int]) -> str:
    words = [str(number) for number in numbers]
    return f"{', '.join(words[:-1])} or {words[-1]} nodes" if len(words) > 1 else f"{words[0]} node(s)"
