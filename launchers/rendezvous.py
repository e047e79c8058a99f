"""The meeting of a job's nodes: torchrun's rendezvous, through whose store they report how each round ended.

While ranks run, the store is read from a thread: a head node that is gone must not hold this one up.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from launchers.codes import first_reported_code
from launchers.node import Node
from launchers.process import result_within, run_interruptibly
from megamem.errors import ConfigError, NodesMissingError

REPORT_S = 5.0
"""Seconds within which ranks and nodes that fail together report what was wrong."""
END_S = 10.0
"""Seconds that ranks have to end after those of another node have failed for good."""
_LATE_S = 60.0
"""Seconds beyond `join_s`: nodes that joined in time are waited for, and torchrun looks every second."""
_STORE_S = 30.0
"""Seconds that the store has to answer."""


class Rendezvous(DynamicRendezvousHandler):
    """torchrun's rendezvous, through which the nodes also report what their ranks ended with in each round."""

    def prepare(self, node: Node) -> None:
        """Add what torchrun's constructor does not know; called once, before anything else."""
        self.node = node
        self.reported_code: int | None = None
        """The exit code that another node has reported for this round."""
        self.reported_at = 0.0
        self.lost_at: float | None = None
        """Time since which the head node does not answer."""
        self._waiting = 0
        self._busy = threading.Lock()
        self._ended = threading.Event()
        self._listener = threading.Thread(target=self._listen, name="rendezvous-listener", daemon=True)

    @property
    def round(self) -> int:
        """The number of times that the nodes have come together before."""
        return int(self._state_holder.state.round)

    @property
    def failures(self) -> int:
        """The number of those rounds in which ranks failed; the others made room for a node that joined."""
        failed = result_within(
            _STORE_S, lambda: sum(self._round_store(number).check(["code"]) for number in range(self.round))
        )
        return self.round if failed is None else failed

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
                met: RendezvousInfo = run_interruptibly(
                    super().next_rendezvous, lambda: time.monotonic() > deadline and not self._is_redundant()
                )
            except TimeoutError:
                raise NodesMissingError(f"{node.head}:{node.port}: the head node does not answer") from None
            except RendezvousTimeoutError:
                joined = {str(peer.addr) for peer in self._state_holder.state.participants} | {self._this_node.addr}
                raise NodesMissingError(
                    f"nodes: the job needs {_alternatives(node.node_counts)}, but within {node.join_s} s "
                    f"(join_seconds) only {', '.join(sorted(joined))} joined at {node.head}:{node.port}"
                ) from None
            self.reported_code, self._waiting, self.lost_at = None, 0, None
        finally:
            self._busy.release()
        if met.world_size not in node.node_counts:
            self._acknowledge()
            self.hold_store(met.world_size)
            raise NodesMissingError(
                f"nodes: {met.world_size} joined, but batch and layout fit {_alternatives(node.node_counts)}; "
                "start as many or change training.batch_tokens"
            )
        if not node.is_alone and met.rank == 0:
            failures = self.failures
            restart = f", restart {failures} of at most {node.max_restarts}" if failures else ""
            sys.stderr.write(f"megamem: {met.world_size} node(s) x {node.processes} rank(s) start{restart}\n")
            sys.stderr.flush()
        if not self._listener.is_alive() and not node.is_alone:
            self._listener.start()
        return met

    def num_nodes_waiting(self) -> int:
        """Return how many nodes wanted to join when the store was last read; 0 where healthy ranks cannot use them."""
        fits = len(self._state_holder.state.participants) + self._waiting in self.node.node_counts
        return self._waiting if fits or self.reported_code is not None else 0

    def agree(self, own_code: Callable[[], tuple[int, float]]) -> int:
        """Return the exit code of the round, the same on all nodes. own_code: see `first_reported_code`."""
        code = result_within(REPORT_S + 1, lambda: first_reported_code(self._round_store(), own_code))
        if code is None:
            return own_code()[0]
        self._acknowledge()
        return code

    def announce_joining(self) -> None:
        """Tell all nodes that ranks are about to be stopped because a node joins, so that this counts as no stop."""
        result_within(REPORT_S, lambda: self._round_store().set("joined", "yes"))

    def is_joining(self) -> bool:
        """Return whether some node has announced in this round that another joins."""
        return not self.node.is_alone and bool(result_within(REPORT_S, lambda: self._round_store().check(["joined"])))

    def hold_store(self, nodes: int) -> None:
        """Keep the store alive, on the head node, until the `nodes` of the round have read how it ended."""
        deadline = time.monotonic() + END_S
        if self.node.is_head:
            with contextlib.suppress(Exception):  # of a store: nodes that cannot be reached are not waited for
                while self._round_store().add("heard", 0) < nodes - 1 and time.monotonic() < deadline:
                    time.sleep(0.05)

    def shutdown(self) -> bool:
        """Leave for good, and let nobody join any more."""
        self._ended.set()
        return bool(result_within(END_S, super().shutdown))

    def _acknowledge(self) -> None:
        """Tell the head node that it need not hold the store for this one."""
        if not self.node.is_head:
            result_within(1, lambda: self._round_store().add("heard", 1))

    def _is_redundant(self) -> bool:
        """Return whether the job has all the nodes it takes, and this one waits for as long as it may."""
        return self._this_node in self._state_holder.state.redundancy_list

    def _round_store(self, number: int | None = None) -> Store:
        """Return the store of what the nodes have reported in a round, the present one if not given."""
        return PrefixStore(f"megamem/{self._settings.run_id}/{self.round if number is None else number}", self._store)

    def _listen(self) -> None:
        """Read every second whether nodes wait to join, what another has reported, and whether the store answers."""
        while not self._ended.wait(1.0):
            with self._busy:
                try:
                    self._waiting = super().num_nodes_waiting()
                    store = self._round_store()
                    if self.reported_code is None and store.check(["code"]):
                        self.reported_code, self.reported_at = int(store.get("code")), time.monotonic()
                        if not self.node.is_head:
                            store.add("heard", 1)
                    self.lost_at = None
                except Exception:  # of the store's connection
                    self.lost_at = self.lost_at or time.monotonic()


def join(node: Node) -> Rendezvous:
    """Join the rendezvous, which the head node hosts.

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
    rendezvous: Rendezvous = Rendezvous.from_backend(
        node.job,
        store,
        C10dRendezvousBackend(store, node.job),
        node.node_counts[0],
        node.node_counts[-1],
        local_addr=node.address or ("localhost" if node.is_alone else None),
        timeout=RendezvousTimeout(join=timedelta(seconds=node.join_s)),
    )
    rendezvous.prepare(node)
    return rendezvous


def _alternatives(numbers: Sequence[int]) -> str:
    """Return `1, 2 or 4 nodes` for numbers of nodes."""
    words = [str(number) for number in numbers]
    return f"{', '.join(words[:-1])} or {words[-1]} nodes" if len(words) > 1 else f"{words[0]} node(s)"
