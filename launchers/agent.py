"""One node of a job: torchrun's agent and rendezvous in this process, ended with the code that says what was wrong.

torchrun tries again whatever was wrong, and ends with 1. Here the nodes tell one another through the rendezvous's store
what their ranks ended with, so that all try again or all end, and with the same code.
"""

from __future__ import annotations

import logging
import signal
import socket
import time
from collections.abc import Sequence
from typing import Any

from torch.distributed.elastic.agent.server.api import DEFAULT_ROLE, RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.api import SubprocessContext
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousError

from launchers.codes import of_nodes, of_ranks, of_stopped, say_killed, says_why
from launchers.process import Signals, threads_shared
from launchers.rendezvous import END_S, TELL_S, Node, Rendezvous, join
from megamem.errors import FINAL, STOPPED, NodesMissingError

_FAILED_S = 30
"""What ranks get to end after others of theirs have failed; torchrun's value."""


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
        return code, TELL_S / 2 if code > 128 else TELL_S

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
            return now - self.handler.told_at > (self.node.stop_s if told == STOPPED else END_S)
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

    Signals to stop are passed on to the ranks, which get `stop_s` to end; the code is STOPPED then, unless one of them
    says what went wrong or had to be killed. Each rank has a session of its own, so a terminal's Ctrl-C reaches it from
    here only.
    Raises: NodesMissingError if the nodes do not come together, ConfigError if the port is taken.
    """
    agent: Agent | None = None
    handler: Rendezvous | None = None
    logging.disable()  # the ranks say what is wrong
    try:
        with Signals() as signals, threads_shared(node.processes):
            handler = join(node)
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
