"""Run a job on machines that are reached by ssh: an agent on each, their output here, one exit code."""

from __future__ import annotations

import contextlib
import math
import shlex
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import IO

from launchers.codes import of_nodes
from launchers.job import Job
from launchers.signals import heeded
from megamem.errors import STOPPED, NodesMissingError

_UNREACHED = 255
"""What ssh itself ends with."""
_MORE_S = 45.0
"""What the other nodes get to end by themselves, besides `stop_seconds`."""


def commands(job: Job, token: str) -> dict[str, list[str]]:
    """The ssh command of each host. token: what the nodes of this start have in common."""
    ssh, cluster = job.cluster.ssh, job.cluster
    found = {}
    for rank, host in enumerate(ssh.hosts):
        agent = [
            *job.agent(ssh.python), "--listen",
            "--job", token, "--head", ssh.hosts[0], "--port", str(cluster.port),
            "--node-rank", str(rank), "--address", host, "--", *job.train(),
        ]  # fmt: skip
        variables = [f"{name}={value}" for name, value in job.environment.items()]
        there = f"cd {shlex.quote(str(ssh.folder or job.work))} && exec {shlex.join(['env', *variables, *agent])}"
        options = ["BatchMode=yes", "ServerAliveInterval=15", "ServerAliveCountMax=4", *ssh.options]
        words = ["ssh", "-p", str(ssh.port), *(word for option in options for word in ("-o", option))]
        found[host] = [*words, f"{ssh.user}@{host}" if ssh.user else host, there]
    return found


class _Host:
    """One ssh process and the two threads that pass its output on."""

    def __init__(self, name: str, command: list[str]) -> None:
        self.name = name
        pipe = subprocess.PIPE
        # a session of its own: a terminal's Ctrl-C reaches the hosts through this process only
        self.process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=pipe, text=True, errors="replace", start_new_session=True
        )
        streams = ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr))
        self.threads = [threading.Thread(target=self._pass_on, args=pair, daemon=True) for pair in streams]
        for thread in self.threads:
            thread.start()

    def _pass_on(self, source: IO[str], target: IO[str]) -> None:
        for line in source:
            target.write(f"[{self.name}] {line.rstrip()}\n")
            target.flush()

    def tell(self, word: str) -> None:
        """A line for the agent's `--listen`."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self.process.stdin.write(f"{word}\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """The agent takes the end of its input for SIGTERM."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def run_ssh(job: Job) -> int:
    """Start an agent on every host and wait for all; returns the code that says most about what was wrong.

    SIGTERM and SIGINT are passed on. Once too few hosts are left, those get some time to end, and are asked to then.
    Raises: NodesMissingError if a host cannot be reached.
    """
    hosts: list[_Host] = []
    ended: list[int] = []
    lost: list[str] = []
    with _signals_passed_on(hosts):
        hosts += [_Host(name, command) for name, command in commands(job, str(uuid.uuid4())).items()]
        deadline: float | None = None
        running = list(hosts)
        while running:
            time.sleep(0.1)
            for host in [host for host in running if host.process.poll() is not None]:
                running.remove(host)
                code = host.process.returncode
                if code == _UNREACHED:
                    lost.append(host.name)
                else:
                    ended.append(code if code >= 0 else 128 - code)
                if code and len(running) < job.fits[0]:
                    patience = 0.0 if code == _UNREACHED else job.cluster.stop_seconds + _MORE_S
                    deadline = min(deadline or math.inf, time.monotonic() + patience)
            if deadline is not None and time.monotonic() > deadline:
                for host in running:
                    host.close()
                deadline = None
    for host in hosts:
        for thread in host.threads:
            thread.join(5)
    code = of_nodes(ended)
    if lost and (not ended or code == STOPPED):
        raise NodesMissingError(f"ssh.hosts: {', '.join(lost)}: ssh could not connect, or lost the connection")
    return code


@contextmanager
def _signals_passed_on(hosts: list[_Host]) -> Iterator[None]:
    def tell(number: int, frame: FrameType | None) -> None:
        for host in hosts:
            host.tell(signal.Signals(number).name)

    before = {number: signal.signal(number, tell) for number in heeded()}
    try:
        yield
    finally:
        for host in hosts:  # only if something went wrong here
            if host.process.poll() is None:
                host.close()
        for number, handler in before.items():
            signal.signal(number, handler)
