"""Nodes of one job: what the ranks of one end with, all end with; what may pass is tried again by all."""

from __future__ import annotations

import os
import re
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.agent import Node, run_agent
from megamem.errors import STOPPED, DataError, MegamemError, NodesMissingError, StuckRankError
from tests.integration.ports import free_port
from tests.integration.ranks import CONTEXT

pytestmark = pytest.mark.distributed
FIRST = "os.environ['RANK'] == '0'"
AGAIN = "os.environ['TORCHELASTIC_RESTART_COUNT']"


class Nodes:
    """Agents on addresses of the loopback, whose ranks run a line of Python. A context manager."""

    def __init__(self, folder: Path, line: str, nodes: int = 2, **settings) -> None:
        self.folder = folder
        self.node = Node(
            **{
                "processes": 1, "job": "test", "fits": (2,), "head": "127.0.0.2", "port": free_port(), "join_s": 60,
                "stop_s": 20, **settings,
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
        process = CONTEXT.Process(target=_agent, args=(node, self.command, self.folder / f"out-{rank}"), daemon=True)
        process.start()
        self.agents.append(process)

    def codes(self, timeout_s: float = 60) -> list[int | None]:
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


def _agent(node: Node, command: list[str], out: Path) -> None:
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


def test_what_trying_again_does_not_mend_ends_all_at_once(tmp_path):
    """The other node's rank would have slept on; a restart would have printed a second time."""
    line = f"print('begun', flush=True); sys.exit({DataError.exit_code}) if {FIRST} else time.sleep(300)"
    with Nodes(tmp_path, line, max_restarts=3) as nodes:
        assert nodes.codes() == [DataError.exit_code] * 2
        assert nodes.output().count("begun") == 2


def test_the_code_that_says_more_is_that_of_all(tmp_path):
    """The head node's rank ends first, with a plain 1, because another has ended."""
    line = f"sys.exit(1) if {FIRST} else (time.sleep(1), sys.exit({StuckRankError.exit_code}))"
    with Nodes(tmp_path, line) as nodes:
        assert nodes.codes() == [StuckRankError.exit_code] * 2


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
        assert nodes.codes(120) == [0, 0], nodes.output()
        said = nodes.output()
    assert [said.count(f"try {count}") for count in range(3)] == [2, 2, 0]
    assert "megamem: 2 node(s) x 1 rank(s) start, restart 1 of at most 1\n" in said


def test_restarts_come_to_an_end(tmp_path):
    with Nodes(tmp_path, f"sys.exit({StuckRankError.exit_code})", max_restarts=1) as nodes:
        assert nodes.codes(120) == [StuckRankError.exit_code] * 2
        starts = re.findall(r"rank\(s\) start(.*)", nodes.output())
    assert starts == ["", ", restart 1 of at most 1"]


SAVES = (
    "import signal; signal.signal(15, lambda *_: (time.sleep({seconds}), print('saved', flush=True), os._exit(75))); "
    "print('begun', flush=True); time.sleep(300)"
)


@pytest.mark.slow
def test_a_signal_to_one_node_gives_its_ranks_the_time_to_save(tmp_path):
    """And the other node, whose rank ends with STOPPED too, as ranks agree to, waits for it."""
    line = f"exec({SAVES.format(seconds=3)!r}) if {FIRST} else (time.sleep(8), print('saved'), sys.exit({STOPPED}))"
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
    with Nodes(tmp_path, "pass", fits=(1, 3)) as nodes:
        assert nodes.codes(120) == [NodesMissingError.exit_code] * 2
        assert nodes.output().count("megamem: nodes: 2 joined, but batch and layout fit 1 or 3 nodes; ") == 2


@pytest.mark.slow
def test_a_node_that_joins_later_is_no_stop(tmp_path):
    """The ranks of both nodes end with STOPPED, as ranks agree to, when the first agent makes room for the third."""
    stop = tmp_path / "stop"
    line = (
        f"world = os.environ['WORLD_SIZE']; print('world', world, flush=True); world == '3' and sys.exit(0); "
        f"exec({JOINS.format(stop=str(stop))!r})"
    )
    with Nodes(tmp_path, line, fits=(2, 3), max_restarts=1) as nodes:
        nodes.wait_for("(?s)world 2.*world 2")
        nodes.add()
        assert nodes.codes(120) == [0, 0, 0], nodes.output()
        assert nodes.output().count("world 3") == 3


JOINS = """
import pathlib, signal
stop = pathlib.Path({stop!r})
signal.signal(15, lambda *_: stop.touch())
while not stop.exists():
    time.sleep(0.1)
sys.exit(75)
"""
