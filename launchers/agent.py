"""One node of a job: torchrun's agent and rendezvous in this process, ended with the code that says what was wrong.

torchrun tries again whatever was wrong, and ends with 1. Here the nodes tell one another through the rendezvous's store
what their ranks ended with, so that all try again or all end, and with the same code. What the store is asked for while
ranks run is asked from a thread: a head node that is gone must not hold this one up.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousError,
    RendezvousInfo,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.c10d_rendezvous_backend import C10dRendezvousBackend
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import DynamicRendezvousHandler, RendezvousTimeout

from launchers.codes import first_told, of_nodes, of_ranks, of_stopped, say_killed, says_why
from launchers.process import Signals, open_to_signals, threads_shared, within
from megamem.errors import FINAL, STOPPED, ConfigError, NodesMissingError

_TELL_S = 5.0
"""Within this, ranks and nodes that fail together say what was wrong."""
_END_S = 10.0
"""What ranks get to say and do after those of another node have failed for good."""
_FAILED_S = 30
"""What ranks get to end after others of theirs have failed; torchrun's value."""
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
        found = within(_TELL_S + 1, lambda: first_told(self._words(), verdict))
        if found is None:
            return verdict()[0]
        self._heard()
        return int(found)

    def say_joined(self) -> None:
        """Before ranks are stopped because a node has joined: what they end with is no stop then."""
        within(_TELL_S, lambda: self._words().set("joined", "yes"))

    def has_joined(self) -> bool:
        """Whether some node has said so in this round."""
        return self.node.fits[-1] > 1 and bool(within(_TELL_S, lambda: self._words().check(["joined"])))

    def linger(self, nodes: int) -> None:
        """The head node holds the store until the others have heard how the round ended."""
        deadline = time.monotonic() + _END_S
        if self.node.is_head:
            with contextlib.suppress(Exception):  # of a store: what cannot be told is not waited for
                while self._words().add("heard", 0) < nodes - 1 and time.monotonic() < deadline:
                    time.sleep(0.05)

    def shutdown(self) -> bool:
        """Leave for good, and let nobody join any more."""
        self._ended.set()
        return bool(within(_END_S, super().shutdown))

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


