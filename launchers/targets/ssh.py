"""Machines that are reached by ssh: an agent on each, their output here, one exit code."""

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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import IO, Annotated, ClassVar

from pydantic import Field

from launchers.codes import code_of_nodes
from launchers.config import ClusterConfig, Port, Word
from launchers.job import Job
from launchers.signals import not_ignored
from launchers.target import Report, Target, register
from megamem.config.run import RunConfig
from megamem.errors import STOPPED, ConfigError, NodesMissingError

_UNREACHED = 255
"""The exit code of ssh itself where it could not connect or lost the connection."""
_EXTRA_S = 45.0
"""Seconds that the other nodes have to end by themselves, besides `stop_seconds`."""


@register
class SshTarget(Target):
    """Machines that are reached by ssh with a key."""

    name: ClassVar[str] = "ssh"

    hosts: tuple[Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9.:_-]*$")], ...] = ()
    """Names or addresses, one per node, by which the nodes reach one another too; the first is the head node."""
    user: Annotated[str, Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*$")] | None = None
    """User on the hosts; ssh's default if not given."""
    port: Port = 22
    """Port of sshd."""
    options: tuple[Word, ...] = ()
    """Options of ssh as after -o, such as `IdentityFile=/home/me/.ssh/cluster`."""
    python: Word = "python"
    """Python on the hosts that has megamem."""
    folder: Path | None = None
    """Working folder on the hosts, to which relative paths of the run refer; that of the command if not given."""

    def check(self, cluster: ClusterConfig) -> None:
        """See `Target.check`."""
        if len(self.hosts) != cluster.nodes:
            raise ConfigError(
                f"ssh.hosts: {len(self.hosts)} given, but nodes is {cluster.nodes}; list one host per node"
            )
        if len(set(self.hosts)) != len(self.hosts):
            raise ConfigError(f"ssh.hosts: {', '.join(self.hosts)} names a host twice")

    def place(self, config: RunConfig, folder: Path) -> tuple[Path, Path]:
        """See `Target.place`."""
        here = Path.cwd()
        if self.folder and not folder.is_absolute() and self.folder != here:
            raise ConfigError(
                f"runs_folder: {config.runs_folder} is another folder on the hosts, where ssh.folder is "
                f"{self.folder}, than here; give an absolute path that all see"
            )
        return folder, self.folder or here

    def files(self, job: Job, config: str) -> dict[str, str]:
        """Return one ssh command per host, to be read; `start` runs them with a name of its own for the job."""
        lines = [shlex.join(command) for command in self.commands(job, "JOB").values()]
        return {"commands.txt": "\n".join(lines) + "\n"}

    def start(self, job: Job, submit: bool, report: Report) -> int:
        """Start an agent on every host and wait for all; see `run_hosts`."""
        return run_hosts(job, self.commands(job, str(uuid.uuid4())))

    def commands(self, job: Job, name: str) -> dict[str, list[str]]:
        """Return the ssh command of each host. name: of the job, the same for all nodes of a start and for no other."""
        commands = {}
        for rank, host in enumerate(self.hosts):
            agent = [
                *job.agent_command(self.python), "--listen",
                "--job", name, "--head", self.hosts[0], "--port", str(job.cluster.port),
                "--node-rank", str(rank), "--address", host, "--", *job.train_arguments(),
            ]  # fmt: skip
            variables = [f"{name}={value}" for name, value in job.environment.items()]
            remote = f"cd {shlex.quote(str(job.work_folder))} && exec {shlex.join(['env', *variables, *agent])}"
            options = ["BatchMode=yes", "ServerAliveInterval=15", "ServerAliveCountMax=4", *self.options]
            words = ["ssh", "-p", str(self.port), *(word for option in options for word in ("-o", option))]
            commands[host] = [*words, f"{self.user}@{host}" if self.user else host, remote]
        return commands


class _Host:
    """One ssh process and the two threads that pass its output on."""

    def __init__(self, name: str, command: Sequence[str], token: str) -> None:
        """Start `command`. name: what its output is labelled with; token: that of the job."""
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
        self.send(token)  # by its input, as everybody on a machine may see commands

    def _pass_on(self, source: IO[str], target: IO[str]) -> None:
        """Copy lines from the host to this process's output until they end."""
        for line in source:
            target.write(f"[{self.name}] {line.rstrip()}\n")
            target.flush()

    def send(self, line: str) -> None:
        """Send a line to the agent, which reads them with `--listen`."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError, ValueError):  # it has ended
            self.process.stdin.write(f"{line}\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Close the agent's input, whose end it takes for SIGTERM."""
        assert self.process.stdin is not None
        with contextlib.suppress(OSError):
            self.process.stdin.close()


def run_hosts(job: Job, commands: Mapping[str, Sequence[str]]) -> int:
    """Start the agents of all hosts and wait for them; return the exit code that says most about what was wrong.

    SIGTERM and SIGINT are passed on. Once too few hosts are left for the job, the others have some time to end by
    themselves before they are told to.

    Args:
        commands: the ssh command by host.

    Raises: NodesMissingError if a host cannot be reached.
    """
    hosts: list[_Host] = []
    ended: list[int] = []
    lost: list[str] = []
    with signals_passed_on(hosts):
        hosts += [_Host(name, command, job.token) for name, command in commands.items()]
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
                # an unreachable host will not say what was wrong, so there is nothing to wait for
                if code and len(running) < job.node_counts[0]:
                    patience = 0.0 if code == _UNREACHED else job.cluster.stop_seconds + _EXTRA_S
                    deadline = min(deadline or math.inf, time.monotonic() + patience)
            if deadline is not None and time.monotonic() > deadline:
                for host in running:
                    host.close()
                deadline = None
    for host in hosts:
        for thread in host.threads:
            thread.join(5)
    code = code_of_nodes(ended)
    if lost and (not ended or code == STOPPED):
        raise NodesMissingError(f"ssh.hosts: {', '.join(lost)}: ssh could not connect, or lost the connection")
    return code


@contextmanager
def signals_passed_on(hosts: Sequence[_Host]) -> Iterator[None]:
    """Pass signals to stop on to the agents of `hosts`, to which hosts may still be added, while the block runs."""

    def send(number: int, frame: FrameType | None) -> None:
        for host in hosts:
            host.send(signal.Signals(number).name)

    before = {number: signal.signal(number, send) for number in not_ignored()}
    try:
        yield
    finally:
        for host in hosts:  # only if something went wrong here
            if host.process.poll() is None:
                host.close()
        for number, handler in before.items():
            signal.signal(number, handler)
