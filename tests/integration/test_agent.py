"""Nodes of one job: what the ranks of one end with, all end with; what may pass is tried again by all."""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from launchers import agent as agents
from launchers.agent import run_agent
from launchers.node import TOKEN, Node
from launchers.process import Signals
from megamem.errors import (
    STOPPED,
    CheckpointError,
    DataError,
    MegamemError,
    NodesMissingError,
    NonFiniteError,
    StuckRankError,
)
from tests.integration.commands import environment
from tests.integration.ports import free_port
from tests.integration.ranks import CONTEXT

pytestmark = pytest.mark.distributed
FIRST = "os.environ['RANK'] == '0'"
AGAIN = "os.environ['TORCHELASTIC_RESTART_COUNT']"


class Nodes:
    """Agents on addresses of the loopback, whose ranks run a line of Python. A context manager.

    ignored: signals that the agents were told to ignore; failed_s: what ranks get to end after others have failed.
    """

    def __init__(self, folder: Path, line: str, nodes: int = 2, ignored=(), failed_s: int = 30, **settings) -> None:
        self.folder, self.more = folder, (ignored, failed_s)
        self.node = Node(
            **{
                "processes": 1, "job": "test", "token": "known to both", "node_counts": (2,), "head": "127.0.0.2",
                "port": free_port(),
                "join_s": 60, "stop_s": 20, **settings,
            }
        )  # fmt: skip
        self.command = [sys.executable, "-c", f"import os, sys, time; {line}"]
        self.agents = []
        for _ in range(nodes):
            self.add()

    def __enter__(self) -> Nodes:
        return self

    def __exit__(self, *_: object) -> None:
        for agent in self.agents:
            if agent.is_alive():
                agent.kill()
            agent.join()

    def add(self) -> None:
        """One more node."""
        rank = len(self.agents)
        head = self.node.is_head and rank == 0
        node = replace(self.node, is_head=head, address=f"127.0.0.{2 + rank}")
        arguments = (node, self.command, self.folder / f"out-{rank}", *self.more)
        process = CONTEXT.Process(target=_agent, args=arguments, daemon=True)
        process.start()
        self.agents.append(process)

    def codes(self, timeout_s: float = 300) -> list[int | None]:
        deadline = time.monotonic() + timeout_s
        for agent in self.agents:
            agent.join(max(0.0, deadline - time.monotonic()))
        return [agent.exitcode for agent in self.agents]

    def output(self) -> str:
        paths = [self.folder / f"out-{rank}" for rank in range(len(self.agents))]
        return "".join(path.read_text() for path in paths if path.exists())

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + 60
        while not re.search(pattern, self.output()):
            assert time.monotonic() < deadline, self.output()
            time.sleep(0.05)


def _agent(node: Node, command: list[str], out: Path, ignored: tuple[signal.Signals, ...], failed_s: int) -> None:
    for number in Signals.NUMBERS:  # whatever the tests themselves were told to ignore, as under nohup
        signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)
    agents._FAILED_S = failed_s
    for descriptor in (1, 2):
        os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT | os.O_APPEND), descriptor)
    try:
        code = run_agent(node, command)
    except MegamemError as error:
        os.write(2, f"megamem: {error}\n".encode())
        code = error.exit_code
    os._exit(code)


def test_ranks_know_their_world(tmp_path):
    line = "print(*(os.environ[k] for k in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'MASTER_ADDR')))"
    with Nodes(tmp_path, line, processes=2) as nodes:
        assert nodes.codes() == [0, 0]
        said = nodes.output()
    ranks = re.findall(r"^(\d) (.*)$", said, re.MULTILINE)
    assert dict(ranks) == {str(rank): f"4 {rank % 2} 2 127.0.0.2" for rank in range(4)}
    assert "megamem: 2 node(s) x 2 rank(s) start\n" in said


