"""The agent of one node: torchrun's agent and rendezvous, ended with the exit code that says what was wrong.

torchrun starts ranks again whatever was wrong, and ends with 1. Here the nodes report through the rendezvous's store
what their ranks ended with, so that all start again or all end, with the same code.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

from launchers.codes import code_of_nodes, code_of_ranks, code_of_stopped_ranks, names_cause, report_killed_rank
from launchers.node import Node
from launchers.process import Signals, shared_cores
from launchers.rendezvous import END_S, REPORT_S, Rendezvous, join
from megamem.errors import FINAL, STOPPED, NodesMissingError

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

_FAILED_S = 30
"""Seconds that ranks have to end after others of their node have failed; torchrun's value."""


class Agent(LocalElasticAgent):
    """torchrun's agent, which starts ranks again only after failures that may pass, and knows its job's exit code."""

    def __init__(self, node: Node, handler: Rendezvous, command: Sequence[str], signals: Signals) -> None:
        """Prepare to run `command` as the node's ranks, in the rendezvous that `handler` has joined."""
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
        """The exit code of the job."""
        self._on_host = "" if node.is_alone else f" on {socket.gethostname()}"
        self._codes: dict[int, int] = {}

    def run(self, role: str = DEFAULT_ROLE) -> RunResult:
        """Run the ranks to their end. torchrun leaves them behind if a third signal ends the waiting for them."""
        try:
            return super().run(role)
        finally:
            if self._pcontext is not None:
                self._pcontext.close(signal.SIGKILL, 1)

    def stopped(self) -> int:
        """Return the job's exit code once the ranks here were told to stop and have ended."""
        codes = self._ended()
        code = code_of_stopped_ranks(codes)
        hint = f"while it stopped; if its checkpoint takes longer than stop_seconds ({self.node.stop_s}), raise that"
        report_killed_rank(codes, code, self._on_host, f" {hint}")
        return code_of_nodes([self.handler.agree(lambda: (code, 0)), code])

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Begin a round, and count its restarts by what the store knows of failures."""
        self._pcontext, self._codes = None, {}
        super()._rendezvous(worker_group)
        # nodes that found out in different ways must count alike
        self._remaining_restarts = self.node.max_restarts - self.handler.failures

    def _restart_workers(self, worker_group: WorkerGroup) -> None:
        """Start the ranks again; healthy ones, which a node that joins interrupts, save a checkpoint before."""
        if worker_group.state is WorkerState.HEALTHY:
            self.handler.announce_joining()
            self._shutdown(signal.SIGTERM)
        super()._restart_workers(worker_group)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, object]:
        """Start the ranks, and handle signals as before: torchrun has put its own handlers in their place."""
        handles: dict[int, object] = super()._start_workers(worker_group)
        self.signals.install()
        return handles

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        """Look at the ranks, ten times a second: decide what follows when one has failed, here or on another node."""
        ended = self._ended()
        if any(ended.values()):
            self._decide()  # before torchrun ends the other ranks, which is no fault of theirs
        elif len(ended) < self.node.processes:
            if not self._ended_elsewhere():
                return RunResult(WorkerState.HEALTHY)
            self._stop_workers(worker_group)
            self._remaining_restarts = 0
            return RunResult(WorkerState.FAILED)
        return super()._monitor_workers(worker_group)

    def _decide(self) -> None:
        """Agree with the other nodes on what was wrong, and do not start again where that would not help."""
        if code_of_ranks(self._ended()) == STOPPED and self.handler.is_joining():
            self._remaining_restarts = max(1, self._remaining_restarts)
            return
        self.code = self.handler.agree(self._own_code)
        report_killed_rank(self._codes, code_of_ranks(self._codes), self._on_host)
        if self.code in FINAL or self.code == STOPPED:
            self._remaining_restarts = 0

    def _own_code(self) -> tuple[int, float]:
        """Return the code of the ranks here so far, and for how many seconds to wait for one that says more."""
        ended = self._ended()
        code = code_of_ranks(ended)
        if names_cause(code) or (self.node.is_alone and len(ended) == self.node.processes):
            return code, 0.0
        # a rank may be killed as a consequence too, by its own abort
        return code, REPORT_S / 2 if code > 128 else REPORT_S

    def _ended(self) -> dict[int, int]:
        """Return the exit codes of the ranks here that have ended, by rank, the first to end first."""
        for rank, handler in self._processes().items():
            if (code := handler.proc.poll()) is not None:
                self._codes.setdefault(rank, code)
        return dict(self._codes)

    def _processes(self) -> dict[int, SubprocessHandler]:
        """Return torchrun's handles of the ranks here, by rank."""
        if not isinstance(self._pcontext, SubprocessContext):
            return {}
        handlers = self._pcontext.subprocess_handlers
        return {worker.global_rank: handlers[worker.local_rank] for worker in self._worker_group.workers}

    def _ended_elsewhere(self) -> bool:
        """Return whether the job has ended on another node, and the ranks here have had the time to end too."""
        code, now = self.handler.reported_code, time.monotonic()
        if code is not None and (code in FINAL or code == STOPPED or self._remaining_restarts <= 0):
            self.code = code
            return now - self.handler.reported_at > (self.node.stop_s if code == STOPPED else END_S)
        if self.handler.lost_at is not None and now - self.handler.lost_at > self.node.stop_s:
            raise NodesMissingError(f"{self.node.head}: the head node was lost; the job ends")
        return False

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int = 0) -> None:
        """End the ranks; if none of them has failed, they have the time that a checkpoint takes."""
        if self._pcontext is not None:
            seconds = _FAILED_S if death_sig is None else self.node.stop_s
            # ranks save at these two; a hangup would kill them
            self._pcontext.close(signal.SIGINT if death_sig is signal.SIGINT else signal.SIGTERM, seconds)


def run_agent(node: Node, command: Sequence[str]) -> int:
    """Run `command` as this node's ranks, together with those of the other nodes; return the job's exit code.

    Signals to stop are passed on to the ranks, which get `stop_s` to end; the code is STOPPED then, unless one of them
    says what went wrong or had to be killed. Each rank has a session of its own, so a terminal's Ctrl-C reaches it from
    here only.

    Raises: NodesMissingError if the nodes do not come together, ConfigError if the port is taken.
    """
    agent: Agent | None = None
    handler: Rendezvous | None = None
    logging.disable()  # the ranks say what is wrong
    try:
        with Signals() as signals, shared_cores(node.processes):
            handler = join(node)
            agent = Agent(node, handler, command, signals)
            result = agent.run()
            if result is None or result.is_failed():
                return agent.code
            return handler.reported_code or 0  # that of a node whose ranks failed when these were done
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
                handler.hold_store(agent.get_worker_group().group_world_size or 1)
            handler.shutdown()
        logging.disable(logging.NOTSET)