class Agent(LocalElasticAgent):
    """torchrun's agent, which tries again only what may pass, and knows what its job ended with."""

    def __init__(self, node: Node, handler: Rendezvous, command: Sequence[str], signals: Signals) -> None:
        spec = WorkerSpec(
            role="default",
            local_world_size=node.processes,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=handler,
            max_restarts=node.max_restarts,
            monitor_interval=0.1,
            local_addr=node.address,
        )
        super().__init__(spec, DefaultLogsSpecs(), exit_barrier_timeout=node.stop_s)
        self.node, self.handler = node, handler
        self.signals = signals
        self.code = 0
        """What the ranks of the job ended with."""
        self._where = f" on {socket.gethostname()}" if node.fits[-1] > 1 else ""
        self._codes: dict[int, int] = {}

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """torchrun's, which leaves ranks behind if a third signal ends the waiting for them."""
        try:
            return super().run(role)
        finally:
            if self._pcontext is not None:
                self._pcontext.close(signal.SIGKILL, 1)

    def stopped(self) -> int:
        """What the job ends with once the ranks here were asked to stop and have ended."""
        codes = self._ended()
        code = of_stopped(codes)
        longer = f"while it stopped; if its checkpoint takes longer than stop_seconds ({self.node.stop_s}), raise that"
        say_killed(codes, code, self._where, f" {longer}")
        return of_nodes([self.handler.agree(lambda: (code, 0)), code])

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self._pcontext, self._codes = None, {}
        super()._rendezvous(worker_group)
        # nodes that found out in different ways must count alike
        self._remaining_restarts = self.node.max_restarts - self.handler.failures

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        if worker_group.state is WorkerState.HEALTHY:
            self.handler.say_joined()
            self._shutdown(signal.SIGTERM)
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        found = super()._start_workers(worker_group)
        self.signals.take()  # torchrun has put its own in their place
        return found

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        ended = self._ended()
        if any(ended.values()):
            self._judge()  # before torchrun ends the other ranks, which is no fault of theirs
        elif len(ended) < self.node.processes:
            if not self._left_alone():
                return RunResult(WorkerState.HEALTHY)
            self._stop_workers(worker_group)
            self._remaining_restarts = 0
            return RunResult(WorkerState.FAILED)
        return super()._monitor_workers(worker_group)

    def _judge(self) -> None:
        """What was wrong, and whether it is worth trying again."""
        if of_ranks(self._ended()) == STOPPED and self.handler.has_joined():
            self._remaining_restarts = max(1, self._remaining_restarts)
            return
        self.code = self.handler.agree(self._verdict)
        say_killed(self._codes, of_ranks(self._codes), self._where)
        if self.code in FINAL or self.code == STOPPED:
            self._remaining_restarts = 0

    def _verdict(self) -> tuple[int, float]:
        """The code of the ranks here so far, and how long others, here or elsewhere, get to say more."""
        ended = self._ended()
        code = of_ranks(ended)
        if says_why(code) or (self.node.fits[-1] == 1 and len(ended) == self.node.processes):
            return code, 0.0
        # a rank may be killed as a consequence too, by its own abort
        return code, _TELL_S / 2 if code > 128 else _TELL_S

    def _ended(self) -> dict[int, int]:
        """What the ranks here have ended with so far, the first to end first."""
        for rank, handler in self._processes().items():
            if (code := handler.proc.poll()) is not None:
                self._codes.setdefault(rank, code)
        return dict(self._codes)

    def _processes(self) -> dict[int, Any]:
        """torchrun's handles of the ranks here."""
        if not isinstance(self._pcontext, SubprocessContext):
            return {}
        handlers = self._pcontext.subprocess_handlers
        return {worker.global_rank: handlers[worker.local_rank] for worker in self._worker_group.workers}

    def _left_alone(self) -> bool:
        """Whether the job has ended elsewhere, and these ranks have had the time to."""
        told, now = self.handler.told, time.monotonic()
        if told is not None and (told in FINAL or told == STOPPED or self._remaining_restarts <= 0):
            self.code = told
            return now - self.handler.told_at > (self.node.stop_s if told == STOPPED else _END_S)
        if self.handler.lost_at is not None and now - self.handler.lost_at > self.node.stop_s:
            raise NodesMissingError(f"{self.node.head}: the head node was lost; the job ends")
        return False

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        """End the ranks: with the time a checkpoint takes if none of them has failed."""
        if self._pcontext is not None:
            seconds = _FAILED_S if death_sig is None else self.node.stop_s
            # ranks save at these two; a hangup would kill them
            self._pcontext.close(signal.SIGINT if death_sig is signal.SIGINT else signal.SIGTERM, seconds)


def run_agent(node: Node, command: Sequence[str]) -> int:
    """Run `command` as this node's ranks, together with those of the other nodes; returns the job's exit code.

    SIGTERM and SIGINT are passed on to the ranks, which get `stop_s` to end; the code is STOPPED then. Each rank has a
    session of its own, so a terminal's Ctrl-C reaches it from here only.
    Raises: NodesMissingError if the nodes do not come together, ConfigError if the port is taken.
    """
    agent: Agent | None = None
    handler: Rendezvous | None = None
    logging.disable()  # the ranks say what is wrong
    try:
        with Signals() as signals, threads_shared(node.processes):
            handler = _join(node)
            agent = Agent(node, handler, command, signals)
            result = agent.run()
            if result is None or result.is_failed():
                return agent.code
            return handler.told or 0  # of a node whose ranks failed when these were done
    except SignalException:
        return STOPPED if agent is None else agent.stopped()
    except RendezvousError as error:
        if agent is not None and agent.code:
            return agent.code
        if isinstance(error, RendezvousClosedError):
            raise NodesMissingError(f"{node.head}:{node.port}: the job has ended already") from None
        raise NodesMissingError(f"{node.head}:{node.port}: lost the head node ({error})") from None
    finally:
        if handler is not None:
            if agent is not None and agent.code:
                handler.linger(agent.get_worker_group().group_world_size or 1)
            handler.shutdown()
        logging.disable(logging.NOTSET)


def _join(node: Node) -> Rendezvous:
    """The rendezvous, hosted by the head node."""
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