def test_a_stranger_at_the_port_of_the_rendezvous_ends_nothing(tmp_path):
    """It writes wherever the nodes have written, and the code of an end where they will look for one."""
    done = tmp_path / "done"
    line = f"print('begun', flush=True)\nwhile not os.path.exists({str(done)!r}): time.sleep(0.1)"
    with Nodes(tmp_path, line) as nodes:
        nodes.wait_for("begun\n(.*\n)*.*begun")
        stranger = TCPStore(nodes.node.head, nodes.node.port, is_master=False, timeout=timedelta(seconds=10))
        for key in {*stranger.list_keys(), "megamem/test/0/code", "megamem/test/0/joined"}:
            stranger.set(key, "3")
        time.sleep(4)  # the agents look each second, and torchrun every five
        done.touch()
        assert nodes.codes() == [0, 0], nodes.output()
        ignored = re.findall(r"megamem: ignored what stands at '(.*)' in the job's store", nodes.output())
        assert len(ignored) == 2, nodes.output()


def test_what_trying_again_does_not_mend_ends_all_at_once(tmp_path):
    """The other node's rank would have slept on; a restart would have printed a second time."""
    other = str(tmp_path / "other")
    line = (
        f"print('begun', flush=True)\nif not {FIRST}: open({other!r}, 'w').close(); time.sleep(300)\n"
        f"while not os.path.exists({other!r}): time.sleep(0.05)\nsys.exit({DataError.exit_code})"
    )
    with Nodes(tmp_path, line, max_restarts=3) as nodes:
        assert nodes.codes() == [DataError.exit_code] * 2
        assert nodes.output().count("begun") == 2


def test_the_code_that_says_more_is_that_of_all(tmp_path):
    """The head node's rank ends first, with a plain 1, because another has ended."""
    line = f"sys.exit(1) if {FIRST} else (time.sleep(1), sys.exit({StuckRankError.exit_code}))"
    with Nodes(tmp_path, line) as nodes:
        assert nodes.codes() == [StuckRankError.exit_code] * 2


def test_a_code_that_says_why_is_not_hidden_by_an_abort_elsewhere(tmp_path):
    """As CUDA's ranks end when they lose a peer, which has begun by then however slowly this machine starts it."""
    other = str(tmp_path / "other")
    line = (
        f"print('begun', flush=True)\nwhile {FIRST} and not os.path.exists({other!r}): time.sleep(0.05)\n"
        f"if {FIRST}: os.abort()\nopen({other!r}, 'w').close(); time.sleep(1); sys.exit({NonFiniteError.exit_code})"
    )
    with Nodes(tmp_path, line, max_restarts=3) as nodes:
        assert nodes.codes() == [NonFiniteError.exit_code] * 2
        assert nodes.output().count("begun") == 2


def test_what_was_wrong_is_told_before_the_other_ranks_of_the_node_are_ended(tmp_path):
    """The last rank does not listen to SIGTERM for longer than nodes wait for one another's words."""
    line = (
        "import signal; rank = os.environ['RANK']; signal.signal(15, signal.SIG_IGN); print('begun', flush=True); "
        f"time.sleep({{'2': 3, '3': 12}}.get(rank, 3.5)); sys.exit({NonFiniteError.exit_code} if rank == '2' else 1)"
    )
    with Nodes(tmp_path, line, processes=2, max_restarts=3) as nodes:
        assert nodes.codes() == [NonFiniteError.exit_code] * 2, nodes.output()
        assert nodes.output().count("begun") == 4


def test_a_rank_that_the_agent_ends_is_not_blamed(tmp_path):
    line = f"time.sleep(300) if {FIRST} else sys.exit(1)"
    with Nodes(tmp_path, line, nodes=1, processes=2, node_counts=(1,)) as nodes:
        assert nodes.codes() == [MegamemError.exit_code]
        assert nodes.output() == ""


def test_a_killed_rank_is_named_with_its_host(tmp_path):
    line = f"time.sleep(1) if {FIRST} else os.kill(os.getpid(), 9); sys.exit(1)"
    with Nodes(tmp_path, line) as nodes:
        assert nodes.codes() == [128 + signal.SIGKILL] * 2
        assert f"megamem: rank 1 on {socket.gethostname()} was killed by SIGKILL\n" in nodes.output()


@pytest.mark.slow
def test_what_may_pass_is_tried_again_by_all(tmp_path):
    line = (
        f"print('try', {AGAIN}, flush=True); "
        f"({AGAIN} == '0') and (sys.exit({StuckRankError.exit_code}) if {FIRST} else time.sleep(300))"
    )
    with Nodes(tmp_path, line, max_restarts=1) as nodes:
        assert nodes.codes() == [0, 0], nodes.output()
        said = nodes.output()
    assert [said.count(f"try {count}") for count in range(3)] == [2, 2, 0]
    assert "megamem: 2 node(s) x 1 rank(s) start, restart 1 of at most 1\n" in said


