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

from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.multiprocessing import SignalException
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from launchers.backend import SignedBackend
from launchers.codes import first_reported_code
from launchers.node import TOKEN, Node
from launchers.process import result_within, run_interruptibly
from megamem.errors import ConfigError, NodesMissingError
from megamem.parallel.control import LOOPBACK, Messages, Signer, new_token, serve_store

REPORT_S = 5.0
"""Seconds within which ranks and nodes that fail together report what was wrong."""
END_S = 10.0
"""Seconds that ranks have to end after those of another node have failed for good."""
_LATE_S = 60.0
"""Seconds beyond `join_s`: nodes that joined in time are waited for, and torchrun looks every second."""
_STORE_S = 30.0
"""Seconds that the store has to answer."""
_RANKS_STORE_S = 300.0
"""Seconds that the store of the ranks has to answer; torchrun's value."""


class Rendezvous(DynamicRendezvousHandler):
    """torchrun's rendezvous, through which the nodes also report what their ranks ended with in each round."""

    def prepare(self, node: Node, signer: Signer) -> None:
        """Add what torchrun's constructor does not know; called once, before anything else."""
        self.node, self._signer = node, signer
        self._rank = 0
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
            _STORE_S, lambda: sum(self._messages(number).read("code") is not None for number in range(self.round))
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
            self.reported_code, self._waiting, self.lost_at, self._rank = None, 0, None, met.rank
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
        code = result_within(REPORT_S + 1, lambda: first_reported_code(self._messages(), own_code))
        if code is None:
            return own_code()[0]
        self._acknowledge()
        return code

    def announce_joining(self) -> None:
        """Tell all nodes that ranks are about to be stopped because a node joins, so that this counts as no stop."""
        result_within(REPORT_S, lambda: self._messages().write("joined", "yes"))

    def is_joining(self) -> bool:
        """Return whether some node has announced in this round that another joins."""
        return not self.node.is_alone and result_within(REPORT_S, lambda: self._messages().read("joined")) is not None

    def hold_store(self, nodes: int) -> None:
        """Keep the store alive, on the head node, until the `nodes` of the round have read how it ended."""
        deadline = time.monotonic() + END_S
        if self.node.is_head:
            with contextlib.suppress(Exception):  # of a store: nodes that cannot be reached are not waited for
                while self._messages().count("heard", nodes) < nodes - 1 and time.monotonic() < deadline:
                    time.sleep(0.05)

    def shutdown(self) -> bool:
        """Leave for good, and let nobody join any more."""
        self._ended.set()
        return bool(result_within(END_S, super().shutdown))

    def _acknowledge(self) -> None:
        """Tell the head node that it need not hold the store for this one."""
        if not self.node.is_head:
            result_within(1, lambda: self._messages().write(f"heard/{self._rank}", "yes"))

    def _is_redundant(self) -> bool:
        """Return whether the job has all the nodes it takes, and this one waits for as long as it may."""
        return self._this_node in self._state_holder.state.redundancy_list

    def _messages(self, number: int | None = None) -> Messages:
        """Return what the nodes have reported in a round, the present one if not given."""
        number = self.round if number is None else number
        return Messages(self._store, self._signer, f"megamem/{self._settings.run_id}/{number}")

    def _create_tcp_store_server(self, master_addr: str, master_port: int) -> TCPStore:
        """Serve the store of the ranks; torchrun's listens on all networks."""
        return serve_store(master_port, timedelta(seconds=_RANKS_STORE_S), self.node.is_alone)

    def _listen(self) -> None:
        """Read every second whether nodes wait to join, what another has reported, and whether the store answers."""
        while not self._ended.wait(1.0):
            with self._busy:
                try:
                    self._waiting = super().num_nodes_waiting()
                    if self.reported_code is None and (code := self._messages().read("code")) is not None:
                        self.reported_code, self.reported_at = int(code), time.monotonic()
                        if not self.node.is_head:
                            self._messages().write(f"heard/{self._rank}", "yes")
                    self.lost_at = None
                except Exception:  # of the store's connection
                    self.lost_at = self.lost_at or time.monotonic()


def join(node: Node) -> Rendezvous:
    """Join the rendezvous, which the head node hosts.

    Raises: NodesMissingError if the head node does not answer, ConfigError if the port is taken or nodes have no token.
    """
    token = node.token or (new_token() if node.is_alone else "")
    if not token:
        raise ConfigError(
            f"{TOKEN}: not set, and a job of several nodes needs it; give all of them the same random text"
        )
    timeout = timedelta(seconds=node.join_s)
    try:
        if node.is_head:
            store = serve_store(node.port, timeout, node.is_alone)
        else:
            store = TCPStore(node.head, node.port, is_master=False, multi_tenant=True, timeout=timeout)
    except SignalException:
        raise
    except Exception as error:
        if node.is_head:
            raise ConfigError(f"port: {node.port} cannot be used on {node.head} ({error}); choose another") from None
        raise NodesMissingError(
            f"{node.head}:{node.port}: no answer from the head node within {node.join_s} s (join_seconds)"
        ) from None
    store.set_timeout(timedelta(seconds=_STORE_S))
    signer = Signer(token)
    rendezvous: Rendezvous = Rendezvous.from_backend(
        node.job,
        store,
        SignedBackend(store, node.job, signer),
        node.node_counts[0],
        node.node_counts[-1],
        local_addr=LOOPBACK if node.is_alone else node.address,
        timeout=RendezvousTimeout(join=timedelta(seconds=node.join_s)),
    )
    rendezvous.prepare(node, signer)
    return rendezvous


def _alternatives(numbers: Sequence[int]) -> str:
    """Return `1, 2 or 4 nodes` for numbers of nodes."""
    words = [str(number) for number in numbers]
    return f"{', '.join(words[:-1])} or {words[-1]} nodes" if len(words) > 1 else f"{words[0]} node(s)"