def test_restarts_come_to_an_end(tmp_path):
    with Nodes(tmp_path, f"sys.exit({StuckRankError.exit_code})", max_restarts=1) as nodes:
        assert nodes.codes() == [StuckRankError.exit_code] * 2
        starts = re.findall(r"rank\(s\) start(.*)", nodes.output())
    assert starts == ["", ", restart 1 of at most 1"]


SAVES = (
    "import signal; "
    "signal.signal(15, lambda *_: (time.sleep({seconds}), print('saved', flush=True), os._exit({code}))); "
    "print('begun', os.getpid(), flush=True); time.sleep(300)"
)


class TestStops:
    """One node of one rank."""

    def node(self, folder, seconds=0, code=STOPPED, **settings):
        nodes = Nodes(folder, SAVES.format(seconds=seconds, code=code), nodes=1, node_counts=(1,), **settings)
        nodes.wait_for("begun")
        return nodes

    def test_a_hangup_is_a_stop_too(self, tmp_path):
        """Ranks save at SIGTERM and SIGINT only."""
        with self.node(tmp_path) as nodes:
            os.kill(nodes.agents[0].pid, signal.SIGHUP)
            assert nodes.codes() == [STOPPED]
            assert "saved" in nodes.output()

    def test_a_signal_that_was_ignored_before_is_ignored(self, tmp_path):
        with self.node(tmp_path, ignored=(signal.SIGHUP,)) as nodes:
            os.kill(nodes.agents[0].pid, signal.SIGHUP)
            assert nodes.codes(2) == [None], nodes.output()
            os.kill(nodes.agents[0].pid, signal.SIGTERM)
            assert nodes.codes() == [STOPPED]

    def test_a_stop_whose_checkpoint_fails_says_so(self, tmp_path):
        with self.node(tmp_path, code=CheckpointError.exit_code) as nodes:
            os.kill(nodes.agents[0].pid, signal.SIGTERM)
            assert nodes.codes() == [CheckpointError.exit_code]

    def test_ranks_that_had_to_be_killed_have_not_saved(self, tmp_path):
        """With STOPPED a scheduler would start the job again and again."""
        with self.node(tmp_path, seconds=300, stop_s=1) as nodes:
            os.kill(nodes.agents[0].pid, signal.SIGTERM)
            assert nodes.codes() == [128 + signal.SIGKILL]
            assert "megamem: rank 0 was killed by SIGKILL while it stopped; " in nodes.output()
            assert "stop_seconds (1)" in nodes.output()

    def test_no_number_of_signals_leaves_ranks_behind(self, tmp_path):
        with self.node(tmp_path, seconds=300) as nodes:
            rank = int(re.search(r"begun (\d+)", nodes.output())[1])
            for _ in range(3):
                os.kill(nodes.agents[0].pid, signal.SIGTERM)
                assert nodes.codes(1.5)[0] in (None, 128 + signal.SIGKILL)  # signals within a second are one
            assert nodes.codes() == [128 + signal.SIGKILL]
            with pytest.raises(ProcessLookupError):
                os.kill(rank, 0)


def test_nohup_holds_before_ranks_are_there(tmp_path):
    """The command of a node, which waits for another."""
    words = ["-m", "megamem", "agent", "--nodes", "2", "--port", str(free_port()), "--", "doctor"]
    command = ["nohup", sys.executable, *words]
    variables = {**environment(), TOKEN: "known to both"}
    with subprocess.Popen(command, env=variables, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        deadline = time.monotonic() + 60
        while not caught(process.pid, signal.SIGTERM):
            assert time.monotonic() < deadline, process.poll()
            time.sleep(0.05)
        process.send_signal(signal.SIGHUP)
        time.sleep(1)
        assert process.poll() is None
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=300)
        assert process.returncode == STOPPED


def caught(pid: int, number: signal.Signals) -> bool:
    """Whether a process has a handler of its own for a signal."""
    found = re.search(r"^SigCgt:\s*(\w+)$", Path(f"/proc/{pid}/status").read_text(), re.MULTILINE)
    return bool(int(found[1], 16) >> (number - 1) & 1)


@pytest.mark.slow
def test_a_signal_to_one_node_gives_its_ranks_the_time_to_save(tmp_path):
    """And the other node, whose rank ends with STOPPED too, as ranks agree to, waits for it."""
    saves = SAVES.format(seconds=3, code=STOPPED)
    line = f"exec({saves!r}) if {FIRST} else (time.sleep(8), print('saved'), sys.exit({STOPPED}))"
    with Nodes(tmp_path, line, max_restarts=3) as nodes:
        nodes.wait_for("begun")
        os.kill(nodes.agents[0].pid, signal.SIGTERM)
        assert nodes.codes() == [STOPPED, STOPPED]
        assert nodes.output().count("saved") == 2


def test_a_signal_while_nodes_wait_for_one_another(tmp_path):
    with Nodes(tmp_path, "pass", nodes=1) as nodes:
        time.sleep(3)
        os.kill(nodes.agents[0].pid, signal.SIGTERM)
        assert nodes.codes(20) == [STOPPED]


def test_a_node_that_does_not_come_is_missed_by_number(tmp_path):
    with Nodes(tmp_path, "pass", nodes=1, join_s=5) as nodes:
        assert nodes.codes() == [NodesMissingError.exit_code]
        line = (
            r"megamem: nodes: the job needs 2 node\(s\), but within 5 s \(join_seconds\) only 127\.0\.0\.2 joined at "
        )
        assert re.match(line, nodes.output()), nodes.output()


@pytest.mark.slow
def test_a_head_node_that_does_not_answer_is_named(tmp_path):
    with Nodes(tmp_path, "pass", nodes=1, is_head=False, join_s=3) as nodes:
        assert nodes.codes() == [NodesMissingError.exit_code]
        line = r"megamem: 127\.0\.0\.2:\d+: no answer from the head node within 3 s \(join_seconds\)\n"
        # here, in a process that has imported torch before, after what torch has to say
        assert re.search(line, nodes.output()), nodes.output()


@pytest.mark.slow
def test_a_number_of_nodes_that_does_not_fit_says_which_would(tmp_path):
    """torchrun waits half a minute for more nodes than it needs."""
    with Nodes(tmp_path, "pass", node_counts=(1, 3)) as nodes:
        assert nodes.codes() == [NodesMissingError.exit_code] * 2
        assert nodes.output().count("megamem: nodes: 2 joined, but batch and layout fit 1 or 3 nodes; ") == 2


@pytest.mark.slow
def test_a_node_that_joins_later_is_no_stop(tmp_path):
    """The ranks of both nodes end with STOPPED, as ranks agree to, when the first agent makes room for the third.

    They get the time to save, not that of ranks whose peers have failed; and nothing has failed that could be counted.
    """
    stop = tmp_path / "stop"
    line = (
        f"world = os.environ['WORLD_SIZE']; print('world', world, flush=True); world == '3' and sys.exit(0); "
        f"exec({JOINS.format(stop=str(stop))!r})"
    )
    with Nodes(tmp_path, line, node_counts=(2, 3), max_restarts=0, failed_s=1) as nodes:
        nodes.wait_for("(?s)world 2.*world 2")
        nodes.add()
        assert nodes.codes() == [0, 0, 0], nodes.output()
        assert nodes.output().count("world 3") == 3
        assert nodes.output().count("saved") == 2


@pytest.mark.slow
def test_a_node_that_would_not_fit_leaves_the_others_alone(tmp_path):
    line = "print('world', os.environ['WORLD_SIZE'], flush=True); time.sleep(12)"
    with Nodes(tmp_path, line, node_counts=(2, 4)) as nodes:
        nodes.wait_for("(?s)world 2.*world 2")
        nodes.add()
        assert nodes.codes() == [0, 0, NodesMissingError.exit_code], nodes.output()
        assert nodes.output().count("world") == 2


JOINS = """
import pathlib, signal
stop = pathlib.Path({stop!r})
signal.signal(15, lambda *_: stop.touch())
while not stop.exists():
    time.sleep(0.1)
time.sleep(3)
print('saved', flush=True)
sys.exit(75)
"""
